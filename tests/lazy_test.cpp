// recompute_grad on a lazy device, whose compiler sees both runs: Torch's TorchScript backend.

#include <torch/csrc/jit/passes/common_subexpression_elimination.h>
#include <torch/csrc/lazy/backend/lowering_context.h>
#include <torch/csrc/lazy/core/ir_util.h>
#include <torch/csrc/lazy/core/tensor.h>
#include <torch/csrc/lazy/ts_backend/ts_backend_impl.h>
#include <torch/csrc/lazy/ts_backend/ts_lowering_context.h>

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::recompute_grad;
using regrad::RecomputeOptions;

namespace {

at::Device lazy_device() {
  static const bool initialised = [] {
    torch::lazy::InitTorchScriptBackend();
    return true;
  }();
  (void)initialised;
  return at::Device(c10::kLazy, 0);
}

/// The graph that the backend would compile for `tensors`, after it has merged equal computations.
std::shared_ptr<torch::jit::Graph> compiled_graph(const Tensors& tensors) {
  std::vector<torch::lazy::Value> values;
  std::vector<const torch::lazy::Node*> roots;
  for (const auto& tensor : tensors) {
    values.push_back(torch::lazy::TryGetLtcTensor(tensor)->GetIrValue());
    roots.push_back(values.back().node.get());
  }
  torch::lazy::Util::EmissionMap emitted;
  const auto order = torch::lazy::Util::ComputePostOrder(roots, &emitted);
  const auto device = *torch::lazy::GetBackendDevice(tensors.front());
  auto context = torch::lazy::LoweringContext::Create("test", device, order, std::move(emitted));
  for (const auto& value : values) context->AddResult(torch::lazy::Output(value.node.get(), value.index));
  auto graph = std::static_pointer_cast<torch::lazy::TSComputation>(context->Build())->graph()->copy();
  torch::jit::EliminateCommonSubexpression(graph);
  return graph;
}

std::vector<const torch::jit::Node*> nodes_of(torch::jit::Graph& graph, const char* kind) {
  std::vector<const torch::jit::Node*> found;
  for (const auto* node : graph.nodes()) {
    if (node->kind() == c10::Symbol::fromQualString(kind)) found.push_back(node);
  }
  return found;
}

/// Whether `value` is computed from an output of `node`.
bool depends_on(const torch::jit::Value* value, const torch::jit::Node* node) {
  if (value->node() == node) return true;
  const auto inputs = value->node()->inputs();
  return std::any_of(inputs.begin(), inputs.end(), [&](const auto* input) { return depends_on(input, node); });
}

struct Lazy : ::testing::Test {
  torch::Tensor x_cpu = (torch::manual_seed(4), torch::rand({3, 3}));
  torch::Tensor x = x_cpu.to(lazy_device()).requires_grad_();
  /// Nothing else uses sigmoid, so that its occurrences are the runs of the function.
  std::function<torch::Tensor(torch::Tensor)> f = [](torch::Tensor t) { return t.sigmoid().tanh(); };
};

TEST_F(Lazy, ValuesAndGradientsAreThoseOfTheEagerDevice) {
  const auto reference = x_cpu.clone().requires_grad_();
  auto expected = f(reference);
  expected.sum().backward();
  for (const bool data : {false, true}) {
    for (const bool tuple : {false, true}) {
      x.mutable_grad() = torch::Tensor();
      auto y = recompute_grad(f, RecomputeOptions{.use_data_dep = data, .tupleize_grads = tuple})(x);
      y.sum().backward();
      // Another compiler: rounding.
      EXPECT_TRUE(torch::allclose(y.detach().cpu(), expected.detach(), 1e-6, 1e-6));
      EXPECT_TRUE(torch::allclose(x.grad().cpu(), reference.grad(), 1e-6, 1e-6));
    }
  }
}

TEST_F(Lazy, TheSecondRunWaitsForTheGradients) {
  // On by default here. Without it, the second run's input would be the first's: a compiler may merge both.
  for (const std::optional<bool> data_dependency : {std::optional<bool>(), std::optional<bool>(false)}) {
    x.mutable_grad() = torch::Tensor();
    auto y = recompute_grad(f, {.use_data_dep = data_dependency})(x);
    y.sum().backward();
    const auto graph = compiled_graph({y.detach(), x.grad()});
    const auto runs = nodes_of(*graph, "aten::sigmoid");
    ASSERT_EQ(runs.size(), 2u) << *graph;
    EXPECT_TRUE(depends_on(graph->outputs()[0], runs[0]));
    EXPECT_FALSE(depends_on(graph->outputs()[0], runs[1]));
    EXPECT_TRUE(depends_on(graph->outputs()[1], runs[1])) << "the gradient uses the second run";
    // The incoming gradient is expanded from that of the sum.
    const auto gradients = nodes_of(*graph, "aten::expand_copy");
    ASSERT_EQ(gradients.size(), 1u) << *graph;
    EXPECT_EQ(depends_on(runs[1]->output(), gradients[0]), !data_dependency.has_value()) << *graph;
  }
}

TEST_F(Lazy, TupleizeGradsTiesTheGradientsTogether) {
  auto p = torch::rand({3, 3}).to(lazy_device()).requires_grad_();
  const auto g = [&](torch::Tensor t) { return t.exp() + p.sigmoid(); };
  for (const bool tuple : {false, true}) {
    x.mutable_grad() = p.mutable_grad() = torch::Tensor();
    recompute_grad(g, {.use_data_dep = false, .tupleize_grads = tuple})(x).sum().backward();
    const auto graph = compiled_graph({x.grad(), p.grad()});
    // exp is its own derivative, which x alone needs, unless both gradients are tied.
    const auto exponentials = nodes_of(*graph, "aten::exp");
    ASSERT_FALSE(exponentials.empty()) << *graph;
    EXPECT_EQ(depends_on(graph->outputs()[1], exponentials.back()), tuple);
  }
}

TEST(DataDependency, ChangesNoBitWhateverTheGradientsAre) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto infinity = std::numeric_limits<double>::infinity();
  for (const double seed_gradient : {1.0, 0.0, nan, infinity, -infinity}) {
    const auto x = torch::tensor({-0.0, 2.0, 3.0}).requires_grad_();
    const auto p = torch::tensor({1.0, 2.0, 3.0}).requires_grad_();
    torch::Tensor seen;
    const auto f = [&](torch::Tensor t) {
      if (regrad::is_recomputing()) seen = t.detach().clone();
      return t * p;
    };
    auto y = recompute_grad(f, {.use_data_dep = true, .tupleize_grads = true})(x);
    y.backward(torch::full({3}, seed_gradient));
    EXPECT_TRUE(seen.equal(x.detach()));
    EXPECT_TRUE(std::signbit(seen[0].item<float>())) << "negative zero stays";
    EXPECT_TRUE(torch::allclose(p.grad(), x.detach() * seed_gradient, 0, 0, /*equal_nan=*/true));
  }
  const auto empty = torch::ones({0}).requires_grad_();
  recompute_grad([](torch::Tensor t) { return t * 2; }, {.use_data_dep = true})(empty).sum().backward();
  EXPECT_EQ(empty.grad().numel(), 0);
}

}  // namespace
