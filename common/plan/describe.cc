#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "common/base/dtype.h"
#include "common/base/escape.h"
#include "common/plan/plan.h"
#include "common/plan/units.h"

namespace gradwire {
namespace {

/// "onebit+ef"; with several phases "none until step 100, then onebit+ef".
std::string FormatLink(const Unit& unit, bool is_uplink) {
  std::string text;
  for (std::size_t i = 0; i < unit.phases.size(); ++i) {
    const Phase& phase = unit.phases[i];
    if (i > 0) text += fmt::format(" until step {}, then ", phase.first_step);
    text += is_uplink ? phase.uplink : phase.downlink;
    const Feedback feedback = is_uplink ? phase.uplink_feedback : phase.downlink_feedback;
    if (feedback != Feedback::kNone) text += fmt::format("+{}", FeedbackName(feedback));
  }
  return text;
}

std::string FormatBytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

UnitBytes SteadyBytes(const Unit& unit, const CompressorRegistry& registry) {
  const auto bytes = WireBytes(unit, unit.phases.back(), registry);
  return bytes.ok() ? *bytes : UnitBytes{unit.raw_bytes(), unit.raw_bytes()};
}

/// The class of a compressor in its written form, as JSON; null if the registry doesn't know it.
std::string ClassToJson(const std::string& text, const CompressorRegistry& registry) {
  const auto compressor = registry.Create(text);
  if (!compressor.ok()) return "null";
  return QuoteJson(CompressorClassName((*compressor)->traits().compressor_class));
}

std::string PhaseToJson(const Phase& phase, const CompressorRegistry& registry) {
  std::string text = fmt::format("{{\"first_step\":{}", phase.first_step);
  for (const auto& [link, compressor, feedback] :
       {std::tuple{"uplink", &phase.uplink, phase.uplink_feedback},
        std::tuple{"downlink", &phase.downlink, phase.downlink_feedback}}) {
    text += fmt::format(",\"{0}\":{1},\"{0}_class\":{2},\"{0}_feedback\":\"{3}\"", link,
                        QuoteJson(*compressor), ClassToJson(*compressor, registry),
                        FeedbackName(feedback));
  }
  return text + "}";
}

/// "2", the class in the stage that holds last; "-" for what is sent in every step.
std::string FormatClass(const Unit& unit) {
  return unit.filter_classes.empty() ? "-" : std::to_string(unit.filter_classes.back());
}

/// "1 step in 4 sends a unit of the filter"; with several stages all of them. Empty without a
/// filter.
std::string FormatFilter(const Filter& filter) {
  if (filter.stages.empty()) return {};
  std::string text = "filter: a filtered unit is sent once in ";
  for (std::size_t i = 0; i < filter.stages.size(); ++i) {
    const FilterStage& stage = filter.stages[i];
    if (i > 0) text += fmt::format(" until step {}, then in ", stage.first_step);
    text += stage.interval == 1 ? "1 step" : fmt::format("{} steps", stage.interval);
  }
  return text;
}

std::string FilterToJson(const Filter& filter) {
  if (filter.stages.empty()) return "null";
  std::string text = fmt::format("{{\"inactive\":\"{}\",\"stages\":[",
                                 filter.skips_inactive ? "skip" : "zero_fill");
  const char* separator = "";
  for (const FilterStage& stage : filter.stages) {
    text += fmt::format(
        "{}{{\"first_step\":{},\"interval\":{},\"c0\":{},\"step\":{},\"every\":{}}}", separator,
        stage.first_step, stage.interval, stage.c0, stage.increment, stage.every);
    separator = ",";
  }
  return text + "]}";
}

/// Text in columns: each is as wide as its widest cell, numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { Add(std::move(head)); }
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string ToString(std::size_t num_right_aligned) const {
    std::vector<std::size_t> widths(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
    }
    std::string text;
    for (const auto& row : rows_) {
      for (std::size_t c = 0; c < row.size(); ++c) {
        if (c < num_right_aligned) {
          text += fmt::format("{:>{}}  ", row[c], widths[c]);
        } else if (c + 1 < row.size()) {
          text += fmt::format("{:<{}}  ", row[c], widths[c]);
        } else {
          text += row[c];
        }
      }
      while (text.back() == ' ') text.pop_back();
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace

std::string DescribePlan(const Plan& plan, const CompressorRegistry& registry) {
  struct LaneLoad {
    std::uint64_t units = 0;
    std::uint64_t broadcasts = 0;
    UnitBytes bytes;
  };
  std::vector<LaneLoad> lanes(std::size_t{plan.num_servers} * plan.lanes_per_server);
  const bool has_filter = !plan.filter.stages.empty();
  std::vector<std::string> head = {"key",   "elements",  "priority", "server",   "lane",
                                   "dtype", "operation", "uplink",   "downlink", "tensors"};
  if (has_filter) head.insert(head.begin() + 5, "class");
  Table units(head);
  for (const Unit& unit : plan.units) {
    std::vector<std::string> row = {std::to_string(unit.key),
                                    std::to_string(unit.num_elements),
                                    std::to_string(unit.priority),
                                    std::to_string(unit.server),
                                    std::to_string(unit.lane),
                                    std::string(DTypeName(unit.dtype)),
                                    std::string(ReduceOpName(unit.op)),
                                    FormatLink(unit, true),
                                    FormatLink(unit, false),
                                    DescribeUnit(plan, unit)};
    if (has_filter) row.insert(row.begin() + 5, FormatClass(unit));
    units.Add(std::move(row));
    LaneLoad& lane = lanes[std::size_t{unit.server} * plan.lanes_per_server + unit.lane];
    if (unit.op == ReduceOp::kBroadcast) {
      ++lane.broadcasts;
      continue;
    }
    const UnitBytes bytes = SteadyBytes(unit, registry);
    ++lane.units;
    lane.bytes.uplink += bytes.uplink;
    lane.bytes.downlink += bytes.downlink;
  }
  Table load({"server", "lane", "units", "broadcasts", "uplink bytes", "downlink bytes"});
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    load.Add({std::to_string(i / plan.lanes_per_server), std::to_string(i % plan.lanes_per_server),
              std::to_string(lanes[i].units), std::to_string(lanes[i].broadcasts),
              std::to_string(lanes[i].bytes.uplink), std::to_string(lanes[i].bytes.downlink)});
  }
  return fmt::format(
      "plan version {} for {} workers: {} tensors in {} units\n{}{}\n"
      "of one worker in one round, without broadcasts:\n{}",
      plan.version, plan.num_workers, plan.tensors.size(), plan.units.size(),
      units.ToString(has_filter ? 6 : 5),
      has_filter ? fmt::format("{}\n", FormatFilter(plan.filter)) : "", load.ToString(6));
}

std::string PlanToJson(const Plan& plan, const CompressorRegistry& registry) {
  std::string text = fmt::format(
      "{{\"version\":{},\"workers\":{},\"servers\":{},\"lanes\":{},\"filter\":{},"
      "\"units\":[",
      plan.version, plan.num_workers, plan.num_servers, plan.lanes_per_server,
      FilterToJson(plan.filter));
  const char* unit_separator = "";
  for (const Unit& unit : plan.units) {
    text += fmt::format(
        "{}{{\"key\":{},\"elements\":{},\"dtype\":\"{}\",\"op\":\"{}\",\"priority\":{},\"server\":{"
        "},"
        "\"lane\":{},\"filter_classes\":[{}],\"members\":[",
        unit_separator, unit.key, unit.num_elements, DTypeName(unit.dtype), ReduceOpName(unit.op),
        unit.priority, unit.server, unit.lane, fmt::join(unit.filter_classes, ","));
    const char* separator = "";
    for (const UnitMember& member : unit.members) {
      text += fmt::format("{}{{\"tensor\":{},\"offset\":{},\"elements\":{}}}", separator,
                          QuoteJson(plan.tensors[member.tensor].name), member.tensor_offset,
                          member.count);
      separator = ",";
    }
    text += "],\"phases\":[";
    separator = "";
    for (const Phase& phase : unit.phases) {
      text += separator;
      text += PhaseToJson(phase, registry);
      separator = ",";
    }
    text += "]}";
    unit_separator = ",";
  }
  return text + "]}";
}

std::string SummarizePlan(const Plan& plan, const CompressorRegistry& registry) {
  std::uint64_t raw = 0;
  UnitBytes wire;      // in every step
  UnitBytes filtered;  // in all steps of an interval together
  const std::uint32_t interval =
      plan.filter.stages.empty() ? 1 : plan.filter.stages.back().interval;
  std::vector<std::uint64_t> classes(interval, 0);
  std::vector<std::uint64_t> lanes(std::size_t{plan.num_servers} * plan.lanes_per_server, 0);
  for (const Unit& unit : plan.units) {
    if (unit.op == ReduceOp::kBroadcast) continue;
    const UnitBytes bytes = SteadyBytes(unit, registry);
    raw += unit.raw_bytes();
    UnitBytes& sum = unit.filter_classes.empty() ? wire : filtered;
    sum.uplink += bytes.uplink;
    sum.downlink += bytes.downlink;
    if (!unit.filter_classes.empty()) {
      classes[unit.filter_classes.back()] += bytes.uplink + bytes.downlink;
    }
    lanes[std::size_t{unit.server} * plan.lanes_per_server + unit.lane] +=
        bytes.uplink + bytes.downlink;
  }
  const auto ratio = [&](std::uint64_t bytes) {
    return bytes == 0 ? 1.0 : static_cast<double>(raw) / static_cast<double>(bytes);
  };
  const auto heaviest_of = [](const std::vector<std::uint64_t>& loads) {
    const std::uint64_t total = std::accumulate(loads.begin(), loads.end(), std::uint64_t{0});
    const double mean = static_cast<double>(total) / static_cast<double>(loads.size());
    return total == 0 ? 1.0
                      : static_cast<double>(*std::max_element(loads.begin(), loads.end())) / mean;
  };
  wire.uplink += filtered.uplink / interval;
  wire.downlink += filtered.downlink / interval;
  std::string filter;
  if (interval > 1) {
    filter = fmt::format("\n{}; heaviest class {:.2f} of the mean", FormatFilter(plan.filter),
                         heaviest_of(classes));
  }
  std::string tensors;
  for (const auto& [op, verb] :
       {std::pair{ReduceOp::kAverage, "averaged"}, std::pair{ReduceOp::kSum, "summed"},
        std::pair{ReduceOp::kBroadcast, "broadcast"}}) {
    const auto count = std::count_if(
        plan.tensors.begin(), plan.tensors.end(),
        [wanted = op](const TensorDeclaration& tensor) { return tensor.op == wanted; });
    if (count > 0) tensors += fmt::format("{}{} {}", tensors.empty() ? "" : ", ", count, verb);
  }
  return fmt::format(
      "plan version {}: tensors: {}; {} units, {} of gradients a step; {} workers, {} servers of "
      "{} lanes\n"
      "a worker sends {} (1/{:.1f}) and receives {} (1/{:.1f}) a step; heaviest lane {:.2f} of the "
      "mean{}",
      plan.version, tensors.empty() ? "none" : tensors, plan.units.size(), FormatBytes(raw),
      plan.num_workers, plan.num_servers, plan.lanes_per_server, FormatBytes(wire.uplink),
      ratio(wire.uplink), FormatBytes(wire.downlink), ratio(wire.downlink), heaviest_of(lanes),
      filter);
}

}  // namespace gradwire
