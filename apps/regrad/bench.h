#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "regrad/memory.h"

namespace regrad::app {

struct BenchOptions {
  std::vector<std::string> workloads{"conv"};
  std::vector<int64_t> layers{16};
  std::vector<Memory> memory{Memory::reverse()};
  /// 0: the workload's default.
  int64_t batch = 0;
  int threads = 1;
  int64_t rounds = 7;
  bool json = false;
  /// Whether the C library keeps freed memory instead of giving it back to the system.
  bool keep_pages = false;
};

/// Measures a training step of every workload, depth and strategy against plain: the same modules, in a loop written
/// without regrad. Prints a table, or a JSON array, to stdout. Returns the program's exit code.
int bench(const BenchOptions& options);

}  // namespace regrad::app
