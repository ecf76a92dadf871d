#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace regrad::detail {

/// Which tensors a second run has given other memory for a while. Only second runs that are nested in each other, also
/// on other threads of Torch's engine, may do so with one tensor at a time: each puts back what it found.
class ExchangeClaims {
 public:
  ExchangeClaims() = default;
  ~ExchangeClaims();
  ExchangeClaims(const ExchangeClaims&) = delete;
  ExchangeClaims& operator=(const ExchangeClaims&) = delete;

  /// Claims the memory of `tensor` until this is destroyed. Does not wait.
  /// @throws Error (unsupported) when a second run that this one is not nested in has claimed it.
  void add(const at::Tensor& tensor, const std::string& function_name);

  /// @throws Error (unsupported) when a second run that the caller is not nested in has claimed the tensor's memory.
  static void check_free(const at::Tensor& tensor, const std::string& function_name);

 private:
  /// Marks what starts on this thread as nested, from the first claim on.
  std::optional<c10::DebugInfoGuard> nested_;
  std::vector<const void*> claimed_;
};

}  // namespace regrad::detail
