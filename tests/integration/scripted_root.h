#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "common/base/buffer_pool.h"
#include "common/plan/plan.h"
#include "common/wire/control.h"
#include "tests/integration/cluster.h"

namespace gradwire::testing {

/// The root, and only server, of a job of one worker; says what the test tells it to.
class ScriptedRoot final : public LoopHandler {
 public:
  ScriptedRoot(InprocNetwork& network, const Config& config) : loop_(network.MakeLoop()) {
    options_.fuse_below = 1;
    options_.compression = config.compression;
    plan_ = EmptyPlan(options_);
    REQUIRE(loop_->Listen("inproc://root").ok());
    REQUIRE(loop_->Start(this, "root").ok());
  }
  ~ScriptedRoot() override { loop_->Stop(); }

  /// Lets the job fail as soon as it has acknowledged the worker's goodbye.
  void FailAtGoodbye() {
    loop_->Post([this] { fails_at_goodbye_ = true; });
  }

  void SendPlanWith(std::uint32_t interval, std::uint64_t first_step) {
    loop_->Post([this, interval, first_step] {
      auto changed = ChangeInterval(plan_, interval, first_step, options_, BuiltinCompressors());
      if (!changed.ok()) return;  // then the test waits in vain
      plan_ = std::move(changed).value();
      SendPlan();
    });
  }
  void Ask(std::uint64_t question, std::uint64_t steps_ahead) {
    loop_->Post([this, question, steps_ahead] {
      Header header;
      header.kind = MessageKind::kAskStep;
      header.round = question;
      header.step = steps_ahead;
      (void)loop_->Send(worker_, header, {});
    });
  }
  /// The step that the worker has said last, as its answer number `count`.
  std::uint64_t AwaitAnswer(std::size_t count) {
    std::unique_lock lock(mu_);
    REQUIRE(changed_.wait_for(lock, std::chrono::seconds(30),
                              [&] { return answers_.size() >= count; }));
    return answers_.at(count - 1);
  }

 private:
  void OnMessage(PeerId from, const Header& header, Payload payload) override {
    Header answer;
    if (header.kind == MessageKind::kHello) {
      worker_ = from;
      answer.kind = MessageKind::kWelcome;
      Send(answer, Serialize(Welcome{1, 1, {{"inproc://root"}}, false}));
    } else if (header.kind == MessageKind::kDeclare) {
      const auto declare = ParseDeclare(payload.bytes);
      auto extended = ExtendPlan(plan_, declare.value().tensors, options_, BuiltinCompressors());
      plan_ = std::move(extended).value();
      SendPlan();
    } else if (header.kind == MessageKind::kStep) {
      const std::lock_guard lock(mu_);
      answers_.push_back(header.step);
      changed_.notify_all();
    } else if (header.kind == MessageKind::kGoodbye) {
      answer.kind = MessageKind::kGoodbyeAck;
      Send(answer, {});
      if (!fails_at_goodbye_) return;
      answer.kind = MessageKind::kError;
      answer.error = StatusCode::kUnavailable;
      Send(answer, {});
    }
  }
  void SendPlan() {
    Header header;
    header.kind = MessageKind::kPlan;
    header.plan_version = plan_.version;
    header.round = 1;
    Send(header, Serialize(plan_));
  }
  void Send(const Header& header, const std::vector<std::byte>& body) {
    Payload payload;
    if (!body.empty()) {
      const PooledBuffer buffer = pool_.Acquire(body.size());
      std::copy(body.begin(), body.end(), buffer.bytes().begin());
      payload = buffer.Share(body.size());
    }
    (void)loop_->Send(worker_, header, std::move(payload));
  }

  BufferPool pool_;
  std::unique_ptr<Loop> loop_;
  PlanOptions options_;
  Plan plan_;                      // the loop's thread
  PeerId worker_ = 0;              // the same
  bool fails_at_goodbye_ = false;  // the same
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> answers_;  // guarded by mu_
};

}  // namespace gradwire::testing
