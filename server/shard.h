#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/buffer_pool.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/pipeline/executor.h"
#include "common/wire/header.h"
#include "common/wire/plan_data.h"
#include "compressors/codec_cache.h"
#include "compressors/feedback/residual_store.h"
#include "server/describe.h"
#include "server/reduce.h"

namespace gradwire {

/// Where a round of a key stands.
enum class RoundState {
  kCollecting,  // some ranks' pushes are missing
  kReducing,    // all are there and an executor works on them
};

/// What a shard wants said to a worker, or to everyone. Called on the shard's thread.
class ShardOutput {
 public:
  virtual ~ShardOutput() = default;
  virtual void Reply(std::uint32_t rank, const Header& header, const Payload& payload) = 0;
  /// The contract between the workers is broken: the job ends with this error.
  virtual void Fail(Status status) = 0;
};

struct ShardCounters {
  std::uint64_t rounds = 0;
  std::uint64_t nonfinite_rounds = 0;
  std::uint64_t duplicate_pushes = 0;
};

/// The keys of one lane and their rounds. One round is open for a key; the reply of the round
/// before is kept until the open one closes, which is when every worker has had it.
/// Threads: the lane's only, apart from the executor's tasks, which touch a key in kReducing.
class Shard {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::uint32_t server = 0;
    std::uint32_t lane = 0;
    std::uint32_t num_workers = 1;
    std::uint64_t seed = 1;
  };

  /// `post` runs a task on the lane's thread. All references outlive the shard.
  Shard(const Options& options, CodecCache& codecs, ResidualStore& residuals, Executor& executor,
        BufferPool& pool, std::function<void(std::function<void()>)> post, ShardOutput& output);
  ~Shard();

  /// Takes the keys that a plan gives this lane. Later plans only append.
  Status InstallPlan(std::shared_ptr<const Plan> plan);

  /// A push of a rank that is attached. Duplicates are counted and answered from the kept reply;
  /// whatever breaks the contract fails the job, naming tensor, rank and both values. `now` is the
  /// time that the lane has read already; a round's age counts from its first push.
  void OnPush(std::uint32_t rank, const Header& header, Payload payload, Clock::time_point now);
  /// A worker came back and still waits for (key, round).
  void OnRepull(std::uint32_t rank, const Header& header);

  /// Worker 0 asks for a key's residual and next round, or gives them, at a moment when no round is
  /// open; anything else fails the job by name.
  void OnReadState(std::uint32_t rank, const Header& header);
  void OnWriteState(std::uint32_t rank, const Header& header, const Payload& payload);

  /// The job has failed: lets go of every payload that no reduction is reading.
  void Abandon();

  /// The rounds whose first push came before a time, for stall reports.
  struct OldRounds {
    std::size_t count = 0;
    std::vector<OpenCall> oldest;  // a few, the oldest first
  };
  OldRounds FindOldRounds(Clock::time_point before) const;

  /// An open round that a rank which will push no more is missing in; empty if there is none.
  std::string DescribeRoundThatWaitsFor(std::uint32_t rank) const;

  const ShardCounters& counters() const { return counters_; }

 private:
  struct Key;

  Key* Find(std::uint64_t key);
  std::string Describe(const Key& key) const;
  Status Check(const Key& key, std::uint32_t rank, const Header& header,
               const Payload& payload) const;
  /// The key that worker 0 may read or write the state of now; null if it fails the job.
  Key* FindForState(std::uint32_t rank, const Header& header);
  Status WriteState(Key& key, const Header& header, const Payload& payload);
  Status Prepare(Key& key);
  void Close(Key& key);
  void Finish(Key& key);
  void SendKept(const Key& key, std::uint32_t rank);

  const Options options_;
  CodecCache& codecs_;
  Executor& executor_;
  BufferPool& pool_;
  const std::function<void(std::function<void()>)> post_;
  ShardOutput& output_;
  ResidualStore& residuals_;  // of the whole server: keys of lanes are disjoint
  ShardCounters counters_;
  bool abandoned_ = false;
  LogLimiter out_of_bound_log_{std::chrono::seconds(10)};
  LogLimiter nonfinite_log_;  // a model that diverges has a void round for every key and step
  std::shared_ptr<const Plan> plan_;
  std::uint64_t stage_version_ = 0;         // the plan that brought the filter's last stage
  std::vector<std::unique_ptr<Key>> keys_;  // [key]; null where another lane owns it
};

}  // namespace gradwire
