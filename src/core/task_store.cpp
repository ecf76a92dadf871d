#include "core/task_store.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace regrad::detail {

namespace {

/// Finds the store of a pass from whichever thread works for it. Holds it weakly.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int, std::weak_ptr<TaskStore>> stores;
};

/// Never destroyed: passes may end after static destructors have begun.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

}  // namespace

std::shared_ptr<TaskStore> TaskStore::find_current() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().stores.find(torch::autograd::get_current_graph_task_id());
  return found == registry().stores.end() ? nullptr : found->second.lock();
}

std::shared_ptr<TaskStore> TaskStore::current() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) return nullptr;
  std::shared_ptr<TaskStore> store;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    std::weak_ptr<TaskStore>& known = registry().stores[task];
    store = known.lock();
    if (store != nullptr) return store;
    store = std::shared_ptr<TaskStore>(new TaskStore(), [task](TaskStore* released) {
      {
        const std::lock_guard<std::mutex> guard(registry().mutex);
        registry().stores.erase(task);
      }
      delete released;
    });
    known = store;
  }
  // The pass owns its callbacks: when it dies by an exception they are not run, but destroyed.
  torch::autograd::Engine::get_default_engine().queue_callback([store] { store->clear(); });
  return store;
}

std::shared_ptr<void> TaskStore::take(const void* key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = objects_.find(key);
  if (found == objects_.end()) return nullptr;
  std::shared_ptr<void> object = std::move(found->second);
  objects_.erase(found);
  return object;
}

void TaskStore::clear() {
  std::unordered_map<const void*, std::shared_ptr<void>> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  dropped = std::exchange(objects_, {});
}

}  // namespace regrad::detail
