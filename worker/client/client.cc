#include "worker/client/client.h"

#include "common/base/log.h"
#include "common/plan/plan.h"
#include "common/transport/zmq_loop.h"
#include "compressors/methods/method.h"
#include "worker/client/client_impl.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

constexpr std::string_view kBroadcastPrefix = "broadcast:";

}  // namespace

// --- collective calls ---------------------------------------------------------------------------

Result<std::vector<TensorId>> ClientImpl::Declare(std::span<const TensorDeclaration> batch) {
  const std::lock_guard collective(collective_mu_);
  gradwire::Declare declare;
  declare.tensors.assign(batch.begin(), batch.end());
  std::unique_lock lock(mu_);
  if (closing_) return InvalidArgument("Declare after Close");
  if (!error_.ok()) return error_;
  declare.batch = batches_declared_++;
  const std::size_t first = plan_->tensors.size();
  open_declare_ = Serialize(declare);
  loop_->Post([this, body = *open_declare_] {
    Header header;
    header.kind = MessageKind::kDeclare;
    SendControl(0, header, body);
  });
  const Status status = Await(
      lock, [&] { return batches_planned_ > declare.batch; },
      [&] {
        return fmt::format(
            "declaration of {} tensor(s) from '{}': not every worker has declared them",
            batch.size(), batch.empty() ? "" : batch[0].name);
      });
  open_declare_.reset();
  GRADWIRE_RETURN_IF_ERROR(status);
  std::vector<TensorId> ids;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    ids.push_back({static_cast<std::uint32_t>(first + i)});
  }
  lock.unlock();
  if (has_loaded_) GRADWIRE_RETURN_IF_ERROR(RestorePlannedUnits());
  return ids;
}

Status ClientImpl::Barrier() {
  const std::lock_guard collective(collective_mu_);
  return EnterBarrier(0);
}

Status ClientImpl::EnterBarrier(std::uint64_t step) {
  std::unique_lock lock(mu_);
  if (closing_) return InvalidArgument("Barrier after Close");
  if (!error_.ok()) return error_;
  const std::uint64_t number = barriers_entered_++;
  barrier_step_ = step;
  loop_->Post([this, number, step] {
    Header header;
    header.kind = MessageKind::kBarrier;
    header.round = number;
    header.step = step;
    SendControl(0, header, {});
  });
  return Await(
      lock, [&] { return barriers_done_ > number; },
      [&] { return fmt::format("barrier {}: not every worker has come", number); });
}

Status ClientImpl::Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) {
  if (root >= config_.job.workers) {
    return InvalidArgument(
        fmt::format("broadcast '{}': root {} is out of range, the job has {} "
                    "workers",
                    name, root, config_.job.workers));
  }
  TensorDeclaration declaration;
  declaration.name = std::string(kBroadcastPrefix) + name;
  declaration.dtype = DType::kUInt8;
  declaration.shape = {data.size()};
  declaration.op = ReduceOp::kBroadcast;
  TensorId id;
  bool known = false;
  {
    const std::lock_guard lock(mu_);
    if (closing_) return InvalidArgument(fmt::format("Broadcast of '{}' after Close", name));
    if (!error_.ok()) return error_;
    for (std::uint32_t t = 0; t < plan_->tensors.size(); ++t) {
      if (plan_->tensors[t].name != declaration.name) continue;
      if (plan_->tensors[t].num_elements() != data.size()) {
        const Status status = InvalidArgument(
            fmt::format("broadcast '{}' is {} bytes on rank {}, it was {} before", name,
                        data.size(), rank_, plan_->tensors[t].num_elements()));
        PostFail(status);  // the others wait for this one
        return status;
      }
      id.index = t;
      known = true;
    }
  }
  if (!known) {
    auto ids = Declare(std::span(&declaration, 1));
    if (!ids.ok()) return ids.status();
    id = ids.value()[0];
  }
  {
    const std::lock_guard lock(mu_);
    tensors_[id.index]->is_broadcast_root = root == rank_;
  }
  const auto handle = PushPullAsync(id, data, data);
  if (!handle.ok()) return handle.status();
  return Wait(*handle);
}

// --- waiting ------------------------------------------------------------------------------------

Status ClientImpl::Await(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
                         const std::function<std::string()>& describe) {
  const auto over = [&] { return !error_.ok() || done(); };
  const Clock::time_point start = Clock::now();
  const milliseconds warn(config_.timeouts.stall_warn_ms);
  const milliseconds stop(config_.timeouts.stall_stop_ms);
  const auto so_far = [&] {
    return fmt::format("{} after {:.1f} s (rank {})", describe(),
                       std::chrono::duration<double>(Clock::now() - start).count(), rank_);
  };
  bool in_time = false;
  if (warn < stop) {
    in_time = changed_.wait_until(lock, start + warn, over);
    if (!in_time) LogWarn("client", so_far());
  }
  if (!in_time) in_time = changed_.wait_until(lock, start + stop, over);
  // The servers know which ranks are missing.
  if (!in_time) in_time = changed_.wait_for(lock, kServerSpeaks, over);
  if (done()) return Status::Ok();
  if (!error_.ok()) return error_;
  const Status status = Timeout(so_far());
  PostFail(status);
  changed_.wait_for(lock, kReleaseTimeout, [this] { return !error_.ok(); });
  return error_.ok() ? status : error_;
}

// --- the end ------------------------------------------------------------------------------------

Status ClientImpl::Close() {
  const std::lock_guard collective(collective_mu_);
  std::unique_lock lock(mu_);
  if (closed_) return close_status_;
  closing_ = true;  // nothing new comes in
  changed_.notify_all();
  // What waits in PushPullAsync gives up; what is in flight ends well or by name.
  std::string incomplete;
  Status status = Await(
      lock,
      [&] {
        incomplete = DescribeIncomplete();
        return in_flight_ == 0 || !incomplete.empty();
      },
      [&] {
        for (std::uint32_t t = 0; t < tensors_.size(); ++t) {
          if (tensors_[t]->in_flight) return "Close waits: " + DescribeInFlight(t);
        }
        return std::string("Close waits");
      });
  if (status.ok() && !error_.ok()) status = error_;
  if (status.ok() && in_flight_ > 0) {
    status = InvalidArgument(fmt::format("Close on rank {}: {}", rank_, incomplete));
    PostFail(status);
    changed_.wait_for(lock, kReleaseTimeout, [this] { return !error_.ok(); });
  }
  if (status.ok()) status = SayGoodbye(lock);
  closed_ = true;
  close_status_ = status;
  loop_->Post([this] { Abort(Unavailable("the client is closed")); });
  AwaitMemory(lock);
  lock.unlock();
  StopLoop();
  return status;
}

Status ClientImpl::SayGoodbye(std::unique_lock<std::mutex>& lock) {
  leaving_ = true;
  loop_->Post([this] {
    std::size_t count = 0;
    {
      const std::lock_guard inner(mu_);
      count = connections_.size();
    }
    Header header;
    header.kind = MessageKind::kGoodbye;
    for (std::size_t i = 0; i < count; ++i) SendControl(i, header, {});
  });
  const milliseconds dead_after(config_.timeouts.dead_after_ms);
  const auto all_done = [&] {
    return std::all_of(connections_.begin(), connections_.end(),
                       [](const auto& c) { return c->goodbye_done; });
  };
  const bool in_time =
      changed_.wait_for(lock, dead_after, [&] { return !error_.ok() || all_done(); });
  // The others may have failed the job since; this worker has done its part.
  if (all_done()) return Status::Ok();
  if (in_time) return error_;
  std::string text;
  bool all_down = true;
  for (const auto& connection : connections_) {
    if (connection->goodbye_done) continue;
    all_down &= !connection->up;
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", DescribeConnection(*connection),
                        connection->up ? "connected, but it does not answer" : "no connection");
  }
  text = fmt::format("worker {}'s goodbye is not acknowledged after {:.1f} s by {}", rank_,
                     config_.timeouts.dead_after_ms / 1000.0, text);
  LogError("client", text);
  return all_down ? Unavailable(text) : Timeout(text);
}

bool ClientImpl::AwaitMemory(std::unique_lock<std::mutex>& lock) {
  // In process a server gives it back when it is told of the failure, or takes this worker for
  // lost.
  const milliseconds most =
      std::max(kReleaseTimeout, milliseconds(config_.timeouts.dead_after_ms) + milliseconds(2000));
  return changed_.wait_for(lock, most, [this] { return in_flight_ == 0; });
}

void ClientImpl::StopLoop() {
  if (!loop_started_) return;
  loop_started_ = false;
  loop_->Stop(kFarewellMs);
  executor_ = nullptr;  // waits for what it still runs
  if (probe_.joinable()) probe_.join();
}

ClientImpl::~ClientImpl() {
  bool give_up = false;
  {
    const std::lock_guard lock(mu_);
    if (!closed_ && error_.ok() && in_flight_ > 0) {
      // Most likely an error on the caller's side: nobody shall wait for what this one still waits
      // for, and the others learn why.
      std::string text;
      for (std::uint32_t t = 0; t < tensors_.size() && text.empty(); ++t) {
        if (tensors_[t]->in_flight) text = DescribeInFlight(t);
      }
      PostFail(Unavailable(fmt::format("worker {} ends with {} push-pull(s) in flight: {}", rank_,
                                       in_flight_, text)));
      give_up = true;
    }
  }
  if (give_up) {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, kReleaseTimeout, [this] { return !error_.ok(); });
  }
  (void)Close();
  StopLoop();
  const std::lock_guard gate(gate_->mu);
  gate_->client = nullptr;
  for (auto& tensor : tensors_) {
    if (!tensor->in_flight) continue;
    LogError("client", "memory of a push-pull is still in use after its client's end",
             {Field("rank", rank_)});
    (void)tensor->memory.release();  // goes never: somebody still refers to it
  }
}

// --- the door -----------------------------------------------------------------------------------

Result<std::vector<ElementRange>> Client::ActiveRanges(const Handle& handle) const {
  const std::shared_ptr<const Plan> current = plan();
  const std::vector<TensorDeclaration>& tensors = current->tensors;
  if (handle.tensor.index >= tensors.size()) {
    return InvalidArgument(fmt::format("active ranges of tensor {}, {} are declared",
                                       handle.tensor.index, tensors.size()));
  }
  const std::uint64_t count = tensors[handle.tensor.index].num_elements();
  if (count == 0) return std::vector<ElementRange>();
  return std::vector<ElementRange>{{0, count}};
}

Status Client::AskForInterval(std::uint32_t interval) {
  return InvalidArgument(
      fmt::format("an interval of {} is asked for, but this client has no filter", interval));
}

Result<std::unique_ptr<Client>> Client::Connect(const Config& config, std::uint32_t rank) {
  ZmqLoopOptions options;
  options.max_message_bytes = MaxFrameBytes(config.partition.bytes);
  options.dead_after_ms = config.timeouts.dead_after_ms;
  return Connect(config, rank, MakeZmqLoop(options));
}

Result<std::unique_ptr<Client>> Client::Connect(const Config& config, std::uint32_t rank,
                                                std::unique_ptr<Loop> loop) {
  if (rank >= config.job.workers) {
    return InvalidArgument(
        fmt::format("rank {} is out of range: the job has {} workers", rank, config.job.workers));
  }
  const auto method = JobMethodTraits(config.method, config.compression);
  if (!method.ok()) return method.status();
  auto client = std::make_unique<ClientImpl>(config, rank, std::move(loop), method->pushes_state);
  GRADWIRE_RETURN_IF_ERROR(client->Init());
  return std::unique_ptr<Client>(std::move(client));
}

}  // namespace gradwire
