#pragma once

#include <cstdint>
#include <memory>

#include "regrad/export.h"

namespace c10 {
class DebugInfoGuard;
}

namespace regrad {

/// Counts the bytes that Torch allocates, exactly, from its construction to its destruction.
///
///     regrad::MemoryMeter meter;
///     loss(model).backward();
///     std::cout << meter.peak_bytes() << " bytes at most\n";
///
/// What counts: memory from Torch's CPU allocator and from its caching device allocators, on all devices together, that
/// was allocated while the meter lived and has not been freed. Memory that is older than the meter never counts, nor
/// does its release. On a CUDA device the sizes are those that the caching allocator hands out, which are rounded up.
/// Memory that does not come from these allocators (`torch::from_blob`, a kernel's own `malloc`) is not seen.
///
/// Where: on the thread that made the meter, and on every thread while it works with that thread's state: autograd's,
/// and those of `at::launch`. Memory that is freed elsewhere is counted until Torch's allocator uses its address again.
///
/// Meters nest: an inner one passes on what it sees, so the outer one misses nothing.
///
/// Cost: about 60 ns for each allocation and for each release, and about 50 bytes for each block that is alive.
///
/// A meter must be destroyed on the thread that made it, and after each meter or Torch profiler that was started later.
/// A profiler that is started within the meter's life hides allocations from it.
///
/// All members but the constructor and the destructor may be called from any thread.
class REGRAD_EXPORT MemoryMeter {
 public:
  /// Starts counting. Throws Error with `meter_unavailable` where Torch's profiler, or another tool that is told of
  /// each allocation, is active on this thread: Torch has room for one.
  MemoryMeter();
  ~MemoryMeter();

  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Bytes allocated since construction and not freed yet.
  int64_t current_bytes() const;

  /// The largest value of current_bytes() since construction or the last reset_peak().
  int64_t peak_bytes() const;

  /// Makes the peak what current_bytes() is now.
  void reset_peak();

 private:
  class Counter;

  std::shared_ptr<Counter> counter_;
  std::unique_ptr<c10::DebugInfoGuard> installation_;
};

}  // namespace regrad
