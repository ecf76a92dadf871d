#include <cstdio>

#include <regrad/regrad.h>
#include <torch/torch.h>

int main() {
  torch::manual_seed(0);
  const auto branch = [](int64_t /*layer*/) {  // each layer gets its own weights
    return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})), torch::nn::Linear(64, 64),
                                 torch::nn::Tanh());
  };
  // 32 layers of y1 = x1 + f(x2), y2 = x2 + g(y1).
  regrad::RevBlock block(regrad::RevBlockOptions(/*num_layers=*/32).f(branch).g(branch));
  const auto x1 = torch::randn({1024, 64}), x2 = torch::randn({1024, 64});

  int64_t peak[2] = {};
  for (const bool reverse : {false, true}) {
    block->zero_grad();
    block->set_memory(reverse ? regrad::Memory::reverse() : regrad::Memory::store());
    const regrad::MemoryMeter meter;
    const auto [y1, y2] = block->forward(x1, x2);
    (y1 * y2).mean().backward();
    peak[reverse] = meter.peak_bytes();
    std::printf("%-7s  gradient %.5f  peak %.1f MB\n", block->memory().to_string().c_str(),
                block->parameters()[2].grad().norm().item<double>(), static_cast<double>(peak[reverse]) / 1e6);
  }
  return peak[1] < peak[0] / 5 ? 0 : 1;
}
