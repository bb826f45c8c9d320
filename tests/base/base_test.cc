#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/blob.h"
#include "common/base/buffer_pool.h"
#include "common/base/bytes.h"
#include "common/base/dtype.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/status.h"
#include "tests/base/alloc_counter.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

// ---- Blob and BufferPool -----------------------------------------------------------------------

class CountingBlob final : public Blob {
 public:
  std::atomic<int> recycled{0};

 private:
  void Recycle() noexcept override { ++recycled; }
};

TEST_CASE("a blob is recycled once, when its last reference goes", "[base][unit]") {
  CountingBlob blob;
  {
    BlobRef a(&blob);
    BlobRef b = a;
    BlobRef c = std::move(a);
    REQUIRE(!a);  // NOLINT: a moved-from reference is empty, that is the point
    b = c;
    b = std::move(c);
    REQUIRE(b.get() == &blob);
    BlobRef& self = b;
    b = self;
    REQUIRE(blob.recycled == 0);
    b = BlobRef();
    REQUIRE(blob.recycled == 1);
  }
  REQUIRE(blob.recycled == 1);
  { const BlobRef again(&blob); }
  REQUIRE(blob.recycled == 2);
}

TEST_CASE("a blob shared by many threads is recycled once", "[base][unit]") {
  for (int repeat = 0; repeat < 50; ++repeat) {
    CountingBlob blob;
    std::vector<std::thread> threads;
    {
      const BlobRef first(&blob);
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([ref = first] {
          for (int i = 0; i < 200; ++i) {
            BlobRef copy = ref;
            const BlobRef moved = std::move(copy);
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
    threads.clear();  // the closures with their references
    REQUIRE(blob.recycled == 1);
  }
}

TEST_CASE("a pool gives aligned buffers of the size asked for and takes them back",
          "[base][unit]") {
  BufferPool pool;
  REQUIRE(pool.Acquire(0).empty());
  REQUIRE(pool.allocated_bytes() == 0);
  for (const std::size_t size :
       std::vector<std::size_t>{1, 255, 256, 257, 4096, 5000, 1048576, 1048577}) {
    CAPTURE(size);
    const std::byte* first = nullptr;
    {
      const PooledBuffer buffer = pool.Acquire(size);
      REQUIRE(buffer.bytes().size() == size);
      first = buffer.bytes().data();
      REQUIRE(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
      std::memset(buffer.bytes().data(), 0x5a, size);
      const Payload payload = buffer.Share(size / 2);
      REQUIRE(payload.size() == size / 2);
      REQUIRE(pool.Acquire(size).bytes().data() != first);
    }
    // Both are free now; the next two are the same memory.
    const std::size_t allocated = pool.allocated_bytes();
    const PooledBuffer again = pool.Acquire(size);
    const PooledBuffer other = pool.Acquire(size);
    REQUIRE((again.bytes().data() == first || other.bytes().data() == first));
    REQUIRE(pool.allocated_bytes() == allocated);
  }
}

TEST_CASE("a buffer is not given out while a payload of it lives", "[base][unit]") {
  BufferPool pool;
  Payload payload;
  {
    const PooledBuffer buffer = pool.Acquire(1000);
    std::memset(buffer.bytes().data(), 7, 1000);
    payload = buffer.Share(1000);
  }
  const PooledBuffer other = pool.Acquire(1000);
  REQUIRE(other.bytes().data() != payload.bytes.data());
  std::memset(other.bytes().data(), 9, 1000);
  for (const std::byte b : payload.bytes) REQUIRE(b == std::byte{7});
}

TEST_CASE("a payload outlives its pool", "[base][unit]") {
  Payload payload;
  {
    BufferPool pool;
    const PooledBuffer buffer = pool.Acquire(1 << 16);
    std::memset(buffer.bytes().data(), 3, 1 << 16);
    payload = buffer.Share(1 << 16);
  }
  REQUIRE(payload.bytes.back() == std::byte{3});
  std::thread([moved = std::move(payload)]() mutable { moved = {}; }).join();
}

TEST_CASE("a pool in steady state allocates nothing", "[base][unit]") {
  BufferPool pool;
  const auto use = [&pool] {
    std::array<PooledBuffer, 8> buffers;
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i] = pool.Acquire(1000 * (i + 1));
    const Payload shared = buffers[3].Share(10);
  };
  use();
  const std::uint64_t before = NumAllocations();
  const std::size_t bytes = pool.allocated_bytes();
  for (int i = 0; i < 100; ++i) use();
  REQUIRE(NumAllocations() == before);
  REQUIRE(pool.allocated_bytes() == bytes);
}

TEST_CASE("buffers may be returned on any thread", "[base][unit]") {
  BufferPool pool;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, &wrong, t] {
      Payload before;
      for (int i = 0; i < 500; ++i) {
        const std::size_t size = 300 + static_cast<std::size_t>(i % 7) * 400;
        const PooledBuffer buffer = pool.Acquire(size);
        const int mark = (t * 50 + i) % 251;
        std::memset(buffer.bytes().data(), mark, size);
        Payload shared = buffer.Share(size);
        std::thread reader;
        if (i % 50 == 0) {
          // The last reference may go elsewhere.
          reader = std::thread([copy = shared, mark, &wrong] {
            for (const std::byte b : copy.bytes) wrong += b == static_cast<std::byte>(mark) ? 0 : 1;
          });
        }
        for (const std::byte b : shared.bytes) wrong += b == static_cast<std::byte>(mark) ? 0 : 1;
        before = std::move(shared);
        if (reader.joinable()) reader.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(wrong == 0);
  // Four threads hold at most three buffers of a size at a time.
  REQUIRE(pool.allocated_bytes() < std::size_t{4} * 3 * 7 * 4096);
}

// ---- DType, Status, bytes, random --------------------------------------------------------------

TEST_CASE("dtypes have names, sizes and numbers that come back", "[base][unit]") {
  const std::vector<std::pair<DType, std::size_t>> all = {
      {DType::kFloat32, 4}, {DType::kFloat16, 2}, {DType::kBFloat16, 2}, {DType::kFloat64, 8},
      {DType::kInt8, 1},    {DType::kUInt8, 1},   {DType::kInt32, 4},    {DType::kInt64, 8}};
  for (const auto& [dtype, size] : all) {
    REQUIRE(SizeOf(dtype) == size);
    REQUIRE(*ParseDType(DTypeName(dtype)) == dtype);
    REQUIRE(*DTypeFromWire(static_cast<std::uint32_t>(dtype)) == dtype);
  }
  REQUIRE(IsFloat(DType::kBFloat16));
  REQUIRE(!IsFloat(DType::kInt64));
  for (const std::uint32_t number : {0U, 9U, 255U, 256U + 1U, 0xffffffffU}) {
    const Status status = DTypeFromWire(number).status();
    REQUIRE(status.code() == StatusCode::kCorruptData);
    REQUIRE(status.message().find(std::to_string(number)) != std::string::npos);
  }
  REQUIRE(SizeOf(static_cast<DType>(0)) == 0);
  REQUIRE(DTypeName(static_cast<DType>(77)) == "invalid");
  const Status status = ParseDType("float31").status();
  REQUIRE(status.code() == StatusCode::kInvalidArgument);
  REQUIRE(status.message().find("'float31'") != std::string::npos);
  REQUIRE(status.message().find("bfloat16") != std::string::npos);
}

Status FailIf(bool fail) {
  GRADWIRE_RETURN_IF_ERROR(fail ? Timeout("late") : Status::Ok());
  return Internal("came through");
}

TEST_CASE("a status prints its code and message and travels through functions", "[base][unit]") {
  REQUIRE(Status::Ok().ok());
  REQUIRE(Status::Ok().ToString() == "Ok");
  REQUIRE(CorruptData("7 bytes").ToString() == "CorruptData: 7 bytes");
  REQUIRE(FailIf(true) == Timeout("late"));
  REQUIRE(FailIf(false) == Internal("came through"));
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    names.insert(StatusCodeName(static_cast<StatusCode>(code)));
  }
  REQUIRE(names.size() == 8);
  REQUIRE(names.count("Unknown") == 0);
}

TEST_CASE("a result holds a value or the reason why not", "[base][unit]") {
  Result<std::vector<int>> value(std::vector<int>{1, 2, 3});
  REQUIRE(value.ok());
  REQUIRE(value.status().ok());
  REQUIRE(value->size() == 3);
  const std::vector<int> taken = std::move(value).value();
  REQUIRE(taken == std::vector<int>{1, 2, 3});
  const Result<int> none(NotFound("nothing"));
  REQUIRE(!none.ok());
  REQUIRE(none.status() == NotFound("nothing"));
}

TEST_CASE("numbers load and store at odd addresses, little-endian", "[base][unit]") {
  std::array<std::byte, 16> bytes{};
  StoreLe<std::uint32_t>(bytes.data() + 1, 0x01020304);
  REQUIRE(bytes[1] == std::byte{4});
  REQUIRE(bytes[4] == std::byte{1});
  REQUIRE(LoadLe<std::uint32_t>(bytes.data() + 1) == 0x01020304);
  StoreLe(bytes.data() + 3, -2.5);
  REQUIRE(LoadLe<double>(bytes.data() + 3) == -2.5);
  REQUIRE(AsText(AsBytes(std::string_view("text"))) == "text");
}

TEST_CASE("random streams replay, differ by seed and are spread evenly", "[base][unit]") {
  CounterRng a(42);
  CounterRng b(42);
  CounterRng other(43);
  int equal = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t x = a.Next();
    REQUIRE(x == b.Next());
    equal += x == other.Next() ? 1 : 0;
  }
  REQUIRE(equal == 0);
  // The stream is on the wire of some compressors: it must never change.
  // SplitMix64's published first output for state 0.
  REQUIRE(Mix64(0) == 0xe220a8397b1dcdafULL);
  REQUIRE(HashText("") == 0xcbf29ce484222325ULL);
  REQUIRE(HashText("a") == 0xaf63dc4c8601ec8cULL);  // FNV-1a's published value
  REQUIRE(HashCombine(1, 2) != HashCombine(2, 1));

  // n = 100000. Uniform: mean 1/2, standard error 0.29 / sqrt(n) = 0.0009; six of them.
  // Gaussian: mean 0 (standard error 0.0032), variance 1 (sqrt(2 / n) = 0.0045).
  constexpr int kDraws = 100000;
  CounterRng rng(7);
  double sum = 0;
  std::array<int, 10> histogram{};
  for (int i = 0; i < kDraws; ++i) {
    const double u = rng.NextUniform();
    REQUIRE((u >= 0 && u < 1));
    sum += u;
    ++histogram[static_cast<std::size_t>(rng.NextBelow(10))];
  }
  REQUIRE(std::abs(sum / kDraws - 0.5) < 0.0055);
  // Binomial: mean n / 10, standard deviation sqrt(0.09 n) = 95; six of them.
  for (const int count : histogram) REQUIRE(std::abs(count - kDraws / 10) < 570);
  double mean = 0;
  double square = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double g = rng.NextGaussian();
    REQUIRE(std::isfinite(g));
    mean += g;
    square += g * g;
  }
  mean /= kDraws;
  REQUIRE(std::abs(mean) < 0.019);
  REQUIRE(std::abs(square / kDraws - 1) < 0.027);
  REQUIRE(rng.NextBelow(1) == 0);
}

TEST_CASE("ids of lives are never 0 and never the same", "[base][unit]") {
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 100; ++i) ids.insert(RandomId());
  REQUIRE(ids.size() == 100);
  REQUIRE(ids.count(0) == 0);
}

TEST_CASE("a log line is one line, whatever it is told", "[base][unit]") {
  const auto text = [](std::string_view message, std::initializer_list<LogField> fields) {
    return FormatLogLine(LogFormat::kText, "lane", message, fields);
  };
  REQUIRE(text("refused", {}) == "lane: refused");
  REQUIRE(text("refused", {Field("rank", 3), Field("why", "too late"), Field("who", "")}) ==
          "lane: refused rank=3 why=\"too late\" who=\"\"");
  REQUIRE(text("a\nb\x01", {Field("text", "say \"x\"=\\\n")}) ==
          "lane: a\\nb\\u0001 text=\"say \\\"x\\\"=\\\\\\n\"");
  const auto json = [](std::string_view message, std::initializer_list<LogField> fields) {
    return FormatLogLine(LogFormat::kJson, "lane", message, fields);
  };
  REQUIRE(json("it \"is\"", {Field("rank", 3), Field("share", 0.5), Field("who", "w 1")}) ==
          R"("component":"lane","message":"it \"is\"","rank":3,"share":0.5,"who":"w 1")");
  // JSON has no NaN, and what is no UTF-8 would make the whole line unreadable.
  REQUIRE(json("x", {Field("loss", std::numeric_limits<double>::quiet_NaN())}) ==
          R"("component":"lane","message":"x","loss":"nan")");
  REQUIRE(json("\xff\xc3\xa9\xc3", {}) ==
          "\"component\":\"lane\",\"message\":\"\\ufffd\xc3\xa9\\ufffd\"");
}

TEST_CASE("a limited log counts what it suppresses", "[base][unit]") {
  LogLimiter limiter(std::chrono::milliseconds(100));
  const LogLimiter::Clock::time_point start{};
  const auto at = [&](int ms) { return limiter.Admit(start + std::chrono::milliseconds(ms)); };
  REQUIRE(at(0) == 0U);
  REQUIRE(!at(1));
  REQUIRE(!at(99));
  REQUIRE(at(100) == 2U);
  REQUIRE(at(300) == 0U);
}

TEST_CASE("log levels have names, and a library is quiet until it is asked", "[base][unit]") {
  REQUIRE(*ParseLogLevel("debug") == LogLevel::kDebug);
  REQUIRE(ParseLogLevel("loud").status().code() == StatusCode::kInvalidArgument);
  REQUIRE(!LogEnabled(LogLevel::kInfo));
  REQUIRE(LogEnabled(LogLevel::kWarn));
}

}  // namespace
}  // namespace gradwire
