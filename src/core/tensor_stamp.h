#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// The version of `tensor`, which counts writes in place; 0 where it has none (undefined and inference tensors).
uint32_t version_of(const at::Tensor& tensor);

/// What a tensor was at one moment, but for its values.
struct TensorStamp {
  uint32_t version;
  at::ScalarType dtype;
  at::Device device;
  /// Of leaves, where users change it.
  bool requires_grad;

  explicit TensorStamp(const at::Tensor& tensor);
};

}  // namespace regrad::detail
