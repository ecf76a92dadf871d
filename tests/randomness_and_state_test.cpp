// What a function draws, changes and finds around it is in the replay as it was in forward, and nothing leaks out.

#include <ATen/autocast_mode.h>

#include "regrad/regrad.h"
#include "support/autocast.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::Pass;
using regrad::recompute_grad;
using regrad::Residual;
using regrad::RevBlock;
using regrad::RevBlockOptions;
namespace nn = torch::nn;

namespace {

Residue call(nn::Sequential net) {
  return [net](torch::Tensor t) mutable { return net->forward(t); };
}

Residues calls(const std::vector<nn::Sequential>& nets) {
  Residues result;
  for (const nn::Sequential& net : nets) result.push_back(call(net));
  return result;
}

void copy_back(const Tensors& from, const Tensors& to) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

/// f and g of each layer, and all that they own.
struct Nets {
  std::vector<nn::Sequential> f, g;
  Tensors parameters, buffers;

  Nets(int64_t layers, torch::Dtype dtype, const std::function<nn::Sequential()>& make) {
    for (int64_t i = 0; i < layers; ++i) {
      for (auto* list : {&f, &g}) {
        nn::Sequential net = make();
        net->to(dtype);
        for (const auto& t : net->parameters()) parameters.push_back(t);
        for (const auto& t : net->buffers()) buffers.push_back(t);
        list->push_back(net);
      }
    }
  }

  void train(bool on) {
    for (auto* list : {&f, &g}) {
      for (auto& net : *list) net->train(on);
    }
  }
};

// --- C12

TEST(RandomnessAndState, C12_DropoutInFAndGDepth8) {
  torch::manual_seed(1);
  Nets nets(8, torch::kDouble,
            [] { return nn::Sequential(nn::Linear(8, 8), nn::Dropout(0.3), nn::Tanh(), nn::Dropout(0.1)); });
  const auto x1 = leaf({6, 8}), x2 = leaf({6, 8});
  Tensors leaves = nets.parameters;
  leaves.insert(leaves.end(), {x1, x2});
  expect_block_like_plain(leaves, calls(nets.f), calls(nets.g), [&] { return Tensors{x1, x2}; });
  for (const Strategy& strategy : kStrategies) {  // and as registered modules
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(8).f(nets.f).g(nets.g).memory(strategy.memory));
    expect_like_plain(
        leaves, [&] { return plain_block(x1, x2, calls(nets.f), calls(nets.g)); },
        [&] { return run_block(block, x1, x2); }, strategy.tolerance);
  }
  expect_like_plain(
      leaves, [&] { return Tensors{nets.f[0]->forward(nets.f[1]->forward(x1))}; },
      [&] { return Tensors{recompute_grad(nets.f[0])(recompute_grad(nets.f[1])(x1))}; });
}

TEST(RandomnessAndState, C12_GeneratorAfterBackwardIsAsPlainLeavesIt) {
  torch::manual_seed(1);
  const auto x = leaf({6, 8});
  const auto draws = [](torch::Tensor t) { return torch::dropout(t * torch::randn_like(t), 0.5, true); };
  const auto after = [&](auto program) {
    torch::manual_seed(9);
    const auto loss = program();
    const auto between = torch::rand({2});  // drawn by the caller, not by the replay
    loss.backward();
    return torch::cat({between, torch::rand({2}), torch::randn({3}).to(torch::kFloat)});
  };
  const auto expected = after([&] { return draws(x).sum() + draws(x).sum(); });
  const auto found = after([&] { return recompute_grad(draws)(x).sum() + recompute_grad(draws)(x).sum(); });
  EXPECT_TRUE(expected.equal(found));
  const auto expected_block = after([&] { return plain_block(x, x, {draws, draws}, {draws, draws})[0].sum(); });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({draws, draws}, {draws, draws}, strategy.memory);
    EXPECT_TRUE(expected_block.equal(after([&] { return run_block(block, x, x)[0].sum(); })));
  }
}

TEST(RandomnessAndState, C12_NormalsLeaveACachedValueBehind) {
  // An odd number of normal draws leaves one in the generator.
  const auto x = leaf({5});
  const auto f = [](torch::Tensor t) {
    return t * torch::randn({1}, torch::kDouble) * torch::normal(0.0, 1.0, {3}).sum();
  };
  expect_like_plain(
      {x},
      [&] {
        torch::randn({1});
        return Tensors{f(x), torch::randn({3})};
      },
      [&] {
        torch::randn({1});
        return Tensors{recompute_grad(f)(x), torch::randn({3})};
      });
}

TEST(RandomnessAndState, C12_AGeneratorOfTheUsersOwn) {
  const auto x = leaf({5, 4});
  auto generator = at::detail::createCPUGenerator(3);
  const Residue f = [&](torch::Tensor t) { return t * torch::rand({5, 4}, generator, torch::dtype(torch::kDouble)); };
  const auto program = [&](auto run) {
    return [&, run] {
      generator.set_current_seed(3);
      Tensors y = run();
      y.push_back(torch::rand({2}, generator));
      return y;
    };
  };
  expect_like_plain({x}, program([&] { return Tensors{f(f(x))}; }),
                    program([&] { return Tensors{recompute_grad(f)(recompute_grad(f)(x))}; }));
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({f, f}, {f, f}, strategy.memory);
    expect_like_plain({x}, program([&] {
                        return plain_block(x, x, {f, f}, {f, f});
                      }),
                      program([&] { return run_block(block, x, x); }), at_least(strategy.tolerance, kRounding));
  }
}

// --- C13

/// Three training steps; what they leave in gradients (of the last), parameters and buffers, and the buffers after
/// the first forward.
Tensors three_steps(Nets& nets, const Tensors& initial_parameters, const Tensors& initial_buffers,
                    const std::function<Tensors(torch::Tensor, torch::Tensor)>& streams) {
  copy_back(initial_parameters, nets.parameters);
  copy_back(initial_buffers, nets.buffers);
  Tensors result;
  torch::manual_seed(2);
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({2, 5, 4}, nets.parameters[0].options().requires_grad(false)) + step;
    const auto y = streams(x[0], x[1]);
    if (step == 0) {
      for (const auto& t : copies(nets.buffers)) result.push_back(t);
    }
    (y[0].pow(2).sum() + y[1].sin().sum()).backward();
    const Tensors gradients = take_gradients(nets.parameters);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < gradients.size(); ++i) nets.parameters[i].add_(gradients[i], -0.01);
    if (step == 2) result.insert(result.end(), gradients.begin(), gradients.end());
  }
  for (const auto& t : copies(nets.parameters)) result.push_back(t);
  for (const auto& t : copies(nets.buffers)) result.push_back(t);
  return result;
}

nn::Sequential add_to(const nn::Linear& linear, const nn::AnyModule& norm) {
  nn::Sequential net(linear);
  net->push_back(norm);
  net->push_back(nn::Tanh());
  return net;
}

/// Instance norm of a [channels, length] tensor.
struct InstanceNormImpl : nn::Module {
  nn::InstanceNorm1d norm =
      register_module("norm", nn::InstanceNorm1d(nn::InstanceNorm1dOptions(5).affine(true).track_running_stats(true)));
  torch::Tensor forward(torch::Tensor t) { return norm(t.unsqueeze(0)).squeeze(0); }
};
TORCH_MODULE(InstanceNorm);

TEST(RandomnessAndState, C13_RunningStatisticsAfterThreeStepsAndAfterForward) {
  const std::vector<std::pair<std::string, std::function<nn::AnyModule()>>> norms{
      {"batch norm", [] { return nn::AnyModule(nn::BatchNorm1d(4)); }},
      {"cumulative batch norm",
       [] { return nn::AnyModule(nn::BatchNorm1d(nn::BatchNorm1dOptions(4).momentum(std::nullopt))); }},
      {"instance norm", [] { return nn::AnyModule(InstanceNorm()); }},
  };
  for (const auto& [name, make_norm] : norms) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    Nets nets(3, torch::kDouble, [&] { return add_to(nn::Linear(4, 4), make_norm()); });
    const Tensors parameters = copies(nets.parameters), buffers = copies(nets.buffers);
    const auto expected = three_steps(
        nets, parameters, buffers, [&](auto x1, auto x2) { return plain_block(x1, x2, calls(nets.f), calls(nets.g)); });
    for (const Strategy& strategy : kStrategies) {
      for (const bool registered : {true, false}) {
        SCOPED_TRACE(strategy.memory.to_string() + (registered ? " registered" : " captured"));
        RevBlock block = registered ? RevBlock(RevBlockOptions(3).f(nets.f).g(nets.g).memory(strategy.memory))
                                    : make_block(calls(nets.f), calls(nets.g), strategy.memory);
        const auto found =
            three_steps(nets, parameters, buffers, [&](auto x1, auto x2) { return run_block(block, x1, x2); });
        expect_close(expected, found, {strategy.tolerance.relative == 0 ? 0 : 1e-11});
      }
    }
    const auto as_regions = three_steps(nets, parameters, buffers, [&](torch::Tensor x1, torch::Tensor x2) {
      Residues f, g;
      for (size_t i = 0; i < nets.f.size(); ++i) {
        f.push_back(recompute_grad(nets.f[i]));        // the module
        g.push_back(recompute_grad(call(nets.g[i])));  // a callable that captures it
      }
      return plain_block(x1, x2, f, g);
    });
    expect_close(expected, as_regions);
  }
}

TEST(RandomnessAndState, C13_AnOptimizerStepBetweenForwardAndBackward) {
  Nets nets(2, torch::kDouble, [] { return nn::Sequential(nn::Linear(4, 4), nn::Tanh()); });
  torch::optim::SGD optimizer(nets.parameters, 0.1);
  const auto x = leaf({5, 4});
  const auto try_step = [&](const std::function<Tensors()>& forward) {
    const torch::Tensor loss = weighted_sum(forward());
    for (torch::Tensor parameter : nets.parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    loss.backward();
  };
  // LibTorch's SGD writes through .data(), which versions do not count: plain is silently wrong.
  EXPECT_NO_THROW(try_step([&] { return plain_block(x, x, calls(nets.f), calls(nets.g)); }));
  const std::string why = "modified between forward and backward through .data()";
  for (const Strategy& strategy : kStrategies) {
    if (strategy.memory.kind() == Memory::Kind::store) continue;  // that is plain
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(2).f(nets.f).g(nets.g).memory(strategy.memory));
    expect_error(ErrorKind::tensor_modified, {"layers.", "uses 0.bias Double[4]", why},
                 [&] { try_step([&] { return run_block(block, x, x); }); });
  }
  expect_error(ErrorKind::tensor_modified, {"uses 0.bias Double[4]", why},
               [&] { try_step([&] { return Tensors{recompute_grad(nets.f[0])(x)}; }); });
}

/// Counts its calls in a buffer and depends on it.
struct CounterImpl : nn::Module {
  torch::Tensor count = register_buffer("count", torch::zeros({}, torch::kDouble));
  torch::Tensor forward(torch::Tensor t) {
    count.add_(1);
    return (t * count).sin();
  }
};
TORCH_MODULE(Counter);

TEST(RandomnessAndState, C13_ABufferThatIsChangedThenUsed) {
  const auto x = leaf({3, 4});
  Counter a, b;
  const auto program = [&](auto run) {
    return [&, run] {
      a->count.zero_();
      b->count.fill_(10);
      Tensors y = run();
      y.push_back(a->count.clone());
      y.push_back(b->count.clone());
      return y;
    };
  };
  const auto plain = program([&] {
    return plain_block(x, x * 2, {[&](torch::Tensor t) { return a->forward(t); }},
                       {[&](torch::Tensor t) { return b->forward(t); }});
  });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(1).f(a).g(b).memory(strategy.memory));
    expect_like_plain({x}, plain, program([&] { return run_block(block, x, x * 2); }),
                      at_least(strategy.tolerance, kRounding));
    EXPECT_EQ(a->count.item<double>(), 1);
  }
  expect_like_plain({x}, program([&] { return Tensors{a->forward(x)}; }),
                    program([&] { return Tensors{recompute_grad(a)(x)}; }));
  expect_like_plain({x}, program([&] { return Tensors{a->forward(x)}; }), program([&] {
                      return Tensors{recompute_grad([&](torch::Tensor t) { return a->forward(t); })(x)};
                    }));
  EXPECT_EQ(a->count.item<double>(), 1);
}

/// The inner region knows the buffer as its module's, the outer one only by what its function does.
TEST(RandomnessAndState, C13_ABufferThatAnInnerRegionChangesThenUses) {
  const auto x = leaf({3, 4});
  Counter a;
  const auto run = [&](const std::function<torch::Tensor(torch::Tensor)>& f) {
    return [&, f] {
      a->count.zero_();
      const auto y = f(x);
      return Tensors{y, a->count.clone()};
    };
  };
  expect_like_plain({x}, run([&](torch::Tensor t) { return a->forward(t); }), run([&](torch::Tensor t) {
                      return recompute_grad([&](torch::Tensor inner) { return recompute_grad(a)(inner); })(t);
                    }));
  EXPECT_EQ(a->count.item<double>(), 1);
}

TEST(RandomnessAndState, C13_ABufferThatTwoCallsChange) {
  // Each replay sees the value of its own forward. (Plain needs a copy of the count: it saves it.)
  struct CopyingCounterImpl : nn::Module {
    torch::Tensor count = register_buffer("count", torch::zeros({}, torch::kDouble));
    torch::Tensor forward(torch::Tensor t) {
      count.add_(1);
      return (t * count.clone()).sin();
    }
  };
  const auto module = std::make_shared<CopyingCounterImpl>();
  const auto x = leaf({3, 4});
  const Residue f = [&](torch::Tensor t) { return module->forward(t); };
  const auto program = [&](auto run) {
    return [&, run] {
      module->count.zero_();
      Tensors y = run();
      y.push_back(module->count.clone());
      return y;
    };
  };
  const auto plain = program([&] { return plain_block(x, x * 2, {f, f, f}, {f, f, f}); });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(3).f(module).g(module).memory(strategy.memory));
    expect_like_plain({x}, plain, program([&] { return run_block(block, x, x * 2); }),
                      at_least(strategy.tolerance, {1e-13}));
    EXPECT_EQ(module->count.item<double>(), 6);
    RevBlock captured = make_block({f, f, f}, {f, f, f}, strategy.memory);
    expect_like_plain({x}, plain, program([&] { return run_block(captured, x, x * 2); }),
                      at_least(strategy.tolerance, {1e-13}));
    EXPECT_EQ(module->count.item<double>(), 6);
  }
  const auto region = recompute_grad(module);
  expect_like_plain({x}, program([&] {
                      return Tensors{f(f(x)), f(x)};
                    }),
                    program([&] {
                      return Tensors{region(region(x)), region(x)};
                    }),
                    kRounding);
  EXPECT_EQ(module->count.item<double>(), 3);
}

/// Power iteration on a buffer, as in spectral norm.
struct SpectralImpl : nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::randn({4, 4}, torch::kDouble));
  torch::Tensor u = register_buffer("u", torch::ones({4}, torch::kDouble));
  torch::Tensor forward(torch::Tensor t) {
    torch::Tensor v, u_now;
    {
      const torch::NoGradGuard no_grad;
      v = nn::functional::normalize(weight.t().mv(u), nn::functional::NormalizeFuncOptions().dim(0));
      u.copy_(nn::functional::normalize(weight.mv(v), nn::functional::NormalizeFuncOptions().dim(0)));
      u_now = u.clone();
    }
    return t.mm((weight / torch::dot(u_now, weight.mv(v))).t());
  }
};
TORCH_MODULE(Spectral);

TEST(RandomnessAndState, C13_SpectralNorm) {
  torch::manual_seed(1);
  const auto x = leaf({3, 4});
  std::vector<Spectral> f(3), g(3);
  Tensors leaves{x}, buffers;
  Residues plain_f, plain_g;
  for (size_t i = 0; i < 3; ++i) {
    leaves.insert(leaves.end(), {f[i]->weight, g[i]->weight});
    buffers.insert(buffers.end(), {f[i]->u, g[i]->u});
    plain_f.push_back([m = f[i]](torch::Tensor t) mutable { return m->forward(t); });
    plain_g.push_back([m = g[i]](torch::Tensor t) mutable { return m->forward(t); });
  }
  const auto program = [&](auto run) {
    return [&, run] {
      for (auto& u : buffers) u.fill_(0.5);
      Tensors y = run();
      for (const auto& t : copies(buffers)) y.push_back(t);
      return y;
    };
  };
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(3).f(f).g(g).memory(strategy.memory));
    expect_like_plain(leaves, program([&] { return plain_block(x, x * 2, plain_f, plain_g); }),
                      program([&] { return run_block(block, x, x * 2); }), at_least(strategy.tolerance, kRounding));
    const Tensors after = copies(buffers);
    expect_close(after, buffers);
  }
}

TEST(RandomnessAndState, C13_BackwardLeavesBuffersAndTheirVersionsAlone) {
  nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4));
  const auto y = recompute_grad(net)(torch::randn({5, 4})).pow(2).sum();
  const Tensors before = copies(net->buffers());
  std::vector<int64_t> versions;
  for (const auto& t : net->buffers()) versions.push_back(t._version());
  y.backward();
  expect_close(before, net->buffers());
  for (size_t i = 0; i < versions.size(); ++i) EXPECT_EQ(net->buffers()[i]._version(), versions[i]);
}

// --- C14

TEST(RandomnessAndState, C14_ForwardUnderAutocastBackwardOutside) {
  torch::manual_seed(1);
  Nets nets(3, torch::kFloat, [] { return nn::Sequential(nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 8)); });
  const auto x1 = leaf({6, 8}, torch::kFloat), x2 = leaf({6, 8}, torch::kFloat);
  Tensors leaves = nets.parameters;
  leaves.insert(leaves.end(), {x1, x2});
  std::vector<torch::Dtype> seen;
  const auto watch = [&seen](Residue f) {
    return Residue([&seen, f](torch::Tensor t) {
      const auto y = f(t);
      seen.push_back(y.scalar_type());
      return y;
    });
  };
  const auto under_autocast = [](auto run) {
    return [run] {
      const Autocast autocast;
      return run();
    };
  };
  expect_like_plain(leaves, under_autocast([&] { return Tensors{nets.f[0]->forward(x1)}; }),
                    under_autocast([&] { return Tensors{recompute_grad(watch(call(nets.f[0])))(x1)}; }));
  EXPECT_EQ(seen, (std::vector<torch::Dtype>{torch::kBFloat16, torch::kBFloat16}));

  const auto plain = under_autocast([&] { return plain_block(x1, x2, calls(nets.f), calls(nets.g)); });
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(3).f(nets.f).g(nets.g).memory(strategy.memory));
    const bool reverse = strategy.memory == Memory::reverse();  // streams are float, functions bfloat16
    expect_like_plain(leaves, plain, under_autocast([&] { return run_block(block, x1, x2); }),
                      reverse ? Tolerance{1e-2} : Tolerance{});
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(RandomnessAndState, C14_SharedWeightUnderAutocast) {
  // The weight's cast is in autocast's cache when the second user comes.
  torch::manual_seed(1);
  nn::Sequential net(nn::Linear(8, 8), nn::Tanh());
  const auto x = leaf({6, 8}, torch::kFloat);
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  const auto f = call(net);
  const Residue r = recompute_grad(net);
  const auto program = [&](Residue first, Residue second, Residue third) {
    return [=] {
      const Autocast autocast;
      return Tensors{third(second(first(x)))};
    };
  };
  const auto plain = program(f, f, f);
  expect_like_plain(leaves, plain, program(r, f, f), {1e-6});
  expect_like_plain(leaves, plain, program(f, r, f), {1e-6});
  expect_like_plain(leaves, plain, program(r, r, r), {1e-6});
  expect_like_plain(leaves, plain, program(f, f, r), {1e-6});
}

TEST(RandomnessAndState, C14_BackwardUnderAutocastForwardOutside) {
  nn::Sequential net(nn::Linear(8, 8), nn::Tanh());
  const auto x = leaf({6, 8}, torch::kFloat);
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  const auto gradients = [&](Residue f) {
    const auto loss = f(x).pow(2).sum();
    const Autocast autocast;
    loss.backward();
    return take_gradients(leaves);
  };
  expect_close(gradients(call(net)), gradients(recompute_grad(net)));
}

TEST(RandomnessAndState, C14_BfloatInputInAFloatBlock) {
  torch::manual_seed(1);
  Nets nets(2, torch::kFloat, [] { return nn::Sequential(nn::Linear(8, 8), nn::Tanh()); });
  const auto x1 = leaf({6, 8}, torch::kBFloat16), x2 = leaf({6, 8}, torch::kBFloat16);
  Tensors leaves = nets.parameters;
  leaves.insert(leaves.end(), {x1, x2});
  const auto message = [&](const std::function<void()>& program) -> std::string {
    try {
      program();
    } catch (const c10::Error& error) {
      return error.msg();
    }
    return "no error";
  };
  const auto expected = message([&] { plain_block(x1, x2, calls(nets.f), calls(nets.g)); });
  EXPECT_NE(expected, "no error");
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(2).f(nets.f).g(nets.g).memory(strategy.memory));
    EXPECT_EQ(expected, message([&] { run_block(block, x1, x2); }));
    const bool reverse = strategy.memory == Memory::reverse();  // streams and functions are bfloat16
    expect_like_plain(
        leaves,
        [&] {
          const Autocast on;
          return plain_block(x1, x2, calls(nets.f), calls(nets.g));
        },
        [&] {
          const Autocast on;
          return run_block(block, x1, x2);
        },
        reverse ? Tolerance{5e-2} : Tolerance{});
  }
}

// --- C15

TEST(RandomnessAndState, C15_FunctionThatGrowsAList) {
  const auto x = leaf({3, 4});
  Tensors list;
  const Residue f = [&](torch::Tensor t) {
    list.push_back(t.sin());
    return torch::stack(list).sum(0);
  };
  const auto y = recompute_grad(f)(x).sum();
  EXPECT_THROW(y.backward(), regrad::Error);
  for (const Memory memory : {Memory::recompute(1), Memory::recompute(3), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    list.clear();
    RevBlock block = make_block({f, f}, {[](torch::Tensor t) { return t.cos(); }, f}, memory);
    const auto streams = run_block(block, x, x * 2);
    EXPECT_THROW((streams[0] + streams[1]).sum().backward(), regrad::Error);
  }
}

TEST(RandomnessAndState, C15_FunctionOfACounter) {
  const auto x = leaf({3, 4});
  int calls = 0;
  const Residue f = [&](torch::Tensor t) { return t * ++calls; };
  const auto y = recompute_grad(f)(x).sum();
  expect_error(ErrorKind::replay_differs, {"other values"}, [&] { y.backward(); });
  for (const Memory memory : {Memory::recompute(1), Memory::recompute(3), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    calls = 0;
    RevBlock block =
        make_block({[](torch::Tensor t) { return t.cos(); }, f},
                   {[](torch::Tensor t) { return t.cos(); }, [](torch::Tensor t) { return t.cos(); }}, memory);
    const auto streams = run_block(block, x, x * 2);
    expect_error(ErrorKind::replay_differs, {"layers.1.f"}, [&] { streams[0].sum().backward(); });
  }
}

TEST(RandomnessAndState, C15_FunctionOfACounterWithAStridedResult) {
  const auto x = leaf({3, 4});
  int calls = 0;
  const Residue f = [&](torch::Tensor t) { return (torch::cat({t, t}, 1) * ++calls).narrow(1, 2, 4); };
  const Residue cosine = [](torch::Tensor t) { return t.cos(); };
  const auto y = recompute_grad(f)(x).sum();
  expect_error(ErrorKind::replay_differs, {"other values"}, [&] { y.backward(); });
  for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    calls = 0;
    RevBlock block = make_block({cosine, f}, {cosine, cosine}, memory);
    const auto streams = run_block(block, x, x * 2);
    expect_error(ErrorKind::replay_differs, {"layers.1.f"}, [&] { streams[0].sum().backward(); });
  }
}

TEST(RandomnessAndState, C15_ReadTensorChangedBetweenForwardAndBackward) {
  const auto x = leaf({3, 4});
  const auto scale = torch::full({4}, 2, torch::kDouble);
  const auto weight = leaf({4});
  const auto change = [](torch::Tensor t) {
    const torch::NoGradGuard no_grad;
    t.add_(1);
  };
  for (const auto& read : {scale, weight}) {
    const Residue f = [read](torch::Tensor t) { return t * read; };
    const auto y = recompute_grad(f)(x).sum();
    change(read);
    expect_error(ErrorKind::tensor_modified, {"Double[4]", "in place"}, [&] { y.backward(); });
    for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
      SCOPED_TRACE(memory.to_string());
      RevBlock block = make_block({f, f}, {f, f}, memory);
      const auto streams = run_block(block, x, x * 2);
      change(read);
      expect_error(ErrorKind::tensor_modified, {"layers.", "Double[4]"}, [&] { streams[0].sum().backward(); });
    }
  }
}

// --- C16

TEST(RandomnessAndState, C16_EvalThenBackward) {
  torch::manual_seed(1);
  Nets nets(3, torch::kDouble, [] { return nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Dropout(0.5)); });
  for (auto& buffer : nets.buffers) buffer.add_(1);
  nets.train(false);
  const auto x = leaf({5, 4});
  Tensors leaves = nets.parameters;
  leaves.push_back(x);
  const Tensors buffers = copies(nets.buffers);
  expect_block_like_plain(
      leaves, calls(nets.f), calls(nets.g),
      [&] {
        return Tensors{x, x * 2};
      },
      kRounding);
  expect_like_plain(
      leaves, [&] { return Tensors{nets.f[0]->forward(x)}; }, [&] { return Tensors{recompute_grad(nets.f[0])(x)}; });
  expect_close(buffers, nets.buffers);
}

TEST(RandomnessAndState, C16_ModeSwitchedBetweenForwardAndBackward) {
  for (const bool training : {true, false}) {
    SCOPED_TRACE(training ? "train, then eval" : "eval, then train");
    torch::manual_seed(1);
    Nets nets(3, torch::kDouble, [] { return nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Dropout(0.5)); });
    const Tensors buffers = copies(nets.buffers);
    const auto x = leaf({5, 4});
    Tensors leaves = nets.parameters;
    leaves.push_back(x);
    const auto gradients = [&](const std::function<torch::Tensor()>& forward) {
      copy_back(buffers, nets.buffers);
      nets.train(training);
      torch::manual_seed(3);
      const auto y = forward();
      nets.train(!training);
      y.pow(2).sum().backward();
      for (const auto* list : {&nets.f, &nets.g}) {
        for (const auto& net : *list) {
          EXPECT_EQ(net->is_training(), !training);
          for (const auto& module : net->children()) EXPECT_EQ(module->is_training(), !training);
        }
      }
      Tensors result = take_gradients(leaves);
      for (const auto& t : copies(nets.buffers)) result.push_back(t);
      return result;
    };
    // Registered modules are put back into forward's mode.
    const auto expected = gradients([&] { return plain_block(x, x * 2, calls(nets.f), calls(nets.g))[0]; });
    for (const Strategy& strategy : kStrategies) {
      SCOPED_TRACE(strategy.memory.to_string());
      RevBlock block(RevBlockOptions(3).f(nets.f).g(nets.g).memory(strategy.memory));
      expect_close(expected, gradients([&] { return run_block(block, x, x * 2)[0]; }),
                   at_least(strategy.tolerance, kRounding));
    }
    expect_close(gradients([&] { return nets.f[0]->forward(x); }),
                 gradients([&] { return recompute_grad(nets.f[0])(x); }));
    // What a callable captures has a mode that nobody can see: an error, not another gradient.
    const auto region = recompute_grad(call(nets.f[0]));
    EXPECT_THROW(gradients([&] { return region(x); }), regrad::Error);
    for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
      SCOPED_TRACE(memory.to_string());
      RevBlock captured = make_block(calls(nets.f), calls(nets.g), memory);
      EXPECT_THROW(gradients([&] { return run_block(captured, x, x * 2)[0]; }), regrad::Error);
    }
  }
}

TEST(RandomnessAndState, C16_MixedModesOfChildrenAreKept) {
  // A frozen batch norm inside a training net, switched to training afterwards.
  torch::manual_seed(1);
  nn::BatchNorm1d frozen(4);
  nn::Sequential net(nn::Linear(4, 4), frozen, nn::Dropout(0.5));
  net->to(torch::kDouble);
  frozen->eval();
  const auto x = leaf({5, 4});
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  expect_like_plain(
      leaves, [&] { return Tensors{net->forward(x)}; },
      [&] {
        const auto y = recompute_grad(net)(x);
        net->train();
        return Tensors{y};
      });
  EXPECT_TRUE(frozen->is_training());
  EXPECT_EQ(frozen->num_batches_tracked.item<int64_t>(), 0);
}

// --- Grad mode and other state of the thread

TEST(RandomnessAndState, EnvironmentIsForwardsInReplayAndRestoredAfter) {
  const auto x = leaf({3, 4});
  std::vector<std::string> seen;
  const auto look = [&] {
    seen.push_back(std::to_string(torch::GradMode::is_enabled()) +
                   std::to_string(at::autocast::is_autocast_enabled(at::kCPU)) +
                   std::to_string(c10::InferenceMode::is_enabled()));
  };
  const auto region = recompute_grad([&](torch::Tensor t) {
    look();
    return t.sin();
  });
  torch::Tensor y;
  {
    const Autocast autocast;
    y = region(x);
  }
  y.sum().backward();
  ASSERT_EQ(seen.size(), 2U);
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[0], "110");
  EXPECT_FALSE(regrad::is_recomputing());
}

TEST(RandomnessAndState, GradModeOffRecordsAndKeepsNothing) {
  const auto weight = leaf({4, 4});
  auto input = torch::randn({4, 4}, torch::kDouble);
  const Residue f = [&](torch::Tensor t) { return t.mm(weight); };
  const torch::NoGradGuard no_grad;
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(input.getIntrusivePtr());
  torch::Tensor y = recompute_grad(f)(input);
  EXPECT_FALSE(y.requires_grad());
  for (const Strategy& strategy : kStrategies) {
    RevBlock block = make_block({f, f}, {f, f}, strategy.memory);
    const auto streams = run_block(block, input, input);
    EXPECT_FALSE(streams[0].requires_grad());
    EXPECT_EQ(streams[0].grad_fn(), nullptr);
    EXPECT_TRUE(streams[0].equal(plain_block(input, input, {f, f}, {f, f})[0]));
  }
  EXPECT_EQ(input.storage().use_count(), 1);
  input = torch::Tensor();
  EXPECT_TRUE(weak.expired());
}

// --- C17

TEST(RandomnessAndState, C17_FunctionMovesToAnotherDeviceAndDrawsThere) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device: a function that moves its CPU input to another device cannot be tried";
  }
  const auto x = leaf({64, 8});
  const Residue f = [](torch::Tensor t) {
    return torch::dropout(t.to(torch::kCUDA), 0.5, true).to(torch::kCPU).tanh();
  };
  const auto program = [&](auto run) {
    return [&, run] {
      Tensors y = run();
      y.push_back(torch::rand({3}, torch::kCUDA).cpu());
      return y;
    };
  };
  expect_like_plain({x}, program([&] { return Tensors{f(x)}; }),
                    program([&] { return Tensors{recompute_grad(f)(x)}; }));
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block({f, f}, {f, f}, strategy.memory);
    expect_like_plain({x}, program([&] {
                        return plain_block(x, x, {f, f}, {f, f});
                      }),
                      program([&] { return run_block(block, x, x); }), at_least(strategy.tolerance, kRounding));
  }
}

}  // namespace
