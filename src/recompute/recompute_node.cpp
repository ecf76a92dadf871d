#include "recompute/recompute_node.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "core/task_store.h"
#include "recompute/data_dependency.h"

namespace regrad::detail {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

RecomputeNode::RecomputeNode(std::shared_ptr<const RecomputedCall> call, std::vector<size_t> ends,
                             std::vector<size_t> outputs, edge_list edges)
    : Node(std::move(edges)),
      call_(std::move(call)),
      ends_(std::move(ends)),
      outputs_(std::move(outputs)),
      function_name_(call_->replay->function().name) {}

std::string RecomputeNode::name() const { return "regrad::Recompute(" + function_name_ + ")"; }

void RecomputeNode::release_variables() {
  // Dropped after the lock: what the function captured may run code of its own when it goes.
  std::shared_ptr<const RecomputedCall> dropped;
  const std::lock_guard<std::mutex> lock(call_mutex_);
  dropped = std::exchange(call_, nullptr);
}

namespace {

/// The second run that the nodes of one call share in one backward pass.
struct SharedRerun {
  std::mutex mutex;
  std::shared_ptr<Replay::Rerun> rerun;
  size_t uses = 0;
};

std::shared_ptr<Replay::Rerun> run_again(const RecomputedCall& call, bool create_graph, const Tensors& gradients) {
  const std::string& name = call.replay->function().name;
  Tensors arguments;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const at::Tensor input = call.inputs[i].get(name + ": its input " + std::to_string(i) + ",");
    arguments.push_back(copy_on_write_alias(input));
  }
  if (call.data_dependency) add_data_dependency(arguments, gradients);
  auto rerun =
      std::make_shared<Replay::Rerun>(call.replay->run_again(std::move(arguments), call.input_edges, create_graph));
  rerun->drop_outputs();
  return rerun;
}

}  // namespace

variable_list RecomputeNode::apply(variable_list&& gradients) {
  std::shared_ptr<const RecomputedCall> call;
  {
    const std::lock_guard<std::mutex> lock(call_mutex_);
    call = call_;
  }
  TORCH_CHECK(call != nullptr, torch::autograd::ERR_BACKWARD_TWICE);

  variable_list result(num_outputs());
  std::vector<bool> needed(call->inputs.size() + call->replay->exit_count(), false);
  for (size_t i = 0; i < ends_.size(); ++i) needed[ends_[i]] = task_should_compute_output(i);
  const bool any_gradient =
      std::any_of(gradients.begin(), gradients.end(), [](const at::Tensor& g) { return g.defined(); });
  if (!any_gradient || std::find(needed.begin(), needed.end(), true) == needed.end()) return result;

  const bool create_graph = c10::GradMode::is_enabled();
  const c10::InferenceMode no_inference(false);  // it sets grad mode
  const at::AutoGradMode grad_mode(create_graph);

  // The first node of the call to come runs the function; the last to come uses up its graph.
  const auto store = call->node_count > 1 ? TaskStore::current() : nullptr;
  const auto shared = store == nullptr ? std::make_shared<SharedRerun>() : store->get<SharedRerun>(call.get());
  std::shared_ptr<Replay::Rerun> rerun;
  {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    rerun = shared->rerun;
  }
  if (rerun == nullptr) rerun = run_again(*call, create_graph, gradients);
  bool last = true;
  {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    last = ++shared->uses == call->node_count;
    shared->rerun = last ? nullptr : rerun;
  }
  variable_list cotangents(call->replay->differentiable_count());
  for (size_t i = 0; i < outputs_.size(); ++i) cotangents[outputs_[i]] = std::move(gradients[i]);
  gradients.clear();
  variable_list all = rerun->vector_jacobian(std::move(cotangents), needed, /*keep_graph=*/!last);
  for (size_t i = 0; i < ends_.size(); ++i) result[i] = std::move(all[ends_[i]]);
  if (call->tie_gradients) tie_together(result);
  return result;
}

}  // namespace regrad::detail
