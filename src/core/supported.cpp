#include "core/supported.h"

#include "core/describe.h"
#include "regrad/error.h"

namespace regrad::detail {

void check_supported(const Tensors& inputs, const std::string& function_name) {
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) continue;
    const auto refuse = [&](const std::string& what) {
      throw_error(ErrorKind::unsupported, function_name + " was given " + describe(input) + ", which " + what +
                                              ". Call the function without regrad there.");
    };
    const c10::DispatchKeySet keys = input.key_set();
    if (keys.has_any(c10::DispatchKeySet(
            {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Batched}))) {
      refuse("is wrapped by a functorch transform: a replay outside of the transform could not unwrap it");
    }
    if (!input.is_inference() && input._fw_grad(/*level=*/0).defined()) {
      refuse("carries a forward-mode tangent: backward could not rebuild it");
    }
  }
}

}  // namespace regrad::detail
