// RevBlock against the plain loop: values and gradients under every strategy.

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::Memory;
namespace nn = torch::nn;

namespace {

/// The same block written by hand.
Tensors plain_block(torch::Tensor x1, torch::Tensor x2, std::vector<nn::Sequential> f, std::vector<nn::Sequential> g) {
  for (size_t i = 0; i < f.size(); ++i) {
    x1 = x1 + f[i]->forward(x2);
    x2 = x2 + g[i]->forward(x1);
  }
  return {x1, x2};
}

struct Strategy {
  Memory memory;
  Tolerance tolerance;
};

const Strategy kStrategies[] = {{Memory::store(), {}},
                                {Memory::recompute(1), {}},
                                {Memory::recompute(3), {}},
                                {Memory::recompute(100), {}},
                                // Reconstruction error in double precision.
                                {Memory::reverse(), {1e-11}}};

TEST(RevBlock, LikePlainUnderEveryStrategy) {
  torch::manual_seed(1);
  std::vector<nn::Sequential> f, g;
  for (int i = 0; i < 8; ++i) {
    f.push_back(nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({16})), nn::Linear(16, 16), nn::GELU(),
                               nn::Dropout(0.2), nn::Linear(16, 16)));
    g.push_back(nn::Sequential(nn::Linear(16, 16), nn::Tanh(), nn::Linear(16, 16)));
  }
  regrad::RevBlock block(regrad::RevBlockOptions(8).f(f).g(g));
  block->to(torch::kDouble);
  const auto x1 = leaf({6, 16});
  const auto x2 = leaf({6, 16});
  Tensors leaves = block->parameters();
  leaves.push_back(x1);
  leaves.push_back(x2);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    block->set_memory(strategy.memory);
    const auto ours = [&](torch::Tensor a, torch::Tensor b) {
      const auto [y1, y2] = block->forward(a, b);
      return Tensors{y1, y2};
    };
    expect_like_plain(
        leaves, [&] { return plain_block(x1, x2, f, g); }, [&] { return ours(x1, x2); }, strategy.tolerance);
    expect_like_plain(
        leaves, [&] { return Tensors{plain_block(x1, x2, f, g)[0]}; }, [&] { return Tensors{ours(x1, x2)[0]}; },
        strategy.tolerance);
    expect_like_plain(
        leaves, [&] { return Tensors{plain_block(x1, x2, f, g)[1]}; }, [&] { return Tensors{ours(x1, x2)[1]}; },
        strategy.tolerance);
    expect_like_plain(
        leaves, [&] { return plain_block(x1, x1, f, g); }, [&] { return ours(x1, x1); },
        {std::max(1e-14, strategy.tolerance.relative)});
    const auto c1 = x1.detach(), c2 = x2.detach();
    expect_like_plain(
        leaves, [&] { return plain_block(c1, c2, f, g); }, [&] { return ours(c1, c2); }, strategy.tolerance);
  }
}

TEST(RevBlock, SecondOrder) {
  torch::manual_seed(1);
  std::vector<nn::Sequential> f, g;
  for (int i = 0; i < 3; ++i) {
    f.push_back(nn::Sequential(nn::Linear(4, 4), nn::Tanh()));
    g.push_back(nn::Sequential(nn::Linear(4, 4), nn::Sigmoid()));
  }
  regrad::RevBlock block(regrad::RevBlockOptions(3).f(f).g(g));
  block->to(torch::kDouble);
  const auto x = leaf({5, 4});
  Tensors leaves = block->parameters();
  leaves.push_back(x);
  const auto penalty = [&](auto run) {
    return [&, run] {
      const Tensors y = run(x, x * 0.5);
      const auto g1 = torch::autograd::grad({(y[0] * y[1]).sum() + y[0].pow(2).sum()}, leaves, {}, true, true);
      torch::Tensor sum = y[0].sum();
      for (const auto& t : g1) sum = sum + t.pow(2).sum();
      return Tensors{sum};
    };
  };
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    block->set_memory(strategy.memory);
    expect_like_plain(leaves, penalty([&](auto a, auto b) { return plain_block(a, b, f, g); }),
                      penalty([&](auto a, auto b) {
                        const auto [y1, y2] = block->forward(a, b);
                        return Tensors{y1, y2};
                      }),
                      {1e-11});
  }
}

TEST(RevBlock, MemoryIsFlatInDepth) {
  const auto peak = [](int64_t layers) {
    regrad::RevBlock block(regrad::RevBlockOptions(layers)
                               .f([](int64_t) { return nn::Sequential(nn::Linear(64, 64), nn::Tanh()); })
                               .g([](int64_t) { return nn::Sequential(nn::Linear(64, 64), nn::Tanh()); }));
    for (auto& parameter : block->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    const auto x1 = torch::randn({256, 64}).requires_grad_(), x2 = torch::randn({256, 64}).requires_grad_();
    x1.mutable_grad() = torch::zeros_like(x1);
    x2.mutable_grad() = torch::zeros_like(x2);
    const regrad::MemoryMeter meter;
    torch::Tensor loss;
    {
      const auto [y1, y2] = block->forward(x1, x2);
      loss = y1.sum() + y2.sum();
    }
    loss.backward();
    return meter.peak_bytes();
  };
  const int64_t a = 2 * 256 * 64 * 4;
  EXPECT_EQ(peak(8), peak(64));
  EXPECT_LE(peak(8), 5 * a);
}

}  // namespace
