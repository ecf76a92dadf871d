// Three ways to recompute the activations of modules that exist already: a wrapper in a Sequential, a wrapped call, and
// a Sequential cut into segments. Each gives the gradients of the plain network, bit for bit, and keeps less memory.

#include <cstdio>
#include <functional>
#include <vector>

#include <regrad/regrad.h>
#include <torch/torch.h>

namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 128;

/// The existing module. It knows nothing of regrad.
struct StageImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(dropout(second(torch::relu(first(x))))); }

  nn::Linear first = register_module("first", nn::Linear(kWidth, kWidth));
  nn::Linear second = register_module("second", nn::Linear(kWidth, kWidth));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.1));
};
TORCH_MODULE(Stage);

struct Step {
  int64_t kept_bytes;  // between forward and backward
  std::vector<torch::Tensor> gradients;
};

/// One training step on x: [1024, kWidth].
Step run(const nn::Module& network, const std::function<torch::Tensor(torch::Tensor)>& forward) {
  torch::manual_seed(1);  // the same dropout masks each time
  const auto x = torch::randn({1024, kWidth});
  for (auto& parameter : network.parameters()) parameter.mutable_grad() = torch::Tensor();

  Step step;
  const regrad::MemoryMeter meter;
  const auto loss = forward(x).square().sum();
  step.kept_bytes = meter.current_bytes();
  loss.backward();
  for (const auto& parameter : network.parameters()) step.gradients.push_back(parameter.grad());
  return step;
}

/// Prints a step beside the plain one, and returns whether it keeps what the first lines of this file say.
bool report(const char* name, const Step& plain, const Step& step) {
  bool equal = true;
  for (size_t i = 0; i < plain.gradients.size(); ++i) equal &= plain.gradients[i].equal(step.gradients[i]);
  std::printf("%-22s %5.2f MB kept, gradients %s\n", name, static_cast<double>(step.kept_bytes) / 1e6,
              equal ? "bit-identical" : "DIFFER");
  return equal && step.kept_bytes < plain.kept_bytes;
}

}  // namespace

int main() {
  std::vector<Stage> stages;
  nn::Sequential network;
  nn::Sequential wrapped;  // the same stages, each in a Recompute
  for (int i = 0; i < 8; ++i) {
    stages.push_back(Stage());
    network->push_back(stages.back());
    wrapped->push_back(regrad::Recompute(stages.back()));
  }
  const Step plain = run(*network, [&](torch::Tensor x) { return network->forward(x); });
  std::printf("%-22s %5.2f MB kept\n", "plain", static_cast<double>(plain.kept_bytes) / 1e6);

  // 1. A module around a module. Names of parameters gain "inner": 0.inner.first.weight.
  bool ok = report("Recompute", plain, run(*wrapped, [&](torch::Tensor x) { return wrapped->forward(x); }));

  // 2. A call through a function. Names stay, and the module can be called plainly elsewhere.
  ok &= report("recompute_grad", plain, run(*network, [&](torch::Tensor x) {
                 for (const Stage& stage : stages) x = regrad::recompute_grad(stage)(x);
                 return x;
               }));

  // 3. A Sequential in segments: four of two stages, the last of which is stored.
  ok &=
      report("checkpoint_sequential", plain,
             run(*network, [&](torch::Tensor x) { return regrad::checkpoint_sequential(network, /*segments=*/4, x); }));
  return ok ? 0 : 1;
}
