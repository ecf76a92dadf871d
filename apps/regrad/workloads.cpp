#include "apps/regrad/workloads.h"

#include <algorithm>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "models/basic_branch.h"

namespace regrad::app {
namespace {

class ConvBranch : public Branch {
 public:
  explicit ConvBranch(int64_t channels) {
    branch_ = register_module("branch", models::BasicBranch(models::BasicBranchOptions(channels, channels)));
  }

  /// x: (batch, channels, height, width).
  torch::Tensor forward(const torch::Tensor& x) override { return branch_->forward(x); }

 private:
  models::BasicBranch branch_{nullptr};
};

class AttentionBranch : public Branch {
 public:
  AttentionBranch(int64_t width, int64_t heads) : heads_(heads) {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    projection_in_ = register_module("projection_in", torch::nn::Linear(width, 3 * width));
    projection_out_ = register_module("projection_out", torch::nn::Linear(width, width));
  }

  /// x: (batch, sequence, width).
  torch::Tensor forward(const torch::Tensor& x) override {
    const auto per_head = [&](const torch::Tensor& t) {  // (batch, heads, sequence, width / heads)
      return t.unflatten(2, {heads_, -1}).transpose(1, 2);
    };
    const auto parts = projection_in_->forward(norm_->forward(x)).chunk(3, /*dim=*/2);
    const torch::Tensor mixed =
        at::scaled_dot_product_attention(per_head(parts[0]), per_head(parts[1]), per_head(parts[2]));
    return projection_out_->forward(mixed.transpose(1, 2).flatten(2));
  }

 private:
  int64_t heads_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear projection_in_{nullptr};
  torch::nn::Linear projection_out_{nullptr};
};

class FeedForwardBranch : public Branch {
 public:
  explicit FeedForwardBranch(int64_t width) {
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    widen_ = register_module("widen", torch::nn::Linear(width, 4 * width));
    narrow_ = register_module("narrow", torch::nn::Linear(4 * width, width));
  }

  /// x: (batch, sequence, width).
  torch::Tensor forward(const torch::Tensor& x) override {
    return narrow_->forward(torch::gelu(widen_->forward(norm_->forward(x))));
  }

 private:
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear widen_{nullptr};
  torch::nn::Linear narrow_{nullptr};
};

class TanhBranch : public Branch {
 public:
  explicit TanhBranch(int64_t width) { linear_ = register_module("linear", torch::nn::Linear(width, width)); }

  /// x: (batch, width).
  torch::Tensor forward(const torch::Tensor& x) override { return torch::tanh(linear_->forward(x)); }

 private:
  torch::nn::Linear linear_{nullptr};
};

class TinyBranch : public Branch {
 public:
  torch::Tensor forward(const torch::Tensor& x) override { return x * 1e-5; }
};

struct Kind {
  std::string name;
  std::vector<int64_t> stream;  // its first size is the default batch
  std::shared_ptr<Branch> (*make_f)();
  std::shared_ptr<Branch> (*make_g)();
};

template <class B, int64_t... args>
std::shared_ptr<Branch> make_branch() {
  return std::make_shared<B>(args...);
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kinds{
      {"conv", {16, 32, 32, 32}, make_branch<ConvBranch, 32>, make_branch<ConvBranch, 32>},
      {"transformer", {8, 256, 256}, make_branch<AttentionBranch, 256, 4>, make_branch<FeedForwardBranch, 256>},
      {"mlp", {4096, 256}, make_branch<TanhBranch, 256>, make_branch<TanhBranch, 256>},
      {"tiny", {1, 8}, make_branch<TinyBranch>, make_branch<TinyBranch>},
  };
  return kinds;
}

const Kind& find_kind(const std::string& name) {
  return *std::find_if(kinds().begin(), kinds().end(), [&](const Kind& kind) { return kind.name == name; });
}

}  // namespace

std::vector<torch::Tensor> Workload::leaves() const {
  std::vector<torch::Tensor> leaves{x1, x2};
  for (const auto* branches : {&f, &g}) {
    for (const auto& branch : *branches) {
      for (const torch::Tensor& parameter : branch->parameters()) leaves.push_back(parameter);
    }
  }
  return leaves;
}

std::vector<std::string> workload_names() {
  std::vector<std::string> names;
  for (const Kind& kind : kinds()) names.push_back(kind.name);
  return names;
}

int64_t default_batch(const std::string& name) { return find_kind(name).stream.front(); }

Workload make_workload(const std::string& name, int64_t layers, int64_t batch) {
  const Kind& kind = find_kind(name);
  std::vector<int64_t> stream = kind.stream;
  if (batch > 0) stream.front() = batch;

  Workload workload;
  for (int64_t layer = 0; layer < layers; ++layer) {
    workload.f.push_back(kind.make_f());
    workload.g.push_back(kind.make_g());
  }
  workload.x1 = torch::randn(stream).requires_grad_();
  workload.x2 = torch::randn(stream).requires_grad_();
  workload.w1 = torch::randn(stream);
  workload.w2 = torch::randn(stream);
  for (torch::Tensor& leaf : workload.leaves()) leaf.mutable_grad() = torch::zeros_like(leaf);
  return workload;
}

}  // namespace regrad::app
