#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "regrad/memory.h"

namespace regrad::app {

struct TrainOptions {
  Memory memory = Memory::reverse();
  int64_t batch = 50;
  /// Unless `epochs` is given.
  int64_t steps = 400;
  std::optional<int64_t> epochs;
  /// The highest of the schedule.
  double learning_rate = 0.1;
  uint64_t seed = 1;
  int threads;
  std::filesystem::path data = "/usr/share/datasets/fashion-mnist";
  std::filesystem::path output = "runs/fashion-mnist";
};

/// Trains RevNet-38 on Fashion-MNIST. Writes `log.jsonl` and `checkpoint.pt` into the output folder, progress to stderr
/// and the results to stdout. Returns the program's exit code.
/// @throws UsageError when the batch is larger than the set; models::DataError; std::filesystem::filesystem_error.
int train(const TrainOptions& options);

}  // namespace regrad::app
