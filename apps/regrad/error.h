#pragma once

#include <stdexcept>

namespace regrad::app {

/// Options that cannot be followed, found out only after they were parsed. The program ends with exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace regrad::app
