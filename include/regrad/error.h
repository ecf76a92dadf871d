#pragma once

#include <string>

#include <c10/util/Exception.h>

#include "regrad/export.h"

namespace regrad {

/// What went wrong, for programs that must tell errors apart.
enum class ErrorKind {
  /// An argument is out of range or does not fit the others (counts, lengths, side inputs).
  invalid_argument,
  /// A function of a reversible layer returned another shape, dtype or device than its stream has.
  stream_mismatch,
  /// A function wrote into its own input.
  input_modified,
  /// A tensor that the function reads was written in place between forward and backward.
  tensor_modified,
  /// The replay depends on other parameters or captured tensors than the first run.
  variables_differ,
  /// The replay computed something else than the first run.
  replay_differs,
  /// The contract cannot be kept for this kind of tensor or function.
  unsupported,
  /// A module or callable cannot be copied.
  not_cloneable,
  /// Torch's profiler, or something else, holds the slot that a MemoryMeter needs.
  meter_unavailable,
};

/// Every error that regrad raises itself. Exceptions of the user's own functions pass through with their own type.
class REGRAD_EXPORT Error : public c10::Error {
 public:
  Error(ErrorKind kind, const std::string& message);

  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

namespace detail {

/// Throws regrad::Error. `message` says what was found, what was needed and what to do.
[[noreturn]] REGRAD_EXPORT void throw_error(ErrorKind kind, const std::string& message);

}  // namespace detail
}  // namespace regrad
