#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <string_view>
#include <vector>

#include "worker/trainer/trainer.h"

namespace gradwire::trainer {
namespace {

std::string Number(double value) {
  return std::isfinite(value) ? fmt::format("{:.9g}", value) : "null";
}

/// A JSON object under construction, one key a line.
class JsonObject {
 public:
  void Text(std::string_view key, std::string_view value) {
    std::string quoted = "\"";
    for (const char c : value) {
      if (c == '"' || c == '\\') {
        quoted += '\\';
        quoted += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        quoted += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
      } else {
        quoted += c;
      }
    }
    Raw(key, quoted + '"');
  }
  void Integer(std::string_view key, std::uint64_t value) { Raw(key, fmt::format("{}", value)); }
  void Real(std::string_view key, double value) { Raw(key, Number(value)); }
  /// A ratio is 0, and written as null, where there is none.
  void RealOrNull(std::string_view key, double value, bool there) {
    if (there) {
      Real(key, value);
    } else {
      Raw(key, "null");
    }
  }
  /// `values` are JSON already.
  void Array(std::string_view key, const std::vector<std::string>& values) {
    Raw(key, fmt::format("[{}]", fmt::join(values, ", ")));
  }
  std::string Finish() const { return text_ + "\n}\n"; }

 private:
  void Raw(std::string_view key, std::string_view value) {
    text_ += fmt::format("{}\n  \"{}\": {}", text_.size() > 1 ? "," : "", key, value);
  }
  std::string text_ = "{";
};

void Append(JsonObject& json, std::string_view prefix, const Volume& volume) {
  json.Integer(fmt::format("{}_raw_push_bytes", prefix), volume.raw_push_bytes);
  json.Integer(fmt::format("{}_raw_pull_bytes", prefix), volume.raw_pull_bytes);
  json.Integer(fmt::format("{}_sent_bytes", prefix), volume.sent_bytes);
  json.Integer(fmt::format("{}_received_bytes", prefix), volume.received_bytes);
}

std::vector<std::string> Points(const std::vector<CurvePoint>& curve) {
  std::vector<std::string> points;
  for (const CurvePoint& p : curve) {
    points.push_back(fmt::format(
        R"({{"step": {}, "seconds": {}, "loss": {}, "test_loss": {}, "accuracy": {}}})", p.step,
        Number(p.seconds), Number(p.loss), Number(p.test.loss), Number(p.test.accuracy)));
  }
  return points;
}

}  // namespace

double Ratio(std::uint64_t raw_bytes, std::uint64_t wire_bytes) {
  return wire_bytes == 0 ? 0.0 : static_cast<double>(raw_bytes) / static_cast<double>(wire_bytes);
}

std::string ToJson(const RunSummary& run) {
  const TrainReport& report = run.report;
  const Volume& gradients = report.gradients;
  JsonObject json;
  json.Text("model", run.model);
  json.Integer("rank", run.rank);
  json.Integer("workers", run.workers);
  json.Integer("batch", run.batch);
  json.Integer("seed", run.seed);
  json.Real("rate", run.rate);
  json.Text("method", run.method);
  json.Integer("parameters", run.num_parameters);
  json.Text("kernels", run.kernels);
  json.Text("uplink", run.uplink);
  json.Text("downlink", run.downlink);
  json.Integer("steps", report.steps);
  json.Real("seconds", report.seconds);
  json.RealOrNull("steps_per_second",
                  static_cast<double>(report.steps - report.first_step) / report.seconds,
                  report.seconds > 0.0);
  json.RealOrNull("restored_step", static_cast<double>(report.first_step), report.first_step > 0);
  json.Real("compute_seconds", report.compute_seconds);
  json.Real("wait_seconds", report.wait_seconds);
  json.Real("hand_over_seconds", report.hand_over_seconds);
  json.Real("gflops", report.gflops());
  json.Real("first_loss", report.first_loss);
  json.Real("last_loss", report.last_loss);
  json.RealOrNull("test_loss", run.test.loss, run.has_test);
  json.RealOrNull("accuracy", run.test.accuracy, run.has_test);
  Append(json, "gradient", gradients);
  json.RealOrNull("push_ratio", Ratio(gradients.raw_push_bytes, gradients.sent_bytes),
                  gradients.sent_bytes != 0);
  json.RealOrNull("pull_ratio", Ratio(gradients.raw_pull_bytes, gradients.received_bytes),
                  gradients.received_bytes != 0);
  Append(json, "broadcast", report.broadcast);
  json.Real("broadcast_seconds", report.broadcast_seconds);
  json.Integer("skipped_updates", report.skipped_updates);
  json.Integer("nonfinite_units", report.nonfinite_units);
  const OverlapFigures& overlap = report.overlap;
  const bool is_known = overlap.comm_ms > 0.0;
  json.RealOrNull("step_ms", overlap.step_ms, is_known);
  json.RealOrNull("comm_ms", overlap.comm_ms, is_known);
  json.RealOrNull("compute_ms", overlap.compute_ms, is_known);
  json.RealOrNull("exposed_ms", overlap.exposed_ms, is_known);
  json.RealOrNull("ccr", overlap.ccr(), is_known);
  json.RealOrNull("interval", report.interval, report.interval > 0);
  json.Array("curve", Points(report.curve));
  json.Text("digest", fmt::format("{:016x}", report.digest));
  return json.Finish();
}

}  // namespace gradwire::trainer
