#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// The version of `tensor`, which counts writes in place; 0 where it has none (undefined and inference tensors).
uint32_t version_of(const at::Tensor& tensor);

/// What a tensor was at one moment.
struct TensorStamp {
  uint32_t version;
  /// The version misses writes through `.data()`, by which LibTorch's SGD steps, so a few values are looked at too.
  uint64_t sampled_bits;
  at::ScalarType dtype;
  at::Device device;
  /// Of leaves, where users change it.
  bool requires_grad;

  explicit TensorStamp(const at::Tensor& tensor);
};

}  // namespace regrad::detail
