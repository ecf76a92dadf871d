#include "recompute/data_dependency.h"

#include <ATen/Functions.h>

namespace regrad::detail {

namespace {

/// A boolean scalar that is false whatever the gradients are, and that no compiler knows to be.
at::Tensor never(const Tensors& gradients) {
  at::Tensor result;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const at::Tensor first = gradient.detach().flatten()[0];
    const at::Tensor both = at::logical_and(first.gt(0), first.lt(0));
    result = result.defined() ? at::logical_or(result, both) : both;
  }
  return result;
}

void depend_on(Tensors& tensors, const at::Tensor& never) {
  if (!never.defined()) return;
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() == never.device()) {
      tensor = at::where(never, at::zeros_like(tensor), tensor);
    }
  }
}

}  // namespace

void add_data_dependency(Tensors& tensors, const Tensors& gradients) { depend_on(tensors, never(gradients)); }

void tie_together(Tensors& tensors) { depend_on(tensors, never(tensors)); }

}  // namespace regrad::detail
