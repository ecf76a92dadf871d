#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

namespace regrad::detail {

/// Registers modules with `parent`: one as `name` itself, several as `name.0`, `name.1` ... in a list.
inline void register_modules(torch::nn::Module& parent, const std::string& name,
                             const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  if (modules.size() == 1) {
    parent.register_module(name, modules.front());
  } else if (!modules.empty()) {
    auto list = std::make_shared<torch::nn::ModuleListImpl>();
    for (const auto& module : modules) list->push_back(module);
    parent.register_module(name, list);
  }
}

}  // namespace regrad::detail
