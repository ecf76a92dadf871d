#include "recompute/data_dependency.h"

#include <ATen/Functions.h>

namespace regrad::detail {

namespace {

/// A boolean scalar that is false whatever the gradients are, and that no compiler knows to be.
/// Of operations that lazy devices compile: others would be run at once, on the CPU.
at::Tensor never(const Tensors& gradients) {
  at::Tensor result;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    at::Tensor first = gradient.detach().flatten()[0];
    if (first.is_complex()) first = at::real(first);
    const at::Tensor both = first.gt(0).mul(first.lt(0));
    result = result.defined() ? result.add(both) : both;
  }
  return result;
}

void depend_on(Tensors& tensors, const at::Tensor& never) {
  if (!never.defined()) return;
  for (at::Tensor& tensor : tensors) {
    // Subtracting zero changes no bit, not even the sign of a negative zero.
    const bool possible = tensor.defined() && tensor.is_floating_point() && tensor.device() == never.device();
    if (possible) tensor = tensor.sub(never.to(tensor.scalar_type()));
  }
}

}  // namespace

void add_data_dependency(Tensors& tensors, const Tensors& gradients) { depend_on(tensors, never(gradients)); }

void tie_together(Tensors& tensors) { depend_on(tensors, never(tensors)); }

}  // namespace regrad::detail
