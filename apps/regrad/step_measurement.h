#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include <torch/types.h>

#include "apps/regrad/workloads.h"

namespace regrad::app {

using Streams = std::tuple<torch::Tensor, torch::Tensor>;

/// From the workload's streams to the outputs of its last layer.
using Forward = std::function<Streams(const torch::Tensor& x1, const torch::Tensor& x2)>;

/// The workload as one writes it without regrad.
Forward plain_forward(const Workload& workload);

/// Seconds that forward, loss and backward take; the gradients of all leaves are zero before.
double time_step(const Workload& workload, const Forward& forward);

struct StepMemory {
  /// The most that was allocated at once, above what was allocated at the start of the step.
  int64_t peak_bytes;
  /// Of workload.leaves(), in their order.
  std::vector<torch::Tensor> gradients;
};

/// One step as in time_step, for its memory and its gradients.
StepMemory measure_memory(const Workload& workload, const Forward& forward);

/// The largest absolute error of any gradient divided by the largest absolute value of all of `wanted`.
double max_relative_error(const std::vector<torch::Tensor>& found, const std::vector<torch::Tensor>& wanted);

/// Bytes that the step of plain will take at least: what two layers' forward leaves behind, carried on to all layers.
int64_t predict_plain_bytes(const Workload& workload);

}  // namespace regrad::app
