#include "common/base/version.h"

namespace gradwire {

std::string_view Version() { return GRADWIRE_VERSION; }

}  // namespace gradwire
