// Replacing a checkpoint function that was written by hand. LibTorch has none, so programs carry something like
// HandWritten below. It works for the simplest case and is wrong for others; regrad::recompute_grad is right for all.

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <regrad/recompute_grad.h>
#include <torch/torch.h>

namespace {

namespace nn = torch::nn;
using Region = std::function<torch::Tensor(torch::Tensor)>;

/// The usual hand-written checkpoint: forward without a graph, and in backward forward again with one.
class HandWritten : public torch::autograd::Function<HandWritten> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, Region* region) {
    context->save_for_backward({x});
    context->saved_data["region"] = reinterpret_cast<int64_t>(region);
    const torch::NoGradGuard no_grad;
    return (*region)(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto& region = *reinterpret_cast<Region*>(context->saved_data["region"].toInt());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode enable(true);
    region(x).backward(gradients[0]);
    return {x.grad(), torch::Tensor()};
  }
};

struct Network {
  nn::Linear first{16, 16};
  nn::Linear second{16, 16};
  nn::Dropout dropout{nn::DropoutOptions(0.5)};
  torch::Tensor x = torch::randn({8, 16}).requires_grad_();

  Region region = [this](torch::Tensor t) { return second->forward(dropout(torch::relu(first(t)))); };

  std::vector<torch::Tensor> leaves() const { return {x, first->weight, first->bias, second->weight, second->bias}; }
};

using Gradients = std::vector<torch::Tensor>;

/// A way to use a region and to ask for gradients.
struct Use {
  const char* name;
  std::function<Gradients(Network&, const Region&)> gradients;
};

Gradients by_backward(Network& network, const torch::Tensor& loss) {
  loss.backward();
  Gradients result;
  for (const auto& leaf : network.leaves()) result.push_back(leaf.grad());
  return result;
}

const std::vector<Use> kUses = {
    {"without dropout",
     [](Network& network, const Region& region) {
       network.dropout->eval();
       return by_backward(network, region(network.x).square().sum());
     }},
    {"dropout",
     [](Network& network, const Region& region) { return by_backward(network, region(network.x).square().sum()); }},
    {"an input without grad",  // as the first layers of a network have it
     [](Network& network, const Region& region) {
       return by_backward(network, region(network.x.detach()).square().sum());
     }},
    {"autograd::grad",
     [](Network& network, const Region& region) {
       network.dropout->eval();
       return torch::autograd::grad({region(network.x).square().sum()}, network.leaves());
     }},
    {"second order",
     [](Network& network, const Region& region) {
       network.dropout->eval();
       const auto loss = region(network.x).square().sum();
       const auto gradient = torch::autograd::grad({loss}, {network.x}, {}, true, /*create_graph=*/true)[0];
       return by_backward(network, gradient.square().sum());
     }},
};

/// "right", "WRONG" or the error, against the plain function.
std::string compare(const Use& use, const std::function<Region(Region&)>& wrap) {
  const auto run = [&](const auto& make_region) {
    torch::manual_seed(0);
    Network network;
    return use.gradients(network, make_region(network.region));
  };
  const Gradients expected = run([](Region& region) { return region; });
  Gradients found;
  try {
    found = run(wrap);
  } catch (const c10::Error&) {
    return "raises";
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same = expected[i].defined() == found[i].defined() &&
                      (!expected[i].defined() || torch::allclose(expected[i], found[i]));
    if (!same) return "WRONG";
  }
  return "right";
}

}  // namespace

int main() {
  // Before and after.
  const auto hand_written = [](Region& region) -> Region {
    return [&region](torch::Tensor x) { return HandWritten::apply(x, &region); };
  };
  const auto with_regrad = [](Region& region) -> Region { return regrad::recompute_grad(region); };

  bool ok = true;
  std::printf("%-24s %-14s %s\n", "gradients", "hand-written", "regrad::recompute_grad");
  for (const Use& use : kUses) {
    const std::string before = compare(use, hand_written);
    const std::string after = compare(use, with_regrad);
    std::printf("%-24s %-14s %s\n", use.name, before.c_str(), after.c_str());
    const bool simplest = &use == &kUses.front();
    ok &= after == "right" && (before == "right") == simplest;
  }
  return ok ? 0 : 1;
}
