#pragma once

#include "compressors/methods/method.h"

namespace gradwire {

// One for each file of methods; Methods() lists them.
MethodInfo SgdMethod();
MethodInfo AdamWMethod();
MethodInfo LambMethod();
MethodInfo LansMethod();
MethodInfo ClanMethod();
MethodInfo DistEfSgdmMethod();
MethodInfo OnebitAdamMethod();
MethodInfo OnebitLambMethod();

// Parameters that several methods have.
ParameterInfo Beta1Parameter();
ParameterInfo Beta2Parameter();
ParameterInfo EpsilonParameter(std::string default_value);
ParameterInfo WeightDecayParameter(std::string default_value);
ParameterInfo MomentumParameter();
ParameterInfo BiasCorrectionParameter();
ParameterInfo FreezeStepParameter();
ParameterInfo VFloorParameter();
ParameterInfo NormLowParameter();
ParameterInfo NormHighParameter();

}  // namespace gradwire
