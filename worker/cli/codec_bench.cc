#include "worker/cli/codec_bench.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <time.h>  // clock_gettime is not in <ctime>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <utility>

#include "common/base/random.h"
#include "compressors/registry.h"
#include "worker/cli/baselines.h"

namespace gradwire {
namespace {

// Long beside the clock and the start of a second thread, short beside the machine's moods.
constexpr double kMinSeconds = 0.005;

// Each round's gradient is a window of one array that moves by a cache line, so that elements get
// fresh values and the memory that a round touches stays a unit's.
constexpr std::size_t kWindowStep = 16;
constexpr std::size_t kWindows = 1024;
constexpr std::size_t kSlack = kWindowStep * (kWindows - 1);

// Where residuals are brought to their steady state; a larger unit gets copies side by side. A
// residual of topk(ratio=0.001) needs some 1000 rounds, too long for 64 MiB.
constexpr std::size_t kWarmUpElements = std::size_t{1} << 16;
// Then, in the unit itself: caches and the codecs' own memory.
constexpr std::size_t kFullRounds = 3;

/// Memory that is the same for all that is measured: in huge pages where the system gives some,
/// and touched.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t size) : size_(size) {
    constexpr std::size_t kHugePage = std::size_t{2} << 20;
    const std::size_t bytes = (size * sizeof(T) / kHugePage + 1) * kHugePage;
    data_.reset(static_cast<T*>(std::aligned_alloc(kHugePage, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    // Advice only; without it the figures are noisier.
    static_cast<void>(madvise(data_.get(), bytes, MADV_HUGEPAGE));
    std::fill_n(data_.get(), size, T{});
  }
  T* data() const { return data_.get(); }
  std::span<T> first(std::size_t count) const { return {data_.get(), count}; }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_;
};

/// What one thread works on.
struct Unit {
  Unit(std::size_t n, std::size_t payload_bytes, std::uint64_t unit_seed)
      : gradients(n + kSlack),
        residual_values(n),
        sum(n),
        sent(payload_bytes),
        plain(payload_bytes),
        seed(unit_seed) {
    CounterRng rng(seed);
    for (float& value : gradients.first(n + kSlack)) value = static_cast<float>(rng.NextGaussian());
  }

  const float* gradient() const { return gradients.data() + round % kWindows * kWindowStep; }
  CodecContext context() const {
    return {.stream_seed = HashCombine(seed, round), .shared_seed = HashCombine(0, round)};
  }

  Array<float> gradients;
  Array<float> residual_values;
  Array<float> sum;        // what is decoded into and added to
  Array<std::byte> sent;   // what encode writes
  Array<std::byte> plain;  // the payload of the first gradient without feedback, to decode
  std::uint64_t seed;
  std::uint64_t round = 0;

  // Of the compressor at hand.
  Residual residual = {};
  std::size_t sent_bytes = 0;
  std::size_t plain_bytes = 0;
  Status status = Status::Ok();  // the first that was not well
};

/// Runs something on this thread and on another one at once.
class Pair {
 public:
  Pair() : other_([this] { Serve(); }) {}
  ~Pair() {
    body_ = nullptr;
    wake_.arrive_and_wait();
    other_.join();
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  /// Calls body(0) here and body(1) there. Returns the seconds until both are through.
  double Run(const std::function<void(std::size_t)>& body) {
    body_ = &body;
    wake_.arrive_and_wait();
    // Awake both: the second barrier lets them go within a microsecond.
    go_.arrive_and_wait();
    const auto start = std::chrono::steady_clock::now();
    body(0);
    end_.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void Serve() {
    for (wake_.arrive_and_wait(); body_ != nullptr; wake_.arrive_and_wait()) {
      go_.arrive_and_wait();
      (*body_)(1);
      end_.arrive_and_wait();
    }
  }

  const std::function<void(std::size_t)>* body_ = nullptr;  // written before wake_
  std::barrier<> wake_{2};
  std::barrier<> go_{2};
  std::barrier<> end_{2};
  std::thread other_;  // last: it uses what is above
};

/// One thing that is timed: called often enough to take kMinSeconds.
struct Operation {
  std::function<void(Unit&)> run;
  std::size_t calls = 1;
};

/// Seconds a call. Figures of one thread are of its own time on a core: what else runs on a busy
/// machine then shows in caches and memory only. Two at once can only be timed by the clock.
struct Took {
  double cpu = 0;
  double wall = 0;
};

class Stopwatch {
 public:
  explicit Stopwatch(std::vector<std::unique_ptr<Unit>>& units) : units_(units) {
    if (units.size() == 2) pair_ = std::make_unique<Pair>();
  }
  bool has_two() const { return pair_ != nullptr; }

  Operation Calibrate(std::function<void(Unit&)> run) {
    Operation operation{std::move(run)};
    // The second thread's caches and memory too.
    if (has_two()) Both(operation);
    while (true) {
      const double seconds = One(operation).cpu * static_cast<double>(operation.calls);
      if (seconds >= kMinSeconds) return operation;
      const double factor = std::clamp(1.1 * kMinSeconds / std::max(seconds, 1e-9), 1.5, 100.0);
      operation.calls =
          static_cast<std::size_t>(std::ceil(static_cast<double>(operation.calls) * factor));
    }
  }

  /// A call on the first unit.
  Took One(const Operation& operation) {
    const Took start = Now();
    Repeat(operation, *units_[0]);
    const Took end = Now();
    const auto calls = static_cast<double>(operation.calls);
    return {(end.cpu - start.cpu) / calls, (end.wall - start.wall) / calls};
  }

  /// Seconds by the clock a call on each of two units at once.
  double Both(const Operation& operation) {
    return pair_->Run([&](std::size_t thread) { Repeat(operation, *units_[thread]); }) /
           static_cast<double>(operation.calls);
  }

 private:
  static Took Now() {
    timespec cpu{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    const auto wall = std::chrono::steady_clock::now().time_since_epoch();
    return {static_cast<double>(cpu.tv_sec) + static_cast<double>(cpu.tv_nsec) * 1e-9,
            std::chrono::duration<double>(wall).count()};
  }

  static void Repeat(const Operation& operation, Unit& unit) {
    for (std::size_t i = 0; i < operation.calls; ++i) operation.run(unit);
  }

  std::vector<std::unique_ptr<Unit>>& units_;
  std::unique_ptr<Pair> pair_;
};

Quartiles QuartilesOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double part) {
    const double position = part * static_cast<double>(values.size() - 1);
    const auto below = static_cast<std::size_t>(position);
    const std::size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (position - std::floor(position)) * (values[above] - values[below]);
  };
  return {at(0.25), at(0.5), at(0.75)};
}

/// Figures of the repeats so far.
struct Samples {
  std::vector<double> rate;
  std::vector<double> to_add;
  std::vector<double> to_memcpy;
  std::vector<double> to_scatter_add;
  std::vector<double> two_threads;

  OperationFigures Figures() const {
    const auto optional = [](const std::vector<double>& values) {
      return values.empty() ? std::nullopt : std::optional(QuartilesOf(values));
    };
    return {QuartilesOf(rate), QuartilesOf(to_add), QuartilesOf(to_memcpy),
            optional(to_scatter_add), optional(two_threads)};
  }
};

/// One compressor at one size.
class CodecBench {
 public:
  CodecBench(const CodecBenchOptions& options, const Compressor& codec, std::size_t n,
             std::vector<std::unique_ptr<Unit>>& units, Stopwatch& stopwatch)
      : options_(options),
        codec_(codec),
        n_(n),
        add_(baselines::AddFor(options.target)),
        has_feedback_(codec.traits().feedback_by_default),
        units_(units),
        stopwatch_(stopwatch) {}

  Result<CodecFigures> Measure() {
    CodecFigures figures;
    figures.bytes = n_ * sizeof(float);
    figures.feedback = has_feedback_;
    for (auto& unit : units_) {
      Prepare(*unit);
      GRADWIRE_RETURN_IF_ERROR(unit->status);
    }
    const Unit& first = *units_[0];
    figures.bytes_per_element = PerElement(first.plain_bytes);
    figures.relative_error = RelativeError(first);
    FindKept(first);
    Repeat(figures);
    for (const auto& unit : units_) GRADWIRE_RETURN_IF_ERROR(unit->status);
    figures.bytes_per_element_sent = PerElement(first.sent_bytes);
    return figures;
  }

 private:
  double PerElement(std::size_t bytes) const {
    return static_cast<double>(bytes) / static_cast<double>(n_);
  }

  static void Keep(Unit& unit, const Status& status) {
    if (unit.status.ok() && !status.ok()) unit.status = status;
  }

  std::size_t Encode(Unit& unit, std::size_t n, Residual* residual, MutableBytes output) const {
    SpanSource source({unit.gradient(), n});
    const Result<Encoded> encoded = codec_.Encode(source, n, unit.context(), residual, output);
    if (!encoded.ok()) {
      Keep(unit, encoded.status());
      return 0;
    }
    if (!encoded->finite) {
      Keep(unit, Internal(fmt::format("{} takes finite values for others", codec_.name())));
    }
    return encoded->payload_bytes;
  }

  void EncodeNext(Unit& unit, std::size_t n) const {
    ++unit.round;
    unit.sent_bytes = Encode(unit, n, has_feedback_ ? &unit.residual : nullptr,
                             unit.sent.first(unit.sent.size()));
  }

  void Decode(Unit& unit) const {
    Keep(unit,
         codec_.Decode(unit.plain.first(unit.plain_bytes), PlainContext(unit), unit.sum.first(n_)));
  }
  void DecodeAdd(Unit& unit) const {
    Keep(unit, codec_.DecodeAdd(unit.plain.first(unit.plain_bytes), PlainContext(unit),
                                unit.sum.first(n_)));
  }
  static CodecContext PlainContext(const Unit& unit) {
    return {.stream_seed = HashCombine(unit.seed, 0), .shared_seed = HashCombine(0, 0)};
  }

  /// The payload to decode, and a residual as it is after many rounds.
  void Prepare(Unit& unit) const {
    unit.status = Status::Ok();
    unit.round = 0;
    unit.plain_bytes = Encode(unit, n_, nullptr, unit.plain.first(unit.plain.size()));
    if (has_feedback_) {
      const std::size_t small = std::min(n_, kWarmUpElements);
      std::fill_n(unit.residual_values.data(), small, 0.0F);
      unit.residual = {.values = unit.residual_values.first(small), .pending = {}};
      for (std::size_t i = 0; i < options_.num_warm_up_rounds; ++i) EncodeNext(unit, small);
      codec_.Flush(unit.residual);
      for (std::size_t i = small; i < n_; ++i) {
        unit.residual_values.data()[i] = unit.residual_values.data()[i - small];
      }
      unit.residual = {.values = unit.residual_values.first(n_), .pending = {}};
    }
    for (std::size_t i = 0; i < kFullRounds; ++i) EncodeNext(unit, n_);
    Decode(unit);
  }

  /// |C(x) - x| / |x| of what Prepare has decoded.
  double RelativeError(const Unit& unit) const {
    double error = 0;
    double square = 0;
    for (std::size_t i = 0; i < n_; ++i) {
      const double x = unit.gradients.data()[i];
      const double difference = unit.sum.data()[i] - x;
      error += difference * difference;
      square += x * x;
    }
    return std::sqrt(error / square);
  }

  /// Fills indices_ and kept_ with what Prepare has decoded, if the compressor is a sparse one:
  /// nearly everything is zero and the rest has values of its own (those of twobit and terngrad
  /// have one magnitude, and every element its code).
  void FindKept(const Unit& unit) {
    const auto values = unit.sum.first(n_);
    const auto zeros = static_cast<std::size_t>(std::count(values.begin(), values.end(), 0.0F));
    if (n_ - zeros > n_ / 8) return;
    for (std::size_t i = 0; i < n_; ++i) {
      if (values[i] == 0) continue;
      indices_.push_back(static_cast<std::uint32_t>(i));
      kept_.push_back(values[i]);
    }
    const bool is_code = std::all_of(kept_.begin(), kept_.end(), [&](float value) {
      return std::fabs(value) == std::fabs(kept_.front());
    });
    if (is_code) indices_.clear();
  }

  void Repeat(CodecFigures& figures) {
    const Operation add =
        stopwatch_.Calibrate([&](Unit& unit) { add_(unit.sum.data(), unit.gradients.data(), n_); });
    const Operation copy = stopwatch_.Calibrate(
        [&](Unit& unit) { baselines::Copy(unit.sum.data(), unit.gradients.data(), n_); });
    const Operation operations[] = {
        stopwatch_.Calibrate([&](Unit& unit) { EncodeNext(unit, n_); }),
        stopwatch_.Calibrate([&](Unit& unit) { Decode(unit); }),
        stopwatch_.Calibrate([&](Unit& unit) { DecodeAdd(unit); }),
    };
    constexpr std::size_t kDecodeAdd = 2;
    std::optional<Operation> scatter;
    if (!indices_.empty()) {
      scatter = stopwatch_.Calibrate([&](Unit& unit) {
        baselines::ScatterAdd(unit.sum.data(), indices_.data(), kept_.data(), indices_.size());
      });
    }

    Samples samples[std::size(operations)];
    std::vector<double> add_rates;
    std::vector<double> memcpy_rates;
    std::vector<double> add_two_threads;
    const double gigabytes = static_cast<double>(figures.bytes) * 1e-9;
    for (std::size_t repeat = 0; repeat < options_.num_repeats; ++repeat) {
      Took before = stopwatch_.One(add);
      for (std::size_t i = 0; i < std::size(operations); ++i) {
        const Took copied = stopwatch_.One(copy);
        const Took took = stopwatch_.One(operations[i]);
        if (i == kDecodeAdd && scatter) {
          samples[i].to_scatter_add.push_back(stopwatch_.One(*scatter).cpu / took.cpu);
        }
        if (stopwatch_.has_two()) {
          samples[i].two_threads.push_back(2 * took.wall / stopwatch_.Both(operations[i]));
          add_two_threads.push_back(2 * before.wall / stopwatch_.Both(add));
        }
        const Took after = stopwatch_.One(add);
        samples[i].rate.push_back(gigabytes / took.cpu);
        samples[i].to_add.push_back((before.cpu + after.cpu) / 2 / took.cpu);
        samples[i].to_memcpy.push_back(copied.cpu / took.cpu);
        add_rates.push_back(gigabytes / after.cpu);
        memcpy_rates.push_back(gigabytes / copied.cpu);
        before = after;
      }
    }
    figures.encode = samples[0].Figures();
    figures.decode = samples[1].Figures();
    figures.decode_add = samples[kDecodeAdd].Figures();
    figures.add_rate = QuartilesOf(add_rates);
    figures.memcpy_rate = QuartilesOf(memcpy_rates);
    if (!add_two_threads.empty()) figures.add_two_threads = QuartilesOf(add_two_threads);
  }

  const CodecBenchOptions& options_;
  const Compressor& codec_;
  const std::size_t n_;
  const baselines::Add add_;
  const bool has_feedback_;
  std::vector<std::unique_ptr<Unit>>& units_;
  Stopwatch& stopwatch_;
  std::vector<std::uint32_t> indices_;  // empty: not sparse
  std::vector<float> kept_;
};

}  // namespace

Status MeasureCodecs(const CompressorRegistry& registry, const CodecBenchOptions& options,
                     const std::function<void(const CodecFigures&)>& report) {
  std::vector<std::unique_ptr<const Compressor>> codecs;
  for (const std::string& spec : options.specs) {
    auto codec = registry.Create(spec);
    if (!codec.ok()) return codec.status();
    codecs.push_back(std::move(codec).value());
  }
  const std::size_t largest =
      *std::max_element(options.sizes.begin(), options.sizes.end()) / sizeof(float);
  std::size_t payload_bytes = 0;
  for (const auto& codec : codecs) {
    payload_bytes = std::max(payload_bytes, codec->MaxEncodedSize(largest));
    // Of the small unit that warms up, where rounding makes it larger.
    payload_bytes = std::max(payload_bytes, codec->MaxEncodedSize(kWarmUpElements));
  }
  std::vector<std::unique_ptr<Unit>> units;
  for (std::size_t i = 0; i < options.num_threads; ++i) {
    units.push_back(std::make_unique<Unit>(largest, payload_bytes, i + 1));
  }
  Stopwatch stopwatch(units);
  for (const std::size_t size : options.sizes) {
    for (std::size_t i = 0; i < codecs.size(); ++i) {
      CodecBench bench(options, *codecs[i], size / sizeof(float), units, stopwatch);
      Result<CodecFigures> figures = bench.Measure();
      if (!figures.ok()) return figures.status();
      figures->spec = options.specs[i];
      report(*figures);
    }
  }
  return Status::Ok();
}

}  // namespace gradwire
