#include "common/base/whole_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "common/base/random.h"

namespace gradwire {
namespace {

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

Status WriteWholeFile(const std::string& path, ByteView bytes, std::string_view failure) {
  // A name of its own, so that two who save at once do not mix; then the rename shows it whole.
  const std::string unfinished = fmt::format("{}.{:x}{}", path, RandomId(), kUnfinishedSuffix);
  File file(unfinished, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.is_open()) {
    return Unavailable(fmt::format("{} '{}': {}", failure, path, Reason()));
  }
  if (!WriteAll(file.fd(), bytes) || fsync(file.fd()) != 0 || !file.Close() ||
      std::rename(unfinished.c_str(), path.c_str()) != 0) {
    const std::string reason = Reason();
    (void)unlink(unfinished.c_str());
    return Unavailable(fmt::format("{} '{}': {}", failure, path, reason));
  }
  return Status::Ok();
}

Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::size_t max_bytes,
                                             std::string_view failure) {
  // O_NONBLOCK: a named pipe without a writer is an empty file, not a wait without end.
  File file(path, O_RDONLY | O_NONBLOCK);
  const auto failed = [&] {
    return Unavailable(fmt::format("{} '{}': {}", failure, path, Reason()));
  };
  if (!file.is_open()) return failed();
  std::vector<std::byte> bytes;
  std::vector<std::byte> chunk(std::size_t{1} << 16);
  while (bytes.size() <= max_bytes) {
    const ssize_t got = read(file.fd(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed();
    if (got == 0) break;
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + got);
  }
  return bytes;
}

}  // namespace gradwire
