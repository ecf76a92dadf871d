#include "regrad/memory_meter.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "regrad/error.h"

namespace regrad {

/// Receives Torch's reports. Graph tasks on other threads share it, so it may outlive its meter.
class MemoryMeter::Counter final : public c10::MemoryReportingInfoBase, public std::enable_shared_from_this<Counter> {
 public:
  explicit Counter(std::shared_ptr<Counter> outer) : outer_(std::move(outer)) {}

  void reportMemoryUsage(void* block, int64_t change, size_t total_allocated, size_t total_reserved,
                         c10::Device device) override {
    if (change > 0) {
      allocated(block, change);
    } else {
      freed(block);
    }
    if (outer_) {
      outer_->reportMemoryUsage(block, change, total_allocated, total_reserved, device);
    }
  }

  bool memoryProfilingEnabled() const override { return true; }

  int64_t current_bytes() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }

  int64_t peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = current_;
  }

 private:
  void allocated(void* block, int64_t size) {
    const std::lock_guard lock(mutex_);
    // A block that is alive already was freed where nobody reported it.
    int64_t& known_size = alive_[block];
    current_ += size - std::exchange(known_size, size);
    peak_ = std::max(peak_, current_);
  }

  // The size in the report is not used. For a block that was allocated before the meter it may be wrong: the CPU
  // allocator remembers sizes while somebody listens, but does not forget those of blocks that are freed while nobody
  // does.
  void freed(void* block) {
    const std::lock_guard lock(mutex_);
    const auto known = alive_.find(block);
    if (known != alive_.end()) {
      current_ -= known->second;
      alive_.erase(known);
    }
  }

  const std::shared_ptr<Counter> outer_;

  mutable std::mutex mutex_;
  std::unordered_map<void*, int64_t> alive_;  // bytes of each block
  int64_t current_ = 0;
  int64_t peak_ = 0;
};

MemoryMeter::MemoryMeter() {
  const auto slot = c10::DebugInfoKind::PROFILER_STATE;
  std::shared_ptr<Counter> outer;
  if (auto* holder = c10::ThreadLocalDebugInfo::get(slot)) {
    auto* counter = dynamic_cast<Counter*>(holder);
    if (counter == nullptr) {
      detail::throw_error(
          ErrorKind::meter_unavailable,
          "MemoryMeter: Torch reports allocations to one listener a thread, and on this thread another one listens, "
          "Torch's profiler for instance. A meter needs to be alone. Make it where the profiler is not running.");
    }
    outer = counter->shared_from_this();
  }
  counter_ = std::make_shared<Counter>(std::move(outer));
  installation_ = std::make_unique<c10::DebugInfoGuard>(slot, counter_);
}

MemoryMeter::~MemoryMeter() = default;

int64_t MemoryMeter::current_bytes() const { return counter_->current_bytes(); }

int64_t MemoryMeter::peak_bytes() const { return counter_->peak_bytes(); }

void MemoryMeter::reset_peak() { counter_->reset_peak(); }

}  // namespace regrad
