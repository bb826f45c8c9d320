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

Result<const MethodInfo*> FindMethod(const CompressorSpec& spec) {
  std::vector<std::string> names;
  for (const MethodInfo& known : Methods()) {
    if (known.name == spec.name) return &known;
    names.push_back(known.name);
  }
  return NotFound(
      fmt::format("no method is named '{}'{}", spec.name, NearestHint(spec.name, names)));
}

bool HasWarmup(const MethodInfo& info) {
  return std::any_of(info.parameters.begin(), info.parameters.end(),
                     [](const auto& p) { return p.name == "freeze_step"; });
}

Result<Parameters> CheckedParameters(const MethodInfo& info, const CompressorSpec& spec) {
  auto parameters =
      CheckParameters(fmt::format("method {}", spec.name), info.parameters, spec.parameters);
  if (!parameters.ok()) return parameters;
  if (parameters->Has("norm_low") && parameters->Has("norm_high") &&
      parameters->Number("norm_low") > parameters->Number("norm_high")) {
    return InvalidArgument(fmt::format("method {} has norm_low {}, expected at most norm_high {}",
                                       spec.name, parameters->Text("norm_low"),
                                       parameters->Text("norm_high")));
  }
  return parameters;
}

/// Errors: InvalidArgument where the method and what the job does to what it sends don't go
/// together.
Status CheckJob(std::string_view name, const MethodTraits& traits, const CompressionRules& job) {
  if (traits.needs_two_way) {
    const bool misses_up = job.uplink.compressor.name == "none";
    if (misses_up || job.downlink.compressor.name == "none") {
      return InvalidArgument(fmt::format(
          "method {} wants a compressor in both directions, and compression.{}.compressor is none; "
          "method lans does without",
          name, misses_up ? "uplink" : "downlink"));
    }
  }
  const bool is_filtered = job.filter.type == FilterType::kCovap;
  if (is_filtered && traits.pushes_state) {
    return InvalidArgument(fmt::format(
        "method {} sends momenta, and compression.filter.type is covap, which would send the sum "
        "of those it has held back; expected none",
        name));
  }
  if (is_filtered && traits.needs_skip && job.filter.inactive == FilterInactive::kZeroFill) {
    return InvalidArgument(fmt::format(
        "method {} shrinks parameters whose gradient is zero, and compression.filter.inactive is "
        "zero_fill, which gives zeros where the filter sends nothing; expected skip",
        name));
  }
  if (traits.freeze_step > 0 && Compresses(job) && traits.freeze_step != job.warmup_steps) {
    return InvalidArgument(fmt::format(
        "freeze_step of method {} is {}, expected compression.warmup_steps, which is {}: what is "
        "frozen is learned without compression",
        name, traits.freeze_step, job.warmup_steps));
  }
  return Status::Ok();
}

}  // namespace

bool Compresses(const CompressionRules& job) {
  const auto compresses = [](const LinkCompression& link) {
    return link.compressor.name != "none";
  };
  return compresses(job.uplink) || compresses(job.downlink) ||
         std::any_of(job.rules.begin(), job.rules.end(), [&](const TensorRule& rule) {
           return (rule.uplink && compresses(*rule.uplink)) ||
                  (rule.downlink && compresses(*rule.downlink));
         });
}

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

ParameterInfo VFloorParameter() {
  return Number("v_floor", "0.1", 0, 1,
                "after the warm-up sqrt(v) counts as at least this times its root mean square");
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

namespace {

struct KnownMethod {
  const MethodInfo* info = nullptr;
  Parameters parameters;
};

/// With the job's warm-up where the spec names none.
Result<KnownMethod> Resolve(const CompressorSpec& spec, const CompressionRules* job) {
  const auto info = FindMethod(spec);
  if (!info.ok()) return info.status();
  CompressorSpec given = spec;
  if (HasWarmup(**info) && given.parameters.count("freeze_step") == 0) {
    if (job == nullptr || job->warmup_steps == 0) {
      return InvalidArgument(fmt::format(
          "method {} has no freeze_step, expected the first step after its warm-up, which is "
          "compression.warmup_steps",
          spec.name));
    }
    given.parameters["freeze_step"] = fmt::format("{}", job->warmup_steps);
  }
  auto parameters = CheckedParameters(**info, given);
  if (!parameters.ok()) return parameters.status();
  return KnownMethod{*info, std::move(parameters).value()};
}

}  // namespace

Result<std::unique_ptr<const Method>> CreateMethod(const CompressorSpec& spec,
                                                   const CompressionRules* job) {
  const auto known = Resolve(spec, job);
  if (!known.ok()) return known.status();
  auto method = known->info->create(known->parameters);
  if (!method.ok() || job == nullptr) return method;
  GRADWIRE_RETURN_IF_ERROR(CheckJob(spec.name, method.value()->traits(), *job));
  return method;
}

Result<CompressorSpec> CompleteMethodSpec(const CompressorSpec& spec, const CompressionRules* job) {
  const auto known = Resolve(spec, job);
  if (!known.ok()) return known.status();
  CompressorSpec complete{spec.name, {}};
  for (const ParameterInfo& info : known->info->parameters) {
    if (!known->parameters.Has(info.name)) continue;
    const bool is_number = info.kind == ParameterInfo::Kind::kNumber;
    complete.parameters[info.name] = is_number
                                         ? fmt::format("{}", known->parameters.Number(info.name))
                                         : known->parameters.Text(info.name);
  }
  return complete;
}

Status CheckMethodSpec(const CompressorSpec& spec) {
  if (spec.name == kNoMethod) {
    if (spec.parameters.empty()) return Status::Ok();
    return InvalidArgument(fmt::format("method none has the parameter {}, expected none",
                                       spec.parameters.begin()->first));
  }
  const auto info = FindMethod(spec);
  if (!info.ok()) return info.status();
  return CheckedParameters(**info, spec).status();
}

Result<MethodTraits> JobMethodTraits(const CompressorSpec& spec, const CompressionRules& job) {
  if (spec.name == kNoMethod) {
    GRADWIRE_RETURN_IF_ERROR(CheckMethodSpec(spec));
    return MethodTraits{};
  }
  const auto method = CreateMethod(spec, &job);
  if (!method.ok()) return method.status();
  return method.value()->traits();
}

}  // namespace gradwire
