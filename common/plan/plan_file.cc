#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "common/base/whole_file.h"
#include "common/plan/plan.h"
#include "common/wire/control.h"

namespace gradwire {
namespace {

// magic[8] | u64 length | Serialize(plan)[length] | u64 FNV-1a of what precedes it
constexpr std::string_view kMagic = "GWPLAN1\n";
constexpr std::size_t kHeadBytes = 16;
constexpr std::size_t kTailBytes = 8;

}  // namespace

Status SavePlan(const Plan& plan, const std::string& path) {
  const std::vector<std::byte> body = Serialize(plan);
  if (body.size() > kMaxControlBytes) {
    return InvalidArgument(fmt::format("the plan takes {} bytes, at most {} can be saved",
                                       body.size(), kMaxControlBytes));
  }
  std::vector<std::byte> bytes(kHeadBytes + body.size() + kTailBytes);
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  StoreLe<std::uint64_t>(bytes.data() + kMagic.size(), body.size());
  std::memcpy(bytes.data() + kHeadBytes, body.data(), body.size());
  const std::uint64_t checksum = HashText(AsText(ByteView(bytes).first(bytes.size() - kTailBytes)));
  StoreLe<std::uint64_t>(bytes.data() + bytes.size() - kTailBytes, checksum);

  return WriteWholeFile(path, bytes, "cannot write plan");
}

Result<Plan> LoadPlan(const std::string& path) {
  constexpr std::size_t kMaxFileBytes = kHeadBytes + kMaxControlBytes + kTailBytes;
  const auto read = ReadWholeFile(path, kMaxFileBytes, "cannot read plan");
  if (!read.ok()) return read.status();
  const std::vector<std::byte>& bytes = *read;
  if (bytes.size() > kMaxFileBytes) {
    return CorruptData(
        fmt::format("plan '{}' is larger than {} bytes, which no plan is", path, kMaxFileBytes));
  }
  const ByteView view(bytes);
  if (bytes.size() < kHeadBytes + kTailBytes || AsText(view.first(kMagic.size())) != kMagic) {
    return CorruptData(fmt::format("'{}' is not a saved plan", path));
  }
  const auto length = LoadLe<std::uint64_t>(bytes.data() + kMagic.size());
  const std::size_t held = bytes.size() - kHeadBytes - kTailBytes;
  if (length != held) {
    return CorruptData(fmt::format("plan '{}' holds {} bytes, expected {}: it is cut or has grown",
                                   path, held, length));
  }
  const auto stored = LoadLe<std::uint64_t>(bytes.data() + bytes.size() - kTailBytes);
  const std::uint64_t computed = HashText(AsText(view.first(bytes.size() - kTailBytes)));
  if (stored != computed) {
    return CorruptData(fmt::format("plan '{}' has the checksum {:016x}, expected {:016x}", path,
                                   computed, stored));
  }
  auto plan = ParsePlan(view.subspan(kHeadBytes, held));
  if (!plan.ok()) {
    return CorruptData(fmt::format("plan '{}': {}", path, plan.status().message()));
  }
  return plan;
}

}  // namespace gradwire
