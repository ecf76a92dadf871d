#include "apps/regrad/step_measurement.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include <torch/utils.h>

#include "regrad/memory_meter.h"

namespace regrad::app {
namespace {

void zero_gradients(const Workload& workload) {
  const torch::NoGradGuard no_grad;
  for (torch::Tensor& leaf : workload.leaves()) leaf.mutable_grad().zero_();
}

void run_step(const Workload& workload, const Forward& forward) {
  const torch::Tensor loss = [&] {
    // The outputs go out of scope here: only the loss is held during backward.
    const auto [y1, y2] = forward(workload.x1, workload.x2);
    return (y1 * workload.w1).sum() + (y2 * workload.w2).sum();
  }();
  loss.backward();
}

Streams plain_layers(const Workload& workload, int64_t layers, torch::Tensor x1, torch::Tensor x2) {
  for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer) {
    x1 = x1 + workload.f[layer]->forward(x2);
    x2 = x2 + workload.g[layer]->forward(x1);
  }
  return {x1, x2};
}

}  // namespace

Forward plain_forward(const Workload& workload) {
  return [&workload](const torch::Tensor& x1, const torch::Tensor& x2) {
    return plain_layers(workload, workload.layers(), x1, x2);
  };
}

double time_step(const Workload& workload, const Forward& forward) {
  zero_gradients(workload);
  const auto start = std::chrono::steady_clock::now();
  run_step(workload, forward);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

StepMemory measure_memory(const Workload& workload, const Forward& forward) {
  zero_gradients(workload);
  StepMemory memory{};
  {
    const MemoryMeter meter;
    run_step(workload, forward);
    memory.peak_bytes = meter.peak_bytes();
  }
  for (const torch::Tensor& leaf : workload.leaves()) memory.gradients.push_back(leaf.grad().clone());
  return memory;
}

double max_relative_error(const std::vector<torch::Tensor>& found, const std::vector<torch::Tensor>& wanted) {
  double error = 0;
  double largest = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double difference = (found[i] - wanted[i]).abs().max().item<double>();
    if (!std::isfinite(difference)) return difference;
    error = std::max(error, difference);
    largest = std::max(largest, wanted[i].abs().max().item<double>());
  }
  return error / largest;
}

int64_t predict_plain_bytes(const Workload& workload) {
  const auto held_after = [&](int64_t layers) {
    const MemoryMeter meter;
    const Streams streams = plain_layers(workload, layers, workload.x1, workload.x2);
    return meter.current_bytes();
  };
  const int64_t one_layer = held_after(1);
  if (workload.layers() == 1) return one_layer;
  return one_layer + (workload.layers() - 1) * (held_after(2) - one_layer);
}

}  // namespace regrad::app
