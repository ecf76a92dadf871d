#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "core/torch_compat.h"

namespace regrad::detail {

/// The edge by which the gradient of `tensor` leaves; invalid when it needs none or is undefined.
torch::autograd::Edge gradient_edge(const at::Tensor& tensor);

/// An alias of `tensor` without history. Undefined for undefined.
at::Tensor without_history(const at::Tensor& tensor);

/// Makes `tensor`, which has no history, a result of `node`: its gradient is the node's next input.
void attach(const at::Tensor& tensor, const NodePtr& node);

}  // namespace regrad::detail
