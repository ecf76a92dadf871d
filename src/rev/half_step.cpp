#include "rev/half_step.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "core/describe.h"
#include "regrad/error.h"

namespace regrad::detail {

void check_residual(const at::Tensor& stream, const at::Tensor& residual, const std::string& function_name) {
  const bool fits = residual.defined() && residual.sizes() == stream.sizes() && residual.device() == stream.device() &&
                    c10::promoteTypes(stream.scalar_type(), residual.scalar_type()) == stream.scalar_type();
  if (fits) return;
  throw_error(ErrorKind::stream_mismatch, function_name + " returned " + describe(residual) +
                                              ", but the stream that it is added to is " + describe(stream) +
                                              ". It must return the shape, dtype and device of that stream.");
}

at::Tensor add_residual(const at::Tensor& stream, const at::Tensor& residual, const std::string& function_name) {
  check_residual(stream, residual, function_name);
  return stream + residual;
}

at::Tensor subtract_residual(at::Tensor stream, const at::Tensor& residual) {
  const c10::NoGradGuard no_grad;
  const bool sole_owner = stream.has_storage() && stream.use_count() == 1 && stream.storage().use_count() == 1;
  return sole_owner ? stream.sub_(residual) : stream - residual;
}

}  // namespace regrad::detail
