#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "regrad/detail/function.h"

namespace regrad::detail {

namespace {

class ModuleOwner : public Owner {
 public:
  explicit ModuleOwner(std::vector<std::shared_ptr<torch::nn::Module>> roots) : roots_(std::move(roots)) {}

  Tensors buffers() const override {
    Tensors result;
    for (const auto& root : roots_) {
      for (at::Tensor& buffer : root->buffers()) result.push_back(std::move(buffer));
    }
    return result;
  }

  std::vector<bool> training_modes() const override {
    std::vector<bool> modes;
    for (const auto& root : roots_) {
      root->apply([&](torch::nn::Module& module) { modes.push_back(module.is_training()); });
    }
    return modes;
  }

  void set_training_modes(const std::vector<bool>& modes) const override {
    // `train` goes down the tree, and `apply` visits parents first: each module ends with its own mode.
    size_t next = 0;
    for (const auto& root : roots_) {
      root->apply([&](torch::nn::Module& module) {
        if (next < modes.size()) module.train(modes[next++]);
      });
    }
  }

  std::string parameter_name(const at::Tensor& parameter) const override {
    for (const auto& root : roots_) {
      for (const auto& item : root->named_parameters()) {
        if (item.value().is_same(parameter)) return item.key();
      }
    }
    return "";
  }

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> roots_;
};

}  // namespace

std::shared_ptr<const Owner> owner_of(std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  return modules.empty() ? nullptr : std::make_shared<ModuleOwner>(std::move(modules));
}

}  // namespace regrad::detail
