#pragma once

// Includes torch::nn's Module, so it cannot compile as fast as recompute_grad.h.

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "regrad/export.h"
#include "regrad/residual.h"

namespace regrad {

/// A module whose activations are dropped after forward and rebuilt in backward, for torch::nn::Sequential.
/// The inner module is registered as `inner`; several modules of one callable as `inner.0`, `inner.1` ...
class REGRAD_EXPORT RecomputeImpl : public torch::nn::Module {
 public:
  /// inner: a module whose forward maps one tensor to one tensor, or a callable with the modules that it uses.
  explicit RecomputeImpl(Residual inner);

  /// The inner module's result. Errors and cost as recompute_grad.
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

  void pretty_print(std::ostream& stream) const override;

 private:
  Residual inner_;
};

TORCH_MODULE(Recompute);

/// Runs `sequential` on x in `segments` parts of (nearly) equal length, each of which keeps its input alone and runs
/// again in backward. The last part is stored: its backward comes first, so recomputing it would save nothing
/// (Chen et al. 2016, arXiv 1604.06174). More segments than modules means one module each.
/// Every module must map one tensor to one tensor.
/// Memory: until backward, segments - 1 inputs and the last part's activations; in backward those of one part. Time:
/// one more evaluation of all parts but the last.
/// @throws Error (invalid_argument) when segments < 1 or the sequential is empty.
REGRAD_EXPORT at::Tensor checkpoint_sequential(const torch::nn::Sequential& sequential, int64_t segments,
                                               const at::Tensor& x);

}  // namespace regrad
