#pragma once

// Narrow: needs no torch::nn, and compiles in a few seconds.

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "regrad/detail/flat_function.h"
#include "regrad/export.h"

namespace regrad {

/// The gradients that a custom gradient function returns: one per input and one per variable, in their order.
/// Undefined tensors stand for zero.
struct CustomGradients {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> variables;
};

/// inputs: the function's tensor arguments in order, vectors flattened. variables: the leaf tensors that require grad
/// and that the function used without being given them. outputs: its results, flattened. grad_outputs: their
/// gradients, undefined where none arrives.
using CustomGradient =
    std::function<CustomGradients(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& variables,
                                  const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& grad_outputs)>;

namespace detail {

REGRAD_EXPORT Tensors apply_custom_gradient(Function function, const Tensors& inputs, const CustomGradient& gradient);

}  // namespace detail

/// A function like `function` whose gradient is what `gradient` says. Its own graph is dropped; inputs and outputs are
/// kept until backward. The gradient function runs with grad mode on under create_graph, so second order goes through
/// it. Time: no second run.
/// @throws Error (input_modified) when the function writes into an input; Error (invalid_argument) in
/// backward when `gradient` returns a wrong number of gradients; Error
/// (unsupported) when the function captures a tensor that requires grad and is no leaf: pass it as an input.
template <class F>
auto with_custom_grad(F&& function, CustomGradient gradient) {
  return [function = std::make_shared<std::decay_t<F>>(std::forward<F>(function)),
          gradient = std::move(gradient)](auto&&... args) {
    const auto run = [&](detail::Function flat, const detail::Tensors& inputs) {
      return detail::apply_custom_gradient(std::move(flat), inputs, gradient);
    };
    return detail::call_flat(function, "a function under with_custom_grad", run, std::forward<decltype(args)>(args)...);
  };
}

}  // namespace regrad
