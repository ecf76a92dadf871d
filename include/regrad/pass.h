#pragma once

#include "regrad/export.h"

namespace regrad {

/// Why a function runs: for the first time, or again in backward to rebuild what was dropped.
/// A function may take it as its last parameter.
enum class Pass { forward, recompute };

/// Whether the calling thread is inside a replay of a function. False outside of any. Costs one thread-local read.
REGRAD_EXPORT bool is_recomputing() noexcept;

namespace detail {

/// What a function that takes a Pass is given.
inline Pass current_pass() noexcept { return is_recomputing() ? Pass::recompute : Pass::forward; }

}  // namespace detail

}  // namespace regrad
