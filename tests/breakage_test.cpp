// Programs that broke regrad once, and are no part of another topic.

#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

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
  expect_like_plain(
      {x}, [&] { return Tensors{f(x.select(1, 1))}; }, [&] { return Tensors{recompute_grad(f)(x.select(1, 1))}; });
}

TEST(Breakage, C30_DataPtrInsideParallelForOfWhatIsCaptured) {
  // A captured tensor that another region keeps as its input, and a buffer that is larger than what is copied.
  const auto x = leaf({16});
  const auto captured = torch::randn({16}, torch::kDouble);
  struct Net : nn::Module {
    torch::Tensor scale = register_buffer("scale", torch::randn({1024}, torch::kDouble));
    torch::Tensor forward(torch::Tensor t) { return t * doubled(scale).sum() + scale.add_(1).sum(); }
  };
  const auto start = torch::randn({1024}, torch::kDouble);
  const auto net = std::make_shared<Net>();
  const auto program = [&](auto wrap) {
    return [&, wrap] {
      net->scale.detach().copy_(start);
      const auto kept = wrap([](torch::Tensor t, torch::Tensor c) { return t * c; })(x, captured);
      return Tensors{kept, wrap([captured](torch::Tensor t) { return t * doubled(captured); })(x), wrap(net)(x)};
    };
  };
  const auto plain = [](auto f) {
    return [f](const auto&... args) {
      if constexpr (requires { f->forward(args...); }) {
        return f->forward(args...);
      } else {
        return f(args...);
      }
    };
  };
  expect_like_plain({x}, program(plain), program([](auto f) { return recompute_grad(f); }));
  EXPECT_TRUE(net->scale.equal(start + 1));
}

/// A custom function whose backward asks for its saved input's memory inside at::parallel_for.
struct Squared : torch::autograd::Function<Squared> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& t) {
    context->save_for_backward({t});
    return t * t;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    return {gradients.front() * doubled(context->get_saved_variables().front())};
  }
};

TEST(Breakage, C30_DataPtrInsideParallelForOfABackward) {
  const auto x = leaf({16});
  const auto y = recompute_grad([](torch::Tensor t) { return Squared::apply(t); })(x);
  expect_error(regrad::ErrorKind::unsupported, {"parallel_for", "Take the pointer before the loop"},
               [&] { y.sum().backward(); });
}

/// A block, or a region, of `net` on x, for tests of what happens between forward and backward.
Tensors region_and_block(const std::shared_ptr<nn::SequentialImpl>& net, const torch::Tensor& x, bool plain) {
  const auto f = [net](torch::Tensor t) { return net->forward(t); };
  regrad::RevBlock block(regrad::RevBlockOptions(2).f(f).g(f));
  const Tensors y = plain ? plain_block(x, x * 1, {f, f}, {f, f}) : run_block(block, x, x * 1);
  return {plain ? f(x) : recompute_grad(f)(x), y[0], y[1]};
}

std::shared_ptr<nn::SequentialImpl> small_net() {
  nn::Sequential net(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
  net->to(torch::kDouble);
  return net.ptr();
}

TEST(Breakage, ParametersFrozenAndReleasedBetweenForwardAndBackward) {
  torch::manual_seed(1);
  const auto x = leaf({3, 4});
  const auto net = small_net();
  const Tensors parameters = net->parameters();
  const auto gradients = [&](bool plain) {
    parameters[0].requires_grad_(true);
    parameters[2].requires_grad_(false);
    const Tensors outputs = region_and_block(net, x, plain);
    parameters[0].requires_grad_(false);
    parameters[2].requires_grad_(true);
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (const auto& output : outputs) loss = loss + output.sin().sum();
    loss.backward();
    EXPECT_FALSE(parameters[0].requires_grad());
    EXPECT_TRUE(parameters[2].requires_grad());
    Tensors leaves = parameters;
    leaves.push_back(x);
    return take_gradients(leaves);
  };
  const Tensors expected = gradients(true);
  EXPECT_FALSE(expected[0].defined());
  EXPECT_FALSE(expected[2].defined());
  EXPECT_TRUE(expected[1].defined());
  expect_close(expected, gradients(false), Tolerance{1e-12});
}

TEST(Breakage, AModuleConvertedBetweenForwardAndBackward) {
  const auto x = leaf({3, 4});
  for (const size_t output : {0, 1}) {
    const auto net = small_net();
    const Tensors outputs = region_and_block(net, x, false);
    net->to(torch::kFloat);
    expect_error(regrad::ErrorKind::tensor_modified, {"Float", "was Double", "before the module is moved or converted"},
                 [&] { outputs[output].sum().backward(); });
  }
}

}  // namespace
