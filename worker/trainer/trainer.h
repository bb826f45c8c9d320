#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "compressors/compression_rules.h"
#include "worker/client/client.h"
#include "worker/trainer/dataset.h"
#include "worker/trainer/model.h"
#include "worker/trainer/samples.h"

namespace gradwire::trainer {

/// Bytes of gradients and parameters one way or the other, before and after compression.
struct Volume {
  std::uint64_t raw_push_bytes = 0;
  std::uint64_t raw_pull_bytes = 0;
  std::uint64_t sent_bytes = 0;  // on the wire: frames with the transport's framing
  std::uint64_t received_bytes = 0;
};

/// Where a run stands; rates are over the steps since the report before.
struct Progress {
  std::uint64_t step = 0;  // steps done
  std::uint64_t total_steps = 0;
  double loss = 0.0;  // mean over this worker's batches
  double steps_per_second = 0.0;
  double raw_megabytes_per_second = 0.0;  // pushed and pulled
  double wire_megabytes_per_second = 0.0;
  double ratio = 0.0;  // raw over wire; 0 if nothing went over a wire
  double gflops = 0.0;
  OverlapFigures overlap;      // of the client
  std::uint32_t interval = 0;  // of the filter; 0: there is none
};

/// How well a model guesses labels.
struct TestResult {
  double loss = 0.0;      // mean cross entropy, in nats a sample
  double accuracy = 0.0;  // share of samples whose label is the likeliest
};

/// The model on the way.
struct CurvePoint {
  std::uint64_t step = 0;  // steps done
  double seconds = 0.0;    // since the first one began, without the time of the tests
  double loss = 0.0;       // mean over this worker's batches since the point before
  TestResult test;
};

struct TrainOptions {
  std::uint64_t steps = 0;
  std::size_t batch = 64;  // of each worker
  double rate = 0.05;      // peak
  /// Who updates the parameters: "none", which is SGD with the momentum and the weight decay below,
  /// or a method with its own parameters, "lans(beta1=0.95)" (docs/methods.md).
  std::string method = "none";
  CompressionRules compression;  // of the job, which the method is checked against
  double momentum = 0.5;
  double weight_decay = 0.0;  // on weights, not on biases
  std::uint64_t warmup_steps = 0;
  std::uint64_t seed = 1;
  double progress_every_s = 0.0;  // 0: never
  std::function<void(const Progress&)> on_progress;
  /// Tests the model on `test_data` after every so many steps, on this rank alone: the others wait
  /// in their next step. 0: never.
  std::uint64_t test_every = 0;
  const Samples* test_data = nullptr;  // wanted with test_every
  /// Saves the run into the folder after every so many steps, but for the last one, and with 0
  /// never on the way. The folder is made if it is not there; what it has of earlier steps is
  /// removed.
  std::string save_folder;
  std::uint64_t save_every = 0;
  /// Ends after so many steps, which are saved if there is a save_folder; the learning rate is that
  /// of the whole run. 0: trains to the end.
  std::uint64_t stop_at = 0;
  /// Goes on with the newest run that all ranks have saved there; empty: begins anew.
  std::string restore_folder;
  /// Called after every step with its loss.
  std::function<void(std::uint64_t step, double loss)> on_step;
};

/// What a run did, on this worker.
struct TrainReport {
  std::uint64_t steps = 0;
  std::uint64_t first_step = 0;  // of which so many were done before: the run was restored
  // What follows is of the steps that were done here.
  double first_loss = 0.0;
  double last_loss = 0.0;          // mean over the last steps, at most 100
  double seconds = 0.0;            // of the gradient rounds, without start and tests
  double compute_seconds = 0.0;    // in forward, backward and update
  double wait_seconds = 0.0;       // in Client::Wait
  double hand_over_seconds = 0.0;  // in Client::PushPullAsync and EndStep
  double flops = 0.0;              // of all matrix products; over compute_seconds it is the speed
  Volume gradients;
  Volume
      broadcast;  // of the initial parameters; raw bytes count as pushed on rank 0, else as pulled
  double broadcast_seconds = 0.0;
  std::uint64_t skipped_updates = 0;  // tensor updates left out because the gradient wasn't finite
  std::uint64_t nonfinite_units = 0;  // void rounds that the client counted
  OverlapFigures overlap;             // of the last steps, as the client measures it
  std::uint32_t interval = 0;         // of the filter at the end; 0: there is none
  std::vector<CurvePoint> curve;      // of options.test_every
  std::uint64_t digest = 0;           // of the final parameters; equal on all ranks

  double gflops() const { return compute_seconds > 0.0 ? flops / compute_seconds * 1e-9 : 0.0; }
};

/// A peak learning rate that suits "none" or a method by its name, without parameters.
double DefaultRate(std::string_view method);

/// Trains `model` together with all workers of `client`.
///
/// Flow: tensors are declared (front layers most urgent) and rank 0's parameters broadcast. In
/// every step a gradient is pushed as soon as Backward has it, last layers first, and the next
/// Forward waits, layer by layer, just for the gradients of the layer it needs, and updates it
/// then. There is no barrier at the end of a step. After the last step all updates are brought in,
/// and the ranks compare their parameters.
///
/// A gradient that comes back with a NaN or infinity leaves its tensor and its momentum alone for
/// that step. All ranks get the same bytes back, so all do the same.
///
/// Under a filter with `inactive: skip` what was held back in a step keeps its parameters and its
/// momentum, which then counts the steps in which it was sent; with `zero_fill` its gradient is
/// zero, and momentum and weight decay go on.
///
/// A method (Optimizer) makes of a gradient what is pushed, a momentum perhaps, and of what comes
/// back the update, both for whole tensors. Under a filter with `skip` its tensors are the
/// stretches that are always sent together: mostly whole tensors as well, but with an interval that
/// is measured the units' parts of them, since its classes change.
///
/// The result depends on model, data, options and num_workers alone (on one type of machine),
/// never on time or threads, as long as the client's results don't.
///
/// A run that is saved waits for the updates of its step, and then goes on as if nothing had been.
/// One that is restored goes on bit for bit as the one that was saved, on the same number of
/// workers, under the same options and plan. It does not look at whether the data is the same.
///
/// Errors: InvalidArgument for options that make no sense, a method that does not go with the job's
/// compression among them; NotFound for a method that does not exist; the client's; CorruptData,
/// InvalidArgument or Internal on every rank if a saved run can't be restored on one, and Internal
/// if it can't be saved; Internal if the ranks' parameters differ, at the end or where they were
/// restored. After an error the client's handles are waited for before the
/// return, because the client may still read the model's memory.
Result<TrainReport> Train(Client& client, Model& model, const Samples& data,
                          const TrainOptions& options);

/// Tests a model on all samples; zeros if there are none.
TestResult Evaluate(Model& model, const Samples& data);

/// A run as it is written to the --json file.
struct RunSummary {
  std::string model;
  std::uint32_t rank = 0;
  std::uint32_t workers = 1;
  std::size_t batch = 0;
  std::uint64_t seed = 0;
  double rate = 0.0;
  std::string method;  // as configured
  std::size_t num_parameters = 0;
  std::string kernels;  // which build of the kernels ran
  std::string uplink;   // compressors as configured
  std::string downlink;
  bool has_test = false;  // rank 0 only
  TestResult test;
  TrainReport report;
};

/// One JSON object, a line for each key:
///   model, rank, workers, batch (of one worker), seed, rate, method (as configured), parameters
///   (how many), kernels, uplink, downlink (compressors as configured)
///   steps, seconds (gradient rounds only), steps_per_second, restored_step (after which step a
///   restored run went on, with numbers of the steps since then; null if it began anew)
///   compute_seconds, wait_seconds, hand_over_seconds, gflops
///   first_loss, last_loss (mean of the last 100 steps at most), in nats
///   test_loss (mean over the test set, in nats), accuracy (share of it that is right); both null
///   but on rank 0
///   gradient_raw_push_bytes, gradient_raw_pull_bytes, gradient_sent_bytes, gradient_received_bytes
///   push_ratio, pull_ratio (raw over wire bytes; null if nothing went over a wire)
///   broadcast_raw_push_bytes, broadcast_raw_pull_bytes, broadcast_sent_bytes,
///   broadcast_received_bytes, broadcast_seconds (initial parameters)
///   skipped_updates, nonfinite_units
///   step_ms, comm_ms, compute_ms, exposed_ms, ccr (means of the last 16 steps, docs/operations.md;
///   null where nothing is communicated)
///   interval (of the filter at the end; null without one)
///   curve (of --test-every: [{step, seconds, loss, test_loss, accuracy}], seconds without the
///   tests) digest (16 hexadecimal digits, a string)
/// Numbers that are not finite are null.
std::string ToJson(const RunSummary& run);

/// Raw over wire bytes; 0 if nothing went over a wire.
double Ratio(std::uint64_t raw_bytes, std::uint64_t wire_bytes);

}  // namespace gradwire::trainer
