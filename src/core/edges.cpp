#include "core/edges.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

namespace regrad::detail {

using torch::autograd::Edge;

Edge gradient_edge(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

at::Tensor without_history(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::NoGradGuard no_grad;
  return tensor.detach();
}

void attach(const at::Tensor& tensor, const NodePtr& node) {
  const uint32_t number = node->add_input_metadata(tensor);
  torch::autograd::impl::set_gradient_edge(tensor, Edge(node, number));
}

}  // namespace regrad::detail
