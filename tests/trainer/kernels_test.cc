#include "worker/trainer/kernels.h"

#include <dlfcn.h>
#include <features.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "tests/catch.h"

namespace gradwire::trainer {
namespace {

constexpr const char* kBaseline = "baseline";

/// The builds of the library that this CPU can run, the most capable one last.
std::vector<std::string> RunnableVariants() {
  std::vector<std::string> runnable;
  const std::string built = std::string(GRADWIRE_NN_VARIANTS) + ",";
  std::size_t first = 0;
  for (std::size_t comma = built.find(','); comma != std::string::npos;
       first = comma + 1, comma = built.find(',', first)) {
    const std::string name = built.substr(first, comma - first);
    bool runs = name == kBaseline;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                    __builtin_cpu_supports("bmi") != 0 && __builtin_cpu_supports("bmi2") != 0;
    const bool v4 =
        v3 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
        __builtin_cpu_supports("avx512cd") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
        __builtin_cpu_supports("avx512vl") != 0;
    runs = runs || (name == "x86-64-v3" && v3) || (name == "x86-64-v4" && v4);
#endif
    if (runs) runnable.push_back(name);
  }
  return runnable;
}

/// One build of the library, opened beside the one that is linked.
class Variant {
 public:
  explicit Variant(const std::string& name) {
    const std::string folder = name == kBaseline ? "" : "/glibc-hwcaps/" + name;
    const std::string path = std::string(GRADWIRE_NN_DIR) + folder + "/libgradwire_nn.so";
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    CAPTURE(path);
    REQUIRE(handle_ != nullptr);
  }
  ~Variant() { dlclose(handle_); }
  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  template <typename Function>
  Function* Find(const char* name) const {
    auto* function = reinterpret_cast<Function*>(dlsym(handle_, name));
    REQUIRE(function != nullptr);
    return function;
  }

 private:
  void* handle_ = nullptr;
};

#define FIND(variant, function) (variant).Find<decltype(function)>(#function)

std::vector<float> Numbers(std::size_t n, std::uint64_t seed) {
  CounterRng rng(seed);
  std::vector<float> numbers(n);
  for (float& v : numbers) v = static_cast<float>(rng.NextUniform() * 2.0 - 1.0);
  return numbers;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
TEST_CASE("the dynamic linker picks the best build for the CPU", "[trainer][kernels]") {
  CHECK(gradwire_nn_variant() == RunnableVariants().back());
}
#endif

TEST_CASE("every build is what it says", "[trainer][kernels]") {
  for (const std::string& name : RunnableVariants()) {
    const Variant variant(name);
    CHECK(FIND(variant, gradwire_nn_variant)() == name);
  }
}

TEST_CASE("the update has the same bits in every build", "[trainer][kernels]") {
  // Workers on different CPUs must keep equal parameters.
  for (const std::size_t n : {std::size_t{1}, std::size_t{15}, std::size_t{1003}}) {
    const std::vector<float> gradient = Numbers(n, 1);
    const std::vector<float> weight_before = Numbers(n, 2);
    const std::vector<float> velocity_before = Numbers(n, 3);
    // volatile: every operation is rounded to float on its own, as the interface promises.
    std::vector<float> weight = weight_before;
    std::vector<float> velocity = velocity_before;
    for (std::size_t i = 0; i < n; ++i) {
      const volatile float decayed = 0.01F * weight[i];
      const volatile float total = gradient[i] + decayed;
      const volatile float kept = 0.9F * velocity[i];
      velocity[i] = kept + total;
      const volatile float change = 0.3F * velocity[i];
      weight[i] = weight[i] - change;
    }
    for (const std::string& name : RunnableVariants()) {
      CAPTURE(n, name);
      const Variant variant(name);
      std::vector<float> w = weight_before;
      std::vector<float> v = velocity_before;
      FIND(variant, gradwire_nn_sgd_update)
      (n, 0.3F, 0.9F, 0.01F, gradient.data(), v.data(), w.data());
      CHECK(SameBits(w, weight));
      CHECK(SameBits(v, velocity));
    }
  }
}

TEST_CASE("every build finds a NaN or infinity anywhere", "[trainer][kernels]") {
  for (const std::string& name : RunnableVariants()) {
    CAPTURE(name);
    const Variant variant(name);
    auto* all_finite = FIND(variant, gradwire_nn_all_finite);
    for (const std::size_t n : {std::size_t{1}, std::size_t{16}, std::size_t{67}}) {
      std::vector<float> values = Numbers(n, 4);
      values[0] = std::numeric_limits<float>::max();
      values[n - 1] = std::numeric_limits<float>::lowest();
      CHECK(all_finite(n, values.data()) == 1);
      for (std::size_t i = 0; i < n; ++i) {
        for (const float bad :
             {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
              -std::numeric_limits<float>::infinity()}) {
          const float kept = values[i];
          values[i] = bad;
          CHECK(all_finite(n, values.data()) == 0);
          values[i] = kept;
        }
      }
    }
    CHECK(all_finite(0, nullptr) == 1);
  }
}

TEST_CASE("the products are right in every build and at any alignment", "[trainer][kernels]") {
  struct Shape {
    std::size_t rows, in, out;
  };
  for (const Shape shape : {Shape{1, 1, 1}, Shape{3, 5, 7}, Shape{64, 100, 33}, Shape{5, 31, 300},
                            Shape{17, 257, 10}}) {
    const auto [rows, in, out] = shape;
    constexpr std::size_t kOdd = 1;  // floats off the allocation's alignment
    const std::vector<float> x = Numbers(kOdd + rows * in, 5);
    const std::vector<float> w = Numbers(kOdd + out * in, 6);
    const std::vector<float> bias = Numbers(kOdd + out, 7);
    const std::vector<float> dy = Numbers(kOdd + rows * out, 8);
    // A sum of k products of numbers up to 1 in float, in any order, is off by at most about
    // k * 2^-24 * k; plus one rounding for the bias.
    const auto tolerance = [](std::size_t k) {
      return static_cast<double>((k + 1) * (k + 1)) * 0x1p-24;
    };
    for (const std::string& name : RunnableVariants()) {
      CAPTURE(name, rows, in, out);
      const Variant variant(name);
      std::vector<float> y(kOdd + rows * out);
      FIND(variant, gradwire_nn_dense_forward)
      (rows, in, out, x.data() + kOdd, w.data() + kOdd, bias.data() + kOdd, 1, y.data() + kOdd);
      double worst = 0.0;
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t o = 0; o < out; ++o) {
          double sum = static_cast<double>(bias[kOdd + o]);
          for (std::size_t i = 0; i < in; ++i) {
            sum += static_cast<double>(x[kOdd + r * in + i]) *
                   static_cast<double>(w[kOdd + o * in + i]);
          }
          worst = std::max(
              worst, std::abs(std::max(sum, 0.0) - static_cast<double>(y[kOdd + r * out + o])));
        }
      }
      CHECK(worst <= tolerance(in));

      std::vector<float> dw(kOdd + out * in, 99.0F);
      auto* grad_weight = FIND(variant, gradwire_nn_dense_grad_weight);
      grad_weight(rows, in, out, x.data() + kOdd, dy.data() + kOdd, 0, dw.data() + kOdd);
      std::vector<float> twice = dw;
      grad_weight(rows, in, out, x.data() + kOdd, dy.data() + kOdd, 1, twice.data() + kOdd);
      worst = 0.0;
      double worst_twice = 0.0;
      for (std::size_t o = 0; o < out; ++o) {
        for (std::size_t i = 0; i < in; ++i) {
          double sum = 0.0;
          for (std::size_t r = 0; r < rows; ++r) {
            sum += static_cast<double>(dy[kOdd + r * out + o]) *
                   static_cast<double>(x[kOdd + r * in + i]);
          }
          const std::size_t at = kOdd + o * in + i;
          worst = std::max(worst, std::abs(sum - static_cast<double>(dw[at])));
          worst_twice = std::max(worst_twice, std::abs(2.0 * sum - static_cast<double>(twice[at])));
        }
      }
      CHECK(worst <= tolerance(rows));
      CHECK(worst_twice <= tolerance(2 * rows));

      std::vector<float> dx(kOdd + rows * in, 99.0F);
      FIND(variant, gradwire_nn_dense_grad_input)
      (rows, in, out, dy.data() + kOdd, w.data() + kOdd, dx.data() + kOdd);
      worst = 0.0;
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t i = 0; i < in; ++i) {
          double sum = 0.0;
          for (std::size_t o = 0; o < out; ++o) {
            sum += static_cast<double>(dy[kOdd + r * out + o]) *
                   static_cast<double>(w[kOdd + o * in + i]);
          }
          worst = std::max(worst, std::abs(sum - static_cast<double>(dx[kOdd + r * in + i])));
        }
      }
      CHECK(worst <= tolerance(out));
    }
  }
}

TEST_CASE("a NaN passes through the layers' kernels", "[trainer][kernels]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {nan, 1};
  const std::vector<float> w = {1, 0};
  const std::vector<float> bias = {0};
  std::vector<float> y(1);
  gradwire_nn_dense_forward(1, 2, 1, x.data(), w.data(), bias.data(), 1, y.data());
  CHECK(std::isnan(y[0]));
  std::vector<float> dy = {2};
  std::vector<float> dbias(1);
  gradwire_nn_grad_activation(1, 1, y.data(), dy.data(), dbias.data());
  CHECK(dbias[0] == 2.0F);
}

}  // namespace
}  // namespace gradwire::trainer
