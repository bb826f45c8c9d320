// The C interface, through the shared library and real servers on loopback.

#include <fcntl.h>
#include <gradwire/gradwire.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "common/config/process.h"
#include "compressors/methods/optimizer.h"
#include "server/server.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

using Strings = std::vector<std::string>;

/// Threads may not use Catch2's macros: they note what is wrong, and the test checks at the end.
class Failures {
 public:
  bool Expect(bool condition, const std::string& text) {
    if (condition) return true;
    const std::lock_guard lock(mu_);
    text_ += text + "\n";
    return false;
  }
  bool Ok(gradwire_status status, const std::string& what) {
    return Expect(status == GRADWIRE_OK, what + ": " + gradwire_last_error());
  }
  std::string Take() {
    const std::lock_guard lock(mu_);
    return text_;
  }

 private:
  std::mutex mu_;
  std::string text_;
};

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

gradwire_status Init(const Strings& assignments, std::int64_t rank, gradwire_client** client) {
  std::vector<const char*> pointers;
  for (const std::string& text : assignments) pointers.push_back(text.c_str());
  return gradwire_init(nullptr, pointers.data(), pointers.size(), rank, client);
}

/// A server of its own thread in this process, and what workers must be told to join its job.
class Job {
 public:
  explicit Job(std::uint32_t workers, Strings more = {}) {
    assignments_ = {"job.workers=" + std::to_string(workers),
                    "job.servers=1",
                    "endpoint=tcp://127.0.0.1:0",
                    "log.level=off",
                    "timeouts.start=30s",
                    "timeouts.stall_warn=10s",
                    "timeouts.stall_stop=30s",
                    "timeouts.dead_after=10s"};
    assignments_.insert(assignments_.end(), more.begin(), more.end());
    ProcessOptions options;
    options.role = ProcessRole::kServer;
    options.rank = 0;
    options.assignments = assignments_;
    auto process = LoadProcessConfig(options, {});
    INFO(process.status().ToString());
    REQUIRE(process.ok());
    auto server = Server::Start(process->config, 0);
    INFO(server.status().ToString());
    REQUIRE(server.ok());
    server_ = std::move(server).value();
    assignments_.push_back("endpoint=" + server_->address());
    thread_ = std::thread([this] { outcome_ = server_->Run(); });
  }

  ~Job() {
    server_->Stop();
    if (thread_.joinable()) thread_.join();
  }

  const Strings& assignments() const { return assignments_; }

  /// Runs `body` for every rank on a thread of its own. It gets the rank's client and frees it only
  /// if it sets the pointer to null.
  std::string Run(std::uint32_t workers,
                  const std::function<void(Failures&, gradwire_client*&)>& body) {
    Failures failures;
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < workers; ++rank) {
      threads.emplace_back([&, rank] {
        gradwire_client* client = nullptr;
        if (!failures.Ok(Init(assignments_, rank, &client), "init")) return;
        body(failures, client);
        gradwire_free(client);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return failures.Take();
  }

 private:
  Strings assignments_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  Status outcome_;
};

gradwire_tensor Tensor(const char* name, const std::vector<std::uint64_t>& shape,
                       gradwire_dtype dtype = GRADWIRE_FLOAT32, gradwire_op op = GRADWIRE_AVERAGE) {
  return {name, shape.data(), static_cast<std::uint32_t>(shape.size()), dtype, op, 0};
}

/// Declares one tensor.
std::uint32_t Declare(Failures& failures, gradwire_client* client, const gradwire_tensor& tensor) {
  std::uint32_t id = UINT32_MAX;
  failures.Ok(gradwire_declare(client, &tensor, 1, &id), std::string("declare ") + tensor.name);
  return id;
}

template <typename T>
gradwire_status PushPull(gradwire_client* client, std::uint32_t id, const std::vector<T>& input,
                         std::vector<T>& output) {
  gradwire_handle handle{};
  gradwire_status status = gradwire_push_pull(client, id, input.data(), output.data(),
                                              input.size() * sizeof(T), &handle);
  if (status == GRADWIRE_OK) status = gradwire_end_step(client);
  return status == GRADWIRE_OK ? gradwire_wait(client, handle, -1) : status;
}

/// Pushes rank + 1 in the dtype's own form and expects the sum of all ranks, 3, everywhere.
template <typename T>
void SumOfTwo(Failures& failures, gradwire_client* client, gradwire_dtype dtype, T one, T two,
              T three) {
  const std::string name = "dtype" + std::to_string(static_cast<int>(dtype));
  const std::vector<std::uint64_t> shape = {7, 3};
  const auto id = Declare(failures, client, Tensor(name.c_str(), shape, dtype, GRADWIRE_SUM));
  const std::vector<T> input(21, gradwire_rank(client) == 0 ? one : two);
  std::vector<T> output(21);
  failures.Ok(PushPull(client, id, input, output), name);
  failures.Expect(output == std::vector<T>(21, three), name + ": wrong sum");
}

/// Sets a variable of the environment, or removes it, for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    if (value != nullptr) {
      setenv(name, value, 1);
    } else {
      unsetenv(name);
    }
  }
  ~Variable() {
    if (old_) {
      setenv(name_, old_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST_CASE("the library says which interface and version it has", "[capi]") {
  CHECK(gradwire_abi_version() == GRADWIRE_ABI_VERSION);
  CHECK(std::string(gradwire_version()) == GRADWIRE_TEST_VERSION);
}

TEST_CASE("every error code has the exit code of operations.md", "[capi]") {
  CHECK(gradwire_exit_code(GRADWIRE_OK, 0) == 0);
  CHECK(gradwire_exit_code(GRADWIRE_OK, 1) == 0);
  CHECK(gradwire_exit_code(GRADWIRE_INVALID_ARGUMENT, 0) == 2);
  CHECK(gradwire_exit_code(GRADWIRE_INVALID_ARGUMENT, 1) == 1);
  CHECK(gradwire_exit_code(GRADWIRE_TIMEOUT, 0) == 3);
  CHECK(gradwire_exit_code(GRADWIRE_TIMEOUT, 1) == 4);
  CHECK(gradwire_exit_code(GRADWIRE_UNAVAILABLE, 0) == 3);
  CHECK(gradwire_exit_code(GRADWIRE_UNAVAILABLE, 1) == 5);
  for (const auto status :
       {GRADWIRE_CORRUPT_DATA, GRADWIRE_BUFFER_TOO_SMALL, GRADWIRE_NOT_FOUND, GRADWIRE_INTERNAL}) {
    CHECK(gradwire_exit_code(status, 0) == 1);
    CHECK(gradwire_exit_code(status, 1) == 1);
  }
}

/// Every call that takes a client, by name. What it returns for one that may not be used.
std::vector<std::pair<std::string, std::function<gradwire_status(gradwire_client*)>>> AllCalls() {
  static float value = 0;
  static std::uint32_t id = 0;
  static gradwire_handle handle{};
  static gradwire_stats stats{};
  static double number = 0;
  static std::size_t bytes = 0;
  static const std::vector<std::uint64_t> shape = {1};
  static const gradwire_tensor tensor = Tensor("t", shape);
  return {
      {"close", [](auto* c) { return gradwire_close(c); }},
      {"declare", [](auto* c) { return gradwire_declare(c, &tensor, 1, &id); }},
      {"push_pull",
       [](auto* c) { return gradwire_push_pull(c, 0, &value, &value, sizeof value, &handle); }},
      {"wait", [](auto* c) { return gradwire_wait(c, handle, -1); }},
      {"wait for", [](auto* c) { return gradwire_wait(c, handle, 1000); }},
      {"end_step", [](auto* c) { return gradwire_end_step(c); }},
      {"set_learning_rate", [](auto* c) { return gradwire_set_learning_rate(c, &id, 1, 0.1); }},
      {"set_loss_scale", [](auto* c) { return gradwire_set_loss_scale(c, 1024); }},
      {"broadcast", [](auto* c) { return gradwire_broadcast(c, "b", &value, sizeof value, 0); }},
      {"barrier", [](auto* c) { return gradwire_barrier(c); }},
      {"save_state", [](auto* c) { return gradwire_save_state(c, nullptr, &bytes); }},
      {"load_state", [](auto* c) { return gradwire_load_state(c, nullptr, 0); }},
      {"plan", [](auto* c) { return gradwire_plan(c, nullptr, &bytes); }},
      {"get_stats", [](auto* c) { return gradwire_get_stats(c, &stats); }},
      {"optimizer_create",
       [](auto* c) {
         static gradwire_optimizer* optimizer = nullptr;
         return gradwire_optimizer_create(c, "sgd", &optimizer);
       }},
      {"get_value", [](auto* c) { return gradwire_get_value(c, "goodput", &number); }},
  };
}

TEST_CASE("a client that is NULL is refused by every call", "[capi]") {
  for (const auto& [name, call] : AllCalls()) {
    CAPTURE(name);
    CHECK(call(nullptr) == GRADWIRE_INVALID_ARGUMENT);
    CHECK(Has(gradwire_last_error(), "the client is NULL"));
  }
  CHECK(gradwire_poll(nullptr, {}) == 1);
  CHECK(gradwire_was_nonfinite(nullptr, {}) == 0);
  CHECK(gradwire_nonfinite_ranks(nullptr, {}, nullptr, 0) == 0);
  CHECK(gradwire_rank(nullptr) == 0);
  CHECK(gradwire_size(nullptr) == 0);
  CHECK(gradwire_local_rank(nullptr) == 0);
  CHECK(gradwire_local_size(nullptr) == 0);
  gradwire_free(nullptr);
}

TEST_CASE("init says what is wrong with the configuration", "[capi]") {
  const Variable scheduler("DMLC_ROLE", nullptr);
  const Variable role("GRADWIRE_ROLE", nullptr);
  const Variable config("GRADWIRE_CONFIG", nullptr);
  int dummy = 0;
  auto* client = reinterpret_cast<gradwire_client*>(&dummy);
  const auto expect = [&](gradwire_status status, const std::string& part) {
    CHECK(status == GRADWIRE_INVALID_ARGUMENT);
    CHECK(client == nullptr);
    CAPTURE(gradwire_last_error());
    CHECK(Has(gradwire_last_error(), part));
  };
  SECTION("no place for the client") {
    CHECK(gradwire_init(nullptr, nullptr, 0, 0, nullptr) == GRADWIRE_INVALID_ARGUMENT);
    CHECK(Has(gradwire_last_error(), "the place for the client is NULL"));
  }
  SECTION("no list of assignments") {
    expect(gradwire_init(nullptr, nullptr, 2, 0, &client), "list of assignments is NULL");
  }
  SECTION("an assignment that is NULL") {
    const char* const assignments[] = {"job.workers=2", nullptr};
    expect(gradwire_init(nullptr, assignments, 2, 0, &client), "assignment 1 is NULL");
  }
  SECTION("an unknown key") { expect(Init({"job.wrokers=2"}, 0, &client), "job.workers"); }
  SECTION("a rank beyond the job") { expect(Init({"job.workers=2"}, 2, &client), "2"); }
  SECTION("a rank beyond 32 bits") {
    expect(Init({"job.workers=2"}, std::int64_t{1} << 32, &client), "4294967296");
  }
  SECTION("a scheduler") {
    const Variable variable("DMLC_ROLE", "scheduler");
    expect(Init({}, 0, &client), "Gradwire has none");
  }
  SECTION("a server") {
    const Variable variable("DMLC_ROLE", "server");
    expect(Init({}, 0, &client), "this program is a worker");
  }
}

TEST_CASE("init fails with NOT_FOUND or INVALID_ARGUMENT for a file that is not there", "[capi]") {
  gradwire_client* client = nullptr;
  const auto status = gradwire_init("/nonexistent/job.yaml", nullptr, 0, 0, &client);
  CHECK((status == GRADWIRE_NOT_FOUND || status == GRADWIRE_INVALID_ARGUMENT));
  CHECK(Has(gradwire_last_error(), "/nonexistent/job.yaml"));
}

TEST_CASE("init gives up with TIMEOUT where no server listens", "[capi]") {
  gradwire_client* client = nullptr;
  // Port 1 of loopback: nobody's.
  const auto status =
      Init({"job.workers=1", "endpoint=tcp://127.0.0.1:1", "timeouts.start=300ms", "log.level=off"},
           0, &client);
  CHECK(status == GRADWIRE_TIMEOUT);
  CHECK(client == nullptr);
  CHECK(Has(gradwire_last_error(), "127.0.0.1:1"));
  CHECK(gradwire_exit_code(status, 0) == 3);
}

TEST_CASE("two workers sum every dtype and average in place", "[capi]") {
  const Variable local_rank("GRADWIRE_LOCAL_RANK", "1");
  const Variable local_size("GRADWIRE_LOCAL_SIZE", "4");
  Job job(2);
  const std::string failed = job.Run(2, [](Failures& failures, gradwire_client*& client) {
    const std::uint32_t rank = gradwire_rank(client);
    failures.Expect(rank < 2, "rank");
    failures.Expect(gradwire_size(client) == 2, "size");
    failures.Expect(gradwire_local_rank(client) == 1, "local rank");
    failures.Expect(gradwire_local_size(client) == 4, "local size");

    SumOfTwo<float>(failures, client, GRADWIRE_FLOAT32, 1, 2, 3);
    // 1, 2 and 3 as fp16 and as bf16.
    SumOfTwo<std::uint16_t>(failures, client, GRADWIRE_FLOAT16, 0x3c00, 0x4000, 0x4200);
    SumOfTwo<std::uint16_t>(failures, client, GRADWIRE_BFLOAT16, 0x3f80, 0x4000, 0x4040);
    SumOfTwo<double>(failures, client, GRADWIRE_FLOAT64, 1, 2, 3);
    SumOfTwo<std::int8_t>(failures, client, GRADWIRE_INT8, -1, -2, -3);
    SumOfTwo<std::uint8_t>(failures, client, GRADWIRE_UINT8, 100, 101, 201);
    SumOfTwo<std::int32_t>(failures, client, GRADWIRE_INT32, 1 << 30, -3, (1 << 30) - 3);
    // Beyond what a double holds exactly.
    const std::int64_t large = (std::int64_t{1} << 60) + 1;
    SumOfTwo<std::int64_t>(failures, client, GRADWIRE_INT64, large, 2, large + 2);

    const std::vector<std::uint64_t> shape = {100};
    const auto id = Declare(failures, client, Tensor("average", shape));
    for (int round = 0; round < 5; ++round) {
      std::vector<float> values(100, static_cast<float>(rank + 1));
      failures.Ok(PushPull(client, id, values, values), "in place");
      failures.Expect(values == std::vector<float>(100, 1.5F), "wrong average");
    }

    // A scalar has no shape at all.
    const gradwire_tensor scalar = {"scalar", nullptr, 0, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 0};
    const auto scalar_id = Declare(failures, client, scalar);
    std::vector<float> one(1, static_cast<float>(rank));
    failures.Ok(PushPull(client, scalar_id, one, one), "scalar");
    failures.Expect(one[0] == 0.5F, "wrong scalar");

    const std::vector<std::uint64_t> none = {3, 0};
    const auto empty_id = Declare(failures, client, Tensor("empty", none));
    std::vector<float> nothing;
    failures.Ok(PushPull(client, empty_id, nothing, nothing), "empty");

    failures.Ok(gradwire_barrier(client), "barrier");
    gradwire_stats stats{};
    failures.Ok(gradwire_get_stats(client, &stats), "stats");
    // 21 elements of 30 bytes over all dtypes, five times 100 floats, and the scalar.
    const std::uint64_t raw = 21 * (4 + 2 + 2 + 8 + 1 + 1 + 4 + 8) + 5 * 400 + 4;
    failures.Expect(stats.raw_push_bytes == raw && stats.raw_pull_bytes == raw, "raw bytes");
    failures.Expect(stats.sent_bytes > raw && stats.received_bytes > raw, "wire bytes");
    failures.Expect(stats.nonfinite_units == 0 && stats.reconnects == 0, "stats");
    std::size_t plan_bytes = 0;
    failures.Expect(
        gradwire_plan(client, nullptr, &plan_bytes) == GRADWIRE_BUFFER_TOO_SMALL && plan_bytes > 0,
        "the size of the plan");
    std::string plan(plan_bytes, '\0');
    failures.Ok(gradwire_plan(client, plan.data(), &plan_bytes), "plan");
    failures.Expect(plan_bytes == plan.size() && plan.front() == '{' && plan.back() == '}' &&
                        plan.find(R"("tensor":"scalar")") != std::string::npos,
                    "the plan");
    failures.Expect(gradwire_plan(client, nullptr, nullptr) == GRADWIRE_INVALID_ARGUMENT,
                    "a plan without a place for its size");
    double value = -1;
    failures.Ok(gradwire_get_value(client, "compression_costs_ms", &value), "value");
    failures.Expect(value == 0, "a cost without compression");
    failures.Ok(gradwire_get_value(client, "goodput", &value), "goodput");
    failures.Expect(value > 0, "no goodput");
    failures.Ok(gradwire_get_value(client, "ccr", &value), "ccr");
    failures.Expect(value >= 0, "a ratio below 0");
    failures.Expect(gradwire_get_value(client, "godput", &value) == GRADWIRE_NOT_FOUND &&
                        Has(gradwire_last_error(), "'godput'") &&
                        Has(gradwire_last_error(), "compression_saves_ms, "),
                    "a value that there is not");
    failures.Expect(gradwire_get_value(client, nullptr, &value) == GRADWIRE_INVALID_ARGUMENT &&
                        gradwire_get_value(client, "goodput", nullptr) == GRADWIRE_INVALID_ARGUMENT,
                    "a value by NULL");
    failures.Ok(gradwire_close(client), "close");
    failures.Ok(gradwire_close(client), "close again");
    failures.Expect(gradwire_barrier(client) == GRADWIRE_INVALID_ARGUMENT &&
                        Has(gradwire_last_error(), "after Close"),
                    "a barrier after close");
  });
  CHECK(failed == "");
}

TEST_CASE("a push-pull that was not finite is known by its handle, with the ranks at fault",
          "[capi]") {
  Job job(3);
  const std::string failed = job.Run(3, [](Failures& failures, gradwire_client*& client) {
    const std::uint32_t rank = gradwire_rank(client);
    const std::vector<std::uint64_t> shape = {100};
    const auto id = Declare(failures, client, Tensor("w", shape, GRADWIRE_FLOAT32, GRADWIRE_SUM));
    // 0: finite; 1: two ranks are not; 2: only the sum is not; 3: finite again.
    gradwire_handle last{};
    for (int round = 0; round < 4; ++round) {
      std::vector<float> values(100, round == 2 ? 3e38F : 1.0F);
      if (round == 1 && rank > 0) values[7] = HUGE_VALF;
      gradwire_handle handle{};
      failures.Ok(gradwire_push_pull(client, id, values.data(), values.data(), 400, &handle),
                  "push");
      failures.Expect(gradwire_was_nonfinite(client, last) == 0, "of a handle that is over");
      failures.Ok(gradwire_end_step(client), "end of step");
      failures.Ok(gradwire_wait(client, handle, -1), "wait");
      const std::string what = "round " + std::to_string(round);
      const bool is_void = round == 1 || round == 2;
      failures.Expect(gradwire_was_nonfinite(client, handle) == (is_void ? 1 : 0), what);
      failures.Expect(std::isnan(values[0]) == is_void, what + ": the result");
      std::uint32_t ranks[3] = {9, 9, 9};
      failures.Expect(gradwire_nonfinite_ranks(client, handle, ranks, 1) == (round == 1 ? 2U : 0U),
                      what + ": number of ranks");
      failures.Expect(ranks[0] == (round == 1 ? 1U : 9U) && ranks[1] == 9, what + ": first rank");
      if (round == 1) {
        failures.Expect(gradwire_nonfinite_ranks(client, handle, nullptr, 0) == 2, "no room");
        failures.Expect(gradwire_nonfinite_ranks(client, handle, ranks, 3) == 2 && ranks[0] == 1 &&
                            ranks[1] == 2 && ranks[2] == 9,
                        "all ranks");
      }
      last = handle;
    }
    failures.Ok(gradwire_close(client), "close");
  });
  CHECK(failed == "");
}

TEST_CASE("a broadcast is exact whatever the compression", "[capi]") {
  Job job(2, {"compression.uplink.compressor=onebit", "compression.downlink.compressor=onebit",
              "compression.min_bytes=0B"});
  const std::string failed = job.Run(2, [](Failures& failures, gradwire_client*& client) {
    std::vector<std::uint8_t> expected(10007);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = static_cast<std::uint8_t>(i * 31 + i / 256);
    }
    std::vector<std::uint8_t> data(expected.size(), 0);
    if (gradwire_rank(client) == 1) data = expected;
    failures.Ok(gradwire_broadcast(client, "parameters", data.data(), data.size(), 1), "broadcast");
    failures.Expect(data == expected, "other bytes");
    failures.Ok(gradwire_broadcast(client, "nothing", nullptr, 0, 0), "broadcast of nothing");
    failures.Expect(
        gradwire_broadcast(client, "x", data.data(), 1, 2) == GRADWIRE_INVALID_ARGUMENT &&
            Has(gradwire_last_error(), "root 2"),
        "a root that there is not");
    failures.Expect(
        gradwire_broadcast(client, nullptr, data.data(), 1, 0) == GRADWIRE_INVALID_ARGUMENT,
        "no name");
    failures.Expect(gradwire_broadcast(client, "x", nullptr, 1, 0) == GRADWIRE_INVALID_ARGUMENT,
                    "no data");
    failures.Expect(gradwire_broadcast(client, std::string(1015, 'x').c_str(), data.data(), 1, 0) ==
                        GRADWIRE_INVALID_ARGUMENT,
                    "a long name");
    const std::string longest(1014, 'x');
    failures.Ok(gradwire_broadcast(client, longest.c_str(), data.data(), 1, 0), "longest name");
    failures.Ok(gradwire_close(client), "close");
  });
  CHECK(failed == "");
}

TEST_CASE("a wrong call is refused by name and the job goes on", "[capi]") {
  Job job(1);
  const std::string failed = job.Run(1, [](Failures& failures, gradwire_client*& client) {
    const auto refused = [&](gradwire_status status, const std::string& part) {
      failures.Expect(
          status == GRADWIRE_INVALID_ARGUMENT && Has(gradwire_last_error(), part),
          "expected '" + part + "', got " + std::to_string(status) + ": " + gradwire_last_error());
    };
    std::uint32_t id = 0;
    const std::vector<std::uint64_t> shape = {4};
    const auto declare = [&](const gradwire_tensor& tensor) {
      return gradwire_declare(client, &tensor, 1, &id);
    };
    refused(gradwire_declare(client, nullptr, 1, &id), "list of tensors is NULL");
    const gradwire_tensor fine = Tensor("fine", shape);
    refused(gradwire_declare(client, &fine, 1, nullptr), "place for the ids is NULL");
    refused(gradwire_declare(client, &fine, 0, &id), "no tensors");
    refused(gradwire_declare(client, &fine, SIZE_MAX, &id), "at most");
    refused(declare(Tensor(nullptr, shape)), "name of tensor 0 of the declaration is NULL");
    refused(declare(Tensor("", shape)), "0 bytes, expected 1 to 1024");
    refused(declare(Tensor(std::string(1025, 'x').c_str(), shape)), "1025 bytes");
    gradwire_tensor wrong = fine;
    wrong.shape = nullptr;
    refused(declare(wrong), "tensor 'fine': its shape is NULL");
    wrong = fine;
    wrong.num_dimensions = 65;
    refused(declare(wrong), "65 dimensions, expected at most 64");
    const std::vector<std::uint64_t> huge = {std::uint64_t{1} << 40, std::uint64_t{1} << 40};
    refused(declare(Tensor("huge", huge)), "tensor 'huge': shape [");
    for (const int number : {0, 9, -1}) {
      wrong = fine;
      std::memcpy(&wrong.dtype, &number, sizeof number);
      refused(declare(wrong), "its dtype is " + std::to_string(number));
    }
    for (const int number : {0, 3}) {
      wrong = fine;
      std::memcpy(&wrong.op, &number, sizeof number);
      refused(declare(wrong), "its op is " + std::to_string(number));
    }
    failures.Ok(declare(fine), "declare");

    std::vector<float> values(8, 1.0F);
    float* const data = values.data();
    gradwire_handle handle{};
    refused(gradwire_push_pull(client, id + 1, data, data, 16, &handle), "unknown");
    refused(gradwire_push_pull(client, id, data, data, 12, &handle), "expected 16");
    refused(gradwire_push_pull(client, id, nullptr, data, 16, &handle), "input is NULL");
    refused(gradwire_push_pull(client, id, data, nullptr, 16, &handle), "output is NULL");
    refused(gradwire_push_pull(client, id, data, data, 16, nullptr), "handle is NULL");
    refused(gradwire_push_pull(client, id, data, data + 3, 16, &handle), "overlap");
    refused(gradwire_push_pull(client, id, data + 3, data, 16, &handle), "overlap");
    auto* const odd = reinterpret_cast<char*>(data) + 1;
    refused(gradwire_push_pull(client, id, odd, odd, 16, &handle), "aligned");
    refused(gradwire_wait(client, {id + 1, 1}, -1), "tensor 1");
    refused(gradwire_wait(client, {id + 1, 1}, 100), "tensor 1");
    failures.Expect(gradwire_poll(client, {id + 1, 1}) == 1, "poll of an unknown tensor");
    refused(gradwire_set_learning_rate(client, nullptr, 1, 0.1), "list of tensors is NULL");
    const std::uint32_t ids[] = {id, id + 1};
    refused(gradwire_set_learning_rate(client, ids, 2, 0.1), "tensor id 1, 1 are declared");
    for (const double number : {-0.1, std::nan(""), HUGE_VAL}) {
      refused(gradwire_set_learning_rate(client, ids, 1, number), "learning rate is");
      refused(gradwire_set_loss_scale(client, number), "loss scale is");
    }
    failures.Ok(gradwire_set_learning_rate(client, nullptr, 0, 0.1), "rate of no tensor");
    failures.Ok(gradwire_set_learning_rate(client, ids, 1, 0), "rate 0");
    failures.Ok(gradwire_set_loss_scale(client, 0), "no loss scale");
    refused(gradwire_get_stats(client, nullptr), "NULL");
    refused(gradwire_save_state(client, nullptr, nullptr), "NULL");
    std::size_t bytes = 1;
    refused(gradwire_save_state(client, nullptr, &bytes), "buffer is NULL");
    refused(gradwire_load_state(client, nullptr, 1), "buffer is NULL");

    // Neighbours don't overlap, and the job still works.
    failures.Ok(gradwire_push_pull(client, id, data, data + 4, 16, &handle), "push_pull");
    failures.Ok(gradwire_end_step(client), "end_step");
    failures.Ok(gradwire_wait(client, handle, 30000), "wait");
    failures.Expect(gradwire_poll(client, handle) == 1, "poll after wait");
    failures.Ok(gradwire_close(client), "close");
  });
  CHECK(failed == "");
}

TEST_CASE("tensors that differ between workers are refused to all of them", "[capi]") {
  Job job(2);
  const std::string failed = job.Run(2, [](Failures& failures, gradwire_client*& client) {
    const std::vector<std::uint64_t> shape = {3 + std::uint64_t{gradwire_rank(client)}};
    const gradwire_tensor tensor = Tensor("w", shape);
    std::uint32_t id = 0;
    failures.Expect(gradwire_declare(client, &tensor, 1, &id) == GRADWIRE_INVALID_ARGUMENT,
                    "accepted");
    const std::string text = gradwire_last_error();
    failures.Expect(Has(text, "'w'") && Has(text, "[3] on rank 0") && Has(text, "[4] on rank 1"),
                    text);
  });
  CHECK(failed == "");
}

TEST_CASE("each thread has the text of its own last error", "[capi]") {
  REQUIRE(gradwire_close(nullptr) == GRADWIRE_INVALID_ARGUMENT);
  const std::string here = gradwire_last_error();
  std::string fresh;
  std::string there;
  std::thread([&] {
    fresh = gradwire_last_error();
    (void)gradwire_init(nullptr, nullptr, 0, 0, nullptr);
    there = gradwire_last_error();
  }).join();
  CHECK(fresh == "");
  CHECK(Has(there, "the place for the client"));
  CHECK(gradwire_last_error() == here);
}

TEST_CASE("a wait with a deadline ends nothing", "[capi]") {
  Job job(2);
  std::promise<void> timed_out;
  std::shared_future<void> go = timed_out.get_future().share();
  const std::string failed = job.Run(2, [&](Failures& failures, gradwire_client*& client) {
    const std::vector<std::uint64_t> shape = {1000};
    const auto id = Declare(failures, client, Tensor("slow", shape));
    const std::vector<float> input(1000, static_cast<float>(gradwire_rank(client)));
    std::vector<float> output(1000);
    if (gradwire_rank(client) == 1) go.wait();  // rank 0 always gets there: its waits are bounded
    gradwire_handle handle{};
    failures.Ok(gradwire_push_pull(client, id, input.data(), output.data(), 4000, &handle), "push");
    failures.Ok(gradwire_end_step(client), "end_step");
    if (gradwire_rank(client) == 0) {
      for (const std::int64_t timeout_ms : {0, 50}) {
        const auto status = gradwire_wait(client, handle, timeout_ms);
        const std::string text = gradwire_last_error();
        failures.Expect(status == GRADWIRE_TIMEOUT && Has(text, "tensor 'slow' on rank 0") &&
                            Has(text, "after " + std::to_string(timeout_ms) + " ms"),
                        text);
      }
      failures.Expect(gradwire_poll(client, handle) == 0, "poll");
      // Residuals change while it is under way.
      std::size_t bytes = 0;
      failures.Expect(gradwire_save_state(client, nullptr, &bytes) == GRADWIRE_INVALID_ARGUMENT &&
                          Has(gradwire_last_error(), "tensor 'slow'"),
                      gradwire_last_error());
      failures.Expect(gradwire_load_state(client, nullptr, 0) == GRADWIRE_INVALID_ARGUMENT,
                      "load_state in mid-round");
      timed_out.set_value();
    }
    failures.Ok(gradwire_wait(client, handle, INT64_MAX), "wait");
    failures.Expect(output == std::vector<float>(1000, 0.5F), "wrong average");
    failures.Ok(gradwire_close(client), "close");
  });
  CHECK(failed == "");
}

TEST_CASE("the state is saved and restored, and a damaged one ends the job", "[capi]") {
  const auto damage = GENERATE("flipped", "cut", "empty");
  CAPTURE(damage);
  Job job(1, {"compression.uplink.compressor=onebit", "compression.downlink.compressor=onebit",
              "compression.min_bytes=0B"});
  const std::string failed = job.Run(1, [&](Failures& failures, gradwire_client*& client) {
    const std::vector<std::uint64_t> shape = {4096};
    const auto id = Declare(failures, client, Tensor("w", shape));
    std::vector<float> input(4096);
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = std::sin(static_cast<float>(i));
    std::vector<float> output(4096);
    failures.Ok(PushPull(client, id, input, output), "push_pull");

    std::size_t bytes = 0;
    failures.Expect(gradwire_save_state(client, nullptr, &bytes) == GRADWIRE_BUFFER_TOO_SMALL,
                    "no room");
    failures.Expect(bytes > 4096 * 4, "the state has a float an element");
    std::vector<std::byte> saved(bytes);
    failures.Ok(gradwire_save_state(client, saved.data(), &bytes), "save_state");
    failures.Ok(PushPull(client, id, input, output), "push_pull");
    std::vector<std::byte> later(bytes);
    failures.Ok(gradwire_save_state(client, later.data(), &bytes), "save_state");
    failures.Expect(saved != later, "the residual did not change");
    failures.Ok(gradwire_load_state(client, saved.data(), saved.size()), "load_state");
    failures.Ok(gradwire_save_state(client, later.data(), &bytes), "save_state");
    failures.Expect(saved == later, "the state is another one");

    if (damage == std::string("flipped")) later[bytes / 2] ^= std::byte{1};
    if (damage == std::string("cut")) later.pop_back();
    if (damage == std::string("empty")) later.clear();
    failures.Expect(
        gradwire_load_state(client, later.data(), later.size()) == GRADWIRE_CORRUPT_DATA, damage);
    failures.Expect(Has(gradwire_last_error(), "the saved state is damaged"),
                    gradwire_last_error());
    failures.Expect(gradwire_close(client) == GRADWIRE_CORRUPT_DATA, "the job goes on");
  });
  CHECK(failed == "");
}

TEST_CASE("a state that has no room yet is gathered once", "[capi]") {
  Job job(2, {"compression.uplink.compressor=onebit", "compression.downlink.compressor=onebit",
              "compression.min_bytes=0B"});
  const std::string failed = job.Run(2, [](Failures& failures, gradwire_client*& client) {
    const std::vector<std::uint64_t> shape = {4096};
    const auto id = Declare(failures, client, Tensor("w", shape));
    std::vector<float> input(4096);
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = std::sin(static_cast<float>(i));
    std::vector<float> output(4096);
    failures.Ok(PushPull(client, id, input, output), "push_pull");

    // One collective call, which rank 0 makes in three parts.
    std::vector<std::byte> saved(1 << 20);
    std::size_t bytes = 0;
    if (gradwire_rank(client) == 0) {
      for (const std::size_t room : {std::size_t{0}, std::size_t{100}}) {
        bytes = room;
        failures.Expect(
            gradwire_save_state(client, saved.data(), &bytes) == GRADWIRE_BUFFER_TOO_SMALL,
            "no room");
        failures.Expect(bytes > 2 * 4096 * 4, "rank 0 has the server's residual too");
      }
    } else {
      bytes = saved.size();
    }
    failures.Ok(gradwire_save_state(client, saved.data(), &bytes), "save_state");
    saved.resize(bytes);
    failures.Ok(gradwire_barrier(client), "barrier");

    // What waits to be handed out is dropped by everything that changes the state.
    const auto begins_to_save = [&] {
      bytes = 0;
      failures.Expect(gradwire_save_state(client, nullptr, &bytes) == GRADWIRE_BUFFER_TOO_SMALL,
                      "no room");
    };
    const auto save = [&] {
      std::vector<std::byte> now(1 << 20);
      bytes = now.size();
      failures.Ok(gradwire_save_state(client, now.data(), &bytes), "save_state");
      now.resize(bytes);
      return now;
    };
    begins_to_save();
    failures.Ok(PushPull(client, id, input, output), "push_pull");
    const auto pushed = save();
    failures.Expect(pushed != saved, "a push_pull between");
    begins_to_save();
    failures.Ok(gradwire_load_state(client, saved.data(), saved.size()), "load_state");
    failures.Expect(save() == saved, "a load_state between");
    begins_to_save();
    failures.Ok(gradwire_end_step(client), "end_step");
    const auto stepped = save();
    failures.Expect(stepped != saved, "an end_step between");
    failures.Expect(save() == stepped, "the same again");
    failures.Ok(gradwire_close(client), "close");
  });
  CHECK(failed == "");
}

TEST_CASE("a worker that goes with a push-pull in flight is named to the others", "[capi]") {
  Job job(2);
  const std::string failed = job.Run(2, [](Failures& failures, gradwire_client*& client) {
    const std::vector<std::uint64_t> shape = {1000};
    const auto left = Declare(failures, client, Tensor("left", shape));
    const auto right = Declare(failures, client, Tensor("right", shape));
    std::vector<float> values(1000);
    gradwire_handle handle{};
    const bool goes = gradwire_rank(client) == 1;
    failures.Ok(gradwire_push_pull(client, goes ? right : left, values.data(), values.data(), 4000,
                                   &handle),
                "push");
    failures.Ok(gradwire_end_step(client), "end_step");
    failures.Ok(gradwire_barrier(client), "barrier");  // both have begun
    if (goes) {
      gradwire_free(client);
      client = nullptr;
      return;
    }
    const auto status = gradwire_wait(client, handle, -1);
    failures.Expect(status == GRADWIRE_UNAVAILABLE && Has(gradwire_last_error(), "worker 1 ends"),
                    gradwire_last_error());
    failures.Expect(gradwire_exit_code(status, 1) == 5, "exit code");
    failures.Expect(gradwire_barrier(client) == GRADWIRE_UNAVAILABLE, "the job has ended");
  });
  CHECK(failed == "");
}

TEST_CASE("the stretches that the filter sends are listed", "[capi]") {
  // Two units of 4096 elements, of the classes 0 and 1.
  Job job(1,
          {"compression.filter.type=covap", "compression.filter.interval=2",
           "compression.filter.inactive=skip", "partition.bytes=16KiB", "partition.fuse_below=0"});
  const std::string failures = job.Run(1, [](Failures& check, gradwire_client*& client) {
    const std::uint64_t extent = 8192;
    const gradwire_tensor tensor = {"w", &extent, 1, GRADWIRE_FLOAT32, GRADWIRE_SUM, 0};
    std::uint32_t id = 0;
    if (!check.Ok(gradwire_declare(client, &tensor, 1, &id), "declare")) return;
    double skips = 0;
    check.Ok(gradwire_get_value(client, "filter_skips", &skips), "value");
    check.Expect(skips == 1, "the filter skips");
    double interval = 0;
    check.Ok(gradwire_get_value(client, "interval", &interval), "value");
    check.Expect(interval == 2, "the interval");
    gradwire_handle handle{};
    for (std::uint64_t step = 0; step < 4; ++step) {
      std::vector<float> in(extent, 1.0F);
      std::vector<float> out(extent, -1.0F);
      check.Ok(gradwire_push_pull(client, id, in.data(), out.data(), extent * 4, &handle), "push");
      check.Ok(gradwire_end_step(client), "end of step");
      check.Ok(gradwire_wait(client, handle, -1), "wait");
      std::size_t count = 0;
      check.Ok(gradwire_active_ranges(client, handle, nullptr, 0, &count), "count");
      gradwire_range ranges[2] = {};
      check.Ok(gradwire_active_ranges(client, handle, ranges, 2, &count), "ranges");
      const std::uint64_t sent = step % 2 * 4096;
      check.Expect(count == 1 && ranges[0].offset == sent && ranges[0].count == 4096,
                   "a range of step " + std::to_string(step));
      check.Expect(out[sent] > 0 && out[4096 - sent] == -1.0F, "step " + std::to_string(step));
    }
    double held_back = 0;
    check.Ok(gradwire_get_value(client, "held_back_units", &held_back), "value");
    check.Expect(held_back == 4, "units held back");
    std::size_t count = 0;
    --handle.generation;
    check.Expect(
        gradwire_active_ranges(client, handle, nullptr, 0, &count) == GRADWIRE_INVALID_ARGUMENT &&
            Has(gradwire_last_error(), "not of its last push-pull"),
        "an old handle");
    ++handle.generation;
    check.Expect(
        gradwire_active_ranges(client, handle, nullptr, 0, nullptr) == GRADWIRE_INVALID_ARGUMENT,
        "no place for the count");
  });
  INFO(failures);
  CHECK(failures.empty());
}

TEST_CASE("a process can have clients of two jobs", "[capi]") {
  Job first(1);
  Job second(1);
  gradwire_client* a = nullptr;
  gradwire_client* b = nullptr;
  REQUIRE(Init(first.assignments(), 0, &a) == GRADWIRE_OK);
  REQUIRE(Init(second.assignments(), 0, &b) == GRADWIRE_OK);
  Failures failures;
  const std::vector<std::uint64_t> shape = {5};
  const auto in_a = Declare(failures, a, Tensor("w", shape));
  const auto in_b = Declare(failures, b, Tensor("w", shape, GRADWIRE_FLOAT64));
  std::vector<float> floats(5, 2.0F);
  std::vector<double> doubles(5, 3.0);
  failures.Ok(PushPull(a, in_a, floats, floats), "first");
  failures.Ok(PushPull(b, in_b, doubles, doubles), "second");
  failures.Ok(gradwire_close(a), "close the first");
  failures.Ok(PushPull(b, in_b, doubles, doubles), "second, after the first has closed");
  CHECK(floats == std::vector<float>(5, 2.0F));
  CHECK(doubles == std::vector<double>(5, 3.0));
  failures.Ok(gradwire_close(b), "close the second");
  gradwire_free(a);
  gradwire_free(b);
  CHECK(failures.Take() == "");
}

/// Frees at the end of the scope, before the job's own end of the client.
struct OptimizerOwner {
  gradwire_optimizer* get = nullptr;
  ~OptimizerOwner() { gradwire_optimizer_free(get); }
};

float Wave(std::size_t i) { return std::sin(static_cast<float>(i)); }

/// A gradient that differs by rank and step.
std::vector<float> GradientOf(std::uint32_t rank, std::uint64_t step, std::size_t n) {
  std::vector<float> gradient(n);
  for (std::size_t i = 0; i < n; ++i) gradient[i] = Wave(i * (rank + 2) + step * 7) + 0.1F;
  return gradient;
}

/// Two workers, some steps of a method over the tensors "w" (decays) and "b".
struct MethodRun {
  Strings settings;
  const char* method = nullptr;  // null: the job's
  std::uint64_t steps = 8;
  std::uint64_t restored_in = UINT64_MAX;  // the step before which another optimizer takes over
  std::uint64_t void_in = UINT64_MAX;      // the step in which rank 1 has a NaN

  struct Tensor {
    const char* name;
    std::size_t n;
  };
  static constexpr Tensor kTensors[2] = {{"w", 300}, {"b", 20}};

  // Of rank 0.
  std::vector<float> parameters[2];
  std::vector<std::vector<float>> pulled[2];  // by step
  double skipped = 0;

  static double RateOf(std::uint64_t step) { return 0.01 / static_cast<double>(step + 1); }

  std::string Go() {
    Job job(2, settings);
    std::vector<float> result[2][2];
    const std::string failed = job.Run(2, [&](Failures& check, gradwire_client*& client) {
      const std::uint32_t rank = gradwire_rank(client);
      std::uint32_t ids[2] = {};
      for (std::size_t t = 0; t < 2; ++t) {
        const std::uint64_t extent = kTensors[t].n;
        const gradwire_tensor tensor = {kTensors[t].name, &extent,          1,
                                        GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 0};
        if (!check.Ok(gradwire_declare(client, &tensor, 1, &ids[t]), "declare")) return;
      }
      const auto make = [&](OptimizerOwner& made, bool w_first) {
        check.Ok(gradwire_optimizer_create(client, method, &made.get), "create");
        for (const std::size_t t : {w_first ? 0U : 1U, w_first ? 1U : 0U}) {
          check.Ok(gradwire_optimizer_add(made.get, ids[t], t == 0 ? nullptr : "other", t == 0),
                   "add");
        }
      };
      OptimizerOwner first;
      OptimizerOwner second;
      make(first, true);
      gradwire_optimizer* optimizer = first.get;
      std::vector<float> x[2];
      for (std::size_t t = 0; t < 2; ++t) {
        for (std::size_t i = 0; i < kTensors[t].n; ++i) x[t].push_back(Wave(i + t));
      }
      for (std::uint64_t step = 0; step < steps; ++step) {
        if (step == restored_in) {
          std::size_t bytes = 0;
          check.Expect(
              gradwire_optimizer_save(optimizer, nullptr, &bytes) == GRADWIRE_BUFFER_TOO_SMALL,
              "save without room");
          std::vector<std::byte> saved(bytes);
          check.Ok(gradwire_optimizer_save(optimizer, saved.data(), &bytes), "save");
          make(second, false);
          optimizer = second.get;
          check.Ok(gradwire_optimizer_load(optimizer, saved.data(), bytes), "load");
        }
        std::vector<float> gradients[2];
        gradwire_handle handles[2] = {};
        for (std::size_t t = 0; t < 2; ++t) {
          std::vector<float>& g = gradients[t];
          g = GradientOf(rank, step + t, kTensors[t].n);
          if (step == void_in && rank == 1 && t == 0) g[5] = NAN;
          check.Ok(gradwire_optimizer_send(optimizer, ids[t], g.data(), g.size()), "send");
          check.Ok(gradwire_push_pull(client, ids[t], g.data(), g.data(), g.size() * sizeof(float),
                                      &handles[t]),
                   "push_pull");
        }
        check.Ok(gradwire_end_step(client), "end of step");
        check.Ok(gradwire_optimizer_end_step(optimizer), "end of the method's step");
        for (std::size_t t = 0; t < 2; ++t) {
          check.Ok(gradwire_wait(client, handles[t], -1), "wait");
          if (rank == 0) pulled[t].push_back(gradients[t]);
          check.Ok(gradwire_optimizer_update(optimizer, handles[t], gradients[t].data(),
                                             RateOf(step), x[t].data(), x[t].size()),
                   "update");
        }
      }
      for (std::size_t t = 0; t < 2; ++t) result[rank][t] = x[t];
      if (rank == 0) {
        check.Ok(gradwire_optimizer_get_value(optimizer, "skipped", &skipped), "skipped");
      }
    });
    for (std::size_t t = 0; t < 2; ++t) {
      if (result[0][t] != result[1][t]) return failed + "the workers' parameters differ";
      parameters[t] = result[0][t];
    }
    return failed;
  }

  /// Where an optimizer of the library's own comes to with what was pulled.
  std::vector<float> Replayed(std::size_t t, std::string_view spec) const {
    auto optimizer = Optimizer::Create(spec, nullptr);
    REQUIRE(optimizer.ok());
    REQUIRE(optimizer.value()->AddTensor("t", kTensors[t].n, t == 0).ok());
    std::vector<float> x;
    for (std::size_t i = 0; i < kTensors[t].n; ++i) x.push_back(Wave(i + t));
    for (std::uint64_t step = 0; step < steps; ++step) {
      std::vector<float> gradient = GradientOf(0, step + t, kTensors[t].n);
      REQUIRE(optimizer.value()->Send(0, gradient).ok());
      REQUIRE(optimizer.value()->Update(0, pulled[t][step], RateOf(step), x).ok());
      optimizer.value()->EndStep();
    }
    return x;
  }
};

Strings OnebitBothWays(Strings more = {}) {
  Strings settings = {"compression.min_bytes=0B", "partition.fuse_below=0",
                      "compression.uplink.compressor=onebit",
                      "compression.downlink.compressor=onebit"};
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

TEST_CASE("a method trains two workers alike, also restored in between", "[capi]") {
  struct Case {
    const char* setting;  // of the job
    const char* method;   // of the program
    const char* spec;     // the same method, for an optimizer without a job
    const char* warmup;
  };
  const Case each = GENERATE(
      Case{"clan(beta1=0.8)", nullptr, "clan(beta1=0.8)", "0"},
      Case{"none", "lans(weight_decay=0.1)", "lans(weight_decay=0.1)", "0"},
      // The program may write what is the default.
      Case{"dist_ef_sgdm", "dist_ef_sgdm(momentum=0.90,weight_decay=0)", "dist_ef_sgdm", "0"},
      Case{"onebit_lamb", nullptr, "onebit_lamb(freeze_step=3)", "3"},
      Case{"none", "onebit_adam(freeze_step=3)", "onebit_adam(freeze_step=3)", "3"});
  CAPTURE(each.setting, each.spec);
  MethodRun run;
  run.settings = OnebitBothWays({"method=" + std::string(each.setting),
                                 "compression.warmup_steps=" + std::string(each.warmup)});
  run.method = each.method;
  run.restored_in = 5;
  REQUIRE(run.Go() == "");
  CHECK(run.skipped == 0);
  for (std::size_t t = 0; t < 2; ++t) {
    CHECK(run.parameters[t] == run.Replayed(t, each.spec));
    CHECK(run.parameters[t][1] != Wave(1 + t));
  }
}

TEST_CASE("a program's own method that sends momenta is treated as the job's in a void round",
          "[capi]") {
  MethodRun of_job;
  of_job.settings = OnebitBothWays({"method=onebit_adam", "compression.warmup_steps=2"});
  of_job.void_in = 4;
  REQUIRE(of_job.Go() == "");
  CHECK(of_job.skipped == 1);
  MethodRun of_program = of_job;
  of_program.settings = OnebitBothWays({"compression.warmup_steps=2"});
  of_program.method = "onebit_adam";
  REQUIRE(of_program.Go() == "");
  for (std::size_t t = 0; t < 2; ++t) CHECK(of_program.parameters[t] == of_job.parameters[t]);
  // What is compared does depend on that: a void round whose momenta stayed would show.
  MethodRun finite = of_program;
  finite.void_in = UINT64_MAX;
  REQUIRE(finite.Go() == "");
  CHECK(finite.parameters[0] != of_program.parameters[0]);
}

TEST_CASE("a method leaves alone what the filter holds back", "[capi]") {
  // Two units of 4096 elements, of the classes 0 and 1.
  Job job(1, {"compression.filter.type=covap", "compression.filter.interval=2",
              "compression.filter.inactive=skip", "partition.bytes=16KiB", "partition.fuse_below=0",
              "method=lans"});
  const std::string failures = job.Run(1, [](Failures& check, gradwire_client*& client) {
    const std::uint64_t extent = 8192;
    const gradwire_tensor tensor = {"w", &extent, 1, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 0};
    std::uint32_t id = 0;
    if (!check.Ok(gradwire_declare(client, &tensor, 1, &id), "declare")) return;
    OptimizerOwner optimizer;
    check.Ok(gradwire_optimizer_create(client, nullptr, &optimizer.get), "create");
    check.Ok(gradwire_optimizer_add(optimizer.get, id, nullptr, 1), "add");
    std::vector<float> x(extent, 1.0F);
    for (std::uint64_t step = 0; step < 4; ++step) {
      std::vector<float> g = GradientOf(0, step, extent);
      gradwire_handle handle{};
      check.Ok(gradwire_optimizer_send(optimizer.get, id, g.data(), extent), "send");
      check.Ok(gradwire_push_pull(client, id, g.data(), g.data(), extent * 4, &handle), "push");
      check.Ok(gradwire_end_step(client), "end of step");
      check.Ok(gradwire_optimizer_end_step(optimizer.get), "end of the method's step");
      check.Ok(gradwire_wait(client, handle, -1), "wait");
      const std::vector<float> before = x;
      check.Ok(gradwire_optimizer_update(optimizer.get, handle, g.data(), 0.01, x.data(), x.size()),
               "update");
      const std::uint64_t sent = step % 2 * 4096;
      const std::uint64_t held_back = 4096 - sent;
      for (std::uint64_t i = 0; i < 4096; ++i) {
        if (!check.Expect(x[sent + i] != before[sent + i], "sent, and moves")) return;
        if (!check.Expect(x[held_back + i] == before[held_back + i], "held back, and stays"))
          return;
      }
    }
    double updates = 0;
    check.Ok(gradwire_optimizer_get_value(optimizer.get, "updates", &updates), "updates");
    check.Expect(updates == 4, "each stretch counts its own");
    double step = 0;
    check.Ok(gradwire_optimizer_get_value(optimizer.get, "step", &step), "step");
    check.Expect(step == 4, "steps");
  });
  INFO(failures);
  CHECK(failures.empty());
}

TEST_CASE("what a method can not do is refused with the reason", "[capi]") {
  struct Case {
    Strings settings;
    const char* method;
    const char* reason;
  };
  const Strings zero_fill = {"compression.filter.type=covap"};
  const Case each = GENERATE_COPY(
      Case{{}, nullptr, "method is none, and the program names none either"},
      Case{{}, "lens", "no method is named 'lens'; did you mean 'lans'"},
      Case{{}, "lans(beta3=1)", "method lans has no parameter"},
      Case{{}, "lans(", "is not a method"},
      Case{{}, "clan", "wants a compressor in both directions"},
      Case{{}, "onebit_adam", "has no freeze_step"}, Case{zero_fill, "lans", "expected skip"},
      Case{zero_fill, "onebit_lamb(freeze_step=5)", "would send the sum"},
      Case{{"method=lans"},
           "lans(beta1=0.8)",
           "the program makes the method lans(beta1=0.8,beta2=0.999,eps=1e-06,weight_decay=0.01), "
           "expected lans(beta1=0.9,"});
  CAPTURE(each.reason);
  Job job(1, each.settings);
  gradwire_client* client = nullptr;
  REQUIRE(Init(job.assignments(), 0, &client) == GRADWIRE_OK);
  auto* optimizer = reinterpret_cast<gradwire_optimizer*>(&client);  // it is set to null
  const gradwire_status status = gradwire_optimizer_create(client, each.method, &optimizer);
  CHECK((status == GRADWIRE_INVALID_ARGUMENT || status == GRADWIRE_NOT_FOUND));
  INFO(gradwire_last_error());
  CHECK(Has(gradwire_last_error(), each.reason));
  CHECK(optimizer == nullptr);
  // The job's method is not forgotten: who makes no optimizer of it can't push.
  Failures failures;
  const std::vector<std::uint64_t> shape = {3};
  const auto id = Declare(failures, client, Tensor("w", shape));
  std::vector<float> values(3, 1.0F);
  gradwire_handle handle{};
  const gradwire_status pushed =
      gradwire_push_pull(client, id, values.data(), values.data(), 12, &handle);
  if (each.settings == Strings{"method=lans"}) {
    CHECK(pushed == GRADWIRE_INVALID_ARGUMENT);
    CHECK(Has(gradwire_last_error(), "method is lans, which this program does not run"));
  } else {
    CHECK(pushed == GRADWIRE_OK);
    failures.Ok(gradwire_end_step(client), "end of step");
    failures.Ok(gradwire_wait(client, handle, -1), "wait");
  }
  failures.Ok(gradwire_close(client), "close");
  gradwire_free(client);
  CHECK(failures.Take() == "");
}

TEST_CASE("wrong calls of an optimizer are refused, and it goes on", "[capi]") {
  Job job(1);
  gradwire_client* client = nullptr;
  REQUIRE(Init(job.assignments(), 0, &client) == GRADWIRE_OK);
  Failures failures;
  const std::vector<std::uint64_t> shape = {4};
  const auto id = Declare(failures, client, Tensor("w", shape, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE));
  const auto half = Declare(failures, client, Tensor("h", shape, GRADWIRE_FLOAT16));
  const auto sum = Declare(failures, client, Tensor("s", shape, GRADWIRE_FLOAT32, GRADWIRE_SUM));
  OptimizerOwner owner;
  REQUIRE(gradwire_optimizer_create(client, "sgd(momentum=0)", &owner.get) == GRADWIRE_OK);
  gradwire_optimizer* const o = owner.get;
  CHECK(std::string(gradwire_optimizer_method(o)) == "sgd(momentum=0,weight_decay=0)");
  std::vector<float> g(4, 1.0F);
  std::vector<float> x(4, 1.0F);
  double value = -1;
  std::size_t bytes = 0;

  const auto refuses = [](gradwire_status got, gradwire_status expected, const std::string& text) {
    INFO(gradwire_last_error());
    CHECK(got == expected);
    CHECK(Has(gradwire_last_error(), text));
  };
  const auto wrong = GRADWIRE_INVALID_ARGUMENT;
  refuses(gradwire_optimizer_create(nullptr, "sgd", &owner.get), wrong, "the client is NULL");
  owner.get = o;  // it was set to null
  refuses(gradwire_optimizer_create(client, "sgd", nullptr), wrong, "for the optimizer is NULL");
  refuses(gradwire_optimizer_send(o, id, g.data(), 4), wrong, "tensor 0 was not added");
  refuses(gradwire_optimizer_cancel(o, 7), wrong, "tensor 7 was not added");
  refuses(gradwire_optimizer_add(o, 7, nullptr, 1), wrong, "there is no tensor 7, 3 are declared");
  refuses(gradwire_optimizer_add(o, half, nullptr, 1), wrong, "tensor 'h' is average of float16");
  refuses(gradwire_optimizer_add(o, sum, nullptr, 1), wrong, "tensor 's' is sum of float32");
  REQUIRE(gradwire_optimizer_add(o, id, nullptr, 1) == GRADWIRE_OK);
  refuses(gradwire_optimizer_add(o, id, "other", 1), wrong, "tensor 'other' is there already");
  refuses(gradwire_optimizer_add(o, id, "", 1), wrong, "the name of a method's tensor has 0 bytes");
  refuses(gradwire_optimizer_send(o, id, nullptr, 4), wrong, "the gradient is NULL");
  refuses(gradwire_optimizer_send(o, id, g.data(), 3), wrong, "has 3 values, expected 4");
  REQUIRE(gradwire_optimizer_send(o, id, g.data(), 4) == GRADWIRE_OK);
  refuses(gradwire_optimizer_send(o, id, g.data(), 4), wrong, "is sent again before its update");
  refuses(gradwire_optimizer_save(o, nullptr, &bytes), wrong, "was sent and waits for its update");
  REQUIRE(gradwire_optimizer_cancel(o, id) == GRADWIRE_OK);
  REQUIRE(gradwire_optimizer_send(o, id, g.data(), 4) == GRADWIRE_OK);

  gradwire_handle handle{};
  REQUIRE(gradwire_push_pull(client, id, g.data(), g.data(), 16, &handle) == GRADWIRE_OK);
  REQUIRE(gradwire_end_step(client) == GRADWIRE_OK);
  REQUIRE(gradwire_wait(client, handle, -1) == GRADWIRE_OK);
  REQUIRE(gradwire_optimizer_end_step(o) == GRADWIRE_OK);
  refuses(gradwire_optimizer_update(o, handle, nullptr, 0.5, x.data(), 4), wrong,
          "what was pulled is NULL");
  refuses(gradwire_optimizer_update(o, handle, g.data(), 0.5, nullptr, 4), wrong,
          "the array of parameters is NULL");
  refuses(gradwire_optimizer_update(o, handle, g.data(), 0.5, x.data(), 5), wrong,
          "has 5 values, expected 4");
  refuses(gradwire_optimizer_update(o, handle, g.data(), -1, x.data(), 4), wrong,
          "the learning rate of tensor 'w' is -1");
  CHECK(x == std::vector<float>(4, 1.0F));
  REQUIRE(gradwire_optimizer_update(o, handle, g.data(), 0.5, x.data(), 4) == GRADWIRE_OK);
  CHECK(x == std::vector<float>(4, 0.5F));
  refuses(gradwire_optimizer_update(o, handle, g.data(), 0.5, x.data(), 4), wrong,
          "is updated, but was not sent");

  refuses(gradwire_optimizer_get_value(o, "bytes", &value), GRADWIRE_NOT_FOUND,
          "there is no value 'bytes', expected one of step, updates, skipped, weight_decay, "
          "freeze_step, needs_skip");
  refuses(gradwire_optimizer_get_value(o, nullptr, &value), wrong, "the name of a value is NULL");
  refuses(gradwire_optimizer_get_value(nullptr, "step", &value), wrong, "the optimizer is NULL");
  const double damaged[4] = {};
  refuses(gradwire_optimizer_load(o, damaged, sizeof(damaged)), GRADWIRE_CORRUPT_DATA,
          "the saved method is damaged");
  refuses(gradwire_optimizer_load(o, nullptr, 4), wrong, "the buffer is NULL");
  CHECK(gradwire_optimizer_method(nullptr) == nullptr);
  gradwire_optimizer_free(nullptr);
  CHECK(failures.Take() == "");
  gradwire_optimizer_free(std::exchange(owner.get, nullptr));
  CHECK(gradwire_close(client) == GRADWIRE_OK);
  gradwire_free(client);
}

TEST_CASE("a tensor whose push-pull is under way is not updated", "[capi]") {
  Job job(2);
  const std::string failures = job.Run(2, [](Failures& check, gradwire_client*& client) {
    const std::uint64_t extent = 4;
    const gradwire_tensor tensor = {"w", &extent, 1, GRADWIRE_FLOAT32, GRADWIRE_AVERAGE, 0};
    std::uint32_t id = 0;
    if (!check.Ok(gradwire_declare(client, &tensor, 1, &id), "declare")) return;
    OptimizerOwner optimizer;
    check.Ok(gradwire_optimizer_create(client, "sgd", &optimizer.get), "create");
    check.Ok(gradwire_optimizer_add(optimizer.get, id, nullptr, 1), "add");
    std::vector<float> g(4, 1.0F);
    std::vector<float> x(4, 1.0F);
    std::vector<float> pulled(4);
    gradwire_handle handle{};
    const auto push = [&] {
      check.Ok(gradwire_optimizer_send(optimizer.get, id, g.data(), 4), "send");
      check.Ok(gradwire_push_pull(client, id, g.data(), pulled.data(), 16, &handle), "push");
      check.Ok(gradwire_end_step(client), "end of step");
    };
    const auto update = [&] {
      return gradwire_optimizer_update(optimizer.get, handle, g.data(), 0.5, x.data(), 4);
    };
    // Rank 1 pushes only when rank 0 has tried.
    if (gradwire_rank(client) == 0) {
      push();
      check.Expect(update() == GRADWIRE_INVALID_ARGUMENT &&
                       Has(gradwire_last_error(), "of tensor 'w' is still under way"),
                   "under way");
    }
    check.Ok(gradwire_barrier(client), "barrier");
    if (gradwire_rank(client) == 1) push();
    check.Ok(gradwire_wait(client, handle, -1), "wait");
    check.Ok(update(), "complete");
  });
  CHECK(failures == "");
}

// ThreadSanitizer ends a process that starts threads and forks.
#ifndef __SANITIZE_THREAD__
#if !defined(__has_feature)
#define GRADWIRE_CAN_FORK
#elif !__has_feature(thread_sanitizer)
#define GRADWIRE_CAN_FORK
#endif
#endif

#ifdef GRADWIRE_CAN_FORK
TEST_CASE("a forked process is refused, and its parent's job goes on", "[capi]") {
  Job job(1);
  gradwire_client* client = nullptr;
  REQUIRE(Init(job.assignments(), 0, &client) == GRADWIRE_OK);
  const auto calls = AllCalls();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(60);  // whatever happens, it ends
    int number = 0;
    for (const auto& [name, call] : calls) {
      ++number;
      if (call(client) != GRADWIRE_INVALID_ARGUMENT) _exit(number);
      if (!Has(gradwire_last_error(), "was forked from it")) _exit(100 + number);
    }
    if (gradwire_poll(client, {}) != 1) _exit(50);
    if (gradwire_size(client) != 1 || gradwire_rank(client) != 0) _exit(51);
    gradwire_free(client);
    _exit(0);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CAPTURE(status);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  Failures failures;
  const std::vector<std::uint64_t> shape = {3};
  const auto id = Declare(failures, client, Tensor("w", shape));
  std::vector<float> values(3, 1.0F);
  failures.Ok(PushPull(client, id, values, values), "push_pull");
  failures.Ok(gradwire_close(client), "close");
  gradwire_free(client);
  CHECK(failures.Take() == "");
}
#endif

}  // namespace
}  // namespace gradwire
