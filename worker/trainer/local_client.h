#pragma once

#include <memory>

#include "worker/client/client.h"

namespace gradwire::trainer {

/// A Client for a job of one worker without any server: a push-pull gives the gradient back as it
/// is, at once. The baseline that everything with a network is compared with.
/// Threads: one at a time.
std::unique_ptr<Client> MakeLocalClient();

}  // namespace gradwire::trainer
