#pragma once

#include <string>

#include "regrad/detail/function.h"

namespace regrad::detail {

/// @throws Error (unsupported) when an input of `function_name` is of a kind for which the contract cannot be kept:
/// it carries a forward-mode tangent, or is wrapped by a functorch transform.
void check_supported(const Tensors& inputs, const std::string& function_name);

}  // namespace regrad::detail
