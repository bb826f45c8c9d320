// gradwire-train: trains a small network on Fashion-MNIST or on text, alone or together with other
// workers.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/base/malloc.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "compressors/methods/method.h"
#include "worker/client/client.h"
#include "worker/trainer/dataset.h"
#include "worker/trainer/kernels.h"
#include "worker/trainer/local_client.h"
#include "worker/trainer/model.h"
#include "worker/trainer/samples.h"
#include "worker/trainer/schedule.h"
#include "worker/trainer/text.h"
#include "worker/trainer/trainer.h"

namespace gradwire::trainer {
namespace {

struct Arguments {
  ProcessOptions process;
  bool standalone = false;
  std::string model = "mlp";
  std::optional<std::string> data_dir;
  std::size_t train_limit = 0;
  std::size_t test_limit = 0;
  std::optional<std::uint64_t> steps;
  double epochs = 1.0;
  std::size_t batch = 64;
  std::string method;
  std::optional<double> rate;
  std::optional<double> momentum;
  std::optional<double> weight_decay;
  std::optional<std::uint64_t> warmup;
  std::optional<std::uint64_t> seed;
  std::string json_path;
  std::uint64_t test_every = 0;
  std::string save_folder;
  std::uint64_t save_every = 0;
  std::uint64_t stop_at = 0;
  std::string restore_folder;
  double progress_every_s = 5.0;
};

void AddOptions(CLI::App& app, Arguments& arguments) {
  const CLI::Range some_steps(std::uint64_t{1}, std::uint64_t{1'000'000'000'000});
  app.add_option("--config", arguments.process.config_path, "YAML file (else GRADWIRE_CONFIG)");
  app.add_option("--set", arguments.process.assignments, "key=value over the YAML; repeatable")
      ->allow_extra_args(false);
  app.add_option("--rank", arguments.process.rank,
                 "this worker's number (else GRADWIRE_RANK or a launcher's)");
  app.add_flag("--standalone", arguments.standalone, "train alone, without any server");
  app.add_option("--model", arguments.model, "mlp, conv or charlm (text)")->capture_default_str();
  app.add_option(
      "--data-dir", arguments.data_dir,
      fmt::format("folder with the Fashion-MNIST files, or of charlm with texts; default "
                  "{} or {}",
                  kDefaultDataDir, kDefaultTextDir));
  app.add_option("--train-limit", arguments.train_limit,
                 "use the first N training samples; 0: all");
  app.add_option("--test-limit", arguments.test_limit, "use the first N test samples; 0: all");
  CLI::Option* steps =
      app.add_option("--steps", arguments.steps, "steps to train")->check(some_steps);
  app.add_option("--epochs", arguments.epochs, "passes over the training samples")
      ->check(CLI::Range(1e-6, 1e6))
      ->capture_default_str()
      ->excludes(steps);
  app.add_option("--batch", arguments.batch, "samples of each worker in a step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--method", arguments.method,
                 "as --set method=: none (SGD) or a method with its parameters, lans(beta1=0.95)");
  app.add_option("--lr", arguments.rate,
                 "peak learning rate; falls to 0 along a cosine; default 0.05, with sgd and "
                 "dist_ef_sgdm 0.01, adamw and onebit_adam 0.001, other methods 0.01")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--momentum", arguments.momentum, "without a method; default 0.5")
      ->check(CLI::Range(0.0, 0.9999));
  app.add_option("--weight-decay", arguments.weight_decay,
                 "without a method; on weights, not on biases; default 0")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--warmup", arguments.warmup,
                 "steps in which the learning rate rises; default a twentieth, at most 100");
  app.add_option("--seed", arguments.seed, "of initialization and shuffling; default job.seed");
  app.add_option("--json", arguments.json_path,
                 "write the result to this file; by rank 0, or by all if it has {rank} in it");
  app.add_option("--test-every", arguments.test_every,
                 "rank 0 tests the model every so many steps, for the curve in --json; 0: never")
      ->capture_default_str();
  CLI::Option* save = app.add_option(
      "--save", arguments.save_folder,
      "folder for the state of the run, a file for each rank; with --save-every or --stop-at");
  CLI::Option* save_every =
      app.add_option("--save-every", arguments.save_every, "save after every so many steps")
          ->check(some_steps)
          ->needs(save);
  CLI::Option* stop_at = app.add_option("--stop-at", arguments.stop_at,
                                        "end after so many steps, saved with --save; --restore "
                                        "goes on")
                             ->check(some_steps);
  app.add_option("--restore", arguments.restore_folder,
                 "go on with the newest run that all ranks have saved in this folder");
  app.callback([save, save_every, stop_at] {
    if (save->count() > 0 && save_every->count() + stop_at->count() == 0) {
      throw CLI::ValidationError("--save", "wants --save-every or --stop-at beside it");
    }
  });
  app.add_option("--progress-every", arguments.progress_every_s,
                 "seconds between progress lines of rank 0; 0: none")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.footer(
      "Exit codes: 0; 1 failed; 2 usage or configuration; 3 not started in time; 4 stalled;\n"
      "5 peer lost.");
}

/// What the model is trained or tested on.
Result<std::unique_ptr<Samples>> LoadSamples(const Arguments& arguments, Split split) {
  const std::size_t limit = split == Split::kTrain ? arguments.train_limit : arguments.test_limit;
  if (arguments.model == kTextModel) {
    Result<Text> text = LoadText(arguments.data_dir.value_or(kDefaultTextDir), split, limit);
    GRADWIRE_RETURN_IF_ERROR(text.status());
    return std::unique_ptr<Samples>(std::make_unique<Text>(std::move(*text)));
  }
  Result<Dataset> images =
      LoadFashionMnist(arguments.data_dir.value_or(kDefaultDataDir), split, limit);
  GRADWIRE_RETURN_IF_ERROR(images.status());
  return std::unique_ptr<Samples>(std::make_unique<Dataset>(std::move(*images)));
}

int Fail(const Status& status, int exit_code) {
  LogError("trainer", status.message());
  return exit_code;
}

/// Errors: InvalidArgument for options that are there beside a method.
Status CheckMethod(const Arguments& arguments, const Config& config) {
  if (config.method.name == kNoMethod) return Status::Ok();
  for (const auto& [option, is_given] :
       {std::pair{"--momentum", arguments.momentum.has_value()},
        std::pair{"--weight-decay", arguments.weight_decay.has_value()}}) {
    if (!is_given) continue;
    return InvalidArgument(fmt::format(
        "{} is for training without a method, and method is {}: a method's parameters stand in it, "
        "as in lans(weight_decay=0.1)",
        option, ToString(config.method)));
  }
  return Status::Ok();
}

std::uint64_t StepsOf(const Arguments& arguments, std::size_t samples, std::uint32_t workers) {
  if (arguments.steps) return *arguments.steps;
  const double global_batch = static_cast<double>(arguments.batch) * workers;
  return static_cast<std::uint64_t>(
      std::ceil(arguments.epochs * static_cast<double>(samples) / global_batch));
}

void PrintProgress(const Progress& p) {
  fmt::print(
      "step {}/{}  loss {:.4f}  {:.2f} steps/s  raw {:.1f} MB/s  wire {:.1f} MB/s  ratio {:.2f}  "
      "{:.1f} GFLOP/s",
      p.step, p.total_steps, p.loss, p.steps_per_second, p.raw_megabytes_per_second,
      p.wire_megabytes_per_second, p.ratio, p.gflops);
  if (p.overlap.comm_ms > 0.0) {
    fmt::print("  CCR {:.2f}  exposed {:.1f} of {:.1f} ms", p.overlap.ccr(), p.overlap.exposed_ms,
               p.overlap.step_ms);
  }
  if (p.interval > 0) fmt::print("  interval {}", p.interval);
  fmt::print("\n");
  std::fflush(stdout);
}

void PrintVolume(const char* what, const Volume& v) {
  fmt::print("{}: pushed {} bytes as {} ({:.2f}), pulled {} bytes as {} ({:.2f})\n", what,
             v.raw_push_bytes, v.sent_bytes, Ratio(v.raw_push_bytes, v.sent_bytes),
             v.raw_pull_bytes, v.received_bytes, Ratio(v.raw_pull_bytes, v.received_bytes));
}

void PrintSummary(const RunSummary& run) {
  const TrainReport& r = run.report;
  fmt::print(
      "{} steps in {:.2f} s (compute {:.2f}, wait {:.2f}, hand-over {:.2f}), {:.1f} GFLOP/s with "
      "{} kernels\n",
      r.steps, r.seconds, r.compute_seconds, r.wait_seconds, r.hand_over_seconds, r.gflops(),
      run.kernels);
  PrintVolume("gradients", r.gradients);
  PrintVolume("initial parameters", r.broadcast);
  fmt::print("loss {:.4f} -> {:.4f}, skipped updates {}, void units {}\n", r.first_loss,
             r.last_loss, r.skipped_updates, r.nonfinite_units);
  if (r.overlap.comm_ms > 0.0) {
    fmt::print(
        "last steps: {:.2f} ms, of which {:.2f} blocked; communication {:.2f} over {:.2f} ms that "
        "can hide it: CCR {:.2f}\n",
        r.overlap.step_ms, r.overlap.exposed_ms, r.overlap.comm_ms, r.overlap.compute_ms,
        r.overlap.ccr());
  }
  fmt::print("test loss {:.4f} (perplexity {:.3f})  accuracy {:.4f}  seed {}  digest {:016x}\n",
             run.test.loss, std::exp(run.test.loss), run.test.accuracy, run.seed, r.digest);
  std::fflush(stdout);
}

Status WriteText(const std::string& path, const std::string& text) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return Unavailable(fmt::format("can't write {}", path));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) return Unavailable(fmt::format("can't write {}", path));
  return Status::Ok();
}

Status WriteJson(std::string path, const RunSummary& run) {
  const std::string kRank = "{rank}";
  const std::size_t at = path.find(kRank);
  if (path.empty() || (at == std::string::npos && run.rank != 0)) return Status::Ok();
  if (at != std::string::npos) path.replace(at, kRank.size(), fmt::format("{}", run.rank));
  return WriteText(path, ToJson(run));
}

int Main(int argc, char** argv) {
  InitLog(LogLevel::kInfo, LogFormat::kText, "worker");
  Arguments arguments;
  CLI::App app("Trains a small network on Fashion-MNIST or text through Gradwire.",
               "gradwire-train");
  AddOptions(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }

  arguments.process.role = ProcessRole::kWorker;
  if (arguments.standalone) {
    // Whatever the launcher says, this is the only worker.
    arguments.process.assignments.push_back("job.workers=1");
    if (!arguments.process.rank) arguments.process.rank = 0;
  }
  if (!arguments.method.empty()) {
    arguments.process.assignments.push_back("method=" + arguments.method);
  }
  const Result<ProcessConfig> process = LoadProcessConfig(arguments.process);
  if (!process.ok()) return Fail(process.status(), kExitUsage);
  if (process.value().is_scheduler) {
    LogInfo("config", kNoScheduler);
    return kExitOk;
  }
  const Config& config = process.value().config;
  const Result<std::uint32_t> rank = RequireRank(*process);
  if (!rank.ok()) return Fail(rank.status(), kExitUsage);
  InitLog(config.log.level, config.log.format, fmt::format("worker/{}", *rank));
  LogWarnings(*process);
  const Status method = CheckMethod(arguments, config);
  if (!method.ok()) return Fail(method, kExitUsage);

  const Result<std::unique_ptr<Samples>> train = LoadSamples(arguments, Split::kTrain);
  if (!train.ok()) {
    const bool missing = train.status().code() == StatusCode::kNotFound;
    return Fail(train.status(), missing ? kExitUsage : kExitFailed);
  }
  const std::uint64_t seed = arguments.seed.value_or(config.job.seed);
  const SampleShape shape = (*train)->shape();
  Result<std::unique_ptr<Model>> model =
      MakeModel(arguments.model, shape.height, shape.width, shape.classes, arguments.batch, seed);
  if (!model.ok()) return Fail(model.status(), kExitUsage);

  std::unique_ptr<Client> client;
  if (arguments.standalone) {
    client = MakeLocalClient();
  } else {
    Result<std::unique_ptr<Client>> connected = Client::Connect(config, *rank);
    if (!connected.ok()) {
      return Fail(connected.status(), ExitCodeOf(connected.status(), /*started=*/false));
    }
    client = std::move(connected).value();
  }

  TrainOptions options;
  options.steps = StepsOf(arguments, (*train)->size(), client->num_workers());
  options.batch = arguments.batch;
  options.rate = arguments.rate.value_or(DefaultRate(config.method.name));
  options.method = ToString(config.method);
  options.compression = config.compression;
  options.momentum = arguments.momentum.value_or(options.momentum);
  options.weight_decay = arguments.weight_decay.value_or(options.weight_decay);
  options.warmup_steps = arguments.warmup.value_or(DefaultWarmup(options.steps));
  options.seed = seed;
  options.save_folder = arguments.save_folder;
  options.save_every = arguments.save_every;
  options.stop_at = arguments.stop_at;
  options.restore_folder = arguments.restore_folder;
  std::unique_ptr<Samples> test;
  if (*rank == 0) {
    Result<std::unique_ptr<Samples>> loaded = LoadSamples(arguments, Split::kTest);
    if (!loaded.ok()) return Fail(loaded.status(), kExitFailed);
    test = std::move(loaded).value();
    options.test_every = arguments.test_every;
    options.test_data = test.get();
    options.progress_every_s = arguments.progress_every_s;
    options.on_progress = PrintProgress;
    fmt::print(
        "{} ({} parameters), method {}, {} workers, batch {} each, {} steps, seed {}, {} kernels\n",
        arguments.model, (*model)->num_parameters(), options.method, client->num_workers(),
        options.batch, options.steps, seed, gradwire_nn_variant());
    std::fflush(stdout);
  }
  Result<TrainReport> report = Train(*client, **model, **train, options);
  if (!report.ok()) return Fail(report.status(), ExitCodeOf(report.status(), /*started=*/true));

  RunSummary run;
  run.model = arguments.model;
  run.rank = *rank;
  run.workers = client->num_workers();
  run.batch = options.batch;
  run.seed = seed;
  run.rate = options.rate;
  run.method = options.method;
  run.num_parameters = (*model)->num_parameters();
  run.kernels = gradwire_nn_variant();
  run.uplink = ToString(config.compression.uplink.compressor);
  run.downlink = ToString(config.compression.downlink.compressor);
  run.report = *report;
  // The job is over: nobody has to wait for the evaluation.
  const Status closed = client->Close();
  if (!closed.ok()) return Fail(closed, ExitCodeOf(closed, /*started=*/true));
  if (*rank == 0) {
    run.has_test = true;
    run.test = Evaluate(**model, *test);
    PrintSummary(run);
  }
  const Status written = WriteJson(arguments.json_path, run);
  return written.ok() ? kExitOk : Fail(written, kExitFailed);
}

}  // namespace
}  // namespace gradwire::trainer

int main(int argc, char** argv) {
  gradwire::KeepMessageMemory();
  return gradwire::trainer::Main(argc, argv);
}
