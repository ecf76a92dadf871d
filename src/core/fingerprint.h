#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "regrad/detail/function.h"

namespace regrad::detail {

/// One number per output of a function that depends on every bit. Of CPU tensors alone: on other devices it would
/// wait for the device. One pass over memory.
std::vector<uint64_t> fingerprint(const Tensors& outputs);

/// A number that depends on the bits of a few elements of a CPU tensor, scattered over it; 0 of other tensors. Constant
/// time.
uint64_t sampled_bits(const at::Tensor& tensor);

/// A few values of an output, to compare a replay with where its input was rebuilt and so is not exact.
/// Constant time; of floating-point CPU tensors alone.
class Sample {
 public:
  Sample() = default;
  explicit Sample(const at::Tensor& output);

  /// The 2-norm of the sample's finite values.
  double norm() const;

  /// The 2-norm of the difference of two samples of one shape; infinite where one is not finite while the other is.
  double distance(const Sample& other) const;

 private:
  std::vector<float> values_;
};

}  // namespace regrad::detail
