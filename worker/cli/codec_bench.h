#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"
#include "compressors/registry.h"

namespace gradwire {

struct CodecBenchOptions {
  std::vector<std::string> specs;
  std::vector<std::size_t> sizes;         // bytes of float32, each a multiple of 4 above 0
  std::size_t num_repeats = 11;           // at least 1
  std::size_t num_threads = 1;            // 1, or 2: also two at once, each with a unit of its own
  std::size_t num_warm_up_rounds = 2000;  // of a small unit, until its residual is what it stays
  std::string_view target;                // the kernels' instruction set, for the baseline
};

/// Of the repeats' figures.
struct Quartiles {
  double low = 0;
  double median = 0;
  double high = 0;
};

/// One operation. Rates are 10^9 bytes of float32 input a second, whatever the payload's size;
/// ratios are rates over those of the baseline around it, repeat by repeat.
struct OperationFigures {
  Quartiles rate;
  Quartiles to_add;                         // over a += b of the same size
  Quartiles to_memcpy;                      // over memcpy of the same size
  std::optional<Quartiles> to_scatter_add;  // decode-add of sparse codecs
  std::optional<Quartiles> two_threads;     // two at once over one
};

/// Of one compressor and size.
struct CodecFigures {
  std::string spec;
  std::size_t bytes = 0;  // float32
  bool feedback = false;  // encode was measured with it
  /// Payload bytes an element of N(0, 1) itself, and of what is encoded with feedback after many
  /// rounds of it (the same without feedback).
  double bytes_per_element = 0;
  double bytes_per_element_sent = 0;
  double relative_error = 0;  // |C(x) - x| / |x| of N(0, 1)
  OperationFigures encode;
  OperationFigures decode;
  OperationFigures decode_add;
  Quartiles add_rate;
  Quartiles memcpy_rate;
  std::optional<Quartiles> add_two_threads;
};

/// Measures each compressor at each size on N(0, 1): encode (with feedback where the compressor
/// wants it), decode and decode-add, each between two a += b and beside a memcpy of the same size,
/// so that all share the machine's good and bad moments. Sizes are the outer loop. `report` gets
/// each result as it comes.
/// Errors: what the registry says of a spec, before anything is measured; what a codec
/// says; Internal for a codec that finds finite values not finite.
/// Memory: allocated once for the largest size, about 6 times that a thread.
Status MeasureCodecs(const CompressorRegistry& registry, const CodecBenchOptions& options,
                     const std::function<void(const CodecFigures&)>& report);

}  // namespace gradwire
