#include "core/graph_walk.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

namespace regrad::detail {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

NodeOrigin::NodeOrigin() : thread_(at::RecordFunction::currentThreadId()), first_(at::sequence_number::peek()) {}

namespace {

using Nodes = std::unordered_set<const Node*>;

class Walker {
 public:
  Walker(const NodeOrigin& origin, const Nodes& input_nodes, CastBoundary& casts)
      : origin_(origin), input_nodes_(input_nodes), casts_(casts) {}

  GraphWalk run(const edge_list& roots) {
    for (size_t i = 0; i < roots.size(); ++i) visit(roots[i], nullptr, i);
    while (!pending_.empty()) {
      Node* node = pending_.back();
      pending_.pop_back();
      for (size_t i = 0; i < node->num_outputs(); ++i) visit(node->next_edge(i), node, i);
    }
    return std::move(result_);
  }

 private:
  void visit(const Edge& edge, Node* from, size_t index) {
    if (!edge.is_valid()) return;
    Node* node = edge.function.get();
    if (input_nodes_.contains(node)) {
      result_.inputs_reached.insert(node);
    } else if (const Edge cast = casts_.outside_edge(edge); cast.is_valid()) {
      leave(cast, from, index);
    } else if (is_inside(node)) {
      if (visited_.insert(node).second) pending_.push_back(node);
    } else {
      leave(edge, from, index);
    }
  }

  void leave(const Edge& exit, Node* from, size_t index) {
    const EdgeKey key(exit);
    if (result_.exit_index.emplace(key, result_.exits.size()).second) result_.exits.push_back(exit);
    result_.cuts.push_back({from, index, key});
  }

  bool is_inside(Node* node) {
    if (as_accumulator(node) != nullptr) return false;
    return origin_.made_here(*node) || (!origin_.on_this_thread(*node) && leads_inside(node));
  }

  /// A node of another thread (one that the function started, or the engine's) belongs to the function when it leads
  /// to one of its inputs or to a node that it made. What was found to lie outside is remembered.
  bool leads_inside(Node* start) {
    Nodes seen{start};
    std::vector<Node*> pending{start};
    while (!pending.empty()) {
      Node* node = pending.back();
      pending.pop_back();
      if (outside_.contains(node)) continue;
      for (const Edge& edge : node->next_edges()) {
        Node* next = edge.function.get();
        if (next == nullptr) continue;
        if (input_nodes_.contains(next) || origin_.made_here(*next)) return true;
        const bool foreign = !origin_.on_this_thread(*next) && as_accumulator(next) == nullptr;
        if (foreign && seen.insert(next).second) pending.push_back(next);
      }
    }
    outside_.insert(seen.begin(), seen.end());
    return false;
  }

  const NodeOrigin& origin_;
  const Nodes& input_nodes_;
  CastBoundary& casts_;
  Nodes visited_;
  Nodes outside_;
  std::vector<Node*> pending_;
  GraphWalk result_;
};

}  // namespace

void append_leaves(const edge_list& edges, std::vector<at::Tensor>& leaves) {
  for (const Edge& edge : edges) {
    if (!edge.is_valid()) continue;
    if (const auto* accumulator = as_accumulator(edge.function.get())) leaves.push_back(accumulator->variable);
  }
}

GraphWalk walk_graph(const edge_list& roots, const NodeOrigin& origin, const Nodes& input_nodes, CastBoundary& casts) {
  return Walker(origin, input_nodes, casts).run(roots);
}

}  // namespace regrad::detail
