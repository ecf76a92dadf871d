#pragma once

#include "core/torch_compat.h"

namespace regrad::detail {

/// Stands for one edge that leaves a function's private graph: to an input, a parameter's accumulator or the graph of
/// a captured tensor. Gradients are captured where they enter it, so the hooks of the real edge do not run.
///
/// As a *bridge* it also leads on to the real edge, for graphs that live on: those made under create_graph, and the
/// one of the first run where the function leaks an inner tensor.
class PrivateNode : public torch::autograd::Node {
 public:
  /// Does not lead on: a gradient that is not captured here is a mistake, and throws.
  static Owned<PrivateNode> sink(const at::Tensor& like);
  static Owned<PrivateNode> sink(const torch::autograd::InputMetadata& like);
  /// Leads on to `real`.
  static Owned<PrivateNode> bridge(const torch::autograd::Edge& real);
  static Owned<PrivateNode> bridge(const at::Tensor& like, const torch::autograd::Edge& real);

  explicit PrivateNode(torch::autograd::Edge real);

  /// Takes the real edge away while gradients are captured here, so that the engine does not search what lies behind.
  void detach_bridge();
  void attach_bridge();

  std::string name() const override;

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  torch::autograd::Edge detached_;
};

}  // namespace regrad::detail
