#include <algorithm>
#include <map>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include "core/edges.h"
#include "core/environment.h"
#include "core/input_guard.h"
#include "core/kept_tensor.h"
#include "core/replay.h"
#include "core/supported.h"
#include "recompute/recompute_node.h"
#include "regrad/recompute_grad.h"

namespace regrad::detail {

using torch::autograd::CreationMeta;
using torch::autograd::Edge;
using torch::autograd::edge_list;

namespace {

/// Whether operations on the tensor's device are compiled together later.
bool is_lazy(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.device().type() == at::kLazy || tensor.device().type() == at::kXLA);
}

/// Replaces the outputs that carry the first run's graph by plain tensors, which drops the graph.
///
/// An output whose memory somebody else holds (an input, a captured tensor, another output) becomes a view as custom
/// autograd functions return them: writing to it in place raises Torch's error instead of losing the gradient.
void drop_graph(FirstRun& run, const Tensors& inputs) {
  for (const size_t o : run.differentiable) run.outputs[o] = without_history(run.outputs[o]);
  for (size_t i = 0; i < run.differentiable.size(); ++i) {
    at::Tensor& output = run.outputs[run.differentiable[i]];
    if (!output.has_storage() || output.numel() == 0) continue;
    const auto& input = run.shares_input[i];
    if (!input.has_value() && output.storage().use_count() == 1) continue;
    const c10::NoGradGuard no_grad;
    const at::Tensor base = input.has_value() ? inputs[*input] : output;
    const at::Tensor view = input.has_value() ? in_memory_of(output, base) : output.detach();
    output = torch::autograd::as_view(base, view, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/false,
                                      nullptr, nullptr, CreationMeta::IN_CUSTOM_FUNCTION);
  }
}

/// One node per set of outputs that reaches the same ends. Returns, for each differentiable output, its edges.
std::vector<edge_list> make_nodes(const FirstRun& run, const std::shared_ptr<RecomputedCall>& call) {
  edge_list end_edges = call->input_edges;
  end_edges.insert(end_edges.end(), run.exits.begin(), run.exits.end());
  const size_t outputs = run.differentiable.size();
  std::map<std::vector<bool>, std::vector<size_t>> groups;
  for (size_t end = 0; end < end_edges.size(); ++end) {
    std::vector<bool> reached_by(outputs);
    for (size_t o = 0; o < outputs; ++o) reached_by[o] = run.reach[o][end];
    if (std::find(reached_by.begin(), reached_by.end(), true) != reached_by.end()) groups[reached_by].push_back(end);
  }

  call->node_count = groups.size();
  std::vector<edge_list> result(outputs);
  for (auto& [reached_by, ends] : groups) {
    edge_list edges;
    for (const size_t end : ends) edges.push_back(end_edges[end]);
    std::vector<size_t> node_outputs;
    for (size_t o = 0; o < outputs; ++o) {
      if (reached_by[o]) node_outputs.push_back(o);
    }
    const auto node = make_node<RecomputeNode>(call, ends, node_outputs, std::move(edges));
    for (const size_t o : node_outputs) {
      const uint32_t number = node->add_input_metadata(run.outputs[run.differentiable[o]]);
      result[o].emplace_back(node, number);
    }
  }
  return result;
}

}  // namespace

Tensors recompute(Function function, const Tensors& inputs, const RecomputeOptions& options) {
  if (!c10::GradMode::is_enabled()) return run_plainly(function, inputs);
  check_supported(inputs, function.name);

  auto call = std::make_shared<RecomputedCall>();
  const bool lazy = std::any_of(inputs.begin(), inputs.end(), is_lazy);
  call->data_dependency = options.use_data_dep.value_or(lazy);
  call->tie_gradients = options.tupleize_grads && lazy;
  Tensors arguments;
  for (const at::Tensor& input : inputs) {
    arguments.push_back(copy_on_write_alias(input));
    call->inputs.emplace_back(input);
    call->input_edges.push_back(gradient_edge(input));
  }
  FirstRun run = Replay::first_run(std::make_shared<Function>(std::move(function)), inputs, std::move(arguments),
                                   Environment::capture(), OutputCheck::bits);
  if (run.differentiable.empty()) return std::move(run.outputs);
  call->replay = run.replay;
  drop_graph(run, inputs);

  const std::vector<edge_list> edges = make_nodes(run, call);
  for (size_t o = 0; o < edges.size(); ++o) {
    at::Tensor& output = run.outputs[run.differentiable[o]];
    if (edges[o].size() == 1) {
      torch::autograd::impl::set_gradient_edge(output, edges[o].front());
    } else if (edges[o].size() > 1) {
      attach(output, make_node<OutputGate>(edge_list(edges[o])));
    }
  }
  return std::move(run.outputs);
}

}  // namespace regrad::detail
