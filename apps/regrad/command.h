#pragma once

#include <functional>

namespace regrad::app {

/// What the program's arguments ask for; returns the exit code.
using Command = std::function<int()>;

}  // namespace regrad::app
