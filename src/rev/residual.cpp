#include "regrad/residual.h"

#include <algorithm>
#include <string>

namespace regrad {

using detail::throw_error;

at::Tensor Residual::operator()(const at::Tensor& x, const std::vector<at::Tensor>& side) const {
  if (!takes_side_inputs_ && !side.empty()) {
    throw_error(ErrorKind::invalid_argument,
                std::to_string(side.size()) +
                    " side inputs were given to a residual function that takes none: its shortest signature that "
                    "compiles is (Tensor). Give it the signature (Tensor, TensorList), or pass no side inputs.");
  }
  return call_(x, side);
}

namespace {

void check_shares_nothing(const torch::nn::Module& original, const torch::nn::Module& copy) {
  const auto originals = original.parameters();
  for (const at::Tensor& parameter : copy.parameters()) {
    const bool shared = std::any_of(originals.begin(), originals.end(),
                                    [&](const at::Tensor& other) { return other.is_alias_of(parameter); });
    if (shared) {
      throw_error(ErrorKind::not_cloneable, "clone() of " + original.name() +
                                                " returned a module with the same weights: its reset() must make new "
                                                "submodules instead of registering the given ones.");
    }
  }
}

}  // namespace

Residual Residual::clone(const std::optional<at::Device>& device) const {
  if (!is_module()) {
    if (stateless_ && modules_.empty()) return *this;
    throw_error(ErrorKind::not_cloneable,
                modules_.empty()
                    ? "a callable that captures something cannot be cloned: the copy would share it. Use a module."
                    : "a callable that uses modules cannot be cloned: the copy would still call the original modules. "
                      "Use a module with a forward of its own.");
  }
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = modules_.front()->clone(device);
  } catch (const c10::Error& error) {
    throw_error(ErrorKind::not_cloneable, modules_.front()->name() + " cannot be cloned: " + error.msg());
  }
  check_shares_nothing(*modules_.front(), *copy);
  return clone_(copy);
}

std::vector<Residual> Residuals::make(int64_t num_layers, const char* name) const { return make_(num_layers, name); }

Residuals Residuals::each_layer_of(Residual shared) {
  return Residuals(FromMake(), [shared = std::move(shared)](int64_t num_layers, const char*) {
    return std::vector<Residual>(static_cast<size_t>(num_layers), shared);
  });
}

Residuals Residuals::list_of(std::vector<Residual> list) {
  return Residuals(FromMake(), [list = std::move(list)](int64_t num_layers, const char* name) {
    if (list.size() != static_cast<size_t>(num_layers)) {
      throw_error(ErrorKind::invalid_argument, std::string("the list of functions for ") + name + " has " +
                                                   std::to_string(list.size()) + " entries, but the block has " +
                                                   std::to_string(num_layers) + " layers. Give one per layer.");
    }
    return list;
  });
}

Residuals Residuals::factory_of(std::function<Residual(int64_t)> factory) {
  return Residuals(FromMake(), [factory = std::move(factory)](int64_t num_layers, const char*) {
    std::vector<Residual> result;
    for (int64_t layer = 0; layer < num_layers; ++layer) result.push_back(factory(layer));
    return result;
  });
}

Residuals each_layer(Residual shared) { return Residuals::each_layer_of(std::move(shared)); }

}  // namespace regrad
