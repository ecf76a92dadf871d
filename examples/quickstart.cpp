#include <cmath>
#include <cstdio>
#include <utility>

#include <regrad/regrad.h>
#include <torch/torch.h>

// Makes the f or g of one layer: each layer gets its own weights.
torch::nn::Sequential make_branch(int64_t /*layer*/) {
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})), torch::nn::Linear(64, 64),
                               torch::nn::Tanh());
}

// Trains 32 layers of y1 = x1 + f(x2), y2 = x2 + g(y1), and returns the last loss and the peak memory in bytes.
std::pair<double, int64_t> train(regrad::Memory memory) {
  torch::manual_seed(0);
  regrad::RevBlock block(regrad::RevBlockOptions(/*num_layers=*/32).f(make_branch).g(make_branch).memory(memory));
  torch::optim::SGD optimizer(block->parameters(), /*lr=*/0.5);
  const auto x1 = torch::randn({1024, 64}), x2 = torch::randn({1024, 64}), target = torch::sin(x1 + x2);

  regrad::MemoryMeter meter;
  double loss_value = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    const auto [y1, y2] = block->forward(x1, x2);
    const auto loss = torch::mse_loss(y1, target);
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
  }
  std::printf("%-7s  loss %.3f  peak %.1f MB\n", memory.to_string().c_str(), loss_value,
              static_cast<double>(meter.peak_bytes()) / 1e6);
  return {loss_value, meter.peak_bytes()};
}

int main() {
  const auto [store_loss, store_peak] = train(regrad::Memory::store());
  const auto [reverse_loss, reverse_peak] = train(regrad::Memory::reverse());
  return std::abs(store_loss - reverse_loss) < 1e-3 && reverse_peak < store_peak / 5 ? 0 : 1;
}
