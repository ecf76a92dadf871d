#include "core/run_function.h"

#include <c10/core/impl/COW.h>

#include "regrad/error.h"

namespace regrad::detail {

namespace {

bool is_refusal(const c10::Error& error) {
  return error.msg().find("Materializing a storage in the loop function of at::parallel_for") != std::string::npos;
}

/// Ends the sharing on the side of `tensor`.
void own_memory(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) storage.mutable_data();
}

}  // namespace

void explain_refusal(const std::string& function_name, const std::function<void()>& program) {
  try {
    program();
  } catch (const c10::Error& error) {
    if (!is_refusal(error)) throw;
    throw_error(ErrorKind::unsupported,
                function_name +
                    " has a kernel that asks for writable memory inside at::parallel_for, of a tensor that "
                    "shares its memory copy-on-write. Take the pointer before the loop, or use "
                    "const_data_ptr where it is only read.");
  }
}

Tensors run_function(const Function& function, const Tensors& arguments, const std::function<Tensors()>& undo) {
  try {
    return function.run(arguments);
  } catch (const c10::Error& error) {
    if (!is_refusal(error)) throw;
  }
  for (const at::Tensor& tensor : undo()) own_memory(tensor);
  for (const at::Tensor& argument : arguments) own_memory(argument);
  Tensors outputs;
  explain_refusal(function.name, [&] { outputs = function.run(arguments); });
  return outputs;
}

}  // namespace regrad::detail
