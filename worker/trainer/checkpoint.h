#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/bytes.h"
#include "common/base/status.h"

namespace gradwire::trainer {

/// A run of one rank, cut after a step: what it needs to go on bit for bit. Which samples come next
/// follows from the step and the settings. Views into memory of somebody else's.
struct Checkpoint {
  struct Tensor {
    std::string name;
    std::span<float> value;
    std::span<float> velocity;  // momentum, with or without a method
  };

  std::uint32_t rank = 0;
  std::uint64_t step = 0;  // steps done
  /// What must be the same for the run to be the same, by name, as a user would write it.
  std::vector<std::pair<std::string, std::string>> settings;
  double curve_loss = 0.0;  // sum since the last point of the curve
  std::vector<Tensor> tensors;
  ByteView optimizer;  // Optimizer::Save; empty without a method
  ByteView client;     // Client::SaveState
};

/// Layout: "GWTRAIN1" | u32 rank | u64 step | u32 settings, each two texts | f64 curve loss |
/// u32 tensors, each a text, u64 n, f32 value[n], f32 velocity[n] | u64 bytes, the optimizer |
/// u64 bytes, the client | u64 checksum.  A text is u32 bytes and these.
std::vector<std::byte> ToBytes(const Checkpoint& checkpoint);

/// Fills step, curve loss, optimizer and client, and what the tensors' views show, if `saved` is of
/// the same rank, settings and tensors as `checkpoint`. The optimizer and client point into
/// `saved`. Errors: CorruptData if it is damaged; InvalidArgument naming the first difference, with
/// what is saved and what is expected. Nothing is changed then.
Status FromBytes(ByteView saved, Checkpoint& checkpoint);

/// The folder of a run's states. Every rank has its own files there, "rank-<rank>.step-<step>", so
/// that ranks may share a folder or have one on each host.
class CheckpointFolder {
 public:
  CheckpointFolder(std::string path, std::uint32_t rank) : path_(std::move(path)), rank_(rank) {}

  /// Writes the state of a step, whole or not at all; makes the folder if it is not there.
  /// Errors: Internal, naming the file and the reason.
  Status Write(std::uint64_t step, ByteView bytes) const;
  /// Errors: Internal, naming the file and the reason.
  Result<std::vector<std::byte>> Read(std::uint64_t step) const;
  /// Removes this rank's states of other steps, and what a process that was killed in the middle of
  /// writing has left. What cannot be removed stays.
  void KeepOnly(std::uint64_t step) const;
  /// The steps there are states of, the newest first; none without the folder.
  std::vector<std::uint64_t> Steps() const;

  std::string FileOf(std::uint64_t step) const;
  const std::string& path() const { return path_; }

 private:
  /// The steps of Steps, and the files that are not finished.
  std::pair<std::vector<std::uint64_t>, std::vector<std::string>> Files() const;

  const std::string path_;
  const std::uint32_t rank_;
};

}  // namespace gradwire::trainer
