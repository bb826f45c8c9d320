#include "common/wire/plan_data.h"

namespace gradwire {

std::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kBroadcast:
      return "broadcast";
  }
  return "invalid";
}

}  // namespace gradwire
