#include "support/compare.h"

#include <gtest/gtest.h>

namespace regrad::testing {

torch::Tensor leaf(torch::IntArrayRef sizes, torch::Dtype dtype) {
  return torch::randn(sizes, torch::TensorOptions(dtype)).requires_grad_();
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

Tensors take_gradients(const Tensors& leaves) {
  Tensors gradients;
  for (torch::Tensor leaf : leaves) {
    gradients.push_back(leaf.grad().defined() ? leaf.grad().clone() : torch::Tensor());
    leaf.mutable_grad() = torch::Tensor();
  }
  return gradients;
}

torch::Tensor weighted_sum(const Tensors& tensors) {
  auto generator = at::detail::createCPUGenerator(8);
  torch::Tensor sum;
  for (const torch::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    const auto weights = torch::randn(tensor.sizes(), generator, torch::dtype(torch::kDouble)).to(tensor.dtype());
    const auto term = (tensor * weights).to(torch::kDouble).sum();
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

Outcome run(const Tensors& leaves, const std::function<Tensors()>& program, uint64_t seed) {
  take_gradients(leaves);
  torch::manual_seed(seed);
  Outcome outcome;
  outcome.outputs = program();
  outcome.random_after = torch::rand({3});

  const torch::Tensor loss = weighted_sum(outcome.outputs);
  if (loss.defined()) loss.backward();
  outcome.gradients = take_gradients(leaves);
  return outcome;
}

void expect_close(const Tensors& expected, const Tensors& found, Tolerance tolerance) {
  ASSERT_EQ(expected.size(), found.size());
  double largest = 0;
  for (const torch::Tensor& t : expected) {
    if (t.defined() && t.numel() > 0) largest = std::max(largest, t.abs().max().item<double>());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    ASSERT_EQ(expected[i].defined(), found[i].defined());
    if (!expected[i].defined()) continue;
    ASSERT_EQ(expected[i].sizes(), found[i].sizes());
    ASSERT_EQ(expected[i].dtype(), found[i].dtype());
    if (tolerance.relative == 0) {
      EXPECT_TRUE(expected[i].equal(found[i]))
          << "not the same bits; largest difference " << (expected[i] - found[i]).abs().max().item<double>();
    } else if (expected[i].numel() > 0) {
      EXPECT_LE((expected[i] - found[i]).abs().max().item<double>(), tolerance.relative * largest);
    }
  }
}

void expect_like_plain(const Tensors& leaves, const std::function<Tensors()>& plain,
                       const std::function<Tensors()>& ours, Tolerance tolerance) {
  const Outcome expected = run(leaves, plain);
  const Outcome found = run(leaves, ours);
  {
    SCOPED_TRACE("outputs");
    expect_close(expected.outputs, found.outputs);
    for (size_t i = 0; i < expected.outputs.size(); ++i) {
      if (!expected.outputs[i].defined()) continue;
      EXPECT_EQ(expected.outputs[i].requires_grad(), found.outputs[i].requires_grad()) << "output " << i;
      EXPECT_EQ(expected.outputs[i].strides(), found.outputs[i].strides()) << "output " << i;
    }
  }
  {
    SCOPED_TRACE("gradients");
    expect_close(expected.gradients, found.gradients, tolerance);
  }
  EXPECT_TRUE(expected.random_after.equal(found.random_after)) << "the generator is left elsewhere";
}

}  // namespace regrad::testing
