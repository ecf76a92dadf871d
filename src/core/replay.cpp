#include "core/replay.h"

#include <algorithm>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include "core/describe.h"
#include "core/edges.h"
#include "core/input_guard.h"
#include "core/run_function.h"
#include "regrad/error.h"

namespace regrad::detail {

using torch::autograd::AccumulateGrad;
using torch::autograd::CopySlices;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

at::Tensor in_memory_of(const at::Tensor& alias, const at::Tensor& owner) {
  const c10::NoGradGuard no_grad;
  at::Tensor moved = alias.detach();
  moved.unsafeGetTensorImpl()->set_storage_keep_dtype(owner.storage());
  return moved;
}

namespace {

/// Puts the generators back where they were, also after an exception.
class GeneratorScope {
 public:
  explicit GeneratorScope(const GeneratorStates& replayed) : outer_(GeneratorStates::capture()) {
    outer_.add(replayed.current());
    replayed.restore();
  }
  ~GeneratorScope() { outer_.restore(); }
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;

 private:
  GeneratorStates outer_;
};

/// While it lives, leaves require grad as in the first run: parameters may have been frozen since, or released.
class RequiresGradScope {
 public:
  void set(const at::Tensor& tensor, bool requires_grad) {
    if (!tensor.is_leaf() || tensor.requires_grad() == requires_grad) return;
    tensor.unsafeGetTensorImpl()->set_requires_grad(requires_grad);
    changed_.push_back(tensor);
  }
  RequiresGradScope() = default;
  ~RequiresGradScope() {
    for (const at::Tensor& tensor : changed_) tensor.unsafeGetTensorImpl()->set_requires_grad(!tensor.requires_grad());
  }
  RequiresGradScope(const RequiresGradScope&) = delete;
  RequiresGradScope& operator=(const RequiresGradScope&) = delete;

 private:
  Tensors changed_;
};

/// The argument in whose memory an output lies, if any.
std::optional<size_t> find_shared(const at::Tensor& output, const Tensors& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (output.is_same(arguments[i])) return i;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const at::Tensor& argument = arguments[i];
    if (!argument.defined()) continue;
    if (output.has_storage() && argument.has_storage() && output.is_alias_of(argument)) return i;
  }
  return std::nullopt;
}

/// A result without gradient that lies in an argument's memory, as a view of the caller's tensor, as in plain.
at::Tensor view_of_input(const at::Tensor& output, const at::Tensor& input) {
  const bool same_elements = output.scalar_type() == input.scalar_type() && !output.is_conj() && !output.is_neg() &&
                             !input.is_conj() && !input.is_neg() && input.layout() == at::kStrided;
  if (!same_elements) return in_memory_of(output, input);
  const at::Tensor base = input.requires_grad() ? input.detach() : input;
  return base.as_strided(output.sizes(), output.strides(), output.storage_offset());
}

std::unordered_set<const Node*> node_set(const std::vector<Owned<PrivateNode>>& nodes) {
  std::unordered_set<const Node*> set;
  for (const auto& node : nodes) {
    if (node != nullptr) set.insert(node.get());
  }
  return set;
}

}  // namespace

FirstRun Replay::first_run(std::shared_ptr<const Function> function, const Tensors& inputs, Tensors arguments,
                           std::shared_ptr<const Environment> environment, OutputCheck check,
                           const at::Tensor& added_to) {
  const std::shared_ptr<Replay> replay(new Replay());
  replay->function_ = std::move(function);
  replay->environment_ = std::move(environment);
  replay->check_ = check;

  // Bridges, so that an inner tensor that the function leaks still has its gradient.
  std::vector<Owned<PrivateNode>> input_nodes(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Edge edge = gradient_edge(inputs[i]);
    replay->input_requires_grad_.push_back(edge.is_valid());
    if (!edge.is_valid()) continue;
    input_nodes[i] = PrivateNode::bridge(edge);
    torch::autograd::impl::set_gradient_edge(arguments[i], Edge(input_nodes[i], 0));
  }
  const InputGuard guard(arguments);

  FirstRun result;
  replay->generators_ = GeneratorStates::capture();
  replay->state_ = State(replay->function_->owner.get(), replay->function_->name);
  const NodeOrigin origin;
  {
    OperatorObserver observer(arguments, origin);
    result.outputs = run_function(*replay->function_, arguments, [&] {
      replay->generators_.restore();
      replay->state_.restore();
      Tensors outside = replay->state_.tensors();
      for (const TensorWrite& write : observer.writes) {
        const at::Tensor tensor = lock(write.tensor);
        if (tensor.defined()) tensor.detach().copy_(write.before);
        outside.push_back(tensor);
      }
      for (const TensorRead& read : observer.reads) outside.push_back(lock(read.tensor));
      return outside;
    });
    observer.rethrow_failure();
    observer.see_results(result.outputs);
    replay->generators_.add(observer.generators);
    replay->generators_.keep_advanced();
    replay->state_.finish(observer, replay->function_->name);
    for (TensorRead& read : observer.reads) {
      const at::Tensor tensor = lock(read.tensor);
      if (tensor.defined() && !replay->state_.holds(tensor)) replay->reads_.push_back(std::move(read));
    }
  }
  guard.check(replay->function_->name);

  replay->output_count_ = result.outputs.size();
  if (check == OutputCheck::bits) replay->fingerprint_ = fingerprint(result.outputs);
  if (check == OutputCheck::sample) {
    replay->sample_ = Sample(result.outputs.front());
    replay->sampled_stream_norm_ = Sample(arguments.front()).norm() + Sample(added_to).norm();
  }

  // Which outputs are the function's own results, rather than tensors from outside that it hands on.
  replay->casts_ = CastBoundary::for_first_run();
  const auto input_set = node_set(input_nodes);
  edge_list roots;
  std::vector<GraphWalk> walks;
  for (size_t o = 0; o < result.outputs.size(); ++o) {
    at::Tensor& output = result.outputs[o];
    if (!output.defined()) continue;
    const std::optional<size_t> shared = find_shared(output, arguments);
    if (shared.has_value() && output.is_same(arguments[*shared])) {
      output = inputs[*shared];
      continue;
    }
    if (!output.requires_grad()) {
      if (shared.has_value()) output = view_of_input(output, inputs[*shared]);
      continue;
    }
    const Edge root = gradient_edge(output);
    GraphWalk walk = walk_graph({root}, origin, input_set, replay->casts_);
    const bool is_outside = !walk.cuts.empty() && walk.cuts.front().node == nullptr;
    if (is_outside) continue;
    roots.push_back(root);
    walks.push_back(std::move(walk));
    result.differentiable.push_back(o);
    result.shares_input.push_back(shared);
  }

  // A walk from all outputs, unless one has seen it all.
  const GraphWalk all = walks.size() == 1 ? walks.front() : walk_graph(roots, origin, input_set, replay->casts_);
  result.exits = all.exits;
  for (const auto& node : input_nodes) {
    result.input_used.push_back(node != nullptr && all.inputs_reached.contains(node.get()));
  }
  for (const GraphWalk& walk : walks) {
    std::vector<bool> reach;
    for (const auto& node : input_nodes) reach.push_back(node != nullptr && walk.inputs_reached.contains(node.get()));
    for (const Edge& exit : all.exits) reach.push_back(walk.exit_index.contains(EdgeKey(exit)));
    result.reach.push_back(std::move(reach));
  }

  replay->differentiable_ = result.differentiable;
  const auto keep_accumulator = [&](AccumulateGrad* accumulator) {
    replay->accumulators_.push_back(accumulator->getptr());
    replay->variables_.push_back({accumulator, TensorStamp(accumulator->variable)});
  };
  for (const Edge& exit : all.exits) {
    replay->exits_.emplace_back(exit);
    if (AccumulateGrad* accumulator = as_accumulator(exit.function.get())) keep_accumulator(accumulator);
  }
  for (AccumulateGrad* leaf : replay->casts_.leaves()) keep_accumulator(leaf);
  replay->casts_ = replay->casts_.for_replay();
  result.replay = replay;
  return result;
}

Tensors Replay::call(Tensors& arguments, State::Substitutes* state_left) const {
  const GeneratorScope generators(generators_);
  RequiresGradScope requires_grad;
  for (const Variable& v : variables_) requires_grad.set(v.accumulator->variable, v.then.requires_grad);
  for (const TensorRead& read : reads_) {
    if (const at::Tensor tensor = lock(read.tensor); tensor.defined())
      requires_grad.set(tensor, read.then.requires_grad);
  }
  const State::Scope state(state_, function_->owner.get(), function_->name, state_left);
  const EnvironmentScope environment(*environment_);
  const CastBoundary::Published casts(casts_);
  Tensors outputs = run_function(*function_, arguments, [&] {
    generators_.restore();
    state_.restore();
    Tensors outside = state_.tensors();
    for (const Variable& v : variables_) outside.push_back(v.accumulator->variable);
    for (const TensorRead& read : reads_) outside.push_back(lock(read.tensor));
    return outside;
  });
  if (outputs.size() != output_count_) {
    throw_error(ErrorKind::replay_differs, function_->name + " returned " + std::to_string(outputs.size()) +
                                               " tensors when run again in backward, but " +
                                               std::to_string(output_count_) + " in forward.");
  }
  return outputs;
}

Replay::Rerun Replay::run_again(Tensors arguments, const edge_list& input_edges, bool create_graph) const {
  check_versions();
  Rerun rerun;
  rerun.function_name_ = function_->name;
  rerun.create_graph_ = create_graph;
  rerun.ends_.resize(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!input_requires_grad_[i]) continue;
    rerun.ends_[i] = create_graph && input_edges[i].is_valid() ? PrivateNode::bridge(arguments[i], input_edges[i])
                                                               : PrivateNode::sink(arguments[i]);
    torch::autograd::impl::set_gradient_edge(arguments[i], Edge(rerun.ends_[i], 0));
  }
  const auto input_set = node_set(rerun.ends_);

  const NodeOrigin origin;
  Tensors outputs = call(arguments, &rerun.state_);
  arguments.clear();
  check_outputs(outputs);
  for (const size_t o : differentiable_) {
    const at::Tensor& output = outputs[o];
    if (!output.defined() || !output.requires_grad()) {
      throw_error(ErrorKind::variables_differ,
                  function_->name + " returned a tensor that requires grad in forward, but in backward its output " +
                      std::to_string(o) + " does not. It must do the same in both runs.");
    }
    rerun.roots_.push_back(gradient_edge(output));
  }
  for (at::Tensor& output : outputs) rerun.outputs_.push_back(without_history(output));
  outputs.clear();

  CastBoundary casts = casts_;
  GraphWalk walk = walk_graph(rerun.roots_, origin, input_set, casts);
  check_exits(walk);

  const size_t first_exit = rerun.ends_.size();
  rerun.ends_.resize(first_exit + exits_.size());
  for (size_t i = 0; i < exits_.size(); ++i) {
    const Edge& real = walk.exits[walk.exit_index.at(exits_[i])];
    rerun.ends_[first_exit + i] =
        create_graph ? PrivateNode::bridge(real) : PrivateNode::sink(real.function->input_metadata(real.input_nr));
  }
  std::unordered_map<EdgeKey, size_t, EdgeKeyHash> end_of;
  for (size_t i = 0; i < exits_.size(); ++i) end_of.emplace(exits_[i], first_exit + i);
  for (const GraphWalk::Cut& cut : walk.cuts) {
    const Edge end(rerun.ends_[end_of.at(cut.exit)], 0);
    if (cut.node == nullptr) {
      rerun.roots_[cut.index] = end;
      continue;
    }
    cut.node->next_edges()[cut.index] = end;
    // CopySlices holds the in-place function, whose edges must be its own (the first is the base).
    if (auto* slices = dynamic_cast<CopySlices*>(cut.node);
        slices != nullptr && cut.index > 0 && slices->fn != nullptr && cut.index < slices->fn->num_outputs()) {
      slices->fn->next_edges()[cut.index] = end;
    }
  }
  return rerun;
}

Tensors Replay::run_again_for_values(Tensors arguments) const {
  check_versions();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!input_requires_grad_[i]) continue;
    torch::autograd::impl::set_gradient_edge(arguments[i], Edge(PrivateNode::sink(arguments[i]), 0));
  }
  Tensors outputs = call(arguments, nullptr);
  check_outputs(outputs);
  for (at::Tensor& output : outputs) output = without_history(output);
  return outputs;
}

namespace {

/// Functions that hand a gradient on by way of a view make several tensors on one memory. Torch's AccumulateGrad, which
/// counts the owners of the tensor alone, would make each the `.grad` of a leaf, and later add to both at once. So
/// equal views become one tensor, as they are without a view, and others that overlap are copied.
void separate_gradients(variable_list& gradients, const variable_list& cotangents) {
  std::unordered_multimap<const c10::StorageImpl*, at::Tensor> seen;
  for (const at::Tensor& cotangent : cotangents) {
    if (cotangent.has_storage()) seen.emplace(cotangent.storage().unsafeGetStorageImpl(), cotangent);
  }
  const auto is_cotangent = [&](const at::Tensor& tensor) {
    return std::any_of(cotangents.begin(), cotangents.end(), [&](const at::Tensor& c) { return c.is_same(tensor); });
  };
  for (at::Tensor& gradient : gradients) {
    if (!gradient.defined() || !gradient.has_storage()) continue;
    const auto [first, last] = seen.equal_range(gradient.storage().unsafeGetStorageImpl());
    for (auto other = first; other != last; ++other) {
      const at::Tensor& t = other->second;
      const bool same_view = t.sizes() == gradient.sizes() && t.strides() == gradient.strides() &&
                             t.storage_offset() == gradient.storage_offset() && t.dtype() == gradient.dtype();
      if (same_view) {
        gradient = t;
        break;
      }
      if (!is_cotangent(t) && at::get_overlap_status(t, gradient) != at::MemOverlapStatus::No) {
        gradient = gradient.clone();
        break;
      }
    }
    seen.emplace(gradient.storage().unsafeGetStorageImpl(), gradient);
  }
}

}  // namespace

/// While it lives, bridges lead nowhere, so that the engine does not search what lies behind, and the function's state
/// is what the run left of it.
class Replay::Rerun::ProductScope {
 public:
  explicit ProductScope(Rerun& rerun) : rerun_(rerun) {
    const std::lock_guard<std::mutex> lock(rerun_.products_->mutex);
    rerun_.state_.claim(claims_, rerun_.function_name_);
    if (rerun_.products_->count++ > 0) return;
    for (const auto& node : rerun_.ends_) {
      if (node != nullptr) node->detach_bridge();
    }
    rerun_.state_.exchange();
  }
  ~ProductScope() {
    const std::lock_guard<std::mutex> lock(rerun_.products_->mutex);
    if (--rerun_.products_->count > 0) return;
    rerun_.state_.exchange();
    for (const auto& node : rerun_.ends_) {
      if (node != nullptr) node->attach_bridge();
    }
  }
  ProductScope(const ProductScope&) = delete;
  ProductScope& operator=(const ProductScope&) = delete;

 private:
  Rerun& rerun_;
  ExchangeClaims claims_;
};

variable_list Replay::Rerun::vector_jacobian(variable_list cotangents, const std::vector<bool>& needed,
                                             bool keep_graph) {
  variable_list gradients(ends_.size());
  edge_list roots;
  variable_list root_gradients;
  for (size_t i = 0; i < roots_.size(); ++i) {
    if (!cotangents[i].defined()) continue;
    roots.push_back(roots_[i]);
    root_gradients.push_back(std::move(cotangents[i]));
  }
  edge_list captures;
  std::vector<size_t> captured;
  for (size_t i = 0; i < ends_.size(); ++i) {
    if (ends_[i] == nullptr || !needed[i]) continue;
    captures.emplace_back(ends_[i], 0);
    captured.push_back(i);
  }
  cotangents.clear();
  if (roots.empty() || captures.empty()) return gradients;

  const ProductScope scope(*this);
  variable_list result;
  explain_refusal(function_name_, [&] {
    result = Engine::get_default_engine().execute(roots, root_gradients, keep_graph || create_graph_, create_graph_,
                                                  /*accumulate_grad=*/false, captures);
  });
  if (!create_graph_) separate_gradients(result, root_gradients);
  for (size_t i = 0; i < captured.size(); ++i) gradients[captured[i]] = std::move(result[i]);
  return gradients;
}

void Replay::check_versions() const {
  const auto check = [&](const at::Tensor& tensor, const TensorStamp& then, const std::string& name) {
    const TensorStamp now(tensor);
    const auto differs = [&](const std::string& how) {
      throw_error(ErrorKind::tensor_modified, function_->name + " uses " + (name.empty() ? "a tensor" : name) + " " +
                                                  describe(tensor) + ", which " + how);
    };
    if (now.dtype != then.dtype || now.device != then.device) {
      differs(std::string("was ") + c10::toString(then.dtype) + " on " + then.device.str() +
              " when forward read it. Run backward before the module is moved or converted.");
    }
    if (now.version != then.version) {
      differs("was modified in place between forward and backward: it is at version " + std::to_string(now.version) +
              ", and was at version " + std::to_string(then.version) +
              " when forward read it. Run backward before changing it, or change a copy.");
    }
    if (now.sampled_bits != then.sampled_bits) {
      differs(
          "was modified between forward and backward through .data() or a pointer, as LibTorch's SGD steps: its "
          "version is the same, but not its values. Run backward before changing it, or change a copy.");
    }
  };
  for (const Variable& v : variables_) {
    const at::Tensor& variable = v.accumulator->variable;
    if (state_.holds(variable)) continue;
    check(variable, v.then, function_->owner == nullptr ? "" : function_->owner->parameter_name(variable));
  }
  for (const TensorRead& read : reads_) {
    if (const at::Tensor tensor = lock(read.tensor); tensor.defined()) check(tensor, read.then, "");
  }
}

void Replay::check_outputs(const Tensors& outputs) const {
  if (check_ == OutputCheck::bits) {
    if (fingerprint(outputs) == fingerprint_) return;
    throw_error(ErrorKind::replay_differs,
                function_->name +
                    " computed other values when run again in backward than in forward. Something that "
                    "it reads has changed, or it is not a function of its inputs: pass what changes as an "
                    "input, and guard side effects with is_recomputing().");
  }
  // Rebuilt inputs differ by rounding, which depth and half precision amplify: this is no measure of that, but tells
  // when function or input are another. Where the function is small beside the streams, a rebuilt zero for one,
  // these are the measure.
  const at::Tensor& output = outputs.front();
  const bool half = output.scalar_type() == at::kHalf || output.scalar_type() == at::kBFloat16;
  const double tolerance = half ? 0.5 : 0.25;
  const double scale = sample_.norm() + sampled_stream_norm_;
  const double distance = sample_.distance(Sample(output));
  if (distance <= tolerance * scale) return;
  throw_error(ErrorKind::replay_differs,
              function_->name +
                  " computed other values when run again in backward than in forward (relative difference " +
                  std::to_string(distance / scale) + " on a sample, tolerance " + std::to_string(tolerance) +
                  "). Either it is not a function of its inputs, or rebuilding the activations has lost too much "
                  "precision: use Memory::recompute or Memory::store for this block.");
}

void Replay::check_exits(const GraphWalk& walk) const {
  const bool same =
      walk.exits.size() == exits_.size() &&
      std::all_of(exits_.begin(), exits_.end(), [&](const EdgeKey& key) { return walk.exit_index.contains(key); });
  if (same) return;

  std::string differences;
  for (const EdgeKey& key : exits_) {
    if (walk.exit_index.contains(key)) continue;
    const bool owned = std::any_of(accumulators_.begin(), accumulators_.end(),
                                   [&](const NodePtr& node) { return node.get() == key.node; });
    differences += "\n  only in forward: " + (owned ? describe_exit(key.node) : "a captured tensor");
  }
  for (const Edge& exit : walk.exits) {
    if (std::find(exits_.begin(), exits_.end(), EdgeKey(exit)) != exits_.end()) continue;
    differences += "\n  only in backward: " + describe_exit(exit.function.get());
  }
  throw_error(ErrorKind::variables_differ,
              function_->name + " used other variables when run again in backward than in forward:" + differences +
                  "\nIt probably makes parameters, or keeps tensors, on each call. Make them once, outside.");
}

std::string Replay::describe_exit(Node* node) const {
  const AccumulateGrad* accumulator = as_accumulator(node);
  if (accumulator == nullptr) return "a captured tensor made by " + node->name();
  const std::string name = function_->owner == nullptr ? "" : function_->owner->parameter_name(accumulator->variable);
  return "parameter " + (name.empty() ? "" : name + " ") + describe(accumulator->variable);
}

}  // namespace regrad::detail
