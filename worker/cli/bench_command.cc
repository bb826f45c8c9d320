#include <fmt/format.h>
#include <stdlib.h>  // getloadavg is not in <cstdlib>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/escape.h"
#include "common/base/version.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "compressors/codecs/kernels.h"
#include "compressors/plugin/plugins.h"
#include "compressors/registry.h"
#include "worker/cli/codec_bench.h"
#include "worker/cli/commands.h"
#include "worker/cli/text_table.h"

namespace gradwire {
namespace {

/// What is measured if nobody says what: of these the compressors that this build has, and those
/// that it has beside these as they are by default. The thetas of threshold keep 0.1 % and 1 % of
/// N(0, 1).
constexpr std::string_view kDefaultSpecs[] = {
    "none",
    "fp16",
    "bf16",
    "onebit",
    "onebit(scaling=two_means)",
    "int8",
    "dithering(bits=4)",
    "dithering(bits=5)",
    "dithering(bits=6)",
    "dithering(bits=7)",
    "dithering(bits=8)",
    "natural",
    "terngrad",
    "twobit(theta=2)",
    "threshold(theta=3.29)",
    "threshold(theta=2.576)",
    "topk(ratio=0.01)",
    "topk(ratio=0.001)",
    "randomk",
};

struct Arguments {
  std::vector<std::string> specs;
  std::vector<std::string> plugins;
  std::vector<std::string> sizes = {"4MiB", "64MiB"};
  std::size_t repeats = 11;
  std::size_t threads = 1;
  std::size_t rounds = 2000;
  std::string target;
  std::string json_path;
};

std::vector<std::string> DefaultSpecs(const CompressorRegistry& registry) {
  std::vector<std::string> specs;
  for (const std::string_view spec : kDefaultSpecs) {
    if (registry.Find(spec.substr(0, spec.find('('))) != nullptr) {
      specs.emplace_back(spec);
    }
  }
  for (const CompressorInfo& info : registry.entries()) {
    const bool is_there = std::any_of(specs.begin(), specs.end(), [&](const std::string& spec) {
      return spec.substr(0, spec.find('(')) == info.name;
    });
    if (!is_there) specs.push_back(info.name);
  }
  return specs;
}

/// "4 MiB", or bytes if it is no whole number of KiB.
std::string FormatBytes(std::size_t bytes) {
  if (bytes % (1 << 20) == 0) return fmt::format("{} MiB", bytes >> 20);
  if (bytes % (1 << 10) == 0) return fmt::format("{} KiB", bytes >> 10);
  return fmt::format("{} bytes", bytes);
}

Result<std::size_t> ParseUnitSize(const std::string& text) {
  constexpr std::uint64_t kMax = std::uint64_t{1} << 30;
  const auto size = ParseSize(text);
  if (!size.ok()) return size.status();
  if (*size < sizeof(float) || *size > kMax || *size % sizeof(float) != 0) {
    return InvalidArgument(
        fmt::format("--size is '{}', expected from 4 bytes to 1GiB, a multiple of 4", text));
  }
  return static_cast<std::size_t>(*size);
}

/// Makes the kernels use the instruction set; the best if none is asked for. Returns its name.
Result<std::string> ChooseTarget(const std::string& wanted) {
  std::vector<std::string> names;
  for (const std::int64_t target : kernels::AvailableTargets()) {
    names.emplace_back(kernels::TargetName(target));
    if (wanted.empty()) return names.back();
    if (wanted == names.back()) {
      kernels::UseTarget(target);
      return wanted;
    }
  }
  return InvalidArgument(fmt::format("--target is '{}', this machine and build have: {}", wanted,
                                     fmt::join(names, ", ")));
}

/// The machine and the build that the figures are of.
struct Machine {
  std::string cpu = "unknown";
  unsigned cores = std::thread::hardware_concurrency();
  double load = 0;  // processes that wanted to run in the minute before
  std::string compiler;
  bool is_optimized = false;
  std::string target;
};

Machine ThisMachine(std::string target) {
  Machine machine;
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.compare(0, 10, "model name") == 0 && line.find(": ") != std::string::npos) {
      machine.cpu = line.substr(line.find(": ") + 2);
      break;
    }
  }
  if (getloadavg(&machine.load, 1) != 1) machine.load = 0;
#ifdef __clang__
  machine.compiler = __VERSION__;
#else
  machine.compiler = "g++ " __VERSION__;
#endif
#ifdef __OPTIMIZE__
  machine.is_optimized = true;
#endif
  machine.target = std::move(target);
  return machine;
}

/// The command line that measures the same again.
std::string CommandOf(const Arguments& arguments) {
  std::string text = "gradwire bench codec";
  for (const std::string& spec : arguments.specs) {
    text += spec.find('(') == std::string::npos ? ' ' + spec : " '" + spec + '\'';
  }
  text += fmt::format(" --size {} --repeats {} --threads {} --rounds {}",
                      fmt::join(arguments.sizes, ","), arguments.repeats, arguments.threads,
                      arguments.rounds);
  if (!arguments.target.empty()) text += " --target " + arguments.target;
  for (const std::string& plugin : arguments.plugins) text += " --plugin '" + plugin + '\'';
  return text;
}

void PrintHead(const Machine& machine, const std::string& command) {
  fmt::print("{}, {} cores, load {:.2f}; {}{}; kernels for {}; Gradwire {}\n{}\n",
             Escape(machine.cpu), machine.cores, machine.load, machine.compiler,
             machine.is_optimized ? "" : " without optimization", machine.target, Version(),
             command);
  fmt::print(
      "Medians. GB/s: 10^9 bytes of float32 a second; /add, /memcpy, /scatter: over a += b, "
      "memcpy, "
      "and a sparse codec's bare scatter-add, around it.\n");
}

std::string Ratio(const Quartiles& figures) { return fmt::format("{:.2f}", figures.median); }
std::string Ratio(const std::optional<Quartiles>& figures) {
  return figures ? Ratio(*figures) : "-";
}

/// The figures of one size.
void PrintTable(const std::vector<CodecFigures>& all) {
  const bool has_two_threads = all.front().add_two_threads.has_value();
  std::vector<TextTable::Align> columns(has_two_threads ? 18 : 15, TextTable::Align::kRight);
  columns[0] = TextTable::Align::kLeft;
  TextTable table(columns);
  std::vector<std::string> head = {"compressor", "bytes",      "sent",    "error",   "feedback",
                                   "encode",     "/add",       "/memcpy", "decode",  "/add",
                                   "/memcpy",    "decode-add", "/add",    "/memcpy", "/scatter"};
  if (has_two_threads) head.insert(head.end(), {"x2 encode", "x2 decode", "x2 decode-add"});
  table.Add(head);
  double add = 0;
  double copy = 0;
  double add_two_threads = 0;
  for (const CodecFigures& figures : all) {
    std::vector<std::string> row = {
        figures.spec,
        fmt::format("{:.4f}", figures.bytes_per_element),
        fmt::format("{:.4f}", figures.bytes_per_element_sent),
        fmt::format("{:.4f}", figures.relative_error),
        figures.feedback ? "yes" : "no",
    };
    for (const OperationFigures* operation :
         {&figures.encode, &figures.decode, &figures.decode_add}) {
      row.push_back(fmt::format("{:.2f}", operation->rate.median));
      row.push_back(Ratio(operation->to_add));
      row.push_back(Ratio(operation->to_memcpy));
    }
    row.push_back(Ratio(figures.decode_add.to_scatter_add));
    if (has_two_threads) {
      for (const OperationFigures* operation :
           {&figures.encode, &figures.decode, &figures.decode_add}) {
        row.push_back(Ratio(operation->two_threads));
      }
      add_two_threads += figures.add_two_threads->median;
    }
    table.Add(std::move(row));
    add += figures.add_rate.median;
    copy += figures.memcpy_rate.median;
  }
  const auto count = static_cast<double>(all.size());
  fmt::print("\n{}: a += b {:.1f} GB/s, memcpy {:.1f} GB/s{}\n{}", FormatBytes(all.front().bytes),
             add / count, copy / count,
             has_two_threads
                 ? fmt::format(", two threads {:.2f} times one in a += b", add_two_threads / count)
                 : "",
             table.ToString());
  std::fflush(stdout);
}

std::string ToJson(const Quartiles& figures) {
  return fmt::format(R"({{"q1": {:.6g}, "median": {:.6g}, "q3": {:.6g}}})", figures.low,
                     figures.median, figures.high);
}
std::string ToJson(const std::optional<Quartiles>& figures) {
  return figures ? ToJson(*figures) : "null";
}
std::string ToJson(const OperationFigures& figures) {
  return fmt::format(
      R"({{"gb_s": {}, "to_add": {}, "to_memcpy": {}, "to_scatter_add": {}, "two_threads": {}}})",
      ToJson(figures.rate), ToJson(figures.to_add), ToJson(figures.to_memcpy),
      ToJson(figures.to_scatter_add), ToJson(figures.two_threads));
}

std::string ToJson(const CodecFigures& figures) {
  return fmt::format(
      R"(  {{"spec": {}, "bytes": {}, "elements": {}, "feedback": {},
   "bytes_per_element": {:.6g}, "bytes_per_element_sent": {:.6g}, "relative_error": {:.6g},
   "encode": {},
   "decode": {},
   "decode_add": {},
   "add": {{"gb_s": {}, "two_threads": {}}},
   "memcpy": {{"gb_s": {}}}}})",
      QuoteJson(figures.spec), figures.bytes, figures.bytes / sizeof(float), figures.feedback,
      figures.bytes_per_element, figures.bytes_per_element_sent, figures.relative_error,
      ToJson(figures.encode), ToJson(figures.decode), ToJson(figures.decode_add),
      ToJson(figures.add_rate), ToJson(figures.add_two_threads), ToJson(figures.memcpy_rate));
}

std::string ToJson(const Machine& machine, const std::string& command,
                   const std::vector<CodecFigures>& all) {
  std::vector<std::string> results;
  for (const CodecFigures& figures : all) results.push_back(ToJson(figures));
  return fmt::format(
      R"({{"machine": {{"cpu": {}, "cores": {}, "load": {:.2f}, "compiler": {}, "optimized": {}, "instruction_set": {}}},
 "gradwire": {}, "command": {},
 "results": [
{}
 ]}}
)",
      QuoteJson(machine.cpu), machine.cores, machine.load, QuoteJson(machine.compiler),
      machine.is_optimized, QuoteJson(machine.target), QuoteJson(Version()), QuoteJson(command),
      fmt::join(results, ",\n"));
}

/// Closes the file.  Errors: Internal with the system's reason.
Status WriteAll(std::FILE* file, const std::string& path, const std::string& text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !is_written) {
    return Internal(fmt::format("cannot write '{}': {}", path, std::strerror(errno)));
  }
  return Status::Ok();
}

int Fail(const Status& status, int code) {
  fmt::print(stderr, "gradwire bench codec: {}\n", Escape(status.message()));
  return code;
}

int Run(Arguments arguments) {
  const auto registry = LoadPlugins(arguments.plugins);
  if (!registry.ok()) return Fail(registry.status(), kExitUsage);
  if (arguments.specs.empty()) arguments.specs = DefaultSpecs(**registry);
  CodecBenchOptions options;
  options.specs = arguments.specs;
  for (const std::string& text : arguments.sizes) {
    const auto size = ParseUnitSize(text);
    if (!size.ok()) return Fail(size.status(), kExitUsage);
    options.sizes.push_back(*size);
  }
  for (const std::string& spec : arguments.specs) {
    const auto codec = (*registry)->Create(spec);
    if (!codec.ok()) return Fail(codec.status(), kExitUsage);
  }
  const auto target = ChooseTarget(arguments.target);
  if (!target.ok()) return Fail(target.status(), kExitUsage);
  options.num_repeats = arguments.repeats;
  options.num_threads = arguments.threads;
  options.num_warm_up_rounds = arguments.rounds;
  options.target = *target;
  // Before minutes of measuring.
  std::FILE* json = nullptr;
  if (!arguments.json_path.empty()) {
    json = std::fopen(arguments.json_path.c_str(), "w");
    if (json == nullptr) {
      return Fail(InvalidArgument(fmt::format("cannot write '{}': {}", arguments.json_path,
                                              std::strerror(errno))),
                  kExitUsage);
    }
  }

  const Machine machine = ThisMachine(*target);
  const std::string command = CommandOf(arguments);
  PrintHead(machine, command);
  std::vector<CodecFigures> all;
  std::vector<CodecFigures> of_size;
  const Status status = MeasureCodecs(**registry, options, [&](const CodecFigures& figures) {
    all.push_back(figures);
    of_size.push_back(figures);
    if (of_size.size() == options.specs.size()) {
      PrintTable(of_size);
      of_size.clear();
    }
  });
  if (json != nullptr) {
    const Status written = WriteAll(json, arguments.json_path, ToJson(machine, command, all));
    if (status.ok() && !written.ok()) return Fail(written, kExitFailed);
  }
  return status.ok() ? kExitOk : Fail(status, kExitFailed);
}

}  // namespace

void AddBenchCommand(CLI::App& tool, CommandAction& action) {
  CLI::App* bench = tool.add_subcommand("bench", "measure this machine");
  bench->require_subcommand(1);
  CLI::App* command =
      bench->add_subcommand("codec", "the compressors' speed beside a += b and memcpy, on N(0, 1)");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("SPEC", arguments->specs,
                      "compressors, such as 'topk(ratio=0.01)'; else all, with usual parameters");
  command
      ->add_option("--size", arguments->sizes, "bytes of float32, separated by commas (4MiB,64MiB)")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--repeats", arguments->repeats, "what medians are of")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "2: also two at once, a unit each")
      ->check(CLI::Range(1, 2))
      ->capture_default_str();
  command
      ->add_option("--rounds", arguments->rounds,
                   "rounds that bring residuals to their steady state")
      ->check(CLI::Range(0, 1000000))
      ->capture_default_str();
  command->add_option("--target", arguments->target,
                      "the kernels' instruction set, such as AVX2, instead of the best");
  command->add_option("--plugin", arguments->plugins, kPluginOptionHelp)->allow_extra_args(false);
  command->add_option("--json", arguments->json_path, "also write all to this file");
  command->callback([arguments, &action] { action = [arguments] { return Run(*arguments); }; });
  AddNetBenchCommands(*bench, action);
}

}  // namespace gradwire
