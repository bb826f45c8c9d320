#include "compressors/methods/builtin.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace gradwire {
namespace {

ParameterInfo Number(std::string name, std::string default_value, double min, double max,
                     std::string description) {
  ParameterInfo info;
  info.name = std::move(name);
  info.default_value = std::move(default_value);
  info.min = min;
  info.max = max;
  info.description = std::move(description);
  return info;
}

}  // namespace

ParameterInfo Beta1Parameter() {
  return Number("beta1", "0.9", 0, 0.9999, "memory of the first moment");
}
ParameterInfo Beta2Parameter() {
  return Number("beta2", "0.999", 0, 0.999999, "memory of the second moment");
}
ParameterInfo EpsilonParameter(std::string default_value) {
  return Number("eps", std::move(default_value), 1e-20, 1, "added to the divisor");
}
ParameterInfo WeightDecayParameter(std::string default_value) {
  return Number("weight_decay", std::move(default_value), 0, 10, "of the parameters");
}
ParameterInfo MomentumParameter() { return Number("momentum", "0.9", 0, 0.9999, "its memory"); }
ParameterInfo NormLowParameter() {
  return Number("norm_low", "", 0, 1e30, "the parameters' norm counts as at least this");
}
ParameterInfo NormHighParameter() {
  return Number("norm_high", "", 1e-30, 1e30, "the parameters' norm counts as at most this");
}

ParameterInfo BiasCorrectionParameter() {
  ParameterInfo info;
  info.name = "bias_correction";
  info.kind = ParameterInfo::Kind::kBool;
  info.default_value = "true";
  info.description = "divide the moments by 1 - beta^t";
  return info;
}

ParameterInfo FreezeStepParameter() {
  ParameterInfo info = Number("freeze_step", "", 1, 1e12, "the first step after the warm-up");
  info.kind = ParameterInfo::Kind::kInteger;
  return info;
}

const std::vector<MethodInfo>& Methods() {
  static const std::vector<MethodInfo> methods = {
      SgdMethod(),  AdamWMethod(),      LambMethod(),       LansMethod(),
      ClanMethod(), DistEfSgdmMethod(), OnebitAdamMethod(), OnebitLambMethod()};
  return methods;
}

Result<CompressorSpec> ParseMethodSpec(std::string_view text) {
  Result<CompressorSpec> spec = ParseCompressorSpec(text);
  if (!spec.ok()) {
    return InvalidArgument(fmt::format(
        "'{}' is not a method, expected name or name(key=value,...), each key once", text));
  }
  return spec;
}

Result<std::unique_ptr<const Method>> CreateMethod(const CompressorSpec& spec,
                                                   const JobCompression* job) {
  const std::vector<MethodInfo>& methods = Methods();
  const auto info = std::find_if(methods.begin(), methods.end(),
                                 [&](const MethodInfo& m) { return m.name == spec.name; });
  if (info == methods.end()) {
    std::vector<std::string> names;
    for (const MethodInfo& known : methods) names.push_back(known.name);
    return NotFound(
        fmt::format("no method is named '{}'{}", spec.name, NearestHint(spec.name, names)));
  }
  auto given = spec.parameters;
  const bool has_phases = std::any_of(info->parameters.begin(), info->parameters.end(),
                                      [](const auto& p) { return p.name == "freeze_step"; });
  if (has_phases && given.count("freeze_step") == 0) {
    if (job == nullptr || job->warmup_steps == 0) {
      return InvalidArgument(fmt::format(
          "method {} has no freeze_step, expected the first step after its warm-up, which is "
          "compression.warmup_steps",
          spec.name));
    }
    given["freeze_step"] = fmt::format("{}", job->warmup_steps);
  }
  const auto parameters =
      CheckParameters(fmt::format("method {}", spec.name), info->parameters, given);
  if (!parameters.ok()) return parameters.status();
  if (parameters->Has("norm_low") && parameters->Has("norm_high") &&
      parameters->Number("norm_low") > parameters->Number("norm_high")) {
    return InvalidArgument(fmt::format("method {} has norm_low {}, expected at most norm_high {}",
                                       spec.name, parameters->Text("norm_low"),
                                       parameters->Text("norm_high")));
  }
  auto method = info->create(*parameters);
  if (!method.ok() || job == nullptr) return method;
  const MethodTraits traits = method.value()->traits();
  if (traits.needs_two_way) {
    const bool misses_up = job->uplink.name == "none";
    if (misses_up || job->downlink.name == "none") {
      return InvalidArgument(fmt::format(
          "method {} wants a compressor in both directions, and compression.{}.compressor is none; "
          "method lans does without",
          spec.name, misses_up ? "uplink" : "downlink"));
    }
  }
  const bool compresses = job->uplink.name != "none" || job->downlink.name != "none";
  if (traits.freeze_step > 0 && compresses && traits.freeze_step != job->warmup_steps) {
    return InvalidArgument(fmt::format(
        "freeze_step of method {} is {}, expected compression.warmup_steps, which is {}: what is "
        "frozen is learned without compression",
        spec.name, traits.freeze_step, job->warmup_steps));
  }
  return method;
}

}  // namespace gradwire
