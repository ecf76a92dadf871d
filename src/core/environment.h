#pragma once

#include <memory>

#include <ATen/ThreadLocalState.h>

namespace regrad::detail {

/// The thread-local settings of Torch under which a function ran: autocast, grad mode, inference mode, dispatch keys.
/// Debug info (profilers, memory meters) and op callbacks are not part of it: a replay reports to whoever
/// listens when it runs, and nothing of the first run's listeners is kept alive.
class Environment {
 public:
  static std::shared_ptr<const Environment> capture();

 private:
  friend class EnvironmentScope;
  explicit Environment(at::ThreadLocalState state) : state_(std::move(state)) {}

  at::ThreadLocalState state_;
};

/// Restores an environment for a replay, with grad mode on, and marks the thread as recomputing.
///
/// Autocast's weight cache is off within: the casts of a replay have redirected edges, and later code would find
/// them in the process-wide cache.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const Environment& environment);
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  at::ThreadLocalState outer_state_;
  bool outer_autocast_cache_;
  bool outer_recomputing_;
};

}  // namespace regrad::detail
