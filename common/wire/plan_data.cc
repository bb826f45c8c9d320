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

std::string_view FeedbackName(Feedback feedback) {
  switch (feedback) {
    case Feedback::kNone:
      return "none";
    case Feedback::kEf:
      return "ef";
    case Feedback::kEfLr:
      return "ef_lr";
  }
  return "invalid";
}

}  // namespace gradwire
