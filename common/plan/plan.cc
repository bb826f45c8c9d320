#include "common/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "common/plan/units.h"
#include "common/wire/control.h"
#include "common/wire/header.h"
#include "common/wire/limits.h"

namespace gradwire {
namespace {

constexpr char kNone[] = "none";

/// Compressors by written form, each made once in a call: a plan names few of them many times.
class Codecs {
 public:
  explicit Codecs(const CompressorRegistry& registry) : registry_(registry) {}

  Result<const Compressor*> Get(const std::string& written) {
    if (const auto found = codecs_.find(written); found != codecs_.end()) {
      return found->second.get();
    }
    auto made = registry_.Create(written);
    if (!made.ok()) return InvalidArgument(made.status().message());
    const Compressor* codec = made.value().get();
    codecs_.emplace(written, std::move(made).value());
    return codec;
  }

 private:
  const CompressorRegistry& registry_;
  std::map<std::string, std::unique_ptr<const Compressor>> codecs_;
};

Result<UnitBytes> WireBytesWith(const Unit& unit, const Phase& phase, Codecs& codecs) {
  const bool none_both_ways = phase.uplink == kNone && phase.downlink == kNone;
  UnitBytes bytes;
  for (const auto& [written, target] :
       {std::pair{&phase.uplink, &bytes.uplink}, std::pair{&phase.downlink, &bytes.downlink}}) {
    // `none` is the dtype's own bytes, but fp64 is summed in fp32 if it is compressed one way.
    if (*written == kNone && (unit.dtype != DType::kFloat64 || none_both_ways)) {
      *target = unit.raw_bytes();
      continue;
    }
    const auto codec = codecs.Get(*written);
    if (!codec.ok()) return codec.status();
    *target = (*codec)->MaxEncodedSize(static_cast<std::size_t>(unit.num_elements));
  }
  return bytes;
}

/// What the rules say of one tensor, resolved.
struct Compression {
  Phase steady;
  std::uint64_t unit_elements = 0;
};

struct ResolvedLink {
  std::string written;
  Feedback feedback = Feedback::kNone;
  bool strong = false;  // the payload is less than half of fp32
  bool summable = false;
};

Result<ResolvedLink> ResolveLink(const LinkCompression& link, Codecs& codecs) {
  ResolvedLink resolved;
  resolved.written = ToString(link.compressor);
  const auto codec = codecs.Get(resolved.written);
  if (!codec.ok()) return codec.status();
  const CompressorTraits traits = (*codec)->traits();
  switch (link.feedback) {
    case FeedbackMode::kAuto:
      resolved.feedback = traits.feedback_by_default ? Feedback::kEf : Feedback::kNone;
      break;
    case FeedbackMode::kOff:
      resolved.feedback = Feedback::kNone;
      break;
    case FeedbackMode::kEf:
      resolved.feedback = Feedback::kEf;
      break;
    case FeedbackMode::kEfLr:
      resolved.feedback = Feedback::kEfLr;
      break;
  }
  if (traits.compressor_class == CompressorClass::kExact) resolved.feedback = Feedback::kNone;
  resolved.summable = traits.summable;
  // Asked at one size for all tensors: the size of a unit depends on the compressor alone.
  const std::size_t n = kAutoStrongUnitBytes / sizeof(float);
  resolved.strong = (*codec)->MaxEncodedSize(n) < n * sizeof(float) / 2;
  return resolved;
}

Result<Compression> ResolveCompression(const TensorDeclaration& tensor, const PlanOptions& options,
                                       Codecs& codecs) {
  LinkCompression uplink;
  LinkCompression downlink;
  if (IsFloat(tensor.dtype) && tensor.op != ReduceOp::kBroadcast) {
    uplink = options.compression.uplink;
    downlink = options.compression.downlink;
    for (const TensorRule& rule : options.compression.rules) {
      if (!MatchesPattern(rule.match, tensor.name)) continue;
      if (rule.uplink) uplink = *rule.uplink;
      if (rule.downlink) downlink = *rule.downlink;
      break;
    }
  }
  const auto up = ResolveLink(uplink, codecs);
  if (!up.ok()) {
    return InvalidArgument(
        fmt::format("tensor '{}', uplink: {}", tensor.name, up.status().message()));
  }
  const auto down = ResolveLink(downlink, codecs);
  if (!down.ok()) {
    return InvalidArgument(
        fmt::format("tensor '{}', downlink: {}", tensor.name, down.status().message()));
  }
  // The server's choice is the workers', so of the sum nothing is left over.
  Feedback down_feedback = down->feedback;
  if (up->summable && up->written == down->written && downlink.feedback == FeedbackMode::kAuto) {
    down_feedback = Feedback::kNone;
  }
  Compression compression;
  compression.steady = {0, up->written, down->written, up->feedback, down_feedback};
  std::uint64_t bytes = options.partition_bytes;
  if (bytes == 0) bytes = up->strong && down->strong ? kAutoStrongUnitBytes : kAutoPlainUnitBytes;
  const std::uint64_t blocks = bytes / sizeof(float) / kBlockElements;
  compression.unit_elements = std::max<std::uint64_t>(blocks, 1) * kBlockElements;
  return compression;
}

/// The phases of a unit whose members are all compressed like this.
std::vector<Phase> MakePhases(const Unit& unit, const Compression& compression,
                              const CompressionRules& rules) {
  const Phase& steady = compression.steady;
  const bool is_compressed = steady.uplink != kNone || steady.downlink != kNone;
  if (!is_compressed || unit.raw_bytes() < rules.min_bytes) return {Phase{}};
  if (rules.warmup_steps == 0) return {steady};
  Phase after = steady;
  after.first_step = rules.warmup_steps;
  return {Phase{}, after};
}

/// Errors: InvalidArgument where what a unit's feedback holds back could grow for ever.
Status CheckFeedback(const Plan& plan, const Unit& unit, Codecs& codecs) {
  const auto n = static_cast<std::size_t>(unit.num_elements);
  for (const Phase& phase : unit.phases) {
    for (const auto& [link, written, feedback] :
         {std::tuple{"uplink", &phase.uplink, phase.uplink_feedback},
          std::tuple{"downlink", &phase.downlink, phase.downlink_feedback}}) {
      if (feedback == Feedback::kNone) continue;
      const auto codec = codecs.Get(*written);
      if (!codec.ok()) return codec.status();
      const double variance = (*codec)->FeedbackVariance(n);
      if (variance < 1) continue;
      return InvalidArgument(fmt::format(
          "tensor {}, {}: {} is unbiased and may be off by {:.3g} times the norm of {} elements "
          "(squares); feedback would let that grow, expected below 1; use feedback: off, more "
          "levels, or smaller units",
          DescribeUnit(plan, unit), link, *written, variance, n));
    }
  }
  return Status::Ok();
}

Status CheckDeclaration(const TensorDeclaration& tensor) {
  if (tensor.name.empty()) return InvalidArgument("a tensor is declared without a name");
  if (tensor.name.size() > kMaxNameBytes) {
    return InvalidArgument(
        fmt::format("tensor '{}...' has a name of {} bytes, at most {} are possible",
                    tensor.name.substr(0, 32), tensor.name.size(), kMaxNameBytes));
  }
  if (SizeOf(tensor.dtype) == 0) {
    return InvalidArgument(fmt::format("tensor '{}' has the dtype number {}, which is none",
                                       tensor.name, static_cast<int>(tensor.dtype)));
  }
  if (ReduceOpName(tensor.op) == "invalid") {
    return InvalidArgument(fmt::format("tensor '{}' has the operation number {}, which is none",
                                       tensor.name, static_cast<int>(tensor.op)));
  }
  // Extents of 0 are left out, so that the order of the extents doesn't matter.
  std::uint64_t bytes = SizeOf(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape) {
    if (extent == 0) continue;
    if (bytes > kMaxTensorBytes / extent) {
      return InvalidArgument(fmt::format("tensor '{}' of shape [{}] takes more than {} bytes",
                                         tensor.name, fmt::join(tensor.shape, ", "),
                                         kMaxTensorBytes));
    }
    bytes *= extent;
  }
  return Status::Ok();
}

/// Checks the batch and appends it to the tensors.
Status AppendTensors(std::span<const TensorDeclaration> batch, Plan& plan) {
  if (batch.size() > kMaxPlanTensors - std::min(kMaxPlanTensors, plan.tensors.size())) {
    return InvalidArgument(fmt::format("{} tensors after {} are more than a plan's {}",
                                       batch.size(), plan.tensors.size(), kMaxPlanTensors));
  }
  std::set<std::string_view> names;
  for (const TensorDeclaration& tensor : plan.tensors) names.insert(tensor.name);
  for (const TensorDeclaration& tensor : batch) {
    GRADWIRE_RETURN_IF_ERROR(CheckDeclaration(tensor));
    if (!names.insert(tensor.name).second) {
      return InvalidArgument(fmt::format("tensor '{}' is declared twice", tensor.name));
    }
  }
  plan.tensors.insert(plan.tensors.end(), batch.begin(), batch.end());
  return Status::Ok();
}

Status CheckOptions(const Plan& plan, const PlanOptions& options) {
  if (options.num_workers > 0 && options.num_servers > 0 && options.lanes_per_server > 0 &&
      plan.num_workers == options.num_workers && plan.num_servers == options.num_servers &&
      plan.lanes_per_server == options.lanes_per_server) {
    return Status::Ok();
  }
  return InvalidArgument(fmt::format(
      "the plan is for {} workers, {} servers and {} lanes, the options say {}, {} and {}",
      plan.num_workers, plan.num_servers, plan.lanes_per_server, options.num_workers,
      options.num_servers, options.lanes_per_server));
}

Status TooManyUnits(const TensorDeclaration& tensor) {
  return InvalidArgument(fmt::format(
      "tensor '{}' would bring the plan beyond {} units; a larger partition.bytes makes "
      "fewer",
      tensor.name, kMaxPlanUnits));
}

/// Bytes a round that each server and lane has to carry. Every unit also costs two headers, which
/// decides among units that compress to next to nothing.
class Loads {
 public:
  explicit Loads(const Plan& plan)
      : servers_(plan.num_servers, 0),
        lanes_(plan.num_servers, std::vector<std::uint64_t>(plan.lanes_per_server, 0)) {}

  void Add(const Unit& unit, std::uint64_t bytes) {
    servers_[unit.server] += bytes;
    lanes_[unit.server][unit.lane] += bytes;
  }

  /// Puts the unit where the load is least; the lowest number among equals.
  void Place(Unit& unit, std::uint64_t bytes) {
    unit.server = Least(servers_);
    unit.lane = Least(lanes_[unit.server]);
    Add(unit, bytes);
  }

 private:
  static std::uint32_t Least(const std::vector<std::uint64_t>& loads) {
    return static_cast<std::uint32_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
  }

  std::vector<std::uint64_t> servers_;
  std::vector<std::vector<std::uint64_t>> lanes_;
};

/// Places the units from `first_new` on. Broadcasts come once and gradients every step, so each
/// kind is balanced by itself.
Status PlaceUnits(std::size_t first_new, Codecs& codecs, Plan& plan) {
  std::vector<std::uint64_t> cost(plan.units.size());
  Loads repeated(plan);
  Loads once(plan);
  const auto loads_of = [&](const Unit& unit) -> Loads& {
    return unit.op == ReduceOp::kBroadcast ? once : repeated;
  };
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const auto bytes = WireBytesWith(plan.units[i], plan.units[i].phases.back(), codecs);
    if (!bytes.ok()) return bytes.status();
    cost[i] = bytes->uplink + bytes->downlink + 2 * kMaxHeaderBytes;
    if (i < first_new) loads_of(plan.units[i]).Add(plan.units[i], cost[i]);
  }
  std::vector<std::size_t> order(plan.units.size() - first_new);
  std::iota(order.begin(), order.end(), first_new);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  for (const std::size_t i : order) loads_of(plan.units[i]).Place(plan.units[i], cost[i]);
  return Status::Ok();
}

std::string FormatShape(const TensorDeclaration& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape, ", "));
}

/// The fields in which two declarations differ, each with both values.
struct Difference {
  std::string_view field;
  std::string a;
  std::string b;
};

std::vector<Difference> Differences(const TensorDeclaration& a, const TensorDeclaration& b) {
  std::vector<Difference> all = {
      {"name", fmt::format("'{}'", a.name), fmt::format("'{}'", b.name)},
      {"dtype", std::string(DTypeName(a.dtype)), std::string(DTypeName(b.dtype))},
      {"shape", FormatShape(a), FormatShape(b)},
      {"priority", std::to_string(a.priority), std::to_string(b.priority)},
      {"operation", std::string(ReduceOpName(a.op)), std::string(ReduceOpName(b.op))},
  };
  std::erase_if(all, [](const Difference& difference) { return difference.a == difference.b; });
  return all;
}

}  // namespace

Plan EmptyPlan(const PlanOptions& options) {
  Plan plan;
  plan.num_workers = options.num_workers;
  plan.num_servers = options.num_servers;
  plan.lanes_per_server = options.lanes_per_server;
  return plan;
}

std::size_t MaxFrameBytes(std::uint64_t partition_bytes) {
  // No codec takes more for an element than fp64 or an index with its value do; twice of that.
  constexpr std::uint64_t kMostBytesAnElement = 16;
  constexpr std::uint64_t kMost = std::uint64_t{1} << 31;
  const std::uint64_t unit_bytes =
      partition_bytes == 0 ? std::max(kAutoStrongUnitBytes, kAutoPlainUnitBytes) : partition_bytes;
  const std::uint64_t payload = unit_bytes / sizeof(float) * kMostBytesAnElement;
  return std::min(std::max<std::uint64_t>(kMaxControlBytes, payload), kMost);
}

Status CheckFrames(const Plan& plan, std::size_t max_frame_bytes,
                   const CompressorRegistry& registry) {
  Codecs codecs(registry);
  for (const Unit& unit : plan.units) {
    for (const Phase& phase : unit.phases) {
      const auto bytes = WireBytesWith(unit, phase, codecs);
      if (!bytes.ok()) return bytes.status();
      const std::uint64_t largest = std::max(bytes->uplink, bytes->downlink);
      if (largest <= max_frame_bytes) continue;
      return InvalidArgument(fmt::format(
          "tensor {} (key {}) takes up to {} bytes in one message, at most {} are possible with "
          "this partition.bytes; a smaller unit, or for a saved plan a larger partition.bytes",
          DescribeUnit(plan, unit), unit.key, largest, max_frame_bytes));
    }
  }
  return Status::Ok();
}

Result<UnitBytes> WireBytes(const Unit& unit, const Phase& phase,
                            const CompressorRegistry& registry) {
  Codecs codecs(registry);
  return WireBytesWith(unit, phase, codecs);
}

Result<Plan> ExtendPlan(const Plan& plan, std::span<const TensorDeclaration> batch,
                        const PlanOptions& options, const CompressorRegistry& registry) {
  GRADWIRE_RETURN_IF_ERROR(CheckOptions(plan, options));
  Plan next = plan;
  ++next.version;
  GRADWIRE_RETURN_IF_ERROR(AppendTensors(batch, next));

  Codecs codecs(registry);
  // Small tensors of one kind collect in a unit that stays open until the next one doesn't fit.
  using Kind = std::tuple<DType, ReduceOp, std::string, std::string, Feedback, Feedback>;
  std::map<Kind, std::size_t> open;
  std::vector<Compression> compressions;  // of the new units, in order
  const std::size_t first_new = next.units.size();
  const auto new_unit = [&](const TensorDeclaration& tensor, const Compression& compression) {
    Unit unit;
    unit.key = next.units.size();
    unit.dtype = tensor.dtype;
    unit.op = tensor.op;
    unit.priority = tensor.priority;
    next.units.push_back(unit);
    compressions.push_back(compression);
  };

  for (std::size_t t = plan.tensors.size(); t < next.tensors.size(); ++t) {
    const TensorDeclaration& tensor = next.tensors[t];
    const auto index = static_cast<std::uint32_t>(t);
    const std::uint64_t n = tensor.num_elements();
    const auto compression = ResolveCompression(tensor, options, codecs);
    if (!compression.ok()) return compression.status();
    if (n == 0) continue;
    const std::uint64_t limit = compression->unit_elements;

    if (n * SizeOf(tensor.dtype) >= options.fuse_below || n >= limit) {
      const std::size_t room = kMaxPlanUnits - std::min(kMaxPlanUnits, next.units.size());
      if ((n - 1) / limit >= room) return TooManyUnits(tensor);
      for (std::uint64_t offset = 0; offset < n; offset += limit) {
        new_unit(tensor, *compression);
        next.units.back().num_elements = std::min(limit, n - offset);
        next.units.back().members = {{index, offset, 0, next.units.back().num_elements}};
      }
      continue;
    }

    const Phase& steady = compression->steady;
    const Kind kind{tensor.dtype,           tensor.op,
                    steady.uplink,          steady.downlink,
                    steady.uplink_feedback, steady.downlink_feedback};
    auto place = open.find(kind);
    if (place == open.end() || next.units[place->second].num_elements + n > limit) {
      if (next.units.size() >= kMaxPlanUnits) return TooManyUnits(tensor);
      place = open.insert_or_assign(kind, next.units.size()).first;
      new_unit(tensor, *compression);
    }
    Unit& unit = next.units[place->second];
    unit.members.push_back({index, 0, unit.num_elements, n});
    unit.num_elements += n;
    unit.priority = std::max(unit.priority, tensor.priority);
  }

  for (std::size_t i = first_new; i < next.units.size(); ++i) {
    next.units[i].phases =
        MakePhases(next.units[i], compressions[i - first_new], options.compression);
    GRADWIRE_RETURN_IF_ERROR(CheckFeedback(next, next.units[i], codecs));
  }
  GRADWIRE_RETURN_IF_ERROR(PlaceUnits(first_new, codecs, next));
  return next;
}

Result<Plan> ReplayPlan(const Plan& plan, std::span<const TensorDeclaration> batch,
                        const Plan& saved, const PlanOptions& options,
                        const CompressorRegistry& registry) {
  GRADWIRE_RETURN_IF_ERROR(CheckOptions(plan, options));
  for (const auto& [what, in_saved, in_job] :
       {std::tuple{"workers", saved.num_workers, plan.num_workers},
        std::tuple{"servers", saved.num_servers, plan.num_servers},
        std::tuple{"lanes a server", saved.lanes_per_server, plan.lanes_per_server}}) {
    if (in_saved != in_job) {
      return InvalidArgument(
          fmt::format("the saved plan is for {} {}, the job has {}", in_saved, what, in_job));
    }
  }
  Plan next = plan;
  ++next.version;
  GRADWIRE_RETURN_IF_ERROR(AppendTensors(batch, next));
  for (std::size_t t = plan.tensors.size(); t < next.tensors.size(); ++t) {
    const TensorDeclaration& tensor = next.tensors[t];
    if (t >= saved.tensors.size()) {
      return InvalidArgument(
          fmt::format("tensor '{}' is number {} of the job, the saved plan has {} tensors",
                      tensor.name, t, saved.tensors.size()));
    }
    const std::vector<Difference> differences = Differences(saved.tensors[t], tensor);
    if (!differences.empty()) {
      const Difference& first = differences.front();
      return InvalidArgument(fmt::format(
          "tensor '{}', number {} of the job: {} is {} in the saved plan, {} in the job",
          tensor.name, t, first.field, first.a, first.b));
    }
  }

  Codecs codecs(registry);
  for (std::size_t key = next.units.size(); key < saved.units.size(); ++key) {
    const Unit& unit = saved.units[key];
    const auto is_declared = [&](const UnitMember& member) {
      return member.tensor < next.tensors.size();
    };
    if (std::none_of(unit.members.begin(), unit.members.end(), is_declared)) break;
    for (const UnitMember& member : unit.members) {
      if (is_declared(member) && member.tensor >= plan.tensors.size()) continue;
      return InvalidArgument(fmt::format(
          "the saved plan fuses tensor '{}' with tensors that the job declares at another time",
          saved.tensors[member.tensor].name));
    }
    for (const Phase& phase : unit.phases) {
      const auto bytes = WireBytesWith(unit, phase, codecs);
      if (!bytes.ok()) {
        return InvalidArgument(fmt::format("the saved plan, tensor '{}': {}",
                                           saved.tensors[unit.members.front().tensor].name,
                                           bytes.status().message()));
      }
      const bool is_plain =
          phase.uplink == kNone && phase.downlink == kNone && !phase.has_feedback();
      if (!is_plain && (!IsFloat(unit.dtype) || unit.op == ReduceOp::kBroadcast)) {
        return InvalidArgument(fmt::format(
            "the saved plan compresses tensor '{}', but a tensor of {} to {} goes as none",
            saved.tensors[unit.members.front().tensor].name, DTypeName(unit.dtype),
            ReduceOpName(unit.op)));
      }
    }
    next.units.push_back(unit);
  }
  // Whatever order the saved plan's units are in, every tensor must have got all of its elements.
  std::vector<std::uint64_t> covered(next.tensors.size(), 0);
  for (const Unit& unit : next.units) {
    for (const UnitMember& member : unit.members) covered[member.tensor] += member.count;
  }
  for (std::size_t t = 0; t < next.tensors.size(); ++t) {
    if (covered[t] == next.tensors[t].num_elements()) continue;
    return InvalidArgument(
        fmt::format("the saved plan keeps units of tensor '{}' among those of later tensors",
                    next.tensors[t].name));
  }
  return next;
}

std::string DescribeDifference(const TensorDeclaration& a, std::uint32_t rank_a,
                               const TensorDeclaration& b, std::uint32_t rank_b) {
  std::string text;
  for (const Difference& difference : Differences(a, b)) {
    if (!text.empty()) text += "; ";
    text += fmt::format("{} is {} on rank {}, {} on rank {}", difference.field, difference.a,
                        rank_a, difference.b, rank_b);
  }
  return text;
}

}  // namespace gradwire
