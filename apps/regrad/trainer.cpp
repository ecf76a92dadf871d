#include "apps/regrad/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include "models/data/fashion_mnist.h"
#include "models/parameter_groups.h"

namespace regrad::app {
namespace {

constexpr double momentum = 0.9;
constexpr double weight_decay = 2e-4;

/// (batch, classes) scores and (batch) labels -> a number.
int64_t correct(const torch::Tensor& scores, const torch::Tensor& labels) {
  return scores.argmax(1).eq(labels).sum().item<int64_t>();
}

}  // namespace

Trainer::Trainer(const Memory& memory)
    : net_(models::RevNetOptions(/*in_channels=*/1, models::fashion_mnist_classes).memory(memory)),
      optimizer_(models::decay_weights_only(
                     *net_, torch::optim::SGDOptions(/*lr=*/0).momentum(momentum).weight_decay(weight_decay)),
                 torch::optim::SGDOptions(/*lr=*/0)) {}

StepFigures Trainer::step(const torch::Tensor& images, const torch::Tensor& labels, double learning_rate) {
  net_->train();
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(learning_rate);
  // The gradients stay allocated, so that from the second step on they do not count as the step's memory.
  optimizer_.zero_grad(/*set_to_none=*/false);

  meter_.reset_peak();
  const int64_t bytes_before = meter_.current_bytes();
  const auto start = std::chrono::steady_clock::now();
  torch::Tensor scores = net_->forward(images);
  torch::Tensor loss = torch::nn::functional::cross_entropy(scores, labels);
  scores = scores.detach();
  loss.backward();
  optimizer_.step();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;

  return {.loss = loss.item<double>(),
          .accuracy = static_cast<double>(correct(scores, labels)) / static_cast<double>(labels.size(0)),
          .seconds = elapsed.count(),
          .peak_bytes = meter_.peak_bytes() - bytes_before};
}

int64_t Trainer::count_correct(const torch::Tensor& images, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  net_->eval();
  return correct(net_->forward(images), labels);
}

double scheduled_rate(int64_t step, int64_t steps, double base_rate) {
  const int64_t warm_up = steps / 10;
  if (step < warm_up) return base_rate * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  const double progress =
      static_cast<double>(step - warm_up) / static_cast<double>(std::max<int64_t>(steps - warm_up, 1));
  return base_rate * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace regrad::app
