#include "common/wire/control.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "common/wire/limits.h"
#include "gradwire/v1/wire.pb.h"

namespace gradwire {
namespace {

// ---- Protobuf's encoding, walked without building anything -------------------------------------

std::optional<std::uint64_t> TakeVarint(ByteView& bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size() && i < 10; ++i) {
    const auto byte = std::to_integer<std::uint64_t>(bytes[i]);
    value |= (byte & 0x7f) << (7 * i);
    if ((byte & 0x80) == 0) {
      bytes = bytes.subspan(i + 1);
      return value;
    }
  }
  return std::nullopt;
}

/// Counts the length-delimited fields of a message and of the messages nested in the given fields.
/// Nothing if the bytes are not protobuf (groups, which nobody sends, included).
std::optional<std::size_t> CountItems(ByteView bytes, std::initializer_list<std::uint64_t> nested) {
  std::size_t items = 0;
  while (!bytes.empty()) {
    const std::optional<std::uint64_t> tag = TakeVarint(bytes);
    if (!tag) return std::nullopt;
    std::uint64_t size = 0;
    switch (*tag & 7) {
      case 0:
        if (!TakeVarint(bytes)) return std::nullopt;
        break;
      case 1:
        size = 8;
        break;
      case 2: {
        const std::optional<std::uint64_t> length = TakeVarint(bytes);
        if (!length) return std::nullopt;
        size = *length;
        ++items;
        break;
      }
      case 5:
        size = 4;
        break;
      default:
        return std::nullopt;
    }
    if (size > bytes.size()) return std::nullopt;
    const bool descend =
        (*tag & 7) == 2 && std::find(nested.begin(), nested.end(), *tag >> 3) != nested.end();
    if (descend) {
      const std::optional<std::size_t> inner =
          CountItems(bytes.first(static_cast<std::size_t>(size)), {});
      if (!inner) return std::nullopt;
      items += *inner;
    }
    bytes = bytes.subspan(static_cast<std::size_t>(size));
  }
  return items;
}

/// Parses after checking that the result stays small: a two-byte empty entry becomes an object of
/// a hundred bytes, so the entries are counted first.
template <typename Message>
Status ParseMessage(ByteView bytes, std::string_view what,
                    std::initializer_list<std::uint64_t> nested, Message& message) {
  if (bytes.size() > kMaxControlBytes) {
    return CorruptData(
        fmt::format("{} is {} bytes, expected at most {}", what, bytes.size(), kMaxControlBytes));
  }
  const std::optional<std::size_t> items = CountItems(bytes, nested);
  if (items && *items > kMaxControlItems) {
    return CorruptData(
        fmt::format("{} has {} entries, expected at most {}", what, *items, kMaxControlItems));
  }
  if (!items || !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return CorruptData(fmt::format("{} bytes are not a {} message", bytes.size(), what));
  }
  return Status::Ok();
}

template <typename Message>
std::vector<std::byte> SerializeMessage(const Message& message) {
  std::vector<std::byte> bytes(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(
      reinterpret_cast<std::uint8_t*>(bytes.data()));  // NOLINT: protobuf's byte type
  return bytes;
}

// ---- Checks ------------------------------------------------------------------------------------

Status CheckBelow(std::string_view field, std::uint64_t value, std::uint64_t bound) {
  if (value < bound) return Status::Ok();
  return CorruptData(fmt::format("{} is {}, expected less than {}", field, value, bound));
}

Status CheckRange(std::string_view field, std::uint64_t value, std::uint64_t low,
                  std::uint64_t high) {
  if (value >= low && value <= high) return Status::Ok();
  return CorruptData(fmt::format("{} is {}, expected {} to {}", field, value, low, high));
}

Status CheckCount(std::string_view field, std::size_t count, std::size_t bound) {
  if (count <= bound) return Status::Ok();
  return CorruptData(fmt::format("{} has {} entries, expected at most {}", field, count, bound));
}

Status CheckText(std::string_view field, std::size_t size, std::size_t low, std::size_t high) {
  if (size >= low && size <= high) return Status::Ok();
  return CorruptData(fmt::format("{} is {} bytes long, expected {} to {}", field, size, low, high));
}

Result<ReduceOp> ReduceOpFromWire(std::string_view field, std::uint32_t number) {
  GRADWIRE_RETURN_IF_ERROR(CheckRange(field, number, 1, 3));
  return static_cast<ReduceOp>(number);
}

Result<DType> CheckedDType(std::string_view field, std::uint32_t number) {
  Result<DType> dtype = DTypeFromWire(number);
  if (!dtype.ok()) return CorruptData(fmt::format("{}: {}", field, dtype.status().message()));
  return dtype;
}

// ---- Tensors -----------------------------------------------------------------------------------

void ToMessage(const TensorDeclaration& tensor, v1::Tensor& message) {
  message.set_name(tensor.name);
  message.set_dtype(static_cast<std::uint32_t>(tensor.dtype));
  message.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  message.set_priority(tensor.priority);
  message.set_op(static_cast<std::uint32_t>(tensor.op));
}

/// `where` names the entry: "plan.tensors[3]".
Result<TensorDeclaration> FromMessage(std::string_view where, const v1::Tensor& message) {
  TensorDeclaration tensor;
  GRADWIRE_RETURN_IF_ERROR(
      CheckText(fmt::format("{}.name", where), message.name().size(), 1, kMaxNameBytes));
  tensor.name = message.name();
  const Result<DType> dtype = CheckedDType(fmt::format("{}.dtype", where), message.dtype());
  if (!dtype.ok()) return dtype.status();
  tensor.dtype = *dtype;
  const Result<ReduceOp> op = ReduceOpFromWire(fmt::format("{}.op", where), message.op());
  if (!op.ok()) return op.status();
  tensor.op = *op;
  tensor.priority = message.priority();
  const auto num_dimensions = static_cast<std::size_t>(message.shape_size());
  GRADWIRE_RETURN_IF_ERROR(
      CheckCount(fmt::format("{}.shape", where), num_dimensions, kMaxDimensions));
  tensor.shape.assign(message.shape().begin(), message.shape().end());
  // Zero extents are left out, so that the order of the extents doesn't matter.
  std::uint64_t bytes = SizeOf(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape) {
    if (extent == 0) continue;
    if (bytes > kMaxTensorBytes / extent) {
      return CorruptData(fmt::format("{}.shape [{}] of {} takes more than {} bytes", where,
                                     fmt::join(tensor.shape, ", "), DTypeName(tensor.dtype),
                                     kMaxTensorBytes));
    }
    bytes *= extent;
  }
  return tensor;
}

// ---- Units -------------------------------------------------------------------------------------

void ToMessage(const Unit& unit, v1::Unit& message) {
  message.set_key(unit.key);
  message.set_num_elements(unit.num_elements);
  message.set_dtype(static_cast<std::uint32_t>(unit.dtype));
  message.set_op(static_cast<std::uint32_t>(unit.op));
  message.set_priority(unit.priority);
  message.set_server(unit.server);
  message.set_lane(unit.lane);
  for (const UnitMember& member : unit.members) {
    v1::UnitMember& to = *message.add_members();
    to.set_tensor(member.tensor);
    to.set_tensor_offset(member.tensor_offset);
    to.set_unit_offset(member.unit_offset);
    to.set_count(member.count);
  }
  for (const Phase& phase : unit.phases) {
    v1::Phase& to = *message.add_phases();
    to.set_first_step(phase.first_step);
    to.set_uplink(phase.uplink);
    to.set_downlink(phase.downlink);
    to.set_uplink_feedback(static_cast<std::uint32_t>(phase.uplink_feedback));
    to.set_downlink_feedback(static_cast<std::uint32_t>(phase.downlink_feedback));
  }
  message.mutable_filter_classes()->Add(unit.filter_classes.begin(), unit.filter_classes.end());
}

/// The members lie inside their tensors, share the unit's dtype and op, and follow each other
/// without gap from 0 to num_elements.
Status MembersFromMessage(std::string_view where, const Plan& plan, const v1::Unit& message,
                          Unit& unit) {
  unit.members.reserve(static_cast<std::size_t>(message.members_size()));
  std::uint64_t covered = 0;
  for (const v1::UnitMember& from : message.members()) {
    const std::size_t index = unit.members.size();
    const UnitMember member{from.tensor(), from.tensor_offset(), from.unit_offset(), from.count()};
    if (member.tensor >= plan.tensors.size()) {
      return CorruptData(fmt::format("{}.members[{}].tensor is {}, expected less than {}", where,
                                     index, member.tensor, plan.tensors.size()));
    }
    const TensorDeclaration& tensor = plan.tensors[member.tensor];
    const std::uint64_t size = tensor.num_elements();
    if (member.count == 0 || member.count > size || member.tensor_offset > size - member.count) {
      return CorruptData(
          fmt::format("{}.members[{}] is {} elements from {}, expected a stretch of tensor '{}' of "
                      "{} elements",
                      where, index, member.count, member.tensor_offset, tensor.name, size));
    }
    if (tensor.dtype != unit.dtype) {
      return CorruptData(fmt::format("{}.members[{}] is of dtype {}, expected {}", where, index,
                                     DTypeName(tensor.dtype), DTypeName(unit.dtype)));
    }
    if (tensor.op != unit.op) {
      return CorruptData(fmt::format("{}.members[{}] is of op {}, expected {}", where, index,
                                     ReduceOpName(tensor.op), ReduceOpName(unit.op)));
    }
    if (member.unit_offset != covered) {
      return CorruptData(fmt::format("{}.members[{}].unit_offset is {}, expected {}", where, index,
                                     member.unit_offset, covered));
    }
    if (member.count > unit.num_elements - covered) {
      return CorruptData(fmt::format("{}.members[{}] ends at {}, expected at most num_elements {}",
                                     where, index, member.count + covered, unit.num_elements));
    }
    covered += member.count;
    unit.members.push_back(member);
  }
  if (covered != unit.num_elements) {
    return CorruptData(fmt::format("{}.members cover {} elements, expected num_elements {}", where,
                                   covered, unit.num_elements));
  }
  return Status::Ok();
}

Status PhasesFromMessage(std::string_view where, const v1::Unit& message, Unit& unit) {
  const auto num_phases = static_cast<std::size_t>(message.phases_size());
  GRADWIRE_RETURN_IF_ERROR(
      CheckRange(fmt::format("{}.phases' number", where), num_phases, 1, kMaxPhases));
  unit.phases.reserve(num_phases);
  for (const v1::Phase& from : message.phases()) {
    const std::size_t index = unit.phases.size();
    const std::uint64_t first_step = from.first_step();
    if (index == 0 && first_step != 0) {
      return CorruptData(
          fmt::format("{}.phases[0].first_step is {}, expected 0", where, first_step));
    }
    if (index > 0 && first_step <= unit.phases.back().first_step) {
      return CorruptData(fmt::format("{}.phases[{}].first_step is {}, expected more than {}", where,
                                     index, first_step, unit.phases.back().first_step));
    }
    GRADWIRE_RETURN_IF_ERROR(CheckText(fmt::format("{}.phases[{}].uplink", where, index),
                                       from.uplink().size(), 1, kMaxNameBytes));
    GRADWIRE_RETURN_IF_ERROR(CheckText(fmt::format("{}.phases[{}].downlink", where, index),
                                       from.downlink().size(), 1, kMaxNameBytes));
    constexpr auto kLast = static_cast<std::uint32_t>(Feedback::kEfLr);
    GRADWIRE_RETURN_IF_ERROR(CheckRange(fmt::format("{}.phases[{}].uplink_feedback", where, index),
                                        from.uplink_feedback(), 0, kLast));
    GRADWIRE_RETURN_IF_ERROR(
        CheckRange(fmt::format("{}.phases[{}].downlink_feedback", where, index),
                   from.downlink_feedback(), 0, kLast));
    unit.phases.push_back({first_step, from.uplink(), from.downlink(),
                           static_cast<Feedback>(from.uplink_feedback()),
                           static_cast<Feedback>(from.downlink_feedback())});
  }
  return Status::Ok();
}

Status FilterFromMessage(const v1::Plan& message, Filter& filter) {
  const auto num_stages = static_cast<std::size_t>(message.filter_stages_size());
  GRADWIRE_RETURN_IF_ERROR(CheckCount("plan.filter_stages", num_stages, kMaxFilterStages));
  for (const v1::FilterStage& from : message.filter_stages()) {
    const std::size_t index = filter.stages.size();
    const std::string where = fmt::format("plan.filter_stages[{}]", index);
    const FilterStage stage{from.first_step(), from.interval(), from.c0(), from.increment(),
                            from.every()};
    const bool is_next =
        index == 0 ? stage.first_step == 0 : stage.first_step > filter.stages.back().first_step;
    if (!is_next) {
      return CorruptData(fmt::format(
          "{}.first_step is {}, expected {}", where, stage.first_step,
          index == 0 ? "0" : fmt::format("more than {}", filter.stages.back().first_step)));
    }
    GRADWIRE_RETURN_IF_ERROR(CheckRange(where + ".interval", stage.interval, 1, kMaxInterval));
    if (stage.every == 0) return CorruptData(where + ".every is 0, expected at least 1");
    for (const auto& [field, value] :
         {std::pair{"c0", stage.c0}, std::pair{"increment", stage.increment}}) {
      if (value >= 0 && value <= 1) continue;
      return CorruptData(fmt::format("{}.{} is {}, expected 0 to 1", where, field, value));
    }
    filter.stages.push_back(stage);
  }
  filter.skips_inactive = message.skips_inactive();
  return Status::Ok();
}

/// A class of each of the filter's stages, or none; floats that are reduced may have some.
Status ClassesFromMessage(std::string_view where, const Filter& filter, const v1::Unit& message,
                          Unit& unit) {
  unit.filter_classes.assign(message.filter_classes().begin(), message.filter_classes().end());
  if (unit.filter_classes.empty()) return Status::Ok();
  if (unit.filter_classes.size() != filter.stages.size()) {
    return CorruptData(fmt::format("{}.filter_classes has {} entries, expected 0 or {}", where,
                                   unit.filter_classes.size(), filter.stages.size()));
  }
  for (std::size_t i = 0; i < filter.stages.size(); ++i) {
    GRADWIRE_RETURN_IF_ERROR(CheckBelow(fmt::format("{}.filter_classes[{}]", where, i),
                                        unit.filter_classes[i], filter.stages[i].interval));
  }
  if (IsFloat(unit.dtype) && unit.op != ReduceOp::kBroadcast) return Status::Ok();
  return CorruptData(fmt::format("{} is a {} of {} and has filter_classes, which it cannot", where,
                                 ReduceOpName(unit.op), DTypeName(unit.dtype)));
}

Result<Unit> FromMessage(const Plan& plan, std::size_t index, const v1::Unit& message) {
  const std::string where = fmt::format("plan.units[{}]", index);
  Unit unit;
  if (message.key() != index) {
    return CorruptData(
        fmt::format("{}.key is {}, expected its index {}", where, message.key(), index));
  }
  unit.key = message.key();
  const Result<DType> dtype = CheckedDType(where + ".dtype", message.dtype());
  if (!dtype.ok()) return dtype.status();
  unit.dtype = *dtype;
  const Result<ReduceOp> op = ReduceOpFromWire(where + ".op", message.op());
  if (!op.ok()) return op.status();
  unit.op = *op;
  unit.priority = message.priority();
  GRADWIRE_RETURN_IF_ERROR(CheckBelow(where + ".server", message.server(), plan.num_servers));
  unit.server = message.server();
  GRADWIRE_RETURN_IF_ERROR(CheckBelow(where + ".lane", message.lane(), plan.lanes_per_server));
  unit.lane = message.lane();
  GRADWIRE_RETURN_IF_ERROR(CheckRange(where + ".num_elements", message.num_elements(), 1,
                                      kMaxTensorBytes / SizeOf(unit.dtype)));
  unit.num_elements = message.num_elements();
  GRADWIRE_RETURN_IF_ERROR(MembersFromMessage(where, plan, message, unit));
  GRADWIRE_RETURN_IF_ERROR(PhasesFromMessage(where, message, unit));
  GRADWIRE_RETURN_IF_ERROR(ClassesFromMessage(where, plan.filter, message, unit));
  return unit;
}

/// Every element of every tensor is in exactly one unit: an element in two would be summed twice,
/// one in none would be waited for in vain.
Status CheckCoverage(const Plan& plan) {
  struct Stretch {
    std::uint32_t tensor;
    std::uint64_t begin;
    std::uint64_t count;
    std::uint64_t key;
  };
  std::vector<Stretch> stretches;
  for (const Unit& unit : plan.units) {
    for (const UnitMember& member : unit.members) {
      stretches.push_back({member.tensor, member.tensor_offset, member.count, unit.key});
    }
  }
  std::sort(stretches.begin(), stretches.end(), [](const Stretch& a, const Stretch& b) {
    return std::tie(a.tensor, a.begin) < std::tie(b.tensor, b.begin);
  });
  std::size_t next = 0;
  for (std::size_t t = 0; t < plan.tensors.size(); ++t) {
    std::uint64_t covered = 0;
    for (; next < stretches.size() && stretches[next].tensor == t; ++next) {
      if (stretches[next].begin != covered) {
        return CorruptData(
            fmt::format("plan.units[{}] has tensor '{}' from element {}, expected from {}",
                        stretches[next].key, plan.tensors[t].name, stretches[next].begin, covered));
      }
      covered += stretches[next].count;
    }
    if (covered != plan.tensors[t].num_elements()) {
      return CorruptData(fmt::format("plan.units cover {} elements of tensor '{}', expected {}",
                                     covered, plan.tensors[t].name,
                                     plan.tensors[t].num_elements()));
    }
  }
  return Status::Ok();
}

}  // namespace

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kWorker:
      return "worker";
    case Role::kServer:
      return "server";
  }
  return "invalid";
}

std::vector<std::byte> Serialize(const Hello& hello) {
  v1::Hello message;
  message.set_job_id(hello.job_id);
  message.set_protocol_version(hello.protocol_version);
  message.set_role(static_cast<std::uint32_t>(hello.role));
  message.set_rank(hello.rank);
  message.set_incarnation(hello.incarnation);
  for (const auto& [key, value] : hello.shared_config) {
    v1::Setting& setting = *message.add_shared_config();
    setting.set_key(key);
    setting.set_value(value);
  }
  for (const std::string& address : hello.lane_addresses) message.add_lane_addresses(address);
  message.set_host(hello.host);
  message.set_pid(hello.pid);
  return SerializeMessage(message);
}

Result<Hello> ParseHello(ByteView bytes) {
  v1::Hello message;
  GRADWIRE_RETURN_IF_ERROR(
      ParseMessage(bytes, "hello", {v1::Hello::kSharedConfigFieldNumber}, message));
  Hello hello;
  GRADWIRE_RETURN_IF_ERROR(CheckText("hello.job_id", message.job_id().size(), 0, kMaxNameBytes));
  hello.job_id = message.job_id();
  hello.protocol_version = message.protocol_version();
  GRADWIRE_RETURN_IF_ERROR(CheckRange("hello.role", message.role(), 1, 2));
  hello.role = static_cast<Role>(message.role());
  GRADWIRE_RETURN_IF_ERROR(CheckBelow("hello.rank", message.rank(), kMaxRanks));
  hello.rank = message.rank();
  hello.incarnation = message.incarnation();
  GRADWIRE_RETURN_IF_ERROR(CheckCount(
      "hello.shared_config", static_cast<std::size_t>(message.shared_config_size()), kMaxSettings));
  for (const v1::Setting& setting : message.shared_config()) {
    GRADWIRE_RETURN_IF_ERROR(
        CheckText(fmt::format("hello.shared_config[{}].key", hello.shared_config.size()),
                  setting.key().size(), 1, kMaxNameBytes));
    GRADWIRE_RETURN_IF_ERROR(CheckText(fmt::format("hello.shared_config['{}']", setting.key()),
                                       setting.value().size(), 0, kMaxSettingBytes));
    const auto [place, is_new] = hello.shared_config.emplace(setting.key(), setting.value());
    if (!is_new) {
      return CorruptData(fmt::format("hello.shared_config['{}'] is given as '{}' and as '{}'",
                                     setting.key(), place->second, setting.value()));
    }
  }
  const auto num_lanes = static_cast<std::size_t>(message.lane_addresses_size());
  GRADWIRE_RETURN_IF_ERROR(
      CheckCount("hello.lane_addresses", num_lanes, hello.role == Role::kServer ? kMaxLanes : 0));
  for (const std::string& address : message.lane_addresses()) {
    GRADWIRE_RETURN_IF_ERROR(
        CheckText(fmt::format("hello.lane_addresses[{}]", hello.lane_addresses.size()),
                  address.size(), 1, kMaxNameBytes));
    hello.lane_addresses.push_back(address);
  }
  GRADWIRE_RETURN_IF_ERROR(CheckText("hello.host", message.host().size(), 0, kMaxNameBytes));
  hello.host = message.host();
  hello.pid = message.pid();
  return hello;
}

std::vector<std::byte> Serialize(const Welcome& welcome) {
  v1::Welcome message;
  message.set_num_workers(welcome.num_workers);
  message.set_num_servers(welcome.num_servers);
  for (const std::vector<std::string>& lanes : welcome.addresses) {
    v1::ServerAddresses& server = *message.add_servers();
    for (const std::string& address : lanes) server.add_lanes(address);
  }
  message.set_replays_plan(welcome.replays_plan);
  return SerializeMessage(message);
}

Result<Welcome> ParseWelcome(ByteView bytes) {
  v1::Welcome message;
  GRADWIRE_RETURN_IF_ERROR(
      ParseMessage(bytes, "welcome", {v1::Welcome::kServersFieldNumber}, message));
  Welcome welcome;
  GRADWIRE_RETURN_IF_ERROR(CheckRange("welcome.num_workers", message.num_workers(), 1, kMaxRanks));
  welcome.num_workers = message.num_workers();
  GRADWIRE_RETURN_IF_ERROR(CheckRange("welcome.num_servers", message.num_servers(), 1, kMaxRanks));
  welcome.num_servers = message.num_servers();
  const auto num_lists = static_cast<std::size_t>(message.servers_size());
  if (num_lists != 0 && num_lists != welcome.num_servers) {
    return CorruptData(fmt::format("welcome.servers has {} entries, expected 0 or num_servers {}",
                                   num_lists, welcome.num_servers));
  }
  for (const v1::ServerAddresses& server : message.servers()) {
    const std::string where = fmt::format("welcome.servers[{}].lanes", welcome.addresses.size());
    GRADWIRE_RETURN_IF_ERROR(
        CheckCount(where, static_cast<std::size_t>(server.lanes_size()), kMaxLanes));
    std::vector<std::string>& lanes = welcome.addresses.emplace_back();
    for (const std::string& address : server.lanes()) {
      GRADWIRE_RETURN_IF_ERROR(
          CheckText(fmt::format("{}[{}]", where, lanes.size()), address.size(), 1, kMaxNameBytes));
      lanes.push_back(address);
    }
  }
  welcome.replays_plan = message.replays_plan();
  return welcome;
}

std::vector<std::byte> Serialize(const Declare& declare) {
  v1::Declare message;
  message.set_batch(declare.batch);
  for (const TensorDeclaration& tensor : declare.tensors) {
    ToMessage(tensor, *message.add_tensors());
  }
  return SerializeMessage(message);
}

Result<Declare> ParseDeclare(ByteView bytes) {
  v1::Declare message;
  GRADWIRE_RETURN_IF_ERROR(
      ParseMessage(bytes, "declare", {v1::Declare::kTensorsFieldNumber}, message));
  Declare declare;
  declare.batch = message.batch();
  declare.tensors.reserve(static_cast<std::size_t>(message.tensors_size()));
  for (const v1::Tensor& from : message.tensors()) {
    Result<TensorDeclaration> tensor =
        FromMessage(fmt::format("declare.tensors[{}]", declare.tensors.size()), from);
    if (!tensor.ok()) return tensor.status();
    declare.tensors.push_back(std::move(*tensor));
  }
  return declare;
}

std::vector<std::byte> Serialize(const Plan& plan) {
  v1::Plan message;
  message.set_version(plan.version);
  message.set_num_workers(plan.num_workers);
  message.set_num_servers(plan.num_servers);
  message.set_lanes_per_server(plan.lanes_per_server);
  for (const TensorDeclaration& tensor : plan.tensors) ToMessage(tensor, *message.add_tensors());
  for (const Unit& unit : plan.units) ToMessage(unit, *message.add_units());
  for (const FilterStage& stage : plan.filter.stages) {
    v1::FilterStage& to = *message.add_filter_stages();
    to.set_first_step(stage.first_step);
    to.set_interval(stage.interval);
    to.set_c0(stage.c0);
    to.set_increment(stage.increment);
    to.set_every(stage.every);
  }
  message.set_skips_inactive(plan.filter.skips_inactive);
  return SerializeMessage(message);
}

Result<Plan> ParsePlan(ByteView bytes) {
  v1::Plan message;
  GRADWIRE_RETURN_IF_ERROR(ParseMessage(
      bytes, "plan", {v1::Plan::kTensorsFieldNumber, v1::Plan::kUnitsFieldNumber}, message));
  Plan plan;
  plan.version = message.version();
  GRADWIRE_RETURN_IF_ERROR(CheckRange("plan.num_workers", message.num_workers(), 1, kMaxRanks));
  plan.num_workers = message.num_workers();
  GRADWIRE_RETURN_IF_ERROR(CheckRange("plan.num_servers", message.num_servers(), 1, kMaxRanks));
  plan.num_servers = message.num_servers();
  GRADWIRE_RETURN_IF_ERROR(
      CheckRange("plan.lanes_per_server", message.lanes_per_server(), 1, kMaxLanes));
  plan.lanes_per_server = message.lanes_per_server();

  GRADWIRE_RETURN_IF_ERROR(FilterFromMessage(message, plan.filter));
  plan.tensors.reserve(static_cast<std::size_t>(message.tensors_size()));
  std::unordered_set<std::string_view> names;  // of `message`, which stays
  for (const v1::Tensor& from : message.tensors()) {
    const std::string where = fmt::format("plan.tensors[{}]", plan.tensors.size());
    Result<TensorDeclaration> tensor = FromMessage(where, from);
    if (!tensor.ok()) return tensor.status();
    if (!names.insert(from.name()).second) {
      return CorruptData(fmt::format("{}.name '{}' is there twice", where, from.name()));
    }
    plan.tensors.push_back(std::move(*tensor));
  }
  plan.units.reserve(static_cast<std::size_t>(message.units_size()));
  for (const v1::Unit& from : message.units()) {
    Result<Unit> unit = FromMessage(plan, plan.units.size(), from);
    if (!unit.ok()) return unit.status();
    plan.units.push_back(std::move(*unit));
  }
  GRADWIRE_RETURN_IF_ERROR(CheckCoverage(plan));
  return plan;
}

}  // namespace gradwire
