#pragma once

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "regrad/detail/function.h"

namespace regrad::detail {

template <class T>
struct is_tuple : std::false_type {};
template <class... T>
struct is_tuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct is_tuple<std::pair<A, B>> : std::true_type {};

/// How a value that may hold tensors is stored: a list of tensors that owns nothing becomes one that does.
template <class T>
using Stored = std::conditional_t<std::is_same_v<std::decay_t<T>, at::TensorList>, Tensors, std::decay_t<T>>;

template <class T>
Stored<T> store(T&& value) {
  if constexpr (std::is_same_v<std::decay_t<T>, at::TensorList>) {
    return value.vec();
  } else {
    return std::forward<T>(value);
  }
}

/// Whether a result of type T can be taken apart into tensors.
template <class T>
inline constexpr bool holds_tensors = std::is_same_v<T, at::Tensor> || std::is_same_v<T, Tensors> ||
                                      std::is_same_v<T, std::optional<at::Tensor>> || is_tuple<T>::value;

/// Calls visit(at::Tensor&) for each tensor in `value`, in order: a tensor, a vector of tensors, an optional tensor,
/// or a tuple or pair of these. Anything else is left alone.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (std::is_same_v<T, Tensors>) {
    for (at::Tensor& tensor : value) visit(tensor);
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (value.has_value()) visit(*value);
  } else if constexpr (is_tuple<T>::value) {
    std::apply([&](auto&... element) { (for_each_tensor(element, visit), ...); }, value);
  }
}

/// Moves the tensors out of `value`, in order, and leaves undefined ones in their places.
template <class T>
Tensors take_tensors(T& value) {
  Tensors tensors;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, at::Tensor())); });
  return tensors;
}

/// Puts tensors into `value`, in the order in which take_tensors took them.
template <class T>
void put_tensors(T& value, const Tensors& tensors) {
  size_t next = 0;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensor = tensors.at(next++); });
}

}  // namespace regrad::detail
