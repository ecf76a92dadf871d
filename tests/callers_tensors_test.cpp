// The caller's tensors are the caller's: nothing that regrad keeps or does shows in them.

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::recompute_grad;
using regrad::RevBlock;
namespace nn = torch::nn;

namespace {

struct CallersTensors : ::testing::Test {
  torch::Tensor x = (torch::manual_seed(3), leaf({4, 4}));
  torch::Tensor p = leaf({4, 4});
  torch::Tensor q = leaf({4, 4});
  Tensors leaves{x, p, q};

  Residue f = [this](torch::Tensor t) { return t.mm(p).tanh(); };
  Residue g = [this](torch::Tensor t) { return (t * q).sin(); };
  Residues fs{f, g, f}, gs{g, f, g};

  /// A program that is given a function of one tensor: f plainly and as a region; two streams in and out: plain_block
  /// and a block under every strategy.
  void check_region(const std::function<Tensors(Residue)>& program, Tolerance tolerance = kRounding) {
    SCOPED_TRACE("region");
    expect_like_plain(
        leaves, [&] { return program(f); }, [&] { return program(recompute_grad(f)); }, tolerance);
  }
  using Streams = std::function<Tensors(torch::Tensor, torch::Tensor)>;
  void check_block(const std::function<Tensors(Streams)>& program) {
    for (const Strategy& strategy : kStrategies) {
      SCOPED_TRACE(strategy.memory.to_string());
      RevBlock block = make_block(fs, gs, strategy.memory);
      expect_like_plain(
          leaves, [&] { return program([&](torch::Tensor a, torch::Tensor b) { return plain_block(a, b, fs, gs); }); },
          [&] { return program([&](torch::Tensor a, torch::Tensor b) { return run_block(block, a, b); }); },
          at_least(strategy.tolerance, kRounding));
    }
  }
};

// --- C18

TEST_F(CallersTensors, C18_InputsAreReadAndSavedByOthersAfterForward) {
  check_region([&](Residue r) {
    const auto h = x * 1;
    const auto before = h.exp();  // saves its result
    const auto y = r(h);
    return Tensors{y, before, h * h, h.sin()};
  });
  check_block([&](Streams s) {
    const auto x1 = x * 1, x2 = x.sin();
    const auto before = x1 * x2;
    const auto y = s(x1, x2);
    return Tensors{y[0], y[1], before, x1 * x2 * y[0], x2.exp(), y[1] * y[1]};
  });
}

TEST_F(CallersTensors, C18_ReluOnBothSides) {
  for (const bool in_place : {true, false}) {
    const auto relu = [in_place](torch::Tensor t) { return in_place ? t.relu_() : t.relu(); };
    SCOPED_TRACE(in_place ? "in place" : "not in place");
    // Functions that save neither what they read nor what they return, so that plain allows both in place.
    const Residue adds = [this](torch::Tensor t) { return (t + p).sin() + q; };
    const auto region_program = [&](Residue r) { return Tensors{relu(r(relu(x * 1)))}; };
    expect_like_plain(
        leaves, [&] { return region_program(adds); }, [&] { return region_program(recompute_grad(adds)); }, kRounding);
    expect_block_like_plain(
        leaves, {adds, adds}, {adds, adds},
        [&] {
          return Tensors{relu(x * 1), relu(x * -1)};
        },
        kRounding,
        [&](Tensors y) {
          return Tensors{relu(y[0]), relu(y[1])};
        });
  }
}

TEST_F(CallersTensors, C18_InPlaceOnAnInputAfterForward) {
  // In plain, too, nothing has saved these inputs as they were: t + p saves nothing, and a copy is saved by t.mm.
  const Residue adds = [this](torch::Tensor t) { return (t + p).sin(); };
  const auto program = [&](Residue r) {
    const auto h = x * 1;
    const auto y = r(h);
    h.mul_(5);
    return Tensors{y, h};
  };
  expect_like_plain(
      leaves, [&] { return program(adds); }, [&] { return program(recompute_grad(adds)); }, kRounding);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({adds, adds}, {adds, adds}, strategy.memory);
    const auto block_program = [&](Streams s) {
      const auto x1 = x * 1, x2 = x * 2;
      const auto y = s(x1, x2);
      x1.mul_(5);
      x2.zero_();
      return Tensors{y[0], y[1], x1, x2};
    };
    expect_like_plain(
        leaves,
        [&] { return block_program([&](auto a, auto b) {
                return plain_block(a, b, {adds, adds}, {adds, adds});
              }); },
        [&] { return block_program([&](auto a, auto b) { return run_block(block, a, b); }); },
        at_least(strategy.tolerance, kRounding));
  }
}

TEST_F(CallersTensors, C18_InPlaceOnAnOutput) {
  const Residue adds = [this](torch::Tensor t) { return (t + p).sin().sum(0, true).expand({4, 4}) + q; };
  const auto program = [](Residue r, torch::Tensor t) {
    auto y = r(t * 1);
    y.mul_(3).add_(t);
    y.select(0, 1).mul_(2);
    return Tensors{y};
  };
  expect_like_plain(
      leaves, [&] { return program(adds, x); }, [&] { return program(recompute_grad(adds), x); }, kRounding);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({adds, adds}, {adds, adds}, strategy.memory);
    const auto block_program = [&](Streams s) {
      const auto y = s(x * 1, x * 2);
      y[0].mul_(3).add_(x);
      y[1].select(0, 1).zero_();
      return Tensors{y[0], y[1]};
    };
    expect_like_plain(
        leaves,
        [&] { return block_program([&](auto a, auto b) {
                return plain_block(a, b, {adds, adds}, {adds, adds});
              }); },
        [&] { return block_program([&](auto a, auto b) { return run_block(block, a, b); }); },
        at_least(strategy.tolerance, kRounding));
  }
}

TEST_F(CallersTensors, C18_InPlaceUnderNoGradOnInputsAndOutputs) {
  // Writes by way of detach(), after forward: what regrad keeps is its own.
  const auto region = recompute_grad(f);
  const auto expected = torch::autograd::grad({region(x * 1).sum()}, leaves, {}, false, false, true);
  {
    const auto h = x * 1;
    const auto y = region(h);
    h.detach().zero_();
    y.detach().zero_();
    expect_close(expected, torch::autograd::grad({y.sum()}, leaves, {}, false, false, true));
  }
  for (const Memory memory : {Memory::recompute(1), Memory::recompute(2), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block(fs, gs, memory);
    const auto gradients = [&](bool write) {
      const auto x1 = x * 1, x2 = x * 2;
      const auto y = run_block(block, x1, x2);
      const auto loss = y[0].sum() + y[1].sum();
      if (write) {
        for (const auto& t : {x1, x2, y[0], y[1]}) t.detach().fill_(100);
      }
      return torch::autograd::grad({loss}, leaves, {}, false, false, true);
    };
    expect_close(gradients(false), gradients(true));
  }
}

TEST_F(CallersTensors, C18_HalvesOfOneTensor) {
  const auto wide = leaf({4, 8});
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    const auto program = [&](Streams s) {
      const auto whole = wide * 1;
      const auto parts = whole.chunk(2, 1);
      const auto y = s(parts[0], parts[1]);
      whole.add_(1);
      return Tensors{torch::cat(y, 1), whole};
    };
    const Residue adds = [this](torch::Tensor t) { return (t + p).sin(); };
    RevBlock adding = make_block({adds, adds}, {adds, adds}, strategy.memory);
    expect_like_plain(
        {wide, p},
        [&] { return program([&](auto a, auto b) {
                return plain_block(a, b, {adds, adds}, {adds, adds});
              }); },
        [&] { return program([&](auto a, auto b) { return run_block(adding, a, b); }); },
        at_least(strategy.tolerance, kRounding));
  }
}

// --- C19

TEST_F(CallersTensors, C19_ResidualAroundTheBlock) {
  check_region([&](Residue r) { return Tensors{x + r(x), r(x + r(x * 2))}; });
  check_block([&](Streams s) {
    const auto y = s(x, x * 2);
    return Tensors{x + y[0], x * 2 + y[1]};
  });
}

TEST_F(CallersTensors, C19_TheSameBlockTwiceInOneGraph) {
  check_block([&](Streams s) {
    const auto y = s(x, x * 2);
    const auto z = s(y[1], y[0]);
    return Tensors{y[0], z[0], z[1]};
  });
  check_block([&](Streams s) {  // side by side
    const auto y = s(x, x * 2);
    const auto z = s(x * 2, x);
    return Tensors{y[0] * z[0], z[1]};
  });
}

/// Gradients of the leaves after each of two retained backwards and the third that frees the graph; then a fourth.
template <class Forward>
void check_retained(const Tensors& leaves, Forward forward) {
  take_gradients(leaves);
  const torch::Tensor loss = forward();
  loss.backward({}, /*retain_graph=*/true);
  Tensors once;
  for (const auto& t : leaves) once.push_back(t.grad().clone());
  loss.backward({}, /*retain_graph=*/true);
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(leaves[i].grad().equal(once[i] * 2)) << "leaf " << i;
  loss.backward();
  try {
    loss.backward();
    ADD_FAILURE() << "a backward through a freed graph";
  } catch (const regrad::Error& error) {
    ADD_FAILURE() << "Torch's own error was expected, not: " << error.msg();
  } catch (const c10::Error& error) {
    EXPECT_NE(error.msg().find("backward through the graph a second time"), std::string::npos) << error.msg();
  }
  take_gradients(leaves);
}

TEST_F(CallersTensors, C19_RetainedBackwards) {
  const auto region = recompute_grad(f);
  check_retained(leaves, [&] { return (region(region(x)) * q).sum(); });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block(fs, gs, strategy.memory);
    check_retained(leaves, [&] {
      const auto y = run_block(block, x, x * 2);
      return (y[0] * y[1]).sum();
    });
    check_retained(leaves, [&] {
      const auto y = run_block(block, x, x * 2);
      return y[1].sum();
    });
  }
}

TEST_F(CallersTensors, C19_TwoLossesOnOneGraph) {
  const auto gradients = [&](Streams s) {
    take_gradients(leaves);
    const auto y = s(x, x * 2);
    const auto first = y[0].sum(), second = y[1].pow(2).sum();
    first.backward({}, true);
    Tensors result;
    for (const auto& t : leaves) result.push_back(t.grad().clone());
    second.backward();
    for (const auto& t : take_gradients(leaves)) result.push_back(t);
    return result;
  };
  const auto expected = gradients([&](auto a, auto b) { return plain_block(a, b, fs, gs); });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block(fs, gs, strategy.memory);
    expect_close(expected, gradients([&](auto a, auto b) { return run_block(block, a, b); }),
                 at_least(strategy.tolerance, kRounding));
  }
  check_region([&](Residue r) {
    const auto h = x * 1;
    return Tensors{r(h), r(h) * q};
  });
}

// --- Contract, clause 7

struct Marks {
  const void* data;
  size_t bytes;
  int64_t version;
  bool requires_grad, is_leaf;
  torch::autograd::Node* node;

  explicit Marks(const torch::Tensor& t)
      : data(t.storage().data()),
        bytes(t.storage().nbytes()),
        version(t._version()),
        requires_grad(t.requires_grad()),
        is_leaf(t.is_leaf()),
        node(t.grad_fn().get()) {}
  bool operator==(const Marks&) const = default;
};

TEST_F(CallersTensors, Clause7_InputsAreNeverTouched) {
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    auto x1 = x * 1, side = q * 1;
    const auto x2 = torch::randn({4, 4}, torch::kDouble);
    const Tensors values{x1.detach().clone(), x2.clone(), side.detach().clone()};
    const std::vector<Marks> before{Marks(x1), Marks(x2), Marks(side)};
    const auto with_side = [this](torch::Tensor t, const Tensors& s) { return (t * p + s[0]).tanh(); };
    RevBlock block(regrad::RevBlockOptions(3).f(regrad::Residual(with_side)).g(g).memory(strategy.memory));
    const auto y = run_block(block, x1, x2, {.f = {side}});
    const Tensors y_values{y[0].detach().clone(), y[1].detach().clone()};
    const std::vector<Marks> y_before{Marks(y[0]), Marks(y[1])};
    (y[0].sum() + y[1].sum() + recompute_grad(with_side)(x1, Tensors{side}).sum()).backward();
    EXPECT_TRUE((std::vector<Marks>{Marks(x1), Marks(x2), Marks(side)} == before));
    EXPECT_TRUE((std::vector<Marks>{Marks(y[0]), Marks(y[1])} == y_before));
    expect_close(values, {x1.detach(), x2, side.detach()});
    expect_close(y_values, {y[0].detach(), y[1].detach()});
  }
}

TEST_F(CallersTensors, Clause7_FunctionThatWritesItsInputIsRefused) {
  const std::vector<Residue> writers{
      [](torch::Tensor t) { return t.relu_(); },
      [](torch::Tensor t) {
        t.select(0, 0).zero_();
        return t * 2;
      },
      [](torch::Tensor t) {
        t.detach().mul_(2);
        return t * 2;
      },
      [](torch::Tensor t) {
        const torch::NoGradGuard no_grad;
        t.add_(1);
        return t * 2;
      },
  };
  for (size_t i = 0; i < writers.size(); ++i) {
    SCOPED_TRACE(i);
    const auto h = x * 1;
    const auto values = h.detach().clone();
    const auto version = h._version();
    const auto untouched = [&] {
      EXPECT_TRUE(h.equal(values));
      EXPECT_EQ(h._version(), version);
    };
    expect_error(ErrorKind::input_modified, {"input 0", "Double[4, 4]", "in place"},
                 [&] { recompute_grad(writers[i])(h); });
    untouched();
    for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
      SCOPED_TRACE(memory.to_string());
      RevBlock first = make_block({writers[i]}, {g}, memory);
      expect_error(ErrorKind::input_modified, {"layers.0.f", "in place"}, [&] { run_block(first, h, h); });
      untouched();
      RevBlock later = make_block({f, f}, {g, writers[i]}, memory);
      expect_error(ErrorKind::input_modified, {"layers.1.g", "in place"}, [&] { run_block(later, h, h); });
      untouched();
    }
    // Where nothing is rebuilt, the function is given the caller's own tensor, as in plain: refused all the same.
    for (const bool grad : {true, false}) {
      SCOPED_TRACE(grad ? "store" : "no grad");
      const torch::AutoGradMode mode(grad);
      RevBlock block = make_block({f, f}, {g, writers[i]}, Memory::store());
      expect_error(ErrorKind::input_modified, {"layers.1.g", "in place"}, [&] { run_block(block, h * 1, h * 1); });
    }
  }
}

TEST_F(CallersTensors, Clause7_FunctionThatWritesASideInputIsRefused) {
  const auto writer = [](torch::Tensor t, const Tensors& side) {
    const torch::NoGradGuard no_grad;
    side[0].add_(1);
    return t * side[0];
  };
  auto side = torch::zeros({4}, torch::kDouble);
  expect_error(ErrorKind::input_modified, {"in place"}, [&] { recompute_grad(writer)(x, Tensors{side}); });
  EXPECT_TRUE(side.equal(torch::zeros({4}, torch::kDouble)));
  for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block(regrad::RevBlockOptions(2).f(g).g(regrad::Residual(writer)).memory(memory));
    expect_error(ErrorKind::input_modified, {"layers.0.g", "in place"}, [&] { run_block(block, x, x, {.g = {side}}); });
    EXPECT_TRUE(side.equal(torch::zeros({4}, torch::kDouble)));
  }
}

TEST_F(CallersTensors, Clause7_OutputsThatShareMemory) {
  // The caller's write would lose a gradient silently: Torch's error, or plain's result.
  const auto like_plain_or_error = [&](const std::function<Residue(torch::Tensor captured)>& make) {
    const auto program = [&](bool ours) {
      return [&, ours] {
        const auto h = x * 1, captured = p * 1;
        const Residue function = make(captured);
        torch::Tensor y = ours ? recompute_grad(function)(h) : function(h);
        y.mul_(3);
        return Tensors{y, h * 1, captured * 1};
      };
    };
    const Outcome expected = run(leaves, program(false));
    try {
      const Outcome found = run(leaves, program(true));
      expect_close(expected.outputs, found.outputs);
      expect_close(expected.gradients, found.gradients, kRounding);
    } catch (const c10::Error& error) {
      EXPECT_NE(error.msg().find("view"), std::string::npos) << error.msg();
      take_gradients(leaves);
    }
  };
  like_plain_or_error([](torch::Tensor) { return [](torch::Tensor t) { return t; }; });
  like_plain_or_error([](torch::Tensor) { return [](torch::Tensor t) { return t.view({2, 8}); }; });
  like_plain_or_error([](torch::Tensor) { return [](torch::Tensor t) { return t.slice(0, 0, 2); }; });
  like_plain_or_error([](torch::Tensor) { return [](torch::Tensor t) { return t.detach(); }; });
  like_plain_or_error([](torch::Tensor c) { return [c](torch::Tensor) { return c; }; });
  like_plain_or_error([](torch::Tensor c) { return [c](torch::Tensor) { return c.view({2, 8}); }; });
}

TEST_F(CallersTensors, Clause7_ReturnedTensorsOfTheCallerAreThoseVeryTensors) {
  const auto h = x * 1;
  const auto region = recompute_grad([&](torch::Tensor t) { return std::make_tuple(t, p, t * 2); });
  const auto [same, parameter, product] = region(h);
  EXPECT_TRUE(same.is_same(h));
  EXPECT_TRUE(parameter.is_same(p));
  EXPECT_TRUE(product.equal(h * 2));
}

}  // namespace
