#include "models/revnet.h"

#include <algorithm>
#include <string>

#include <torch/nn/functional/padding.h>
#include <torch/nn/functional/pooling.h>

namespace regrad::models {
namespace {

namespace F = torch::nn::functional;

constexpr double norm_eps = 1e-3;

void check(const RevNetOptions& options) {
  const auto& units = options.units();
  const auto& filters = options.filters();
  const auto below_one = [](int64_t count) { return count < 1; };
  TORCH_CHECK_VALUE(!units.empty() && std::none_of(units.begin(), units.end(), below_one), "RevNet: units are ", units,
                    ", but at least one stage of at least one unit is needed");
  TORCH_CHECK_VALUE(filters.size() == units.size() + 1, "RevNet: ", filters.size(), " filters for ", units.size(),
                    " stages; needed: one for the init convolution and one for each stage");
  TORCH_CHECK_VALUE(std::none_of(filters.begin(), filters.end(), [](int64_t n) { return n < 2 || n % 2 != 0; }),
                    "RevNet: filters are ", filters, ", but both streams take half of each: they must be even");
  TORCH_CHECK_VALUE(std::is_sorted(filters.begin(), filters.end()), "RevNet: filters are ", filters,
                    ", but a shortcut can only add channels: they must not shrink");
  TORCH_CHECK_VALUE(options.in_channels() >= 1 && options.num_classes() >= 1, "RevNet: ", options.in_channels(),
                    " input channels and ", options.num_classes(), " classes, but at least one of each is needed");
}

}  // namespace

TransitionUnitImpl::TransitionUnitImpl(int64_t in_channels, int64_t out_channels, int64_t stride, bool preactivation)
    : stride_(stride), added_channels_(out_channels - in_channels) {
  f_ = register_module("f", BasicBranch(BasicBranchOptions(in_channels, out_channels)
                                            .stride(stride)
                                            .preactivation(preactivation)
                                            .norm_eps(norm_eps)));
  g_ = register_module("g", BasicBranch(BasicBranchOptions(out_channels, out_channels).norm_eps(norm_eps)));
}

Streams TransitionUnitImpl::forward(const torch::Tensor& x1, const torch::Tensor& x2) {
  const torch::Tensor y1 = shortcut(x1) + f_->forward(x2);
  const torch::Tensor y2 = shortcut(x2) + g_->forward(y1);
  return {y1, y2};
}

torch::Tensor TransitionUnitImpl::shortcut(torch::Tensor x) const {
  if (stride_ > 1) x = F::avg_pool2d(x, F::AvgPool2dFuncOptions(stride_).ceil_mode(true));
  if (added_channels_ > 0) {
    const int64_t before = added_channels_ / 2;
    x = F::pad(x, F::PadFuncOptions({0, 0, 0, 0, before, added_channels_ - before}));
  }
  return x;
}

RevNetImpl::RevNetImpl(const RevNetOptions& options) {
  check(options);
  const auto& filters = options.filters();
  init_conv_ = register_module("init_conv", conv3x3(options.in_channels(), filters.front(), 1));
  init_norm_ = register_module("init_norm", batch_norm(filters.front(), norm_eps));
  for (int64_t i = 0; i < static_cast<int64_t>(options.units().size()); ++i) {
    stages_.push_back(make_stage(i, options));
  }
  final_norm_ = register_module("final_norm", batch_norm(filters.back(), norm_eps));
  classifier_ = register_module("classifier", torch::nn::Linear(filters.back(), options.num_classes()));
}

RevNetImpl::Stage RevNetImpl::make_stage(int64_t index, const RevNetOptions& options) {
  const int64_t units = options.units()[static_cast<size_t>(index)];
  const int64_t in_channels = options.filters()[static_cast<size_t>(index)] / 2;
  const int64_t channels = options.filters()[static_cast<size_t>(index) + 1] / 2;
  const std::string name = "stage" + std::to_string(index + 1);
  const bool is_first = index == 0;

  Stage stage;
  // The init block ends in BN-ReLU already.
  stage.first = register_module(name + "_first", TransitionUnit(in_channels, channels, /*stride=*/is_first ? 1 : 2,
                                                                /*preactivation=*/!is_first));
  if (units > 1) {
    const auto branch = [channels](int64_t /*layer*/) {
      return BasicBranch(BasicBranchOptions(channels, channels).norm_eps(norm_eps));
    };
    stage.rest = register_module(name + "_rest",
                                 RevBlock(RevBlockOptions(units - 1).f(branch).g(branch).memory(options.memory())));
  }
  return stage;
}

torch::Tensor RevNetImpl::forward(const torch::Tensor& images) {
  const auto halves = torch::relu(init_norm_->forward(init_conv_->forward(images))).chunk(2, /*dim=*/1);
  Streams streams{halves[0], halves[1]};
  for (Stage& stage : stages_) {
    streams = stage.first->forward(std::get<0>(streams), std::get<1>(streams));
    if (!stage.rest.is_empty()) streams = stage.rest->forward(std::get<0>(streams), std::get<1>(streams));
  }
  const auto& [y1, y2] = streams;
  const torch::Tensor features = torch::relu(final_norm_->forward(torch::cat({y1, y2}, /*dim=*/1)));
  return classifier_->forward(features.mean({2, 3}));
}

void RevNetImpl::set_memory(Memory memory) {
  for (Stage& stage : stages_) {
    if (!stage.rest.is_empty()) stage.rest->set_memory(memory);
  }
}

}  // namespace regrad::models
