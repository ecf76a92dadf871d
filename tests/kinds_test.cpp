// Other kinds of tensors, functions and modes (C29 to C32), and two programs from elsewhere (C22, C35).

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/script.h>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"

using namespace regrad::testing;
using regrad::Error;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::recompute_grad;
using regrad::RevBlock;
using regrad::RevBlockOptions;
namespace nn = torch::nn;

namespace {

// The container, the output, its graph and the function own each other in a circle, which backward opens. (A graph that
// is never run keeps it closed, as in plain C++: clear the container then.)
TEST(Kinds, C22_AFunctionCapturesAContainerThatIsGivenTheOutput) {
  const auto x = leaf({64});
  x.mutable_grad() = torch::zeros_like(x);
  const regrad::MemoryMeter meter;
  for (int step = 0; step < 50; ++step) {
    const auto outputs = std::make_shared<Tensors>();
    outputs->push_back(
        recompute_grad([outputs](torch::Tensor t) { return t.sin() * double(outputs.use_count() > 0); })(x));
    outputs->front().sum().backward();
    EXPECT_EQ(meter.current_bytes(), 64 * 8) << "the output alone, in step " << step;
    outputs->clear();
  }
  EXPECT_EQ(meter.current_bytes(), 0);
}

TEST(Kinds, C29_SixtyFourLayersWithBatchNormTrain) {
  torch::manual_seed(1);
  const auto branch = [](int64_t) { return nn::Sequential(nn::BatchNorm1d(8), nn::ReLU(), nn::Linear(8, 8)); };
  RevBlock block(RevBlockOptions(64).f(branch).g(branch));
  torch::optim::SGD optimizer(block->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
  const auto x = torch::randn({32, 8}), target = torch::randn({32, 8});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    const auto [y1, y2] = block->forward(x, x);
    const auto loss = torch::mse_loss(y1 + y2, target);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
    ASSERT_TRUE(std::isfinite(last)) << step;
  }
  EXPECT_LT(last, 0.5 * first);
}

// Streams grow a hundredfold in each layer: what is left of the small ones is rounding.
TEST(Kinds, C29_LostPrecisionIsAnErrorRatherThanAWrongGradient) {
  torch::manual_seed(1);
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const auto x = torch::randn({16, 16}).to(dtype).requires_grad_();
    const double scale = dtype == torch::kFloat ? 100 : 10;
    const auto f = [scale](torch::Tensor t) { return t.roll(1, 1) * scale; };
    RevBlock block(RevBlockOptions(dtype == torch::kHalf ? 2 : 4).f(f).g(f));
    const auto [y1, y2] = block->forward(x, x * 1);
    expect_error(ErrorKind::replay_differs, {"layers.", "precision", "Memory::recompute"},
                 [&, y = y1 + y2] { y.sum().backward(); });
  }
}

TEST(Kinds, C30_ATorchScriptModule) {
  torch::manual_seed(1);
  torch::jit::Module module("scripted");
  const auto weight = leaf({4, 4});
  module.register_parameter("weight", weight, /*is_buffer=*/false);
  module.define("def forward(self, x):\n  y = torch.tanh(torch.matmul(x, self.weight))\n  return y * 0.5 + y.sin()\n");
  const Residue f = [module](torch::Tensor t) mutable { return module.forward({t}).toTensor(); };
  const auto x = leaf({3, 4});
  // Repeated, since TorchScript compiles anew after it has seen the first runs: its gradients then differ by rounding.
  for (int run = 0; run < 4; ++run) {
    expect_like_plain(
        {x, weight}, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; }, kRounding);
    expect_block_like_plain(
        {x, weight}, {f, f}, {f, f},
        [&] {
          return Tensors{x, x * 2};
        },
        kRounding);
  }
}

TEST(Kinds, C30_MemoryOfOthers) {
  std::vector<double> memory(12, 0.5);
  const auto p = leaf({4, 4});
  const auto f = [p](torch::Tensor t) { return t.mm(p).tanh(); };
  const auto x = torch::from_blob(memory.data(), {3, 4}, torch::kDouble);
  expect_like_plain(
      {p}, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
  expect_block_like_plain(
      {p}, {f}, {f},
      [&] {
        return Tensors{x, x};
      },
      kRounding);

  // Such memory cannot be kept copy-on-write; a write is noticed.
  const auto y = recompute_grad(f)(x);
  torch::Tensor(x).add_(1);
  expect_error(ErrorKind::tensor_modified, {"input 0", "modified in place"}, [&] { y.sum().backward(); });
}

/// Plain's gradient of p, or regrad's error of kind `unsupported`.
void expect_right_or_unsupported(const char* kind, const torch::Tensor& input, const torch::Tensor& p,
                                 const std::function<torch::Tensor(torch::Tensor)>& f) {
  SCOPED_TRACE(kind);
  f(input).sum().backward();
  const Tensors expected = take_gradients({p});
  try {
    recompute_grad(f)(input).sum().backward();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::unsupported) << error.msg();
    take_gradients({p});
    return;
  }
  expect_close(expected, take_gradients({p}));
}

TEST(Kinds, C31_OtherLayoutsAndDevices) {
  torch::manual_seed(1);
  const auto p = leaf({4, 4}, torch::kFloat);
  const auto x = torch::randn({3, 4});
  expect_right_or_unsupported("sparse", x.to_sparse(), p, [&](torch::Tensor t) { return torch::mm(t, p).tanh(); });
  expect_right_or_unsupported("sparse, by rows", x.to_sparse_csr(), p,
                              [&](torch::Tensor t) { return torch::mm(t, p); });
  expect_right_or_unsupported("mkldnn", x.to_mkldnn(), p, [&](torch::Tensor t) { return t.to_dense().mm(p); });
  expect_right_or_unsupported("quantised", torch::quantize_per_tensor(x, 0.1, 0, torch::kQInt8), p,
                              [&](torch::Tensor t) { return t.dequantize().mm(p); });
  expect_right_or_unsupported("nested", at::_nested_tensor_from_tensor_list({x, x}), p, [&](torch::Tensor t) {
    return t.to_padded_tensor(0).view({6, 4}).mm(p);
  });
  expect_right_or_unsupported("complex", torch::complex(x, x * 2), p,
                              [&](torch::Tensor t) { return torch::view_as_real(t).select(2, 1).mm(p); });
  torch::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = torch::randn({3, 4});
  }
  expect_right_or_unsupported("inference", inference, p,
                              [&](torch::Tensor t) { return (t + p.slice(0, 0, 3)).tanh(); });

  // On the meta device there are no values to compare.
  const auto q = torch::randn({4, 4}, torch::kMeta).requires_grad_();
  const auto y = recompute_grad([q](torch::Tensor t) { return t.mm(q).tanh(); })(torch::randn({3, 4}, torch::kMeta));
  y.sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

/// Warnings of Torch, while it lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg() + "\n"; }
  std::string text;
};

TEST(Kinds, C32_AnomalyModeNamesLayerAndFunction) {
  const auto x = torch::zeros({4}).requires_grad_();
  const auto f = [](torch::Tensor t) { return t * 0.5; };
  const auto nan = [](torch::Tensor t) { return (t * 0).sqrt() * 0; };  // its derivative is 0 / 0
  RevBlock block(RevBlockOptions(2).f(f).g(std::vector<Residue>{f, nan}));
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const torch::autograd::DetectAnomalyGuard anomaly;
  const auto [y1, y2] = block->forward(x, x * 1);
  EXPECT_THROW((y1 + y2).sum().backward(), c10::Error);
  EXPECT_NE(warnings.text.find("regrad::RevBlock(layers.1.g)"), std::string::npos) << warnings.text;
}

TEST(Kinds, C32_GradModeOffKeepsNothing) {
  const auto x = leaf({64}, torch::kFloat);
  const auto token = std::make_shared<int>();
  RevBlock block(
      RevBlockOptions(8).f([token](torch::Tensor t) { return t.sin(); }).g([](torch::Tensor t) { return t.cos(); }));
  const torch::NoGradGuard no_grad;
  const regrad::MemoryMeter meter;
  const auto owners = token.use_count();
  const auto [y1, y2] = block->forward(x, x);
  const auto z = recompute_grad([token](torch::Tensor t) { return t.sin(); })(x);
  EXPECT_FALSE(y1.requires_grad() || y2.requires_grad() || z.requires_grad());
  EXPECT_EQ(meter.current_bytes(), 3 * 64 * 4);
  EXPECT_EQ(token.use_count(), owners);
}

TEST(Kinds, C32_EmptyBatchesAndZeroSizes) {
  const auto p = leaf({4, 4});
  const Residue f = [p](torch::Tensor t) { return t.matmul(p).tanh(); };
  for (const auto& sizes : {std::vector<int64_t>{0, 4}, {2, 0, 4}, {1, 4}}) {
    const auto x = leaf(sizes);
    expect_like_plain(
        {x, p}, [&] { return Tensors{f(x)}; }, [&] { return Tensors{recompute_grad(f)(x)}; });
    expect_block_like_plain(
        {x, p}, {f, f}, {f, f},
        [&] {
          return Tensors{x, x * 2};
        },
        kRounding);
  }
}

// The program of pytorch issue 52744: several checkpointed segments in a chain, and one backward.
TEST(Kinds, C35_SeveralSegmentsAndOneBackward) {
  torch::manual_seed(1);
  std::vector<nn::Sequential> segments;
  Tensors leaves;
  for (int i = 0; i < 5; ++i) {
    segments.push_back(nn::Sequential(nn::Linear(6, 6), nn::ReLU(), nn::Dropout(0.1), nn::Linear(6, 6)));
    for (const auto& parameter : segments.back()->parameters()) leaves.push_back(parameter);
  }
  const auto x = torch::randn({4, 6});
  const auto program = [&](auto wrap) {
    return [&, wrap] {
      torch::Tensor y = x;
      for (auto& segment : segments) y = wrap(segment, y);
      return Tensors{y};
    };
  };
  expect_like_plain(leaves, program([](nn::Sequential& s, const torch::Tensor& t) { return s->forward(t); }),
                    program([](nn::Sequential& s, const torch::Tensor& t) { return recompute_grad(s)(t); }));
}

}  // namespace
