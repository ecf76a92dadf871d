// Contract clause 8: what is held, for how long, and that depth costs no stack.

#include <sys/resource.h>

#include <thread>

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;

namespace {

const Memory kStrategies[] = {Memory::store(), Memory::recompute(2), Memory::reverse()};

struct Token {};

TEST(Lifetime, C21_ClosuresAreReleasedByBackwardAndByDroppingTheOutput) {
  const auto x = leaf({4}, torch::kFloat);
  for (const bool run_backward : {true, false}) {
    auto token = std::make_shared<Token>();
    const std::weak_ptr<Token> alive = token;
    torch::Tensor loss;
    {
      const auto f = [held = std::move(token)](torch::Tensor t) { return t.sin(); };
      const auto [y1, y2] = regrad::rev_block(x, x * 2, f, f, 3);
      loss = (y1 + y2 + recompute_grad(f)(x)).sum();
    }
    EXPECT_FALSE(alive.expired());
    if (run_backward) {
      loss.backward();  // the output is still held
    } else {
      loss = torch::Tensor();
    }
    EXPECT_TRUE(alive.expired());
  }
}

TEST(Lifetime, C21_TwoHeadsLossOnOneInALoop) {
  const auto x = leaf({64}, torch::kFloat);
  const auto f = [](torch::Tensor t) { return t.sin(); };
  regrad::RevBlock block(regrad::RevBlockOptions(4).f(f).g(f));
  x.mutable_grad() = torch::zeros_like(x);
  const regrad::MemoryMeter meter;
  int64_t after_first = -1;
  for (int step = 0; step < 20; ++step) {
    const auto [y1, y2] = block->forward(x, x * 1);
    const auto unused = recompute_grad(f)(y2);
    y1.sum().backward();
    if (step == 0) after_first = meter.current_bytes();
    EXPECT_EQ(meter.current_bytes(), after_first);
  }
}

TEST(Lifetime, C20_PeakIsFlatInDepthAndNeverAbovePlain) {
  const auto peak = [](int64_t layers, const Memory& memory) {
    torch::manual_seed(1);
    const auto make = [](int64_t) {
      return torch::nn::Sequential(torch::nn::BatchNorm1d(32), torch::nn::ReLU(), torch::nn::Linear(32, 32));
    };
    regrad::RevBlock block(regrad::RevBlockOptions(layers).f(make).g(make).memory(memory));
    for (auto& parameter : block->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    const auto x1 = leaf({2048, 32}, torch::kFloat), x2 = leaf({2048, 32}, torch::kFloat);
    x1.mutable_grad() = torch::zeros_like(x1);
    x2.mutable_grad() = torch::zeros_like(x2);
    const regrad::MemoryMeter meter;
    torch::Tensor loss;
    {
      const auto [y1, y2] = block->forward(x1, x2);
      loss = (y1 + y2).sum();
    }
    loss.backward();
    return meter.peak_bytes();
  };
  const int64_t pair = 2 * 2048 * 32 * 4;
  const int64_t reverse_of_8 = peak(8, Memory::reverse());
  EXPECT_LE(reverse_of_8, 7 * pair);
  for (const int64_t layers : {8, 64}) {
    const int64_t store = peak(layers, Memory::store());
    EXPECT_LE(peak(layers, Memory::recompute(1)), store);
    const int64_t reverse = peak(layers, Memory::reverse());
    EXPECT_LE(reverse, store);
    // Nothing of the streams, and no running statistics: 1 % of the peak is 150 bytes for each of 64 batch norms.
    EXPECT_NEAR(static_cast<double>(reverse) / static_cast<double>(reverse_of_8), 1, 0.01) << reverse << " bytes";
  }
}

/// Runs `body` on a stack of 8 MiB, whatever the main thread has.
void on_small_stack(const std::function<void()>& body) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 8 << 20);
  pthread_t thread;
  auto run = [](void* argument) -> void* {
    (*static_cast<const std::function<void()>*>(argument))();
    return nullptr;
  };
  pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&body));
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

TEST(Lifetime, C25_TenThousandLayersOnASmallStack) {
  on_small_stack([] {
    const auto x = leaf({8}, torch::kFloat);
    const auto p = (torch::randn({8}) * 0.01).requires_grad_();
    const auto f = [p](torch::Tensor t) { return (t * p).sin(); };
    for (const Memory& memory : {Memory::reverse(), Memory::recompute(100)}) {
      for (const bool run_backward : {true, false}) {
        regrad::RevBlock block(regrad::RevBlockOptions(10000).f(f).g(f).memory(memory));
        const auto [y1, y2] = block->forward(x, x * 2);
        if (run_backward) (y1 + y2).sum().backward();
      }
    }
    for (const bool run_backward : {true, false}) {
      torch::Tensor y = x;
      for (int i = 0; i < 10000; ++i) y = recompute_grad(f)(y);
      if (run_backward) y.sum().backward();
    }
    // Each closure captures the output before it.
    for (const bool run_backward : {true, false}) {
      torch::Tensor y = x;
      for (int i = 0; i < 10000; ++i) {
        y = recompute_grad([p, h = y](torch::Tensor t) { return (t * p).sin() + h * 0.5; })(y);
      }
      if (run_backward) y.sum().backward();
    }
  });
}

TEST(Lifetime, C23_AfterAnExceptionInAReplayTheNextStepIsRight) {
  const auto x = leaf({32}, torch::kFloat), p = leaf({32}, torch::kFloat);
  bool fail = false;
  int calls = 0;
  const auto f = [&](torch::Tensor t) {
    if (fail && ++calls == 3) throw std::bad_alloc();
    return (t * p).sin();
  };
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    regrad::RevBlock block(regrad::RevBlockOptions(4).f(f).g(f).memory(memory));
    const auto step = [&] {
      const auto [y1, y2] = block->forward(x, x * 1);
      (y1 * y2).sum().backward();
      return take_gradients({x, p});
    };
    fail = false;
    const Tensors expected = step();
    const regrad::MemoryMeter meter;
    {
      const auto [y1, y2] = block->forward(x, x * 1);
      fail = memory != Memory::store();
      calls = 0;
      if (fail) {
        EXPECT_THROW((y1 * y2).sum().backward(), std::bad_alloc);
      }
    }
    fail = false;
    take_gradients({x, p});
    EXPECT_EQ(meter.current_bytes(), 0);
    expect_close(expected, step());
  }
}

TEST(Lifetime, C24_AHeldRegionIsSmall) {
  const auto x = leaf({1}, torch::kFloat);
  const regrad::MemoryMeter meter;
  torch::Tensor y = x;
  for (int i = 0; i < 500; ++i) y = recompute_grad([](torch::Tensor t) { return t.sin(); })(y);
  // The output of each region, which is the next one's kept input: one float in Torch's smallest block.
  EXPECT_LE(meter.current_bytes(), 500 * 64);
  y.backward();
}

}  // namespace
