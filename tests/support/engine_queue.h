#pragma once

#include <torch/torch.h>

namespace regrad::testing {

/// What a failed backward leaves in Torch's engine, in plain too: nodes that were ready but had not run, with their
/// gradients, stay in the thread's queue until its next backward. To be made before the graphs that may fail: nodes
/// are run from the newest to the oldest.
class EngineQueue {
 public:
  /// Drops what failed passes left.
  void drain() const { torch::autograd::grad({oldest_}, {leaf_}, {}, /*retain_graph=*/true); }

 private:
  torch::Tensor leaf_ = torch::zeros({1}).requires_grad_();
  torch::Tensor oldest_ = leaf_ * 1;
};

}  // namespace regrad::testing
