#include "regrad/rev_block.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <torch/nn/modules/container/modulelist.h>

#include "core/describe.h"
#include "core/register_modules.h"
#include "core/training_modes.h"
#include "regrad/error.h"
#include "rev/block_forward.h"

namespace regrad {

using detail::throw_error;

namespace {

std::vector<Residual> make_residuals(const std::optional<Residuals>& residuals, int64_t num_layers, const char* name) {
  if (num_layers < 1) {
    throw_error(ErrorKind::invalid_argument,
                "a block has " + std::to_string(num_layers) + " layers; it must have at least 1.");
  }
  if (!residuals.has_value()) {
    throw_error(ErrorKind::invalid_argument, std::string("a block has no ") + name + ": set RevBlockOptions::" + name +
                                                 " to a factory, a module, a callable or a vector of them.");
  }
  return residuals->make(num_layers, name);
}

/// Registers what a function owns, unless it is registered already.
void register_residual(torch::nn::Module& layer, const std::string& name, const Residual& residual,
                       std::set<const torch::nn::Module*>& registered) {
  std::vector<std::shared_ptr<torch::nn::Module>> fresh;
  for (const auto& module : residual.modules()) {
    if (registered.insert(module.get()).second) fresh.push_back(module);
  }
  detail::register_modules(layer, name, fresh);
}

std::shared_ptr<torch::nn::ModuleListImpl> make_layers(const std::vector<Residual>& f, const std::vector<Residual>& g) {
  auto layers = std::make_shared<torch::nn::ModuleListImpl>();
  std::set<const torch::nn::Module*> registered;
  for (size_t i = 0; i < f.size(); ++i) {
    auto layer = std::make_shared<torch::nn::Module>("regrad::RevLayer");
    register_residual(*layer, "f", f[i], registered);
    register_residual(*layer, "g", g[i], registered);
    layers->push_back(layer);
  }
  return layers;
}

/// Copies of functions, where a module that several share is copied once.
class Cloner {
 public:
  explicit Cloner(const std::optional<at::Device>& device) : device_(device) {}

  Residual clone(const Residual& residual, size_t layer, const char* name) {
    if (!residual.is_module()) return clone_named(residual, layer, name);
    const auto found = copies_.find(residual.modules().front().get());
    if (found != copies_.end()) return found->second;
    return copies_.emplace(residual.modules().front().get(), clone_named(residual, layer, name)).first->second;
  }

 private:
  Residual clone_named(const Residual& residual, size_t layer, const char* name) const {
    try {
      return residual.clone(device_);
    } catch (const Error& error) {
      throw_error(error.kind(), "layers." + std::to_string(layer) + "." + name + ": " + error.msg());
    }
  }

  std::optional<at::Device> device_;
  std::map<const torch::nn::Module*, Residual> copies_;
};

/// Those of `leaves` that are neither parameters of `module` nor inputs, each once.
std::vector<at::Tensor> find_unregistered(const torch::nn::Module& module, const std::vector<at::Tensor>& leaves,
                                          const std::vector<at::Tensor>& inputs) {
  const auto parameters = module.parameters();
  const auto contains = [](const std::vector<at::Tensor>& list, const at::Tensor& tensor) {
    return std::any_of(list.begin(), list.end(), [&](const at::Tensor& other) { return other.is_same(tensor); });
  };
  std::vector<at::Tensor> result;
  for (const at::Tensor& leaf : leaves) {
    if (!contains(parameters, leaf) && !contains(inputs, leaf) && !contains(result, leaf)) result.push_back(leaf);
  }
  return result;
}

}  // namespace

RevBlockImpl::RevBlockImpl(const RevBlockOptions& options)
    : RevBlockImpl(make_residuals(options.f(), options.num_layers(), "f"),
                   make_residuals(options.g(), options.num_layers(), "g"), options.memory()) {}

RevBlockImpl::RevBlockImpl(std::vector<Residual> f, std::vector<Residual> g, Memory memory)
    : torch::nn::Module("regrad::RevBlock"),
      f_(std::move(f)),
      g_(std::move(g)),
      functions_(std::make_shared<detail::BlockFunctions>(f_, g_)),
      memory_(memory) {
  register_module("layers", make_layers(f_, g_));
}

std::tuple<at::Tensor, at::Tensor> RevBlockImpl::forward(const at::Tensor& x1, const at::Tensor& x2,
                                                         const SideInputs& side) {
  if (looked_for_unregistered_) return functions_->forward(x1, x2, side, memory_, nullptr);
  std::vector<at::Tensor> leaves;
  auto result = functions_->forward(x1, x2, side, memory_, &leaves);
  if (!leaves.empty()) {
    looked_for_unregistered_ = true;
    std::vector<at::Tensor> inputs{x1, x2};
    inputs.insert(inputs.end(), side.f.begin(), side.f.end());
    inputs.insert(inputs.end(), side.g.begin(), side.g.end());
    unregistered_parameters_ = find_unregistered(*this, leaves, inputs);
    if (!unregistered_parameters_.empty()) {
      std::string list;
      for (const at::Tensor& leaf : unregistered_parameters_)
        list.append(" ").append(detail::describe(leaf)).append(";");
      TORCH_WARN("regrad: the functions of a RevBlock use leaf tensors that no registered module owns:", list,
                 " they get their gradient, but parameters() does not list them. Pass the modules that own them: "
                 "Residual(modules, callable). unregistered_parameters() returns these tensors.");
    }
  }
  return result;
}

std::tuple<at::Tensor, at::Tensor> RevBlockImpl::inverse(const at::Tensor& y1, const at::Tensor& y2,
                                                         const SideInputs& side) {
  return functions_->inverse(y1, y2, side);
}

std::tuple<at::Tensor, at::Tensor> RevBlockImpl::backward(const at::Tensor& y1, const at::Tensor& y2,
                                                          const SideInputs& side) {
  return inverse(y1, y2, side);
}

std::shared_ptr<torch::nn::Module> RevBlockImpl::clone(const std::optional<at::Device>& device) const {
  Cloner cloner(device);
  std::vector<Residual> f;
  std::vector<Residual> g;
  for (size_t i = 0; i < f_.size(); ++i) {
    f.push_back(cloner.clone(f_[i], i, "f"));
    g.push_back(cloner.clone(g_[i], i, "g"));
  }
  const std::shared_ptr<RevBlockImpl> copy(new RevBlockImpl(std::move(f), std::move(g), memory_));
  detail::copy_training_modes(*this, *copy);
  return copy;
}

void RevBlockImpl::pretty_print(std::ostream& stream) const {
  stream << "regrad::RevBlock(num_layers=" << num_layers() << ", memory=" << memory_.to_string() << ")";
}

std::tuple<at::Tensor, at::Tensor> rev_block(const at::Tensor& x1, const at::Tensor& x2, Residuals f, Residuals g,
                                             int64_t num_layers, const SideInputs& side, bool is_training) {
  const detail::BlockFunctions functions(make_residuals(f, num_layers, "f"), make_residuals(g, num_layers, "g"));
  return functions.forward(x1, x2, side, is_training ? Memory::reverse() : Memory::store(), nullptr);
}

}  // namespace regrad
