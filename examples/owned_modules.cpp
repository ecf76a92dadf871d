// A residual function that is a callable and owns modules: Residual(modules, callable). The block registers the
// modules, so that parameters(), save, load and to() reach them.

#include <cstdio>
#include <sstream>

#include <regrad/regrad.h>
#include <torch/torch.h>

namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 16;

/// A gated linear unit from two modules, without a module class of its own.
regrad::Residual make_gated(int64_t) {
  nn::Linear value(kWidth, kWidth);
  nn::Linear gate(kWidth, kWidth);
  return regrad::Residual({value.ptr(), gate.ptr()},
                          [value, gate](const torch::Tensor& x) mutable { return value(x) * torch::sigmoid(gate(x)); });
}

}  // namespace

int main() {
  torch::manual_seed(0);
  // f owns two modules per layer. g captures a leaf and says nothing of it.
  const auto scale = torch::full({kWidth}, 0.1).requires_grad_();
  regrad::RevBlock block(
      regrad::RevBlockOptions(/*num_layers=*/2).f(make_gated).g([scale](const torch::Tensor& x) { return x * scale; }));

  std::printf("parameters:\n");
  for (const auto& parameter : block->named_parameters()) std::printf("  %s\n", parameter.key().c_str());
  const bool registered = block->named_parameters().contains("layers.1.f.0.weight") && block->parameters().size() == 8;

  // A captured leaf has its gradient all the same; the first forward warns that parameters() does not list it.
  const auto [y1, y2] = block->forward(torch::randn({8, kWidth}), torch::randn({8, kWidth}));
  (y1 + y2).sum().backward();
  bool all_have_gradients = scale.grad().defined();
  for (const auto& parameter : block->parameters()) all_have_gradients &= parameter.grad().defined();
  const auto unregistered = block->unregistered_parameters();
  const bool found_scale = unregistered.size() == 1 && unregistered[0].is_same(scale);
  std::printf("every parameter has a gradient: %s\n", all_have_gradients ? "yes" : "NO");
  std::printf("unregistered: %zu tensor of %lld elements\n", unregistered.size(),
              static_cast<long long>(found_scale ? unregistered[0].numel() : 0));

  // Weights of owned modules are saved and loaded with the block's.
  regrad::RevBlock other(
      regrad::RevBlockOptions(/*num_layers=*/2).f(make_gated).g([scale](const torch::Tensor& x) { return x * scale; }));
  std::stringstream file;
  torch::save(block, file);
  torch::load(other, file);
  const bool loaded = other->parameters()[0].equal(block->parameters()[0]);
  std::printf("weights are saved and loaded: %s\n", loaded ? "yes" : "NO");

  return registered && all_have_gradients && found_scale && loaded ? 0 : 1;
}
