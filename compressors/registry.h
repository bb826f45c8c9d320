#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "compressors/compressor.h"

namespace gradwire {

/// A compressor's name and the parameters somebody set, as text: {"topk", {{"ratio", "0.01"}}}.
/// Its written form "topk(ratio=0.01)" is what plans, logs and handshakes carry.
struct CompressorSpec {
  std::string name = "none";
  std::map<std::string, std::string> parameters;

  friend bool operator==(const CompressorSpec&, const CompressorSpec&) = default;
};

std::string ToString(const CompressorSpec& spec);
/// Errors: InvalidArgument for text that is not name or name(key=value,...).
Result<CompressorSpec> ParseCompressorSpec(std::string_view text);

/// One parameter of a compressor: what the table, the checks and the error messages are made from.
struct ParameterInfo {
  enum class Kind { kNumber, kInteger, kBool, kChoice };
  std::string name;
  Kind kind = Kind::kNumber;
  std::string default_value;  // empty: no default, the parameter may be left out
  double min = 0;             // numbers and integers, inclusive
  double max = 0;
  std::vector<std::string> choices;  // kChoice
  std::string description;
};

/// What the parameter accepts, for people: "a number from 0 to 1".
std::string Accepts(const ParameterInfo& info);

/// Parameters after checking: every one that has a default is present and in its range.
class Parameters {
 public:
  bool Has(std::string_view name) const;
  double Number(std::string_view name) const;
  std::uint64_t Integer(std::string_view name) const;
  bool Bool(std::string_view name) const;
  const std::string& Text(std::string_view name) const;

 private:
  friend Result<Parameters> CheckParameters(std::string_view owner,
                                            const std::vector<ParameterInfo>& known,
                                            const std::map<std::string, std::string>& given);
  std::map<std::string, std::string, std::less<>> values_;
};

/// The parameters that were given, over the defaults of those that are known. `owner` is whose they
/// are, for messages: "compressor topk".
/// Errors: InvalidArgument for an unknown parameter (with the nearest one) or a value that does not
/// parse or is out of range (with text and range).
Result<Parameters> CheckParameters(std::string_view owner, const std::vector<ParameterInfo>& known,
                                   const std::map<std::string, std::string>& given);

/// "; did you mean 'topk'? There are: none, topk", or that there are none.
std::string NearestHint(std::string_view wanted, const std::vector<std::string>& names);

/// Everything the registry knows of a compressor.
struct CompressorInfo {
  std::string name;
  std::uint16_t wire_id = 0;
  std::string description;
  std::string source;       // the paper
  std::string plugin_path;  // of a plug-in, as it was named; empty: built in
  std::string version;      // of a plug-in's payload format
  std::vector<ParameterInfo> parameters;
  std::function<Result<std::unique_ptr<const Compressor>>(const Parameters&)> create;
};

/// The compressors by name. An object, not a singleton: tests and plug-ins make their own.
/// Threads: const methods are safe from many threads once registration is over.
class CompressorRegistry {
 public:
  /// Errors: InvalidArgument if the name or the wire id is taken.
  Status Register(CompressorInfo info);

  /// Errors: NotFound with the nearest name; InvalidArgument for an unknown parameter (with the
  /// nearest one) or a value that does not parse or is out of range (with text and range).
  Result<std::unique_ptr<const Compressor>> Create(const CompressorSpec& spec) const;
  Result<std::unique_ptr<const Compressor>> Create(std::string_view written_spec) const;

  const CompressorInfo* Find(std::string_view name) const;
  /// In order of registration.
  const std::vector<CompressorInfo>& entries() const { return entries_; }

 private:
  std::vector<CompressorInfo> entries_;
};

/// Registers every compressor of this build; see builtin.cc.
Status RegisterBuiltinCompressors(CompressorRegistry& registry);

/// A registry with every built-in compressor.
const CompressorRegistry& BuiltinCompressors();

}  // namespace gradwire
