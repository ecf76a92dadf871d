#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

namespace regrad::detail {

/// Objects that live as long as one backward pass (a graph task of the engine), each under a key: the address of what
/// they belong to. All are released when the pass ends, also by an exception.
class TaskStore {
 public:
  /// The store of the pass that runs on this thread, made at its first use; null outside of any pass.
  static std::shared_ptr<TaskStore> current();

  /// The same if it was made already; null otherwise.
  static std::shared_ptr<TaskStore> find_current();

  /// The object under `key`, made when there is none. Always of one type for one key.
  template <class T>
  std::shared_ptr<T> get(const void* key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<void>& slot = objects_[key];
    if (slot == nullptr) slot = std::make_shared<T>();
    return std::static_pointer_cast<T>(slot);
  }

  /// Takes the object under `key` out, null where there is none.
  std::shared_ptr<void> take(const void* key);

  /// For the pass itself.
  void clear();

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<void>> objects_;
};

}  // namespace regrad::detail
