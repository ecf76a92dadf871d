// recompute_grad against the plain function: values, gradients, edges.

#include <thread>

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::recompute_grad;
namespace nn = torch::nn;

namespace {

struct Recompute : ::testing::Test {
  torch::Tensor x = (torch::manual_seed(3), leaf({4, 4}));
  torch::Tensor p = leaf({4, 4});
  torch::Tensor q = leaf({4, 4});
  torch::Tensor w = leaf({4});
  Tensors leaves{x, p, q, w};

  /// f(x) plainly and as a region, on a non-leaf and on a leaf.
  template <class F>
  void check(F f, Tolerance tolerance = {}) {
    expect_like_plain(
        leaves, [&] { return Tensors{f(x * 1)}; }, [&] { return Tensors{recompute_grad(f)(x * 1)}; }, tolerance);
    expect_like_plain(
        leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; }, tolerance);
  }
};

// A tensor used inside a region and outside has its contributions summed in another order.
constexpr Tolerance kRounding{1e-14};

TEST_F(Recompute, RunsTheFunctionOnceMoreInBackward) {
  int runs = 0;
  auto y = recompute_grad([&](torch::Tensor t) {
    ++runs;
    return t.mm(p).tanh();
  })(x);
  EXPECT_EQ(runs, 1);
  y.sum().backward();
  EXPECT_EQ(runs, 2);
}

TEST_F(Recompute, CapturedLeaf) {
  check([&](torch::Tensor t) { return t.mm(p).tanh() * q; });
}

TEST_F(Recompute, CapturedNonLeaf) {
  const auto f = [&](torch::Tensor t, torch::Tensor h) { return (t.mm(p) + h).tanh(); };
  expect_like_plain(
      leaves,
      [&] {
        const auto h = x * q;
        return Tensors{f(x, h), h.sin()};
      },
      [&] {
        const auto h = x * q;
        return Tensors{recompute_grad([&f, h](torch::Tensor t) { return f(t, h); })(x), h.sin()};
      },
      kRounding);
}

TEST_F(Recompute, ParameterInTwoRegionsAndOutside) {
  const auto f = [&](torch::Tensor t) { return t.mm(p).tanh(); };
  const auto r = recompute_grad(f);
  expect_like_plain(
      leaves, [&] { return Tensors{f(f(x) * p) * p}; }, [&] { return Tensors{r(r(x) * p) * p}; }, kRounding);
}

TEST_F(Recompute, TheSameTensorTwice) {
  const auto f = [&](torch::Tensor a, torch::Tensor b) { return (a.mm(p) * b).tanh(); };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x, x)}; }, [&] { return Tensors{recompute_grad(f)(x, x)}; }, kRounding);
  expect_like_plain(
      leaves,
      [&] {
        const auto h = x * q;
        return Tensors{f(h, h)};
      },
      [&] {
        const auto h = x * q;
        return Tensors{recompute_grad(f)(h, h)};
      },
      kRounding);
}

TEST_F(Recompute, InPlaceOnViewsInside) {
  check([&](torch::Tensor t) {
    auto y = t * p;
    y.select(0, 1).mul_(q.select(0, 1).detach()).add_(w);
    return y;
  });
  check([&](torch::Tensor t) {
    auto y = t * p;
    y.view({16}).slice(0, 0, 8).mul_(q.view({16}).slice(0, 0, 8));
    return y * y;
  });
  check([&](torch::Tensor t) { return (t + p).view({16}).relu_(); });
}

TEST_F(Recompute, Nested) {
  const auto f = [&](torch::Tensor t) { return t.mm(p).tanh(); };
  check([&](torch::Tensor t) { return recompute_grad(f)(recompute_grad(f)(t) * q) * p; }, kRounding);
}

TEST_F(Recompute, ThreadInside) {
  check([&](torch::Tensor t) {
    torch::Tensor o;
    std::thread([&] { o = (t * p).sin(); }).join();
    return o * p;
  });
}

TEST_F(Recompute, GradientsInside) {
  check([&](torch::Tensor t) {
    if (!t.requires_grad()) return t;
    const auto g = torch::autograd::grad({(t * p).sin().sum()}, {t}, {}, true, true)[0];
    return t * g * p;
  });
}

TEST_F(Recompute, SeveralOutputs) {
  const auto f = [&](torch::Tensor a, torch::Tensor b, std::vector<torch::Tensor> more) {
    const auto h = a.mm(p).tanh();
    return std::make_tuple(h * b, h.argmax(1), std::vector<torch::Tensor>{h.mm(q).sin(), more[0] * 2, b * w}, 42);
  };
  const auto mask = torch::rand({3});
  for (int used = 1; used < 8; ++used) {
    SCOPED_TRACE(used);
    const auto pick = [&](auto result) {
      auto [y, argmax, list, number] = result;
      EXPECT_EQ(number, 42);
      EXPECT_FALSE(argmax.requires_grad());
      EXPECT_FALSE(list[1].requires_grad());
      Tensors outputs;
      if (used & 1) outputs.push_back(y);
      if (used & 2) outputs.push_back(list[0]);
      if (used & 4) outputs.push_back(list[2]);
      return outputs;
    };
    int runs = 0;
    const auto counted = [&](torch::Tensor a, torch::Tensor b, std::vector<torch::Tensor> more) {
      ++runs;
      return f(a, b, more);
    };
    expect_like_plain(
        leaves,
        [&] {
          const auto h = x * 1;
          return pick(f(h, h * 2, {mask}));
        },
        [&] {
          const auto h = x * 1;
          return pick(recompute_grad(counted)(h, h * 2, std::vector<torch::Tensor>{mask}));
        });
    EXPECT_EQ(runs, 2) << "forward and one replay, however many outputs";
  }
}

TEST_F(Recompute, SecondOrder) {
  const auto f = [&](torch::Tensor t) { return t.mm(p).tanh() * q + t.sin(); };
  const auto penalty = [&](auto g) {
    return [&, g] {
      const auto y = g(x * 1.5);
      const auto first = torch::autograd::grad({(y * y).sum()}, {x, p}, {}, true, true);
      return Tensors{first[0].pow(2).sum() + (first[0] * first[1]).sum() + y.sum()};
    };
  };
  expect_like_plain(leaves, penalty(f), penalty(recompute_grad(f)), {1e-12});
  const auto chain = [&](auto g) { return [&, g](torch::Tensor t) { return g(g(g(t))); }; };
  expect_like_plain(leaves, penalty(chain(f)), penalty(chain(recompute_grad(f))), {1e-12});
}

TEST_F(Recompute, RetainedGraph) {
  auto y = recompute_grad([&](torch::Tensor t) { return t.mm(p).tanh(); })(x * 1).sum();
  y.backward({}, true);
  const auto once = x.grad().clone();
  y.backward();
  EXPECT_TRUE(x.grad().equal(once * 2));
  EXPECT_THROW(y.backward(), c10::Error);
}

TEST_F(Recompute, WithoutGradModeNothingIsRecorded) {
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(recompute_grad([&](torch::Tensor t) { return t.mm(p); })(x).requires_grad());
}

TEST_F(Recompute, LstmAndBatchNormAndDropout) {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::Dropout(0.5), nn::Conv2d(nn::Conv2dOptions(8, 3, 3)));
  const auto image = torch::randn({2, 3, 6, 6}).requires_grad_();
  Tensors all = net->parameters();
  all.push_back(image);
  const auto initial = net->buffers()[0].clone();
  const auto plain = run(all, [&] { return Tensors{net->forward(image)}; });
  const auto mean_after_plain = net->buffers()[0].clone();
  const auto count_after_plain = net->buffers()[2].clone();
  {
    const torch::NoGradGuard no_grad;
    net->buffers()[0].copy_(initial);
  }
  const auto ours = run(all, [&] { return Tensors{recompute_grad(net)(image)}; });
  expect_close(plain.outputs, ours.outputs);
  expect_close(plain.gradients, ours.gradients);
  EXPECT_TRUE(mean_after_plain.equal(net->buffers()[0]));
  EXPECT_EQ(net->buffers()[2].item<int64_t>(), 2 * count_after_plain.item<int64_t>());

  nn::LSTM lstm(nn::LSTMOptions(4, 4));
  Tensors lstm_leaves = lstm->parameters();
  const auto sequence = torch::randn({5, 2, 4}).requires_grad_();
  lstm_leaves.push_back(sequence);
  const auto f = [&](torch::Tensor t) { return std::get<0>(lstm->forward(t)); };
  expect_like_plain(
      lstm_leaves, [&] { return Tensors{f(sequence)}; }, [&] { return Tensors{recompute_grad(f)(sequence)}; });
}

}  // namespace
