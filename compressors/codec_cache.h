#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "common/base/dtype.h"
#include "common/base/status.h"
#include "compressors/registry.h"

namespace gradwire {

/// The codecs of a process by written form, each made once. Plans name codecs by text; this is
/// where workers and servers turn the text into objects.
/// Threads: safe.
class CodecCache {
 public:
  explicit CodecCache(const CompressorRegistry& registry) : registry_(registry) {}

  /// The codec lives as long as the cache.
  /// Errors: as CompressorRegistry::Create.
  Result<const Compressor*> Get(const std::string& written_spec) {
    const std::lock_guard lock(mu_);
    const auto found = codecs_.find(written_spec);
    if (found != codecs_.end()) return found->second.get();
    auto made = registry_.Create(written_spec);
    if (!made.ok()) return made.status();
    const Compressor* codec = made.value().get();
    codecs_.emplace(written_spec, std::move(made).value());
    return codec;
  }

  /// The codec whose payload is what `none` sends of this dtype: the dtype's own bytes for fp16 and
  /// bf16, fp32 for everything that is converted.
  Result<const Compressor*> GetFor(const std::string& written_spec, DType dtype) {
    if (written_spec == "none" && dtype == DType::kFloat16) return Get("fp16");
    if (written_spec == "none" && dtype == DType::kBFloat16) return Get("bf16");
    return Get(written_spec);
  }

 private:
  const CompressorRegistry& registry_;
  std::mutex mu_;
  std::map<std::string, std::unique_ptr<const Compressor>> codecs_;  // guarded by mu_
};

}  // namespace gradwire
