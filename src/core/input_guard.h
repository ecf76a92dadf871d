#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "regrad/detail/function.h"

namespace regrad::detail {

/// Notices a function that writes into its inputs, by their versions.
class InputGuard {
 public:
  /// Right before the function runs on `inputs`, which must outlive this.
  explicit InputGuard(const Tensors& inputs);

  /// Right after.
  /// @throws Error (input_modified) naming the function and the input.
  void check(const std::string& function_name) const;

 private:
  const Tensors& inputs_;
  std::vector<uint32_t> versions_;
};

/// Runs a function as plain would, and checks that it does not write into its inputs.
Tensors run_plainly(const Function& function, const Tensors& inputs);

}  // namespace regrad::detail
