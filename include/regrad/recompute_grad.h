#pragma once

// Narrow: needs no torch::nn, and compiles in a few seconds.

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

#include "regrad/detail/flat_function.h"
#include "regrad/export.h"

namespace regrad {

/// Options of recompute_grad.
struct RecomputeOptions {
  /// Ties the second run to the gradients by a data dependency, for devices whose compiler sees both runs and could
  /// merge them. By default on for lazy devices, and off elsewhere: eager devices run in order.
  /// Costs a copy of the inputs in backward; changes no bit, whatever the gradients are.
  std::optional<bool> use_data_dep = std::nullopt;

  /// No gradient of a call is used before all exist. Eager devices do so anyway; on lazy devices it is tied by a
  /// data dependency.
  bool tupleize_grads = false;
};

namespace detail {

/// Runs `function` on `inputs` and keeps no activations: backward runs it again on the kept inputs.
REGRAD_EXPORT Tensors recompute(Function function, const Tensors& inputs, const RecomputeOptions& options);

}  // namespace detail

/// A function like `function` whose activations are dropped after forward and rebuilt in backward by running it again
/// (Chen et al. 2016, arXiv 1604.06174).
///
/// function: a callable or a torch::nn module, kept by the result, which is called like it. Arguments: tensors, vectors
/// of tensors, optional and undefined tensors; anything else is passed by value. Result: a tensor, a vector of tensors,
/// or a tuple or pair of these; other elements of a tuple are passed on. A last parameter of type Pass tells the two
/// runs apart; so does is_recomputing(). Tensors that the function captures get their gradient, and parameters it uses
/// as well.
///
/// The function runs again in backward: what a lambda captures by reference must still be there.
///
/// Values and gradients are bit-identical to the plain function's (where one tensor is used several times inside and
/// also outside, its contributions are summed in another order). Random numbers, buffers and autocast in the second
/// run are as in the first; buffers change once.
///
/// Time: one more evaluation in backward, and about 20 microseconds a call. Memory: the inputs, until backward.
/// @throws Error (input_modified) when the function writes into an input; Error (unsupported) for inputs with
/// forward-mode tangents or under functorch, and when the function writes in place to a captured tensor that has a
/// gradient history. In backward: Error (variables_differ, replay_differs, tensor_modified)
/// when the second run would not be the first. What the function throws passes through.
template <class F>
auto recompute_grad(F&& function, RecomputeOptions options = {}) {
  return [function = std::make_shared<std::decay_t<F>>(std::forward<F>(function)), options](auto&&... args) {
    const auto run = [&](detail::Function flat, const detail::Tensors& inputs) {
      return detail::recompute(std::move(flat), inputs, options);
    };
    return detail::call_flat(function, "a function under recompute_grad", run, std::forward<decltype(args)>(args)...);
  };
}

}  // namespace regrad
