#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "compressors/compressor.h"

namespace gradwire {

/// A stretch of a tensor that a unit covers; a unit is one or several of them in order.
struct TensorRange {
  std::string tensor;
  std::uint64_t offset = 0;
  std::uint64_t count = 0;

  friend bool operator==(const TensorRange&, const TensorRange&) = default;
};

/// All residuals of one side (a worker, or a server shard). Identity is the tensor's name and
/// offset, so residuals survive other cuts and fusions of the same tensors.
/// Threads: Get, Save and Restore lock; the returned Residual is used by one thread at a time, and
/// Save and Restore want that nobody is encoding.
class ResidualStore {
 public:
  ResidualStore();
  ~ResidualStore();

  /// The residual of a unit, zeros at first (or what Restore left for its ranges). The reference
  /// stays valid as long as the store; the codec is who will make it explicit.
  /// Errors: InvalidArgument if the key is known with other ranges.
  Result<Residual*> Get(std::uint64_t key, const std::vector<TensorRange>& ranges,
                        const Compressor& codec);

  /// Hands the unit to another codec (a change of phase): flushes with the old one first.
  Status ChangeCodec(std::uint64_t key, const Compressor& codec);

  /// Makes every residual explicit and writes all as bytes: a magic, a version, then tensor name,
  /// offset, count, scale (f64 learning rate and loss scale), f32 values for each range, and a
  /// checksum.
  Result<std::vector<std::byte>> Save();

  /// Sets all residuals to saved ones, and to zero where those have nothing: of known units at
  /// once, of others when Get first asks. They bring their scale along: where a unit's ranges were
  /// saved in several, it takes the first one's. Errors: CorruptData if the bytes are damaged;
  /// nothing is changed then.
  Status Restore(ByteView saved);

  /// One unit's residual in the form of Save; empty if it has none.
  std::vector<std::byte> SaveUnit(std::uint64_t key);

  /// Sets one unit's residual, which it need not have yet, to what saved residuals have of its
  /// ranges, and to zero where they have nothing. Errors: as Restore and Get.
  Status RestoreUnit(std::uint64_t key, const std::vector<TensorRange>& ranges,
                     const Compressor& codec, ByteView saved);
  /// Sets the unit's residual to zero, if it has one.
  void ClearUnit(std::uint64_t key);

  /// What saved residuals have of some ranges, in the form of Save; empty if they have nothing of
  /// them. Errors: as Restore.
  static Result<std::vector<std::byte>> Select(const std::vector<ByteView>& saved,
                                               const std::vector<TensorRange>& ranges);
  /// Errors: as Restore.
  static Status Check(ByteView saved) { return ParseSaved(saved).status(); }

  /// Tensors of which something restored belongs to no unit that has asked for it yet.
  std::vector<std::string> UnclaimedTensors() const;

  /// The residual of one tensor as far as this store has it: values[count], zeros where unknown,
  /// each in the scale that its unit was last kept with.
  std::vector<float> Read(const std::string& tensor, std::uint64_t count);

  /// Bytes held.
  std::size_t size_bytes() const;

 private:
  struct Entry;
  struct Piece {
    std::vector<float> values;
    GradientScale scale;
  };
  /// Pieces of one tensor by offset; they never overlap.
  using Pieces = std::map<std::uint64_t, Piece>;

  static std::vector<std::byte> BeginSaved(std::uint64_t num_ranges);
  static void Clear(Entry& entry);
  static void AppendEntry(Entry& entry, std::vector<std::byte>& bytes);
  static Result<std::map<std::string, Pieces>> ParseSaved(ByteView saved);
  static void Cut(Pieces& pieces, std::uint64_t offset, std::uint64_t count);
  static void TakeOver(Entry& entry, std::map<std::string, Pieces>& from);

  mutable std::mutex mu_;
  std::map<std::uint64_t, std::unique_ptr<Entry>> entries_;  // guarded by mu_
  std::map<std::string, Pieces> restored_;                   // guarded by mu_
};

/// Weight alpha of a residual in q = g + alpha * e: learning rate of then over that of now, times
/// loss scale of now over that of then. A number that is 0 on either side changes nothing.
double ResidualWeight(const GradientScale& then, const GradientScale& now);

/// Brings a residual to the scale of the gradients that come now: e <- alpha * e, rounded once, and
/// the largest float where that overflows. With alpha = 1 no element is touched; otherwise a lazily
/// stored residual becomes explicit.
void BringToScale(const Compressor& codec, const GradientScale& now, Residual& residual);

/// After a void round: gives the residual back what it held before the encode pass, e <- q - input
/// (to rounding), so that nothing of the input stays. The residual is explicit, as Encode or Undo
/// leaves it then.
void RestoreAfterVoidRound(BlockSource& input, Residual& residual);

}  // namespace gradwire
