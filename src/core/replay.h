#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include "core/cast_boundary.h"
#include "core/environment.h"
#include "core/fingerprint.h"
#include "core/generators.h"
#include "core/graph_walk.h"
#include "core/operator_observer.h"
#include "core/private_node.h"
#include "core/state.h"
#include "core/tensor_stamp.h"
#include "regrad/detail/function.h"

namespace regrad::detail {

struct FirstRun;

/// How a replay's outputs are compared with the first run's.
enum class OutputCheck {
  /// Not at all: there is no replay.
  none,
  /// Bit for bit: the replay's inputs are the first run's.
  bits,
  /// Roughly, on a sample: the replay's inputs are rebuilt.
  sample,
};

/// A function that ran once and can run again later as if it were still then: with the same random numbers, state and
/// environment, and checked to depend on the same variables.
///
/// The first run records a graph as plain autograd would, so the function takes the same kernels and branches as
/// plain. The graph is walked for the edges that leave it, the *exits*, and dropped: no activation is kept. These
/// edges are what the function depends on. Our graph node takes them as its own.
class Replay {
 public:
  /// Runs `function` on `arguments`: aliases of `inputs` without history, made for this run.
  /// added_to: the stream to which the result will be added, if any; for OutputCheck::sample.
  /// @throws Error (input_modified, unsupported), and what the function throws.
  static FirstRun first_run(std::shared_ptr<const Function> function, const Tensors& inputs, Tensors arguments,
                            std::shared_ptr<const Environment> environment, OutputCheck check,
                            const at::Tensor& added_to = {});

  /// One run of the function in backward, with its private graph.
  class Rerun {
   public:
    /// The function's results, without history.
    const Tensors& outputs() const { return outputs_; }

    /// Drops the results: their memory is then free during vector_jacobian.
    void drop_outputs() { outputs_.clear(); }

    /// Gradients of the inputs, then of the exits, for `cotangents` of the differentiable outputs, in order. Undefined
    /// where not `needed` or not reached. Once it was called without keep_graph the private graph is used up; under
    /// create_graph it is always kept.
    torch::autograd::variable_list vector_jacobian(torch::autograd::variable_list cotangents,
                                                   const std::vector<bool>& needed, bool keep_graph = false);

   private:
    friend class Replay;
    class ProductScope;

    /// Products that run now. They overlap where nodes that share this run are on several devices.
    struct Products {
      std::mutex mutex;
      int count = 0;
    };

    std::string function_name_;
    bool create_graph_ = false;
    std::unique_ptr<Products> products_ = std::make_unique<Products>();
    Tensors outputs_;
    torch::autograd::edge_list roots_;
    /// Inputs, then exits; null where nothing can be captured.
    std::vector<Owned<PrivateNode>> ends_;
    /// What the function left of its state, which its graph may have saved.
    State::Substitutes state_;
  };

  /// Runs the function again. `arguments`: the values of the first run's inputs, as aliases made for this run. Under
  /// create_graph the private graph leads on to `input_edges` and to the real exits.
  /// @throws Error (tensor_modified, variables_differ, replay_differs), and what the function throws.
  Rerun run_again(Tensors arguments, const torch::autograd::edge_list& input_edges, bool create_graph) const;

  /// Runs the function again for its values alone. It takes the branches and kernels of the first run all the same.
  Tensors run_again_for_values(Tensors arguments) const;

  const Function& function() const { return *function_; }

  size_t exit_count() const { return exits_.size(); }
  size_t differentiable_count() const { return differentiable_.size(); }

 private:
  Replay() = default;

  /// state_left: null, or receives what the function leaves of its state.
  Tensors call(Tensors& arguments, State::Substitutes* state_left) const;
  void check_versions() const;
  void check_outputs(const Tensors& outputs) const;
  void check_exits(const GraphWalk& walk) const;
  std::string describe_exit(torch::autograd::Node* node) const;

  /// A leaf that the function uses.
  struct Variable {
    torch::autograd::AccumulateGrad* accumulator;
    TensorStamp then;
  };

  std::shared_ptr<const Function> function_;
  std::shared_ptr<const Environment> environment_;
  GeneratorStates generators_;
  State state_;
  std::vector<TensorRead> reads_;
  std::vector<Variable> variables_;
  CastBoundary casts_;
  /// Accumulators, which tensors hold weakly. Other exits must not be owned twice: destroying a deep graph would
  /// recurse.
  std::vector<NodePtr> accumulators_;
  std::vector<EdgeKey> exits_;
  std::vector<bool> input_requires_grad_;
  /// Numbers of the outputs that have a gradient of this function.
  std::vector<size_t> differentiable_;
  OutputCheck check_ = OutputCheck::bits;
  size_t output_count_ = 0;
  std::vector<uint64_t> fingerprint_;
  Sample sample_;
  double sampled_stream_norm_ = 0;
};

/// What the first run of a function gives.
struct FirstRun {
  std::shared_ptr<const Replay> replay;
  /// As the function returned them: those that `differentiable` lists carry its private graph, others are handed on
  /// as they are. An argument that the function returned is replaced by the caller's tensor.
  Tensors outputs;
  std::vector<size_t> differentiable;
  /// The edges that the function depends on, each once.
  torch::autograd::edge_list exits;
  /// Whether the function's outputs depend on each input.
  std::vector<bool> input_used;
  /// Per differentiable output: which inputs, then which exits, it reaches.
  std::vector<std::vector<bool>> reach;
  /// Per differentiable output: the input in whose memory it lies, if any.
  std::vector<std::optional<size_t>> shares_input;
};

/// `alias`, a view of a copy-on-write alias of `owner`, moved into the memory of `owner` itself.
at::Tensor in_memory_of(const at::Tensor& alias, const at::Tensor& owner);

}  // namespace regrad::detail
