#include "models/basic_branch.h"

#include <cmath>

#include <torch/utils.h>

namespace regrad::models {
namespace {

void truncated_normal_(torch::Tensor weight, double std) {
  const torch::NoGradGuard no_grad;
  weight.normal_(0, std);
  // Redraws the 5% that lie outside until none is left.
  for (torch::Tensor outside = weight.abs() > 2 * std; outside.any().item<bool>(); outside = weight.abs() > 2 * std) {
    weight.masked_scatter_(outside, torch::randn(outside.sum().item<int64_t>(), weight.options()) * std);
  }
}

}  // namespace

torch::nn::BatchNorm2d batch_norm(int64_t channels, double eps) {
  return torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(channels).eps(eps));
}

torch::nn::Conv2d conv3x3(int64_t in_channels, int64_t out_channels, int64_t stride) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in_channels, out_channels, 3).stride(stride).padding(1).bias(false));
  truncated_normal_(conv->weight, std::sqrt(2.0 / (9.0 * static_cast<double>(out_channels))));
  return conv;
}

BasicBranchImpl::BasicBranchImpl(const BasicBranchOptions& options) {
  if (options.preactivation()) {
    norm1_ = register_module("norm1", batch_norm(options.in_channels(), options.norm_eps()));
  }
  conv1_ = register_module("conv1", conv3x3(options.in_channels(), options.out_channels(), options.stride()));
  norm2_ = register_module("norm2", batch_norm(options.out_channels(), options.norm_eps()));
  conv2_ = register_module("conv2", conv3x3(options.out_channels(), options.out_channels(), 1));
}

torch::Tensor BasicBranchImpl::forward(torch::Tensor x) {
  if (!norm1_.is_empty()) x = torch::relu(norm1_->forward(x));
  x = conv1_->forward(x);
  x = torch::relu(norm2_->forward(x));
  return conv2_->forward(x);
}

}  // namespace regrad::models
