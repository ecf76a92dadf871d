#pragma once

// Differences between Torch versions, in one place.

#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#define REGRAD_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace regrad::detail {

/// Owner of a graph node: an intrusive_ptr since Torch 2.15, a shared_ptr before.
using NodePtr = decltype(torch::autograd::Edge::function);

#if REGRAD_TORCH_AT_LEAST(2, 15)

template <class N>
using Owned = c10::intrusive_ptr<N>;

template <class N, class... Args>
Owned<N> make_node(Args&&... args) {
  return c10::make_intrusive<N>(std::forward<Args>(args)...);
}

#else

template <class N>
using Owned = std::shared_ptr<N>;

/// `deleteNode` takes a long graph apart without recursion.
template <class N, class... Args>
Owned<N> make_node(Args&&... args) {
  return std::shared_ptr<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

#endif

/// A kind of debug info that is none of Torch's own. Kinds are told apart by the address of their name, in earlier
/// versions by a number.
template <class Kind>
constexpr Kind own_debug_info_kind(const std::string_view* name) {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x52);
  } else {
    return Kind(name);
  }
}

}  // namespace regrad::detail
