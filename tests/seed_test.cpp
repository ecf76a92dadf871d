// The behaviours of TensorFlow's rev_block_lib, numbered as in its tests: the same set-up, its tolerances or tighter.
// What is expected comes from loops that are written out here.

#include <array>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::Pass;
using regrad::recompute_grad;
using regrad::Residual;
using regrad::RevBlock;
using regrad::RevBlockOptions;
namespace nn = torch::nn;

namespace {

nn::Linear new_linear(int64_t) { return nn::Linear(4, 4); }

/// Linear on the last axis, by hand.
torch::Tensor linear(const nn::Linear& l, torch::Tensor x) { return torch::matmul(x, l->weight.t()) + l->bias; }

RevBlock linear_block(int64_t layers) { return RevBlock(RevBlockOptions(layers).f(new_linear).g(new_linear)); }

std::array<torch::Tensor, 2> halves(torch::Tensor x) {
  const auto parts = x.chunk(2, -1);
  return {parts[0], parts[1]};
}

void expect_all_close(const Tensors& expected, const Tensors& found, double relative, double absolute) {
  ASSERT_EQ(expected.size(), found.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(found[i].defined()) << "tensor " << i;
    EXPECT_TRUE(torch::allclose(found[i], expected[i], relative, absolute))
        << "tensor " << i << ", largest difference " << (found[i] - expected[i]).abs().max().item<double>();
    EXPECT_GT(expected[i].abs().max().item<double>(), 0) << "tensor " << i << " would hide a missing gradient";
  }
}

using Streams = std::function<Tensors(torch::Tensor x1, torch::Tensor x2)>;

/// The reference's comparison: outputs within 1e-6, and gradients of mean(concat(y1, y2) + 10) for x and every
/// parameter within 1e-5 relative and 1e-6 absolute.
void expect_same_training(const torch::Tensor& x, const Tensors& variables, const Streams& plain, const Streams& ours) {
  Tensors leaves = variables;
  leaves.push_back(x);
  const auto train = [&](const Streams& streams) {
    take_gradients(leaves);
    const auto [x1, x2] = halves(x);
    const auto y = torch::cat(streams(x1, x2), -1);
    (y + 10).mean().backward();
    return std::make_pair(y.detach(), take_gradients(leaves));
  };
  const auto [expected_y, expected_gradients] = train(plain);
  const auto [y, gradients] = train(ours);
  expect_all_close({expected_y}, {y}, 0, 1e-6);
  expect_all_close(expected_gradients, gradients, 1e-5, 1e-6);
}

Streams call(RevBlock block, Memory memory, regrad::SideInputs side = {}) {
  return [=](torch::Tensor x1, torch::Tensor x2) mutable {
    block->set_memory(memory);
    return run_block(block, x1, x2, side);
  };
}

TEST(Seed, S01_InverseOfForwardGivesTheInputs) {
  torch::manual_seed(1);
  auto block = linear_block(3);
  const auto [x1, x2] = halves(torch::rand({16, 8}));
  const auto [y1, y2] = block->forward(x1, x2);
  EXPECT_FALSE(torch::allclose(y1, x1, 0, 0.01));
  const auto [r1, r2] = block->inverse(y1, y2);
  expect_all_close({x1, x2}, {r1, r2}, 0, 1e-6);
}

TEST(Seed, S02_InverseBeforeAnyForward) {
  torch::manual_seed(1);
  auto block = linear_block(3);
  const auto [y1, y2] = halves(torch::rand({16, 8}));
  const auto [x1, x2] = block->inverse(y1, y2);
  const auto [z1, z2] = block->forward(x1, x2);
  expect_all_close({y1, y2}, {z1, z2}, 1e-5, 1e-7);
}

struct SeedFourLayers : ::testing::Test {
  std::vector<nn::Linear> f, g;
  torch::Tensor x;

  SeedFourLayers() {
    torch::manual_seed(1234);
    for (int i = 0; i < 4; ++i) {
      f.push_back(new_linear(i));
      g.push_back(new_linear(i));
    }
    x = torch::rand({16, 8}).requires_grad_();
  }

  Tensors variables() const {
    Tensors result;
    for (size_t i = 0; i < 4; ++i) {
      for (const auto& l : {f[i], g[i]}) {
        result.push_back(l->weight);
        result.push_back(l->bias);
      }
    }
    return result;
  }
};

TEST_F(SeedFourLayers, S03_EfficientPathMatchesStore) {
  const RevBlock block(RevBlockOptions(4).f(f).g(g));
  EXPECT_EQ(block->parameters().size(), 16U);
  const Streams plain = [&](torch::Tensor x1, torch::Tensor x2) {
    for (size_t i = 0; i < 4; ++i) {
      x1 = x1 + linear(f[i], x2);
      x2 = x2 + linear(g[i], x1);
    }
    return Tensors{x1, x2};
  };
  expect_same_training(x, variables(), plain, call(block, Memory::reverse()));
  expect_same_training(x, variables(), plain, call(block, Memory::store()));
  expect_same_training(x, variables(), plain, call(block, Memory::recompute(2)));
  expect_same_training(x, variables(), call(block, Memory::store()), call(block, Memory::reverse()));
  EXPECT_EQ(block->parameters().size(), 16U);
  for (const bool is_training : {true, false}) {
    expect_same_training(x, variables(), plain, [&](torch::Tensor x1, torch::Tensor x2) {
      const auto [y1, y2] = regrad::rev_block(x1, x2, f, g, 4, {}, is_training);
      return Tensors{y1, y2};
    });
  }
}

TEST_F(SeedFourLayers, S04_SideInputOfAllLayers) {
  const auto side = torch::rand({16, 4}).requires_grad_();
  std::vector<Residual> f_with_side;
  for (const nn::Linear& l : f) {
    f_with_side.emplace_back(
        std::vector<std::shared_ptr<nn::Module>>{l.ptr()},
        [l = l](torch::Tensor t, torch::TensorList more) mutable { return l->forward(t) + more[0]; });
  }
  const RevBlock block(RevBlockOptions(4).f(f_with_side).g(g));
  EXPECT_EQ(block->parameters().size(), 16U);
  Tensors leaves = variables();
  leaves.push_back(side);
  const Streams plain = [&](torch::Tensor x1, torch::Tensor x2) {
    for (size_t i = 0; i < 4; ++i) {
      x1 = x1 + linear(f[i], x2) + side;
      x2 = x2 + linear(g[i], x1);
    }
    return Tensors{x1, x2};
  };
  for (const Memory memory : {Memory::reverse(), Memory::store(), Memory::recompute(2)}) {
    SCOPED_TRACE(memory.to_string());
    expect_same_training(x, leaves, plain, call(block, memory, {.f = {side}}));
  }
  expect_same_training(x, leaves, plain, [&](torch::Tensor x1, torch::Tensor x2) {
    const auto [y1, y2] = regrad::rev_block(x1, x2, f_with_side, g, 4, {.f = {side}});
    return Tensors{y1, y2};
  });
}

TEST_F(SeedFourLayers, S05_AnotherFunctionInEachLayer) {
  const std::vector<Residual> different{f[0], nn::Sequential(f[1], nn::ReLU()), f[2], nn::Sequential(f[3], nn::ReLU())};
  const RevBlock block(RevBlockOptions(4).f(different).g(g));
  EXPECT_EQ(block->parameters().size(), 16U);
  const Streams plain = [&](torch::Tensor x1, torch::Tensor x2) {
    for (size_t i = 0; i < 4; ++i) {
      const auto o = linear(f[i], x2);
      x1 = x1 + (i % 2 == 0 ? o : o.relu());
      x2 = x2 + linear(g[i], x1);
    }
    return Tensors{x1, x2};
  };
  for (const Memory memory : {Memory::reverse(), Memory::store(), Memory::recompute(2)}) {
    SCOPED_TRACE(memory.to_string());
    expect_same_training(x, variables(), plain, call(block, memory));
  }
}

TEST(Seed, S06_ConvolutionAndBatchNorm) {
  for (const bool training : {true, false}) {
    SCOPED_TRACE(training ? "training" : "eval");
    torch::manual_seed(1234);
    const auto new_net = [] {
      const auto conv = [] { return nn::Conv1d(nn::Conv1dOptions(4, 4, 3).padding(1)); };
      return nn::Sequential(conv(), nn::BatchNorm1d(4), conv(), nn::BatchNorm1d(4));
    };
    std::vector<nn::Sequential> f, g;
    for (int i = 0; i < 4; ++i) {
      f.push_back(new_net());
      g.push_back(new_net());
    }
    // Channels are the last axis.
    const auto residuals = [](const std::vector<nn::Sequential>& nets) {
      std::vector<Residual> result;
      for (const nn::Sequential& net : nets) {
        result.emplace_back(std::vector<std::shared_ptr<nn::Module>>{net.ptr()}, [net = net](torch::Tensor t) mutable {
          return net->forward(t.transpose(1, 2)).transpose(1, 2);
        });
      }
      return result;
    };
    RevBlock block(RevBlockOptions(4).f(residuals(f)).g(residuals(g)));
    block->train(training);
    const auto x = torch::rand({16, 10, 8}).requires_grad_();
    {
      const torch::NoGradGuard no_grad;  // so that eval has statistics of its own
      for (const auto& buffer : block->buffers()) buffer.add_(1);
    }
    const auto initial = [&] {
      Tensors copies;
      for (const auto& buffer : block->buffers()) copies.push_back(buffer.clone());
      return copies;
    }();
    const auto restore = [&] {
      const torch::NoGradGuard no_grad;
      const Tensors buffers = block->buffers();
      for (size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(initial[i]);
    };
    const Streams plain = [&](torch::Tensor x1, torch::Tensor x2) {
      restore();
      for (size_t i = 0; i < 4; ++i) {
        x1 = x1 + f[i]->forward(x2.transpose(1, 2)).transpose(1, 2);
        x2 = x2 + g[i]->forward(x1.transpose(1, 2)).transpose(1, 2);
      }
      return Tensors{x1, x2};
    };
    // A bias before batch norm in training has no gradient but rounding.
    Tensors variables;
    for (const auto& item : block->named_parameters()) {
      const std::string& name = item.key();
      const bool conv_bias = name.ends_with(".0.bias") || name.ends_with(".2.bias");
      if (!training || !conv_bias) variables.push_back(item.value());
    }
    EXPECT_EQ(block->parameters().size(), 64U);
    for (const Memory memory : {Memory::reverse(), Memory::store(), Memory::recompute(2)}) {
      SCOPED_TRACE(memory.to_string());
      Tensors after_plain;
      expect_same_training(
          x, variables,
          [&](torch::Tensor x1, torch::Tensor x2) {
            auto y = plain(x1, x2);
            for (const auto& buffer : block->buffers()) after_plain.push_back(buffer.clone());
            return y;
          },
          [&](torch::Tensor x1, torch::Tensor x2) {
            restore();
            return call(block, memory)(x1, x2);
          });
      expect_close(after_plain, block->buffers());
    }
  }
}

TEST(Seed, S07_ReuseAddsNoParameters) {
  torch::manual_seed(1);
  auto block = linear_block(3);
  const auto x = torch::rand({16, 8}).requires_grad_();
  EXPECT_EQ(block->parameters().size(), 12U);
  torch::Tensor loss = torch::zeros({});
  for (int use = 0; use < 3; ++use) {
    const auto [x1, x2] = halves(x);
    const auto [y1, y2] = block->forward(x1, x2);
    loss = loss + (y1 + y2).mean();
    EXPECT_EQ(block->parameters().size(), 12U);
  }
  loss.backward();
  Tensors leaves = block->parameters();
  leaves.push_back(x);
  const Tensors three = take_gradients(leaves);
  const auto [x1, x2] = halves(x);
  const auto [y1, y2] = block->forward(x1, x2);
  (y1 + y2).mean().backward();
  Tensors one = take_gradients(leaves);
  for (auto& gradient : one) gradient = gradient * 3;
  expect_all_close(one, three, 1e-5, 1e-7);
}

struct NormConvRelu {
  std::vector<nn::LayerNorm> norms;
  std::vector<nn::Conv1d> convs;

  NormConvRelu() {
    int64_t channels = 3;
    for (int i = 0; i < 3; ++i) {
      norms.emplace_back(nn::LayerNormOptions({1, channels}));
      convs.emplace_back(nn::Conv1dOptions(channels, 10, 1).bias(false));
      torch::nn::init::constant_(convs.back()->weight, 42.42);
      channels = 10;
    }
  }

  torch::Tensor operator()(torch::Tensor x) {
    for (size_t i = 0; i < 3; ++i) {
      x = convs[i]->forward(norms[i]->forward(x).transpose(1, 2)).transpose(1, 2).relu();
    }
    return x;
  }
};

TEST(Seed, S08_RecomputeWithEveryOptionEqualsPlain) {
  torch::manual_seed(1);
  NormConvRelu fn;
  const auto x = torch::rand({3, 1, 3}).requires_grad_();
  Tensors leaves{x};
  for (size_t i = 0; i < 3; ++i) {
    leaves.insert(leaves.end(), {fn.norms[i]->weight, fn.norms[i]->bias, fn.convs[i]->weight});
  }
  ASSERT_EQ(leaves.size(), 10U);
  const auto run_summed = [&](auto f) {
    take_gradients(leaves);
    Tensors result{f(x).sum()};
    result[0].backward();
    const Tensors gradients = take_gradients(leaves);
    result.insert(result.end(), gradients.begin(), gradients.end());
    return result;
  };
  const Tensors expected = run_summed(fn);
  expect_close(expected, run_summed(recompute_grad(fn)));
  for (const bool use_data_dep : {false, true}) {
    for (const bool tupleize_grads : {false, true}) {
      expect_close(expected,
                   run_summed(recompute_grad(fn, {.use_data_dep = use_data_dep, .tupleize_grads = tupleize_grads})));
    }
  }
}

TEST(Seed, S09_NewParametersOnEachCallAreRefused) {
  const auto x = torch::rand({2, 4}).requires_grad_();
  const auto y = recompute_grad([](torch::Tensor t) { return nn::Linear(4, 4)->forward(t); })(x);
  expect_error(regrad::ErrorKind::variables_differ, {"on each call"}, [&] { torch::autograd::grad({y.sum()}, {x}); });
}

TEST(Seed, S10_DistinctStableParametersPerCall) {
  std::vector<nn::Linear> layers{nn::Linear(4, 4), nn::Linear(4, 4)};
  const auto region = recompute_grad([&](torch::Tensor t, size_t layer) { return layers[layer]->forward(t); });
  const auto x = torch::rand({2, 4}).requires_grad_();
  const Tensors leaves{x, layers[0]->weight, layers[0]->bias, layers[1]->weight, layers[1]->bias};
  expect_like_plain(
      leaves, [&] { return Tensors{linear(layers[1], linear(layers[0], x))}; },
      [&] { return Tensors{region(region(x, size_t{0}), size_t{1})}; });
  region(region(x, size_t{0}), size_t{1}).sum().backward();
  for (const auto& leaf : leaves) EXPECT_TRUE(leaf.grad().defined());
}

TEST(Seed, S11_FlagAndBatchNormUpdatedOnce) {
  nn::Linear dense(4, 2);
  nn::BatchNorm1d norm(2);
  std::vector<Pass> passes;
  std::vector<bool> flags;
  const auto y = recompute_grad([&](torch::Tensor t, Pass pass) {
    passes.push_back(pass);
    flags.push_back(regrad::is_recomputing());
    return norm->forward(dense->forward(t));
  })(torch::ones({2, 4}));
  const auto expected_mean = linear(dense, torch::ones({2, 4})).mean(0) * 0.1;
  y.pow(2).sum().backward();
  EXPECT_EQ(passes, (std::vector<Pass>{Pass::forward, Pass::recompute}));
  EXPECT_EQ(flags, (std::vector<bool>{false, true}));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
  EXPECT_TRUE(torch::allclose(norm->running_mean, expected_mean, 1e-5, 1e-7));
  EXPECT_TRUE(torch::allclose(norm->running_var, torch::full({2}, 0.9), 1e-5, 1e-7));
}

TEST(Seed, S12_GrowingListOfArguments) {
  torch::manual_seed(1);
  const auto first = torch::rand({4, 8}).requires_grad_();
  const auto next = [](Tensors list) {
    const size_t begin = list.size() > 3 ? list.size() - 3 : 0;
    return torch::cat(Tensors(list.begin() + static_cast<int64_t>(begin), list.end()), -1).sum(1, true).sqrt();
  };
  const auto grow = [&](auto f) {
    Tensors list{first};
    for (int i = 0; i < 5; ++i) list.push_back(f(list));
    return list.back();
  };
  const auto expected = torch::autograd::grad({grow(next).sum()}, {first})[0];
  const auto found = torch::autograd::grad({grow(recompute_grad(next)).sum()}, {first})[0];
  EXPECT_TRUE(found.isfinite().all().item<bool>());
  EXPECT_TRUE(found.equal(expected));
}

TEST(Seed, S13_CapturedTensorGetsItsGradient) {
  torch::manual_seed(1);
  const auto captured = torch::rand({4, 8}).requires_grad_();
  const auto x = torch::rand({4, 8}).requires_grad_();
  const auto region = recompute_grad([captured](torch::Tensor t) { return t * captured * captured; });
  region(x).sum().backward();
  EXPECT_TRUE(torch::allclose(captured.grad(), (2 * x * captured).detach(), 1e-6, 0));
  EXPECT_TRUE(torch::allclose(x.grad(), captured.detach().pow(2), 1e-6, 0));
}

TEST(Seed, S14_CustomGradient) {
  torch::manual_seed(1);
  const auto a = torch::rand({11, 6}).requires_grad_();
  const auto b = torch::rand({11, 7}).requires_grad_();
  const auto c = torch::rand({7, 10}).requires_grad_();
  const auto w = torch::rand({6, 10}).requires_grad_();
  const auto fn = [&](torch::Tensor p, torch::Tensor q, torch::Tensor r) { return p.mm(w) + q.mm(r); };
  const Tensors leaves{a, b, c, w};

  const auto with_true_gradient = regrad::with_custom_grad(
      fn, [](const Tensors& in, const Tensors& variables, const Tensors& out, const Tensors& d) {
        EXPECT_EQ(in.size(), 3U);
        EXPECT_EQ(variables.size(), 1U);
        EXPECT_EQ(out.size(), 1U);
        return regrad::CustomGradients{{d[0].mm(variables[0].t()), d[0].mm(in[2].t()), in[1].t().mm(d[0])},
                                       {in[0].t().mm(d[0])}};
      });
  expect_like_plain(
      leaves, [&] { return Tensors{fn(a, b, c)}; }, [&] { return Tensors{with_true_gradient(a, b, c)}; }, {1e-6});

  const auto with_constants = regrad::with_custom_grad(fn, [](const Tensors& in, const Tensors& variables,
                                                              const Tensors&, const Tensors&) {
    return regrad::CustomGradients{{torch::ones_like(in[0]), torch::full_like(in[1], 2), torch::full_like(in[2], 3)},
                                   {torch::full_like(variables[0], 4)}};
  });
  with_constants(a, b, c).sum().backward();
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(leaves[i].grad().equal(torch::full_like(leaves[i], static_cast<double>(i + 1)))) << "tensor " << i;
  }
}

}  // namespace
