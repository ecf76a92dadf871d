#include "core/kept_tensor.h"

#include <mutex>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COW.h>

#include "core/describe.h"
#include "core/tensor_stamp.h"
#include "regrad/error.h"

namespace regrad::detail {

namespace {

/// The first copy-on-write clone converts the storage without a lock of its own. Held for that alone, and to look at
/// storages, which are neither plain nor converted meanwhile.
std::mutex conversion_mutex;

/// Under the mutex.
bool is_plain_or_converted(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized() ||
      !(tensor.is_cpu() || tensor.is_cuda()) || !tensor.has_storage() || tensor.is_conj() || tensor.is_neg() ||
      tensor.key_set().has(c10::DispatchKey::Python)) {
    return false;
  }
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  return c10::impl::cow::has_simple_data_ptr(storage) || c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
}

}  // namespace

bool can_be_copy_on_write(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(conversion_mutex);
  return is_plain_or_converted(tensor);
}

at::Tensor copy_on_write_alias(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::NoGradGuard no_grad;
  {
    const std::lock_guard<std::mutex> lock(conversion_mutex);
    if (is_plain_or_converted(tensor)) return tensor._lazy_clone();
  }
  return tensor.detach();
}

at::Tensor copy_with_storage(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  if (!tensor.has_storage()) return tensor.detach().clone();
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  const at::Tensor copy =
      at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage(), 0, {bytes}, {1}).clone();
  at::Tensor result = tensor.detach();
  result.unsafeGetTensorImpl()->set_storage_keep_dtype(copy.storage());
  return result;
}

bool is_small(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && tensor.storage().nbytes() <= 4096;
}

at::Tensor snapshot(const at::Tensor& tensor) {
  // The observers of regions around would take the memory for some that the function made or read.
  const at::DisableRecordFunctionGuard not_observed;
  return can_be_copy_on_write(tensor) && !is_small(tensor) ? copy_on_write_alias(tensor) : copy_with_storage(tensor);
}

KeptTensor::KeptTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  alias_ = copy_on_write_alias(tensor);
  shares_versions_ = !tensor.is_inference() && !alias_.is_inference() && !can_be_copy_on_write(tensor);
  if (shares_versions_) version_ = version_of(tensor);
}

at::Tensor KeptTensor::get(const std::string& what) const {
  if (shares_versions_ && version_of(alias_) != version_) {
    throw_error(ErrorKind::tensor_modified,
                what + " " + describe(alias_) + " was modified in place after forward: it is at version " +
                    std::to_string(version_of(alias_)) + ", but its replay needs version " + std::to_string(version_) +
                    ". Change a copy of it instead, or run backward first.");
  }
  return alias_;
}

}  // namespace regrad::detail
