#pragma once

#include <functional>
#include <string>

#include "regrad/detail/function.h"

namespace regrad::detail {

/// Runs `function` on `arguments`.
///
/// Some kernels ask for writable memory inside at::parallel_for, where Torch refuses it for tensors that share memory
/// copy-on-write. Then `undo` takes back what the function did and returns the tensors from outside that it may use,
/// and the function runs once more, with arguments and these tensors in memory of their own.
/// @throws Error (unsupported) when it is refused again, and what the function throws.
Tensors run_function(const Function& function, const Tensors& arguments, const std::function<Tensors()>& undo);

/// Calls `program`, which runs kernels of the function so named, and turns a refusal of shared memory into an error
/// that says what to do.
/// @throws Error (unsupported), and what the program throws.
void explain_refusal(const std::string& function_name, const std::function<void()>& program);

}  // namespace regrad::detail
