#include "compressors/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <charconv>
#include <optional>
#include <utility>

namespace gradwire {
namespace {

/// Insertions, deletions and replacements that turn one text into the other.
std::size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

template <typename T>
std::optional<T> ParseWhole(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool IsAccepted(const ParameterInfo& info, std::string_view text) {
  switch (info.kind) {
    case ParameterInfo::Kind::kNumber: {
      const auto value = ParseWhole<double>(text);
      return value && *value >= info.min && *value <= info.max;  // false for NaN
    }
    case ParameterInfo::Kind::kInteger: {
      const auto value = ParseWhole<std::uint64_t>(text);
      return value && static_cast<double>(*value) >= info.min &&
             static_cast<double>(*value) <= info.max;
    }
    case ParameterInfo::Kind::kBool:
      return text == "true" || text == "false";
    case ParameterInfo::Kind::kChoice:
      return std::find(info.choices.begin(), info.choices.end(), text) != info.choices.end();
  }
  return false;
}

/// Names, keys and values of written forms: anything printable but the punctuation of the form.
bool IsWord(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c > ' ' && c < '\x7f' && c != '(' && c != ')' && c != ',' && c != '=';
  });
}

}  // namespace

std::string NearestHint(std::string_view wanted, const std::vector<std::string>& names) {
  if (names.empty()) return "; there are none";
  const auto nearest =
      std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
        return EditDistance(wanted, a) < EditDistance(wanted, b);
      });
  return fmt::format("; did you mean '{}'? There are: {}", *nearest, fmt::join(names, ", "));
}

std::string Accepts(const ParameterInfo& info) {
  switch (info.kind) {
    case ParameterInfo::Kind::kNumber:
      return fmt::format("a number from {} to {}", info.min, info.max);
    case ParameterInfo::Kind::kInteger:
      return fmt::format("a whole number from {:.0f} to {:.0f}", info.min, info.max);
    case ParameterInfo::Kind::kBool:
      return "true or false";
    case ParameterInfo::Kind::kChoice:
      return fmt::format("one of {}", fmt::join(info.choices, ", "));
  }
  return "";
}

std::string ToString(const CompressorSpec& spec) {
  std::string text = spec.name;
  char separator = '(';
  for (const auto& [name, value] : spec.parameters) {
    text += separator;
    text += name;
    text += '=';
    text += value;
    separator = ',';
  }
  if (!spec.parameters.empty()) text += ')';
  return text;
}

Result<CompressorSpec> ParseCompressorSpec(std::string_view text) {
  const auto malformed = [&] {
    return InvalidArgument(
        fmt::format("'{}' is not a compressor, expected name or name(key=value,...)", text));
  };
  CompressorSpec spec;
  const std::size_t open = text.find('(');
  spec.name = std::string(text.substr(0, open));
  if (!IsWord(spec.name)) return malformed();
  if (open == std::string_view::npos) return spec;
  if (text.back() != ')') return malformed();
  std::string_view rest = text.substr(open + 1, text.size() - open - 2);
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) return malformed();
    const std::string_view key = item.substr(0, equals);
    const std::string_view value = item.substr(equals + 1);
    if (!IsWord(key) || !IsWord(value)) return malformed();
    if (!spec.parameters.emplace(key, value).second) {
      return InvalidArgument(fmt::format("'{}' sets {} twice", text, key));
    }
    if (comma == std::string_view::npos) return spec;
    rest.remove_prefix(comma + 1);
  }
}

bool Parameters::Has(std::string_view name) const { return values_.find(name) != values_.end(); }

const std::string& Parameters::Text(std::string_view name) const {
  const auto found = values_.find(name);
  assert(found != values_.end());
  return found->second;
}

double Parameters::Number(std::string_view name) const {
  return ParseWhole<double>(Text(name)).value_or(0);
}

std::uint64_t Parameters::Integer(std::string_view name) const {
  return ParseWhole<std::uint64_t>(Text(name)).value_or(0);
}

bool Parameters::Bool(std::string_view name) const { return Text(name) == "true"; }

Result<Parameters> CheckParameters(std::string_view owner, const std::vector<ParameterInfo>& known,
                                   const std::map<std::string, std::string>& given) {
  Parameters parameters;
  for (const ParameterInfo& parameter : known) {
    if (!parameter.default_value.empty()) {
      parameters.values_[parameter.name] = parameter.default_value;
    }
  }
  for (const auto& item : given) {
    const std::string& name = item.first;  // lambdas may not capture structured bindings everywhere
    const std::string& value = item.second;
    const auto parameter = std::find_if(known.begin(), known.end(),
                                        [&](const ParameterInfo& p) { return p.name == name; });
    if (parameter == known.end()) {
      std::vector<std::string> names;
      for (const ParameterInfo& other : known) names.push_back(other.name);
      return InvalidArgument(
          fmt::format("{} has no parameter '{}'{}", owner, name, NearestHint(name, names)));
    }
    if (!IsAccepted(*parameter, value)) {
      return InvalidArgument(
          fmt::format("{} of {} is '{}', expected {}", name, owner, value, Accepts(*parameter)));
    }
    parameters.values_[name] = value;
  }
  return parameters;
}

Status CompressorRegistry::Register(CompressorInfo info) {
  if (!IsWord(info.name)) {
    return InvalidArgument(fmt::format("'{}' cannot be a compressor's name", info.name));
  }
  if (info.wire_id == 0) {
    return InvalidArgument(fmt::format("compressor {} has wire id 0, expected above", info.name));
  }
  for (const CompressorInfo& other : entries_) {
    if (other.name == info.name) {
      return InvalidArgument(fmt::format("compressor {} is registered already", info.name));
    }
    if (other.wire_id == info.wire_id) {
      return InvalidArgument(fmt::format("compressor {} wants wire id {}, which {} has", info.name,
                                         info.wire_id, other.name));
    }
  }
  entries_.push_back(std::move(info));
  return Status::Ok();
}

const CompressorInfo* CompressorRegistry::Find(std::string_view name) const {
  for (const CompressorInfo& info : entries_) {
    if (info.name == name) return &info;
  }
  return nullptr;
}

Result<std::unique_ptr<const Compressor>> CompressorRegistry::Create(
    const CompressorSpec& spec) const {
  const CompressorInfo* info = Find(spec.name);
  if (info == nullptr) {
    std::vector<std::string> names;
    for (const CompressorInfo& entry : entries_) names.push_back(entry.name);
    return NotFound(
        fmt::format("no compressor is named '{}'{}", spec.name, NearestHint(spec.name, names)));
  }
  const auto parameters =
      CheckParameters(fmt::format("compressor {}", spec.name), info->parameters, spec.parameters);
  if (!parameters.ok()) return parameters.status();
  return info->create(*parameters);
}

Result<std::unique_ptr<const Compressor>> CompressorRegistry::Create(
    std::string_view written_spec) const {
  Result<CompressorSpec> spec = ParseCompressorSpec(written_spec);
  if (!spec.ok()) return spec.status();
  return Create(*spec);
}

}  // namespace gradwire
