#include "common/transport/inproc_loop.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/transport/framing.h"
#include "common/transport/timer_queue.h"

namespace gradwire {
namespace {

using Clock = TimerQueue::Clock;
using std::chrono::milliseconds;

constexpr PeerId kListeningSide = PeerId{1} << 63;

class Inbox;

/// One end of a link.
struct End {
  std::shared_ptr<Inbox> inbox;
  PeerId peer = 0;    // the other end, as this end's loop numbers it
  int in_flight = 0;  // messages in the inbox; guarded by the link's mu
};

enum Side : std::size_t { kConnector = 0, kListener = 1 };

/// One connection, from OnUp to the cut. Locks are taken in the order network, link, inbox.
struct Link {
  std::string address;
  std::array<End, 2> ends;  // by Side; constant but for in_flight
  std::mutex mu;
  std::condition_variable delivered;
  bool open = true;  // guarded by mu
};

/// What waits for a loop's thread.
struct Event {
  enum class Kind { kNothing, kTask, kMessage, kUp, kDown, kStop };
  Kind kind = Kind::kNothing;
  Side side = kConnector;      // message: the end that receives it
  std::shared_ptr<Link> link;  // message, up, down
  HeaderBytes header;
  Payload payload;
  Loop::Task task;
};

/// A loop's queue. It lives as long as a link to the loop does.
/// Threads: safe.
class Inbox {
 public:
  /// False if the loop has been stopped.
  bool Push(Event event) {
    {
      const std::lock_guard lock(mu_);
      if (closed_ || (stopping_ && event.kind == Event::Kind::kTask)) return false;
      if (event.kind == Event::Kind::kStop) stopping_ = true;
      // A queue that never runs empty must not grow for ever.
      if (head_ > 64 && head_ > events_.size() / 2) {
        events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(head_));
        head_ = 0;
      }
      events_.push_back(std::move(event));
    }
    filled_.notify_one();
    return true;
  }

  /// The next event, or nothing if there is none.
  std::optional<Event> TryPop() {
    const std::lock_guard lock(mu_);
    if (head_ == events_.size()) return std::nullopt;
    std::optional<Event> event = std::move(events_[head_++]);
    if (head_ == events_.size()) {
      events_.clear();
      head_ = 0;
    }
    return event;
  }

  /// Waits for an event or the time.
  void Wait(std::optional<Clock::time_point> until) {
    std::unique_lock lock(mu_);
    const auto filled = [this] { return head_ != events_.size(); };
    if (until) {
      filled_.wait_until(lock, *until, filled);
    } else {
      filled_.wait(lock, filled);
    }
  }

  /// Drops the messages of a link that is closed.
  void DropMessages(const Link* link) {
    std::vector<Event> dropped;  // destroyed without the lock: owners may do what they like
    const std::lock_guard lock(mu_);
    for (std::size_t i = head_; i < events_.size(); ++i) {
      if (events_[i].kind != Event::Kind::kMessage || events_[i].link.get() != link) continue;
      dropped.push_back(std::exchange(events_[i], Event{}));
    }
  }

  /// Drops everything, from now on.
  void Close() {
    std::vector<Event> dropped;
    const std::lock_guard lock(mu_);
    closed_ = true;
    dropped.swap(events_);
    head_ = 0;
  }

 private:
  std::mutex mu_;
  std::condition_variable filled_;
  std::vector<Event> events_;  // from head_ on; guarded by mu_
  std::size_t head_ = 0;       // guarded by mu_
  bool stopping_ = false;      // guarded by mu_
  bool closed_ = false;        // guarded by mu_
};

/// Who listens where and who is connected.
/// Threads: safe.
class Network {
 public:
  Status Listen(const std::string& address, const std::shared_ptr<Inbox>& inbox) {
    const std::lock_guard lock(mu_);
    Place& place = places_[address];
    if (place.listener != nullptr) {
      return Unavailable(fmt::format("cannot listen on {}: Address already in use", address));
    }
    place.listener = inbox;
    ConnectWaiting(address, place);
    return Status::Ok();
  }

  /// Connects now, or as soon as somebody listens there. The inbox is told.
  void Connect(const std::string& address, const std::shared_ptr<Inbox>& inbox, PeerId peer) {
    const std::lock_guard lock(mu_);
    Place& place = places_[address];
    place.waiting.push_back({inbox, peer});
    ConnectWaiting(address, place);
  }

  /// Whoever connects or listens with this inbox does so no more.
  void Leave(const std::shared_ptr<Inbox>& inbox) {
    {
      // First, or whoever is told of the end of a link could connect here again.
      const std::lock_guard lock(mu_);
      for (auto& [address, place] : places_) {
        if (place.listener == inbox) place.listener = nullptr;
        std::erase_if(place.waiting, [&](const Waiting& w) { return w.inbox == inbox; });
      }
    }
    for (const std::shared_ptr<Link>& link : LinksOf(inbox)) CloseLink(link, true);
  }

  /// A connection that was not up yet is forgotten.
  void Forget(const std::string& address, const std::shared_ptr<Inbox>& inbox, PeerId peer) {
    const std::lock_guard lock(mu_);
    std::erase_if(places_[address].waiting,
                  [&](const Waiting& w) { return w.inbox == inbox && w.peer == peer; });
  }

  std::vector<std::shared_ptr<Link>> LinksOf(const std::shared_ptr<Inbox>& inbox) {
    const std::lock_guard lock(mu_);
    std::vector<std::shared_ptr<Link>> links;
    for (const auto& [address, place] : places_) {
      for (const std::shared_ptr<Link>& link : place.links) {
        if (link->ends[kConnector].inbox == inbox || link->ends[kListener].inbox == inbox) {
          links.push_back(link);
        }
      }
    }
    return links;
  }

  /// Loses what is under way; tells the connecting side.
  void CloseLink(const std::shared_ptr<Link>& link, bool tell) {
    {
      const std::lock_guard lock(mu_);
      std::erase(places_[link->address].links, link);
    }
    {
      const std::lock_guard lock(link->mu);
      if (!link->open) return;
      link->open = false;
    }
    link->delivered.notify_all();
    for (const End& end : link->ends) end.inbox->DropMessages(link.get());
    if (!tell) return;
    Event event;
    event.kind = Event::Kind::kDown;
    event.link = link;
    link->ends[kConnector].inbox->Push(std::move(event));
  }

  void Cut(const std::string& address) {
    std::vector<std::shared_ptr<Link>> links;
    {
      const std::lock_guard lock(mu_);
      places_[address].cut = true;
      links = places_[address].links;
    }
    for (const std::shared_ptr<Link>& link : links) CloseLink(link, true);
  }

  void Restore(const std::string& address) {
    const std::lock_guard lock(mu_);
    Place& place = places_[address];
    place.cut = false;
    ConnectWaiting(address, place);
  }

  void CutAt(const std::string& address, std::function<bool(const Header&)> filter) {
    const std::lock_guard lock(mu_);
    places_[address].filters.push_back(std::move(filter));
    num_filters_.fetch_add(1);
  }

  /// True if a CutAt wanted this message; it is then used up.
  bool IsToBeLost(const std::string& address, const Header& header) {
    if (num_filters_.load() == 0) return false;
    const std::lock_guard lock(mu_);
    auto& filters = places_[address].filters;
    const auto wanted = std::find_if(filters.begin(), filters.end(),
                                     [&](const auto& filter) { return filter(header); });
    if (wanted == filters.end()) return false;
    filters.erase(wanted);
    num_filters_.fetch_sub(1);
    return true;
  }

 private:
  struct Waiting {
    std::shared_ptr<Inbox> inbox;
    PeerId peer = 0;
  };
  struct Place {
    std::shared_ptr<Inbox> listener;
    bool cut = false;
    std::vector<std::shared_ptr<Link>> links;
    std::vector<Waiting> waiting;
    std::vector<std::function<bool(const Header&)>> filters;
  };

  void ConnectWaiting(const std::string& address, Place& place) {
    if (place.cut || place.listener == nullptr) return;
    for (Waiting& waiting : place.waiting) {
      auto link = std::make_shared<Link>();
      link->address = address;
      link->ends[kConnector].peer = waiting.peer;
      link->ends[kListener].inbox = place.listener;
      link->ends[kListener].peer = kListeningSide | next_peer_++;
      link->ends[kConnector].inbox = std::move(waiting.inbox);
      place.links.push_back(link);
      Event event;
      event.kind = Event::Kind::kUp;
      event.link = link;
      link->ends[kConnector].inbox->Push(std::move(event));
    }
    place.waiting.clear();
  }

  std::mutex mu_;
  std::map<std::string, Place> places_;  // guarded by mu_
  PeerId next_peer_ = 1;                 // guarded by mu_
  std::atomic<int> num_filters_{0};      // of all places
};

/// See Loop for the contract. Payloads are handed over by reference: their owner is released when
/// the receiver has let go of them too.
class InprocLoop final : public Loop {
 public:
  explicit InprocLoop(std::shared_ptr<Network> network) : network_(std::move(network)) {}
  ~InprocLoop() override { Stop(0); }

  Result<std::string> Listen(const std::string& address) override {
    GRADWIRE_RETURN_IF_ERROR(CheckAddress(address));
    GRADWIRE_RETURN_IF_ERROR(network_->Listen(address, inbox_));
    return address;
  }

  Status Start(LoopHandler* handler, const std::string& thread_name) override {
    const std::lock_guard lock(stop_mu_);
    if (stopped_ || thread_.joinable()) return InvalidArgument("the loop was started before");
    handler_ = handler;
    thread_name_ = thread_name;
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), thread_name.substr(0, 15).c_str());
    return Status::Ok();
  }

  Result<PeerId> Connect(const std::string& address) override {
    GRADWIRE_RETURN_IF_ERROR(CheckAddress(address));
    connections_.push_back({address, nullptr, false});
    const PeerId peer = connections_.size();
    network_->Connect(address, inbox_, peer);
    return peer;
  }

  void Disconnect(PeerId peer) override {
    if (peer == 0 || peer > connections_.size()) return;
    Connection& connection = connections_[peer - 1];
    connection.given_up = true;
    network_->Forget(connection.address, inbox_, peer);
    // Also the link whose kUp is still waiting here.
    for (const std::shared_ptr<Link>& link : network_->LinksOf(inbox_)) {
      const End& end = link->ends[kConnector];
      if (end.inbox == inbox_ && end.peer == peer) network_->CloseLink(link, false);
    }
    connection.link = nullptr;
  }

  Status Send(PeerId to, const Header& header, Payload payload) override;
  std::string SenderAddress() override { return {}; }

  void Post(Task task) override {
    Event event;
    event.kind = Event::Kind::kTask;
    event.task = std::move(task);
    inbox_->Push(std::move(event));
  }

  void PostAfter(int delay_ms, Task task) override {
    timers_.Add(Clock::now() + milliseconds(std::max(0, delay_ms)), std::move(task));
  }

  void Stop(int linger_ms) override;

  TrafficCounters traffic() const override {
    TrafficCounters counters;
    counters.sent_bytes = sent_bytes_.load(std::memory_order_relaxed);
    counters.received_bytes = received_bytes_.load(std::memory_order_relaxed);
    counters.sent_messages = sent_messages_.load(std::memory_order_relaxed);
    counters.received_messages = received_messages_.load(std::memory_order_relaxed);
    counters.refused_messages = refused_messages_.load(std::memory_order_relaxed);
    return counters;
  }

 private:
  struct Connection {
    std::string address;
    std::shared_ptr<Link> link;  // null while it is down
    bool given_up = false;
  };

  static Status CheckAddress(const std::string& address) {
    if (address.starts_with("inproc://") && address.size() > 9) return Status::Ok();
    return InvalidArgument(
        fmt::format("address '{}' has another transport, expected inproc://name", address));
  }

  void Run();
  bool RunTimers();
  void Handle(Event event);
  void Receive(Event event);
  void OnLinkDown(const std::shared_ptr<Link>& link);

  const std::shared_ptr<Network> network_;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();

  std::mutex stop_mu_;    // one Stop at a time
  bool stopped_ = false;  // guarded by stop_mu_
  std::thread thread_;    // set by Start, joined under stop_mu_

  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::uint64_t> received_bytes_{0};
  std::atomic<std::uint64_t> sent_messages_{0};
  std::atomic<std::uint64_t> received_messages_{0};
  std::atomic<std::uint64_t> refused_messages_{0};

  // The loop's thread only.
  LoopHandler* handler_ = nullptr;
  std::string thread_name_;
  std::vector<Connection> connections_;                      // by peer - 1
  std::unordered_map<PeerId, std::shared_ptr<Link>> peers_;  // that have sent something here
  TimerQueue timers_;
  LogLimiter refusal_log_;
};

Status InprocLoop::Send(PeerId to, const Header& header, Payload payload) {
  std::shared_ptr<Link> link;
  Side receiver = kListener;
  if ((to & kListeningSide) != 0) {
    receiver = kConnector;
    const auto peer = peers_.find(to);
    if (peer != peers_.end()) link = peer->second;
  } else if (to != 0 && to <= connections_.size()) {
    link = connections_[to - 1].link;
  }
  if (link == nullptr) {
    return Unavailable(fmt::format("cannot send {} to peer {:#x}: there is no such connection",
                                   MessageKindName(header.kind), to));
  }
  Event event;
  event.kind = Event::Kind::kMessage;
  event.side = receiver;
  event.link = link;
  event.header = SerializeHeader(header);
  event.payload = std::move(payload);
  const std::uint64_t bytes = MessageBytes(event.header.view().size(), event.payload.size());
  if (network_->IsToBeLost(link->address, header)) {
    network_->CloseLink(link, true);
  } else {
    const std::lock_guard lock(link->mu);
    End& end = link->ends[receiver];
    if (!link->open) {
      peers_.erase(to);
      return Unavailable(fmt::format("cannot send {} to peer {:#x}: it is gone",
                                     MessageKindName(header.kind), to));
    }
    if (end.inbox->Push(std::move(event))) ++end.in_flight;
  }
  sent_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  sent_messages_.fetch_add(1, std::memory_order_relaxed);
  return Status::Ok();
}

void InprocLoop::Run() {
  bool idle_told = false;
  for (;;) {
    if (RunTimers()) idle_told = false;
    std::optional<Event> event = inbox_->TryPop();
    if (event) {
      if (event->kind == Event::Kind::kStop) break;
      idle_told = false;
      Handle(std::move(*event));
    } else if (!idle_told) {
      idle_told = true;
      handler_->OnIdle();
    } else {
      inbox_->Wait(timers_.NextDue());
    }
  }
  timers_.Clear();
}

bool InprocLoop::RunTimers() {
  if (!timers_.NextDue()) return false;
  const Clock::time_point now = Clock::now();
  bool ran = false;
  while (std::optional<Task> task = timers_.TakeDue(now)) {
    (*task)();
    ran = true;
  }
  return ran;
}

void InprocLoop::Handle(Event event) {
  switch (event.kind) {
    case Event::Kind::kTask:
      event.task();
      break;
    case Event::Kind::kMessage:
      Receive(std::move(event));
      break;
    case Event::Kind::kUp: {
      const PeerId peer = event.link->ends[kConnector].peer;
      Connection& connection = connections_[peer - 1];
      if (connection.given_up) break;
      connection.link = event.link;
      handler_->OnUp(peer);
      break;
    }
    case Event::Kind::kDown:
      OnLinkDown(event.link);
      break;
    case Event::Kind::kNothing:
    case Event::Kind::kStop:
      break;
  }
}

void InprocLoop::OnLinkDown(const std::shared_ptr<Link>& link) {
  const PeerId peer = link->ends[kConnector].peer;
  if (connections_[peer - 1].given_up) return;
  connections_[peer - 1].link = nullptr;
  handler_->OnDown(peer);
  // The handler may have given it up, or made others.
  const Connection& connection = connections_[peer - 1];
  if (!connection.given_up) network_->Connect(connection.address, inbox_, peer);
}

void InprocLoop::Receive(Event event) {
  const std::shared_ptr<Link> link = std::move(event.link);
  End& end = link->ends[event.side];
  {
    const std::lock_guard lock(link->mu);
    --end.in_flight;
  }
  link->delivered.notify_all();
  if (event.side == kListener) {
    peers_.try_emplace(end.peer, link);
  } else if (connections_[end.peer - 1].given_up) {
    return;
  }
  received_bytes_.fetch_add(MessageBytes(event.header.view().size(), event.payload.size()),
                            std::memory_order_relaxed);
  const Result<Header> header = ParseHeader(event.header.view());
  if (header.ok()) {
    received_messages_.fetch_add(1, std::memory_order_relaxed);
    handler_->OnMessage(end.peer, *header, std::move(event.payload));
    return;
  }
  const std::uint64_t refused = refused_messages_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (const auto suppressed = refusal_log_.Admit()) {
    LogWarn("transport", "refused a message",
            {Field("loop", thread_name_), Field("peer", fmt::format("{:#x}", end.peer)),
             Field("reason", header.status().message()), Field("suppressed", *suppressed),
             Field("so_far", refused)});
  }
}

void InprocLoop::Stop(int linger_ms) {
  const std::lock_guard stop_lock(stop_mu_);
  if (stopped_) return;
  stopped_ = true;
  Event event;
  event.kind = Event::Kind::kStop;
  inbox_->Push(std::move(event));
  if (thread_.joinable()) thread_.join();
  const Clock::time_point until = Clock::now() + milliseconds(std::max(0, linger_ms));
  for (const std::shared_ptr<Link>& link : network_->LinksOf(inbox_)) {
    for (End& end : link->ends) {
      if (end.inbox == inbox_) continue;
      std::unique_lock lock(link->mu);
      link->delivered.wait_until(lock, until, [&] { return !link->open || end.in_flight == 0; });
    }
  }
  network_->Leave(inbox_);
  inbox_->Close();
  connections_.clear();
  peers_.clear();
}

class InprocNetworkImpl final : public InprocNetwork {
 public:
  std::unique_ptr<Loop> MakeLoop() override { return std::make_unique<InprocLoop>(network_); }
  void Cut(const std::string& address) override { network_->Cut(address); }
  void Restore(const std::string& address) override { network_->Restore(address); }
  void CutAt(const std::string& address, std::function<bool(const Header&)> filter) override {
    network_->CutAt(address, std::move(filter));
  }

 private:
  const std::shared_ptr<Network> network_ = std::make_shared<Network>();
};

}  // namespace

std::unique_ptr<InprocNetwork> MakeInprocNetwork() { return std::make_unique<InprocNetworkImpl>(); }

}  // namespace gradwire
