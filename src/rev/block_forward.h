#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include "regrad/detail/function.h"
#include "regrad/memory.h"
#include "regrad/rev_block.h"

namespace regrad::detail {

/// The functions of a block in the order in which they run: f and g of layer 0, f and g of layer 1 ...
class BlockFunctions {
 public:
  /// f, g: one per layer.
  BlockFunctions(const std::vector<Residual>& f, const std::vector<Residual>& g);

  /// (y1, y2). Adds the parameters and captured leaves that were used to `leaves`, unless null, where a graph is
  /// recorded.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x1, const at::Tensor& x2, const SideInputs& side,
                                             const Memory& memory, Tensors* leaves) const;

  /// (x1, x2), by plain operations.
  std::tuple<at::Tensor, at::Tensor> inverse(const at::Tensor& y1, const at::Tensor& y2, const SideInputs& side) const;

 private:
  void check_side_inputs(const SideInputs& side) const;
  at::Tensor run(size_t step, const at::Tensor& stream, const SideInputs& side) const;

  std::vector<std::shared_ptr<const Function>> functions_;
  std::vector<std::shared_ptr<const Function>> replayed_;
  std::vector<bool> takes_side_inputs_;
};

}  // namespace regrad::detail
