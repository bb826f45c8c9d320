#include "worker/client/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "common/base/buffer_pool.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/ring_queue.h"
#include "common/pipeline/admission.h"
#include "common/pipeline/executor.h"
#include "common/plan/units.h"
#include "common/transport/zmq_loop.h"
#include "common/wire/control.h"
#include "compressors/codec_cache.h"
#include "compressors/feedback/residual_store.h"
#include "worker/client/unit_io.h"

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What a handle may still wait for after the job has failed: ZeroMQ's threads giving memory back.
constexpr milliseconds kReleaseTimeout(10000);

// How much longer than its own start deadline a worker waits for the root's word on it.
constexpr milliseconds kRootSpeaks(3000);

constexpr int kFarewellMs = 100;

constexpr std::string_view kBroadcastPrefix = "broadcast:";

std::string Name(const Plan& plan, const Unit& unit) {
  return fmt::format("tensor {} (key {})", DescribeUnit(plan, unit), unit.key);
}

class ClientImpl final : public Client, private LoopHandler {
 public:
  ClientImpl(const Config& config, std::uint32_t rank, std::unique_ptr<Loop> loop)
      : config_(config),
        rank_(rank),
        incarnation_(RandomId()),
        codecs_(BuiltinCompressors()),
        convert_(codecs_.Get("fp16").ok() ? *codecs_.Get("fp16") : nullptr,
                 codecs_.Get("bf16").ok() ? *codecs_.Get("bf16") : nullptr),
        executor_(MakeExecutor(Threads(config))),
        loop_(std::move(loop)),
        encoded_(2 * config.partition.credit * config.job.servers) {}

  ~ClientImpl() override {
    (void)Close();
    StopLoop();
  }

  Status Init() {
    GRADWIRE_RETURN_IF_ERROR(loop_->Start(this, fmt::format("gw-worker-{}", rank_)));
    loop_started_ = true;
    const Clock::time_point deadline = Clock::now() + milliseconds(config_.timeouts.start_ms);
    loop_->Post([this] {
      AddConnection(config_.endpoint, 0, 0);
      Tick();
    });
    // First the root, then every lane it names.
    std::unique_lock lock(mu_);
    const auto done = [this] { return !error_.ok() || (have_addresses_ && AllWelcomed()); };
    bool in_time = changed_.wait_until(lock, deadline, done);
    if (!in_time && !connections_.empty() && connections_[0]->was_up) {
      // The root knows who is missing and says so when its own deadline has passed.
      in_time = changed_.wait_for(lock, kRootSpeaks, done);
    }
    if (!error_.ok()) return error_;
    if (in_time) return Status::Ok();
    const Status status =
        Timeout(fmt::format("worker {} could not start within {:.1f} s: {}", rank_,
                            config_.timeouts.start_ms / 1000.0, DescribeUnwelcomed()));
    PostFail(status);
    changed_.wait_for(lock, kReleaseTimeout, [this] { return !error_.ok(); });
    return status;
  }

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t num_workers() const override { return config_.job.workers; }

  Result<std::vector<TensorId>> Declare(std::span<const TensorDeclaration> batch) override;
  Result<Handle> PushPullAsync(TensorId tensor, ByteView input, MutableBytes output) override;
  Status Wait(const Handle& handle) override;
  bool Poll(const Handle& handle) override;
  Status EndStep() override;
  Status Broadcast(const std::string& name, MutableBytes data, std::uint32_t root) override;
  Status Barrier() override;
  Status Close() override;

  const Plan& plan() const override {
    const std::lock_guard lock(mu_);
    return *plan_;
  }

  ClientStats stats() const override {
    const std::lock_guard lock(mu_);
    ClientStats stats = stats_;
    stats.traffic = loop_->traffic();
    return stats;
  }

  Result<std::vector<std::byte>> SaveState() override { return residuals_.Save(); }
  Status RestoreState(ByteView saved) override { return residuals_.Restore(saved); }

  std::vector<float> ReadResidual(TensorId tensor) override {
    TensorDeclaration declaration;
    {
      const std::lock_guard lock(mu_);
      if (tensor.index >= plan_->tensors.size()) return {};
      declaration = plan_->tensors[tensor.index];
    }
    return residuals_.Read(declaration.name, declaration.num_elements());
  }

 private:
  enum class UnitState {
    kGathering,  // some members are missing (or all: nothing to do)
    kReady,      // waits to be encoded
    kEncoding,
    kSendable,  // waits for credit
    kSent,      // waits for the reply
    kDecoding,
  };

  // References to drop once mu_ is not held: dropping the last one takes it. Rarely more than a
  // few, so they take no memory.
  class ReleaseList {
   public:
    void Add(BlobRef reference) {
      if (!reference) return;
      if (size_ < few_.size()) {
        few_[size_++] = std::move(reference);
      } else {
        more_.push_back(std::move(reference));
      }
    }
    void Drop() {
      for (std::size_t i = 0; i < size_; ++i) few_[i] = {};
      size_ = 0;
      more_.clear();
    }

   private:
    std::array<BlobRef, 8> few_;
    std::size_t size_ = 0;
    std::vector<BlobRef> more_;
  };

  // The caller's memory of one tensor: its last reference goes when nothing of ours and nothing of
  // ZeroMQ's reads the input any more. That, with the output written, is what completes a handle.
  class CallerMemory final : public Blob {
   public:
    CallerMemory(ClientImpl& client, std::uint32_t tensor) : client_(client), tensor_(tensor) {}

   private:
    void Recycle() noexcept override { client_.OnMemoryReleased(tensor_); }
    ClientImpl& client_;
    const std::uint32_t tensor_;
  };

  struct Tensor {
    std::unique_ptr<CallerMemory> memory;
    BlobRef held;  // while units are under way
    bool in_flight = false;
    std::uint64_t generation = 0;
    std::uint32_t units_left = 0;
    bool is_broadcast_root = false;
    std::vector<std::pair<std::uint64_t, std::size_t>> parts;  // (key, member)
  };

  struct UnitWork {
    const Unit* unit = nullptr;
    std::shared_ptr<const Plan> plan;  // keeps `unit` alive
    std::size_t connection = 0;
    UnitState state = UnitState::kGathering;

    // What the open step has handed over, and what a later one has before this round is done.
    std::vector<MemberMemory> memory;
    std::size_t members_here = 0;
    std::uint64_t step = 0;
    std::vector<MemberMemory> next_memory;
    std::size_t next_members_here = 0;
    std::uint64_t next_step = 0;
    bool next_ended = false;

    std::uint64_t round = 0;
    std::uint32_t phase = 0;

    // Of the phase that holds now.
    std::uint32_t prepared_phase = UINT32_MAX;
    const Compressor* uplink = nullptr;    // null: the dtype's own bytes
    const Compressor* downlink = nullptr;  // null: the same
    Residual* residual = nullptr;

    Payload payload;  // kept until the reply: it may have to be sent again, or taken back
    bool nonfinite = false;
    std::size_t token_bytes = 0;  // what it holds of encoded_
    bool receipted = false;
    ReplyKind reply_kind = ReplyKind::kNone;
    Payload reply;
    Status outcome;
  };

  struct Unreceipted {
    std::uint64_t sequence = 0;
    std::uint64_t key = 0;
    std::uint64_t round = 0;
    std::size_t bytes = 0;
  };

  struct Connection {
    std::string address;
    std::uint32_t server = 0;
    std::uint32_t lane = 0;
    PeerId peer = 0;
    bool up = false;
    bool was_up = false;
    bool welcomed = false;
    bool goodbye_done = false;
    std::uint64_t hellos = 0;  // said on it, over all its lives
    std::uint64_t next_sequence = 1;
    RingQueue<Unreceipted> unreceipted;
    Clock::time_point down_since;
  };

  struct ServerLink {
    explicit ServerLink(std::size_t credit) : window(credit) {}
    ByteWindow window;
    AdmissionQueue sendable;
  };

  static int Threads(const Config& config) {
    if (config.worker.threads) return static_cast<int>(*config.worker.threads);
    // With few cores the I/O thread encodes and decodes: waking another costs more (docs/results).
    const unsigned cores = std::thread::hardware_concurrency();
    return cores <= 4 ? 0 : static_cast<int>(std::min(cores / 4, 8U));
  }

  // --- the loop's thread -------------------------------------------------------------------------

  void OnMessage(PeerId from, const Header& header, Payload payload) override;
  void OnUp(PeerId peer) override;
  void OnDown(PeerId peer) override;

  void AddConnection(const std::string& address, std::uint32_t server, std::uint32_t lane);
  void OnWelcome(std::size_t index, const Payload& payload);
  void OnPlan(const Header& header, const Payload& payload);
  void OnReceipt(Connection& connection, std::uint64_t sequence);
  void OnReply(const Header& header, Payload payload);
  void OnPushAgain(const Header& header);
  void SendControl(std::size_t connection, Header header, const std::vector<std::byte>& body);
  void SendPump();
  void Tick();
  /// Ends everything with an error: nothing is sent any more, handles complete with it as soon as
  /// their memory is free. Fail logs it and tells the servers, which tell the other workers.
  void Fail(Status status) { FailWith(std::move(status), /*tell=*/true); }
  void FailWith(Status status, bool tell);
  void Abort(Status status);

  // --- with mu_ held -----------------------------------------------------------------------------

  bool AllWelcomed() const;
  std::string DescribeUnwelcomed() const;
  Status PrepareUnit(UnitWork& work);
  void MakeReady(UnitWork& work);
  void ScheduleEncode();
  void ScheduleSend();
  /// Puts what a finished or aborted unit held into `released`, to be dropped without the lock.
  void RetireUnit(UnitWork& work, ReleaseList& released);
  void StartNext(UnitWork& work);
  void GiveToken(UnitWork& work);
  CodecContext ContextOf(const UnitWork& work, std::uint32_t sender) const {
    CodecContext context;
    context.stream_seed =
        HashCombine(HashCombine(HashCombine(config_.job.seed, work.unit->key), work.round), sender);
    return context;
  }
  std::string DescribeWait(const Tensor& tensor) const;

  // --- any thread, without mu_ -------------------------------------------------------------------

  void RunEncoder();
  void EncodeUnit(UnitWork& work);
  void DecodeUnit(UnitWork& work);
  void FinishUnit(UnitWork& work);
  void OnMemoryReleased(std::uint32_t tensor);
  void PostFail(Status status) {
    loop_->Post([this, status = std::move(status)]() mutable { Fail(std::move(status)); });
  }
  void StopLoop() {
    if (!loop_started_) return;
    loop_started_ = false;
    loop_->Stop(kFarewellMs);
    executor_ = nullptr;  // waits for what it still runs
  }

  const Config config_;
  const std::uint32_t rank_;
  const std::uint64_t incarnation_;

  // Own synchronization.
  CodecCache codecs_;
  const FloatConverter convert_;
  BufferPool pool_;
  ResidualStore residuals_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Loop> loop_;
  bool loop_started_ = false;
  std::mutex collective_mu_;  // one Declare, Broadcast or Barrier at a time

  mutable std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_.
  Status error_;
  ClientStats stats_;
  std::shared_ptr<const Plan> plan_ = std::make_shared<const Plan>();
  std::uint64_t batches_declared_ = 0;                  // by this worker
  std::uint64_t batches_planned_ = 0;                   // that the plan here covers
  std::optional<std::vector<std::byte>> open_declare_;  // to be said again after a cut
  std::uint64_t barriers_entered_ = 0;
  std::uint64_t barriers_done_ = 0;
  bool closing_ = false;
  bool closed_ = false;
  std::uint64_t step_ = 0;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::vector<std::unique_ptr<UnitWork>> units_;  // [key]
  std::vector<std::unique_ptr<Connection>> connections_;
  bool have_addresses_ = false;
  std::vector<ServerLink> servers_;
  AdmissionQueue ready_;
  ByteWindow encoded_;  // encoded buffers that have no receipt
  int encoders_ = 0;
  bool send_posted_ = false;
};

// --- start, end, collective calls ---------------------------------------------------------------

void ClientImpl::AddConnection(const std::string& address, std::uint32_t server,
                               std::uint32_t lane) {
  const auto peer = loop_->Connect(address);
  if (!peer.ok()) {
    Fail(peer.status());
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->address = address;
  connection->server = server;
  connection->lane = lane;
  connection->peer = *peer;
  connection->down_since = Clock::now();
  const std::lock_guard lock(mu_);
  connections_.push_back(std::move(connection));
}

bool ClientImpl::AllWelcomed() const {
  return std::all_of(connections_.begin(), connections_.end(),
                     [](const auto& connection) { return connection->welcomed; });
}

std::string ClientImpl::DescribeUnwelcomed() const {
  std::string text;
  for (const auto& connection : connections_) {
    if (connection->welcomed) continue;
    text += text.empty() ? "" : "; ";
    text += connection->was_up
                ? fmt::format("server {} lane {} at {} has not welcomed it (others are missing)",
                              connection->server, connection->lane, connection->address)
                : fmt::format("no connection to server {} lane {} at {}", connection->server,
                              connection->lane, connection->address);
  }
  return text.empty() ? "the root has not answered" : text;
}

void ClientImpl::OnUp(PeerId peer) {
  std::size_t index = 0;
  std::vector<Header> repulls;
  std::optional<std::vector<std::byte>> declare;
  bool barrier = false;
  bool goodbye = false;
  std::uint64_t hello_number = 0;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    while (index < connections_.size() && connections_[index]->peer != peer) ++index;
    if (index == connections_.size()) return;
    Connection& connection = *connections_[index];
    if (connection.was_up) ++stats_.reconnects;
    connection.up = connection.was_up = true;
    connection.next_sequence = 1;
    hello_number = ++connection.hellos;
    for (const auto& work : units_) {
      if (work->connection != index || work->state != UnitState::kSent || !work->receipted) {
        continue;
      }
      Header header;
      header.kind = MessageKind::kRepull;
      header.key = work->unit->key;
      header.round = work->round;
      header.step = work->step;
      header.phase = work->phase;
      header.plan_version = plan_->version;
      repulls.push_back(header);
    }
    if (index == 0) {
      declare = open_declare_;
      barrier = barriers_entered_ > barriers_done_;
    }
    goodbye = closing_ && !connection.goodbye_done;
  }
  Header header;
  header.kind = MessageKind::kHello;
  header.sequence = hello_number;
  Hello hello;
  hello.job_id = config_.job.id;
  hello.protocol_version = kProtocolVersion;
  hello.role = Role::kWorker;
  hello.rank = rank_;
  hello.incarnation = incarnation_;
  hello.shared_config = SharedConfig(config_);
  SendControl(index, header, Serialize(hello));
  header.sequence = 0;
  if (declare) {
    header.kind = MessageKind::kDeclare;
    SendControl(index, header, *declare);
  }
  if (barrier) {
    Header at_barrier;
    at_barrier.kind = MessageKind::kBarrier;
    at_barrier.round = barriers_entered_ - 1;
    SendControl(index, at_barrier, {});
  }
  // What has no receipt is in the queue again (OnDown) and goes first, then the questions.
  SendPump();
  for (const Header& repull : repulls) SendControl(index, repull, {});
  if (goodbye) {
    header.kind = MessageKind::kGoodbye;
    SendControl(index, header, {});
  }
}

void ClientImpl::OnDown(PeerId peer) {
  const std::lock_guard lock(mu_);
  for (const auto& connection : connections_) {
    if (connection->peer != peer) continue;
    connection->up = false;
    connection->down_since = Clock::now();
    ServerLink* const link =
        connection->server < servers_.size() ? &servers_[connection->server] : nullptr;
    while (!connection->unreceipted.empty()) {
      const Unreceipted sent = connection->unreceipted.Pop();
      link->window.Give(sent.bytes);
      UnitWork& work = *units_[sent.key];
      if (work.state != UnitState::kSent || work.round != sent.round || work.receipted) continue;
      work.state = UnitState::kSendable;
      link->sendable.Push({work.unit->priority, work.unit->key});
      ++stats_.resent_pushes;
    }
    return;
  }
}

void ClientImpl::SendControl(std::size_t connection, Header header,
                             const std::vector<std::byte>& body) {
  header.rank = rank_;
  header.incarnation = incarnation_;
  Payload payload;
  if (!body.empty()) {
    const PooledBuffer buffer = pool_.Acquire(body.size());
    std::memcpy(buffer.bytes().data(), body.data(), body.size());
    payload = buffer.Share(body.size());
  }
  PeerId peer = 0;
  {
    const std::lock_guard lock(mu_);
    if (!connections_[connection]->up) return;  // said when it is up again
    peer = connections_[connection]->peer;
  }
  (void)loop_->Send(peer, header, std::move(payload));  // lost ones are said again after OnUp
}

void ClientImpl::OnWelcome(std::size_t index, const Payload& payload) {
  auto welcome = ParseWelcome(payload.bytes);
  if (!welcome.ok()) {
    Fail(welcome.status());
    return;
  }
  bool add_lanes = false;
  {
    const std::lock_guard lock(mu_);
    connections_[index]->welcomed = true;
    add_lanes = index == 0 && !have_addresses_;
  }
  if (add_lanes) {
    const bool complete =
        welcome->addresses.size() == config_.job.servers &&
        std::all_of(welcome->addresses.begin(), welcome->addresses.end(),
                    [&](const auto& lanes) { return lanes.size() == config_.server.lanes; });
    if (!complete) {
      Fail(CorruptData(
          fmt::format("the root names the lanes of {} servers, expected {} with {} each",
                      welcome->addresses.size(), config_.job.servers, config_.server.lanes)));
      return;
    }
    for (std::uint32_t s = 0; s < config_.job.servers; ++s) {
      for (std::uint32_t l = 0; l < config_.server.lanes; ++l) {
        if (s == 0 && l == 0) continue;  // the root's own lane: the connection there is
        AddConnection(welcome->addresses[s][l], s, l);
      }
    }
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    for (std::uint32_t s = 0; s < config_.job.servers; ++s) {
      servers_.emplace_back(config_.partition.credit);
    }
    have_addresses_ = true;
  }
  changed_.notify_all();
}

Result<std::vector<TensorId>> ClientImpl::Declare(std::span<const TensorDeclaration> batch) {
  const std::lock_guard collective(collective_mu_);
  gradwire::Declare declare;
  declare.tensors.assign(batch.begin(), batch.end());
  std::unique_lock lock(mu_);
  if (!error_.ok()) return error_;
  if (closing_) return InvalidArgument("Declare after Close");
  declare.batch = batches_declared_++;
  const std::size_t first = plan_->tensors.size();
  open_declare_ = Serialize(declare);
  loop_->Post([this, body = *open_declare_] {
    Header header;
    header.kind = MessageKind::kDeclare;
    SendControl(0, header, body);
  });
  const bool in_time = changed_.wait_for(lock, milliseconds(config_.timeouts.stall_stop_ms), [&] {
    return !error_.ok() || batches_planned_ > declare.batch;
  });
  open_declare_.reset();
  if (!error_.ok()) return error_;
  if (!in_time) {
    const Status status = Timeout(fmt::format(
        "declaration of {} tensor(s) from '{}': not every worker has declared them after {:.1f} s",
        batch.size(), batch.empty() ? "" : batch[0].name, config_.timeouts.stall_stop_ms / 1000.0));
    PostFail(status);
    return status;
  }
  std::vector<TensorId> ids;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    ids.push_back({static_cast<std::uint32_t>(first + i)});
  }
  return ids;
}

void ClientImpl::OnPlan(const Header& header, const Payload& payload) {
  auto parsed = ParsePlan(payload.bytes);
  if (!parsed.ok()) {
    Fail(parsed.status());
    return;
  }
  auto plan = std::make_shared<const Plan>(std::move(parsed).value());
  const std::lock_guard lock(mu_);
  if (plan->version <= plan_->version) return;
  if (plan->num_servers != config_.job.servers || plan->lanes_per_server != config_.server.lanes ||
      plan->tensors.size() < plan_->tensors.size() || plan->units.size() < plan_->units.size()) {
    // Comes from the root alone; a root that says this is not ours.
    loop_->Post([this] { Fail(CorruptData("the root's plan does not fit the configuration")); });
    return;
  }
  for (std::uint32_t t = static_cast<std::uint32_t>(tensors_.size()); t < plan->tensors.size();
       ++t) {
    auto tensor = std::make_unique<Tensor>();
    tensor->memory = std::make_unique<CallerMemory>(*this, t);
    tensors_.push_back(std::move(tensor));
  }
  for (std::size_t key = units_.size(); key < plan->units.size(); ++key) {
    const Unit& unit = plan->units[key];
    auto work = std::make_unique<UnitWork>();
    work->unit = &unit;
    work->plan = plan;
    work->memory.resize(unit.members.size());
    work->next_memory.resize(unit.members.size());
    for (std::size_t c = 0; c < connections_.size(); ++c) {
      if (connections_[c]->server == unit.server && connections_[c]->lane == unit.lane) {
        work->connection = c;
      }
    }
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      tensors_[unit.members[m].tensor]->parts.emplace_back(key, m);
    }
    units_.push_back(std::move(work));
  }
  ready_.Reserve(units_.size());
  for (ServerLink& link : servers_) link.sendable.Reserve(2 * units_.size());
  plan_ = std::move(plan);
  batches_planned_ = header.round;
  changed_.notify_all();
}

Status ClientImpl::Barrier() {
  const std::lock_guard collective(collective_mu_);
  std::unique_lock lock(mu_);
  if (!error_.ok()) return error_;
  if (closing_) return InvalidArgument("Barrier after Close");
  const std::uint64_t number = barriers_entered_++;
  loop_->Post([this, number] {
    Header header;
    header.kind = MessageKind::kBarrier;
    header.round = number;
    SendControl(0, header, {});
  });
  const bool in_time = changed_.wait_for(lock, milliseconds(config_.timeouts.stall_stop_ms),
                                         [&] { return !error_.ok() || barriers_done_ > number; });
  if (!error_.ok()) return error_;
  if (in_time) return Status::Ok();
  const Status status = Timeout(fmt::format("barrier {}: not every worker has come after {:.1f} s",
                                            number, config_.timeouts.stall_stop_ms / 1000.0));
  PostFail(status);
  return status;
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

Status ClientImpl::Close() {
  const std::lock_guard collective(collective_mu_);
  std::unique_lock lock(mu_);
  if (closed_) return Status::Ok();
  closed_ = true;
  if (!error_.ok() || !have_addresses_) {
    lock.unlock();
    StopLoop();
    return Status::Ok();
  }
  closing_ = true;
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
  const bool in_time = changed_.wait_for(lock, milliseconds(config_.timeouts.dead_after_ms), [&] {
    return !error_.ok() || std::all_of(connections_.begin(), connections_.end(),
                                       [](const auto& c) { return c->goodbye_done; });
  });
  const Status status = in_time ? error_ : Timeout("not every server has acknowledged the goodbye");
  lock.unlock();
  // Handles that nobody has waited for complete with this.
  loop_->Post([this] { Abort(Unavailable("the client is closed")); });
  StopLoop();
  return status;
}

// --- push-pull
// ------------------------------------------------------------------------------------

Result<Handle> ClientImpl::PushPullAsync(TensorId id, ByteView input, MutableBytes output) {
  std::unique_lock lock(mu_);
  if (!error_.ok()) return error_;
  if (closing_) return InvalidArgument("PushPullAsync after Close");
  if (id.index >= tensors_.size()) {
    return InvalidArgument(
        fmt::format("tensor id {} is unknown, {} are declared", id.index, tensors_.size()));
  }
  Tensor& tensor = *tensors_[id.index];
  const std::shared_ptr<const Plan> plan = plan_;  // another may come while this waits
  const TensorDeclaration& declared = plan->tensors[id.index];
  const std::size_t bytes = declared.num_elements() * SizeOf(declared.dtype);
  if (input.size() != bytes || output.size() != bytes) {
    return InvalidArgument(fmt::format(
        "tensor '{}': input is {} bytes and output {}, expected {} ({} x {})", declared.name,
        input.size(), output.size(), bytes, declared.num_elements(), DTypeName(declared.dtype)));
  }
  const auto misaligned = [&](const std::byte* p) {
    return reinterpret_cast<std::uintptr_t>(p) % SizeOf(declared.dtype) != 0;
  };
  if (misaligned(input.data()) || misaligned(output.data())) {
    return InvalidArgument(fmt::format("tensor '{}': its memory is not aligned to its {} elements",
                                       declared.name, DTypeName(declared.dtype)));
  }
  if (tensor.in_flight) {
    return InvalidArgument(
        fmt::format("tensor '{}' on rank {} is already in flight: wait for its "
                    "handle before it is pushed again",
                    declared.name, rank_));
  }
  // A unit whose next step has ended has no room for a third.
  const auto has_room = [&] {
    return !error_.ok() || std::none_of(tensor.parts.begin(), tensor.parts.end(),
                                        [&](auto& part) { return units_[part.first]->next_ended; });
  };
  if (!changed_.wait_for(lock, milliseconds(config_.timeouts.stall_stop_ms), has_room)) {
    return Timeout(
        fmt::format("tensor '{}': the rounds of two steps ago are not answered", declared.name));
  }
  if (!error_.ok()) return error_;

  stats_.raw_push_bytes += bytes;
  stats_.raw_pull_bytes += bytes;
  const Handle handle{id, ++tensor.generation};
  if (tensor.parts.empty()) return handle;  // no elements: done
  tensor.in_flight = true;
  tensor.units_left = static_cast<std::uint32_t>(tensor.parts.size());
  tensor.held = BlobRef(tensor.memory.get());
  const std::size_t size = SizeOf(declared.dtype);
  for (const auto& [key, m] : tensor.parts) {
    UnitWork& work = *units_[key];
    const std::size_t offset = work.unit->members[m].tensor_offset * size;
    const MemberMemory memory{input.data() + offset, output.data() + offset};
    if (work.state == UnitState::kGathering) {
      work.memory[m] = memory;
      if (work.members_here++ == 0) work.step = step_;
      if (work.members_here == work.unit->members.size()) MakeReady(work);
    } else {
      work.next_memory[m] = memory;
      if (work.next_members_here++ == 0) work.next_step = step_;
    }
  }
  return handle;
}

Status ClientImpl::EndStep() {
  const std::lock_guard lock(mu_);
  if (!error_.ok()) return error_;
  ++step_;
  for (const auto& work : units_) {
    if (work->state == UnitState::kGathering) {
      if (work->members_here > 0) MakeReady(*work);
    } else if (work->next_members_here > 0) {
      work->next_ended = true;
    }
  }
  return Status::Ok();
}

Status ClientImpl::PrepareUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  work.phase = unit.PhaseAt(work.step);
  if (work.prepared_phase == work.phase) return Status::Ok();
  const Phase& phase = unit.phases[work.phase];
  work.uplink = nullptr;
  work.downlink = nullptr;
  work.residual = nullptr;
  if (!IsTypedReduction(unit, work.phase)) {
    // `none` of fp32, fp16 and bf16 is the memory itself; fp64 that meets a compressor is
    // converted.
    const auto is_raw = [&](const std::string& spec) {
      return spec == "none" && unit.dtype != DType::kFloat64;
    };
    if (!is_raw(phase.uplink)) {
      const auto codec = codecs_.Get(phase.uplink);
      if (!codec.ok()) return codec.status();
      work.uplink = *codec;
    }
    if (!is_raw(phase.downlink)) {
      const auto codec = codecs_.Get(phase.downlink);
      if (!codec.ok()) return codec.status();
      work.downlink = *codec;
    }
    if (phase.uplink_feedback && work.uplink != nullptr) {
      const auto residual = residuals_.Get(unit.key, RangesOf(*work.plan, unit), *work.uplink);
      if (!residual.ok()) return residual.status();
      GRADWIRE_RETURN_IF_ERROR(residuals_.ChangeCodec(unit.key, *work.uplink));
      work.residual = *residual;
    }
  }
  work.prepared_phase = work.phase;
  return Status::Ok();
}

void ClientImpl::MakeReady(UnitWork& work) {
  if (const Status status = PrepareUnit(work); !status.ok()) {
    PostFail(status);
    return;
  }
  const Unit& unit = *work.unit;
  work.nonfinite = false;
  work.receipted = false;
  const bool one_tensor = unit.members.size() == 1;
  if (unit.op == ReduceOp::kBroadcast && !tensors_[unit.members[0].tensor]->is_broadcast_root) {
    work.payload = {};
  } else if (work.uplink == nullptr && one_tensor) {
    // Straight from the caller's memory.
    work.payload = {tensors_[unit.members[0].tensor]->held,
                    ByteView(work.memory[0].input, unit.raw_bytes())};
    if (unit.op == ReduceOp::kBroadcast) work.memory[0].output = nullptr;  // the root has it
  } else {
    work.state = UnitState::kReady;
    ready_.Push({unit.priority, unit.key});
    ScheduleEncode();
    return;
  }
  work.state = UnitState::kSendable;
  servers_[unit.server].sendable.Push({unit.priority, unit.key});
  ScheduleSend();
}

void ClientImpl::ScheduleEncode() {
  const int most = std::max(executor_->concurrency(), 1);
  while (encoders_ < most && static_cast<std::size_t>(encoders_) < ready_.size()) {
    ++encoders_;
    if (executor_->concurrency() == 0) {
      loop_->Post([this] { RunEncoder(); });
    } else {
      executor_->Post([this] { RunEncoder(); });
    }
  }
}

void ClientImpl::ScheduleSend() {
  if (send_posted_) return;
  send_posted_ = true;
  loop_->Post([this] {
    {
      const std::lock_guard lock(mu_);
      send_posted_ = false;
    }
    SendPump();
  });
}

void ClientImpl::RunEncoder() {
  std::unique_lock lock(mu_);
  while (!ready_.empty() && error_.ok()) {
    UnitWork& work = *units_[ready_.Top().key];
    const std::size_t bound = work.uplink != nullptr
                                  ? work.uplink->MaxEncodedSize(work.unit->num_elements)
                                  : work.unit->raw_bytes();
    if (!encoded_.Admits(bound)) break;  // a receipt calls again
    ready_.Pop();
    encoded_.Take(bound);
    work.token_bytes = bound;
    work.state = UnitState::kEncoding;
    lock.unlock();
    EncodeUnit(work);
    lock.lock();
    if (!work.outcome.ok()) PostFail(work.outcome);
    if (!error_.ok() || !work.outcome.ok()) {
      ReleaseList released;
      RetireUnit(work, released);
      lock.unlock();
      released.Drop();
      lock.lock();
      break;
    }
    work.state = UnitState::kSendable;
    servers_[work.unit->server].sendable.Push({work.unit->priority, work.unit->key});
    if (executor_->concurrency() > 0) {
      ScheduleSend();
    } else {
      lock.unlock();
      SendPump();  // this is the loop's thread
      lock.lock();
    }
  }
  --encoders_;
}

void ClientImpl::EncodeUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  work.outcome = Status::Ok();
  if (work.uplink == nullptr) {
    const PooledBuffer buffer = pool_.Acquire(unit.raw_bytes());
    GatherBytes(unit, work.memory, buffer.bytes().data());
    work.payload = buffer.Share(unit.raw_bytes());
    return;
  }
  const CodecContext context = ContextOf(work, rank_);
  UnitSource source(unit, work.memory, convert_);
  const PooledBuffer buffer = pool_.Acquire(work.uplink->MaxEncodedSize(unit.num_elements));
  const auto encoded =
      work.uplink->Encode(source, unit.num_elements, context, work.residual, buffer.bytes());
  if (!encoded.ok()) {
    work.outcome = encoded.status();
    return;
  }
  work.nonfinite = !encoded->finite;
  work.payload = encoded->finite ? buffer.Share(encoded->payload_bytes) : Payload{};
}

void ClientImpl::SendPump() {
  std::unique_lock lock(mu_);
  for (ServerLink& link : servers_) {
    while (!link.sendable.empty() && error_.ok()) {
      UnitWork& work = *units_[link.sendable.Top().key];
      if (work.state != UnitState::kSendable) {
        link.sendable.Pop();  // answered in the meantime, after a reconnect
        continue;
      }
      Connection& connection = *connections_[work.connection];
      if (!connection.up || !link.window.Admits(work.payload.size())) break;
      link.sendable.Pop();
      link.window.Take(work.payload.size());
      work.state = UnitState::kSent;
      Header header;
      header.kind = MessageKind::kPush;
      header.rank = rank_;
      header.incarnation = incarnation_;
      header.plan_version = plan_->version;
      header.phase = work.phase;
      header.step = work.step;
      header.round = work.round;
      header.key = work.unit->key;
      header.sequence = connection.next_sequence++;
      header.nonfinite = work.nonfinite;
      connection.unreceipted.Push({header.sequence, header.key, header.round, work.payload.size()});
      Payload payload = work.payload;
      const PeerId peer = connection.peer;
      lock.unlock();
      // A peer that has just gone: OnDown puts the unit back into the queue.
      (void)loop_->Send(peer, header, std::move(payload));
      lock.lock();
    }
  }
}

void ClientImpl::GiveToken(UnitWork& work) {
  encoded_.Give(work.token_bytes);
  work.token_bytes = 0;
}

void ClientImpl::OnReceipt(Connection& connection, std::uint64_t sequence) {
  {
    const std::lock_guard lock(mu_);
    bool any = false;
    while (!connection.unreceipted.empty() && connection.unreceipted.Front().sequence <= sequence) {
      const Unreceipted sent = connection.unreceipted.Pop();
      servers_[connection.server].window.Give(sent.bytes);
      UnitWork& work = *units_[sent.key];
      if (work.state == UnitState::kSent && work.round == sent.round) {
        work.receipted = true;
        GiveToken(work);
      }
      any = true;
    }
    if (!any) return;
    if (!ready_.empty()) ScheduleEncode();
  }
  SendPump();
}

void ClientImpl::OnReply(const Header& header, Payload payload) {
  UnitWork* work = nullptr;
  {
    const std::lock_guard lock(mu_);
    if (header.key >= units_.size()) return;
    work = units_[header.key].get();
    if (work->round != header.round ||
        (work->state != UnitState::kSent && work->state != UnitState::kSendable)) {
      return;  // a second answer after a reconnect
    }
    work->state = UnitState::kDecoding;
    work->reply_kind = header.reply;
    work->reply = std::move(payload);
    GiveToken(*work);  // after a cut the reply may come without the receipt
    if (!ready_.empty()) ScheduleEncode();
  }
  executor_->Post([this, work] { DecodeUnit(*work); });
}

void ClientImpl::OnPushAgain(const Header& header) {
  {
    const std::lock_guard lock(mu_);
    if (header.key >= units_.size()) return;
    UnitWork& work = *units_[header.key];
    if (work.round != header.round || work.state != UnitState::kSent) return;
    work.state = UnitState::kSendable;
    work.receipted = false;
    servers_[work.unit->server].sendable.Push({work.unit->priority, work.unit->key});
    ++stats_.resent_pushes;
  }
  SendPump();
}

void ClientImpl::DecodeUnit(UnitWork& work) {
  const Unit& unit = *work.unit;
  const CodecContext context = ContextOf(work, config_.job.workers);  // the server's
  Status status;
  if (work.reply_kind == ReplyKind::kNonfinite) {
    FillVoid(unit, work.memory);
    if (work.residual != nullptr && !work.nonfinite) {
      work.uplink->Undo(work.payload.bytes, ContextOf(work, rank_), *work.residual);
    }
    std::string ranks;
    for (std::size_t i = 0; i + 4 <= work.reply.size(); i += 4) {
      ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ",
                           LoadLe<std::uint32_t>(work.reply.bytes.data() + i));
    }
    LogWarn("client", "void round: not finite, every rank gets NaN",
            {Field("unit", Name(*work.plan, unit)), Field("step", work.step),
             Field("ranks", ranks.empty() ? "none (the sum overflows)" : ranks)});
  } else if (work.downlink == nullptr) {
    if (work.reply.size() == unit.raw_bytes()) {
      ScatterBytes(unit, work.reply.bytes.data(), work.memory);
    } else {
      status = CorruptData(
          fmt::format("reply is {} bytes, expected {}", work.reply.size(), unit.raw_bytes()));
    }
  } else if (unit.members.size() == 1 && unit.dtype == DType::kFloat32) {
    status =
        work.downlink->Decode(work.reply.bytes, context,
                              {reinterpret_cast<float*>(work.memory[0].output), unit.num_elements});
  } else {
    const PooledBuffer buffer = pool_.Acquire(unit.num_elements * sizeof(float));
    auto* const values = reinterpret_cast<float*>(buffer.bytes().data());
    status = work.downlink->Decode(work.reply.bytes, context, {values, unit.num_elements});
    if (status.ok()) ScatterFloats(unit, values, work.memory, convert_);
  }
  work.outcome = status.ok()
                     ? Status::Ok()
                     : Status(status.code(), fmt::format("{}, round {}: {}", Name(*work.plan, unit),
                                                         work.round, status.message()));
  FinishUnit(work);
}

void ClientImpl::FinishUnit(UnitWork& work) {
  ReleaseList released;
  Payload reply;
  {
    const std::lock_guard lock(mu_);
    if (!work.outcome.ok()) PostFail(work.outcome);
    if (work.reply_kind == ReplyKind::kNonfinite) ++stats_.nonfinite_units;
    reply = std::move(work.reply);
    work.reply = {};
    ++work.round;
    RetireUnit(work, released);
    if (error_.ok()) StartNext(work);
  }
}

void ClientImpl::RetireUnit(UnitWork& work, ReleaseList& released) {
  released.Add(std::move(work.payload.owner));
  work.payload = {};
  work.state = UnitState::kGathering;
  work.members_here = 0;
  GiveToken(work);
  for (std::size_t m = 0; m < work.memory.size(); ++m) {
    if (work.memory[m].input == nullptr) continue;
    Tensor& tensor = *tensors_[work.unit->members[m].tensor];
    work.memory[m] = {};
    if (--tensor.units_left == 0) released.Add(std::move(tensor.held));
  }
}

void ClientImpl::StartNext(UnitWork& work) {
  if (work.next_members_here == 0) return;
  work.memory.swap(work.next_memory);
  std::fill(work.next_memory.begin(), work.next_memory.end(), MemberMemory{});
  work.members_here = std::exchange(work.next_members_here, 0);
  work.step = work.next_step;
  const bool ended = std::exchange(work.next_ended, false);
  if (ended || work.members_here == work.unit->members.size()) MakeReady(work);
  changed_.notify_all();
}

void ClientImpl::OnMemoryReleased(std::uint32_t index) {
  const std::lock_guard lock(mu_);
  tensors_[index]->in_flight = false;
  changed_.notify_all();
}

std::string ClientImpl::DescribeWait(const Tensor& tensor) const {
  for (const auto& [key, m] : tensor.parts) {
    const UnitWork& work = *units_[key];
    if (work.memory[m].input == nullptr) continue;
    const Unit& unit = *work.unit;
    switch (work.state) {
      case UnitState::kGathering: {
        std::string missing;
        for (std::size_t i = 0; i < work.memory.size(); ++i) {
          if (work.memory[i].input != nullptr) continue;
          missing +=
              (missing.empty() ? "'" : ", '") + plan_->tensors[unit.members[i].tensor].name + "'";
        }
        return fmt::format(
            "it is fused with {}, which this worker has not pushed (EndStep sends "
            "zeros for them)",
            missing);
      }
      case UnitState::kReady:
      case UnitState::kEncoding:
        return fmt::format("{} waits to be encoded", Name(*plan_, unit));
      case UnitState::kSendable:
        return fmt::format("{} waits for credit of server {}", Name(*plan_, unit), unit.server);
      case UnitState::kSent:
        return fmt::format("{} {} server {} and waits for the other workers", Name(*plan_, unit),
                           work.receipted ? "is at" : "is on its way to", unit.server);
      case UnitState::kDecoding:
        return fmt::format("{} is being decoded", Name(*plan_, unit));
    }
  }
  return "its memory is still being sent";
}

Status ClientImpl::Wait(const Handle& handle) {
  std::unique_lock lock(mu_);
  if (handle.tensor.index >= tensors_.size()) {
    return InvalidArgument(fmt::format("handle names tensor {}, {} are declared",
                                       handle.tensor.index, tensors_.size()));
  }
  Tensor& tensor = *tensors_[handle.tensor.index];
  const auto done = [&] { return !tensor.in_flight || tensor.generation != handle.generation; };
  const Clock::time_point start = Clock::now();
  const auto warn = milliseconds(config_.timeouts.stall_warn_ms);
  const auto stop = milliseconds(config_.timeouts.stall_stop_ms);
  bool warned = false;
  while (!done()) {
    const Clock::time_point until = start + (warned || warn > stop ? stop : warn);
    if (!error_.ok()) {
      // What is left is memory that others still read.
      if (!changed_.wait_for(lock, kReleaseTimeout, done)) break;
      continue;
    }
    if (changed_.wait_until(lock, until, [&] { return done() || !error_.ok(); })) continue;
    const std::string text = fmt::format(
        "tensor '{}' on rank {} has waited {:.1f} s: {}", plan_->tensors[handle.tensor.index].name,
        rank_, std::chrono::duration<double>(Clock::now() - start).count(), DescribeWait(tensor));
    if (until < start + stop) {
      LogWarn("client", text);
      warned = true;
      continue;
    }
    const Status status = Timeout(text);
    lock.unlock();
    PostFail(status);
    lock.lock();
    changed_.wait_for(lock, kReleaseTimeout, [&] { return done() && !error_.ok(); });
    return status;
  }
  return error_;
}

bool ClientImpl::Poll(const Handle& handle) {
  const std::lock_guard lock(mu_);
  if (handle.tensor.index >= tensors_.size()) return true;
  const Tensor& tensor = *tensors_[handle.tensor.index];
  return !tensor.in_flight || tensor.generation != handle.generation;
}

// --- messages, time, failure
// ----------------------------------------------------------------------

void ClientImpl::OnMessage(PeerId from, const Header& header, Payload payload) {
  std::size_t index = 0;
  Connection* connection = nullptr;
  {
    const std::lock_guard lock(mu_);
    while (index < connections_.size() && connections_[index]->peer != from) ++index;
    if (index == connections_.size()) return;
    connection = connections_[index].get();
  }
  switch (header.kind) {
    case MessageKind::kReply:
      OnReceipt(*connection, header.sequence);
      OnReply(header, std::move(payload));
      return;
    case MessageKind::kReceipt:
      OnReceipt(*connection, header.sequence);
      return;
    case MessageKind::kPushAgain:
      OnPushAgain(header);
      return;
    case MessageKind::kWelcome:
      OnWelcome(index, payload);
      return;
    case MessageKind::kPlan:
      if (index == 0) OnPlan(header, payload);
      return;
    case MessageKind::kBarrierDone: {
      const std::lock_guard lock(mu_);
      if (index == 0) barriers_done_ = std::max(barriers_done_, header.round + 1);
      changed_.notify_all();
      return;
    }
    case MessageKind::kGoodbyeAck: {
      const std::lock_guard lock(mu_);
      connection->goodbye_done = true;
      changed_.notify_all();
      return;
    }
    case MessageKind::kError:
      FailWith({header.error == StatusCode::kOk ? StatusCode::kInternal : header.error,
                fmt::format("server {} at {}: {}", connection->server, connection->address,
                            AsText(payload.bytes))},
               /*tell=*/false);
      return;
    default:
      return;
  }
}

void ClientImpl::Tick() {
  std::vector<PeerId> up;
  Status lost;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    for (const auto& connection : connections_) {
      if (connection->up) {
        up.push_back(connection->peer);
      } else if (connection->was_up && !connection->goodbye_done &&
                 Clock::now() - connection->down_since >
                     milliseconds(config_.timeouts.dead_after_ms)) {
        lost = Unavailable(fmt::format(
            "server {} lane {} at {} is lost: no connection for {:.1f} s", connection->server,
            connection->lane, connection->address, config_.timeouts.dead_after_ms / 1000.0));
      }
    }
  }
  if (!lost.ok()) {
    Fail(std::move(lost));
    return;
  }
  Header header;
  header.kind = MessageKind::kHeartbeat;
  header.rank = rank_;
  header.incarnation = incarnation_;
  for (const PeerId peer : up) (void)loop_->Send(peer, header, {});
  loop_->PostAfter(std::clamp(config_.timeouts.dead_after_ms / 8, 20, 1000), [this] { Tick(); });
}

void ClientImpl::FailWith(Status status, bool tell) {
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
  }
  LogError("client", status.message(), {Field("rank", rank_)});
  if (tell) {
    std::size_t count = 0;
    {
      const std::lock_guard lock(mu_);
      count = connections_.size();
    }
    Header header;
    header.kind = MessageKind::kError;
    header.error = status.code();
    const ByteView text = AsBytes(status.message());
    for (std::size_t i = 0; i < count; ++i) SendControl(i, header, {text.begin(), text.end()});
  }
  Abort(std::move(status));
}

void ClientImpl::Abort(Status status) {
  ReleaseList released;
  std::vector<PeerId> peers;
  {
    const std::lock_guard lock(mu_);
    if (!error_.ok()) return;
    error_ = std::move(status);
    for (const auto& connection : connections_) {
      peers.push_back(connection->peer);
      connection->up = false;
    }
    ready_.Clear();
    for (ServerLink& link : servers_) link.sendable.Clear();
    for (const auto& work : units_) {
      const bool busy = work->state == UnitState::kEncoding || work->state == UnitState::kDecoding;
      // What a later step has handed over will not be sent.
      for (std::size_t m = 0; m < work->next_memory.size(); ++m) {
        if (work->next_memory[m].input == nullptr) continue;
        Tensor& tensor = *tensors_[work->unit->members[m].tensor];
        work->next_memory[m] = {};
        if (--tensor.units_left == 0) released.Add(std::move(tensor.held));
      }
      work->next_members_here = 0;
      work->next_ended = false;
      if (!busy) RetireUnit(*work, released);
    }
    changed_.notify_all();
  }
  // What is queued, and the word of the failure, get a moment to leave; then nothing of ours is
  // read.
  loop_->PostAfter(kFarewellMs, [this, peers] {
    for (const PeerId peer : peers) loop_->Disconnect(peer);
  });
}

}  // namespace

Result<std::unique_ptr<Client>> Client::Connect(const Config& config, std::uint32_t rank) {
  ZmqLoopOptions options;
  options.dead_after_ms = config.timeouts.dead_after_ms;
  return Connect(config, rank, MakeZmqLoop(options));
}

Result<std::unique_ptr<Client>> Client::Connect(const Config& config, std::uint32_t rank,
                                                std::unique_ptr<Loop> loop) {
  if (rank >= config.job.workers) {
    return InvalidArgument(
        fmt::format("rank {} is out of range: the job has {} workers", rank, config.job.workers));
  }
  auto client = std::make_unique<ClientImpl>(config, rank, std::move(loop));
  GRADWIRE_RETURN_IF_ERROR(client->Init());
  return std::unique_ptr<Client>(std::move(client));
}

}  // namespace gradwire
