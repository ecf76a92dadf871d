#include "regrad/memory_meter.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "regrad/error.h"

namespace {

using regrad::MemoryMeter;

/// A tensor of that many bytes.
torch::Tensor block_of(int64_t bytes) { return torch::empty({bytes}, torch::kUInt8); }

TEST(MemoryMeter, StartsAtZero) {
  const torch::Tensor older = block_of(1000);
  const MemoryMeter meter;
  EXPECT_EQ(meter.current_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), 0);
}

TEST(MemoryMeter, CountsEachByte) {
  const MemoryMeter meter;
  const torch::Tensor a = block_of(1000);
  EXPECT_EQ(meter.current_bytes(), 1000);
  const torch::Tensor b = torch::empty({3, 5}, torch::kFloat64);
  EXPECT_EQ(meter.current_bytes(), 1000 + 3 * 5 * 8);
  const torch::Tensor view = b.t();
  EXPECT_EQ(meter.current_bytes(), 1000 + 3 * 5 * 8) << "a view needs no memory";
}

TEST(MemoryMeter, PeakStaysWhenMemoryIsFreed) {
  const MemoryMeter meter;
  {
    const torch::Tensor a = block_of(1000);
    const torch::Tensor b = block_of(500);
  }
  EXPECT_EQ(meter.current_bytes(), 0);
  EXPECT_EQ(meter.peak_bytes(), 1500);
  const torch::Tensor c = block_of(100);
  EXPECT_EQ(meter.current_bytes(), 100);
  EXPECT_EQ(meter.peak_bytes(), 1500);
}

TEST(MemoryMeter, ResetPeakMakesItTheCurrentValue) {
  MemoryMeter meter;
  const torch::Tensor kept = block_of(100);
  block_of(1000);
  EXPECT_EQ(meter.peak_bytes(), 1100);
  meter.reset_peak();
  EXPECT_EQ(meter.peak_bytes(), 100);
  block_of(10);
  EXPECT_EQ(meter.peak_bytes(), 110);
}

TEST(MemoryMeter, FollowsResizing) {
  const MemoryMeter meter;
  torch::Tensor a = block_of(100);
  a.resize_({300});
  EXPECT_EQ(meter.current_bytes(), 300);
  a.reset();
  EXPECT_EQ(meter.current_bytes(), 0);
}

TEST(MemoryMeter, IgnoresReleaseOfOlderMemory) {
  torch::Tensor older = block_of(1000);
  const MemoryMeter meter;
  older.reset();
  EXPECT_EQ(meter.current_bytes(), 0);
}

// Torch's CPU allocator remembers the size of a block that was allocated under one meter and reports it under the next,
// also when the address has been used for something else since.
TEST(MemoryMeter, IgnoresReleaseOfMemoryThatAnEarlierMeterSaw) {
  torch::Tensor seen_by_first;
  {
    const MemoryMeter first;
    seen_by_first = block_of(1 << 20);
  }
  const MemoryMeter second;
  seen_by_first.reset();
  EXPECT_EQ(second.current_bytes(), 0);
}

TEST(MemoryMeter, CountsAnAddressOnceWhenItsReleaseWasNotReported) {
  constexpr int64_t bytes = 1 << 26;  // so many that the C library maps them separately, and finds the same place again
  const MemoryMeter meter;
  torch::Tensor a = block_of(bytes);
  void* const address = a.data_ptr();
  std::thread([&] { a.reset(); }).join();  // not one of Torch's threads: nothing is reported
  const torch::Tensor b = block_of(bytes);
  if (b.data_ptr() != address) {
    GTEST_SKIP() << "the allocator did not use the address again";
  }
  EXPECT_EQ(meter.current_bytes(), bytes);
}

TEST(MemoryMeter, OuterMeterSeesWhatInnerSees) {
  MemoryMeter outer;
  const torch::Tensor a = block_of(100);
  torch::Tensor b;
  {
    const MemoryMeter inner;
    b = block_of(20);
    block_of(300);
    EXPECT_EQ(inner.current_bytes(), 20);
    EXPECT_EQ(inner.peak_bytes(), 320);
    EXPECT_EQ(outer.current_bytes(), 120);
    EXPECT_EQ(outer.peak_bytes(), 420);
  }
  b.reset();
  EXPECT_EQ(outer.current_bytes(), 100) << "the outer meter goes on when the inner one is gone";
  block_of(1000);
  EXPECT_EQ(outer.peak_bytes(), 1100);
}

TEST(MemoryMeter, SeesOnlyItsOwnThread) {
  const MemoryMeter meter;
  torch::Tensor elsewhere;
  std::thread([&] { elsewhere = block_of(1000); }).join();
  EXPECT_EQ(meter.current_bytes(), 0);
}

TEST(MemoryMeter, MetersOnTwoThreadsAreIndependent) {
  const auto measure = [](int64_t bytes) {
    for (int i = 0; i < 1000; ++i) {
      const MemoryMeter meter;
      const torch::Tensor a = block_of(bytes);
      ASSERT_EQ(meter.peak_bytes(), bytes);
    }
  };
  std::thread other(measure, 3000);
  measure(500);
  other.join();
}

/// Gradient 1. Its backward keeps `kept_bytes` and starts another engine run, `levels` deep.
struct NestedBackward : torch::autograd::Function<NestedBackward> {
  static constexpr int64_t kept_bytes = 4096;
  inline static std::vector<torch::Tensor> kept;
  inline static std::set<std::thread::id> threads;

  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x, int64_t levels) {
    context->saved_data["levels"] = levels;
    return x.clone();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grad_outputs) {
    kept.push_back(block_of(kept_bytes));
    threads.insert(std::this_thread::get_id());
    const int64_t levels = context->saved_data["levels"].toInt();
    if (levels > 1) {
      const torch::AutoGradMode enable(true);
      const torch::Tensor x = torch::ones({1}, torch::requires_grad());
      torch::autograd::grad({apply(x, levels - 1)}, {x});
    }
    return {grad_outputs[0], torch::Tensor()};
  }
};

TEST(MemoryMeter, SeesTheEnginesThreads) {
  // Beyond 60 engine runs inside each other, Torch goes on in another thread.
  constexpr int64_t levels = 150;
  const MemoryMeter meter;
  {
    const torch::Tensor x = torch::ones({1}, torch::requires_grad());
    NestedBackward::apply(x, levels).backward();
  }
  EXPECT_GT(NestedBackward::threads.size(), 1U) << "this test needs an engine that uses several threads";
  // A difference, because the engine may free a few bytes of its own after it has given up the caller's thread state.
  const int64_t before = meter.current_bytes();
  NestedBackward::kept.clear();
  EXPECT_EQ(before - meter.current_bytes(), levels * NestedBackward::kept_bytes);
  EXPECT_LT(meter.current_bytes(), NestedBackward::kept_bytes);
}

TEST(MemoryMeter, IsZeroAfterTraining) {
  const MemoryMeter meter;
  {
    torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model->forward(torch::randn({8, 16})).pow(2).mean().backward();
      optimizer.step();
    }
    EXPECT_GT(meter.current_bytes(), 0);
  }
  EXPECT_EQ(meter.current_bytes(), 0);
}

TEST(MemoryMeter, RefusesWhereTorchsProfilerRuns) {
  using torch::profiler::impl::ActivityType;
  using torch::profiler::impl::ProfilerConfig;
  using torch::profiler::impl::ProfilerState;
  const ProfilerConfig config(ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, {ActivityType::CPU});
  torch::autograd::profiler::enableProfiler(config, {ActivityType::CPU});
  try {
    const MemoryMeter meter;
    ADD_FAILURE() << "no error";
  } catch (const regrad::Error& error) {
    EXPECT_EQ(error.kind(), regrad::ErrorKind::meter_unavailable);
  }
  torch::autograd::profiler::disableProfiler();
  const MemoryMeter meter;
  const torch::Tensor a = block_of(10);
  EXPECT_EQ(meter.current_bytes(), 10);
}

TEST(MemoryMeter, CannotBeCopiedOrMoved) {
  EXPECT_FALSE(std::is_copy_constructible_v<MemoryMeter>);
  EXPECT_FALSE(std::is_move_constructible_v<MemoryMeter>);
  EXPECT_FALSE(std::is_copy_assignable_v<MemoryMeter>);
  EXPECT_FALSE(std::is_move_assignable_v<MemoryMeter>);
}

}  // namespace
