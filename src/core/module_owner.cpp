#include <torch/nn/module.h>

#include "core/training_modes.h"
#include "regrad/detail/function.h"

namespace regrad::detail {

void append_training_modes(torch::nn::Module& module, std::vector<bool>& modes) {
  modes.push_back(module.is_training());
  for (const auto& child : module.children()) append_training_modes(*child, modes);
}

std::vector<bool>::const_iterator set_training_modes(torch::nn::Module& module,
                                                     std::vector<bool>::const_iterator modes) {
  // `train` reaches all below, whose own modes follow.
  module.train(*modes++);
  for (const auto& child : module.children()) modes = set_training_modes(*child, modes);
  return modes;
}

void copy_training_modes(const torch::nn::Module& from, torch::nn::Module& to) {
  std::vector<bool> modes;
  append_training_modes(const_cast<torch::nn::Module&>(from), modes);  // reads alone
  set_training_modes(to, modes.begin());
}

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
    for (const auto& root : roots_) append_training_modes(*root, modes);
    return modes;
  }

  void set_training_modes(const std::vector<bool>& modes) const override {
    auto next = modes.begin();
    for (const auto& root : roots_) next = detail::set_training_modes(*root, next);
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
