#include "core/tensor_stamp.h"

#include "core/fingerprint.h"

namespace regrad::detail {

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<uint32_t>(tensor._version()) : 0;
}

TensorStamp::TensorStamp(const at::Tensor& tensor)
    : version(version_of(tensor)),
      sampled_bits(detail::sampled_bits(tensor)),
      dtype(tensor.scalar_type()),
      device(tensor.device()),
      requires_grad(tensor.requires_grad()) {}

}  // namespace regrad::detail
