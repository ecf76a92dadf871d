// The battery over every kind of part: blocks under each strategy, recomputed functions, and their combinations.

#include "support/battery.h"

#include "regrad/regrad.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;
using regrad::RevBlock;
using regrad::RevBlockOptions;
namespace nn = torch::nn;

namespace {

constexpr int64_t kWidth = 3;
constexpr int64_t kBatch = 4;
constexpr int64_t kStreamBytes = kBatch * kWidth * 8;

/// A residual function with parameters, state and randomness, which counts its calls.
struct NetImpl : nn::Cloneable<NetImpl> {
  explicit NetImpl(std::shared_ptr<int> c) : calls(std::move(c)) { NetImpl::reset(); }

  void reset() override {
    linear = register_module("linear", nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
    norm = register_module("norm", nn::BatchNorm1d(kWidth));
    to(torch::kDouble);
  }

  torch::Tensor forward(torch::Tensor x) {
    ++*calls;
    torch::Tensor y = norm->forward(linear->forward(x));
    y.mul_(0.5);  // in place on what is its own
    return torch::dropout(torch::tanh(y), 0.25, is_training());
  }

  nn::Linear linear{nullptr};
  nn::BatchNorm1d norm{nullptr};
  std::shared_ptr<int> calls;
};
TORCH_MODULE(Net);

/// What is held for a Net between forward and backward, in tensors: the batch norm's counter.
constexpr int64_t kNetBytes = 8;

Residue call(const Net& net) {
  return [net](torch::Tensor x) { return net.ptr()->forward(x); };
}

void add_module(Part& part, const nn::Module& module) {
  for (const auto& parameter : module.parameters()) part.leaves.push_back(parameter);
  for (const auto& buffer : module.buffers()) part.buffers.push_back(buffer);
}

Part new_part(const std::string& name) {
  torch::manual_seed(1);
  Part part;
  part.name = name;
  part.inputs = {leaf({kBatch, kWidth}), leaf({kBatch, kWidth})};
  return part;
}

std::string test_name(const ::testing::TestParamInfo<Part>& info) {
  std::string name = info.param.name;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return name;
}

struct Battery : ::testing::TestWithParam<Part> {};

TEST_P(Battery, LikePlain) { run_battery(GetParam()); }

// --- Blocks

/// Rounding of the reconstruction, in double precision. The functions are contractive.
constexpr Tolerance kReconstruction{1e-11};

Part block_part(const std::string& kind, int64_t depth, const Memory& memory) {
  Part part = new_part(kind + ", " + std::to_string(depth) + " layers, " + memory.to_string());
  const auto layers = static_cast<size_t>(depth);
  std::vector<Net> f, g;
  for (size_t i = 0; i < layers; ++i) {
    const bool share = kind == "shared" && i > 0;
    f.push_back(share ? f.front() : Net(part.calls));
    g.push_back(share ? g.front() : Net(part.calls));
  }

  RevBlockOptions options(depth);
  options.memory(memory);
  if (kind == "factories") {
    options.f([&](int64_t layer) { return f[static_cast<size_t>(layer)]; });
    options.g([&](int64_t layer) { return g[static_cast<size_t>(layer)]; });
  } else if (kind == "shared") {
    options.f(f.front()).g(g.front());
  } else {
    options.f(f).g(g);
  }
  RevBlock block(options);
  add_module(part, *block);

  Residues plain_f, plain_g;
  for (size_t i = 0; i < layers; ++i) {
    plain_f.push_back(call(f[i]));
    plain_g.push_back(call(g[i]));
  }
  part.plain = [=](const Tensors& x) { return plain_block(x[0], x[1], plain_f, plain_g); };
  part.ours = [=](const Tensors& x) mutable { return run_block(block, x[0], x[1]); };
  const bool stores = memory == Memory::store();
  part.evaluations = stores ? 1 : 2;
  if (memory == Memory::reverse()) {
    part.tolerance = kReconstruction;
    part.held_bytes = 2 * kStreamBytes + 2 * depth * kNetBytes;
  } else if (!stores) {
    // The inputs of the first segment are the caller's.
    const int64_t segments = (depth + memory.segment() - 1) / memory.segment();
    part.held_bytes = 2 * kStreamBytes * segments + 2 * depth * kNetBytes;
  }
  return part;
}

/// Callables without modules: captured leaves, one of them in both functions; side inputs, shared, without grad and
/// undefined.
Part lambda_block_part(int64_t depth, const Memory& memory) {
  Part part = new_part("lambdas, " + std::to_string(depth) + " layers, " + memory.to_string());
  const torch::Tensor p = leaf({kWidth, kWidth}), q = leaf({kWidth}), s = leaf({kBatch, kWidth});
  const torch::Tensor mask = torch::rand({kBatch, 1}, torch::kDouble);
  part.leaves = {p, q, s};
  const auto f = [p, q, calls = part.calls](const torch::Tensor& x, const std::vector<torch::Tensor>& side) {
    ++*calls;
    return (x.mm(p) * 0.3 + side[0]).tanh() * q * side[1];
  };
  const auto g = [q, calls = part.calls](const torch::Tensor& x, const std::vector<torch::Tensor>& side) {
    ++*calls;
    return (x * q).sin() * side[0] * (side[1].defined() ? 2 : 0.5);
  };
  const regrad::SideInputs side{.f = {s, mask}, .g = {s, torch::Tensor()}};
  RevBlock block(RevBlockOptions(depth).f(f).g(g).memory(memory));
  part.plain = [=](const Tensors& x) {
    const auto layer = [&](auto function, const Tensors& more) {
      return [=](torch::Tensor t) { return function(t, more); };
    };
    return plain_block(x[0], x[1], Residues(static_cast<size_t>(depth), layer(f, side.f)),
                       Residues(static_cast<size_t>(depth), layer(g, side.g)));
  };
  part.ours = [=](const Tensors& x) mutable { return run_block(block, x[0], x[1], side); };
  part.evaluations = memory == Memory::store() ? 1 : 2;
  if (memory == Memory::reverse()) {
    part.tolerance = kReconstruction;
    part.held_bytes = 2 * kStreamBytes;
  }
  return part;
}

/// Four-dimensional streams, of which the memory format is kept.
Part conv_block_part(const Memory& memory) {
  Part part = new_part("convolutions, " + memory.to_string());
  part.inputs = {leaf({2, 2, 3, 4}), leaf({2, 2, 3, 4})};
  const auto net = [] {
    nn::Sequential result(nn::BatchNorm2d(2), nn::Tanh(), nn::Conv2d(nn::Conv2dOptions(2, 2, 3).padding(1)));
    result->to(torch::kDouble);
    return result;
  };
  const nn::Sequential f = net(), g = net();
  RevBlock block(RevBlockOptions(2).f(f).g(g).memory(memory));
  add_module(part, *block);
  const auto call = [](nn::Sequential s) { return [s](torch::Tensor x) { return s.ptr()->forward(x); }; };
  part.plain = [=](const Tensors& x) { return plain_block(x[0], x[1], {call(f), call(f)}, {call(g), call(g)}); };
  part.ours = [=](const Tensors& x) mutable { return run_block(block, x[0], x[1]); };
  if (memory == Memory::reverse()) part.tolerance = kReconstruction;
  return part;
}

/// Functions that hand their input or a captured tensor on.
Part identity_block_part(const Memory& memory) {
  Part part = new_part("identities, " + memory.to_string());
  const torch::Tensor p = leaf({kBatch, kWidth});
  part.leaves = {p};
  const Residue identity = [](torch::Tensor x) { return x; };
  const Residue view = [](torch::Tensor x) { return x.t().t(); };
  const Residue captured = [p](torch::Tensor) { return p; };
  const Residues f{identity, view, captured}, g{view, captured, identity};
  RevBlock block = make_block(f, g, memory);
  part.plain = [=](const Tensors& x) { return plain_block(x[0], x[1], f, g); };
  part.ours = [=](const Tensors& x) mutable { return run_block(block, x[0], x[1]); };
  part.tolerance = {1e-14};  // sums in another order
  return part;
}

/// Forward under one strategy, which another replaces before backward.
Part changed_strategy_part(const Memory& first, const Memory& second) {
  Part part = block_part("lists", 2, first);
  part.name = "forward under " + first.to_string() + ", then set to " + second.to_string();
  part.held_bytes.reset();
  RevBlock block{nullptr};
  std::vector<Net> f{Net(part.calls), Net(part.calls)};
  block = RevBlock(RevBlockOptions(2).f(f).g(f));
  part.leaves.clear();
  part.buffers.clear();
  add_module(part, *f[0]);
  add_module(part, *f[1]);
  const Residues functions{call(f[0]), call(f[1])};
  part.plain = [=](const Tensors& x) { return plain_block(x[0], x[1], functions, functions); };
  part.ours = [=](const Tensors& x) mutable {
    block->set_memory(first);
    Tensors y = run_block(block, x[0], x[1]);
    block->set_memory(second);
    return y;
  };
  return part;
}

std::vector<Part> block_parts() {
  std::vector<Part> parts;
  for (const Memory& memory : {Memory::store(), Memory::recompute(1), Memory::recompute(3), Memory::reverse()}) {
    for (const int64_t depth : {1, 2, 8}) {
      for (const char* kind : {"factories", "lists", "shared"}) parts.push_back(block_part(kind, depth, memory));
      parts.push_back(lambda_block_part(depth, memory));
    }
    parts.push_back(conv_block_part(memory));
    parts.push_back(identity_block_part(memory));
    for (const Memory& other : {Memory::store(), Memory::recompute(2), Memory::reverse()}) {
      if (other != memory) parts.push_back(changed_strategy_part(memory, other));
    }
  }
  return parts;
}

INSTANTIATE_TEST_SUITE_P(Blocks, Battery, ::testing::ValuesIn(block_parts()), test_name);

// --- Recomputed functions

/// Two inputs, a vector and a captured leaf; two results, one of which does not depend on all, and one of integers.
Part callable_part() {
  Part part = new_part("a callable");
  const torch::Tensor p = leaf({kWidth, kWidth}), q = leaf({kWidth});
  part.leaves = {p, q};
  const auto f = [p, q, calls = part.calls](torch::Tensor a, torch::Tensor b) {
    ++*calls;
    const torch::Tensor h = torch::dropout(a.mm(p).tanh(), 0.25, true);
    return std::make_tuple(h * b, h.argmax(1), (b * q).sin());
  };
  const auto flat = [](auto result) {
    auto [y, index, z] = result;
    return Tensors{y, index, z};
  };
  part.plain = [=](const Tensors& x) { return flat(f(x[0], x[1])); };
  part.ours = [=](const Tensors& x) { return flat(recompute_grad(f)(x[0], x[1])); };
  part.held_bytes = 2 * kStreamBytes + kBatch * 8;  // the results
  return part;
}

Part module_part(const std::string& name, int evaluations, const std::function<Residue(Net, Net)>& plain,
                 const std::function<Residue(Net, Net)>& ours) {
  Part part = new_part(name);
  const Net first(part.calls), second(part.calls);
  add_module(part, *first);
  add_module(part, *second);
  part.inputs.pop_back();
  part.plain = [f = plain(first, second)](const Tensors& x) { return Tensors{f(x[0])}; };
  part.ours = [f = ours(first, second)](const Tensors& x) { return Tensors{f(x[0])}; };
  part.evaluations = evaluations;
  return part;
}

Residue chain(Net first, Net second) {
  return [=](torch::Tensor x) { return call(second)(call(first)(x)); };
}

Residue block_of(Net first, Net second, const Memory& memory) {
  RevBlock block(RevBlockOptions(2).f(first).g(second).memory(memory));
  return [block](torch::Tensor x) mutable {
    const auto [y1, y2] = block->forward(x, x * 2);
    return y1 * y2;
  };
}

/// Gradients that are the cotangent itself, by way of views or not.
Part identity_part() {
  Part part = new_part("identities");
  const torch::Tensor p = leaf({kWidth, kBatch});
  part.leaves = {p};
  const auto f = [p](torch::Tensor a, torch::Tensor b) { return b + a.view_as(a) + p.t(); };
  part.plain = [=](const Tensors& x) { return Tensors{f(x[0], x[1])}; };
  part.ours = [=](const Tensors& x) { return Tensors{recompute_grad(f)(x[0], x[1])}; };
  return part;
}

std::vector<Part> recompute_parts() {
  std::vector<Part> parts{callable_part(), identity_part()};
  parts.push_back(module_part("modules", 2, chain, [](Net first, Net second) -> Residue {
    return [=](torch::Tensor x) { return recompute_grad(second)(recompute_grad(first)(x)); };
  }));
  parts.back().held_bytes = 2 * (kStreamBytes + kNetBytes);
  parts.push_back(module_part("a Recompute in a Sequential", 2, chain, [](Net first, Net second) -> Residue {
    nn::Sequential net{regrad::Recompute(regrad::Residual(first)), regrad::Recompute(regrad::Residual(second))};
    return [net](torch::Tensor x) mutable { return net->forward(x); };
  }));
  // Each level runs again whenever the one around it does.
  parts.push_back(module_part("nested regions", 3, chain, [](Net first, Net second) -> Residue {
    return recompute_grad([=](torch::Tensor x) { return recompute_grad(second)(recompute_grad(first)(x)); });
  }));
  parts.push_back(
      module_part("checkpoint_sequential, one of two parts again", 1, chain, [](Net first, Net second) -> Residue {
        nn::Sequential net(first, second);
        return [net](torch::Tensor x) { return regrad::checkpoint_sequential(net, 2, x); };
      }));
  parts.back().calls = std::make_shared<int>(0);  // not twice each: tests/recompute_test.cpp counts
  for (const Memory& memory : {Memory::store(), Memory::recompute(1), Memory::reverse()}) {
    const std::string name = memory.to_string();
    const int evaluations = memory == Memory::store() ? 2 : 3;
    const auto plain = [](Net first, Net second) { return block_of(first, second, Memory::store()); };
    parts.push_back(
        module_part("a block inside a region, " + name, evaluations, plain,
                    [=](Net first, Net second) -> Residue { return recompute_grad(block_of(first, second, memory)); }));
    if (memory == Memory::reverse()) parts.back().tolerance = kReconstruction;
    parts.push_back(
        module_part("regions inside a block, " + name, evaluations, plain, [=](Net first, Net second) -> Residue {
          const auto region = [](Net net) {
            return regrad::each_layer(regrad::Residual({net.ptr()}, recompute_grad(net)));
          };
          RevBlock block(RevBlockOptions(2).f(region(first)).g(region(second)).memory(memory));
          return [block](torch::Tensor x) mutable {
            const auto [y1, y2] = block->forward(x, x * 2);
            return y1 * y2;
          };
        }));
    if (memory == Memory::reverse()) parts.back().tolerance = kReconstruction;
  }
  return parts;
}

INSTANTIATE_TEST_SUITE_P(Recompute, Battery, ::testing::ValuesIn(recompute_parts()), test_name);

// --- Custom gradients

Part custom_gradient_part() {
  Part part = new_part("a custom gradient");
  part.inputs.pop_back();
  const torch::Tensor p = leaf({kWidth});
  part.leaves = {p};
  const auto f = [p](torch::Tensor x) { return (x * p).sin(); };
  const auto gradient = [](const Tensors& inputs, const Tensors& variables, const Tensors&,
                           const Tensors& grad_outputs) {
    const torch::Tensor inner = grad_outputs[0] * (inputs[0] * variables[0]).cos();
    return regrad::CustomGradients{{inner * variables[0]}, {(inner * inputs[0]).sum(0)}};
  };
  part.plain = [=](const Tensors& x) { return Tensors{f(x[0])}; };
  part.ours = [=](const Tensors& x) { return Tensors{regrad::with_custom_grad(f, gradient)(x[0])}; };
  part.tolerance = {1e-15};  // the formula multiplies in another order
  return part;
}

INSTANTIATE_TEST_SUITE_P(CustomGradient, Battery, ::testing::Values(custom_gradient_part()), test_name);

}  // namespace
