#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "regrad/export.h"

namespace torch::nn {
class Module;
}

namespace regrad::detail {

using Tensors = std::vector<at::Tensor>;

/// What a function owns: registered modules, seen without torch::nn.
class REGRAD_EXPORT Owner {
 public:
  virtual ~Owner() = default;

  /// The registered buffers, in a fixed order. May contain undefined tensors.
  virtual Tensors buffers() const = 0;

  /// The training mode of every module, in a fixed order.
  virtual std::vector<bool> training_modes() const = 0;
  virtual void set_training_modes(const std::vector<bool>& modes) const = 0;

  /// The name of a parameter, or "" where it owns none such.
  virtual std::string parameter_name(const at::Tensor& parameter) const = 0;
};

/// Sees modules as an Owner; null for none. Their names come from the first module that has one for a parameter.
REGRAD_EXPORT std::shared_ptr<const Owner> owner_of(std::vector<std::shared_ptr<torch::nn::Module>> modules);

/// A function of tensors that can be replayed.
struct Function {
  std::function<Tensors(const Tensors&)> run;
  /// Null where nothing is registered.
  std::shared_ptr<const Owner> owner;
  /// For errors and anomaly mode: "layers.3.f".
  std::string name;
};

}  // namespace regrad::detail
