#pragma once

#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/wire/plan_data.h"

namespace gradwire {

/// Reads a model's tensors, fp32, in the order of the forward pass: a line each, name and extents,
/// "encoder.weight 768 3072"; empty lines and what follows a '#' don't count. The earlier a tensor,
/// the higher its priority. configs/models has some.
/// Errors: NotFound with the reason; InvalidArgument with file, line and what is wrong there.
Result<std::vector<TensorDeclaration>> ReadModelList(const std::string& path);

}  // namespace gradwire
