#pragma once

#include <cstdint>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "models/revnet.h"
#include "regrad/memory.h"
#include "regrad/memory_meter.h"

namespace regrad::app {

/// What one training step did and took.
struct StepFigures {
  double loss;
  /// Of the step's batch, between 0 and 1.
  double accuracy;
  /// Forward, backward and the update of the weights.
  double seconds;
  /// The most that was allocated at once, above what was allocated when the step began.
  int64_t peak_bytes;
};

/// RevNet-38 for Fashion-MNIST and its optimizer: SGD with momentum 0.9 and weight decay 2e-4 on weights only.
/// Meters its thread's memory as long as it lives, so it must go before any that was made earlier.
class Trainer {
 public:
  /// Draws the weights from Torch's global generator.
  explicit Trainer(const Memory& memory);

  /// One step. images: (batch, 1, height, width), float; labels: (batch), int64.
  StepFigures step(const torch::Tensor& images, const torch::Tensor& labels, double learning_rate);

  /// How many of the images the network classifies rightly, in eval mode. Changes nothing.
  int64_t count_correct(const torch::Tensor& images, const torch::Tensor& labels);

  const models::RevNet& net() const { return net_; }
  const torch::optim::SGD& optimizer() const { return optimizer_; }

 private:
  /// The first member: Torch warns when memory from before the meter is freed under it.
  MemoryMeter meter_;
  models::RevNet net_;
  torch::optim::SGD optimizer_;
};

/// The learning rate of step `step` (from 0) of `steps`: rises linearly over the first tenth, then falls to zero along
/// half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983).
double scheduled_rate(int64_t step, int64_t steps, double base_rate);

}  // namespace regrad::app
