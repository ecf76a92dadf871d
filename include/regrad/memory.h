#pragma once

#include <cstdint>
#include <string>

#include "regrad/export.h"

namespace regrad {

/// How a block of layers gets its activations back in backward. A value: copy and compare it freely.
///
/// L: layers; a: bytes of the pair of streams; g: bytes that Torch saves for the backward of one layer. Beside it,
/// about 2 KB a layer are held, and 2.5 KB more for each function that draws random numbers.
///
/// | strategy          | held between forward and backward | extra evaluations | gradients against plain      |
/// |-------------------|-----------------------------------|-------------------|------------------------------|
/// | store()           | L g                               | none              | bit-identical                |
/// | reverse()         | a                                 | one per function  | within reconstruction error  |
/// | recompute(n)      | a L / n, and n g in backward      | one per function  | bit-identical                |
class REGRAD_EXPORT Memory {
 public:
  enum class Kind { store, reverse, recompute };

  /// Ordinary autograd: Torch keeps every activation. Fastest, and the most memory.
  static Memory store();

  /// Keep the outputs alone and rebuild each layer's inputs from them by the inverse (RevNet, Gomez et al. 2017,
  /// arXiv 1707.04585, section 3.2). Memory does not grow with depth.
  /// Not recommended where f or g are far from contractive in half precision: the inverse amplifies rounding.
  static Memory reverse();

  /// Keep the inputs of every `segment` layers and run these layers again in backward (Chen et al. 2016,
  /// arXiv 1604.06174). Bit-identical gradients, and memory of L / segment stream pairs.
  /// @throws Error (invalid_argument) when segment < 1. A segment longer than the block means the whole block.
  static Memory recompute(int64_t segment = 1);

  Kind kind() const noexcept { return kind_; }

  /// Layers per recomputed segment; 0 unless kind() is recompute.
  int64_t segment() const noexcept { return segment_; }

  /// "store", "reverse" or "recompute(2)".
  std::string to_string() const;

  bool operator==(const Memory&) const = default;

 private:
  Memory(Kind kind, int64_t segment) : kind_(kind), segment_(segment) {}

  Kind kind_;
  int64_t segment_;
};

}  // namespace regrad
