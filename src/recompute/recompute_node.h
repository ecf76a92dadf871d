#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/kept_tensor.h"
#include "core/replay.h"

namespace regrad::detail {

/// What all nodes of one call share. Dropped when the last of them is released.
struct RecomputedCall {
  std::shared_ptr<const Replay> replay;
  std::vector<KeptTensor> inputs;
  /// Where the inputs' gradients go; for second order.
  torch::autograd::edge_list input_edges;
  /// See RecomputeOptions.
  bool data_dependency = false;
  bool tie_gradients = false;
  /// How many nodes the call has.
  size_t node_count = 0;
};

/// Graph node of a recomputed function. It runs the function again and takes one vector-Jacobian product.
///
/// There is one node for each set of outputs that depends on the same ends (inputs and exits), so that an output that
/// nobody uses delivers nothing to what it alone reaches, as in plain autograd. One node is the common case.
class RecomputeNode : public torch::autograd::Node {
 public:
  /// ends: numbers of the inputs, then exits, that this node has edges to. outputs: the differentiable outputs whose
  /// gradients are this node's inputs, by number.
  RecomputeNode(std::shared_ptr<const RecomputedCall> call, std::vector<size_t> ends, std::vector<size_t> outputs,
                torch::autograd::edge_list edges);

  std::string name() const override;
  void release_variables() override;

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  std::mutex call_mutex_;
  std::shared_ptr<const RecomputedCall> call_;
  std::vector<size_t> ends_;
  std::vector<size_t> outputs_;
  const std::string function_name_;
};

/// Hands the gradient of one output to each node that needs it.
class OutputGate : public torch::autograd::Node {
 public:
  using Node::Node;
  std::string name() const override { return "regrad::OutputGate"; }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return torch::autograd::variable_list(num_outputs(), gradients.front());
  }
};

}  // namespace regrad::detail
