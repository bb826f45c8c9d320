#pragma once

#include <string_view>

namespace gradwire {

/// The project's version, "0.1.0", for people. Who may talk to whom is decided by
/// kProtocolVersion.
std::string_view Version();

}  // namespace gradwire
