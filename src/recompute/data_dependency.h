#pragma once

#include "regrad/detail/function.h"

namespace regrad::detail {

/// Makes the floating-point tensors of `tensors` depend on `gradients` without changing a bit of them: a compiler that
/// sees the whole computation can then neither merge the second run with the first nor start it before the gradients
/// exist. Not a number, infinite, empty and integer gradients are fine.
void add_data_dependency(Tensors& tensors, const Tensors& gradients);

/// Makes each tensor depend on all others, without changing a bit: none can be used before all exist.
void tie_together(Tensors& tensors);

}  // namespace regrad::detail
