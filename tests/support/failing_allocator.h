#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include <c10/core/Allocator.h>

namespace regrad::testing {

/// Torch's CPU allocator, which counts the bytes that it holds and fails on demand.
///
/// It takes the place of the process's allocator for good: tensors keep a pointer to the allocator that made them.
class FailingAllocator final : public c10::Allocator {
 public:
  enum class Failure { torch_error, bad_alloc };
  enum class Duration {
    /// One allocation fails.
    once,
    /// All fail from then on: what cleans up finds no memory either.
    until_disarmed,
  };

  /// Installs it at the first call.
  static FailingAllocator& instance();

  /// Lets the `number`-th allocation from now fail, counted from 1.
  void arm(int64_t number, Failure failure, Duration duration);

  /// No allocation fails any more. Returns whether one did.
  bool disarm();

  /// Bytes of all blocks that this allocator made and that are alive.
  int64_t held_bytes() const;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

 private:
  FailingAllocator();
  static void release(void* block);
  void count_allocation();

  c10::Allocator* const real_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
  int64_t held_bytes_ = 0;
  /// Allocations until the failure; 0 while disarmed.
  int64_t remaining_ = 0;
  bool failed_ = false;
  Failure failure_ = Failure::bad_alloc;
  Duration duration_ = Duration::once;
};

}  // namespace regrad::testing
