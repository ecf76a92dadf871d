#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <regrad/regrad.h>

#include "models/parameter_groups.h"
#include "models/revnet.h"

namespace {

using regrad::Memory;
using regrad::models::RevNet;
using regrad::models::RevNetOptions;

int64_t parameter_count(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

struct StepResult {
  torch::Tensor scores;
  std::map<std::string, torch::Tensor> gradients;
  std::map<std::string, torch::Tensor> buffers;
};

/// One forward and backward in training mode of a network that the seed determines.
StepResult training_step(const Memory& memory) {
  torch::manual_seed(3);
  RevNet net(RevNetOptions(3, 10).units({3, 2}).filters({8, 8, 12}));
  net->set_memory(memory);
  const torch::Tensor images = torch::randn({4, 3, 16, 16});
  const torch::Tensor labels = torch::arange(4);
  StepResult result;
  result.scores = net->forward(images);
  torch::nn::functional::cross_entropy(result.scores, labels).backward();
  for (const auto& item : net->named_parameters()) result.gradients[item.key()] = item.value().grad();
  for (const auto& item : net->named_buffers()) result.buffers[item.key()] = item.value();
  return result;
}

void expect_equal(const std::map<std::string, torch::Tensor>& found,
                  const std::map<std::string, torch::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_TRUE(torch::equal(found.at(name), tensor)) << name;
  }
}

TEST(RevNet, HasTheParametersOfThePaper) {
  EXPECT_EQ(parameter_count(*RevNet(RevNetOptions(3, 10))), 464890);  // RevNet-38
  EXPECT_EQ(parameter_count(*RevNet(RevNetOptions(3, 10).units({9, 9, 9}).filters({32, 32, 64, 128}))),
            1729194);  // RevNet-110
}

TEST(RevNet, GivesOneScorePerClassForAnyImageSize) {
  RevNet net(RevNetOptions(1, 7).filters({4, 4, 6, 8}));
  EXPECT_EQ(net->forward(torch::randn({2, 1, 32, 32})).sizes(), (std::vector<int64_t>{2, 7}));
  EXPECT_EQ(net->forward(torch::randn({2, 1, 15, 9})).sizes(), (std::vector<int64_t>{2, 7}));
}

TEST(RevNet, OnlyTheVeryFirstFLeavesOutItsLeadingNorm) {
  RevNet net(RevNetOptions(3, 10));
  const auto parameters = net->named_parameters();
  EXPECT_FALSE(parameters.contains("stage1_first.f.norm1.weight"));
  EXPECT_TRUE(parameters.contains("stage1_first.g.norm1.weight"));
  EXPECT_TRUE(parameters.contains("stage2_first.f.norm1.weight"));
  EXPECT_TRUE(parameters.contains("stage1_rest.layers.0.f.norm1.weight"));
  EXPECT_TRUE(parameters.contains("stage3_rest.layers.1.g.conv2.weight"));
}

TEST(RevNet, NormsAndConvolutionsAreThoseOfThePaper) {
  RevNet net(RevNetOptions(3, 10));
  int norms = 0;
  int convolutions = 0;
  for (const auto& module : net->modules()) {
    if (const auto* norm = module->as<torch::nn::BatchNorm2d>()) {
      ++norms;
      EXPECT_EQ(norm->options.eps(), 1e-3);
    } else if (const auto* conv = module->as<torch::nn::Conv2d>()) {
      ++convolutions;
      EXPECT_FALSE(conv->bias.defined());
      const double drawn_std = std::sqrt(2.0 / (9.0 * static_cast<double>(conv->options.out_channels())));
      EXPECT_LE(conv->weight.abs().max().item<double>(), 2 * drawn_std * 1.000001);
      // Cutting a normal distribution at two standard deviations leaves 0.87963 of its deviation.
      const double relative_error_of_std = 1 / std::sqrt(2 * static_cast<double>(conv->weight.numel()));
      EXPECT_NEAR(conv->weight.std().item<double>() / (0.87963 * drawn_std), 1, 5 * relative_error_of_std);
    }
  }
  EXPECT_EQ(convolutions, 1 + 9 * 4);
  EXPECT_EQ(norms, 1 + 9 * 4 - 1 + 1);
}

TEST(RevNet, ShortcutAveragesPixelsAndPadsChannels) {
  regrad::models::TransitionUnit unit(/*in_channels=*/2, /*out_channels=*/5, /*stride=*/2, /*preactivation=*/true);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : unit->named_parameters()) {
      if (parameter.key().find("conv") != std::string::npos) parameter->zero_();  // f and g become zero
    }
  }
  const torch::Tensor x1 = torch::randn({1, 2, 4, 4});
  const torch::Tensor x2 = torch::randn({1, 2, 4, 4});
  const auto [y1, y2] = unit->forward(x1, x2);
  for (const auto& [x, y] : {std::pair(x1, y1), std::pair(x2, y2)}) {
    ASSERT_EQ(y.sizes(), (std::vector<int64_t>{1, 5, 2, 2}));
    EXPECT_EQ(y.index({0, 0}).abs().max().item<float>(), 0);
    EXPECT_EQ(y.index({0, torch::indexing::Slice(3, 5)}).abs().max().item<float>(), 0);
    EXPECT_NEAR(y.index({0, 2, 1, 0}).item<float>(),
                x.index({0, 1, torch::indexing::Slice(2, 4), torch::indexing::Slice(0, 2)}).mean().item<float>(), 1e-6);
  }
}

TEST(RevNet, RecomputeIsBitIdenticalToStore) {
  const StepResult store = training_step(Memory::store());
  for (const int64_t segment : {1, 2}) {
    SCOPED_TRACE(segment);
    const StepResult recompute = training_step(Memory::recompute(segment));
    EXPECT_TRUE(torch::equal(recompute.scores, store.scores));
    expect_equal(recompute.gradients, store.gradients);
    expect_equal(recompute.buffers, store.buffers);
  }
}

TEST(RevNet, ReverseHasTheValuesOfStore) {
  const StepResult store = training_step(Memory::store());
  const StepResult reverse = training_step(Memory::reverse());
  EXPECT_TRUE(torch::equal(reverse.scores, store.scores));
  expect_equal(reverse.buffers, store.buffers);
  double largest = 0;
  double error = 0;
  for (const auto& [name, gradient] : store.gradients) {
    ASSERT_TRUE(reverse.gradients.at(name).defined()) << name;
    largest = std::max(largest, gradient.abs().max().item<double>());
    error = std::max(error, (reverse.gradients.at(name) - gradient).abs().max().item<double>());
  }
  EXPECT_GT(largest, 0);
  EXPECT_LT(error / largest, 1e-4);
}

TEST(RevNet, SetMemoryReachesEveryReversibleUnit) {
  RevNet net(RevNetOptions(3, 10).units({5, 5}).filters({16, 16, 32}));
  const torch::Tensor images = torch::randn({8, 3, 32, 32});
  const auto held_after_forward = [&](const Memory& memory) {
    net->set_memory(memory);
    regrad::MemoryMeter meter;
    const int64_t before = meter.current_bytes();
    const torch::Tensor scores = net->forward(images);
    return meter.current_bytes() - before;
  };
  const int64_t store = held_after_forward(Memory::store());
  // A unit on 16 channels of 32 x 32 pixels saves four pairs of streams.
  const int64_t unit = 4 * int64_t{8} * 16 * 32 * 32 * int64_t{sizeof(float)};
  // Stage 1 has four reversible units; stage 2, of half the size, four as well.
  const int64_t saved = 4 * unit + 4 * unit / 2;
  EXPECT_LT(held_after_forward(Memory::reverse()), store - saved * 3 / 4);
  EXPECT_LT(held_after_forward(Memory::recompute()), store - saved / 2);
  EXPECT_EQ(held_after_forward(Memory::store()), store);
}

TEST(RevNet, RefusesOptionsThatDoNotFit) {
  EXPECT_THROW(RevNet(RevNetOptions(3, 10).units({})), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(3, 10).units({3, 0, 3})), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(3, 10).units({3, 3})), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(3, 10).filters({32, 32, 63, 112})), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(3, 10).filters({32, 32, 16, 112})), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(0, 10)), c10::Error);
  EXPECT_THROW(RevNet(RevNetOptions(3, 0)), c10::Error);
}

TEST(ParameterGroups, OnlyWeightsDecay) {
  RevNet net(RevNetOptions(3, 10));
  const auto groups =
      regrad::models::decay_weights_only(*net, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(2e-4));
  ASSERT_EQ(groups.size(), 2);
  const auto decay = [](const torch::optim::OptimizerParamGroup& group) {
    return static_cast<const torch::optim::SGDOptions&>(group.options()).weight_decay();
  };
  EXPECT_EQ(decay(groups[0]), 2e-4);
  EXPECT_EQ(decay(groups[1]), 0);
  EXPECT_EQ(static_cast<const torch::optim::SGDOptions&>(groups[1].options()).momentum(), 0.9);
  EXPECT_EQ(groups[0].params().size(), 37 + 1);      // convolutions and the classifier
  EXPECT_EQ(groups[1].params().size(), 2 * 37 + 1);  // norms and the classifier's bias
  for (const auto& weight : groups[0].params()) EXPECT_GE(weight.dim(), 2);
  for (const auto& other : groups[1].params()) EXPECT_EQ(other.dim(), 1);
}

}  // namespace
