#include "core/private_node.h"

#include "regrad/error.h"

namespace regrad::detail {

using torch::autograd::Edge;
using torch::autograd::InputMetadata;
using torch::autograd::variable_list;

// Sequence number 0: never mistaken for a node that a function has just made.
PrivateNode::PrivateNode(Edge real) : Node(/*sequence_nr=*/uint64_t{0}) {
  // add_next_edge keeps the topological number right, by which the engine prunes.
  if (real.is_valid()) add_next_edge(std::move(real));
}

Owned<PrivateNode> PrivateNode::sink(const at::Tensor& like) {
  auto node = make_node<PrivateNode>(Edge());
  node->add_input_metadata(like);
  return node;
}

Owned<PrivateNode> PrivateNode::sink(const InputMetadata& like) {
  auto node = make_node<PrivateNode>(Edge());
  node->input_metadata_.emplace_back(like);
  return node;
}

Owned<PrivateNode> PrivateNode::bridge(const Edge& real) {
  auto node = make_node<PrivateNode>(real);
  node->input_metadata_.emplace_back(real.function->input_metadata(real.input_nr));
  return node;
}

Owned<PrivateNode> PrivateNode::bridge(const at::Tensor& like, const Edge& real) {
  auto node = make_node<PrivateNode>(real);
  node->add_input_metadata(like);
  return node;
}

void PrivateNode::detach_bridge() {
  if (!next_edges_.empty()) detached_ = std::exchange(next_edges_[0], Edge());
}

void PrivateNode::attach_bridge() {
  if (!next_edges_.empty()) next_edges_[0] = std::exchange(detached_, Edge());
}

std::string PrivateNode::name() const { return "regrad::PrivateNode"; }

variable_list PrivateNode::apply(variable_list&& gradients) {
  if (next_edges_.empty()) {
    throw_error(ErrorKind::unsupported,
                "a gradient reached a tensor that was made in a replay and used outside of it. A function that keeps "
                "an inner tensor for later use must keep the one of its first run: check is_recomputing().");
  }
  return std::move(gradients);
}

}  // namespace regrad::detail
