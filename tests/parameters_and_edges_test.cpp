// Which tensors get a gradient, and which: parameters, captured tensors, side inputs, hooks on them.

#include <ATen/record_function.h>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::recompute_grad;
using regrad::Residual;
using regrad::RevBlock;
using regrad::RevBlockOptions;
using regrad::SideInputs;
namespace nn = torch::nn;

namespace {

struct ParametersAndEdges : ::testing::Test {
  torch::Tensor x = (torch::manual_seed(3), leaf({4, 4}));
  torch::Tensor p = leaf({4, 4});
  torch::Tensor q = leaf({4, 4});
  torch::Tensor w = leaf({4});
  Tensors leaves{x, p, q, w};

  Residue product = [this](torch::Tensor t) { return t.mm(p).tanh(); };
  Residue scaled = [this](torch::Tensor t) { return (t * q + w).sin(); };
};

// --- C1

TEST_F(ParametersAndEdges, C1_InputWithoutGradTrainableRegion) {
  const auto data = x.detach();
  EXPECT_TRUE(recompute_grad(product)(data).requires_grad());
  expect_like_plain(
      leaves, [&] { return Tensors{product(data)}; }, [&] { return Tensors{recompute_grad(product)(data)}; });
}

TEST_F(ParametersAndEdges, C1_InputWithoutGradTrainableBlock) {
  const auto x1 = x.detach();
  const auto x2 = torch::randn({4, 4}, torch::kDouble);
  expect_block_like_plain(leaves, {product, scaled, product}, {scaled, scaled, product}, [&] {
    return Tensors{x1, x2};
  });
}

TEST_F(ParametersAndEdges, C1_OnlyOneFunctionIsTrainable) {
  const auto x1 = x.detach();
  const auto x2 = torch::randn({4, 4}, torch::kDouble);
  const Residue fixed = [](torch::Tensor t) { return t.sin(); };
  expect_block_like_plain(leaves, {fixed, product, fixed}, {fixed, fixed, fixed}, [&] { return Tensors{x1, x2}; });
  expect_block_like_plain(leaves, {fixed, fixed, fixed}, {fixed, fixed, product}, [&] { return Tensors{x1, x2}; });
  expect_block_like_plain(leaves, {fixed, fixed}, {fixed, fixed}, [&] { return Tensors{x1, x2}; });
  expect_block_like_plain(leaves, {fixed, fixed}, {fixed, fixed}, [&] { return Tensors{x1, x}; });
  expect_block_like_plain(leaves, {fixed, fixed}, {fixed, fixed}, [&] { return Tensors{x, x2}; });
}

TEST_F(ParametersAndEdges, C1_IdsThroughAFrozenEmbedding) {
  const auto table = torch::randn({10, 4}, torch::kDouble);
  const auto ids = torch::randint(10, {4}, torch::kLong);
  const auto embed = [&] { return torch::embedding(table, ids); };
  expect_block_like_plain(leaves, {product, scaled}, {scaled, product}, [&] { return Tensors{embed(), embed() * 2}; });
  const auto f = [&](torch::Tensor t) { return product(torch::embedding(table, t)); };
  expect_like_plain(
      leaves, [&] { return Tensors{f(ids)}; }, [&] { return Tensors{recompute_grad(f)(ids)}; });
}

TEST_F(ParametersAndEdges, C1_IdsThroughATrainableEmbedding) {
  const auto ids = torch::randint(4, {6}, torch::kLong);
  const auto f = [&](torch::Tensor t) { return torch::embedding(p, t).mm(q); };
  expect_like_plain(
      leaves, [&] { return Tensors{f(ids)}; }, [&] { return Tensors{recompute_grad(f)(ids)}; });
}

// --- C2

TEST_F(ParametersAndEdges, C2_EveryParameterAfterAStep) {
  // Nets 0 to 5 are f of the layers, 6 to 11 are g; 12 is before the block and 13 after it.
  using BlockProgram = std::function<Tensors(torch::Tensor, torch::Tensor, const Residues&, const Residues&)>;
  const auto train = [](const BlockProgram& streams) {
    torch::manual_seed(4);
    nn::ModuleList nets;
    for (int i = 0; i < 12; ++i) nets->push_back(nn::Sequential(nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 8)));
    nets->push_back(nn::Linear(16, 16));
    nets->push_back(nn::Linear(16, 1));
    nets->to(torch::kDouble);
    Residues f, g;
    for (size_t i = 0; i < 6; ++i) {
      f.push_back([net = nets->ptr<nn::SequentialImpl>(i)](torch::Tensor t) { return net->forward(t); });
      g.push_back([net = nets->ptr<nn::SequentialImpl>(i + 6)](torch::Tensor t) { return net->forward(t); });
    }
    torch::optim::SGD optimizer(nets->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto x = nets->ptr<nn::LinearImpl>(12)->forward(torch::randn({8, 16}, torch::kDouble)).chunk(2, 1);
      const auto y = nets->ptr<nn::LinearImpl>(13)->forward(torch::cat(streams(x[0], x[1], f, g), 1));
      y.pow(2).mean().backward();
      for (const auto& item : nets->named_parameters()) {
        EXPECT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_GT(item.value().grad().abs().max().item<double>(), 0) << item.key();
      }
      optimizer.step();
    }
    Tensors result;
    for (const auto& parameter : nets->parameters()) {
      result.push_back(parameter.detach().clone());
      result.push_back(parameter.grad().clone());
    }
    return result;
  };
  const Tensors expected = train(plain_block);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    const Tensors found = train([&](torch::Tensor x1, torch::Tensor x2, const Residues& f, const Residues& g) {
      RevBlock block = make_block(f, g, strategy.memory);
      return run_block(block, x1, x2);
    });
    expect_close(expected, found, strategy.tolerance);
  }
}

// --- C3

TEST_F(ParametersAndEdges, C3_CapturedLeafAlsoUsedOutside) {
  expect_like_plain(
      leaves,
      [&] {
        return Tensors{product(x) * p, p.exp()};
      },
      [&] {
        return Tensors{recompute_grad(product)(x) * p, p.exp()};
      },
      kRounding);
  expect_block_like_plain(
      leaves, {product, product}, {scaled, product},
      [&] {
        return Tensors{x * p, x};
      },
      kRounding,
      [&](Tensors y) {
        return Tensors{y[0] * p, y[1], p.exp()};
      });
}

TEST_F(ParametersAndEdges, C3_CapturedNonLeafAlsoUsedOutside) {
  const auto with = [](torch::Tensor h) { return Residue([h](torch::Tensor t) { return (t * h).tanh() + h; }); };
  expect_like_plain(
      leaves,
      [&] {
        const auto h = p * q;
        return Tensors{with(h)(x), h.sin()};
      },
      [&] {
        const auto h = p * q;
        return Tensors{recompute_grad(with(h))(x), h.sin()};
      },
      kRounding);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    const auto program = [&](auto streams) {
      return [&, streams] {
        const auto h = p * q;
        const auto y = streams(x, x * 2, Residues{with(h), with(h)}, Residues{scaled, with(h)});
        return Tensors{y[0], y[1], h.sin()};
      };
    };
    expect_like_plain(leaves, program(plain_block), program([&](auto a, auto b, Residues f, Residues g) {
                        RevBlock block = make_block(f, g, strategy.memory);
                        return run_block(block, a, b);
                      }),
                      at_least(strategy.tolerance, kRounding));
  }
}

TEST_F(ParametersAndEdges, C3_CapturedViewOfALeaf) {
  const auto f = [&](torch::Tensor t) { return t * p.select(0, 1) + p.t(); };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  const auto row = [&] { return p.select(0, 1); };  // the view is made outside
  expect_like_plain(
      leaves,
      [&] {
        const auto r = row();
        return Tensors{x * r};
      },
      [&] { return Tensors{recompute_grad([r = row()](torch::Tensor t) { return t * r; })(x)}; });
}

// --- C4

TEST_F(ParametersAndEdges, C4_OneTensorAsBothArguments) {
  const auto f = [&](torch::Tensor a, torch::Tensor b) { return a.mm(p) * b; };
  for (const bool as_leaf : {true, false}) {
    const auto input = [&] { return as_leaf ? x : x * q; };
    expect_like_plain(
        leaves,
        [&] {
          const auto h = input();
          return Tensors{f(h, h)};
        },
        [&] {
          const auto h = input();
          return Tensors{recompute_grad(f)(h, h)};
        },
        kRounding);
    expect_block_like_plain(
        leaves, {product, scaled}, {scaled, product},
        [&] {
          const auto h = input();
          return Tensors{h, h};
        },
        kRounding);
  }
}

TEST_F(ParametersAndEdges, C4_OneTensorInBothSideListsAndAsAStream) {
  const auto with_side = [](torch::Tensor t, const Tensors& side) { return (t * side[0]).sin() + side[1]; };
  const auto plain = [&](torch::Tensor x1, torch::Tensor x2, torch::Tensor s, torch::Tensor r) {
    for (int i = 0; i < 3; ++i) {
      x1 = x1 + with_side(x2, {s, r});
      x2 = x2 + with_side(x1, {r, s});
    }
    return Tensors{x1, x2};
  };
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(3).f(Residual(with_side)).g(Residual(with_side)).memory(strategy.memory));
    const auto tolerance = at_least(strategy.tolerance, kRounding);
    expect_like_plain(
        leaves, [&] { return plain(x, q, p, p); },
        [&] {
          return run_block(block, x, q, {.f = {p, p}, .g = {p, p}});
        },
        tolerance);
    expect_like_plain(
        leaves,
        [&] {
          const auto h = p * q;
          return plain(x, h, p, h);
        },
        [&] {
          const auto h = p * q;
          return run_block(block, x, h, {.f = {p, h}, .g = {h, p}});
        },
        tolerance);
    expect_like_plain(
        leaves, [&] { return plain(x, x, x, x); },
        [&] {
          return run_block(block, x, x, {.f = {x, x}, .g = {x, x}});
        },
        tolerance);
  }
}

// --- C5

TEST_F(ParametersAndEdges, C5_SideInputsOfAllKinds) {
  const auto constant = torch::randn({4, 4}, torch::kDouble);
  const auto mask = torch::rand({4, 4}) > 0.5;
  const auto ids = torch::randint(4, {4}, torch::kLong);
  const auto f = [](torch::Tensor t, const Tensors& side) {
    EXPECT_EQ(side.size(), 5U);
    EXPECT_FALSE(side[4].defined());
    EXPECT_FALSE(side[1].requires_grad());
    return (t * side[0] + side[1]).masked_fill(side[2], 0.5).index_select(1, side[3]).tanh();
  };
  const Tensors side{p, constant, mask, ids, torch::Tensor()};
  expect_like_plain(
      leaves, [&] { return Tensors{f(x, side)}; }, [&] { return Tensors{recompute_grad(f)(x, side)}; });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(2).f(Residual(f)).g(scaled).memory(strategy.memory));
    expect_like_plain(
        leaves,
        [&] {
          auto x1 = x * 1, x2 = x * 2;
          for (int i = 0; i < 2; ++i) {
            x1 = x1 + f(x2, side);
            x2 = x2 + scaled(x1);
          }
          return Tensors{x1, x2};
        },
        [&] { return run_block(block, x * 1, x * 2, {.f = side}); }, at_least(strategy.tolerance, kRounding));
  }
}

// --- C6

TEST_F(ParametersAndEdges, C6_ArgmaxBesideTheValue) {
  const auto f = [&](torch::Tensor t) {
    const auto y = t.mm(p).tanh();
    return std::make_tuple(y, y.argmax(1));
  };
  const auto region = recompute_grad(f);
  expect_like_plain(
      leaves,
      [&] {
        const auto [y, i] = f(x);
        return Tensors{y, i};
      },
      [&] {
        const auto [y, i] = region(x);
        return Tensors{y, i};
      });
  expect_like_plain(
      leaves, [&] { return Tensors{std::get<0>(f(x))}; }, [&] { return Tensors{std::get<0>(region(x))}; });
  const auto index_alone = std::get<1>(region(x));
  EXPECT_FALSE(index_alone.requires_grad());
  EXPECT_EQ(index_alone.scalar_type(), torch::kLong);
}

TEST_F(ParametersAndEdges, C6_UnusedOutputCallsNoHooks) {
  // y reaches p alone and z reaches q alone: the hooks of what is not used must not be called.
  const auto f = [&](torch::Tensor t) { return std::make_tuple(t.mm(p), t * q); };
  const auto region = recompute_grad(f);
  int p_calls = 0, q_calls = 0;
  p.register_hook([&](torch::Tensor) { ++p_calls; });
  q.register_hook([&](torch::Tensor gradient) {
    ++q_calls;
    return gradient * 10;
  });
  std::get<0>(region(x)).sum().backward();
  EXPECT_EQ(p_calls, 1);
  EXPECT_EQ(q_calls, 0);
  EXPECT_FALSE(q.grad().defined());
  std::get<1>(region(x)).sum().backward();
  EXPECT_EQ(p_calls, 1);
  EXPECT_EQ(q_calls, 1);
}

// --- C7

TEST_F(ParametersAndEdges, C7_LossOnOneStream) {
  for (const size_t stream : {0U, 1U}) {
    expect_block_like_plain(
        leaves, {product, scaled, product}, {scaled, product, scaled},
        [&] {
          return Tensors{x, x * 2};
        },
        {}, [&](Tensors y) { return Tensors{y[stream]}; });
  }
}

TEST_F(ParametersAndEdges, C7_FunctionsThatIgnoreTheirInput) {
  const Residue of_parameter = [&](torch::Tensor) { return p * q; };
  const Residue the_parameter = [&](torch::Tensor) { return p; };
  const Residue constant = [](torch::Tensor t) { return torch::full_like(t, 0.5); };
  const Residue identity = [](torch::Tensor t) { return t; };
  for (const Residue& odd : {of_parameter, the_parameter, constant, identity}) {
    const auto start = [&] { return Tensors{x, x * 2}; };
    expect_block_like_plain(leaves, {odd, product}, {scaled, odd}, start, kRounding);
    expect_block_like_plain(leaves, {odd, odd}, {odd, odd}, start, kRounding);
    expect_block_like_plain(leaves, {product, product}, {odd, odd}, start, kRounding,
                            [](Tensors y) { return Tensors{y[0]}; });
    expect_block_like_plain(leaves, {odd, odd}, {product, product}, start, kRounding,
                            [](Tensors y) { return Tensors{y[1]}; });
    expect_like_plain(
        leaves, [&] { return Tensors{odd(x * 1)}; }, [&] { return Tensors{recompute_grad(odd)(x * 1)}; });
  }
}

TEST_F(ParametersAndEdges, C7_ASideInputThatNoFunctionUsesCallsNoHooks) {
  const auto unused = leaf({4}) * 1;
  int fired = 0;
  unused.register_hook([&](const torch::Tensor& gradient) {
    ++fired;
    return gradient * 10;
  });
  const auto f = [](const torch::Tensor& t, const std::vector<torch::Tensor>&) { return t.sin(); };
  for (const auto& memory : {regrad::Memory::store(), regrad::Memory::recompute(1), regrad::Memory::reverse()}) {
    regrad::RevBlock block(regrad::RevBlockOptions(2).f(f).g(f).memory(memory));
    const auto [y1, y2] = block->forward(x, x * 2, {.f = {unused}, .g = {unused}});
    (y1 + y2).sum().backward();
  }
  EXPECT_EQ(fired, 0);
}

TEST_F(ParametersAndEdges, C7_ParameterUsedUnderNoGradAlone) {
  const Residue f = [&](torch::Tensor t) {
    torch::Tensor scale;
    {
      const torch::NoGradGuard no_grad;
      scale = p.abs().max();
    }
    return t * scale + w;
  };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  expect_block_like_plain(
      leaves, {f, product}, {scaled, f},
      [&] {
        return Tensors{x, x * 2};
      },
      kRounding);
}

// --- C8

TEST_F(ParametersAndEdges, C8_SharedParameterHookFiresOnceWithTheSum) {
  for (const bool ours : {false, true}) {
    SCOPED_TRACE(ours ? "regrad" : "plain");
    int calls = 0;
    torch::Tensor seen;
    const auto hook = p.register_hook([&](torch::Tensor gradient) {
      ++calls;
      seen = gradient.clone();
    });
    const Residue region = ours ? Residue(recompute_grad(product)) : product;
    (region(region(x)) * p).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(seen.equal(p.grad()));
    p.remove_hook(hook);
    take_gradients(leaves);
  }
}

TEST_F(ParametersAndEdges, C8_SharedParameterOfABlockHookFiresOnce) {
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    int calls = 0;
    torch::Tensor seen;
    const auto hook = p.register_hook([&](torch::Tensor gradient) {
      ++calls;
      seen = gradient.clone();
    });
    RevBlock block = make_block({product, product}, {product, product}, strategy.memory);
    const auto y = run_block(block, x, x * 2);
    (y[0] + y[1] * p).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(seen.equal(p.grad()));
    p.remove_hook(hook);
    take_gradients(leaves);
  }
}

TEST_F(ParametersAndEdges, C8_AutogradGradLeavesEveryGradAlone) {
  for (auto& t : leaves) t.mutable_grad() = torch::full_like(t, 7);
  const auto untouched = [&] {
    for (const auto& t : leaves) EXPECT_TRUE(t.grad().equal(torch::full_like(t, 7)));
  };
  const auto region = recompute_grad(product);
  const auto expected = torch::autograd::grad({(product(product(x)) * q).sum()}, {x, p});
  const auto found = torch::autograd::grad({(region(region(x)) * q).sum()}, {x, p});
  expect_close(expected, found, kRounding);
  untouched();
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({product, scaled}, {scaled, product}, strategy.memory);
    const auto plain = plain_block(x, x * 2, {product, scaled}, {scaled, product});
    const auto ours = run_block(block, x, x * 2);
    for (const auto& wanted : {Tensors{p}, Tensors{x}, Tensors{w, q}, leaves}) {
      expect_close(torch::autograd::grad({plain[0].sum() + plain[1].sin().sum()}, wanted, {}, true),
                   torch::autograd::grad({ours[0].sum() + ours[1].sin().sum()}, wanted, {}, true),
                   at_least(strategy.tolerance, kRounding));
      untouched();
    }
  }
}

TEST_F(ParametersAndEdges, C8_BackwardWithInputsReachesThemAlone) {
  RevBlock block = make_block({product, scaled}, {scaled, product});
  const auto plain = plain_block(x, x * 2, {product, scaled}, {scaled, product});
  torch::autograd::backward({plain[1].sum()}, {}, false, false, {w, x});
  const Tensors expected = take_gradients(leaves);
  const auto ours = run_block(block, x, x * 2);
  torch::autograd::backward({ours[1].sum()}, {}, false, false, {w, x});
  expect_close(expected, take_gradients(leaves), {1e-12});
}

// --- C9

TEST_F(ParametersAndEdges, C9_HookThatScalesAndRetainGrad) {
  // The same program with each hook, plain and ours: the gradients, also of non-leaves, must agree.
  const auto program = [&](std::function<Tensors(torch::Tensor, torch::Tensor, torch::Tensor)> f) {
    const auto captured = p * q;
    const auto side = q.sin();
    const auto input = x * 2;
    const auto ten = [](torch::Tensor gradient) { return gradient * 10; };
    for (const auto& t : {captured, side, input}) {
      t.retain_grad();
      t.register_hook(ten);
    }
    const auto hook = w.register_hook(ten);
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (const auto& y : f(input, captured, side)) loss = loss + y.sin().sum();
    loss.backward();
    w.remove_hook(hook);
    Tensors result = take_gradients(leaves);
    for (const auto& t : {captured, side, input}) result.push_back(t.grad());
    return result;
  };
  const auto f = [&](torch::Tensor t, torch::Tensor captured, torch::Tensor side) {
    return (t * captured + w).tanh() * side;
  };
  expect_close(program([&](auto t, auto c, auto s) { return Tensors{f(t, c, s)}; }),
               program([&](auto t, auto c, auto s) {
                 return Tensors{recompute_grad([=](torch::Tensor a, torch::Tensor b) { return f(a, c, b); })(t, s)};
               }));
  const auto expected = program([&](auto t, auto c, auto s) {
    const Residue residue = [=](torch::Tensor a) { return f(a, c, s); };
    return plain_block(t, t, {residue, residue}, {residue, residue});
  });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    const auto found = program([&](auto t, auto c, auto s) {
      const auto residue = [=](torch::Tensor a, const Tensors& side) { return f(a, c, side[0]); };
      RevBlock block(RevBlockOptions(2).f(Residual(residue)).g(Residual(residue)).memory(strategy.memory));
      return run_block(block, t, t, {.f = {s}, .g = {s}});
    });
    expect_close(expected, found, at_least(strategy.tolerance, kRounding));
  }
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  std::vector<torch::Tensor>& seen;
  explicit CountingHook(std::vector<torch::Tensor>& s) : seen(s) {}
  void operator()(const torch::autograd::Variable& tensor) override { seen.push_back(tensor.grad().clone()); }
};

TEST_F(ParametersAndEdges, C9_PostAccumulateHookOnceWithTheFinalGradient) {
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    std::vector<torch::Tensor> seen;
    torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<CountingHook>(seen));
    RevBlock block = make_block({product, product}, {scaled, product}, strategy.memory);
    const auto y = run_block(block, x, x * 2);
    (y[0] + recompute_grad(product)(y[1])).sum().backward();
    ASSERT_EQ(seen.size(), 1U);
    EXPECT_TRUE(seen[0].equal(p.grad()));
    take_gradients(leaves);
    torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
  }
}

// --- C10

/// x * w with a kernel that autograd does not see.
struct RawProduct : torch::autograd::Function<RawProduct> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& w) {
    context->save_for_backward({x, w});
    auto y = torch::empty(x.sizes(), x.options());
    const auto a = x.contiguous(), b = w.contiguous();
    const double* p = a.const_data_ptr<double>();
    const double* q = b.const_data_ptr<double>();
    double* out = y.mutable_data_ptr<double>();
    for (int64_t i = 0; i < x.numel(); ++i) out[i] = p[i] * q[i];
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

TEST_F(ParametersAndEdges, C10_CustomFunctionWithARawKernel) {
  const Residue f = [&](torch::Tensor t) { return RawProduct::apply(t, p).tanh(); };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  expect_block_like_plain(
      leaves, {f, product, f}, {scaled, f, f},
      [&] {
        return Tensors{x, x * 2};
      },
      kRounding);
}

TEST_F(ParametersAndEdges, C10_UnderADisabledRecordFunction) {
  const Residue f = [&](torch::Tensor t) {
    const at::DisableRecordFunctionGuard disabled;
    return RawProduct::apply(t.mm(p), q).tanh() + w;
  };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  expect_block_like_plain(
      leaves, {f, product, f}, {scaled, f, f},
      [&] {
        return Tensors{x, x * 2};
      },
      kRounding);
}

TEST_F(ParametersAndEdges, C10_PartOfTheFunctionIsNotRecorded) {
  // A tensor that is made where no callback sees it is still the function's own.
  const Residue f = [&](torch::Tensor t) {
    torch::Tensor h;
    {
      const at::DisableRecordFunctionGuard disabled;
      h = t * p;
    }
    h.add_(w);
    return h.sin();
  };
  expect_like_plain(
      leaves, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  expect_block_like_plain(
      leaves, {f, product}, {scaled, f},
      [&] {
        return Tensors{x, x * 2};
      },
      kRounding);
}

// --- C11

TEST_F(ParametersAndEdges, C11_ParameterMadeOnEachCall) {
  const auto f = [](torch::Tensor t) { return t.mm(torch::ones({4, 4}, torch::kDouble).requires_grad_()); };
  const auto y = recompute_grad(f)(x);
  expect_error(ErrorKind::variables_differ, {"only in forward", "only in backward", "Double[4, 4]"},
               [&] { y.sum().backward(); });
  for (const Memory memory : {Memory::reverse(), Memory::recompute(2)}) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({product, product, product}, {product, f, product}, memory);
    const auto streams = run_block(block, x, x * 2);
    expect_error(ErrorKind::variables_differ, {"layers.1.g", "Double[4, 4]"}, [&] { streams[0].sum().backward(); });
  }
}

TEST_F(ParametersAndEdges, C11_AnotherParameterOfAModuleIsNamed) {
  struct AlternatingImpl : nn::Module {
    torch::Tensor even = register_parameter("even", torch::ones({4}, torch::kDouble));
    torch::Tensor odd = register_parameter("odd", torch::ones({4}, torch::kDouble));
    int calls = 0;
    torch::Tensor forward(torch::Tensor t) { return t * (calls++ % 2 == 0 ? even : odd); }
  };
  const auto module = std::make_shared<AlternatingImpl>();
  const auto y = recompute_grad(module)(x);
  expect_error(ErrorKind::variables_differ, {"only in forward: parameter even", "only in backward: parameter odd"},
               [&] { y.sum().backward(); });
  RevBlock block(RevBlockOptions(1).f(std::make_shared<AlternatingImpl>()).g(scaled));
  const auto streams = run_block(block, x, x * 2);
  expect_error(ErrorKind::variables_differ, {"layers.0.f", "even", "odd"}, [&] { streams[0].sum().backward(); });
}

}  // namespace
