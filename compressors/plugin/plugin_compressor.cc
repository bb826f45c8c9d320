#include "compressors/plugin/plugin_compressor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/escape.h"
#include "compressors/codecs/codec_checks.h"
#include "compressors/codecs/float_mode.h"

namespace gradwire {
namespace {

/// A buffer for a plug-in's words, which always end.
class ErrorText {
 public:
  const gradwire_plugin_error* get() { return &error_; }

  std::string Take() {
    text_.back() = '\0';
    std::string escaped;
    AppendEscaped(std::string_view(text_.data()), false, escaped);
    return escaped.empty() ? "it does not say why" : escaped;
  }

 private:
  std::array<char, 512> text_{};
  const gradwire_plugin_error error_{text_.data(), text_.size()};
};

/// See gradwire_plugin.h. Keeps a wrong bound from overflowing sums of sizes.
std::size_t MostBytes(std::size_t n) { return 8 * n + 65536; }

bool AllFinite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

/// One thread's arrays, kept from call to call.
std::span<float> Scratch(std::vector<float>& kept, std::size_t n) {
  if (kept.size() < n) kept.resize(n);
  return std::span(kept).first(n);
}
std::span<float> InputScratch(std::size_t n) {
  thread_local std::vector<float> kept;
  return Scratch(kept, n);
}
std::span<float> DecodedScratch(std::size_t n) {
  thread_local std::vector<float> kept;
  return Scratch(kept, n);
}

class PluginCompressor final : public Compressor {
 public:
  PluginCompressor(std::string library, const gradwire_compressor& plugin, void* codec)
      : library_(std::move(library)), plugin_(plugin), codec_(codec) {}
  ~PluginCompressor() override { plugin_.destroy(codec_); }
  PluginCompressor(const PluginCompressor&) = delete;
  PluginCompressor& operator=(const PluginCompressor&) = delete;

  /// Errors: Internal if the bounds of some sizes are beyond what a plug-in may say.
  Status CheckBounds() const {
    for (const std::size_t n : {std::size_t{1}, kBlockElements, kBlockElements * kBlockElements}) {
      const std::size_t bytes = plugin_.max_encoded_size(codec_, n);
      if (bytes > MostBytes(n)) {
        return Fault(fmt::format("max_encoded_size of {} elements is {} bytes, expected at most {}",
                                 n, bytes, MostBytes(n)));
      }
    }
    return Status::Ok();
  }

  std::string_view name() const override { return plugin_.name; }

  CompressorTraits traits() const override {
    CompressorTraits traits;
    switch (plugin_.compressor_class) {
      case GRADWIRE_CLASS_EXACT:
        traits.compressor_class = CompressorClass::kExact;
        break;
      case GRADWIRE_CLASS_CONTRACTIVE:
        traits.compressor_class = CompressorClass::kContractive;
        break;
      case GRADWIRE_CLASS_UNBIASED:
        traits.compressor_class = CompressorClass::kUnbiased;
        break;
      case GRADWIRE_CLASS_BOUNDED:
        traits.compressor_class = CompressorClass::kBounded;
        break;
      default:
        traits.compressor_class = CompressorClass::kNoClaim;
    }
    traits.fixed_size = (plugin_.flags & GRADWIRE_FIXED_SIZE) != 0;
    traits.block_access = false;
    traits.feedback_by_default = (plugin_.flags & GRADWIRE_WANTS_FEEDBACK) != 0;
    return traits;
  }

  std::size_t MaxEncodedSize(std::size_t n) const override {
    return n == 0 ? 0 : std::min(plugin_.max_encoded_size(codec_, n), MostBytes(n));
  }

  Result<Encoded> Encode(BlockSource& input, std::size_t n, const CodecContext& context,
                         Residual* residual, MutableBytes output) const override {
    GRADWIRE_RETURN_IF_ERROR(CheckEncode(name(), n, residual, output.size(), MaxEncodedSize(n)));
    GRADWIRE_RETURN_IF_ERROR(CheckExplicit(name(), residual));
    Encoded encoded;
    if (n == 0) return encoded;
    const ScopedFloatMode ieee;
    // With feedback q is made where e was.
    const std::span<float> q = residual == nullptr ? InputScratch(n) : residual->values;
    encoded.finite = residual == nullptr ? Gather(input, q) : AddTo(input, context.alpha, q);
    if (!encoded.finite) return encoded;

    const auto told = Told(context);
    const std::size_t most = MaxEncodedSize(n);
    ErrorText error;
    // A plug-in that sets nothing must not go unnoticed.
    encoded.payload_bytes = most + 1;
    if (plugin_.encode(codec_, &told, q.data(), n, ToBytes(output.data()), &encoded.payload_bytes,
                       error.get()) != 0) {
      return Fault(fmt::format("encode failed: {}", error.Take()));
    }
    if (encoded.payload_bytes > most || (encoded.payload_bytes != most && traits().fixed_size)) {
      return Fault(fmt::format("encode made {} bytes of {} elements, expected {}{}",
                               encoded.payload_bytes, n, traits().fixed_size ? "" : "at most ",
                               most));
    }
    if (residual == nullptr) return encoded;

    const std::span<float> sent = DecodedScratch(n);
    plugin_.decode(codec_, &told, ToBytes(output.data()), encoded.payload_bytes, sent.data(), n);
    if (!AllFinite(sent)) return Fault(NotFinite("of a payload of its own"));
    for (std::size_t i = 0; i < n; ++i) q[i] -= sent[i];
    return encoded;
  }

  Status Validate(ByteView payload, std::size_t n) const override {
    const std::size_t most = MaxEncodedSize(n);
    if (n == 0 || traits().fixed_size) {
      GRADWIRE_RETURN_IF_ERROR(CheckPayloadSize(name(), n, payload.size(), most));
    } else if (payload.size() > most) {
      return CorruptData(fmt::format("{} payload is {} bytes, expected at most {} for {} elements",
                                     name(), payload.size(), most, n));
    }
    if (n == 0) return Status::Ok();
    const ScopedFloatMode ieee;
    ErrorText error;
    if (plugin_.validate(codec_, ToBytes(payload.data()), payload.size(), n, error.get()) == 0) {
      return Status::Ok();
    }
    return CorruptData(fmt::format("{} payload of {} bytes for {} elements: {}", name(),
                                   payload.size(), n, error.Take()));
  }

  Status Decode(ByteView payload, const CodecContext& context,
                std::span<float> output) const override {
    GRADWIRE_RETURN_IF_ERROR(Validate(payload, output.size()));
    if (output.empty()) return Status::Ok();
    const ScopedFloatMode ieee;
    const auto told = Told(context);
    plugin_.decode(codec_, &told, ToBytes(payload.data()), payload.size(), output.data(),
                   output.size());
    return AllFinite(output) ? Status::Ok() : CorruptData(Named(NotFinite("of a payload")));
  }

  Status DecodeAdd(ByteView payload, const CodecContext& context,
                   std::span<float> accumulator) const override {
    const std::span<float> decoded = DecodedScratch(accumulator.size());
    GRADWIRE_RETURN_IF_ERROR(Decode(payload, context, decoded));
    const ScopedFloatMode ieee;
    for (std::size_t i = 0; i < decoded.size(); ++i) accumulator[i] += decoded[i];
    return Status::Ok();
  }

  /// Right for any range, but decodes the whole payload.
  void DecodeAddRange(ByteView payload, std::size_t n, const CodecContext& context,
                      std::size_t offset, std::span<float> accumulator) const override {
    const std::span<float> decoded = DecodedScratch(n);
    if (!Decode(payload, context, decoded).ok()) return;  // the precondition says that it is
    const ScopedFloatMode ieee;
    for (std::size_t i = 0; i < accumulator.size(); ++i) accumulator[i] += decoded[offset + i];
  }

  void Flush(Residual&) const override {}

  void Undo(ByteView payload, const CodecContext& context, Residual& residual) const override {
    const Status status = DecodeAdd(payload, context, residual.values);
    assert(status.ok());
    static_cast<void>(status);
  }

 private:
  static const std::uint8_t* ToBytes(const std::byte* bytes) {
    return static_cast<const std::uint8_t*>(static_cast<const void*>(bytes));
  }
  static std::uint8_t* ToBytes(std::byte* bytes) {
    return static_cast<std::uint8_t*>(static_cast<void*>(bytes));
  }
  static gradwire_codec_context Told(const CodecContext& context) {
    return {context.stream_seed, context.shared_seed};
  }

  /// Returns whether all of the input is finite.
  static bool Gather(BlockSource& input, std::span<float> values) {
    ForEachBlock(values.size(), [&](std::size_t offset, std::size_t count) {
      std::copy_n(input.Block(offset, count), count, values.begin() + std::ptrdiff_t(offset));
    });
    return AllFinite(values);
  }

  /// q = input + alpha * e where that is finite, e where it is not. Returns whether all is.
  static bool AddTo(BlockSource& input, float alpha, std::span<float> values) {
    bool all_finite = true;
    ForEachBlock(values.size(), [&](std::size_t offset, std::size_t count) {
      const float* const block = input.Block(offset, count);
      float* const e = values.data() + offset;
      for (std::size_t i = 0; i < count; ++i) {
        const float q = block[i] + alpha * e[i];
        const bool finite = std::isfinite(q);
        e[i] = finite ? q : e[i];
        all_finite = all_finite && finite;
      }
    });
    return all_finite;
  }

  static std::string NotFinite(std::string_view of_what) {
    return fmt::format("decode gave values that are not finite {}", of_what);
  }
  std::string Named(const std::string& fault) const {
    return fmt::format("plug-in '{}', compressor {}: {}", library_, name(), fault);
  }
  Status Fault(const std::string& fault) const { return Internal(Named(fault)); }

  const std::string library_;
  const gradwire_compressor& plugin_;
  void* const codec_;
};

}  // namespace

Result<std::unique_ptr<const Compressor>> MakePluginCompressor(
    std::string library, const gradwire_compressor& description, const Parameters& parameters) {
  std::vector<gradwire_parameter> given;
  for (std::size_t i = 0; i < description.num_parameters; ++i) {
    const char* const name = description.parameters[i].name;
    if (parameters.Has(name)) given.push_back({name, parameters.Text(name).c_str()});
  }
  void* codec = nullptr;
  ErrorText error;
  {
    const ScopedFloatMode ieee;
    if (description.create(given.data(), given.size(), &codec, error.get()) != 0) {
      return InvalidArgument(fmt::format("plug-in '{}', compressor {}: create failed: {}", library,
                                         description.name, error.Take()));
    }
  }
  auto made = std::make_unique<PluginCompressor>(std::move(library), description, codec);
  GRADWIRE_RETURN_IF_ERROR(made->CheckBounds());
  return std::unique_ptr<const Compressor>(std::move(made));
}

}  // namespace gradwire
