#include "core/environment.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "regrad/pass.h"

namespace regrad {

namespace {
thread_local bool recomputing = false;
}

bool is_recomputing() noexcept { return recomputing; }

namespace detail {

using c10::ThreadLocalDebugInfo;

std::shared_ptr<const Environment> Environment::capture() {
  auto debug_info = ThreadLocalDebugInfo::current();
  if (debug_info != nullptr) ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  at::ThreadLocalState state;
  if (debug_info != nullptr) ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(debug_info));
  return std::shared_ptr<const Environment>(new Environment(std::move(state)));
}

EnvironmentScope::EnvironmentScope(const Environment& environment)
    : outer_autocast_cache_(at::autocast::is_autocast_cache_enabled()), outer_recomputing_(recomputing) {
  auto debug_info = ThreadLocalDebugInfo::current();
  const at::RecordFunctionTLS op_callbacks = at::get_record_function_tls_();
  at::ThreadLocalState::setThreadLocalState(environment.state_);
  ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(debug_info));
  at::set_record_function_tls_(op_callbacks);
  c10::GradMode::set_enabled(true);
  at::autocast::set_autocast_cache_enabled(false);
  recomputing = true;
}

EnvironmentScope::~EnvironmentScope() {
  recomputing = outer_recomputing_;
  at::autocast::set_autocast_cache_enabled(outer_autocast_cache_);
  at::ThreadLocalState::setThreadLocalState(outer_state_);
}

}  // namespace detail
}  // namespace regrad
