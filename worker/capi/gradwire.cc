// The build hides every symbol but these.
#pragma GCC visibility push(default)
#include "worker/capi/gradwire.h"
#pragma GCC visibility pop

#include <fmt/format.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/log.h"
#include "common/base/version.h"
#include "common/config/config.h"
#include "common/config/process.h"
#include "common/plan/plan.h"
#include "common/wire/limits.h"
#include "compressors/methods/method.h"
#include "worker/client/client.h"
#include "worker/client/job_optimizer.h"

struct gradwire_client {
  std::unique_ptr<gradwire::Client> client;
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::uint32_t local_rank = 0;
  std::uint32_t local_size = 1;
  gradwire::Config config;
  pid_t owner = 0;                         // the process that has the client's threads
  std::atomic<bool> has_optimizer{false};  // one was made, perhaps freed again

  // What a save_state has gathered and could not hand out for lack of room: gathering is
  // collective, so the call that comes back with more room must not gather again.
  std::mutex saved_mu;
  std::optional<std::vector<std::byte>> saved;
  std::uint64_t changes = 0;  // of the state; what was saved before one is outdated
};

struct gradwire_optimizer {
  gradwire_client* client = nullptr;
  std::string method;  // with all its parameters
  double weight_decay = 0;
  std::unique_ptr<gradwire::JobOptimizer> optimizer;
};

namespace {

using gradwire::Result;
using gradwire::Status;
using gradwire::StatusCode;
using gradwire::TensorDeclaration;

/// A fixed buffer, so that also the report of a lack of memory needs none.
struct ErrorText {
  std::array<char, 8192> text{};
  void Set(std::string_view from) noexcept {
    const std::size_t size = std::min(from.size(), text.size() - 1);
    std::memcpy(text.data(), from.data(), size);
    text[size] = '\0';
  }
};
thread_local ErrorText last_error;

gradwire_status Report(StatusCode code, std::string_view message) noexcept {
  if (code == StatusCode::kOk) return GRADWIRE_OK;
  last_error.Set(message);
  return static_cast<gradwire_status>(code);
}

static_assert(static_cast<int>(StatusCode::kInvalidArgument) == GRADWIRE_INVALID_ARGUMENT);
static_assert(static_cast<int>(StatusCode::kCorruptData) == GRADWIRE_CORRUPT_DATA);
static_assert(static_cast<int>(StatusCode::kBufferTooSmall) == GRADWIRE_BUFFER_TOO_SMALL);
static_assert(static_cast<int>(StatusCode::kNotFound) == GRADWIRE_NOT_FOUND);
static_assert(static_cast<int>(StatusCode::kUnavailable) == GRADWIRE_UNAVAILABLE);
static_assert(static_cast<int>(StatusCode::kTimeout) == GRADWIRE_TIMEOUT);
static_assert(static_cast<int>(StatusCode::kInternal) == GRADWIRE_INTERNAL);
static_assert(static_cast<int>(gradwire::DType::kFloat32) == GRADWIRE_FLOAT32);
static_assert(static_cast<int>(gradwire::DType::kInt64) == GRADWIRE_INT64);
static_assert(static_cast<int>(gradwire::ReduceOp::kSum) == GRADWIRE_SUM);

/// Runs a body that returns a Status: no exception leaves the library.
template <typename Body>
gradwire_status Guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    return Report(status.code(), status.message());
  } catch (const std::bad_alloc&) {
    return Report(StatusCode::kInternal, "out of memory");
  } catch (const std::exception& error) {
    return Report(StatusCode::kInternal, error.what());
  } catch (...) {
    return Report(StatusCode::kInternal, "an exception of unknown type");
  }
}

Status CheckOwner(const gradwire_client* client) {
  if (client == nullptr) return gradwire::InvalidArgument("the client is NULL");
  if (client->owner == getpid()) return Status::Ok();
  return gradwire::InvalidArgument(fmt::format(
      "this client belongs to process {}; process {} was forked from it, and the client's threads "
      "and connections did not come along: call gradwire_init in the process that pushes",
      client->owner, getpid()));
}

template <typename Body>
gradwire_status WithClient(const gradwire_client* client, Body&& body) noexcept {
  return Guarded([&] {
    const Status owner = CheckOwner(client);
    return owner.ok() ? body(*client->client) : owner;
  });
}

Status CheckNotNull(const void* pointer, std::string_view what) {
  if (pointer != nullptr) return Status::Ok();
  return gradwire::InvalidArgument(fmt::format("{} is NULL", what));
}

/// Where a result goes whose size the caller may not know.
Status CheckRoom(const void* buffer, const std::size_t* bytes) {
  if (Status s = CheckNotNull(bytes, "the place for the size"); !s.ok()) return s;
  return *bytes > 0 ? CheckNotNull(buffer, "the buffer") : Status::Ok();
}

/// Gives characters or bytes to a caller that may have to come back with more room.
template <typename Made>
Status WriteTo(void* buffer, std::size_t* bytes, std::string_view what, const Made& made) {
  const std::size_t room = *bytes;
  *bytes = made.size();
  if (room < made.size()) {
    return gradwire::BufferTooSmall(
        fmt::format("{} is {} bytes, the buffer {}", what, made.size(), room));
  }
  std::memcpy(buffer, made.data(), made.size());
  return Status::Ok();
}

/// One of `values`, by name.
Status ValueOf(std::span<const std::pair<std::string_view, double>> values, std::string_view name,
               double* value) {
  std::string names;
  for (const auto& [known, number] : values) {
    if (known == name) {
      *value = number;
      return Status::Ok();
    }
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  return gradwire::NotFound(fmt::format("there is no value '{}', expected one of {}", name, names));
}

/// A state that waits to be handed out is outdated.
void DropSaved(gradwire_client& client) {
  const std::lock_guard lock(client.saved_mu);
  ++client.changes;
  client.saved.reset();
}

/// A name with `prefix` bytes that are put in front of it.
Status CheckName(const char* name, std::string_view what, std::size_t prefix = 0) {
  if (Status s = CheckNotNull(name, what); !s.ok()) return s;
  const std::size_t size = std::strlen(name);
  const std::size_t most = gradwire::kMaxNameBytes - prefix;
  if (size >= 1 && size <= most) return Status::Ok();
  return gradwire::InvalidArgument(
      fmt::format("{} has {} bytes, expected 1 to {}", what, size, most));
}

/// What would not survive the way to the root is refused here, on this worker alone.
Result<TensorDeclaration> DeclarationOf(const gradwire_tensor& tensor, std::size_t position) {
  if (Status s =
          CheckName(tensor.name, fmt::format("the name of tensor {} of the declaration", position));
      !s.ok())
    return s;
  const auto wrong = [&](const std::string& what) {
    return gradwire::InvalidArgument(fmt::format("tensor '{}': {}", tensor.name, what));
  };
  TensorDeclaration declaration;
  declaration.name = tensor.name;
  if (tensor.num_dimensions > gradwire::kMaxDimensions) {
    return wrong(fmt::format("{} dimensions, expected at most {}", tensor.num_dimensions,
                             gradwire::kMaxDimensions));
  }
  if (tensor.num_dimensions > 0) {
    if (tensor.shape == nullptr) return wrong("its shape is NULL");
    declaration.shape.assign(tensor.shape, tensor.shape + tensor.num_dimensions);
  }
  const auto dtype = gradwire::DTypeFromWire(static_cast<std::uint32_t>(tensor.dtype));
  if (!dtype.ok()) {
    return wrong(
        fmt::format("its dtype is {}, expected one of gradwire_dtype (1 to 8)", tensor.dtype));
  }
  declaration.dtype = *dtype;
  std::uint64_t bytes = gradwire::SizeOf(*dtype);
  for (const std::uint64_t extent : declaration.shape) {
    if (extent != 0 && bytes > gradwire::kMaxTensorBytes / extent) {
      return wrong(fmt::format("shape [{}] of {} is more than {} bytes",
                               fmt::join(declaration.shape, ", "), gradwire::DTypeName(*dtype),
                               gradwire::kMaxTensorBytes));
    }
    bytes *= extent;
  }
  if (tensor.op != GRADWIRE_AVERAGE && tensor.op != GRADWIRE_SUM) {
    return wrong(fmt::format("its op is {}, expected 1 (average) or 2 (sum)", tensor.op));
  }
  declaration.op = static_cast<gradwire::ReduceOp>(tensor.op);
  declaration.priority = tensor.priority;
  return declaration;
}

/// The first client of a process sets its log up; later ones find other threads that log.
void InitLogOnce(const gradwire::Config& config, std::uint32_t rank) {
  static std::once_flag once;
  std::call_once(once, [&] {
    gradwire::InitLog(config.log.level, config.log.format, fmt::format("worker/{}", rank));
  });
}

Result<std::unique_ptr<gradwire_client>> Connect(gradwire::ProcessOptions options) {
  options.role = gradwire::ProcessRole::kWorker;
  const auto process = gradwire::LoadProcessConfig(options);
  if (!process.ok()) return process.status();
  if (process->is_scheduler) {
    return gradwire::InvalidArgument(std::string(gradwire::kNoScheduler));
  }
  const auto rank = gradwire::RequireRank(*process);
  if (!rank.ok()) return rank.status();
  InitLogOnce(process->config, *rank);
  gradwire::LogWarnings(*process);
  auto connected = gradwire::Client::Connect(process->config, *rank);
  if (!connected.ok()) return connected.status();
  auto made = std::make_unique<gradwire_client>();
  made->client = std::move(connected).value();
  made->rank = *rank;
  made->size = process->config.job.workers;
  made->local_rank = process->local_rank;
  made->local_size = process->local_size.value_or(1);
  made->config = process->config;
  made->owner = getpid();
  return made;
}

}  // namespace

uint32_t gradwire_abi_version(void) { return GRADWIRE_ABI_VERSION; }

const char* gradwire_version(void) {
  // Of the build system, so it ends with a zero.
  return gradwire::Version().data();
}

const char* gradwire_last_error(void) { return last_error.text.data(); }

gradwire_status gradwire_init(const char* config_path, const char* const* assignments,
                              size_t num_assignments, int64_t rank, gradwire_client** client) {
  return Guarded([&]() -> Status {
    if (Status s = CheckNotNull(client, "the place for the client"); !s.ok()) return s;
    *client = nullptr;
    gradwire::ProcessOptions options;
    if (config_path != nullptr) options.config_path = config_path;
    if (num_assignments > 0) {
      if (Status s = CheckNotNull(assignments, "the list of assignments"); !s.ok()) return s;
    }
    for (std::size_t i = 0; i < num_assignments; ++i) {
      if (Status s = CheckNotNull(assignments[i], fmt::format("assignment {}", i)); !s.ok())
        return s;
      options.assignments.emplace_back(assignments[i]);
    }
    if (rank > std::int64_t{std::numeric_limits<std::uint32_t>::max()}) {
      return gradwire::InvalidArgument(fmt::format("rank {} is out of range", rank));
    }
    if (rank >= 0) options.rank = static_cast<std::uint32_t>(rank);
    auto connected = Connect(std::move(options));
    if (!connected.ok()) return connected.status();
    *client = connected.value().release();
    return Status::Ok();
  });
}

gradwire_status gradwire_close(gradwire_client* client) {
  return WithClient(client, [](gradwire::Client& c) { return c.Close(); });
}

void gradwire_free(gradwire_client* client) {
  // In a forked process its threads are missing and its locks may be held: it stays where it is.
  if (client == nullptr || client->owner != getpid()) return;
  (void)Guarded([&] {
    delete client;
    return Status::Ok();
  });
}

uint32_t gradwire_rank(const gradwire_client* client) {
  return client == nullptr ? 0 : client->rank;
}

uint32_t gradwire_size(const gradwire_client* client) {
  return client == nullptr ? 0 : client->size;
}

uint32_t gradwire_local_rank(const gradwire_client* client) {
  return client == nullptr ? 0 : client->local_rank;
}

uint32_t gradwire_local_size(const gradwire_client* client) {
  return client == nullptr ? 0 : client->local_size;
}

gradwire_status gradwire_declare(gradwire_client* client, const gradwire_tensor* tensors,
                                 size_t num_tensors, uint32_t* ids) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (num_tensors == 0) {
      return gradwire::InvalidArgument("a declaration of no tensors; give at least one");
    }
    if (num_tensors > gradwire::kMaxControlItems) {
      return gradwire::InvalidArgument(
          fmt::format("a declaration of {} tensors, expected at most {}", num_tensors,
                      gradwire::kMaxControlItems));
    }
    if (Status s = CheckNotNull(tensors, "the list of tensors"); !s.ok()) return s;
    if (Status s = CheckNotNull(ids, "the place for the ids"); !s.ok()) return s;
    std::vector<TensorDeclaration> batch;
    batch.reserve(num_tensors);
    for (std::size_t i = 0; i < num_tensors; ++i) {
      auto declaration = DeclarationOf(tensors[i], i);
      if (!declaration.ok()) return declaration.status();
      batch.push_back(std::move(declaration).value());
    }
    const auto declared = c.Declare(batch);
    if (!declared.ok()) return declared.status();
    for (std::size_t i = 0; i < num_tensors; ++i) ids[i] = declared.value()[i].index;
    return Status::Ok();
  });
}

gradwire_status gradwire_push_pull(gradwire_client* client, uint32_t tensor, const void* input,
                                   void* output, size_t bytes, gradwire_handle* handle) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckNotNull(handle, "the place for the handle"); !s.ok()) return s;
    if (bytes > 0) {
      if (Status s = CheckNotNull(input, "the input"); !s.ok()) return s;
      if (Status s = CheckNotNull(output, "the output"); !s.ok()) return s;
    }
    if (client->config.method.name != gradwire::kNoMethod && !client->has_optimizer) {
      return gradwire::InvalidArgument(fmt::format(
          "method is {}, which this program does not run, expected none: it has made no optimizer "
          "of a method",
          gradwire::ToString(client->config.method)));
    }
    const auto from = reinterpret_cast<std::uintptr_t>(input);
    const auto to = reinterpret_cast<std::uintptr_t>(output);
    if (from != to && (from < to ? to - from : from - to) < bytes) {
      return gradwire::InvalidArgument(fmt::format(
          "tensor {}: input and output overlap; they are the same array or have nothing in common",
          tensor));
    }
    const auto begun = c.PushPullAsync({tensor}, {static_cast<const std::byte*>(input), bytes},
                                       {static_cast<std::byte*>(output), bytes});
    if (!begun.ok()) return begun.status();
    DropSaved(*client);
    *handle = {begun.value().tensor.index, begun.value().generation};
    return Status::Ok();
  });
}

int gradwire_poll(gradwire_client* client, gradwire_handle handle) {
  bool is_done = true;
  // What fails here fails in gradwire_wait too, and at once.
  (void)WithClient(client, [&](gradwire::Client& c) {
    is_done = c.Poll({{handle.tensor}, handle.generation});
    return Status::Ok();
  });
  return is_done ? 1 : 0;
}

gradwire_status gradwire_wait(gradwire_client* client, gradwire_handle handle, int64_t timeout_ms) {
  return WithClient(client, [&](gradwire::Client& c) {
    const gradwire::Handle waited{{handle.tensor}, handle.generation};
    if (timeout_ms < 0) return c.Wait(waited);
    return c.WaitFor(waited, std::chrono::milliseconds(timeout_ms));
  });
}

namespace {

std::optional<std::vector<std::uint32_t>> NonfiniteRanks(const gradwire_client* client,
                                                         gradwire_handle handle) {
  std::optional<std::vector<std::uint32_t>> ranks;
  (void)WithClient(client, [&](gradwire::Client& c) {
    ranks = c.NonfiniteRanks({{handle.tensor}, handle.generation});
    return Status::Ok();
  });
  return ranks;
}

}  // namespace

int gradwire_was_nonfinite(const gradwire_client* client, gradwire_handle handle) {
  return NonfiniteRanks(client, handle) ? 1 : 0;
}

size_t gradwire_nonfinite_ranks(const gradwire_client* client, gradwire_handle handle,
                                uint32_t* ranks, size_t room) {
  const auto all = NonfiniteRanks(client, handle);
  if (!all) return 0;
  if (ranks != nullptr) std::copy_n(all->begin(), std::min(all->size(), room), ranks);
  return all->size();
}

gradwire_status gradwire_set_learning_rate(gradwire_client* client, const uint32_t* tensors,
                                           size_t num_tensors, double rate) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (num_tensors > 0) {
      if (Status s = CheckNotNull(tensors, "the list of tensors"); !s.ok()) return s;
    }
    std::vector<gradwire::TensorId> ids;
    for (std::size_t i = 0; i < num_tensors; ++i) ids.push_back({tensors[i]});
    return c.SetLearningRate(ids, rate);
  });
}

gradwire_status gradwire_set_loss_scale(gradwire_client* client, double scale) {
  return WithClient(client, [&](gradwire::Client& c) { return c.SetLossScale(scale); });
}

gradwire_status gradwire_end_step(gradwire_client* client) {
  return WithClient(client, [&](gradwire::Client& c) {
    DropSaved(*client);
    return c.EndStep();
  });
}

gradwire_status gradwire_broadcast(gradwire_client* client, const char* name, void* data,
                                   size_t bytes, uint32_t root) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    // The client marks the name as a broadcast's with a prefix of ten bytes.
    if (Status s = CheckName(name, "the name of a broadcast", 10); !s.ok()) return s;
    if (bytes > 0) {
      if (Status s = CheckNotNull(data, "the data of a broadcast"); !s.ok()) return s;
    }
    return c.Broadcast(name, {static_cast<std::byte*>(data), bytes}, root);
  });
}

gradwire_status gradwire_barrier(gradwire_client* client) {
  return WithClient(client, [](gradwire::Client& c) { return c.Barrier(); });
}

gradwire_status gradwire_save_state(gradwire_client* client, void* buffer, size_t* bytes) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckRoom(buffer, bytes); !s.ok()) return s;
    std::optional<std::vector<std::byte>> saved;
    std::uint64_t changes = 0;
    {
      const std::lock_guard lock(client->saved_mu);
      saved = std::exchange(client->saved, std::nullopt);
      changes = client->changes;
    }
    if (!saved) {
      auto gathered = c.SaveState();
      if (!gathered.ok()) return gathered.status();
      saved = std::move(gathered).value();
    }
    Status status = WriteTo(buffer, bytes, "the state", *saved);
    if (!status.ok()) {
      const std::lock_guard lock(client->saved_mu);
      if (client->changes == changes) client->saved = std::move(saved);
    }
    return status;
  });
}

gradwire_status gradwire_load_state(gradwire_client* client, const void* buffer, size_t bytes) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (bytes > 0) {
      if (Status s = CheckNotNull(buffer, "the buffer"); !s.ok()) return s;
    }
    DropSaved(*client);
    return c.RestoreState({static_cast<const std::byte*>(buffer), bytes});
  });
}

gradwire_status gradwire_plan(gradwire_client* client, char* text, size_t* bytes) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckRoom(text, bytes); !s.ok()) return s;
    return WriteTo(text, bytes, "the plan",
                   gradwire::PlanToJson(*c.plan(), client->config.compressors()));
  });
}

gradwire_status gradwire_get_stats(const gradwire_client* client, gradwire_stats* stats) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckNotNull(stats, "the place for the stats"); !s.ok()) return s;
    const gradwire::ClientStats now = c.stats();
    stats->sent_bytes = now.traffic.sent_bytes;
    stats->received_bytes = now.traffic.received_bytes;
    stats->raw_push_bytes = now.raw_push_bytes;
    stats->raw_pull_bytes = now.raw_pull_bytes;
    stats->nonfinite_units = now.nonfinite_units;
    stats->resent_pushes = now.resent_pushes;
    stats->reconnects = now.reconnects;
    return Status::Ok();
  });
}

gradwire_status gradwire_get_value(const gradwire_client* client, const char* name, double* value) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckNotNull(name, "the name of a value"); !s.ok()) return s;
    if (Status s = CheckNotNull(value, "the place for the value"); !s.ok()) return s;
    const gradwire::ClientStats now = c.stats();
    const std::shared_ptr<const gradwire::Plan> plan = c.plan();
    const std::pair<std::string_view, double> values[] = {
        {"compression_saves_ms", now.compression_saves_ms},
        {"compression_costs_ms", now.compression_costs_ms},
        {"goodput", now.goodput},
        {"step_ms", now.overlap.step_ms},
        {"comm_ms", now.overlap.comm_ms},
        {"compute_ms", now.overlap.compute_ms},
        {"exposed_ms", now.overlap.exposed_ms},
        {"ccr", now.overlap.ccr()},
        {"interval", now.interval},
        {"held_back_units", static_cast<double>(now.held_back_units)},
        {"held_back_nonfinite", static_cast<double>(now.held_back_nonfinite)},
        {"filter_skips", plan->filter.skips_inactive ? 1.0 : 0.0}};
    return ValueOf(values, name, value);
  });
}

int gradwire_exit_code(int status, int started) {
  // Every other number is a failure that has no code of its own.
  if (status < GRADWIRE_OK || status > GRADWIRE_INTERNAL) return gradwire::kExitFailed;
  return gradwire::ExitCodeOf(Status(static_cast<StatusCode>(status), ""), started != 0);
}

gradwire_status gradwire_active_ranges(const gradwire_client* client, gradwire_handle handle,
                                       gradwire_range* ranges, size_t room, size_t* count) {
  return WithClient(client, [&](gradwire::Client& c) -> Status {
    if (Status s = CheckNotNull(count, "the place for the number of ranges"); !s.ok()) return s;
    const auto active = c.ActiveRanges({{handle.tensor}, handle.generation});
    if (!active.ok()) return active.status();
    *count = active->size();
    for (std::size_t i = 0; ranges != nullptr && i < std::min(room, active->size()); ++i) {
      ranges[i] = {(*active)[i].offset, (*active)[i].count};
    }
    return Status::Ok();
  });
}

namespace {

template <typename Body>
gradwire_status WithOptimizer(const gradwire_optimizer* optimizer, Body&& body) noexcept {
  return Guarded([&]() -> Status {
    if (Status s = CheckNotNull(optimizer, "the optimizer"); !s.ok()) return s;
    if (Status s = CheckOwner(optimizer->client); !s.ok()) return s;
    return body(*optimizer->optimizer);
  });
}

/// What a program asked for, or what the job says. With all parameters, so that it can be compared.
Result<gradwire::CompressorSpec> MethodOf(const gradwire::Config& config, const char* method) {
  const bool is_set = config.method.name != gradwire::kNoMethod;
  if (method == nullptr && !is_set) {
    return gradwire::InvalidArgument(
        "method is none, and the program names none either, expected one such as lans");
  }
  auto wanted = method == nullptr ? Result<gradwire::CompressorSpec>(config.method)
                                  : gradwire::ParseMethodSpec(method);
  if (!wanted.ok()) return wanted;
  wanted = gradwire::CompleteMethodSpec(*wanted, &config.compression);
  if (!wanted.ok() || !is_set) return wanted;
  const auto expected = gradwire::CompleteMethodSpec(config.method, &config.compression);
  if (!expected.ok()) return expected;
  if (*wanted == *expected) return wanted;
  return gradwire::InvalidArgument(
      fmt::format("the program makes the method {}, expected {}, which the job's setting method "
                  "says",
                  gradwire::ToString(*wanted), gradwire::ToString(*expected)));
}

Result<std::unique_ptr<gradwire_optimizer>> MakeOptimizer(gradwire_client& client,
                                                          const char* method) {
  const auto spec = MethodOf(client.config, method);
  if (!spec.ok()) return spec.status();
  auto made = std::make_unique<gradwire_optimizer>();
  made->client = &client;
  made->method = gradwire::ToString(*spec);
  const std::string& decay = spec->parameters.at("weight_decay");  // every method has one
  std::from_chars(decay.data(), decay.data() + decay.size(), made->weight_decay);
  auto optimizer =
      gradwire::JobOptimizer::Create(*client.client, made->method, client.config.compression);
  if (!optimizer.ok()) return optimizer.status();
  made->optimizer = std::move(optimizer).value();
  client.has_optimizer = true;
  return made;
}

}  // namespace

gradwire_status gradwire_optimizer_create(gradwire_client* client, const char* method,
                                          gradwire_optimizer** optimizer) {
  return Guarded([&]() -> Status {
    if (Status s = CheckNotNull(optimizer, "the place for the optimizer"); !s.ok()) return s;
    *optimizer = nullptr;
    if (Status s = CheckOwner(client); !s.ok()) return s;
    auto made = MakeOptimizer(*client, method);
    if (!made.ok()) return made.status();
    *optimizer = made.value().release();
    return Status::Ok();
  });
}

void gradwire_optimizer_free(gradwire_optimizer* optimizer) {
  if (optimizer == nullptr || optimizer->client->owner != getpid()) return;
  delete optimizer;
}

const char* gradwire_optimizer_method(const gradwire_optimizer* optimizer) {
  return optimizer == nullptr ? nullptr : optimizer->method.c_str();
}

gradwire_status gradwire_optimizer_add(gradwire_optimizer* optimizer, uint32_t tensor,
                                       const char* name, int decays) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) -> Status {
    const std::shared_ptr<const gradwire::Plan> plan = optimizer->client->client->plan();
    const std::vector<TensorDeclaration>& declared = plan->tensors;
    if (tensor >= declared.size()) {
      return gradwire::InvalidArgument(
          fmt::format("method {}: there is no tensor {}, {} are "
                      "declared",
                      o.state().name(), tensor, declared.size()));
    }
    const TensorDeclaration& its = declared[tensor];
    if (its.dtype != gradwire::DType::kFloat32 || its.op != gradwire::ReduceOp::kAverage) {
      return gradwire::InvalidArgument(fmt::format(
          "method {}: tensor '{}' is {} of {}, expected average of float32", o.state().name(),
          its.name, gradwire::ReduceOpName(its.op), gradwire::DTypeName(its.dtype)));
    }
    if (name != nullptr) {
      if (Status s = CheckName(name, "the name of a method's tensor"); !s.ok()) return s;
    }
    return o.AddTensor({tensor}, name == nullptr ? its.name : name, its.num_elements(),
                       decays != 0);
  });
}

gradwire_status gradwire_optimizer_send(gradwire_optimizer* optimizer, uint32_t tensor,
                                        float* gradient, size_t count) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) -> Status {
    if (count > 0) {
      if (Status s = CheckNotNull(gradient, "the gradient"); !s.ok()) return s;
    }
    return o.Send({tensor}, {gradient, count});
  });
}

gradwire_status gradwire_optimizer_update(gradwire_optimizer* optimizer, gradwire_handle handle,
                                          const float* pulled, double rate, float* parameters,
                                          size_t count) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) -> Status {
    if (count > 0) {
      if (Status s = CheckNotNull(pulled, "what was pulled"); !s.ok()) return s;
      if (Status s = CheckNotNull(parameters, "the array of parameters"); !s.ok()) return s;
    }
    return o
        .Update({{handle.tensor}, handle.generation}, {pulled, count}, rate, {parameters, count})
        .status();
  });
}

gradwire_status gradwire_optimizer_cancel(gradwire_optimizer* optimizer, uint32_t tensor) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) { return o.Cancel({tensor}); });
}

gradwire_status gradwire_optimizer_end_step(gradwire_optimizer* optimizer) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) {
    o.EndStep();
    return Status::Ok();
  });
}

gradwire_status gradwire_optimizer_save(const gradwire_optimizer* optimizer, void* buffer,
                                        size_t* bytes) {
  return WithOptimizer(optimizer, [&](const gradwire::JobOptimizer& o) -> Status {
    if (Status s = CheckRoom(buffer, bytes); !s.ok()) return s;
    const auto saved = o.state().Save();
    if (!saved.ok()) return saved.status();
    return WriteTo(buffer, bytes, "the method's state", *saved);
  });
}

gradwire_status gradwire_optimizer_load(gradwire_optimizer* optimizer, const void* buffer,
                                        size_t bytes) {
  return WithOptimizer(optimizer, [&](gradwire::JobOptimizer& o) -> Status {
    if (bytes > 0) {
      if (Status s = CheckNotNull(buffer, "the buffer"); !s.ok()) return s;
    }
    return o.Restore({static_cast<const std::byte*>(buffer), bytes});
  });
}

gradwire_status gradwire_optimizer_get_value(const gradwire_optimizer* optimizer, const char* name,
                                             double* value) {
  return WithOptimizer(optimizer, [&](const gradwire::JobOptimizer& o) -> Status {
    if (Status s = CheckNotNull(name, "the name of a value"); !s.ok()) return s;
    if (Status s = CheckNotNull(value, "the place for the value"); !s.ok()) return s;
    const gradwire::Optimizer& state = o.state();
    const std::pair<std::string_view, double> values[] = {
        {"step", static_cast<double>(state.step())},
        {"updates", static_cast<double>(state.updates())},
        {"skipped", static_cast<double>(state.skipped())},
        {"weight_decay", optimizer->weight_decay},
        {"freeze_step", static_cast<double>(state.traits().freeze_step)},
        {"needs_skip", state.traits().needs_skip ? 1.0 : 0.0}};
    return ValueOf(values, name, value);
  });
}
