// Programs that broke regrad once, and are no part of another topic.

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;
namespace nn = torch::nn;

namespace {

TEST(Breakage, AScopeThatTheUserMarksHidesNoOperator) {
  nn::BatchNorm1d norm(4);
  const auto x = leaf({8, 4}, torch::kFloat);
  const auto f = [norm](torch::Tensor t) mutable {
    RECORD_FUNCTION("layer", std::vector<c10::IValue>{});
    return norm->forward(t);
  };
  recompute_grad(f)(x).sum().backward();
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(Breakage, AViewOfAnInputWithoutGradStaysItsView) {
  const auto w = torch::ones({4}).requires_grad_();
  const auto x = torch::ones({4});
  auto view = recompute_grad([](torch::Tensor t) { return t.view({2, 2}); })(x);
  const auto y = x * w;
  view.mul_(5);
  EXPECT_THROW(y.sum().backward(), c10::Error) << "plain has saved x and sees that it was written";

  auto buffer = torch::zeros({4});
  recompute_grad([](torch::Tensor t) { return t.view({2, 2}); })(buffer).copy_((w * 2).view({2, 2}));
  EXPECT_TRUE(buffer.requires_grad());
}

TEST(Breakage, LazyConjugatesAndNegatives) {
  const auto z = torch::randn({3}, torch::kComplexDouble).requires_grad_();
  const auto f = [](torch::Tensor a) { return torch::view_as_real(a.conj().resolve_conj()).neg(); };
  const auto program = [&](auto g) {
    return [&z, g] {
      const auto imaginary = torch::imag(z.conj());
      return Tensors{g(z.conj()), torch::view_as_real(z).sum() + imaginary};
    };
  };
  expect_like_plain({z}, program(f), program(recompute_grad(f)));
  const auto imaginary = torch::imag(torch::randn({2}, torch::kComplexDouble).conj());
  EXPECT_TRUE(recompute_grad([](torch::Tensor t) { return t.view({2, 1}); })(imaginary).equal(imaginary.view({2, 1})));
}

TEST(Breakage, ACapturedTensorWrittenThroughAPassingView) {
  const auto x = leaf({4});
  auto counts = torch::zeros({2}, torch::kDouble);
  const auto f = [counts](torch::Tensor t) {
    counts[0] += 1;
    return t.sin() * counts[0];
  };
  auto y = recompute_grad(f)(x);
  y.sum().backward();
  EXPECT_EQ(counts[0].item<double>(), 1);
  EXPECT_TRUE(x.grad().equal(x.detach().cos()));
}

TEST(Breakage, ACounterThatIsReturned) {
  const auto x = leaf({4});
  auto count = torch::zeros({}, torch::kDouble);
  const auto [y, seen] = recompute_grad([count](torch::Tensor t) mutable {
    count.add_(1);
    return std::make_tuple(t * 2, count);
  })(x);
  y.sum().backward();
  EXPECT_EQ(count.item<double>(), 1);
}

/// A kernel that asks for writable memory inside at::parallel_for, which Torch refuses for copy-on-write memory.
torch::Tensor doubled(torch::Tensor t) {
  const auto input = t.detach();
  auto output = torch::empty(input.sizes(), input.options());
  at::parallel_for(0, input.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      output.mutable_data_ptr<double>()[i] = 2 * input.data_ptr<double>()[i * input.stride(0)];
    }
  });
  return output;
}

TEST(Breakage, C30_DataPtrInsideParallelFor) {
  const auto x = leaf({16, 2});
  const auto f = [](torch::Tensor t) { return t * doubled(t); };
  // A column: not dense, and not at the start of its memory.
  expect_like_plain({x}, [&] { return Tensors{f(x.select(1, 1))}; },
                    [&] { return Tensors{recompute_grad(f)(x.select(1, 1))}; });
}

}  // namespace
