#include "support/surroundings.h"

#include <sstream>

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/torch.h>

#include "regrad/pass.h"

namespace regrad::testing {

std::string thread_settings() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  std::ostringstream text;
  text << "grad mode " << torch::GradMode::is_enabled() << ", inference mode " << c10::InferenceMode::is_enabled()
       << ", autocast " << at::autocast::is_autocast_enabled(at::kCPU) << at::autocast::is_autocast_cache_enabled()
       << ' ' << at::autocast::get_autocast_dtype(at::kCPU) << ", dispatch keys " << keys.included_.raw_repr() << ' '
       << keys.excluded_.raw_repr() << ", callbacks " << at::hasThreadLocalCallbacks() << ", debug info "
       << c10::ThreadLocalDebugInfo::current().get() << ", anomaly mode " << torch::autograd::AnomalyMode::is_enabled()
       << ", recomputing " << is_recomputing();
  return text.str();
}

std::string surroundings() {
  const auto random = at::globalContext().defaultGenerator(at::kCPU).get_state().sum().item<int64_t>();
  return "random " + std::to_string(random) + ", " + thread_settings();
}

}  // namespace regrad::testing
