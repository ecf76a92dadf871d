#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

namespace regrad::models {

/// Two parameter groups for SGD over all parameters of `module`: weights of two or more axes (convolutions, linear
/// layers) with the options as they are, then all others (biases, scales of norms) with a weight decay of zero.
std::vector<torch::optim::OptimizerParamGroup> decay_weights_only(const torch::nn::Module& module,
                                                                  const torch::optim::SGDOptions& options);

}  // namespace regrad::models
