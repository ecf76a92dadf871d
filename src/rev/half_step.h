#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// @throws Error (stream_mismatch) naming `function_name` when the sum of both would not have the stream's shape,
/// dtype and device.
void check_residual(const at::Tensor& stream, const at::Tensor& residual, const std::string& function_name);

/// Additive coupling: stream + residual, as plain adds them. Checked.
at::Tensor add_residual(const at::Tensor& stream, const at::Tensor& residual, const std::string& function_name);

/// The inverse, stream - residual; writes into the stream's memory where nobody else holds it. Without history.
at::Tensor subtract_residual(at::Tensor stream, const at::Tensor& residual);

}  // namespace regrad::detail
