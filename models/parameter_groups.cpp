#include "models/parameter_groups.h"

#include <utility>

namespace regrad::models {

std::vector<torch::optim::OptimizerParamGroup> decay_weights_only(const torch::nn::Module& module,
                                                                  const torch::optim::SGDOptions& options) {
  std::vector<torch::Tensor> weights;
  std::vector<torch::Tensor> others;
  for (const torch::Tensor& parameter : module.parameters()) {
    (parameter.dim() >= 2 ? weights : others).push_back(parameter);
  }
  auto without_decay = options;
  without_decay.weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(weights), std::make_unique<torch::optim::SGDOptions>(options));
  groups.emplace_back(std::move(others), std::make_unique<torch::optim::SGDOptions>(without_decay));
  return groups;
}

}  // namespace regrad::models
