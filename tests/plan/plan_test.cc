#include "common/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/plan/model_list.h"
#include "common/plan/units.h"
#include "common/wire/control.h"
#include "common/wire/limits.h"
#include "tests/catch.h"

namespace gradwire {
namespace {

TensorDeclaration Tensor(const std::string& name, std::vector<std::uint64_t> shape,
                         DType dtype = DType::kFloat32, ReduceOp op = ReduceOp::kAverage,
                         std::int32_t priority = 0) {
  TensorDeclaration tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.priority = priority;
  tensor.op = op;
  return tensor;
}

LinkCompression Link(const std::string& written, FeedbackMode feedback = FeedbackMode::kAuto) {
  auto spec = ParseCompressorSpec(written);
  REQUIRE(spec.ok());
  return {*spec, feedback};
}

PlanOptions Options(const std::string& uplink = "none", const std::string& downlink = "none") {
  PlanOptions options;
  options.compression.uplink = Link(uplink);
  options.compression.downlink = Link(downlink);
  return options;
}

Plan Extended(const Plan& plan, const std::vector<TensorDeclaration>& batch,
              const PlanOptions& options) {
  auto next = ExtendPlan(plan, batch, options, BuiltinCompressors());
  INFO(next.status().ToString());
  REQUIRE(next.ok());
  return *next;
}

Plan Made(const std::vector<TensorDeclaration>& batch, const PlanOptions& options) {
  return Extended(EmptyPlan(options), batch, options);
}

std::string Refusal(const std::vector<TensorDeclaration>& batch, const PlanOptions& options) {
  const auto plan = ExtendPlan(EmptyPlan(options), batch, options, BuiltinCompressors());
  REQUIRE_FALSE(plan.ok());
  CHECK(plan.status().code() == StatusCode::kInvalidArgument);
  return plan.status().message();
}

/// The parts of a unit that are maths: all but where it lies.
std::vector<Unit> WithoutPlacement(const Plan& plan) {
  std::vector<Unit> units = plan.units;
  for (Unit& unit : units) unit.server = unit.lane = 0;
  return units;
}

/// 161 gradients of a residual network with 25.6 million parameters: convolutions in four stages of
/// bottlenecks, batch normalizations of two vectors each, one dense layer.
std::vector<TensorDeclaration> ResNetLike() {
  std::vector<TensorDeclaration> tensors;
  const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape) {
    tensors.push_back(Tensor(name, std::move(shape), DType::kFloat32, ReduceOp::kAverage,
                             -static_cast<std::int32_t>(tensors.size())));
  };
  const auto convolution = [&](const std::string& name, std::uint64_t out, std::uint64_t in,
                               std::uint64_t kernel) {
    add(name + ".weight", {out, in, kernel, kernel});
    add(name + ".norm.weight", {out});
    add(name + ".norm.bias", {out});
  };
  convolution("stem", 64, 3, 7);
  const int blocks[] = {3, 4, 6, 3};
  std::uint64_t in = 64;
  for (std::size_t stage = 0; stage < 4; ++stage) {
    const std::uint64_t width = std::uint64_t{64} << stage;
    for (int block = 0; block < blocks[stage]; ++block) {
      const std::string name = "layer" + std::to_string(stage) + "." + std::to_string(block);
      convolution(name + ".conv0", width, in, 1);
      convolution(name + ".conv1", width, width, 3);
      convolution(name + ".conv2", 4 * width, width, 1);
      if (block == 0) convolution(name + ".shortcut", 4 * width, in, 1);
      in = 4 * width;
    }
  }
  add("dense.weight", {1000, 2048});
  add("dense.bias", {1000});
  return tensors;
}

/// Every element of every tensor is in exactly one unit, and units are consistent in themselves.
void CheckCovers(const Plan& plan) {
  std::map<std::uint32_t, std::uint64_t> covered;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const Unit& unit = plan.units[i];
    CAPTURE(i);
    CHECK(unit.key == i);
    CHECK(unit.server < plan.num_servers);
    CHECK(unit.lane < plan.lanes_per_server);
    std::uint64_t filled = 0;
    for (const UnitMember& member : unit.members) {
      CHECK(member.unit_offset == filled);
      CHECK(member.tensor_offset == covered[member.tensor]);
      CHECK(plan.tensors[member.tensor].dtype == unit.dtype);
      CHECK(plan.tensors[member.tensor].op == unit.op);
      CHECK(plan.tensors[member.tensor].priority <= unit.priority);
      filled += member.count;
      covered[member.tensor] += member.count;
    }
    CHECK(filled == unit.num_elements);
  }
  for (std::uint32_t t = 0; t < plan.tensors.size(); ++t) {
    CAPTURE(plan.tensors[t].name);
    CHECK(covered[t] == plan.tensors[t].num_elements());
  }
  // The wire's own checks agree.
  const auto parsed = ParsePlan(Serialize(plan));
  INFO(parsed.status().ToString());
  REQUIRE(parsed.ok());
  CHECK(*parsed == plan);
}

TEST_CASE("large tensors are cut into units of whole blocks", "[plan][unit]") {
  PlanOptions options = Options();
  options.partition_bytes = 100000;  // 25000 elements, 6 whole blocks
  const Plan plan = Made({Tensor("w", {50000})}, options);
  REQUIRE(plan.units.size() == 3);
  CHECK(plan.units[0].num_elements == 24576);
  CHECK(plan.units[1].num_elements == 24576);
  CHECK(plan.units[2].num_elements == 848);
  CHECK(plan.units[1].members == std::vector<UnitMember>{{0, 24576, 0, 24576}});
  CheckCovers(plan);
  CHECK(plan.version == 1);
}

TEST_CASE("a unit's automatic size depends on how strong both compressors are", "[plan][unit]") {
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  struct Row {
    const char* uplink;
    const char* downlink;
    std::uint64_t bytes;
  };
  for (const Row& row : {Row{"none", "none", kMiB}, Row{"fp16", "fp16", kMiB},
                         Row{"bf16", "none", kMiB}, Row{"onebit", "onebit", 2 * kMiB},
                         Row{"topk(ratio=0.01)", "onebit", 2 * kMiB}, Row{"onebit", "none", kMiB},
                         Row{"none", "onebit", kMiB}, Row{"topk(ratio=0.9)", "onebit", kMiB}}) {
    CAPTURE(row.uplink, row.downlink);
    const Plan plan = Made({Tensor("w", {3 * kMiB})}, Options(row.uplink, row.downlink));
    CHECK(plan.units[0].num_elements == row.bytes / sizeof(float));
    CheckCovers(plan);
  }
  // Another dtype has as many elements, not as many bytes; the phases of a warm-up don't matter.
  PlanOptions options = Options("onebit", "onebit");
  options.compression.warmup_steps = 10;
  const Plan plan = Made({Tensor("w", {3 * kMiB}, DType::kFloat64)}, options);
  CHECK(plan.units[0].num_elements == 2 * kMiB / sizeof(float));
}

TEST_CASE("small tensors of one kind are fused in declared order", "[plan][unit]") {
  PlanOptions options = Options();
  options.partition_bytes = 16384;  // 4096 elements
  options.fuse_below = 8192;
  const Plan plan =
      Made({Tensor("a", {1500}, DType::kFloat32, ReduceOp::kAverage, -5),
            Tensor("big", {2048}),  // exactly fuse_below: not fused
            Tensor("b", {1500}, DType::kFloat32, ReduceOp::kAverage, 3), Tensor("none", {0, 7}),
            Tensor("h", {10}, DType::kFloat16), Tensor("s", {10}, DType::kFloat32, ReduceOp::kSum),
            Tensor("c", {1500}),  // does not fit any more
            Tensor("d", {1096}), Tensor("scalar", {})},
           options);
  CheckCovers(plan);
  REQUIRE(plan.units.size() == 5);
  CHECK(plan.units[0].members == std::vector<UnitMember>{{0, 0, 0, 1500}, {2, 0, 1500, 1500}});
  CHECK(plan.units[0].priority == 3);
  CHECK(plan.units[1].members == std::vector<UnitMember>{{1, 0, 0, 2048}});
  CHECK(plan.units[2].dtype == DType::kFloat16);
  CHECK(plan.units[3].op == ReduceOp::kSum);
  CHECK(plan.units[4].members ==
        std::vector<UnitMember>{{6, 0, 0, 1500}, {7, 0, 1500, 1096}, {8, 0, 2596, 1}});
}

TEST_CASE("tensors under different rules are not fused", "[plan][unit]") {
  PlanOptions options = Options("onebit", "onebit");
  options.compression.min_bytes = 0;
  options.compression.rules = {{"*.bias", Link("none"), Link("none")},
                               {"x*", Link("topk(ratio=0.1)"), std::nullopt},
                               {"x.bias", Link("fp16"), Link("fp16")}};
  const Plan plan = Made({Tensor("a.weight", {9}), Tensor("a.bias", {9}), Tensor("x", {9}),
                          Tensor("x.bias", {9}), Tensor("b.weight", {9})},
                         options);
  CheckCovers(plan);
  REQUIRE(plan.units.size() == 3);
  CHECK(plan.units[0].phases ==
        std::vector<Phase>{{0, "onebit", "onebit", Feedback::kEf, Feedback::kEf}});
  CHECK(plan.units[0].members.size() == 2);
  // The first rule that matches counts.
  CHECK(plan.units[1].phases ==
        std::vector<Phase>{{0, "none", "none", Feedback::kNone, Feedback::kNone}});
  CHECK(plan.units[1].members.size() == 2);
  // What a rule leaves out is as everywhere.
  CHECK(plan.units[2].phases ==
        std::vector<Phase>{{0, "topk(ratio=0.1)", "onebit", Feedback::kEf, Feedback::kEf}});
}

TEST_CASE("nothing is fused below zero, and cut where fusing would not fit", "[plan][unit]") {
  PlanOptions options = Options();
  options.fuse_below = 0;
  CHECK(Made({Tensor("a", {1}), Tensor("b", {1})}, options).units.size() == 2);
  options.fuse_below = std::uint64_t{1} << 30;
  options.partition_bytes = 16384;
  const Plan plan = Made({Tensor("a", {10000}), Tensor("b", {4095}), Tensor("c", {1})}, options);
  CheckCovers(plan);
  REQUIRE(plan.units.size() == 4);
  CHECK(plan.units[3].members.size() == 2);
}

TEST_CASE("min_bytes is applied to the finished unit", "[plan][unit]") {
  PlanOptions options = Options("onebit", "topk");
  options.compression.min_bytes = 4000;
  options.fuse_below = 4000;
  const Plan fused = Made({Tensor("a", {500}), Tensor("b", {500})}, options);
  REQUIRE(fused.units.size() == 1);
  CHECK(fused.units[0].phases[0].uplink == "onebit");
  const Plan small = Made({Tensor("a", {500}), Tensor("b", {499})}, options);
  REQUIRE(small.units.size() == 1);
  CHECK(small.units[0].phases == std::vector<Phase>{Phase{}});
  // Raw bytes: those of the dtype.
  CHECK(Made({Tensor("a", {1000}, DType::kFloat16)}, options).units[0].phases ==
        std::vector<Phase>{Phase{}});
}

TEST_CASE("a warm-up is a phase of none before the steady one", "[plan][unit]") {
  PlanOptions options = Options("onebit", "onebit");
  options.compression.warmup_steps = 100;
  const Plan plan = Made(
      {Tensor("w", {100000}), Tensor("i", {100000}, DType::kInt32), Tensor("tiny", {1})}, options);
  CHECK(plan.units[0].phases ==
        std::vector<Phase>{{0, "none", "none", Feedback::kNone, Feedback::kNone},
                           {100, "onebit", "onebit", Feedback::kEf, Feedback::kEf}});
  CHECK(plan.units[0].PhaseAt(99) == 0);
  CHECK(plan.units[0].PhaseAt(100) == 1);
  CHECK(plan.units[1].phases == std::vector<Phase>{Phase{}});
  CHECK(plan.units[2].phases == std::vector<Phase>{Phase{}});
}

TEST_CASE("feedback is resolved for each direction", "[plan][unit]") {
  struct Row {
    const char* compressor;
    FeedbackMode mode;
    Feedback expected;
  };
  for (const Row& row : {Row{"none", FeedbackMode::kAuto, Feedback::kNone},
                         Row{"none", FeedbackMode::kEf, Feedback::kNone},
                         Row{"fp16", FeedbackMode::kAuto, Feedback::kNone},
                         Row{"fp16", FeedbackMode::kEf, Feedback::kEf},
                         Row{"bf16", FeedbackMode::kAuto, Feedback::kNone},
                         Row{"bf16", FeedbackMode::kOff, Feedback::kNone},
                         Row{"onebit", FeedbackMode::kAuto, Feedback::kEf},
                         Row{"onebit", FeedbackMode::kOff, Feedback::kNone},
                         Row{"onebit", FeedbackMode::kEf, Feedback::kEf},
                         Row{"topk", FeedbackMode::kAuto, Feedback::kEf},
                         Row{"topk", FeedbackMode::kOff, Feedback::kNone},
                         Row{"topk", FeedbackMode::kEfLr, Feedback::kEfLr},
                         Row{"fp16", FeedbackMode::kEfLr, Feedback::kEfLr},
                         Row{"none", FeedbackMode::kEfLr, Feedback::kNone}}) {
    CAPTURE(row.compressor, static_cast<int>(row.mode));
    PlanOptions options = Options("none", "onebit");
    options.compression.uplink = Link(row.compressor, row.mode);
    const Plan up = Made({Tensor("w", {100000})}, options);
    CHECK(up.units[0].phases[0].uplink_feedback == row.expected);
    CHECK(up.units[0].phases[0].downlink_feedback == Feedback::kEf);
    options = Options("onebit", "none");
    options.compression.downlink = Link(row.compressor, row.mode);
    const Plan down = Made({Tensor("w", {100000})}, options);
    CHECK(down.units[0].phases[0].downlink_feedback == row.expected);
    CHECK(down.units[0].phases[0].uplink_feedback == Feedback::kEf);
  }
}

TEST_CASE("the same summable compressor both ways leaves nothing over on the server",
          "[plan][unit]") {
  const auto downlink_feedback = [](const char* up, const char* down, FeedbackMode mode) {
    PlanOptions options = Options(up, down);
    options.compression.downlink.feedback = mode;
    return Made({Tensor("w", {100000})}, options).units[0].phases[0].downlink_feedback;
  };
  CHECK(downlink_feedback("randomk", "randomk", FeedbackMode::kAuto) == Feedback::kNone);
  CHECK(downlink_feedback("randomk", "randomk", FeedbackMode::kEf) == Feedback::kEf);
  CHECK(downlink_feedback("randomk", "randomk(ratio=0.1)", FeedbackMode::kAuto) == Feedback::kEf);
  CHECK(downlink_feedback("none", "randomk", FeedbackMode::kAuto) == Feedback::kEf);
  CHECK(downlink_feedback("topk", "topk", FeedbackMode::kAuto) == Feedback::kEf);
}

TEST_CASE("feedback that could grow for ever is refused by name, with the bound", "[plan][unit]") {
  const std::vector<TensorDeclaration> batch = {Tensor("w", {300, 1000})};
  for (const bool down : {false, true}) {
    for (const std::string written :
         {"terngrad", "dithering(bits=5)", "dithering(bits=3,levels=natural,norm=l2)"}) {
      PlanOptions options = Options("none", "none");
      LinkCompression& link = down ? options.compression.downlink : options.compression.uplink;
      link = Link(written, FeedbackMode::kEf);
      const auto plan = ExtendPlan(EmptyPlan(options), batch, options, BuiltinCompressors());
      CAPTURE(written, down, plan.status().ToString());
      REQUIRE(plan.status().code() == StatusCode::kInvalidArgument);
      for (const std::string& part :
           {std::string("'w'"), std::string(down ? "downlink" : "uplink"), written,
            std::string("262144 elements"), std::string("expected below 1")}) {
        CHECK(plan.status().message().find(part) != std::string::npos);
      }
      link.feedback = FeedbackMode::kAuto;
      CHECK(ExtendPlan(EmptyPlan(options), batch, options, BuiltinCompressors()).ok());
    }
    // Where the bound is below 1 it may be had.
    for (const std::string written : {"natural", "int8(stochastic=true)", "dithering(bits=16)"}) {
      PlanOptions options = Options("none", "none");
      (down ? options.compression.downlink : options.compression.uplink) =
          Link(written, FeedbackMode::kEf);
      const auto plan = ExtendPlan(EmptyPlan(options), batch, options, BuiltinCompressors());
      CAPTURE(written, down, plan.status().ToString());
      CHECK(plan.ok());
    }
  }
}

TEST_CASE("integers and broadcasts go as none, floats of any size are compressed", "[plan][unit]") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                            DType::kInt8, DType::kUInt8, DType::kInt32, DType::kInt64}) {
    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kBroadcast}) {
      CAPTURE(DTypeName(dtype), ReduceOpName(op));
      PlanOptions options = Options("onebit", "onebit");
      options.compression.rules = {{"*", Link("topk"), std::nullopt}};
      const Plan plan = Made({Tensor("w", {1000000}, dtype, op)}, options);
      CheckCovers(plan);
      const bool compressed = IsFloat(dtype) && op != ReduceOp::kBroadcast;
      const std::vector<Phase> expected = {
          compressed ? Phase{0, "topk", "onebit", Feedback::kEf, Feedback::kEf} : Phase{}};
      for (const Unit& unit : plan.units) {
        if (unit.raw_bytes() >= options.compression.min_bytes) CHECK(unit.phases == expected);
      }
      CHECK(plan.units.front().num_elements == (compressed ? 524288 : 262144));
    }
  }
}

TEST_CASE("units are the same whatever the number of workers, servers and lanes", "[plan][unit]") {
  PlanOptions options = Options("onebit", "topk(ratio=0.01)");
  const std::vector<Unit> expected = WithoutPlacement(Made(ResNetLike(), options));
  for (const std::uint32_t servers : {1U, 2U, 3U, 16U}) {
    for (const std::uint32_t lanes : {1U, 2U, 5U}) {
      CAPTURE(servers, lanes);
      options.num_workers = servers + lanes;
      options.num_servers = servers;
      options.lanes_per_server = lanes;
      const Plan plan = Made(ResNetLike(), options);
      CHECK(WithoutPlacement(plan) == expected);
      CheckCovers(plan);
    }
  }
}

TEST_CASE("adding tensors moves nothing", "[plan][unit]") {
  PlanOptions options = Options("onebit", "onebit");
  options.num_servers = 3;
  options.lanes_per_server = 2;
  const std::vector<TensorDeclaration> all = ResNetLike();
  Plan plan = EmptyPlan(options);
  CounterRng random(7);
  std::size_t next = 0;
  while (next < all.size()) {
    const std::size_t count = std::min<std::size_t>(random.NextBelow(20), all.size() - next);
    const Plan larger = Extended(plan,
                                 {all.begin() + static_cast<std::ptrdiff_t>(next),
                                  all.begin() + static_cast<std::ptrdiff_t>(next + count)},
                                 options);
    CHECK(larger.version == plan.version + 1);
    REQUIRE(larger.units.size() >= plan.units.size());
    CHECK(std::equal(plan.units.begin(), plan.units.end(), larger.units.begin()));
    CHECK(std::equal(plan.tensors.begin(), plan.tensors.end(), larger.tensors.begin()));
    plan = larger;
    next += count;
  }
  CheckCovers(plan);
}

TEST_CASE("bytes are even over servers and lanes", "[plan][unit]") {
  for (const char* compressor : {"none", "fp16", "onebit", "topk(ratio=0.01)"}) {
    for (const auto& [servers, lanes] : {std::pair{2, 1}, std::pair{4, 1}, std::pair{2, 2}}) {
      CAPTURE(compressor, servers, lanes);
      PlanOptions options = Options(compressor, compressor);
      options.num_servers = static_cast<std::uint32_t>(servers);
      options.lanes_per_server = static_cast<std::uint32_t>(lanes);
      options.compression.rules = {{"*.norm.*", Link("none"), Link("none")}};
      // A broadcast of all parameters before must not unbalance what comes every step.
      std::vector<TensorDeclaration> parameters = ResNetLike();
      for (TensorDeclaration& tensor : parameters) {
        tensor.name += "/initial";
        tensor.op = ReduceOp::kBroadcast;
      }
      const Plan plan = Extended(Made(parameters, options), ResNetLike(), options);
      std::vector<double> load(static_cast<std::size_t>(servers * lanes), 0);
      double total = 0;
      for (const Unit& unit : plan.units) {
        if (unit.op == ReduceOp::kBroadcast) continue;
        const auto bytes = WireBytes(unit, unit.phases.back(), BuiltinCompressors());
        REQUIRE(bytes.ok());
        const auto sum = static_cast<double>(bytes->uplink + bytes->downlink);
        load[unit.server * options.lanes_per_server + unit.lane] += sum;
        total += sum;
      }
      const double mean = total / static_cast<double>(load.size());
      CHECK(*std::max_element(load.begin(), load.end()) <= 1.1 * mean);
    }
  }
}

TEST_CASE("the bytes of a unit are those of its payloads", "[plan][unit]") {
  const auto bytes_of = [](DType dtype, const char* uplink, const char* downlink) {
    Unit unit;
    unit.num_elements = 1000;
    unit.dtype = dtype;
    const auto bytes = WireBytes(unit, {0, uplink, downlink}, BuiltinCompressors());
    REQUIRE(bytes.ok());
    return std::pair{bytes->uplink, bytes->downlink};
  };
  using Pair = std::pair<std::uint64_t, std::uint64_t>;
  CHECK(bytes_of(DType::kFloat32, "none", "onebit") == Pair{4000, 129});
  CHECK(bytes_of(DType::kFloat16, "none", "fp16") == Pair{2000, 2000});
  CHECK(bytes_of(DType::kBFloat16, "onebit", "none") == Pair{129, 2000});
  CHECK(bytes_of(DType::kInt8, "none", "none") == Pair{1000, 1000});
  // fp64 is summed in its own precision only if nothing is compressed.
  CHECK(bytes_of(DType::kFloat64, "none", "none") == Pair{8000, 8000});
  CHECK(bytes_of(DType::kFloat64, "none", "onebit") == Pair{4000, 129});
  const auto unknown = WireBytes(Unit{}, {0, "zip", "none"}, BuiltinCompressors());
  REQUIRE_FALSE(unknown.ok());
  CHECK(unknown.status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE("what cannot be planned is refused by name and changes nothing", "[plan][unit]") {
  const PlanOptions options = Options("onebit", "onebit");
  CHECK(Refusal({Tensor("a", {1}), Tensor("a", {1})}, options) == "tensor 'a' is declared twice");
  const Plan plan = Made({Tensor("a", {1})}, options);
  const auto again = ExtendPlan(plan, std::vector{Tensor("a", {2})}, options, BuiltinCompressors());
  REQUIRE_FALSE(again.ok());
  CHECK(again.status().message() == "tensor 'a' is declared twice");

  CHECK(Refusal({Tensor("", {1})}, options) == "a tensor is declared without a name");
  CHECK(Refusal({Tensor(std::string(2000, 'n'), {1})}, options).find("has a name of 2000 bytes") !=
        std::string::npos);
  CHECK(Refusal({Tensor("d", {1}, static_cast<DType>(99))}, options) ==
        "tensor 'd' has the dtype number 99, which is none");
  CHECK(Refusal({Tensor("o", {1}, DType::kFloat32, static_cast<ReduceOp>(9))}, options) ==
        "tensor 'o' has the operation number 9, which is none");
  CHECK(Refusal({Tensor("huge", {0, 1ULL << 40, 1ULL << 40})}, options) ==
        "tensor 'huge' of shape [0, 1099511627776, 1099511627776] takes more than "
        "4611686018427387904 bytes");
  CHECK(Refusal({Tensor("large", {1ULL << 55})}, options) ==
        "tensor 'large' would bring the plan beyond 262144 units; a larger partition.bytes makes "
        "fewer");

  const std::string unknown = Refusal({Tensor("w", {1})}, Options("zip", "none"));
  CHECK(unknown.find("tensor 'w', uplink: ") == 0);
  CHECK(unknown.find("zip") != std::string::npos);
  CHECK(Refusal({Tensor("w", {1})}, Options("none", "topk(ratio=5)"))
            .find("tensor 'w', downlink: ") == 0);

  PlanOptions other = options;
  other.num_servers = 2;
  const auto mismatch = ExtendPlan(plan, {}, other, BuiltinCompressors());
  REQUIRE_FALSE(mismatch.ok());
  CHECK(mismatch.status().message() ==
        "the plan is for 1 workers, 1 servers and 1 lanes, the options say 1, 2 and 1");
}

TEST_CASE("an empty batch is a version without new units", "[plan][unit]") {
  const PlanOptions options = Options();
  const Plan plan = Made({}, options);
  CHECK(plan.version == 1);
  CHECK(plan.units.empty());
  CHECK(Made({Tensor("empty", {0}), Tensor("e2", {3, 0})}, options).units.empty());
}

TEST_CASE("tensors beyond 2^32 elements are planned", "[plan][unit]") {
  PlanOptions options = Options();
  options.partition_bytes = std::uint64_t{1} << 30;
  const std::uint64_t n = (std::uint64_t{1} << 33) + 5;
  const Plan plan = Made({Tensor("w", {n})}, options);
  CheckCovers(plan);
  CHECK(plan.units.back().members[0].tensor_offset == std::uint64_t{1} << 33);
  CHECK(plan.units.back().num_elements == 5);
}

// ---- Replay -------------------------------------------------------------------------------------

Plan Replayed(const Plan& plan, const std::vector<TensorDeclaration>& batch, const Plan& saved,
              const PlanOptions& options) {
  auto next = ReplayPlan(plan, batch, saved, options);
  INFO(next.status().ToString());
  REQUIRE(next.ok());
  return *next;
}

std::string ReplayRefusal(const Plan& plan, const std::vector<TensorDeclaration>& batch,
                          const Plan& saved, const PlanOptions& options) {
  const auto next = ReplayPlan(plan, batch, saved, options);
  REQUIRE_FALSE(next.ok());
  CHECK(next.status().code() == StatusCode::kInvalidArgument);
  return next.status().message();
}

TEST_CASE("a saved plan is replayed whatever the options say now", "[plan][unit]") {
  PlanOptions options = Options("onebit", "topk(ratio=0.01)");
  options.num_servers = 3;
  options.compression.warmup_steps = 4;
  const std::vector<TensorDeclaration> first = {Tensor("a", {1000000}), Tensor("b", {10})};
  const std::vector<TensorDeclaration> second = {Tensor("c", {3}), Tensor("none", {0}),
                                                 Tensor("d", {300000})};
  const Plan saved = Extended(Made(first, options), second, options);

  PlanOptions now = Options("fp16", "fp16");
  now.num_servers = 3;
  now.partition_bytes = 16384;
  const Plan one = Replayed(EmptyPlan(now), first, saved, now);
  CHECK(one.version == 1);
  CHECK(one.tensors == first);
  CheckCovers(one);
  CHECK(Replayed(one, second, saved, now) == saved);
  CHECK(Replayed(one, {}, saved, now).units == one.units);
}

TEST_CASE("a saved plan of another job is refused by name", "[plan][unit]") {
  const PlanOptions options = Options("onebit", "onebit");
  const std::vector<TensorDeclaration> tensors = {Tensor("a", {10}), Tensor("b", {20}),
                                                  Tensor("w", {100000})};
  const Plan saved = Made(tensors, options);
  const Plan empty = EmptyPlan(options);
  CHECK(ReplayRefusal(empty, {Tensor("x", {10})}, saved, options) ==
        "tensor 'x', number 0 of the job: name is 'a' in the saved plan, 'x' in the job");
  CHECK(ReplayRefusal(empty, {Tensor("a", {10}), Tensor("b", {21})}, saved, options) ==
        "tensor 'b', number 1 of the job: shape is [20] in the saved plan, [21] in the job");
  CHECK(ReplayRefusal(empty, {Tensor("a", {10}, DType::kFloat16)}, saved, options) ==
        "tensor 'a', number 0 of the job: dtype is float32 in the saved plan, float16 in the job");
  std::vector<TensorDeclaration> more = tensors;
  more.push_back(Tensor("z", {1}));
  CHECK(ReplayRefusal(empty, more, saved, options) ==
        "tensor 'z' is number 3 of the job, the saved plan has 3 tensors");
  // a and b were fused; declared one after the other they can't be.
  CHECK(ReplayRefusal(empty, {tensors[0]}, saved, options) ==
        "the saved plan fuses tensor 'b' with tensors that the job declares at another time");

  PlanOptions other = options;
  other.num_workers = 5;
  CHECK(ReplayRefusal(EmptyPlan(other), tensors, saved, other) ==
        "the saved plan is for 1 workers, the job has 5");
  other = options;
  other.lanes_per_server = 2;
  CHECK(ReplayRefusal(EmptyPlan(other), tensors, saved, other) ==
        "the saved plan is for 1 lanes a server, the job has 2");

  Plan changed = saved;
  changed.units[1].phases[0].uplink = "zip";
  const std::string unknown = ReplayRefusal(empty, tensors, changed, options);
  CHECK(unknown.find("the saved plan, tensor 'w': ") == 0);

  const Plan integers = Made({Tensor("i", {100000}, DType::kInt32)}, options);
  changed = integers;
  changed.units[0].phases[0].uplink = "onebit";
  CHECK(ReplayRefusal(empty, integers.tensors, changed, options) ==
        "the saved plan compresses tensor 'i', but a tensor of int32 to average goes as none");
}

TEST_CASE("a saved plan whose units are out of order is refused", "[plan][unit]") {
  PlanOptions options = Options();
  options.fuse_below = 0;
  const std::vector<TensorDeclaration> tensors = {Tensor("a", {5}), Tensor("b", {6})};
  Plan saved = Made(tensors, options);
  std::swap(saved.units[0].members, saved.units[1].members);
  std::swap(saved.units[0].num_elements, saved.units[1].num_elements);
  REQUIRE(ParsePlan(Serialize(saved)).ok());
  CHECK(ReplayRefusal(EmptyPlan(options), {tensors[0]}, saved, options) ==
        "the saved plan keeps units of tensor 'a' among those of later tensors");
  CHECK(ReplayPlan(EmptyPlan(options), tensors, saved, options).ok());
}

// ---- Files --------------------------------------------------------------------------------------

class TemporaryFile {
 public:
  TemporaryFile()
      : path_(std::filesystem::temp_directory_path() /
              ("gradwire-plan-test-" + std::to_string(RandomId()))) {}
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  std::string path() const { return path_.string(); }

  std::string Read() const {
    std::ifstream file(path_, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void Write(const std::string& text) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
  }

 private:
  std::filesystem::path path_;
};

TEST_CASE("a plan is saved and loaded", "[plan][unit]") {
  PlanOptions options = Options("onebit", "topk(ratio=0.01)");
  options.num_servers = 2;
  options.compression.warmup_steps = 7;
  const Plan plan = Made(ResNetLike(), options);
  const TemporaryFile file;
  REQUIRE(SavePlan(plan, file.path()) == Status::Ok());
  auto loaded = LoadPlan(file.path());
  REQUIRE(loaded.ok());
  CHECK(*loaded == plan);
  // Over an older one, and nothing else is left beside it.
  const Plan other = Made({Tensor("w", {3})}, options);
  REQUIRE(SavePlan(other, file.path()) == Status::Ok());
  loaded = LoadPlan(file.path());
  REQUIRE(loaded.ok());
  CHECK(*loaded == other);
  const std::filesystem::path path(file.path());
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(path.filename().string())) CHECK(name == path.filename().string());
  }
}

TEST_CASE("a damaged plan file is refused as corrupt", "[plan][fuzz]") {
  const Plan plan = Made({Tensor("a", {100000}), Tensor("b", {3})}, Options("onebit", "onebit"));
  const TemporaryFile file;
  REQUIRE(SavePlan(plan, file.path()) == Status::Ok());
  const std::string good = file.Read();
  const auto refusal = [&](const std::string& bytes) {
    file.Write(bytes);
    const auto loaded = LoadPlan(file.path());
    REQUIRE_FALSE(loaded.ok());
    CHECK(loaded.status().code() == StatusCode::kCorruptData);
    CHECK(loaded.status().message().find(file.path()) != std::string::npos);
    return loaded.status().message();
  };
  for (std::size_t size = 0; size < good.size(); ++size) {
    CAPTURE(size);
    (void)refusal(good.substr(0, size));
  }
  for (std::size_t at = 0; at < good.size(); ++at) {
    CAPTURE(at);
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
    (void)refusal(bytes);
  }
  CHECK(refusal(good + "x").find("it is cut or has grown") != std::string::npos);
  CHECK(refusal("something else entirely, longer than a head") ==
        "'" + file.path() + "' is not a saved plan");
}

TEST_CASE("a plan file that is whole but no plan is refused with the field", "[plan][unit]") {
  Plan plan = Made({Tensor("a", {100000})}, Options());
  plan.units[0].server = 4;
  const TemporaryFile file;
  REQUIRE(SavePlan(plan, file.path()) == Status::Ok());
  const auto loaded = LoadPlan(file.path());
  REQUIRE_FALSE(loaded.ok());
  CHECK(loaded.status().code() == StatusCode::kCorruptData);
  CHECK(loaded.status().message().find("plan.units[0].server") != std::string::npos);
}

TEST_CASE("plan files that cannot be opened are named with the reason", "[plan][unit]") {
  const Plan plan = Made({}, Options());
  const Status saved = SavePlan(plan, "/nonexistent/folder/x.plan");
  CHECK(saved.code() == StatusCode::kUnavailable);
  CHECK(saved.message() ==
        "cannot write plan '/nonexistent/folder/x.plan': No such file or directory");
  const auto loaded = LoadPlan("/nonexistent/x.plan");
  REQUIRE_FALSE(loaded.ok());
  CHECK(loaded.status().code() == StatusCode::kUnavailable);
  CHECK(loaded.status().message() ==
        "cannot read plan '/nonexistent/x.plan': No such file or directory");
  const auto directory = LoadPlan("/");
  REQUIRE_FALSE(directory.ok());
  CHECK(directory.status().message() == "cannot read plan '/': Is a directory");
}

TEST_CASE("a plan is written as JSON for programs", "[plan][unit]") {
  PlanOptions options = Options("onebit", "fp16");
  options.num_workers = 2;
  options.compression.warmup_steps = 10;
  const Plan plan = Made({Tensor("w\"\n", {300000}, DType::kFloat32, ReduceOp::kAverage, 5),
                          Tensor("x", {3}, DType::kInt64, ReduceOp::kSum),
                          Tensor("y", {2}, DType::kInt64, ReduceOp::kSum)},
                         options);
  const std::string phases =
      R"__("phases":[{"first_step":0,"uplink":"none","uplink_class":"exact","uplink_feedback":"none",)__"
      R"__("downlink":"none","downlink_class":"exact","downlink_feedback":"none"},)__"
      R"__({"first_step":10,"uplink":"onebit","uplink_class":"contractive","uplink_feedback":"ef",)__"
      R"__("downlink":"fp16","downlink_class":"contractive","downlink_feedback":"none"}]})__";
  CHECK(
      PlanToJson(plan) ==
      R"__({"version":1,"workers":2,"servers":1,"lanes":1,"filter":null,"units":[)__"
      R"__({"key":0,"elements":262144,"dtype":"float32","op":"average","priority":5,"server":0,"lane":0,"filter_classes":[],)__"
      R"__("members":[{"tensor":"w\"\n","offset":0,"elements":262144}],)__" +
          phases +
          R"__(,{"key":1,"elements":37856,"dtype":"float32","op":"average","priority":5,"server":0,"lane":0,"filter_classes":[],)__"
          R"__("members":[{"tensor":"w\"\n","offset":262144,"elements":37856}],)__" +
          phases +
          R"__(,{"key":2,"elements":5,"dtype":"int64","op":"sum","priority":0,"server":0,"lane":0,"filter_classes":[],)__"
          R"__("members":[{"tensor":"x","offset":0,"elements":3},{"tensor":"y","offset":0,"elements":2}],)__"
          R"__("phases":[{"first_step":0,"uplink":"none","uplink_class":"exact","uplink_feedback":"none",)__"
          R"__("downlink":"none","downlink_class":"exact","downlink_feedback":"none"}]}]})__");

  Plan unknown = Made({Tensor("w", {30000})}, Options());
  unknown.units[0].phases[0].uplink = "zip(level=9)";
  CHECK(PlanToJson(unknown).find(R"__("uplink":"zip(level=9)","uplink_class":null)__") !=
        std::string::npos);
  CHECK(PlanToJson(Made({}, Options())).find(R"("units":[]})") != std::string::npos);
}

// ---- Descriptions -------------------------------------------------------------------------------

TEST_CASE("a plan is described unit by unit and lane by lane", "[plan][unit]") {
  PlanOptions options = Options("onebit", "fp16");
  options.num_workers = 2;
  options.num_servers = 2;
  const Plan plan = Made({Tensor("w", {300000}, DType::kFloat32, ReduceOp::kAverage, 5),
                          Tensor("p", {8}, DType::kFloat32, ReduceOp::kBroadcast),
                          Tensor("x", {3}, DType::kInt64, ReduceOp::kSum)},
                         options);
  CHECK(DescribePlan(plan) ==
        R"__(plan version 1 for 2 workers: 3 tensors in 4 units
key  elements  priority  server  lane  dtype    operation  uplink     downlink  tensors
  0    262144         5       0     0  float32  average    onebit+ef  fp16      'w'[0:262144]
  1     37856         5       1     0  float32  average    onebit+ef  fp16      'w'[262144:300000]
  2         8         0       0     0  float32  broadcast  none       none      'p'
  3         3         0       1     0  int64    sum        none       none      'x'

of one worker in one round, without broadcasts:
server  lane  units  broadcasts  uplink bytes  downlink bytes
     0     0      1           1         32772          524288
     1     0      2           0          4760           75736
)__");
  CHECK(
      SummarizePlan(plan) ==
      "plan version 1: tensors: 1 averaged, 1 summed, 1 broadcast; 4 units, 1.1 MiB of gradients a "
      "step; 2 workers, 2 servers of "
      "1 lanes\n"
      "a worker sends 36.7 KiB (1/32.0) and receives 586.0 KiB (1/2.0) a step; heaviest lane 1.75 "
      "of the mean");

  options.compression.warmup_steps = 10;
  const std::string phases = DescribePlan(Made({Tensor("w", {30000})}, options));
  CHECK(phases.find(" none until step 10, then onebit+ef  none until step 10, then fp16  'w'\n") !=
        std::string::npos);
}

TEST_CASE("every unit fits into a frame, and one of a saved plan that does not is named",
          "[plan][unit]") {
  for (const std::uint64_t partition : {std::uint64_t{0}, std::uint64_t{16} << 10,
                                        std::uint64_t{4} << 20, std::uint64_t{64} << 20}) {
    for (const char* compressor : {"none", "onebit", "topk(ratio=1)"}) {
      PlanOptions options = Options();
      options.partition_bytes = partition;
      options.compression.uplink.compressor = *ParseCompressorSpec(compressor);
      TensorDeclaration doubles = Tensor("d", {30'000'000});
      doubles.dtype = DType::kFloat64;
      const Plan plan = Made({Tensor("w", {30'000'000}), doubles}, options);
      CHECK(CheckFrames(plan, MaxFrameBytes(partition), BuiltinCompressors()) == Status::Ok());
    }
  }
  CHECK(MaxFrameBytes(0) == kMaxControlBytes);
  CHECK(MaxFrameBytes(std::uint64_t{1} << 40) == std::size_t{1} << 31);
  PlanOptions large = Options();
  large.partition_bytes = std::uint64_t{256} << 20;
  const Status status =
      CheckFrames(Made({Tensor("w", {60'000'000})}, large), MaxFrameBytes(0), BuiltinCompressors());
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK(status.message().starts_with("tensor 'w' (key 0) takes up to 240000000 bytes"));
}

TEST_CASE("a plan with an unknown compressor is described all the same", "[plan][unit]") {
  Plan plan = Made({Tensor("w", {100000})}, Options());
  plan.units[0].phases[0].uplink = "zip(level=9)";
  CHECK(DescribePlan(plan).find("zip(level=9)") != std::string::npos);
  CHECK(SummarizePlan(plan).find("sends 390.6 KiB (1/1.0)") != std::string::npos);
  CHECK(SummarizePlan(EmptyPlan(Options())).find("tensors: none; 0 units") != std::string::npos);
}

TEST_CASE("declarations that differ are described with both values", "[plan][unit]") {
  const TensorDeclaration a = Tensor("t", {3}, DType::kFloat32, ReduceOp::kAverage, 1);
  CHECK(DescribeDifference(a, 0, a, 1).empty());
  CHECK(DescribeDifference(a, 0, Tensor("t", {4}, DType::kFloat32, ReduceOp::kAverage, 1), 1) ==
        "shape is [3] on rank 0, [4] on rank 1");
  CHECK(
      DescribeDifference(a, 2, Tensor("u", {3, 1}, DType::kInt8, ReduceOp::kSum, 0), 7) ==
      "name is 't' on rank 2, 'u' on rank 7; dtype is float32 on rank 2, int8 on rank 7; shape is "
      "[3] on rank 2, [3, 1] on rank 7; priority is 1 on rank 2, 0 on rank 7; operation is "
      "average on rank 2, sum on rank 7");
}

// ---- The filter ---------------------------------------------------------------------------------

PlanOptions FilterOptions(std::uint32_t interval, FilterAssign assign = FilterAssign::kBalanced) {
  PlanOptions options = Options();
  options.compression.filter.type = FilterType::kCovap;
  options.compression.filter.interval = interval;
  options.compression.filter.assign = assign;
  return options;
}

/// Bytes of the heaviest class over the mean of all.
double HeaviestClass(const Plan& plan, std::uint32_t interval) {
  std::vector<double> loads(interval, 0);
  for (const Unit& unit : plan.units) {
    REQUIRE(unit.filter_classes.size() == plan.filter.stages.size());
    loads.at(unit.filter_classes.back()) += static_cast<double>(unit.raw_bytes());
  }
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  return *std::max_element(loads.begin(), loads.end()) / (total / interval);
}

TEST_CASE("balanced classes of every model list are within a tenth of their mean",
          "[plan][covap]") {
  int lists = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(GRADWIRE_SOURCE_DIR "/configs/models")) {
    const auto tensors = ReadModelList(entry.path().string());
    REQUIRE(tensors.ok());
    ++lists;
    for (std::uint32_t interval = 2; interval <= 16; ++interval) {
      const Plan plan = Made(*tensors, FilterOptions(interval));
      CAPTURE(entry.path().string(), interval, plan.units.size());
      CHECK(HeaviestClass(plan, interval) <= 1.1);
    }
  }
  CHECK(lists > 0);
  CHECK(HeaviestClass(Made(ResNetLike(), FilterOptions(16)), 16) <= 1.1);
}

TEST_CASE("each balanced class is placed evenly on servers and lanes", "[plan][covap]") {
  PlanOptions options = FilterOptions(4);
  options.num_servers = 2;
  options.lanes_per_server = 2;
  const Plan plan = Made(ResNetLike(), options);
  CheckCovers(plan);
  std::map<std::uint32_t, std::map<std::uint32_t, double>> loads;  // class, lane
  for (const Unit& unit : plan.units) {
    loads[unit.filter_classes.back()][2 * unit.server + unit.lane] +=
        static_cast<double>(unit.raw_bytes());
  }
  REQUIRE(loads.size() == 4);
  for (const auto& [filter_class, lanes] : loads) {
    CAPTURE(filter_class);
    REQUIRE(lanes.size() == 4);
    double total = 0;
    double heaviest = 0;
    for (const auto& [lane, bytes] : lanes) {
      total += bytes;
      heaviest = std::max(heaviest, bytes);
    }
    CHECK(heaviest / (total / 4) < 1.25);  // some twenty units of up to 1 MiB in a class
  }
}

TEST_CASE("tensors that come later leave the classes there are alone", "[plan][covap]") {
  const auto assign = GENERATE(FilterAssign::kBalanced, FilterAssign::kIndex);
  const PlanOptions options = FilterOptions(3, assign);
  const Plan first = Made({Tensor("a", {600000}), Tensor("b", {300000})}, options);
  const Plan second = Extended(first, {Tensor("c", {900000})}, options);
  REQUIRE(second.units.size() > first.units.size());
  for (std::size_t i = 0; i < first.units.size(); ++i) CHECK(second.units[i] == first.units[i]);
  CHECK(HeaviestClass(second, 3) < 1.35);
  CheckCovers(second);
}

TEST_CASE("index numbers units in the order of the backward pass", "[plan][covap]") {
  PlanOptions options = FilterOptions(3, FilterAssign::kIndex);
  options.fuse_below = 0;
  // The first tensor is needed first, so its gradient comes last.
  const Plan plan = Made({Tensor("a", {100}, DType::kFloat32, ReduceOp::kAverage, 4),
                          Tensor("b", {100}, DType::kFloat32, ReduceOp::kAverage, 3),
                          Tensor("c", {100}, DType::kFloat32, ReduceOp::kSum, 2),
                          Tensor("d", {100}, DType::kFloat32, ReduceOp::kAverage, 1)},
                         options);
  std::vector<std::uint32_t> classes;
  for (const Unit& unit : plan.units) classes.push_back(unit.filter_classes.at(0));
  CHECK(classes == std::vector<std::uint32_t>{0, 2, 1, 0});
}

TEST_CASE("index cuts units above the median, at most into as many shards as there are classes",
          "[plan][covap]") {
  PlanOptions options = FilterOptions(4, FilterAssign::kIndex);
  options.fuse_below = 0;
  constexpr std::uint64_t kBlock = kBlockElements;
  const Plan plan = Made(
      {Tensor("median", {2 * kBlock}), Tensor("small", {2 * kBlock}), Tensor("five", {10 * kBlock}),
       Tensor("two", {4 * kBlock + 5}), Tensor("same", {2 * kBlock})},
      options);
  CheckCovers(plan);
  std::map<std::string, std::vector<std::uint64_t>> shards;
  for (const Unit& unit : plan.units) {
    shards[plan.tensors[unit.members[0].tensor].name].push_back(unit.num_elements);
  }
  CHECK(shards["median"] == std::vector<std::uint64_t>{2 * kBlock});
  // floor(5 + 0.7), at most 4: blocks 0-2, 2-5, 5-7, 7-10.
  CHECK(shards["five"] ==
        std::vector<std::uint64_t>{2 * kBlock, 3 * kBlock, 2 * kBlock, 3 * kBlock});
  CHECK(shards["two"] == std::vector<std::uint64_t>{2 * kBlock, 2 * kBlock + 5});
  // What is fused is cut too, where one of its members may have to be.
  options.fuse_below = 1 << 20;
  const Plan fused = Made({Tensor("x", {60 * kBlock}), Tensor("y", {30 * kBlock}),
                           Tensor("z", {9 * kBlock}, DType::kFloat16)},
                          options);
  CheckCovers(fused);
  CHECK(fused.units.size() > 3);
}

TEST_CASE("integers, broadcasts, plain fp64 and what a rule exempts are not filtered",
          "[plan][covap]") {
  PlanOptions options = FilterOptions(2);
  options.compression.rules = {{"head*", std::nullopt, std::nullopt, false}};
  const std::vector<TensorDeclaration> tensors = {
      Tensor("w", {100000}),
      Tensor("half", {100000}, DType::kFloat16),
      Tensor("double", {100000}, DType::kFloat64),
      Tensor("count", {100000}, DType::kInt64, ReduceOp::kSum),
      Tensor("start", {100000}, DType::kFloat32, ReduceOp::kBroadcast),
      Tensor("head.weight", {100000}),
      Tensor("head.bias", {10}),
      Tensor("bias", {10})};
  const Plan plan = Made(tensors, options);
  CheckCovers(plan);
  std::map<std::string, bool> filtered;
  for (const Unit& unit : plan.units) {
    for (const UnitMember& member : unit.members) {
      filtered[plan.tensors[member.tensor].name] = !unit.filter_classes.empty();
    }
  }
  CHECK(filtered == std::map<std::string, bool>{{"w", true},
                                                {"half", true},
                                                {"double", false},
                                                {"count", false},
                                                {"start", false},
                                                {"head.weight", false},
                                                {"head.bias", false},
                                                {"bias", true}});
  // With a compressor fp64 is summed in fp32 anyway.
  options.compression.uplink = Link("onebit");
  const Plan compressed = Made({tensors[2]}, options);
  CHECK_FALSE(compressed.units[0].filter_classes.empty());
}

TEST_CASE("nothing is filtered while nothing is compressed", "[plan][covap]") {
  PlanOptions options = FilterOptions(16);
  options.compression.warmup_steps = 20;
  options.compression.filter.step = 0.25;
  const Plan plan = Made({Tensor("w", {100000})}, options);
  CHECK(plan.filter.stages == std::vector<FilterStage>{{0, 1, 1, 0, 1}, {20, 16, 0.2, 0.25, 100}});
  for (std::uint64_t step = 0; step < 20; ++step) CHECK(IsActive(plan.filter, plan.units[0], step));
  CHECK_FALSE(MayHoldBack(plan.filter, plan.units[0], 19));
  CHECK(MayHoldBack(plan.filter, plan.units[0], 20));
  int active = 0;
  for (std::uint64_t step = 20; step < 36; ++step) {
    active += IsActive(plan.filter, plan.units[0], step);
    CHECK(IsActive(plan.filter, plan.units[0], step) ==
          (ActiveClass(16, step) == plan.units[0].filter_classes[1]));
  }
  CHECK(active == 1);
  CHECK(WeightAt(plan.filter, 99) == 0.2F);
  CHECK(WeightAt(plan.filter, 100) == 0.45F);
}

TEST_CASE("a filter is refused with ef_lr", "[plan][covap]") {
  PlanOptions options = FilterOptions(4);
  options.compression.downlink = Link("onebit", FeedbackMode::kEfLr);
  CHECK(Refusal({Tensor("w", {100000})}, options) ==
        "tensor 'w': filter covap and feedback ef_lr: what the filter holds back is the sum of "
        "gradients of several learning rates, expected feedback auto, off or ef, or filter: none "
        "in a rule");
  options.compression.rules = {{"w", std::nullopt, std::nullopt, false}};
  CHECK(Made({Tensor("w", {100000})}, options).units[0].filter_classes.empty());
}

TEST_CASE("another interval gives units another class and moves none of them", "[plan][covap]") {
  const auto assign = GENERATE(FilterAssign::kBalanced, FilterAssign::kIndex);
  CAPTURE(static_cast<int>(assign));
  PlanOptions options = FilterOptions(0, assign);  // auto: begins with 1
  options.num_servers = 2;
  std::vector<TensorDeclaration> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(
        Tensor(fmt::format("w{}", i), {static_cast<std::uint64_t>(20000 + 3000 * i)}));
  }
  tensors.push_back(Tensor("count", {5}, DType::kInt64));
  const Plan first = Made(tensors, options);
  REQUIRE(first.filter.stages.size() == 1);
  CHECK(first.filter.stages[0].interval == 1);
  CHECK(NumFilteredUnits(first) == first.units.size() - 1);

  Plan plan = first;
  for (const auto& [interval, step] :
       {std::pair{4U, 10ULL}, std::pair{2U, 50ULL}, std::pair{12U, 51ULL}}) {
    CAPTURE(interval);
    const auto next = ChangeInterval(plan, interval, step, options, BuiltinCompressors());
    REQUIRE(next.ok());
    CHECK(next->version == plan.version + 1);
    const FilterStage& stage = next->filter.stages.back();
    CHECK(stage.first_step == step);
    CHECK(stage.interval == interval);
    CHECK(stage.c0 == (interval > 8 ? 0.2 : 0.5));
    // What was holds until then, and nothing else has changed.
    Plan back = *next;
    --back.version;
    back.filter.stages.pop_back();
    for (Unit& unit : back.units) {
      if (!unit.filter_classes.empty()) unit.filter_classes.pop_back();
    }
    CHECK(back == plan);
    // As even on each server as on all.
    std::vector<std::vector<double>> loads(2, std::vector<double>(interval, 0));
    for (const Unit& unit : next->units) {
      if (unit.filter_classes.empty()) continue;
      REQUIRE(unit.filter_classes.size() == next->filter.stages.size());
      loads[unit.server].at(unit.filter_classes.back()) += static_cast<double>(unit.raw_bytes());
    }
    for (const std::vector<double>& load : loads) {
      const double mean = std::accumulate(load.begin(), load.end(), 0.0) / interval;
      CHECK(*std::max_element(load.begin(), load.end()) <
            (assign == FilterAssign::kBalanced ? 1.5 : 3.0) * mean);
    }
    plan = *next;
  }

  const auto refusal = [&](std::uint32_t interval, std::uint64_t step) {
    return ChangeInterval(plan, interval, step, options, BuiltinCompressors()).status().message();
  };
  CHECK(refusal(2, 51) ==
        "an interval of 2 from step 51 on, expected 1 to 256 and a step after 51");
  CHECK(refusal(0, 60) ==
        "an interval of 0 from step 60 on, expected 1 to 256 and a step after 51");
  CHECK(refusal(257, 60).find("an interval of 257") == 0);
  PlanOptions no_filter = Options();
  no_filter.num_servers = 2;
  CHECK(ChangeInterval(Made(tensors, no_filter), 2, 1, no_filter, BuiltinCompressors())
            .status()
            .message() == "the plan has no filter whose interval could change");

  // What is declared later gets a class in every stage, and a replay has them all.
  const TensorDeclaration late = Tensor("late", {50000});
  const auto extended = ExtendPlan(plan, std::span(&late, 1), options, BuiltinCompressors());
  REQUIRE(extended.ok());
  CHECK(extended->units.back().filter_classes.size() == 4);
  const TemporaryFile file;
  REQUIRE(SavePlan(*extended, file.path()) == Status::Ok());
  const auto loaded = LoadPlan(file.path());
  REQUIRE(loaded.ok());
  auto replayed = ReplayPlan(EmptyPlan(options), tensors, *loaded, options);
  REQUIRE(replayed.ok());
  CHECK(replayed->filter == plan.filter);
  CHECK(replayed->units == plan.units);
}

TEST_CASE("a plan holds a thousand changes of the interval and refuses more", "[plan][covap]") {
  const PlanOptions options = FilterOptions(0);
  Plan plan = Made({Tensor("w", {100000})}, options);
  for (std::uint32_t i = 1; i < kMaxFilterStages; ++i) {
    auto next = ChangeInterval(plan, 1 + i % 2, i, options, BuiltinCompressors());
    REQUIRE(next.ok());
    plan = std::move(next).value();
  }
  CHECK(ChangeInterval(plan, 1, 2000, options, BuiltinCompressors()).status().message() ==
        "the interval has changed 1023 times, which is all that a plan holds");
  const auto parsed = ParsePlan(Serialize(plan));
  REQUIRE(parsed.ok());
  CHECK(*parsed == plan);
}

TEST_CASE("a filter is saved, replayed and described with its plan", "[plan][covap]") {
  PlanOptions options = FilterOptions(3);
  options.compression.filter.inactive = FilterInactive::kSkip;
  const std::vector<TensorDeclaration> tensors = {Tensor("w", {900000}),
                                                  Tensor("i", {5}, DType::kInt64)};
  const Plan plan = Made(tensors, options);
  CHECK(plan.filter.skips_inactive);
  const TemporaryFile file;
  REQUIRE(SavePlan(plan, file.path()) == Status::Ok());
  const auto loaded = LoadPlan(file.path());
  REQUIRE(loaded.ok());
  CHECK(*loaded == plan);
  // Whatever the options say.
  const auto replayed = ReplayPlan(EmptyPlan(Options()), tensors, *loaded, Options());
  REQUIRE(replayed.ok());
  CHECK(*replayed == plan);

  CHECK(PlanToJson(plan).find(
            R"__("filter":{"inactive":"skip","stages":[{"first_step":0,"interval":3,"c0":0.5,)__"
            R"__("step":0.1,"every":50}]},"units":[)__") != std::string::npos);
  CHECK(PlanToJson(plan).find(R"__("lane":0,"filter_classes":[0],"members":)__") !=
        std::string::npos);
  const std::string text = DescribePlan(plan);
  INFO(text);
  CHECK(text.find("filter: a filtered unit is sent once in 3 steps\n") != std::string::npos);
  CHECK(text.find("lane  class  dtype") != std::string::npos);
  const std::string summary = SummarizePlan(plan);
  INFO(summary);
  // A third of 3.4 MiB each way, and 40 bytes of integers.
  CHECK(summary.find("sends 1.1 MiB (1/3.0) and receives 1.1 MiB (1/3.0) a step") !=
        std::string::npos);
  CHECK(summary.find("\nfilter: a filtered unit is sent once in 3 steps; heaviest class 1.") !=
        std::string::npos);
}

}  // namespace
}  // namespace gradwire
