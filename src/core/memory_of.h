#pragma once

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// Tells memories apart: views of one memory have one key. A tensor without storage has one of its own.
inline const void* memory_of(const at::Tensor& tensor) {
  if (tensor.has_storage()) return tensor.storage().unsafeGetStorageImpl();
  return tensor.unsafeGetTensorImpl();
}

}  // namespace regrad::detail
