#pragma once

// Includes torch::nn's Module, so it cannot compile as fast as recompute_grad.h.

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "regrad/export.h"
#include "regrad/memory.h"
#include "regrad/residual.h"

namespace regrad {

namespace detail {
class BlockFunctions;
}

/// Tensors passed to every layer's f, and to every layer's g, beside the stream. Any shape and dtype; those that
/// require grad get it, summed over the layers. A tensor may be in both lists; undefined tensors are passed through.
struct SideInputs {
  std::vector<at::Tensor> f = {};
  std::vector<at::Tensor> g = {};
};

/// What a RevBlock is made of.
class REGRAD_EXPORT RevBlockOptions {
 public:
  /// num_layers: at least 1.
  explicit RevBlockOptions(int64_t num_layers) : num_layers_(num_layers) {}

  /// The function of the first half-step, y1 = x1 + f(x2). Required.
  RevBlockOptions& f(Residuals residuals) {
    f_ = std::move(residuals);
    return *this;
  }

  /// The function of the second half-step, y2 = x2 + g(y1). Required.
  RevBlockOptions& g(Residuals residuals) {
    g_ = std::move(residuals);
    return *this;
  }

  /// How activations come back in backward. Default: Memory::reverse(). Can be changed later by set_memory.
  RevBlockOptions& memory(Memory memory) {
    memory_ = memory;
    return *this;
  }

  int64_t num_layers() const noexcept { return num_layers_; }
  const std::optional<Residuals>& f() const noexcept { return f_; }
  const std::optional<Residuals>& g() const noexcept { return g_; }
  const Memory& memory() const noexcept { return memory_; }

 private:
  int64_t num_layers_;
  std::optional<Residuals> f_;
  std::optional<Residuals> g_;
  Memory memory_ = Memory::reverse();
};

/// A series of reversible residual layers with additive coupling (Gomez et al. 2017, arXiv 1707.04585):
///     y1 = x1 + f(x2, side.f)
///     y2 = x2 + g(y1, side.g)
/// Modules are registered as `layers.<i>.f` and `layers.<i>.g`; a shared module once, at its first place. Several
/// modules of one callable are `layers.<i>.f.0`, `layers.<i>.f.1` ...
class REGRAD_EXPORT RevBlockImpl : public torch::nn::Module {
 public:
  /// @throws Error (invalid_argument) for num_layers < 1, missing f or g, or a list of the wrong length.
  explicit RevBlockImpl(const RevBlockOptions& options);

  /// x1, x2: the streams; f maps the shape of x2 to that of x1, g the reverse; the dtype and device stay.
  /// Returns (y1, y2), with the shapes, dtypes and devices of (x1, x2).
  /// Time: one evaluation of each f and g, and in backward as the strategy says (see Memory).
  /// @throws Error (stream_mismatch) when f or g returns another shape or device than its stream has, or a dtype that
  /// would promote it (half precision into a float stream is fine); Error (input_modified) when one writes into its
  /// input; Error (unsupported) as recompute_grad; Error (invalid_argument) for side inputs that it does not take; and
  /// what f or g throw.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x1, const at::Tensor& x2, const SideInputs& side = {});

  /// The inputs (x1, x2) that give (y1, y2), within rounding. Usable before any forward. f and g run as they are:
  /// in training mode they draw new random numbers and update their buffers, so call eval() first where they do so.
  /// Plain operations: with grad mode on they record an ordinary graph, which grows with depth.
  std::tuple<at::Tensor, at::Tensor> inverse(const at::Tensor& y1, const at::Tensor& y2, const SideInputs& side = {});

  /// The same as inverse(): the name in TensorFlow's rev_block_lib. Not a gradient.
  std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& y1, const at::Tensor& y2, const SideInputs& side = {});

  int64_t num_layers() const noexcept { return static_cast<int64_t>(f_.size()); }

  const Memory& memory() const noexcept { return memory_; }

  /// Takes effect from the next forward on: a graph keeps the strategy that it was made with.
  void set_memory(Memory memory) { memory_ = memory; }

  /// Leaf tensors that f and g used in the first forward and that no registered module owns. They get their gradient
  /// like any other, but parameters() does not list them, so an optimizer made from it leaves them alone.
  /// Empty before the first forward that records a graph, which names them in a warning.
  std::vector<at::Tensor> unregistered_parameters() const { return unregistered_parameters_; }

  /// A block with its own weights.
  /// @throws Error (not_cloneable), naming layer and function, for what cannot be copied. Nothing shares weights.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

  void pretty_print(std::ostream& stream) const override;

 private:
  /// f, g: one per layer.
  RevBlockImpl(std::vector<Residual> f, std::vector<Residual> g, Memory memory);

  std::vector<Residual> f_;
  std::vector<Residual> g_;
  std::shared_ptr<const detail::BlockFunctions> functions_;
  Memory memory_;
  bool looked_for_unregistered_ = false;
  std::vector<at::Tensor> unregistered_parameters_;
};

TORCH_MODULE(RevBlock);

/// A RevBlock on one tensor: split in two equal parts along `dim`, run, and joined again. A module with one `forward`,
/// for torch::nn::Sequential.
class REGRAD_EXPORT SplitRevBlockImpl : public torch::nn::Module {
 public:
  /// dim: the axis to split along; negative counts from the end.
  explicit SplitRevBlockImpl(RevBlock block, int64_t dim = 1);

  /// x: any shape with an even size along dim. Returns the shape of x.
  /// @throws Error (invalid_argument) when dim is not an axis of x or its size is odd; and as RevBlockImpl::forward.
  at::Tensor forward(const at::Tensor& x);

  /// The input that gives y: see RevBlockImpl::inverse.
  at::Tensor inverse(const at::Tensor& y);

  RevBlock block() const { return block_; }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

  void pretty_print(std::ostream& stream) const override;

 private:
  std::tuple<at::Tensor, at::Tensor> split(const at::Tensor& x) const;

  RevBlock block_;
  int64_t dim_;
};

TORCH_MODULE(SplitRevBlock);

/// One call that builds and applies a block of residual functions and keeps no module: the function of TensorFlow's
/// rev_block_lib. f and g: as in RevBlockOptions. With is_training false, activations are stored as usual.
/// Shapes, result and errors as RevBlockImpl::forward.
REGRAD_EXPORT std::tuple<at::Tensor, at::Tensor> rev_block(const at::Tensor& x1, const at::Tensor& x2, Residuals f,
                                                           Residuals g, int64_t num_layers = 1,
                                                           const SideInputs& side = {}, bool is_training = true);

}  // namespace regrad
