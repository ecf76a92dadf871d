#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "regrad/detail/flatten.h"
#include "regrad/detail/function.h"
#include "regrad/pass.h"

namespace regrad::detail {

/// A module as torch::nn holds one, by `ModuleHolder` or by `std::shared_ptr`; recognised without torch::nn's headers.
template <class F>
concept holds_module = requires(const F& f) {
  typename F::ContainedType;
  f.ptr();
};
template <class F>
concept points_to_module = requires(const F& f) {
  typename F::element_type;
  f->is_training();
  f->named_parameters();
};

template <class F>
std::shared_ptr<const Owner> owner_of_callable(const F& function) {
  if constexpr (holds_module<F>) {
    return owner_of({function.ptr()});
  } else if constexpr (points_to_module<F>) {
    return owner_of({function});
  } else {
    return nullptr;
  }
}

/// Calls a callable, or a module's forward. It passes a trailing Pass to what cannot be called without.
template <class F, class... Args>
decltype(auto) invoke(F& function, Args&... args) {
  if constexpr (holds_module<F> || points_to_module<F>) {
    // Not by the holder's call operator, which cannot tell the result of a variadic forward.
    if constexpr (requires { function->forward(args...); }) {
      return function->forward(args...);
    } else {
      return function->forward(args..., current_pass());
    }
  } else if constexpr (std::is_invocable_v<F&, Args&...>) {
    return function(args...);
  } else {
    return function(args..., current_pass());
  }
}

/// Calls `function` on `args` by way of `run`, which sees a Function of flat lists of tensors. Everything but tensors
/// is kept by value for later runs.
template <class F, class Run, class... Args>
auto call_flat(const std::shared_ptr<F>& function, std::string name, const Run& run, Args&&... args) {
  using Arguments = std::tuple<Stored<Args>...>;
  using Result = std::decay_t<decltype(invoke(*function, std::declval<Stored<Args>&>()...))>;
  static_assert(holds_tensors<Result>,
                "the function must return a tensor, a vector of tensors, or a tuple or pair of these");

  Arguments arguments{store(std::forward<Args>(args))...};
  const Tensors inputs = take_tensors(arguments);
  // Filled by the first run, for the shape of the result and what in it is no tensor.
  const auto first_result = std::make_shared<std::optional<Result>>();

  Function flat;
  flat.name = std::move(name);
  flat.owner = owner_of_callable(*function);
  flat.run = [function, arguments, first = std::weak_ptr(first_result)](const Tensors& tensors) {
    Arguments full = arguments;
    put_tensors(full, tensors);
    Result result = std::apply([&](auto&... arg) -> Result { return invoke(*function, arg...); }, full);
    Tensors outputs = take_tensors(result);
    if (const auto slot = first.lock()) *slot = std::move(result);
    return outputs;
  };
  const Tensors outputs = run(std::move(flat), inputs);
  Result result = std::move(**first_result);
  put_tensors(result, outputs);
  return result;
}

}  // namespace regrad::detail
