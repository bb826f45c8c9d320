#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/random.h"
#include "common/plan/plan.h"
#include "common/wire/control.h"

namespace gradwire {
namespace {

// magic[8] | u64 length | Serialize(plan)[length] | u64 FNV-1a of what precedes it
constexpr std::string_view kMagic = "GWPLAN1\n";
constexpr std::size_t kHeadBytes = 16;
constexpr std::size_t kTailBytes = 8;

/// Closes on all paths; a file descriptor, since the data must reach the disk before the name does.
class File {
 public:
  File(const std::string& path, int flags) : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~File() { (void)Close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  bool Close() {
    const bool done = fd_ < 0 || close(fd_) == 0;
    fd_ = -1;
    return done;
  }

 private:
  int fd_;
};

std::string Reason() { return std::generic_category().message(errno); }

bool WriteAll(int fd, ByteView bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return true;
}

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

  // A name of its own, so that two who save at once do not mix; then the rename shows it whole.
  const std::string unfinished = fmt::format("{}.{:x}.tmp", path, RandomId());
  File file(unfinished, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.is_open()) {
    return Unavailable(fmt::format("cannot write plan '{}': {}", path, Reason()));
  }
  if (!WriteAll(file.fd(), bytes) || fsync(file.fd()) != 0 || !file.Close() ||
      std::rename(unfinished.c_str(), path.c_str()) != 0) {
    const std::string reason = Reason();
    (void)unlink(unfinished.c_str());
    return Unavailable(fmt::format("cannot write plan '{}': {}", path, reason));
  }
  return Status::Ok();
}

Result<Plan> LoadPlan(const std::string& path) {
  // O_NONBLOCK: a named pipe without a writer is an empty file, not a wait without end.
  File file(path, O_RDONLY | O_NONBLOCK);
  if (!file.is_open()) {
    return Unavailable(fmt::format("cannot read plan '{}': {}", path, Reason()));
  }
  constexpr std::size_t kMaxFileBytes = kHeadBytes + kMaxControlBytes + kTailBytes;
  std::vector<std::byte> bytes;
  std::vector<std::byte> chunk(std::size_t{1} << 16);
  while (bytes.size() <= kMaxFileBytes) {
    const ssize_t got = read(file.fd(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unavailable(fmt::format("cannot read plan '{}': {}", path, Reason()));
    if (got == 0) break;
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + got);
  }
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
