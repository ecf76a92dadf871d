#include "core/fingerprint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <c10/core/GradMode.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace regrad::detail {

namespace {

bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() && tensor.has_storage() &&
         !tensor.is_quantized() && tensor.numel() > 0;
}

/// The `bytes` bytes at `data` as a number. The views of half-precision tensors may start within a word.
uint32_t load_word(const char* data, size_t bytes = sizeof(uint32_t)) {
  uint32_t word = 0;
  std::memcpy(&word, data, bytes);
  return word;
}

/// Multiplying each word by an odd number that depends on its place makes the sum see permutations too.
uint64_t hash_memory(const char* data, size_t bytes) {
  constexpr size_t width = sizeof(uint32_t);
  const size_t words = bytes / width;
  uint64_t sum = load_word(data + words * width, bytes % width);
  for (size_t i = 0; i < words; ++i) {
    const uint32_t weight = static_cast<uint32_t>(i) * 2654435761U | 1U;
    sum += static_cast<uint64_t>(load_word(data + i * width)) * weight;
  }
  return sum;
}

uint64_t hash_values(const at::Tensor& tensor) {
  if (!has_plain_memory(tensor)) return 0;
  const c10::NoGradGuard no_grad;
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.detach().contiguous();
  return hash_memory(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

constexpr int64_t kSampleSize = 32;

/// Where the element lies that has this number in logical order.
int64_t offset_of(int64_t number, const at::Tensor& tensor) {
  int64_t offset = 0;
  for (int64_t dim = tensor.dim(); dim-- > 0;) {
    offset += number % tensor.size(dim) * tensor.stride(dim);
    number /= tensor.size(dim);
  }
  return offset;
}

/// Calls `visit` with the offsets of up to kSampleSize elements.
template <class Visit>
void for_sample(const at::Tensor& tensor, Visit visit) {
  const int64_t count = tensor.numel();
  for (int64_t i = 0; i < std::min(kSampleSize, count); ++i) {
    // Scattered by the golden ratio: equal distances could all fall on one column, and that be padding.
    const uint64_t scattered = static_cast<uint64_t>(i + 1) * 0x9E3779B97F4A7C15U >> 32;
    visit(offset_of(count <= kSampleSize ? i : static_cast<int64_t>(scattered) % count, tensor));
  }
}

template <class T>
std::vector<float> take_sample(const at::Tensor& tensor) {
  const T* data = static_cast<const T*>(tensor.const_data_ptr());
  std::vector<float> values;
  values.reserve(static_cast<size_t>(std::min(kSampleSize, tensor.numel())));
  for_sample(tensor, [&](int64_t offset) { values.push_back(static_cast<float>(data[offset])); });
  return values;
}

}  // namespace

std::vector<uint64_t> fingerprint(const Tensors& outputs) {
  std::vector<uint64_t> result;
  result.reserve(outputs.size());
  for (const at::Tensor& output : outputs) result.push_back(hash_values(output));
  return result;
}

uint64_t sampled_bits(const at::Tensor& tensor) {
  if (!has_plain_memory(tensor)) return 0;
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  const size_t width = tensor.itemsize();
  uint64_t bits = 0;
  for_sample(tensor, [&](int64_t offset) {
    bits = bits * 0x9E3779B97F4A7C15U + hash_memory(data + static_cast<size_t>(offset) * width, width);
  });
  return bits;
}

Sample::Sample(const at::Tensor& output) {
  if (!has_plain_memory(output)) return;
  switch (output.scalar_type()) {
    case at::kDouble:
      values_ = take_sample<double>(output);
      break;
    case at::kFloat:
      values_ = take_sample<float>(output);
      break;
    case at::kHalf:
      values_ = take_sample<c10::Half>(output);
      break;
    case at::kBFloat16:
      values_ = take_sample<c10::BFloat16>(output);
      break;
    default:
      break;
  }
}

double Sample::norm() const {
  double sum = 0;
  for (const double value : values_) {
    if (std::isfinite(value)) sum += value * value;
  }
  return std::sqrt(sum);
}

double Sample::distance(const Sample& other) const {
  double sum = 0;
  for (size_t i = 0; i < std::min(values_.size(), other.values_.size()); ++i) {
    const double a = values_[i];
    const double b = other.values_[i];
    if (std::isfinite(a) != std::isfinite(b)) return std::numeric_limits<double>::infinity();
    if (std::isfinite(a)) sum += (a - b) * (a - b);
  }
  return std::sqrt(sum);
}

}  // namespace regrad::detail
