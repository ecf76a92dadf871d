#include "core/input_guard.h"

#include "core/describe.h"
#include "core/tensor_stamp.h"
#include "regrad/error.h"

namespace regrad::detail {

InputGuard::InputGuard(const Tensors& inputs) : inputs_(inputs) {
  versions_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) versions_.push_back(version_of(input));
}

void InputGuard::check(const std::string& function_name) const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (version_of(inputs_[i]) == versions_[i]) continue;
    throw_error(ErrorKind::input_modified, function_name + " modified its input " + std::to_string(i) + ", " +
                                               describe(inputs_[i]) +
                                               ", in place, and so could not be run again on it. Let it change a copy: "
                                               "relu(x) instead of relu_(x), or x.clone() first.");
  }
}

Tensors run_plainly(const Function& function, const Tensors& inputs) {
  const InputGuard guard(inputs);
  Tensors outputs = function.run(inputs);
  guard.check(function.name);
  return outputs;
}

}  // namespace regrad::detail
