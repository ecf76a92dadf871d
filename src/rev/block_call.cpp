#include "rev/block_call.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "core/edges.h"
#include "core/task_store.h"
#include "rev/half_step.h"

namespace regrad::detail {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace {

/// The stream that half-step `step` changes; its function reads the other.
size_t changed(size_t step) { return step % 2; }

std::vector<KeptTensor> keep_all(const Tensors& tensors) {
  std::vector<KeptTensor> kept;
  for (const at::Tensor& tensor : tensors) kept.emplace_back(tensor);
  return kept;
}

/// What belongs to `call` in the backward pass that runs now.
template <class Pass>
std::shared_ptr<Pass> pass_of(const BlockCall* call) {
  const auto store = TaskStore::current();
  return store == nullptr ? std::make_shared<Pass>() : store->get<Pass>(call);
}

}  // namespace

BlockCall::BlockCall(const Tensors& f_side, const Tensors& g_side) : side_{keep_all(f_side), keep_all(g_side)} {}

at::Tensor BlockCall::first_step(const std::shared_ptr<BlockCall>& call,
                                 const std::shared_ptr<const Function>& function, const Streams& streams,
                                 const Tensors& side, const std::shared_ptr<const Environment>& environment,
                                 Tensors* leaves) {
  const size_t step = call->steps_.size();
  const at::Tensor& a = streams[changed(step)];
  const at::Tensor& b = streams[1 - changed(step)];
  Tensors inputs{b};
  // The caller's tensors are protected from a function that writes into its input. The other streams are ours alone.
  Tensors arguments{step == 0 ? copy_on_write_alias(b) : without_history(b)};
  for (const at::Tensor& tensor : side) {
    inputs.push_back(tensor);
    arguments.push_back(copy_on_write_alias(tensor));
  }
  FirstRun run = Replay::first_run(function, inputs, std::move(arguments), environment, call->output_check(), a);
  call->steps_.push_back({run.replay, nullptr});

  at::Tensor y;
  {
    const c10::NoGradGuard no_grad;
    y = add_residual(a, run.outputs.front(), function->name);
  }
  if (leaves != nullptr) append_leaves(run.exits, *leaves);
  run.outputs.clear();  // and with it the function's graph
  const Edge a_edge = gradient_edge(a);
  if (!a_edge.is_valid() && run.differentiable.empty()) return y;

  edge_list edges{a_edge};
  for (size_t i = 0; i < inputs.size(); ++i) edges.push_back(run.input_used[i] ? gradient_edge(inputs[i]) : Edge());
  edges.insert(edges.end(), run.exits.begin(), run.exits.end());
  const auto node = make_node<HalfStepNode>(call, step, function->name, std::move(edges));
  call->steps_[step].node = node.get();
  call->unreleased_ = step + 1;
  attach(y, node);
  return y;
}

void BlockCall::release(size_t step) {
  // Dropped after the lock: what functions captured may run code of its own when it goes.
  std::vector<std::shared_ptr<const Replay>> dropped_replays;
  std::vector<KeptTensor> dropped_tensors;
  std::shared_ptr<void> dropped_pass;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (steps_[step].node == nullptr) return;
  steps_[step].node = nullptr;
  while (unreleased_ > 0 && steps_[unreleased_ - 1].node == nullptr) --unreleased_;
  drop_streams(dropped_tensors);
  if (unreleased_ > 0) return;
  if (const auto store = TaskStore::find_current()) dropped_pass = store->take(this);
  for (Step& s : steps_) dropped_replays.push_back(std::exchange(s.replay, nullptr));
  for (auto& side : side_) {
    for (KeptTensor& tensor : side) dropped_tensors.push_back(std::exchange(tensor, KeptTensor()));
  }
}

std::shared_ptr<const Replay> BlockCall::replay(size_t step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(steps_[step].replay != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
  return steps_[step].replay;
}

bool BlockCall::has_node(size_t step) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return steps_[step].node != nullptr;
}

Tensors BlockCall::arguments(size_t step, const at::Tensor& stream) const {
  Tensors result{without_history(stream)};
  const std::string function_name = replay(step)->function().name;
  std::vector<KeptTensor> side;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    side = side_[changed(step)];
  }
  for (size_t i = 0; i < side.size(); ++i) {
    const at::Tensor tensor = side[i].get(function_name + ": its side input " + std::to_string(i) + ",");
    result.push_back(copy_on_write_alias(tensor));
  }
  return result;
}

Replay::Rerun BlockCall::run_again_on(size_t step, const at::Tensor& stream, bool create_graph) const {
  Tensors inputs = arguments(step, stream);
  edge_list edges;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(steps_[step].node != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    edges = steps_[step].node->input_edges(inputs.size());
  }
  return replay(step)->run_again(std::move(inputs), edges, create_graph);
}

at::Tensor BlockCall::run_again_for_values(size_t step, const at::Tensor& stream) const {
  return replay(step)->run_again_for_values(arguments(step, stream)).front();
}

// --- reverse

void ReverseCall::keep_last(const Streams& streams) { last_ = {KeptTensor(streams[0]), KeptTensor(streams[1])}; }

Streams ReverseCall::take(Pass& pass, size_t level) {
  Streams streams;
  size_t at = step_count();
  {
    const std::lock_guard<std::mutex> lock(pass.mutex);
    // The nearest level above. It stays where a half-step in between may still come.
    if (const auto found = pass.levels.lower_bound(level); found != pass.levels.end()) {
      at = found->first;
      streams = found->second;
      if (at == level) pass.levels.erase(found);
    }
  }
  if (!streams[0].defined()) {
    std::array<KeptTensor, 2> last;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(holds_last_, torch::autograd::ERR_BACKWARD_TWICE);
      last = last_;
      // Where nobody else will ask for them they are taken, and rebuilt in their own memory.
      if (level >= unreleased() && !torch::autograd::get_current_graph_task_keep_graph()) {
        last_ = {};
        holds_last_ = false;
      }
    }
    for (size_t i = 0; i < 2; ++i) streams[i] = without_history(last[i].get("an output of a reversible block"));
  }
  while (at > level) {
    --at;
    const at::Tensor residual = run_again_for_values(at, streams[1 - changed(at)]);
    streams[changed(at)] = subtract_residual(std::move(streams[changed(at)]), residual);
  }
  return streams;
}

Replay::Rerun ReverseCall::run_again(size_t step, bool create_graph) {
  const auto pass = pass_of<Pass>(this);
  Streams streams = take(*pass, step + 1);
  Replay::Rerun rerun = run_again_on(step, streams[1 - changed(step)], create_graph);
  streams[changed(step)] = subtract_residual(std::move(streams[changed(step)]), rerun.outputs().front());
  rerun.drop_outputs();
  if (step > 0) {
    const std::lock_guard<std::mutex> lock(pass->mutex);
    pass->levels[step] = std::move(streams);
  }
  return rerun;
}

void ReverseCall::drop_streams(std::vector<KeptTensor>& dropped) {
  if (!holds_last_) return;
  if (unreleased() > 0) {
    // Lower half-steps start from these streams unless this pass has rebuilt a level above them.
    const auto store = TaskStore::find_current();
    if (store == nullptr) return;
    const auto pass = store->get<Pass>(this);
    const std::lock_guard<std::mutex> lock(pass->mutex);
    if (pass->levels.lower_bound(unreleased()) == pass->levels.end()) return;
  }
  for (KeptTensor& tensor : last_) dropped.push_back(std::exchange(tensor, KeptTensor()));
  holds_last_ = false;
}

// --- recompute

void RecomputeCall::keep_before(size_t step, const Streams& streams) {
  if (step % steps_per_segment_ == 0)
    segments_.emplace_back(std::array{KeptTensor(streams[0]), KeptTensor(streams[1])});
}

Replay::Rerun RecomputeCall::run_again(size_t step, bool create_graph) {
  const auto pass = pass_of<Pass>(this);
  const auto take = [&]() -> std::optional<Replay::Rerun> {
    const std::lock_guard<std::mutex> lock(pass->mutex);
    const auto found = pass->reruns.find(step);
    if (found == pass->reruns.end()) return std::nullopt;
    Replay::Rerun rerun = std::move(found->second);
    pass->reruns.erase(found);
    return rerun;
  };
  if (auto rerun = take()) return std::move(*rerun);

  const size_t segment = step / steps_per_segment_;
  std::array<KeptTensor, 2> kept;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(segments_[segment].has_value(), torch::autograd::ERR_BACKWARD_TWICE);
    kept = *segments_[segment];
  }
  Streams streams;
  for (size_t i = 0; i < 2; ++i) streams[i] = without_history(kept[i].get("a kept stream of a block"));
  for (size_t s = segment * steps_per_segment_; s <= step; ++s) {
    const at::Tensor& input = streams[1 - changed(s)];
    at::Tensor residual;
    if (has_node(s)) {
      Replay::Rerun rerun = run_again_on(s, input, create_graph);
      residual = rerun.outputs().front();
      rerun.drop_outputs();
      const std::lock_guard<std::mutex> lock(pass->mutex);
      pass->reruns.insert_or_assign(s, std::move(rerun));
    } else if (s < step) {
      residual = run_again_for_values(s, input);
    }
    if (s == step) break;
    const c10::NoGradGuard no_grad;
    streams[changed(s)] = streams[changed(s)] + residual;
  }
  auto rerun = take();
  TORCH_CHECK(rerun.has_value(), torch::autograd::ERR_BACKWARD_TWICE);
  return std::move(*rerun);
}

void RecomputeCall::drop_streams(std::vector<KeptTensor>& dropped) {
  // Segments above the highest node that may still run.
  for (size_t s = 0; s < segments_.size(); ++s) {
    if (s * steps_per_segment_ < unreleased()) continue;
    if (!segments_[s].has_value()) continue;
    for (KeptTensor& tensor : *segments_[s]) dropped.push_back(std::move(tensor));
    segments_[s].reset();
  }
}

// --- node

HalfStepNode::HalfStepNode(std::shared_ptr<BlockCall> call, size_t step, std::string function_name, edge_list edges)
    : Node(std::move(edges)), call_(std::move(call)), step_(step), function_name_(std::move(function_name)) {}

std::string HalfStepNode::name() const { return "regrad::RevBlock(" + function_name_ + ")"; }

void HalfStepNode::release_variables() { call_->release(step_); }

edge_list HalfStepNode::input_edges(size_t count) const {
  return edge_list(next_edges_.begin() + 1, next_edges_.begin() + 1 + static_cast<int64_t>(count));
}

variable_list HalfStepNode::apply(variable_list&& gradients) {
  variable_list result(num_outputs());
  at::Tensor gradient = std::move(gradients.front());
  gradients.clear();
  if (!gradient.defined()) return result;
  if (next_edge(0).is_valid()) result[0] = gradient;
  std::vector<bool> needed;
  for (size_t i = 1; i < num_outputs(); ++i) needed.push_back(task_should_compute_output(i));
  if (std::find(needed.begin(), needed.end(), true) == needed.end()) return result;

  const bool create_graph = c10::GradMode::is_enabled();
  const c10::InferenceMode no_inference(false);  // it sets grad mode
  const at::AutoGradMode grad_mode(create_graph);
  Replay::Rerun rerun = call_->run_again(step_, create_graph);
  variable_list ends = rerun.vector_jacobian({std::move(gradient)}, needed);
  std::move(ends.begin(), ends.end(), result.begin() + 1);
  return result;
}

}  // namespace regrad::detail
