// A reversible decoder block that attends to an encoder's output: f reads the encoder's output and a padding mask as
// side inputs, g is a feed-forward network. Side inputs reach every layer; those that require grad get it, summed over
// the layers.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include <regrad/regrad.h>
#include <torch/torch.h>

namespace {

namespace nn = torch::nn;

constexpr int64_t kBatch = 4, kQueries = 12, kKeys = 20, kWidth = 32, kLayers = 6;

/// Attention from the stream to the encoder's output.
struct CrossAttentionImpl : nn::Module {
  /// x: [batch, queries, width]; side[0], the encoder's output: [batch, keys, width]; side[1], the mask: bool
  /// [batch, keys], true for padding. Returns [batch, queries, width].
  torch::Tensor forward(const torch::Tensor& x, const std::vector<torch::Tensor>& side) {
    const auto& context = side[0];
    auto scores = query(norm(x)).matmul(key(context).transpose(1, 2)) / std::sqrt(kWidth);  // [batch, queries, keys]
    scores = scores.masked_fill(side[1].unsqueeze(1), -std::numeric_limits<float>::infinity());
    return out(dropout(scores.softmax(-1)).matmul(value(context)));
  }

  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear query = register_module("query", nn::Linear(kWidth, kWidth));
  nn::Linear key = register_module("key", nn::Linear(kWidth, kWidth));
  nn::Linear value = register_module("value", nn::Linear(kWidth, kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.1));
};
TORCH_MODULE(CrossAttention);

nn::Sequential make_feed_forward(int64_t) {
  return nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({kWidth})), nn::Linear(kWidth, 4 * kWidth), nn::GELU(),
                        nn::Linear(4 * kWidth, kWidth));
}

double relative_error(const torch::Tensor& expected, const torch::Tensor& found) {
  return ((expected - found).norm() / expected.norm()).item<double>();
}

}  // namespace

int main() {
  torch::manual_seed(0);
  auto block = regrad::RevBlock(
      regrad::RevBlockOptions(kLayers).f([](int64_t) { return CrossAttention(); }).g(make_feed_forward));

  const auto x = torch::randn({kBatch, kQueries, kWidth});
  const auto context = torch::randn({kBatch, kKeys, kWidth}).requires_grad_();
  const auto mask = torch::arange(kKeys).expand({kBatch, kKeys}) >= torch::tensor({20, 15, 9, 3}).unsqueeze(1);

  // The gradients of the encoder's output and of a weight, under one strategy.
  const auto gradients = [&](regrad::Memory memory) {
    torch::manual_seed(1);  // the same dropout masks for each
    block->set_memory(memory);
    const auto [y1, y2] = block->forward(x, x, {.f = {context, mask}});
    const auto weight = block->named_parameters()["layers.0.f.key.weight"];
    return torch::autograd::grad({(y1 * y2).sum()}, {context, weight});
  };
  const auto stored = gradients(regrad::Memory::store());
  const auto reversed = gradients(regrad::Memory::reverse());
  const double context_error = relative_error(stored[0], reversed[0]);
  const double weight_error = relative_error(stored[1], reversed[1]);
  const bool padding_is_ignored = reversed[0][3].slice(0, 3).eq(0).all().item<bool>();

  // The inverse takes the same side inputs. In training mode it would draw new dropout masks, hence eval().
  block->eval();
  const torch::NoGradGuard no_grad;
  const auto [y1, y2] = block->forward(x, x, {.f = {context, mask}});
  const auto [x1, x2] = block->inverse(y1, y2, {.f = {context, mask}});
  const double inverse_error = std::max(relative_error(x, x1), relative_error(x, x2));

  std::printf("gradients against stored activations: encoder output %.1e, first key weight %.1e\n", context_error,
              weight_error);
  std::printf("padding gets no gradient: %s\n", padding_is_ignored ? "yes" : "NO");
  std::printf("inverse(forward(x)) against x: %.1e\n", inverse_error);
  return context_error < 1e-4 && weight_error < 1e-4 && padding_is_ignored && inverse_error < 1e-4 ? 0 : 1;
}
