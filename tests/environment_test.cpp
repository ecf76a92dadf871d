// Contract clause 6: autocast, grad mode, inference mode and callbacks in a replay are those of the first run.

#include "regrad/regrad.h"
#include "support/autocast.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::recompute_grad;

namespace {

using Map = std::function<torch::Tensor(torch::Tensor)>;
/// Leaves a function as it is, or recomputes it.
using Wrap = std::function<Map(Map)>;

struct UnderAutocast : ::testing::Test {
  torch::Tensor x = (torch::manual_seed(2), leaf({64, 64}, torch::kFloat));
  torch::Tensor p = (torch::randn({64, 64}) * 0.2).requires_grad_();
  torch::Tensor q = (torch::randn({64, 64}) * 0.2).requires_grad_();
  Map f = [this](torch::Tensor t) { return t.mm(p).tanh().mm(q); };
  Map many = [this](torch::Tensor t) {
    for (int i = 0; i < 4; ++i) t = t.mm(p).tanh();
    return t;
  };

  Tensors gradients(const std::function<torch::Tensor(Wrap)>& program, const Wrap& wrap, bool backward_inside) {
    torch::Tensor y;
    {
      const Autocast autocast;
      y = program(wrap);
      if (backward_inside) y.to(torch::kFloat).sum().backward();
    }
    if (!backward_inside) y.to(torch::kFloat).sum().backward();
    at::autocast::clear_cache();
    return take_gradients({x, p, q});
  }

  void check(const std::function<torch::Tensor(Wrap)>& program) {
    const Wrap plain = [](Map g) { return g; };
    const Wrap ours = [](Map g) { return Map(recompute_grad(g)); };
    for (const bool inside : {false, true}) {
      SCOPED_TRACE(inside ? "backward inside the scope" : "backward outside the scope");
      expect_close(gradients(program, plain, inside), gradients(program, ours, inside));
    }
  }
};

TEST_F(UnderAutocast, C14_OneRegion) {
  check([&](Wrap r) { return r(f)(x * 1); });
}
TEST_F(UnderAutocast, C14_TwoRegionsShareWeights) {
  check([&](Wrap r) { return r(f)(r(f)(x * 1)); });
}
TEST_F(UnderAutocast, C14_RegionThenPlain) {
  check([&](Wrap r) { return f(r(f)(x * 1)); });
}
TEST_F(UnderAutocast, C14_PlainThenRegion) {
  check([&](Wrap r) { return r(f)(f(x * 1)); });
}
TEST_F(UnderAutocast, C14_OneWeightManyTimes) {
  check([&](Wrap r) { return r(many)(x * 1); });
}
TEST_F(UnderAutocast, C14_NestedRegions) {
  check([&](Wrap r) { return r([&, r](torch::Tensor t) { return r(f)(r(f)(t)) * 2; })(x * 1); });
}

TEST_F(UnderAutocast, C14_PlainCodeAfterAReplayInTheSameScope) {
  const Autocast autocast;
  auto y = recompute_grad(f)(x * 1);
  at::autocast::clear_cache();
  y.to(torch::kFloat).sum().backward();
  take_gradients({x, p, q});
  f(x * 1).to(torch::kFloat).sum().backward();
  EXPECT_TRUE(p.grad().defined());
}

// The replay's casts lead to private nodes: code that found them in the cache would lose its gradient.
TEST_F(UnderAutocast, C14_PlainCodeAfterAReplayInAnotherScope) {
  const auto program = [&](auto wrap) {
    return [&, wrap] {
      torch::Tensor y;
      {
        const Autocast autocast;
        at::autocast::set_autocast_cache_enabled(
            false);  // what is in the cache in forward is not of the replay's making
        y = wrap([this](torch::Tensor t) { return t.mm(p); })(x);
        at::autocast::set_autocast_cache_enabled(true);
      }
      const Autocast autocast;
      y.sum().backward();
      return Tensors{x.mm(p)};
    };
  };
  expect_like_plain({x, p}, program([](auto f) { return f; }), program([](auto f) { return recompute_grad(f); }));
}

TEST_F(UnderAutocast, C14_Blocks) {
  // Each weight once per function: several uses in a region are summed before those of other regions, which rounds
  // differently in bfloat16.
  const Map g = [this](torch::Tensor t) { return t.mm(q).tanh().mm(p); };
  const auto run = [&](regrad::Memory memory, bool ours) {
    torch::Tensor y;
    {
      const Autocast autocast;
      torch::Tensor a = x * 1, b = x * 2;
      if (ours) {
        regrad::RevBlock block(regrad::RevBlockOptions(4).f(f).g(g).memory(memory));
        std::tie(a, b) = block->forward(a, b);
      } else {
        for (int i = 0; i < 4; ++i) {
          a = a + f(b);
          b = b + g(a);
        }
      }
      y = (a + b).sum();
    }
    y.backward();
    return take_gradients({x, p, q});
  };
  const Tensors plain = run(regrad::Memory::store(), false);
  expect_close(plain, run(regrad::Memory::store(), true));
  expect_close(plain, run(regrad::Memory::recompute(2), true));
  // bfloat16 inside amplifies the rounding of the rebuilt float streams.
  expect_close(plain, run(regrad::Memory::reverse(), true), {2e-2});
}

TEST(Environment, NothingLeaksWhenAReplayThrows) {
  const auto x = leaf({3});
  bool fail = false;
  auto y = recompute_grad([&](torch::Tensor t) {
    at::autocast::set_autocast_enabled(at::kCPU, fail);
    if (fail) throw std::runtime_error("mine");
    return t.sin();
  })(x);
  fail = true;
  const auto generator = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(torch::GradMode::is_enabled());
  EXPECT_FALSE(regrad::is_recomputing());
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(generator));
}

TEST(Environment, InferenceModeAroundBackward) {
  const auto x = leaf({3, 3}), p = leaf({3, 3});
  const auto f = [&](torch::Tensor t) { return t.mm(p).tanh(); };
  const auto plain = f(x).sum(), ours = recompute_grad(f)(x).sum();
  const auto backward = [&](torch::Tensor y) {
    const c10::InferenceMode inference;
    y.backward();
  };
  backward(plain);
  const auto expected = take_gradients({x, p});
  backward(ours);
  expect_close(expected, take_gradients({x, p}));
}

TEST(Environment, MeterSeesTheReplayThatRunsUnderIt) {
  const auto x = torch::randn({1024}).requires_grad_();
  auto y = recompute_grad([](torch::Tensor t) { return t.sin().cos().tan(); })(x).sum();
  const regrad::MemoryMeter meter;
  y.backward();
  EXPECT_GT(meter.peak_bytes(), 4 * 4096);
}

}  // namespace
