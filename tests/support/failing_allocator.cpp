#include "support/failing_allocator.h"

#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace regrad::testing {

FailingAllocator& FailingAllocator::instance() {
  // Never destroyed: tensors may outlive static objects.
  static auto* allocator = [] {
    auto* made = new FailingAllocator();
    c10::SetCPUAllocator(made, /*priority=*/100);
    return made;
  }();
  return *allocator;
}

FailingAllocator::FailingAllocator() : real_(c10::GetCPUAllocator()) {}

void FailingAllocator::arm(int64_t number, Failure failure, Duration duration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  remaining_ = number;
  failed_ = false;
  failure_ = failure;
  duration_ = duration;
}

bool FailingAllocator::disarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  remaining_ = 0;
  return failed_;
}

int64_t FailingAllocator::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

void FailingAllocator::count_allocation() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (remaining_ == 0) return;
  if (--remaining_ > 0) return;
  failed_ = true;
  if (duration_ == Duration::until_disarmed) remaining_ = 1;
  if (failure_ == Failure::bad_alloc) throw std::bad_alloc();
  TORCH_CHECK(false, "injected failure of an allocation");
}

c10::DataPtr FailingAllocator::allocate(size_t bytes) {
  if (bytes > 0) count_allocation();
  c10::DataPtr made = real_->allocate(bytes);
  // Pointer and context stay equal: Torch shares no other memory copy-on-write.
  void* block = made.release_context();
  if (block != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = static_cast<int64_t>(bytes);
    held_bytes_ += static_cast<int64_t>(bytes);
  }
  return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
}

void FailingAllocator::release(void* block) {
  if (block == nullptr) return;
  FailingAllocator& self = instance();
  {
    const std::lock_guard<std::mutex> lock(self.mutex_);
    const auto found = self.sizes_.find(block);
    self.held_bytes_ -= found->second;
    self.sizes_.erase(found);
  }
  self.real_->raw_deallocate(block);
}

c10::DeleterFnPtr FailingAllocator::raw_deleter() const { return &release; }

void FailingAllocator::copy_data(void* to, const void* from, size_t bytes) const { default_copy_data(to, from, bytes); }

}  // namespace regrad::testing
