#include "common/config/process.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/config/aliases.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

constexpr std::optional<ProcessRole> kWorker = ProcessRole::kWorker;
constexpr std::optional<ProcessRole> kServer = ProcessRole::kServer;

ProcessOptions OptionsOf(std::optional<ProcessRole> role,
                         const std::vector<std::string>& assignments = {}) {
  ProcessOptions options;
  options.role = role;
  options.assignments = assignments;
  return options;
}

ProcessConfig Loaded(const Environment& environment, const ProcessOptions& options) {
  const auto process = LoadProcessConfig(options, environment);
  INFO(process.status().ToString());
  REQUIRE(process.ok());
  return *process;
}

ProcessConfig Loaded(const Environment& environment, std::optional<ProcessRole> role = kWorker) {
  return Loaded(environment, OptionsOf(role));
}

std::string Refusal(const Environment& environment, const ProcessOptions& options) {
  const auto process = LoadProcessConfig(options, environment);
  REQUIRE_FALSE(process.ok());
  CHECK(process.status().code() == StatusCode::kInvalidArgument);
  return process.status().message();
}

std::string Refusal(const Environment& environment, std::optional<ProcessRole> role = kWorker) {
  return Refusal(environment, OptionsOf(role));
}

/// A value and its source: "4 WORLD_SIZE".
std::string Key(const ProcessConfig& process, const std::string& path) {
  for (const DescribedValue& row : DescribeSources(process.config, process.sources)) {
    if (row.path == path) return row.value + " " + row.source;
  }
  return "absent";
}

std::string Rank(const ProcessConfig& process) {
  const auto source = process.sources.find("rank");
  return (process.rank ? std::to_string(*process.rank) : "none") + " " +
         (source == process.sources.end() ? "default" : source->second);
}

/// A file that is gone afterwards.
class TempYaml {
 public:
  explicit TempYaml(const std::string& text) {
    char name[] = "/tmp/gradwire-config-XXXXXX";
    const int file = mkstemp(name);
    REQUIRE(file >= 0);
    close(file);
    path_ = name;
    std::ofstream(path_) << text;
  }
  TempYaml(const TempYaml&) = delete;
  TempYaml& operator=(const TempYaml&) = delete;
  ~TempYaml() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST_CASE("each alias alone sets its key and is named as the source", "[config][unit]") {
  struct Case {
    const char* variable;
    const char* text;
    const char* key;
    const char* expected;
  };
  const Case cases[] = {
      {"MASTER_ADDR", "ps", "endpoint", "tcp://ps:5701 MASTER_ADDR"},
      {"MASTER_ADDR", "::1", "endpoint", "tcp://[::1]:5701 MASTER_ADDR"},
      {"MASTER_PORT", "29500", "endpoint", "tcp://127.0.0.1:29501 MASTER_PORT"},
      {"WORLD_SIZE", "4", "job.workers", "4 WORLD_SIZE"},
      {"TORCHELASTIC_RUN_ID", "r1", "job.id", "r1 TORCHELASTIC_RUN_ID"},
      {"TORCHELASTIC_RUN_ID", "none", "job.id", "demo default"},
      {"DMLC_PS_ROOT_URI", "ps", "endpoint", "tcp://ps:5701 DMLC_PS_ROOT_URI"},
      {"DMLC_PS_ROOT_PORT", "9", "endpoint", "tcp://127.0.0.1:9 DMLC_PS_ROOT_PORT"},
      {"DMLC_NUM_WORKER", "4", "job.workers", "4 DMLC_NUM_WORKER"},
      {"DMLC_NUM_SERVER", "3", "job.servers", "3 DMLC_NUM_SERVER"},
      {"DMLC_INTERFACE", "eth1", "server.interface", "eth1 DMLC_INTERFACE"},
      {"DMLC_NODE_HOST", "me", "server.advertise", "me DMLC_NODE_HOST"},
      {"BYTEPS_PARTITION_BYTES", "4096000", "partition.bytes", "4000KiB BYTEPS_PARTITION_BYTES"},
      {"BYTEPS_MIN_COMPRESS_BYTES", "0", "compression.min_bytes", "0 BYTEPS_MIN_COMPRESS_BYTES"},
      {"BYTEPS_SERVER_ENGINE_THREAD", "4", "server.threads", "4 BYTEPS_SERVER_ENGINE_THREAD"},
      {"BYTEPS_LOG_LEVEL", "WARNING", "log.level", "warn BYTEPS_LOG_LEVEL"},
      {"BYTEPS_LOG_LEVEL", "fatal", "log.level", "error BYTEPS_LOG_LEVEL"},
      {"OMPI_COMM_WORLD_SIZE", "4", "job.workers", "4 OMPI_COMM_WORLD_SIZE"},
      {"SLURM_NTASKS", "4", "job.workers", "4 SLURM_NTASKS"},
      {"SLURM_JOB_ID", "77", "job.id", "77 SLURM_JOB_ID"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.variable, c.text);
    const ProcessConfig process = Loaded({{c.variable, c.text}});
    CHECK(Key(process, c.key) == c.expected);
    CHECK(process.warnings.empty());
  }
  for (const char* variable : {"SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"}) {
    const ProcessConfig process = Loaded({{variable, "4"}}, kServer);
    CHECK(Key(process, "job.servers") == std::string("4 ") + variable);
    CHECK(Key(process, "job.workers") == "1 default");
  }
}

TEST_CASE("ranks are read by those whose they are", "[config][unit]") {
  const Environment shape = {{"GRADWIRE_JOB_WORKERS", "4"}, {"GRADWIRE_JOB_SERVERS", "4"}};
  struct Case {
    const char* variable;
    bool for_worker;
    bool for_server;
  };
  for (const Case& c : {Case{"GRADWIRE_RANK", true, true}, Case{"RANK", true, false},
                        Case{"DMLC_WORKER_ID", true, false}, Case{"DMLC_SERVER_ID", false, true},
                        Case{"OMPI_COMM_WORLD_RANK", true, true}, Case{"SLURM_PROCID", true, true},
                        Case{"JOB_COMPLETION_INDEX", true, true}}) {
    CAPTURE(c.variable);
    Environment environment = shape;
    environment[c.variable] = "3";
    const std::string found = std::string("3 ") + c.variable;
    CHECK(Rank(Loaded(environment, kWorker)) == (c.for_worker ? found : "none default"));
    CHECK(Rank(Loaded(environment, kServer)) == (c.for_server ? found : "none default"));
  }
  for (const char* variable : {"GRADWIRE_LOCAL_RANK", "LOCAL_RANK", "BYTEPS_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}) {
    const ProcessConfig process = Loaded({{variable, "2"}});
    CHECK(process.local_rank == 2);
    CHECK(process.sources.at("local_rank") == variable);
  }
  for (const char* variable : {"GRADWIRE_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "BYTEPS_LOCAL_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    const ProcessConfig process = Loaded({{variable, "2"}});
    REQUIRE(process.local_size);
    CHECK(*process.local_size == 2);
    CHECK(process.sources.at("local_size") == variable);
  }
  // The only one needs none, several do.
  CHECK(Rank(Loaded({})) == "0 default");
  const auto missing = RequireRank(Loaded(shape, kServer));
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.status().message() ==
        "there are 4 servers (job.servers), so which one is this? --index is not given, and none "
        "of GRADWIRE_RANK, DMLC_SERVER_ID, OMPI_COMM_WORLD_RANK, SLURM_PROCID, "
        "JOB_COMPLETION_INDEX is set");
  CHECK(Refusal({{"RANK", "4"}, {"WORLD_SIZE", "4"}}) ==
        "RANK is '4', expected below 4 (WORLD_SIZE), the value of job.workers");
}

TEST_CASE("each layer overrules those below it", "[config][unit]") {
  const TempYaml yaml("job:\n  workers: 2\n");
  ProcessOptions options = OptionsOf(kWorker);
  Environment environment;
  CHECK(Key(Loaded(environment, options), "job.workers") == "1 default");
  options.config_path = yaml.path();
  options.rank = 0;
  CHECK(Key(Loaded(environment, options), "job.workers") == "2 " + yaml.path() + ":2");
  environment["SLURM_NTASKS"] = "3";
  CHECK(Key(Loaded(environment, options), "job.workers") == "3 SLURM_NTASKS");
  environment["GRADWIRE_JOB_WORKERS"] = "4";
  CHECK(Key(Loaded(environment, options), "job.workers") == "4 GRADWIRE_JOB_WORKERS");
  options.assignments = {"job.workers=6", "job.workers=5"};
  CHECK(Key(Loaded(environment, options), "job.workers") == "5 --set job.workers");
  // The rank has no file.
  options.rank.reset();
  environment["RANK"] = "1";
  CHECK(Rank(Loaded(environment, options)) == "1 RANK");
  environment["GRADWIRE_RANK"] = "2";
  CHECK(Rank(Loaded(environment, options)) == "2 GRADWIRE_RANK");
  options.rank = 3;
  CHECK(Rank(Loaded(environment, options)) == "3 --rank");
}

TEST_CASE("the innermost launcher counts", "[config][unit]") {
  const std::vector<std::pair<const char*, const char*>> sizes = {{"SLURM_NTASKS", "2"},
                                                                  {"OMPI_COMM_WORLD_SIZE", "3"},
                                                                  {"DMLC_NUM_WORKER", "4"},
                                                                  {"WORLD_SIZE", "5"}};
  const std::vector<const char*> ranks = {"JOB_COMPLETION_INDEX", "SLURM_PROCID",
                                          "OMPI_COMM_WORLD_RANK", "DMLC_WORKER_ID", "RANK"};
  Environment environment;
  for (const auto& [variable, text] : sizes) {
    environment[variable] = text;
    CHECK(Key(Loaded(environment), "job.workers") == std::string(text) + " " + variable);
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    environment[ranks[i]] = std::to_string(i);
    CHECK(Rank(Loaded(environment)) == std::to_string(i) + " " + ranks[i]);
  }
  // Halves of two endpoints are not put together.
  CHECK(Key(Loaded({{"MASTER_ADDR", "a"}, {"DMLC_PS_ROOT_PORT", "7"}}), "endpoint") ==
        "tcp://a:5701 MASTER_ADDR");
  CHECK(Key(Loaded({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "6"}, {"DMLC_PS_ROOT_URI", "b"}}),
            "endpoint") == "tcp://a:7 MASTER_ADDR, MASTER_PORT");
}

TEST_CASE("several local ranks of BytePS are workers of their own", "[config][unit]") {
  Environment environment = {{"DMLC_NUM_WORKER", "2"},
                             {"DMLC_WORKER_ID", "1"},
                             {"BYTEPS_LOCAL_SIZE", "4"},
                             {"BYTEPS_LOCAL_RANK", "3"}};
  const ProcessConfig process = Loaded(environment);
  CHECK(Key(process, "job.workers") == "8 DMLC_NUM_WORKER * BYTEPS_LOCAL_SIZE");
  CHECK(Rank(process) == "7 DMLC_WORKER_ID * BYTEPS_LOCAL_SIZE + BYTEPS_LOCAL_RANK");
  environment["BYTEPS_LOCAL_RANK"] = "4";
  CHECK(Refusal(environment) == "BYTEPS_LOCAL_RANK is '4', expected below 4 (BYTEPS_LOCAL_SIZE)");
  environment.erase("BYTEPS_LOCAL_RANK");
  CHECK(Refusal(environment).find("BYTEPS_LOCAL_RANK is not set") != std::string::npos);
}

TEST_CASE("every alias refuses a text that does not parse, whoever reads it", "[config][unit]") {
  for (const Alias& alias : Aliases()) {
    std::vector<std::string> wrong = {""};
    const bool is_text = alias.target == "job.id" || alias.target == "server.advertise" ||
                         alias.target == "server.interface" || alias.target == "endpoint.host" ||
                         alias.variable == "BYTEPS_TRACE_DIR";
    if (!is_text) wrong = {"", "two", "4 bananas", "-1", "99999999999999999999"};
    for (const std::string& text : wrong) {
      for (const auto role : {kWorker, kServer}) {
        CAPTURE(alias.variable, text);
        const std::string message = Refusal({{std::string(alias.variable), text}}, role);
        CHECK(message.find(std::string(alias.variable) + " is '" + text + "', ") == 0);
      }
    }
  }
  CHECK(Refusal({{"RANK", "two"}}, kServer) ==
        "RANK is 'two', expected a whole number from 0 to 4095");
  CHECK(Refusal({{"MASTER_PORT", "65535"}}) ==
        "MASTER_PORT is '65535', expected a whole number from 1 to 65534");
  CHECK(Refusal({{"MASTER_ADDR", "a b"}}) ==
        "MASTER_ADDR is 'a b', expected a host name or address");
  CHECK(Refusal({{"DMLC_NUM_WORKER", "0"}}) ==
        "DMLC_NUM_WORKER is '0', expected a whole number from 1 to 4096");
  CHECK(Refusal({{"GRADWIRE_RANK", "two"}}) ==
        "GRADWIRE_RANK is 'two', expected a whole number from 0 to 4095");
  // Also if another layer overrules it.
  ProcessOptions options = OptionsOf(kWorker, {"job.workers=2"});
  options.rank = 0;
  CHECK(Refusal({{"WORLD_SIZE", "x"}}, options).find("WORLD_SIZE is 'x'") == 0);
  CHECK(Refusal({{"GRADWIRE_RANK", "x"}}, options).find("GRADWIRE_RANK is 'x'") == 0);
}

TEST_CASE("what BytePS can and Gradwire cannot is refused with the reason", "[config][unit]") {
  CHECK(Refusal({{"BYTEPS_ENABLE_ASYNC", "1"}}) ==
        "BYTEPS_ENABLE_ASYNC is '1', but training is synchronous: a round needs every worker; the "
        "only value is 0");
  CHECK(Refusal({{"BYTEPS_TRACE_ON", "1"}}) ==
        "BYTEPS_TRACE_ON is '1', but traces are not available yet; the only value is 0");
  const ProcessConfig off = Loaded({{"BYTEPS_ENABLE_ASYNC", "0"}, {"BYTEPS_TRACE_ON", "0"}});
  CHECK(off.ignored.empty());
}

TEST_CASE("variables without meaning are listed", "[config][unit]") {
  const ProcessConfig process = Loaded({{"BYTEPS_NUMA_ON", "1"},
                                        {"DMLC_ENABLE_RDMA", "0"},
                                        {"PS_VERBOSE", "2"},
                                        {"DMLC_NUM_SERVER", "2"},
                                        {"BYTEPS_TRACE_DIR", "x"},
                                        {"HOME", "/"}});
  const std::vector<IgnoredVariable> expected = {
      {"BYTEPS_NUMA_ON", ""},
      {"BYTEPS_TRACE_DIR", "traces are not available yet"},
      {"DMLC_ENABLE_RDMA", "the network is TCP"},
      {"PS_VERBOSE", "see log.level"}};
  CHECK(process.ignored == expected);
}

TEST_CASE("a role that is not the program's is an error, a scheduler is not", "[config][unit]") {
  CHECK(Refusal({{"DMLC_ROLE", "server"}}) ==
        "DMLC_ROLE is 'server', but this program is a worker");
  CHECK(Refusal({{"GRADWIRE_ROLE", "worker"}}, kServer) ==
        "GRADWIRE_ROLE is 'worker', but this program is a server");
  CHECK(Refusal({{"GRADWIRE_ROLE", "boss"}}) ==
        "GRADWIRE_ROLE is 'boss', expected worker or server");
  CHECK(Refusal({{"DMLC_ROLE", "boss"}}) ==
        "DMLC_ROLE is 'boss', expected worker, server or scheduler");
  CHECK(Loaded({{"DMLC_ROLE", "scheduler"}}, kWorker).is_scheduler);
  CHECK(Loaded({{"DMLC_ROLE", "scheduler"}}, kServer).is_scheduler);
  CHECK_FALSE(Loaded({{"DMLC_ROLE", "scheduler"}, {"GRADWIRE_ROLE", "worker"}}).is_scheduler);
  const ProcessConfig any = Loaded({{"DMLC_ROLE", "server"}}, std::nullopt);
  CHECK(any.role == ProcessRole::kServer);
  CHECK(any.sources.at("role") == "DMLC_ROLE");
}

TEST_CASE("an alias that overrules another value of the file warns", "[config][unit]") {
  const TempYaml yaml("endpoint: tcp://b:1\njob: {workers: 4}\n");
  ProcessOptions options = OptionsOf(kWorker);
  options.config_path = yaml.path();
  Environment environment = {{"MASTER_ADDR", "a"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}};
  const std::vector<std::string> expected = {
      "endpoint is tcp://a:1 because of MASTER_ADDR, which overrules tcp://b:1 in " + yaml.path() +
      ":1"};
  CHECK(Loaded(environment, options).warnings == expected);
  // Nobody has to be told of what did not count.
  environment["GRADWIRE_ENDPOINT"] = "tcp://c:2";
  CHECK(Loaded(environment, options).warnings.empty());
}

TEST_CASE("a compressor's parameters have sources of their own", "[config][unit]") {
  const TempYaml yaml("compression:\n  uplink:\n    compressor: topk\n    ratio: 0.5\n");
  ProcessOptions options = OptionsOf(kWorker);
  options.config_path = yaml.path();
  CHECK(Key(Loaded({}, options), "compression.uplink.ratio") == "0.5 " + yaml.path() + ":4");
  CHECK(Key(Loaded({{"GRADWIRE_COMPRESSION_UPLINK_RATIO", "0.25"}}, options),
            "compression.uplink.ratio") == "0.25 GRADWIRE_COMPRESSION_UPLINK_RATIO");
  // In one layer the order does not matter; another compressor drops the parameters.
  options.assignments = {"compression.downlink.ratio=0.1", "compression.downlink.compressor=topk",
                         "compression.uplink.compressor=onebit"};
  const ProcessConfig process = Loaded({}, options);
  CHECK(Key(process, "compression.downlink.ratio") == "0.1 --set compression.downlink.ratio");
  CHECK(Key(process, "compression.uplink.ratio") == "absent");
  CHECK_FALSE(process.sources.contains("compression.uplink.ratio"));
}

TEST_CASE("values that do not fit together are refused with both sources", "[config][unit]") {
  CHECK(Refusal({{"GRADWIRE_TIMEOUTS_HEARTBEAT", "501ms"}},
                OptionsOf(kWorker, {"timeouts.dead_after=1s"})) ==
        "timeouts.heartbeat is 501ms (GRADWIRE_TIMEOUTS_HEARTBEAT), expected at most half of "
        "timeouts.dead_after, which is 1s (--set timeouts.dead_after)");
  CHECK(Refusal({{"DMLC_INTERFACE", "eth1"}}, OptionsOf(kServer, {"server.bind=10.0.0.1"})) ==
        "server.interface is eth1 (DMLC_INTERFACE) and server.bind is 10.0.0.1 (--set "
        "server.bind), expected one of them only");
  CHECK(Refusal({{"GRADWIRE_COMPRESSION_FILTER_INTERVAL", "4"}}, OptionsOf(kWorker, {})) ==
        "compression.filter.interval is 4 (GRADWIRE_COMPRESSION_FILTER_INTERVAL), but "
        "compression.filter.type is none (default), expected covap");
  CHECK(Refusal({}, OptionsOf(kServer, {"method=clan"})) ==
        "method is clan (--set method): method clan wants a compressor in both directions, and "
        "compression.uplink.compressor is none; method lans does without");
  const std::string covap = "compression.filter.type=covap";
  const std::string interval = "compression.filter.interval=4";
  CHECK(Refusal({{"GRADWIRE_METHOD", "lans"}}, OptionsOf(kWorker, {covap, interval})) ==
        "method is lans (GRADWIRE_METHOD): method lans shrinks parameters whose gradient is zero, "
        "and compression.filter.inactive is zero_fill, which gives zeros where the filter sends "
        "nothing; expected skip");
  Loaded({},
         OptionsOf(kWorker, {"method=lans", covap, interval, "compression.filter.inactive=skip"}));
  Loaded({}, OptionsOf(kWorker, {"method=dist_ef_sgdm", covap, interval}));
  const std::string warmup = "compression.warmup_steps=10";
  Loaded({}, OptionsOf(kWorker, {"method=onebit_adam", warmup}));
  CHECK(Refusal({}, OptionsOf(kWorker, {"method=onebit_lamb"})) ==
        "method is onebit_lamb (--set method): method onebit_lamb has no freeze_step, expected the "
        "first step after its warm-up, which is compression.warmup_steps");
  CHECK(Refusal({}, OptionsOf(kWorker, {"method=onebit_adam", warmup, covap, interval})) ==
        "method is onebit_adam (--set method): method onebit_adam sends momenta, and "
        "compression.filter.type is covap, which would send the sum of those it has held back; "
        "expected none");
  Loaded({}, OptionsOf(kWorker, {"compression.filter.type=none", "compression.filter.c0=auto"}));
  Loaded({}, OptionsOf(kServer, {"compression.filter.type=covap"}));
  Loaded({},
         OptionsOf(kWorker, {"compression.filter.interval=4", "compression.filter.type=covap"}));
  Loaded({}, OptionsOf(kWorker, {"timeouts.dead_after=1s", "timeouts.heartbeat=500ms"}));
  Loaded({}, OptionsOf(kWorker, {"timeouts.stall_warn=60s", "timeouts.stall_stop=1s"}));
  CHECK(Refusal({{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}}) ==
        "the local rank is 2 (LOCAL_RANK), expected below the local size 2 (LOCAL_WORLD_SIZE)");
}

TEST_CASE("the documentation has every alias", "[config][unit]") {
  std::ifstream file(GRADWIRE_SOURCE_DIR "/docs/configuration.md");
  std::ostringstream text;
  text << file.rdbuf();
  for (const Alias& alias : Aliases()) {
    CAPTURE(alias.variable);
    CHECK(text.str().find("`" + std::string(alias.variable) + "`") != std::string::npos);
  }
}

}  // namespace
}  // namespace gradwire
