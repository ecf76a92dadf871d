#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>

#include <torch/types.h>

namespace regrad::models {

/// What is wrong with a data file, for programs that must tell errors apart.
enum class DataErrorKind {
  /// The file is not there or cannot be opened.
  missing,
  /// Reading failed, or the compressed data are damaged.
  unreadable,
  /// The first bytes are not those of the wanted kind of file.
  wrong_magic,
  /// The file ends before what its header announces.
  truncated,
  /// The file goes on after what its header announces.
  trailing_bytes,
  /// Sizes or values do not fit their use or another file.
  mismatch,
};

/// Names the file, what was found and what was needed.
class DataError : public std::runtime_error {
 public:
  DataError(DataErrorKind kind, const std::filesystem::path& file, const std::string& problem);

  DataErrorKind kind() const noexcept { return kind_; }

 private:
  DataErrorKind kind_;
};

/// Reads an IDX file of unsigned bytes with `axes` axes, gzip-compressed or not (the format of MNIST: two zero bytes,
/// the type 8, the number of axes, each size as a big-endian 32-bit number, then the bytes, last axis fastest).
/// Returns a uint8 tensor of these sizes. Memory stays proportional to the bytes that the file really has.
/// @throws DataError, of every kind but mismatch.
torch::Tensor read_idx(const std::filesystem::path& file, int64_t axes);

}  // namespace regrad::models
