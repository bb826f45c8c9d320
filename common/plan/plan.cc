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
#include "compressors/filters/covap.h"

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
  bool is_filtered = false;
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
  bool is_filtered = false;
  if (IsFloat(tensor.dtype) && tensor.op != ReduceOp::kBroadcast) {
    is_filtered = options.compression.filter.type != FilterType::kNone;
    uplink = options.compression.uplink;
    downlink = options.compression.downlink;
    for (const TensorRule& rule : options.compression.rules) {
      if (!MatchesPattern(rule.match, tensor.name)) continue;
      if (rule.uplink) uplink = *rule.uplink;
      if (rule.downlink) downlink = *rule.downlink;
      is_filtered = is_filtered && rule.is_filtered;
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
  compression.is_filtered = is_filtered;
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

/// Errors: InvalidArgument where the filter and the unit's feedback don't go together.
Status CheckFilter(const Plan& plan, const Unit& unit) {
  if (unit.filter_classes.empty()) return Status::Ok();
  for (const Phase& phase : unit.phases) {
    if (!phase.needs_rate()) continue;
    return InvalidArgument(fmt::format(
        "tensor {}: filter covap and feedback ef_lr: what the filter holds back is the sum of "
        "gradients of several learning rates, expected feedback auto, off or ef, or filter: none "
        "in a rule",
        DescribeUnit(plan, unit)));
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

FilterStage StageFrom(std::uint64_t first_step, std::uint32_t interval, const FilterRules& rules) {
  const covap::Coefficient preset = covap::DefaultCoefficient(interval);
  return {first_step, interval, rules.c0.value_or(preset.initial), rules.step,
          rules.every.value_or(preset.every)};
}

/// The interval of the first stage that may hold something back; one that is measured begins at 1.
std::uint32_t FirstInterval(const FilterRules& rules) { return std::max(rules.interval, 1U); }

/// Nothing is held back while nothing is compressed (warmup_steps).
Filter MakeFilter(const CompressionRules& compression) {
  const FilterRules& rules = compression.filter;
  Filter filter;
  if (rules.type == FilterType::kNone) return filter;
  filter.skips_inactive = rules.inactive == FilterInactive::kSkip;
  if (compression.warmup_steps > 0) filter.stages.push_back(FilterStage{});
  filter.stages.push_back(StageFrom(compression.warmup_steps, FirstInterval(rules), rules));
  return filter;
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

  /// Puts the unit where this load and that of `beside` are least together; among equals where this
  /// one is, then the lowest number.
  void Place(Unit& unit, std::uint64_t bytes, const Loads& beside) {
    unit.server = Least(servers_, beside.servers_);
    unit.lane = Least(lanes_[unit.server], beside.lanes_[unit.server]);
    Add(unit, bytes);
  }

 private:
  static std::uint32_t Least(const std::vector<std::uint64_t>& loads,
                             const std::vector<std::uint64_t>& beside) {
    std::size_t least = 0;
    for (std::size_t i = 1; i < loads.size(); ++i) {
      if (std::pair(loads[i] + beside[i], loads[i]) <
          std::pair(loads[least] + beside[least], loads[least])) {
        least = i;
      }
    }
    return static_cast<std::uint32_t>(least);
  }

  std::vector<std::uint64_t> servers_;
  std::vector<std::vector<std::uint64_t>> lanes_;
};

/// Bytes of each unit in a round, both ways, with two headers.
Result<std::vector<std::uint64_t>> Costs(const Plan& plan, Codecs& codecs) {
  std::vector<std::uint64_t> costs;
  for (const Unit& unit : plan.units) {
    const auto bytes = WireBytesWith(unit, unit.phases.back(), codecs);
    if (!bytes.ok()) return bytes.status();
    costs.push_back(bytes->uplink + bytes->downlink + 2 * kMaxHeaderBytes);
  }
  return costs;
}

/// Units in the order in which a backward pass has their gradients: what is needed last in the
/// forward pass comes first.
void SortByReadiness(const Plan& plan, std::vector<std::size_t>& units) {
  std::stable_sort(units.begin(), units.end(), [&](std::size_t a, std::size_t b) {
    const std::int32_t priority_a = plan.units[a].priority;
    const std::int32_t priority_b = plan.units[b].priority;
    return priority_a != priority_b ? priority_a < priority_b : a > b;
  });
}

/// Gives the filtered units from `first_new` on their classes in one stage; those before keep
/// theirs.
void AssignClasses(std::size_t first_new, std::size_t stage, FilterAssign assign,
                   std::span<const std::uint64_t> costs, Plan& plan) {
  const std::uint32_t interval = plan.filter.stages[stage].interval;
  std::vector<std::uint64_t> loads(interval, 0);
  std::uint64_t number = 0;
  std::vector<std::size_t> added;
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    const Unit& unit = plan.units[i];
    if (unit.filter_classes.empty()) continue;
    if (i >= first_new) {
      added.push_back(i);
      continue;
    }
    loads[unit.filter_classes[stage]] += costs[i];
    ++number;
  }
  if (assign == FilterAssign::kIndex) {
    SortByReadiness(plan, added);
    for (const std::size_t i : added) {
      plan.units[i].filter_classes[stage] = static_cast<std::uint32_t>(number++ % interval);
    }
    return;
  }
  std::vector<std::uint64_t> sizes;
  for (const std::size_t i : added) sizes.push_back(costs[i]);
  const std::vector<std::uint32_t> classes = covap::AssignBalanced(sizes, loads);
  for (std::size_t i = 0; i < added.size(); ++i) {
    plan.units[added[i]].filter_classes[stage] = classes[i];
  }
}

/// Gives all filtered units their classes in the last stage. Unlike those of a new unit they have
/// their places already, so that a class should be even over the servers too.
void AssignPlaced(FilterAssign assign, std::span<const std::uint64_t> costs, Plan& plan) {
  const std::uint32_t interval = plan.filter.stages.back().interval;
  std::vector<std::size_t> order;
  for (const Unit& unit : plan.units) {
    if (!unit.filter_classes.empty()) order.push_back(unit.key);
  }
  if (assign == FilterAssign::kIndex) {
    SortByReadiness(plan, order);
    for (std::size_t number = 0; number < order.size(); ++number) {
      const auto filter_class = static_cast<std::uint32_t>(number % interval);
      plan.units[order[number]].filter_classes.push_back(filter_class);
    }
    return;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  std::vector<std::uint64_t> loads(interval, 0);
  std::vector<std::vector<std::uint64_t>> on_server(plan.num_servers, loads);
  for (const std::size_t i : order) {
    std::vector<std::uint64_t>& here = on_server[plan.units[i].server];
    std::uint32_t least = 0;
    for (std::uint32_t c = 1; c < interval; ++c) {
      if (std::pair(here[c] + loads[c], loads[c]) <
          std::pair(here[least] + loads[least], loads[least])) {
        least = c;
      }
    }
    here[least] += costs[i];
    loads[least] += costs[i];
    plan.units[i].filter_classes.push_back(least);
  }
}

/// Places the units from `first_new` on. Broadcasts come once and gradients every step, so each
/// kind is balanced by itself; and of the filtered ones each class, which is sent together, beside
/// those that are always sent.
void PlaceUnits(std::size_t first_new, std::span<const std::uint64_t> costs, Plan& plan) {
  const std::uint32_t interval =
      plan.filter.stages.empty() ? 1 : plan.filter.stages.back().interval;
  const Loads nothing(plan);
  Loads once(plan);
  Loads repeated(plan);
  std::vector<Loads> classes(interval, nothing);
  const auto loads_of = [&](const Unit& unit) -> Loads& {
    if (unit.op == ReduceOp::kBroadcast) return once;
    return unit.filter_classes.empty() ? repeated : classes[unit.filter_classes.back()];
  };
  for (std::size_t i = 0; i < first_new; ++i) {
    loads_of(plan.units[i]).Add(plan.units[i], costs[i]);
  }
  std::vector<std::size_t> order(plan.units.size() - first_new);
  std::iota(order.begin(), order.end(), first_new);
  // What is always sent first: the classes are balanced beside it.
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool always_a = plan.units[a].filter_classes.empty();
    const bool always_b = plan.units[b].filter_classes.empty();
    return always_a != always_b ? always_a : costs[a] > costs[b];
  });
  for (const std::size_t i : order) {
    Unit& unit = plan.units[i];
    loads_of(unit).Place(unit, costs[i], unit.filter_classes.empty() ? nothing : repeated);
  }
}

/// Elements [begin, end) of a unit as a unit of its own.
Unit Shard(const Unit& unit, std::uint64_t begin, std::uint64_t end) {
  Unit shard = unit;
  shard.num_elements = end - begin;
  shard.members.clear();
  for (const UnitMember& member : unit.members) {
    const std::uint64_t from = std::max(begin, member.unit_offset);
    const std::uint64_t to = std::min(end, member.unit_offset + member.count);
    if (from >= to) continue;
    shard.members.push_back(
        {member.tensor, member.tensor_offset + from - member.unit_offset, from - begin, to - from});
  }
  return shard;
}

/// The paper's rule (`assign: index`): filtered units that are larger than the median are cut into
/// shards of about its size, at most one for each class of the first interval, in whole blocks.
/// Errors: InvalidArgument if these are too many.
Status CutByMedian(std::size_t first_new, std::uint32_t interval, Plan& plan) {
  std::vector<std::uint64_t> sizes;
  for (std::size_t i = first_new; i < plan.units.size(); ++i) {
    if (!plan.units[i].filter_classes.empty()) sizes.push_back(plan.units[i].raw_bytes());
  }
  if (sizes.empty() || interval == 1) return Status::Ok();
  const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sizes.size() / 2);
  std::nth_element(sizes.begin(), middle, sizes.end());
  const std::vector<Unit> whole(plan.units.begin() + static_cast<std::ptrdiff_t>(first_new),
                                plan.units.end());
  plan.units.resize(first_new);
  for (const Unit& unit : whole) {
    const std::uint64_t blocks = (unit.num_elements + kBlockElements - 1) / kBlockElements;
    const std::uint64_t shards =
        unit.filter_classes.empty()
            ? 1
            : std::min<std::uint64_t>(covap::NumShards(unit.raw_bytes(), *middle, interval),
                                      blocks);
    for (std::uint64_t j = 0; j < shards; ++j) {
      if (plan.units.size() >= kMaxPlanUnits) {
        return TooManyUnits(plan.tensors[unit.members.front().tensor]);
      }
      const std::uint64_t begin = blocks * j / shards * kBlockElements;
      const std::uint64_t end = blocks * (j + 1) / shards * kBlockElements;
      plan.units.push_back(Shard(unit, begin, std::min(end, unit.num_elements)));
      plan.units.back().key = plan.units.size() - 1;
    }
  }
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
  plan.filter = MakeFilter(options.compression);
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
  using Kind = std::tuple<DType, ReduceOp, std::string, std::string, Feedback, Feedback, bool>;
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
    const Kind kind{tensor.dtype,
                    tensor.op,
                    steady.uplink,
                    steady.downlink,
                    steady.uplink_feedback,
                    steady.downlink_feedback,
                    compression->is_filtered};
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
    // fp64 that is summed in fp64 has no residual, which is fp32.
    const auto last = static_cast<std::uint32_t>(next.units[i].phases.size() - 1);
    if (compressions[i - first_new].is_filtered && !IsTypedReduction(next.units[i], last)) {
      next.units[i].filter_classes.assign(next.filter.stages.size(), 0);
    }
  }
  const FilterAssign assign = options.compression.filter.assign;
  if (assign == FilterAssign::kIndex && !next.filter.stages.empty()) {
    GRADWIRE_RETURN_IF_ERROR(
        CutByMedian(first_new, FirstInterval(options.compression.filter), next));
  }
  for (std::size_t i = first_new; i < next.units.size(); ++i) {
    GRADWIRE_RETURN_IF_ERROR(CheckFeedback(next, next.units[i], codecs));
    GRADWIRE_RETURN_IF_ERROR(CheckFilter(next, next.units[i]));
  }
  const auto costs = Costs(next, codecs);
  if (!costs.ok()) return costs.status();
  for (std::size_t stage = 0; stage < next.filter.stages.size(); ++stage) {
    AssignClasses(first_new, stage, assign, costs.value(), next);
  }
  PlaceUnits(first_new, costs.value(), next);
  return next;
}

Result<Plan> ChangeInterval(const Plan& plan, std::uint32_t interval, std::uint64_t first_step,
                            const PlanOptions& options, const CompressorRegistry& registry) {
  GRADWIRE_RETURN_IF_ERROR(CheckOptions(plan, options));
  const std::vector<FilterStage>& stages = plan.filter.stages;
  if (stages.empty()) return InvalidArgument("the plan has no filter whose interval could change");
  if (stages.size() >= kMaxFilterStages) {
    return InvalidArgument(fmt::format(
        "the interval has changed {} times, which is all that a plan holds", stages.size() - 1));
  }
  if (interval == 0 || interval > kMaxFilterInterval || first_step <= stages.back().first_step) {
    return InvalidArgument(
        fmt::format("an interval of {} from step {} on, expected 1 to {} and a step after {}",
                    interval, first_step, kMaxFilterInterval, stages.back().first_step));
  }
  Plan next = plan;
  ++next.version;
  next.filter.stages.push_back(StageFrom(first_step, interval, options.compression.filter));
  Codecs codecs(registry);
  const auto costs = Costs(next, codecs);
  if (!costs.ok()) return costs.status();
  AssignPlaced(options.compression.filter.assign, costs.value(), next);
  return next;
}

std::uint32_t NumFilteredUnits(const Plan& plan) {
  return static_cast<std::uint32_t>(
      std::count_if(plan.units.begin(), plan.units.end(),
                    [](const Unit& unit) { return !unit.filter_classes.empty(); }));
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
  next.filter = saved.filter;
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
