#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// "Float[2, 3] on cpu", for error messages; "an undefined tensor".
std::string describe(const at::Tensor& tensor);

}  // namespace regrad::detail
