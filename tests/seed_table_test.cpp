// What users of TensorFlow's rev_block_lib rely on beside its numbers: ownership, side inputs, arguments and results of
// all kinds, modules in containers.

#include <sstream>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::checkpoint_sequential;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::Pass;
using regrad::Recompute;
using regrad::recompute_grad;
using regrad::Residual;
using regrad::RevBlock;
using regrad::RevBlockOptions;
using regrad::SplitRevBlock;
namespace nn = torch::nn;

namespace {

nn::Linear new_linear(int64_t) { return nn::Linear(4, 4); }

std::vector<std::string> parameter_names(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

using Names = std::vector<std::string>;

template <class Module>
std::string printed(const Module& module) {
  std::ostringstream text;
  text << module;
  return text.str();
}

// --- Functions: one, a list, a factory

TEST(SeedTable, FunctionListOfTheWrongLengthSaysBothLengths) {
  const std::vector<nn::Linear> three{nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4)};
  expect_error(ErrorKind::invalid_argument, {"for f has 3 entries", "4 layers"},
               [&] { RevBlock(RevBlockOptions(4).f(three).g(new_linear)); });
  expect_error(ErrorKind::invalid_argument, {"for g has 3 entries", "2 layers"},
               [&] { RevBlock(RevBlockOptions(2).f(new_linear).g(three)); });
}

TEST(SeedTable, FactorySeesEachLayersNumberOnce) {
  std::vector<int64_t> numbers;
  const auto factory = [&](int64_t layer) {
    numbers.push_back(layer);
    return nn::Linear(4, 4);
  };
  RevBlock block(RevBlockOptions(3).f(factory).g(new_linear));
  EXPECT_EQ(numbers, (std::vector<int64_t>{0, 1, 2}));
  block->forward(torch::rand({2, 4}), torch::rand({2, 4}));
  EXPECT_EQ(numbers.size(), 3U);
  EXPECT_EQ(block->parameters().size(), 12U);
}

TEST(SeedTable, FactoryMayReturnCallablesAndHolders) {
  const auto x = torch::rand({2, 4});
  RevBlock callables(RevBlockOptions(2)
                         .f([](int64_t layer) { return [layer](torch::Tensor t) { return t * (layer + 1); }; })
                         .g([](int64_t) { return std::make_shared<nn::LinearImpl>(4, 4); }));
  EXPECT_EQ(callables->parameters().size(), 4U);
  RevBlock residuals(
      RevBlockOptions(2)
          .f([](int64_t layer) { return Residual([layer](torch::Tensor t) { return t * (layer + 1); }); })
          .g([](torch::Tensor t) { return t * 0; }));
  const auto [y1, y2] = residuals->forward(x, x);
  EXPECT_TRUE(torch::allclose(y1, x * 4));
  EXPECT_TRUE(y2.equal(x));
}

TEST(SeedTable, GenericLambdasByPerLayerAndEachLayer) {
  const auto x = torch::rand({2, 4});
  RevBlock block(RevBlockOptions(2)
                     .f(regrad::per_layer([](auto layer) {
                       return [scale = static_cast<double>(layer + 1)](torch::Tensor t) { return t * scale; };
                     }))
                     .g(regrad::each_layer([](auto t) { return t * 0; })));
  const auto [y1, y2] = block->forward(x, x);
  EXPECT_TRUE(torch::allclose(y1, x * 4));
  EXPECT_TRUE(y2.equal(x));
}

TEST(SeedTable, ListOfDifferentFunctions) {
  const auto x = torch::rand({2, 4});
  nn::Linear linear(4, 4);
  RevBlock block(RevBlockOptions(3)
                     .f({linear, nn::Sequential(linear, nn::ReLU()), [](torch::Tensor t) { return t.sin(); }})
                     .g([](torch::Tensor t) { return t * 0; }));
  const auto [y1, y2] = block->forward(x, x);
  const auto o = linear(x);
  EXPECT_TRUE(torch::allclose(y1, x + o + o.relu() + x.sin()));
}

// --- Side inputs

TEST(SeedTable, EverySignatureOfAResidualFunction) {
  const auto x1 = leaf({2, 4}), x2 = leaf({2, 4}), s = leaf({4});
  std::vector<Pass> passes;
  const auto expect_signature = [&](Residual residual, bool takes_side, auto plain) {
    EXPECT_EQ(residual.takes_side_inputs(), takes_side);
    const regrad::SideInputs side = takes_side ? regrad::SideInputs{.f = {s}, .g = {s}} : regrad::SideInputs{};
    for (const Strategy& strategy : kStrategies) {
      SCOPED_TRACE(strategy.memory.to_string());
      RevBlock block(RevBlockOptions(2).f(residual).g(residual).memory(strategy.memory));
      expect_like_plain(
          {x1, x2, s},
          [&] {
            return plain_block(x1, x2, {plain, plain}, {plain, plain});
          },
          [&] { return run_block(block, x1, x2, side); }, at_least(strategy.tolerance, kRounding));
    }
  };
  const auto without = [](torch::Tensor t) { return t.sin(); };
  const auto with = [&](torch::Tensor t) { return t * s; };
  expect_signature(Residual([](torch::Tensor t) { return t.sin(); }), false, without);
  expect_signature(Residual([](const torch::Tensor& t, Pass) { return t.sin(); }), false, without);
  expect_signature(Residual([](const torch::Tensor& t, torch::TensorList side) { return t * side[0]; }), true, with);
  expect_signature(Residual([](torch::Tensor t, const std::vector<torch::Tensor>& side) { return t * side.at(0); }),
                   true, with);
  expect_signature(Residual([](torch::Tensor t, std::vector<torch::Tensor> side, Pass) { return t * side.at(0); }),
                   true, with);
  expect_signature(Residual([](torch::Tensor t, torch::TensorList side, Pass) { return t * side[0]; }), true, with);
}

TEST(SeedTable, ModuleWithSideInputs) {
  struct AttendImpl : nn::Module {
    nn::Linear q = register_module("q", nn::Linear(4, 4));
    torch::Tensor forward(torch::Tensor t, torch::TensorList side) { return q(t) * side[0]; }
  };
  RevBlock block(RevBlockOptions(2).f([](int64_t) { return std::make_shared<AttendImpl>(); }).g(new_linear));
  EXPECT_EQ(parameter_names(*block)[0], "layers.0.f.q.weight");
  const auto x = torch::rand({3, 4}), s = torch::rand({3, 4}).requires_grad_();
  block->forward(x, x, {.f = {s}});
  const auto [y1, y2] = block->forward(x, x, {.f = {s}});
  (y1 + y2).sum().backward();
  EXPECT_TRUE(s.grad().defined());
  for (const auto& p : block->parameters()) EXPECT_TRUE(p.grad().defined());
}

TEST(SeedTable, SideInputsOfFAlone) {
  const auto x = torch::rand({3, 4}), s = leaf({4}, torch::kFloat);
  RevBlock block(
      RevBlockOptions(2).f([](torch::Tensor t, torch::TensorList side) { return t * side[0]; }).g([](torch::Tensor t) {
        return t.sin();
      }));
  const auto [y1, y2] = block->forward(x, x, {.f = {s}});
  const auto [r1, r2] = block->inverse(y1, y2, {.f = {s}});
  EXPECT_TRUE(torch::allclose(r1, x, 1e-5, 1e-6));
  EXPECT_TRUE(torch::allclose(r2, x, 1e-5, 1e-6));
  EXPECT_FALSE(torch::allclose(y1, x));
}

TEST(SeedTable, SideGradientIsTheSumOverLayers) {
  const auto x = torch::zeros({3, 4}, torch::kDouble), s = leaf({4});
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block(RevBlockOptions(5)
                       .f([](torch::Tensor, torch::TensorList side) {
                         return side[0].expand({3, 4});
                       })
                       .g([](torch::Tensor t) { return torch::zeros_like(t); })
                       .memory(strategy.memory));
    run_block(block, x, x, {.f = {s}})[0].sum().backward();
    EXPECT_TRUE(s.grad().equal(torch::full({4}, 15, torch::kDouble)));
    take_gradients({s});
  }
}

TEST(SeedTable, CallOperatorOfTheHolder) {
  RevBlock block(RevBlockOptions(1)
                     .f([](torch::Tensor t, torch::TensorList side) { return side.empty() ? t : t * side[0]; })
                     .g([](torch::Tensor t) { return t; }));
  const auto x = torch::rand({2, 4}), s = torch::rand({4});
  EXPECT_TRUE(std::get<0>(block(x, x)).equal(x + x));
  EXPECT_TRUE(std::get<0>(block(x, x, regrad::SideInputs{.f = {s}})).equal(x + x * s));
}

TEST(SeedTable, BackwardIsAnAliasOfInverse) {
  RevBlock block(RevBlockOptions(3).f(new_linear).g(new_linear));
  const auto y1 = torch::rand({2, 4}), y2 = torch::rand({2, 4});
  const auto [a1, a2] = block->inverse(y1, y2);
  const auto [b1, b2] = block->backward(y1, y2);
  EXPECT_TRUE(a1.equal(b1));
  EXPECT_TRUE(a2.equal(b2));
}

// --- Ownership

TEST(SeedTable, ParametersAreNamedByLayerAndFunction) {
  RevBlock block(
      RevBlockOptions(2).f(new_linear).g([](int64_t) { return nn::Sequential(nn::Linear(4, 4), nn::ReLU()); }));
  EXPECT_EQ(parameter_names(*block),
            (Names{"layers.0.f.weight", "layers.0.f.bias", "layers.0.g.0.weight", "layers.0.g.0.bias",
                   "layers.1.f.weight", "layers.1.f.bias", "layers.1.g.0.weight", "layers.1.g.0.bias"}));
}

TEST(SeedTable, BuffersAreNamedByLayerAndFunction) {
  RevBlock block(RevBlockOptions(1).f([](int64_t) { return nn::BatchNorm1d(4); }).g(new_linear));
  Names names;
  for (const auto& item : block->named_buffers()) names.push_back(item.key());
  EXPECT_EQ(names, (Names{"layers.0.f.running_mean", "layers.0.f.running_var", "layers.0.f.num_batches_tracked"}));
}

TEST(SeedTable, ASharedModuleIsRegisteredOnce) {
  const nn::Linear shared(4, 4);
  RevBlock all(RevBlockOptions(12).f(shared).g(shared));
  EXPECT_EQ(parameter_names(*all), (Names{"layers.0.f.weight", "layers.0.f.bias"}));
  const nn::Linear other(4, 4);
  RevBlock some(RevBlockOptions(3)
                    .f(std::vector<nn::Linear>{other, shared, shared})
                    .g(std::vector<nn::Linear>{shared, other, other}));
  EXPECT_EQ(parameter_names(*some),
            (Names{"layers.0.f.weight", "layers.0.f.bias", "layers.0.g.weight", "layers.0.g.bias"}));
}

TEST(SeedTable, ModulesOfACallableAreRegistered) {
  nn::Linear a(4, 4), b(4, 4);
  RevBlock one(RevBlockOptions(1).f(Residual({a.ptr()}, [a](torch::Tensor t) mutable { return a(t); })).g(new_linear));
  EXPECT_EQ(parameter_names(*one)[0], "layers.0.f.weight");
  RevBlock two(RevBlockOptions(1)
                   .f(Residual({a.ptr(), b.ptr()}, [a, b](torch::Tensor t) mutable { return b(a(t)); }))
                   .g(new_linear));
  EXPECT_EQ(two->parameters().size(), 6U);
  EXPECT_EQ(parameter_names(*two)[0], "layers.0.f.0.weight");
  EXPECT_EQ(parameter_names(*two)[2], "layers.0.f.1.weight");
  const auto [y1, y2] = two->forward(torch::rand({2, 4}), torch::rand({2, 4}));
  (y1 + y2).sum().backward();
  for (const auto& p : two->parameters()) EXPECT_TRUE(p.grad().defined());
  EXPECT_TRUE(two->unregistered_parameters().empty());
}

TEST(SeedTable, SharingABlockAddsItsGradients) {
  RevBlock block(RevBlockOptions(2).f(new_linear).g(new_linear));
  block->to(torch::kDouble);
  const RevBlock same = block;
  const auto x = leaf({3, 4});
  Tensors leaves = block->parameters();
  leaves.push_back(x);
  const auto loss = [&](RevBlock& used) {
    const auto y = run_block(used, x, x);
    return (y[0] + y[1]).sum();
  };
  loss(block).backward();
  const Tensors once = take_gradients(leaves);
  RevBlock again = same;
  (loss(block) + loss(again)).backward();
  const Tensors twice = take_gradients(leaves);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(torch::allclose(twice[i], once[i] * 2, 1e-12, 1e-12));
  EXPECT_EQ(block->parameters().size(), 8U);
}

RevBlock mixed_block(int64_t layers = 2) {
  return RevBlock(RevBlockOptions(layers)
                      .f([](int64_t) { return nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Dropout(0.5)); })
                      .g(new_linear));
}

TEST(SeedTable, SaveAndLoad) {
  auto block = mixed_block();
  block->forward(torch::rand({8, 4}), torch::rand({8, 4}));  // moves the running statistics
  std::stringstream file;
  torch::save(block, file);
  auto loaded = mixed_block();
  const auto x = torch::rand({3, 4});
  block->eval();
  loaded->eval();
  const auto [y1, y2] = block->forward(x, x);
  EXPECT_FALSE(std::get<0>(loaded->forward(x, x)).equal(y1));
  torch::load(loaded, file);
  const auto [z1, z2] = loaded->forward(x, x);
  EXPECT_TRUE(z1.equal(y1));
  EXPECT_TRUE(z2.equal(y2));
  expect_close(block->buffers(), loaded->buffers());
}

TEST(SeedTable, ToAnotherDtype) {
  auto block = mixed_block();
  block->to(torch::kDouble);
  const auto x = leaf({3, 4});
  const auto y = run_block(block, x, x);
  EXPECT_EQ(y[0].scalar_type(), torch::kDouble);
  (y[0] + y[1]).sum().backward();
  for (const auto& p : block->parameters()) EXPECT_EQ(p.grad().scalar_type(), torch::kDouble);
}

TEST(SeedTable, ConvertedBetweenForwardAndBackwardIsAnErrorNotAWrongGradient) {
  for (const Memory memory : {Memory::recompute(1), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    auto block = mixed_block();
    block->set_memory(memory);
    const auto x = leaf({3, 4}, torch::kFloat);
    const auto y = run_block(block, x, x);
    block->to(torch::kDouble);
    EXPECT_THROW((y[0] + y[1]).sum().backward(), c10::Error);
  }
}

TEST(SeedTable, CloneIsIndependent) {
  auto block = mixed_block();
  block->set_memory(Memory::recompute(2));
  const auto copy = RevBlock(std::dynamic_pointer_cast<regrad::RevBlockImpl>(block->clone()));
  EXPECT_EQ(parameter_names(*copy), parameter_names(*block));
  EXPECT_EQ(copy->memory(), Memory::recompute(2));
  expect_close(block->parameters(), copy->parameters());
  expect_close(block->buffers(), copy->buffers());
  for (size_t i = 0; i < block->parameters().size(); ++i) {
    EXPECT_FALSE(block->parameters()[i].is_alias_of(copy->parameters()[i]));
  }
  const Tensors before = [&] {
    Tensors copies;
    for (const auto& t : block->parameters()) copies.push_back(t.detach().clone());
    for (const auto& t : block->buffers()) copies.push_back(t.clone());
    return copies;
  }();
  {  // training the copy leaves the original alone
    auto trained = copy;
    const auto y = run_block(trained, torch::rand({8, 4}), torch::rand({8, 4}));
    (y[0] + y[1]).pow(2).sum().backward();
    const torch::NoGradGuard no_grad;
    for (auto& p : trained->parameters()) {
      EXPECT_TRUE(p.grad().defined());
      p.add_(p.grad(), -1);
    }
  }
  for (const auto& p : block->parameters()) EXPECT_FALSE(p.grad().defined());
  Tensors after = block->parameters();
  for (auto& t : after) t = t.detach();
  for (const auto& t : block->buffers()) after.push_back(t);
  expect_close(before, after);
}

TEST(SeedTable, CloneKeepsTrainingModes) {
  auto block = mixed_block();
  block->eval();
  block->train();
  const auto children = block->modules(false);
  for (const auto& m : children) {
    if (m->name().find("BatchNorm") != std::string::npos) m->eval();
  }
  const auto copy = block->clone();
  const auto of = [](const nn::Module& m) {
    std::vector<bool> modes;
    for (const auto& child : m.modules()) modes.push_back(child->is_training());
    return modes;
  };
  EXPECT_EQ(of(*copy), of(*block));
}

TEST(SeedTable, CloneOfSharedModulesSharesAmongTheCopies) {
  const nn::Linear shared(4, 4);
  RevBlock block(RevBlockOptions(3).f(shared).g(new_linear));
  const auto copy = RevBlock(std::dynamic_pointer_cast<regrad::RevBlockImpl>(block->clone()));
  EXPECT_EQ(copy->parameters().size(), block->parameters().size());
  EXPECT_EQ(copy->parameters().size(), 8U);
  const auto x = torch::rand({2, 4});
  EXPECT_TRUE(std::get<1>(RevBlock(copy)->forward(x, x)).equal(std::get<1>(block->forward(x, x))));
}

TEST(SeedTable, CloneRefusesWhatItWouldShare) {
  nn::Linear linear(4, 4);
  const auto p = leaf({4, 4}, torch::kFloat);
  const auto refuse = [&](Residual residual) {
    RevBlock block(RevBlockOptions(2).f(new_linear).g(std::vector<Residual>{linear, residual}));
    expect_error(ErrorKind::not_cloneable, {"layers.1.g"}, [&] { block->clone(); });
  };
  refuse(Residual([p](torch::Tensor t) { return t.mm(p); }));
  refuse(Residual({linear.ptr()}, [linear](torch::Tensor t) mutable { return linear(t); }));
  struct NoCloneImpl : nn::Module {
    torch::Tensor forward(torch::Tensor t) { return t; }
  };
  refuse(Residual(std::make_shared<NoCloneImpl>()));
  struct SharingImpl : nn::Cloneable<SharingImpl> {
    nn::Linear inner;
    explicit SharingImpl(nn::Linear l) : inner(std::move(l)) { reset(); }
    void reset() override { register_module("inner", inner); }
    torch::Tensor forward(torch::Tensor t) { return inner(t); }
  };
  refuse(Residual(std::make_shared<SharingImpl>(nn::Linear(4, 4))));
}

TEST(SeedTable, CloneAcceptsCallablesWithoutState) {
  RevBlock block(RevBlockOptions(2).f(new_linear).g([](torch::Tensor t) { return t.sin(); }));
  const auto copy = RevBlock(std::dynamic_pointer_cast<regrad::RevBlockImpl>(block->clone()));
  const auto x = torch::rand({2, 4});
  EXPECT_TRUE(std::get<1>(RevBlock(copy)->forward(x, x)).equal(std::get<1>(block->forward(x, x))));
}

TEST(SeedTable, TrainAndEvalReachEveryFunction) {
  auto block = mixed_block();
  const auto x = torch::rand({8, 4});
  block->eval();
  for (const auto& m : block->modules()) EXPECT_FALSE(m->is_training());
  const auto first = run_block(block, x, x), second = run_block(block, x, x);
  EXPECT_TRUE(first[0].equal(second[0])) << "no dropout in eval";
  block->train();
  EXPECT_FALSE(run_block(block, x, x)[0].equal(run_block(block, x, x)[0]));
}

TEST(SeedTable, Printing) {
  RevBlock block(RevBlockOptions(2).f(new_linear).g(new_linear).memory(Memory::recompute(2)));
  EXPECT_NE(printed(block).find("regrad::RevBlock(num_layers=2, memory=recompute(2))"), std::string::npos)
      << printed(block);
  EXPECT_NE(printed(block).find("torch::nn::Linear"), std::string::npos) << printed(block);
  EXPECT_NE(printed(SplitRevBlock(block, 1)).find("regrad::SplitRevBlock(dim=1)"), std::string::npos);
  EXPECT_NE(printed(Recompute(nn::Linear(4, 4))).find("regrad::Recompute"), std::string::npos);
  EXPECT_NE(printed(nn::Sequential(nn::Linear(8, 8), SplitRevBlock(block))).find("RevBlock(num_layers=2"),
            std::string::npos);
}

TEST(SeedTable, MemoryIsReadAndChangedAndKeptByAGraph) {
  int runs = 0;
  const Residue counted = [&](torch::Tensor t) {
    ++runs;
    return t.sin();
  };
  RevBlock block = make_block({counted}, {counted});
  EXPECT_EQ(block->memory(), Memory::reverse());
  EXPECT_EQ(block->memory().to_string(), "reverse");
  const auto x = leaf({3, 4});
  const auto rebuilt = run_block(block, x, x);
  block->set_memory(Memory::store());
  EXPECT_EQ(block->memory(), Memory::store());
  const auto stored = run_block(block, x, x);
  EXPECT_EQ(runs, 4);
  stored[1].sum().backward();
  EXPECT_EQ(runs, 4) << "stored: nothing runs again";
  rebuilt[1].sum().backward();
  EXPECT_EQ(runs, 6) << "made under reverse: each function once more";
}

struct Warnings : c10::WarningHandler {
  std::vector<std::string> seen;
  void process(const c10::Warning& warning) override { seen.push_back(warning.msg()); }
};

TEST(SeedTable, UnregisteredParametersAreNamedOnceInAWarning) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    warnings.seen.clear();
    const auto p = leaf({4, 4}), q = leaf({4});
    RevBlock block(RevBlockOptions(2)
                       .f([p, q](torch::Tensor t) { return t.mm(p) + q; })
                       .g([](int64_t) {
                         nn::Linear l(4, 4);
                         l->to(torch::kDouble);
                         return l;
                       })
                       .memory(strategy.memory));
    EXPECT_TRUE(block->unregistered_parameters().empty());
    const auto x = leaf({3, 4});
    {
      const torch::NoGradGuard no_grad;
      run_block(block, x, x);
    }
    EXPECT_TRUE(warnings.seen.empty());
    const auto y = run_block(block, x, x);
    run_block(block, x, x);
    ASSERT_EQ(warnings.seen.size(), 1U);
    EXPECT_NE(warnings.seen[0].find("Double[4, 4]"), std::string::npos) << warnings.seen[0];
    EXPECT_NE(warnings.seen[0].find("Double[4]"), std::string::npos) << warnings.seen[0];
    const auto found = block->unregistered_parameters();
    ASSERT_EQ(found.size(), 2U);
    EXPECT_TRUE((found[0].is_same(p) && found[1].is_same(q)) || (found[0].is_same(q) && found[1].is_same(p)));
    (y[0] + y[1]).sum().backward();
    EXPECT_TRUE(p.grad().defined());
    EXPECT_TRUE(q.grad().defined());
  }
}

TEST(SeedTable, NoWarningWhereEverythingIsRegisteredOrGiven) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  RevBlock block(
      RevBlockOptions(2).f([](torch::Tensor t, torch::TensorList side) { return t * side[0]; }).g(new_linear));
  const auto x = torch::rand({3, 4}).requires_grad_(), s = torch::rand({4}).requires_grad_();
  run_block(block, x, x, {.f = {s}});
  EXPECT_TRUE(warnings.seen.empty());
  EXPECT_TRUE(block->unregistered_parameters().empty());
}

// --- Modules in containers

TEST(SeedTable, SplitRevBlockInASequential) {
  torch::manual_seed(1);
  std::vector<nn::Linear> f, g;
  for (int i = 0; i < 2; ++i) {
    f.push_back(nn::Linear(4, 4));
    g.push_back(nn::Linear(4, 4));
  }
  nn::Linear before(8, 8), after(8, 2);
  SplitRevBlock split(RevBlock(RevBlockOptions(2).f(f).g(g)));
  nn::Sequential net(before, split, nn::ReLU(), after);
  net->to(torch::kDouble);
  EXPECT_EQ(net->parameters().size(), 12U);
  const auto x = leaf({3, 8});
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  expect_like_plain(
      leaves,
      [&] {
        const auto parts = before(x).chunk(2, 1);
        auto a = parts[0], b = parts[1];
        for (size_t i = 0; i < 2; ++i) {
          a = a + f[i](b);
          b = b + g[i](a);
        }
        return Tensors{after(torch::cat({a, b}, 1).relu())};
      },
      [&] { return Tensors{net->forward(x)}; }, {1e-12});
  const auto y = split->forward(x);
  EXPECT_TRUE(torch::allclose(split->inverse(y), x, 1e-10, 1e-12));
}

TEST(SeedTable, SplitAlongEachAxis) {
  const auto x = torch::randn({2, 4, 6}, torch::kDouble);
  for (int64_t dim = -3; dim < 3; ++dim) {
    SCOPED_TRACE(dim);
    SplitRevBlock split(
        make_block({[](torch::Tensor t) { return t.sin(); }}, {[](torch::Tensor t) { return t.cos(); }}), dim);
    const auto parts = x.chunk(2, dim);
    const auto y1 = parts[0] + parts[1].sin();
    EXPECT_TRUE(split->forward(x).equal(torch::cat({y1, parts[1] + y1.cos()}, dim)));
    EXPECT_TRUE(torch::allclose(split->inverse(split->forward(x)), x));
  }
}

TEST(SeedTable, RecomputeInASequential) {
  int runs = 0;
  nn::Linear a(4, 4), b(4, 4);
  nn::Sequential net(a,
                     Recompute(Residual({b.ptr()},
                                        [&runs, b](torch::Tensor t) mutable {
                                          ++runs;
                                          return b(t).tanh();
                                        })),
                     Recompute(nn::Sequential(nn::Dropout(0.5), nn::BatchNorm1d(4))));
  net->to(torch::kDouble);
  EXPECT_EQ(net->parameters().size(), 6U);
  EXPECT_EQ(parameter_names(*net)[2], "1.inner.weight");
  const auto x = leaf({3, 4});
  Tensors leaves = net->parameters();
  leaves.push_back(x);
  auto last = std::dynamic_pointer_cast<nn::SequentialImpl>(net[2]->children()[0]);
  expect_like_plain(
      leaves, [&] { return Tensors{last->forward(b(a(x)).tanh())}; }, [&] { return Tensors{net->forward(x)}; });
  EXPECT_EQ(runs, 2) << "once in forward and once in backward";
}

TEST(SeedTable, RecomputeIsSavedAndCloned) {
  nn::Sequential net(Recompute(nn::Linear(4, 4)));
  std::stringstream file;
  torch::save(net, file);
  nn::Sequential loaded(Recompute(nn::Linear(4, 4)));
  torch::load(loaded, file);
  const auto x = torch::rand({2, 4});
  EXPECT_TRUE(net->forward(x).equal(loaded->forward(x)));
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(copy->forward(x).equal(net->forward(x)));
  EXPECT_FALSE(copy->parameters()[0].is_alias_of(net->parameters()[0]));
}

TEST(SeedTable, SplitRevBlockIsSavedAndCloned) {
  const auto make = [] {
    return nn::Sequential(SplitRevBlock(RevBlock(RevBlockOptions(2).f(new_linear).g(new_linear))));
  };
  auto net = make();
  std::stringstream file;
  torch::save(net, file);
  auto loaded = make();
  torch::load(loaded, file);
  const auto x = torch::rand({2, 8});
  EXPECT_TRUE(net->forward(x).equal(loaded->forward(x)));
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(copy->forward(x).equal(net->forward(x)));
  for (size_t i = 0; i < copy->parameters().size(); ++i) {
    EXPECT_FALSE(copy->parameters()[i].is_alias_of(net->parameters()[i]));
  }
}

/// sin, and counts its calls.
struct CountedSinImpl : nn::Module {
  std::shared_ptr<int> calls = std::make_shared<int>(0);
  torch::Tensor forward(torch::Tensor t) {
    ++*calls;
    return t.sin();
  }
};
TORCH_MODULE(CountedSin);

TEST(SeedTable, CheckpointSequentialWithAnyNumberOfSegments) {
  for (const int64_t segments : {1, 2, 3, 5, 6, 7, 100}) {
    SCOPED_TRACE(segments);
    torch::manual_seed(1);
    nn::Sequential net;
    std::vector<std::shared_ptr<int>> calls;
    for (int i = 0; i < 3; ++i) {
      CountedSin counted;
      calls.push_back(counted->calls);
      net->push_back(nn::Linear(4, 4));
      net->push_back(counted);
    }
    net->to(torch::kDouble);
    const auto x = leaf({3, 4});
    Tensors leaves = net->parameters();
    leaves.push_back(x);
    expect_like_plain(
        leaves, [&] { return Tensors{net->forward(x)}; },
        [&] {
          for (auto& c : calls) *c = 0;
          return Tensors{checkpoint_sequential(net, segments, x)};
        });
    EXPECT_EQ(*calls[2], 1) << "the last part is stored";
    EXPECT_EQ(*calls[0], segments == 1 ? 1 : 2);
  }
}

TEST(SeedTable, CheckpointSequentialRefusesNoSegments) {
  const nn::Sequential net(nn::Linear(4, 4));
  const auto x = torch::rand({2, 4});
  expect_error(ErrorKind::invalid_argument, {"0 segments"}, [&] { checkpoint_sequential(net, 0, x); });
  expect_error(ErrorKind::invalid_argument, {"-3 segments"}, [&] { checkpoint_sequential(net, -3, x); });
  expect_error(ErrorKind::invalid_argument, {"0 modules"}, [&] { checkpoint_sequential(nn::Sequential(), 1, x); });
}

// --- recompute_grad: arguments and results of all kinds

struct RecomputeGrad : ::testing::Test {
  torch::Tensor x = (torch::manual_seed(3), leaf({3, 4}));
  torch::Tensor y = leaf({3, 4});
  torch::Tensor z = leaf({3, 4});
  Tensors leaves{x, y, z};
};

TEST_F(RecomputeGrad, ArgumentsOfAllKinds) {
  struct Config {
    double scale;
    std::string name;
  };
  const auto f = [](const torch::Tensor& a, std::vector<torch::Tensor> list, std::optional<torch::Tensor> maybe,
                    torch::Tensor undefined, int64_t power, const std::string& text, Config config,
                    std::pair<torch::Tensor, double> pair) {
    EXPECT_FALSE(undefined.defined());
    EXPECT_EQ(text, "text");
    EXPECT_EQ(config.name, "config");
    auto result = a.pow(power) * config.scale * pair.first * pair.second;
    for (const auto& t : list) result = result + t.sin();
    return maybe.has_value() ? result * *maybe : result;
  };
  const auto region = recompute_grad(f);
  for (const bool present : {true, false}) {
    const auto call = [&](auto function) {
      return [&, function] {
        std::optional<torch::Tensor> maybe;
        if (present) maybe = z;
        return Tensors{function(x, Tensors{x, y, torch::ones({3, 4}, torch::kDouble)}, maybe, torch::Tensor(),
                                int64_t{3}, std::string("text"), Config{0.5, "config"}, std::make_pair(y, 2.0))};
      };
    };
    expect_like_plain(leaves, call(f), call(region), kRounding);
  }
}

TEST_F(RecomputeGrad, ATensorListThatOwnsNothing) {
  const auto region = recompute_grad([](torch::TensorList list) { return list[0] * list[1]; });
  torch::Tensor result;
  {
    std::vector<torch::Tensor> temporary{x, y};
    result = region(torch::TensorList(temporary));
    temporary.clear();
  }
  result.sum().backward();
  EXPECT_TRUE(x.grad().equal(y.detach()));
  EXPECT_TRUE(y.grad().equal(x.detach()));
}

TEST_F(RecomputeGrad, NonTensorArgumentsAreKeptByValue) {
  std::string mode = "sine";
  const auto region =
      recompute_grad([](torch::Tensor t, const std::string& m) { return m == "sine" ? t.sin() : t.cos(); });
  const auto out = region(x, mode);
  mode = "cosine";
  out.sum().backward();
  EXPECT_TRUE(x.grad().equal(x.detach().cos()));
}

TEST_F(RecomputeGrad, ResultsOfAllKinds) {
  const auto tensor = recompute_grad([](torch::Tensor t) { return t.sin(); });
  static_assert(std::is_same_v<decltype(tensor(x)), torch::Tensor>);
  const auto vector = recompute_grad([](torch::Tensor t) { return std::vector<torch::Tensor>{t.sin(), t.cos()}; });
  static_assert(std::is_same_v<decltype(vector(x)), std::vector<torch::Tensor>>);
  const auto pair = recompute_grad([](torch::Tensor t) { return std::make_pair(t.sin(), 7); });
  EXPECT_EQ(pair(x).second, 7);
  const auto tuple = recompute_grad([](torch::Tensor t) {
    return std::make_tuple(t.sin(), std::vector<torch::Tensor>{t.cos(), torch::Tensor()}, std::string("as is"),
                           torch::Tensor(), std::optional<torch::Tensor>(t * 3), std::optional<torch::Tensor>());
  });
  expect_like_plain(
      leaves, [&] { return Tensors{x.sin(), x.sin(), x.cos(), x.sin(), x.cos(), x * 3}; },
      [&] {
        const auto list = vector(x);
        const auto [sine, more, text, undefined, maybe, nothing] = tuple(x);
        EXPECT_EQ(text, "as is");
        EXPECT_FALSE(undefined.defined());
        EXPECT_FALSE(more[1].defined());
        EXPECT_FALSE(nothing.has_value());
        return Tensors{tensor(x), list[0], list[1], sine, more[0], *maybe};
      },
      kRounding);
}

TEST_F(RecomputeGrad, ModulesAndFunctionsAndFunctors) {
  nn::Linear linear(4, 4);
  linear->to(torch::kDouble);
  Tensors all = linear->parameters();
  all.push_back(x);
  const auto plain = [&] { return Tensors{linear(x)}; };
  expect_like_plain(all, plain, [&] { return Tensors{recompute_grad(linear)(x)}; });
  expect_like_plain(all, plain, [&] { return Tensors{recompute_grad(linear.ptr())(x)}; });
  expect_like_plain(
      all, [&] { return Tensors{x.relu()}; },
      [&] { return Tensors{recompute_grad(static_cast<torch::Tensor (*)(const torch::Tensor&)>(torch::relu))(x)}; });
  const std::function<torch::Tensor(torch::Tensor)> erased = [](torch::Tensor t) { return t.sin(); };
  expect_like_plain(
      all, [&] { return Tensors{x.sin()}; }, [&] { return Tensors{recompute_grad(erased)(x)}; });
}

TEST_F(RecomputeGrad, PassAndIsRecomputing) {
  std::vector<Pass> passes;
  std::vector<bool> inside;
  const auto region = recompute_grad([&](torch::Tensor t, double scale, Pass pass) {
    passes.push_back(pass);
    inside.push_back(regrad::is_recomputing());
    return t.sin() * scale;
  });
  EXPECT_FALSE(regrad::is_recomputing());
  const auto out = region(x, 2.0);
  EXPECT_FALSE(regrad::is_recomputing());
  out.sum().backward({}, true);
  EXPECT_FALSE(regrad::is_recomputing());
  out.sum().backward();
  EXPECT_EQ(passes, (std::vector<Pass>{Pass::forward, Pass::recompute, Pass::recompute}));
  EXPECT_EQ(inside, (std::vector<bool>{false, true, true}));
}

TEST_F(RecomputeGrad, PassOfABlocksFunctions) {
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    std::vector<Pass> passes;
    const auto f = [&](torch::Tensor t, Pass pass) {
      passes.push_back(pass);
      return t.sin();
    };
    RevBlock block(
        RevBlockOptions(1).f(Residual(f)).g([](torch::Tensor t) { return t.cos(); }).memory(strategy.memory));
    run_block(block, x, y)[1].sum().backward();
    if (strategy.memory == Memory::store()) {
      EXPECT_EQ(passes, (std::vector<Pass>{Pass::forward}));
    } else {
      EXPECT_EQ(passes, (std::vector<Pass>{Pass::forward, Pass::recompute}));
    }
  }
}

TEST_F(RecomputeGrad, PassInNestedRegions) {
  std::vector<std::string> runs;
  const auto inner = recompute_grad([&](torch::Tensor t, Pass pass) {
    runs.push_back(pass == Pass::forward ? "inner forward" : "inner recompute");
    return t.sin();
  });
  const auto outer = recompute_grad([&](torch::Tensor t, Pass pass) {
    runs.push_back(pass == Pass::forward ? "outer forward" : "outer recompute");
    return inner(t) * 2;
  });
  expect_like_plain(
      leaves, [&] { return Tensors{x.sin() * 2}; }, [&] { return Tensors{outer(x)}; });
  EXPECT_EQ(runs.front(), "outer forward");
  EXPECT_EQ(runs[1], "inner forward");
  EXPECT_EQ(runs[2], "outer recompute");
  EXPECT_EQ(runs.back(), "inner recompute");
}

TEST_F(RecomputeGrad, DataDependencySurvivesBadGradients) {
  // The reference's: NaN and infinite gradients poison its inputs, empty tensors and integer gradients break it.
  const auto region =
      recompute_grad([](torch::Tensor a, torch::Tensor b) { return std::make_tuple(a * 2, a.cumsum(0) + b.sum()); },
                     {.use_data_dep = true, .tupleize_grads = true});
  const auto empty = torch::empty({0, 4}, torch::kDouble).requires_grad_();
  const auto [first, second] = region(x, empty);
  auto gradient = torch::ones({3, 4}, torch::kDouble);
  gradient[0][0] = std::numeric_limits<double>::quiet_NaN();
  gradient[1][1] = std::numeric_limits<double>::infinity();
  torch::autograd::backward({first}, {gradient});
  const auto expected = gradient * 2;
  EXPECT_TRUE(torch::allclose(x.grad(), expected, 0, 0, /*equal_nan=*/true)) << x.grad();
  EXPECT_EQ(x.grad().isnan().sum().item<int64_t>(), 1);
}

// --- with_custom_grad

TEST_F(RecomputeGrad, CustomGradientErrors) {
  const auto with = [&](regrad::CustomGradients gradients) {
    return regrad::with_custom_grad(
        [&](torch::Tensor a) { return a * y; },
        [gradients](const Tensors&, const Tensors&, const Tensors&, const Tensors&) { return gradients; });
  };
  expect_error(ErrorKind::invalid_argument, {"2 gradients of inputs", "1"}, [&] {
    with({{x, x}, {y}})(x).sum().backward();
  });
  expect_error(ErrorKind::invalid_argument, {"0 gradients of variables", "1"}, [&] {
    with({{x}, {}})(x).sum().backward();
  });
  const auto captured = y * 2;
  expect_error(ErrorKind::unsupported, {"captures", "Pass it as an input"}, [&] {
    regrad::with_custom_grad(
        [&](torch::Tensor a) { return a * captured; },
        [](const Tensors&, const Tensors&, const Tensors&, const Tensors&) { return regrad::CustomGradients{}; })(x);
  });
}

TEST_F(RecomputeGrad, CustomGradientSeesAllThatItShould) {
  const auto fn = regrad::with_custom_grad(
      [&](torch::Tensor a, std::vector<torch::Tensor> list) { return std::make_tuple(a * y, list[0] * 2); },
      [&](const Tensors& inputs, const Tensors& variables, const Tensors& outputs, const Tensors& grad_outputs) {
        EXPECT_EQ(inputs.size(), 2U);
        EXPECT_TRUE(inputs[0].is_same(x));
        EXPECT_EQ(variables.size(), 1U);
        EXPECT_TRUE(variables[0].is_same(y));
        EXPECT_EQ(outputs.size(), 2U);
        EXPECT_TRUE(outputs[0].equal(x * y));
        EXPECT_TRUE(grad_outputs[0].defined());
        EXPECT_FALSE(grad_outputs[1].defined()) << "the second output is not used";
        return regrad::CustomGradients{{torch::full_like(x, 5), torch::Tensor()}, {torch::full_like(y, 6)}};
      });
  const auto [first, second] = fn(x, Tensors{z});
  first.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full_like(x, 5)));
  EXPECT_TRUE(y.grad().equal(torch::full_like(y, 6)));
  EXPECT_FALSE(z.grad().defined());
}

TEST_F(RecomputeGrad, CustomGradientSecondOrder) {
  // d(a^3)/da given by hand, then differentiated again.
  const auto cube = regrad::with_custom_grad([](torch::Tensor a) { return a.pow(3); },
                                             [](const Tensors& in, const Tensors&, const Tensors&, const Tensors& d) {
                                               return regrad::CustomGradients{{d[0] * 3 * in[0].pow(2)}, {}};
                                             });
  const auto first = torch::autograd::grad({cube(x).sum()}, {x}, {}, true, true)[0];
  const auto second = torch::autograd::grad({first.sum()}, {x})[0];
  EXPECT_TRUE(torch::allclose(second, 6 * x.detach(), 1e-12));
}

TEST_F(RecomputeGrad, CustomGradientInsideARegionAndABlock) {
  const auto doubled =
      regrad::with_custom_grad([&](torch::Tensor a) { return a * y; },
                               [](const Tensors& in, const Tensors& variables, const Tensors&, const Tensors& d) {
                                 return regrad::CustomGradients{{d[0] * variables[0] * 2}, {d[0] * in[0] * 2}};
                               });
  const Residue f = doubled;
  expect_like_plain(
      leaves, [&] { return Tensors{f(x).sin()}; },
      [&] { return Tensors{recompute_grad([&](torch::Tensor t) { return f(t).sin(); })(x)}; });
  expect_block_like_plain(
      leaves, {f, f}, {f, f},
      [&] {
        return Tensors{x, z};
      },
      kRounding);
}

}  // namespace
