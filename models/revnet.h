#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include "models/basic_branch.h"
#include "regrad/memory.h"
#include "regrad/rev_block.h"

namespace regrad::models {

/// A pair of streams.
using Streams = std::tuple<torch::Tensor, torch::Tensor>;

/// What a RevNet is made of. The defaults are RevNet-38 for images of CIFAR's size: 464,890 parameters with 3 input
/// channels and 10 classes.
struct RevNetOptions {
  RevNetOptions(int64_t in_channels, int64_t num_classes) : in_channels_(in_channels), num_classes_(num_classes) {}

  TORCH_ARG(int64_t, in_channels);
  TORCH_ARG(int64_t, num_classes);
  /// Units of each stage, the first of which is not reversible.
  TORCH_ARG(std::vector<int64_t>, units) = {3, 3, 3};
  /// Channels of the init convolution, then of each stage, both streams together: even, and never fewer than before.
  TORCH_ARG(std::vector<int64_t>, filters) = {32, 32, 64, 112};
  /// How the reversible units get their activations back.
  TORCH_ARG(Memory, memory) = Memory::reverse();
};

/// The first unit of a stage, which changes resolution and channels and so has no inverse:
///     y1 = shortcut(x1) + f(x2)
///     y2 = shortcut(x2) + g(y1)
/// f carries the stride; the shortcut is average pooling and zero-padded channels. Torch stores its activations.
class TransitionUnitImpl : public torch::nn::Module {
 public:
  /// in_channels, out_channels: of one stream. preactivation: whether f begins with BN-ReLU.
  TransitionUnitImpl(int64_t in_channels, int64_t out_channels, int64_t stride, bool preactivation);

  /// x1, x2: (batch, in_channels, height, width).
  /// Returns two of (batch, out_channels, ceil(height / stride), ceil(width / stride)).
  Streams forward(const torch::Tensor& x1, const torch::Tensor& x2);

 private:
  torch::Tensor shortcut(torch::Tensor x) const;

  int64_t stride_;
  int64_t added_channels_;
  BasicBranch f_{nullptr};
  BasicBranch g_{nullptr};
};

TORCH_MODULE(TransitionUnit);

/// The reversible residual network of Gomez et al. 2017 (arXiv 1707.04585): an init convolution, stages of units on two
/// streams that are the halves of the channels, and a linear classifier on the averages of the joined channels.
class RevNetImpl : public torch::nn::Module {
 public:
  /// @throws c10::Error when filters do not fit units, are odd or shrink, or any count is below 1.
  explicit RevNetImpl(const RevNetOptions& options);

  /// images: (batch, in_channels, height, width), float. Returns class scores (batch, num_classes).
  torch::Tensor forward(const torch::Tensor& images);

  /// Switches all reversible units, from the next forward on. The values stay the same.
  void set_memory(Memory memory);

 private:
  struct Stage {
    TransitionUnit first{nullptr};
    /// Empty in a stage of one unit.
    RevBlock rest{nullptr};
  };

  Stage make_stage(int64_t index, const RevNetOptions& options);

  torch::nn::Conv2d init_conv_{nullptr};
  torch::nn::BatchNorm2d init_norm_{nullptr};
  std::vector<Stage> stages_;
  torch::nn::BatchNorm2d final_norm_{nullptr};
  torch::nn::Linear classifier_{nullptr};
};

TORCH_MODULE(RevNet);

}  // namespace regrad::models
