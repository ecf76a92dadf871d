#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/kept_tensor.h"
#include "core/replay.h"
#include "core/torch_compat.h"

namespace regrad::detail {

class HalfStepNode;

/// The two streams of a block at one level. Level s is before half-step s: a block of L layers has levels 0 .. 2L.
/// Half-step s changes stream s % 2 by a function of the other: y = a + fn(b).
using Streams = std::array<at::Tensor, 2>;

/// What one forward of a block leaves for its backward, shared by the graph nodes of its half-steps. The subclasses
/// are the memory strategies: they know how a half-step gets its input back.
class BlockCall {
 public:
  /// f_side, g_side: the side inputs of the two functions.
  BlockCall(const Tensors& f_side, const Tensors& g_side);
  virtual ~BlockCall() = default;

  /// Runs a half-step for the first time and returns its stream after it, with a graph node of this call as its
  /// gradient function where it needs a gradient. Adds the parameters and captured leaves that it used to
  /// `leaves`, unless null.
  static at::Tensor first_step(const std::shared_ptr<BlockCall>& call, const std::shared_ptr<const Function>& function,
                               const Streams& streams, const Tensors& side,
                               const std::shared_ptr<const Environment>& environment, Tensors* leaves);

  /// Before each half-step of the forward.
  virtual void keep_before(size_t step, const Streams& streams) = 0;
  /// After the last one.
  virtual void keep_last(const Streams& streams) = 0;

  /// Runs the function of half-step `step` again, with a graph. In backward, within a graph task.
  virtual Replay::Rerun run_again(size_t step, bool create_graph) = 0;

  /// The node of `step` will not run again.
  void release(size_t step);

  /// @throws Torch's error about a second backward when the step is released.
  std::shared_ptr<const Replay> replay(size_t step) const;

 protected:
  struct Step {
    std::shared_ptr<const Replay> replay;
    /// Null where the half-step needs no gradient, and once the node is released.
    HalfStepNode* node = nullptr;
  };

  virtual OutputCheck output_check() const = 0;

  /// After a release, under the lock. Moves what is no longer needed into `dropped`, which dies after the lock.
  virtual void drop_streams(std::vector<KeptTensor>& dropped) = 0;

  Replay::Rerun run_again_on(size_t step, const at::Tensor& stream, bool create_graph) const;
  at::Tensor run_again_for_values(size_t step, const at::Tensor& stream) const;

  /// How many half-steps there are below the highest whose node is not released.
  size_t unreleased() const { return unreleased_; }
  size_t step_count() const { return steps_.size(); }
  bool has_node(size_t step) const;

  mutable std::mutex mutex_;

 private:
  Tensors arguments(size_t step, const at::Tensor& stream) const;

  std::vector<Step> steps_;
  size_t unreleased_ = 0;
  std::array<std::vector<KeptTensor>, 2> side_;
};

/// Memory::reverse(): keeps the last streams, and rebuilds each level from the one above by the inverse.
class ReverseCall : public BlockCall {
 public:
  using BlockCall::BlockCall;
  void keep_before(size_t, const Streams&) override {}
  void keep_last(const Streams& streams) override;
  Replay::Rerun run_again(size_t step, bool create_graph) override;

 protected:
  OutputCheck output_check() const override { return OutputCheck::sample; }
  void drop_streams(std::vector<KeptTensor>& dropped) override;

 private:
  /// Streams rebuilt so far in one backward pass, by level.
  struct Pass {
    std::mutex mutex;
    std::map<size_t, Streams> levels;
  };
  Streams take(Pass& pass, size_t level);

  std::array<KeptTensor, 2> last_;
  bool holds_last_ = true;
};

/// Memory::recompute(segment): keeps the streams before every segment, and runs the segment forward again.
class RecomputeCall : public BlockCall {
 public:
  RecomputeCall(size_t layers_per_segment, const Tensors& f_side, const Tensors& g_side)
      : BlockCall(f_side, g_side), steps_per_segment_(2 * layers_per_segment) {}
  void keep_before(size_t step, const Streams& streams) override;
  void keep_last(const Streams&) override {}
  Replay::Rerun run_again(size_t step, bool create_graph) override;

 protected:
  OutputCheck output_check() const override { return OutputCheck::bits; }
  void drop_streams(std::vector<KeptTensor>& dropped) override;

 private:
  /// Functions that ran again in one backward pass and whose nodes are still to come.
  struct Pass {
    std::mutex mutex;
    std::map<size_t, Replay::Rerun> reruns;
  };

  size_t steps_per_segment_;
  /// The streams before each segment; none where they are not needed any more.
  std::vector<std::optional<std::array<KeptTensor, 2>>> segments_;
};

/// Graph node of one half-step y = a + fn(b): the topology of plain autograd, so that the gradients of a layer are
/// final while the layer before it is still being rebuilt. Next edges: a, then b and the side inputs, then the exits.
class HalfStepNode : public torch::autograd::Node {
 public:
  HalfStepNode(std::shared_ptr<BlockCall> call, size_t step, std::string function_name,
               torch::autograd::edge_list edges);

  /// A node may die without release_variables; the call must not hold its address then.
  ~HalfStepNode() override { call_->release(step_); }

  std::string name() const override;
  void release_variables() override;

  /// Where the gradients of b and the side inputs go.
  torch::autograd::edge_list input_edges(size_t count) const;

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  std::shared_ptr<BlockCall> call_;
  size_t step_;
  std::string function_name_;
};

}  // namespace regrad::detail
