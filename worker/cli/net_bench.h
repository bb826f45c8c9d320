#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/config/config.h"
#include "common/wire/plan_data.h"
#include "worker/client/client.h"

namespace gradwire {

/// How computing is emulated: asleep, or with as much of the thread's CPU time.
enum class EmulatedCompute { kSleep, kBurn };

struct NetBenchOptions {
  std::vector<TensorDeclaration> tensors;  // in the order of the forward pass
  std::uint64_t steps = 20;                // measured
  std::uint64_t warm_up = 5;               // steps before
  double compute_ms = 100;                 // of a step
  double backward_share = 2.0 / 3.0;       // of that
  EmulatedCompute compute = EmulatedCompute::kSleep;
};

/// One step: a forward pass that waits for each tensor's average of the step before when it needs
/// it, then a backward pass that hands gradients over, the last tensor first.
struct NetBenchStep {
  double step_ms = 0;
  double compute_ms = 0;    // emulated, as it really took
  double exposed_ms = 0;    // blocked in Wait
  double hand_over_ms = 0;  // in PushPullAsync and EndStep
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint32_t interval = 0;  // the filter's; 0 without one
};

/// Bytes of payload between one worker and one server in a step, after the plan; with a filter the
/// mean over its last interval.
struct NetBenchServerBytes {
  double up = 0;
  double down = 0;
};

struct NetBenchReport {
  std::vector<NetBenchStep> steps;
  double cpu_ms = 0;  // of the process, a measured step; with what burning took
  std::size_t num_units = 0;
  std::vector<NetBenchServerBytes> servers;
  ClientStats stats;
};

/// Push-pulls a model's tensors, as one rank of a job, over emulated compute. A tensor's share of a
/// pass is its share of the elements. Errors: the client's.
Result<NetBenchReport> RunNetBench(Client& client, const Config& config,
                                   const NetBenchOptions& options);

}  // namespace gradwire
