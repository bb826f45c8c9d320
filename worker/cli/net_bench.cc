#include "worker/cli/net_bench.h"

#include <sys/resource.h>
#include <time.h>

#include <chrono>
#include <optional>
#include <span>
#include <thread>

#include "common/base/random.h"
#include "common/plan/plan.h"

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::duration;
using std::chrono::nanoseconds;

double Milliseconds(nanoseconds time) { return duration<double, std::milli>(time).count(); }

double ProcessCpuMs() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_usec) * 1e-3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

nanoseconds ThreadTime() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + nanoseconds(now.tv_nsec);
}

/// Computing that is only pretended. What is too short to sleep for is added to the next.
class Computer {
 public:
  explicit Computer(EmulatedCompute kind) : kind_(kind) {}

  void Work(double ms) {
    due_ += std::chrono::duration_cast<nanoseconds>(duration<double, std::milli>(ms));
    if (due_ >= kShortest) Pay();
  }
  /// What was added up.
  void Finish() {
    if (due_ > nanoseconds::zero()) Pay();
  }
  nanoseconds spent() const { return spent_; }

 private:
  // A sleep takes about 60 us longer than asked for, which the next one makes good.
  static constexpr nanoseconds kShortest{500000};

  void Pay() {
    const Clock::time_point begin = Clock::now();
    if (kind_ == EmulatedCompute::kSleep) {
      std::this_thread::sleep_for(due_);
      due_ -= Clock::now() - begin;
    } else {
      const nanoseconds cpu = ThreadTime();
      while (ThreadTime() - cpu < due_) {
      }
      due_ = nanoseconds::zero();
    }
    spent_ += Clock::now() - begin;
  }

  const EmulatedCompute kind_;
  nanoseconds due_{};
  nanoseconds spent_{};
};

/// One rank's loop.
class Run {
 public:
  Run(Client& client, const NetBenchOptions& options, std::vector<TensorId> ids)
      : client_(client),
        options_(options),
        ids_(std::move(ids)),
        handles_(ids_.size()),
        computer_(options.compute) {
    CounterRng rng(client.rank());
    for (const TensorDeclaration& tensor : options.tensors) {
      std::vector<float>& gradient = gradients_.emplace_back(tensor.num_elements());
      for (float& value : gradient) value = static_cast<float>(rng.NextGaussian());
      averages_.emplace_back(gradient.size());
      num_elements_ += static_cast<double>(gradient.size());
    }
  }
  // The client may read and write the arrays until their handles have completed.
  ~Run() {
    for (const std::optional<Handle>& handle : handles_) {
      if (handle) static_cast<void>(client_.Wait(*handle));
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Status Step() {
    const double forward_ms = options_.compute_ms * (1.0 - options_.backward_share);
    const double backward_ms = options_.compute_ms * options_.backward_share;
    for (std::size_t t = 0; t < ids_.size(); ++t) {
      GRADWIRE_RETURN_IF_ERROR(Need(t));
      computer_.Work(forward_ms * ShareOf(t));
    }
    for (std::size_t t = ids_.size(); t-- > 0;) {
      computer_.Work(backward_ms * ShareOf(t));
      if (t == 0) computer_.Finish();
      GRADWIRE_RETURN_IF_ERROR(HandOver(t));
    }
    const Clock::time_point begin = Clock::now();
    const Status ended = client_.EndStep();
    handing_over_ += Clock::now() - begin;
    return ended;
  }
  Status WaitForAll() {
    for (std::size_t t = 0; t < ids_.size(); ++t) GRADWIRE_RETURN_IF_ERROR(Need(t));
    return Status::Ok();
  }

  /// Sums since the begin, and the interval of the step to come.
  NetBenchStep Totals(Clock::time_point begin) const {
    NetBenchStep totals;
    totals.step_ms = Milliseconds(Clock::now() - begin);
    totals.compute_ms = Milliseconds(computer_.spent());
    totals.exposed_ms = Milliseconds(blocked_);
    totals.hand_over_ms = Milliseconds(handing_over_);
    const ClientStats stats = client_.stats();
    const TrafficCounters& traffic = stats.traffic;
    totals.sent_bytes = traffic.sent_bytes;
    totals.received_bytes = traffic.received_bytes;
    totals.interval = stats.interval;
    return totals;
  }

 private:
  double ShareOf(std::size_t t) const {
    return static_cast<double>(gradients_[t].size()) / num_elements_;
  }
  Status Need(std::size_t t) {
    if (!handles_[t]) return Status::Ok();
    const Handle handle = *handles_[t];
    handles_[t].reset();
    const Clock::time_point begin = Clock::now();
    const Status done = client_.Wait(handle);
    blocked_ += Clock::now() - begin;
    return done;
  }
  Status HandOver(std::size_t t) {
    const Clock::time_point begin = Clock::now();
    const auto handle = client_.PushPullAsync(ids_[t], std::as_bytes(std::span(gradients_[t])),
                                              std::as_writable_bytes(std::span(averages_[t])));
    handing_over_ += Clock::now() - begin;
    if (!handle.ok()) return handle.status();
    handles_[t] = *handle;
    return Status::Ok();
  }

  Client& client_;
  const NetBenchOptions& options_;
  const std::vector<TensorId> ids_;
  std::vector<std::vector<float>> gradients_;
  std::vector<std::vector<float>> averages_;
  double num_elements_ = 0;
  std::vector<std::optional<Handle>> handles_;
  Computer computer_;
  nanoseconds blocked_{};
  nanoseconds handing_over_{};
};

NetBenchStep Difference(const NetBenchStep& before, const NetBenchStep& after) {
  return {after.step_ms - before.step_ms,
          after.compute_ms - before.compute_ms,
          after.exposed_ms - before.exposed_ms,
          after.hand_over_ms - before.hand_over_ms,
          after.sent_bytes - before.sent_bytes,
          after.received_bytes - before.received_bytes,
          before.interval};
}

Result<std::vector<NetBenchServerBytes>> BytesOfServers(const Plan& plan, std::uint32_t interval,
                                                        const Config& config) {
  std::vector<NetBenchServerBytes> servers(plan.num_servers);
  for (const Unit& unit : plan.units) {
    const auto bytes = WireBytes(unit, unit.phases.back(), config.compressors());
    if (!bytes.ok()) return bytes.status();
    const double steps = unit.filter_classes.empty() ? 1 : interval;  // in which it is sent once
    servers[unit.server].up += static_cast<double>(bytes->uplink) / steps;
    servers[unit.server].down += static_cast<double>(bytes->downlink) / steps;
  }
  return servers;
}

}  // namespace

Result<NetBenchReport> RunNetBench(Client& client, const Config& config,
                                   const NetBenchOptions& options) {
  auto ids = client.Declare(options.tensors);
  if (!ids.ok()) return ids.status();
  const std::shared_ptr<const Plan> plan = client.plan();
  NetBenchReport report;
  report.num_units = plan->units.size();
  Run run(client, options, std::move(*ids));
  for (std::uint64_t step = 0; step < options.warm_up; ++step) {
    GRADWIRE_RETURN_IF_ERROR(run.Step());
  }
  const Clock::time_point begin = Clock::now();
  const double cpu = ProcessCpuMs();
  NetBenchStep before = run.Totals(begin);
  for (std::uint64_t step = 0; step < options.steps; ++step) {
    GRADWIRE_RETURN_IF_ERROR(run.Step());
    const NetBenchStep after = run.Totals(begin);
    report.steps.push_back(Difference(before, after));
    before = after;
  }
  report.cpu_ms = (ProcessCpuMs() - cpu) / static_cast<double>(options.steps);
  report.stats = client.stats();
  auto servers = BytesOfServers(*plan, report.stats.interval, config);
  if (!servers.ok()) return servers.status();
  report.servers = std::move(*servers);
  GRADWIRE_RETURN_IF_ERROR(run.WaitForAll());
  return report;
}

}  // namespace gradwire
