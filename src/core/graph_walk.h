#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/cast_boundary.h"
#include "core/torch_compat.h"

namespace regrad::detail {

/// Which edge, as a value that owns nothing.
struct EdgeKey {
  torch::autograd::Node* node = nullptr;
  uint32_t input = 0;

  EdgeKey() = default;
  explicit EdgeKey(const torch::autograd::Edge& edge) : node(edge.function.get()), input(edge.input_nr) {}
  bool operator==(const EdgeKey&) const = default;
};

struct EdgeKeyHash {
  size_t operator()(const EdgeKey& key) const noexcept { return std::hash<const void*>()(key.node) * 31 + key.input; }
};

/// Tells the graph nodes that a function makes from those that were there before. Make one right before the function
/// runs, on the same thread. Nodes that the function makes on other threads are recognised in a walk by where they
/// lead to.
class NodeOrigin {
 public:
  NodeOrigin();

  /// Whether this thread made `node` since.
  bool made_here(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= first_ && node.sequence_nr() != UINT64_MAX;
  }
  bool on_this_thread(const torch::autograd::Node& node) const { return node.thread_id() == thread_; }

 private:
  uint64_t thread_;
  uint64_t first_;
};

/// What a function's graph depends on.
struct GraphWalk {
  /// A place in the graph where an edge leaves it: `node`'s next edge number `index`, or root number `index` where
  /// node is null.
  struct Cut {
    torch::autograd::Node* node;
    size_t index;
    EdgeKey exit;
  };

  /// The edges that leave the graph, each once: to accumulators and to the graphs of captured tensors.
  torch::autograd::edge_list exits;
  std::unordered_map<EdgeKey, size_t, EdgeKeyHash> exit_index;
  std::vector<Cut> cuts;
  /// The function's input nodes that the outputs depend on.
  std::unordered_set<const torch::autograd::Node*> inputs_reached;
};

/// Adds the leaves to which `edges` lead directly.
void append_leaves(const torch::autograd::edge_list& edges, std::vector<at::Tensor>& leaves);

/// Walks a function's graph from `roots` to `input_nodes` and to the edges that leave it. Linear in the graph's size.
GraphWalk walk_graph(const torch::autograd::edge_list& roots, const NodeOrigin& origin,
                     const std::unordered_set<const torch::autograd::Node*>& input_nodes, CastBoundary& casts);

}  // namespace regrad::detail
