#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// Whether a copy-on-write alias of `tensor` can be made: plain strided CPU or CUDA memory that Torch allocated,
/// neither nested nor a lazy conjugate or negative.
bool can_be_copy_on_write(const at::Tensor& tensor);

/// An alias without history. It shares memory until somebody writes to either side, where that is possible
/// (can_be_copy_on_write), and plainly shares memory elsewhere. 0.2 microseconds, no bytes. Undefined for undefined.
at::Tensor copy_on_write_alias(const at::Tensor& tensor);

/// An alias without history on a copy of the whole storage: the same sizes, strides, offset and version counter.
at::Tensor copy_with_storage(const at::Tensor& tensor);

/// Whether a copy of the tensor's memory costs next to nothing.
bool is_small(const at::Tensor& tensor);

/// The values of a tensor that may be written soon: a copy-on-write alias, or a copy where it is small (sharing would
/// move each small buffer to new memory when it is updated) or cannot be shared.
at::Tensor snapshot(const at::Tensor& tensor);

/// A tensor kept from forward to backward, with its values of then. May be undefined.
///
/// The caller's later in-place operations do no harm to a copy-on-write alias. Other tensors are compared by version.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor);

  /// The kept values, without history.
  /// @throws Error (tensor_modified) naming `what` when they have been written over.
  at::Tensor get(const std::string& what) const;

 private:
  at::Tensor alias_;
  bool shares_versions_ = false;
  uint32_t version_ = 0;
};

}  // namespace regrad::detail
