#pragma once

#include <string>

namespace regrad::testing {

/// Settings of the thread that a function may not leave changed: grad mode, inference mode, autocast, dispatch keys,
/// operator callbacks, debug info, anomaly mode, is_recomputing(). As text, to compare.
std::string thread_settings();

/// These, and the state of the random generator.
std::string surroundings();

}  // namespace regrad::testing
