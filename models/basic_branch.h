#pragma once

#include <cstdint>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

namespace regrad::models {

/// A bias-free 3x3 convolution with padding 1, its weight drawn from the normal distribution of standard deviation
/// sqrt(2 / (9 out_channels)), truncated at two standard deviations.
torch::nn::Conv2d conv3x3(int64_t in_channels, int64_t out_channels, int64_t stride);

torch::nn::BatchNorm2d batch_norm(int64_t channels, double eps);

/// What a BasicBranch is made of.
struct BasicBranchOptions {
  BasicBranchOptions(int64_t in_channels, int64_t out_channels)
      : in_channels_(in_channels), out_channels_(out_channels) {}

  TORCH_ARG(int64_t, in_channels);
  TORCH_ARG(int64_t, out_channels);
  /// Of the first convolution.
  TORCH_ARG(int64_t, stride) = 1;
  /// Whether BN-ReLU comes before the first convolution.
  TORCH_ARG(bool, preactivation) = true;
  TORCH_ARG(double, norm_eps) = 1e-5;
};

/// The residual function BN-ReLU-conv3x3-BN-ReLU-conv3x3 (He et al. 2016, arXiv 1603.05027).
class BasicBranchImpl : public torch::nn::Module {
 public:
  explicit BasicBranchImpl(const BasicBranchOptions& options);

  /// x: (batch, in_channels, height, width).
  /// Returns (batch, out_channels, ceil(height / stride), ceil(width / stride)).
  torch::Tensor forward(torch::Tensor x);

 private:
  torch::nn::BatchNorm2d norm1_{nullptr};
  torch::nn::Conv2d conv1_{nullptr};
  torch::nn::BatchNorm2d norm2_{nullptr};
  torch::nn::Conv2d conv2_{nullptr};
};

TORCH_MODULE(BasicBranch);

}  // namespace regrad::models
