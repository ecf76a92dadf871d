#pragma once

#include <string>

namespace regrad::testing {

/// What a thread and the process have that a function may not leave changed: generator, grad mode, inference mode,
/// autocast, dispatch keys, operator callbacks, debug info, anomaly mode, is_recomputing(). As text, to compare.
std::string surroundings();

}  // namespace regrad::testing
