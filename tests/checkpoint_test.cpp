#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include "models/checkpoint.h"

namespace {

namespace fs = std::filesystem;

class Checkpoint : public testing::Test {
 protected:
  Checkpoint() {
    std::string name = (fs::temp_directory_path() / "regrad_checkpoint_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Checkpoint() override { fs::remove_all(folder_); }

  fs::path folder_;
};

torch::nn::Sequential make_model() { return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4)); }

torch::optim::SGD make_optimizer(const torch::nn::Sequential& model) {
  return torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

void train_step(torch::nn::Sequential& model, torch::optim::SGD& optimizer) {
  optimizer.zero_grad();
  model->forward(torch::arange(15, torch::kFloat32).view({5, 3})).square().index({0}).sum().backward();
  optimizer.step();
}

TEST_F(Checkpoint, HoldsTheModelAndTheOptimizer) {
  torch::nn::Sequential model = make_model();
  torch::optim::SGD optimizer = make_optimizer(model);
  train_step(model, optimizer);
  regrad::models::save_checkpoint(folder_ / "checkpoint.pt", *model, optimizer);

  torch::nn::Sequential loaded = make_model();
  torch::optim::SGD loaded_optimizer = make_optimizer(loaded);
  torch::serialize::InputArchive archive;
  archive.load_from((folder_ / "checkpoint.pt").string());
  torch::serialize::InputArchive part;
  archive.read("model", part);
  loaded->load(part);
  torch::serialize::InputArchive optimizer_part;
  archive.read("optimizer", optimizer_part);
  loaded_optimizer.load(optimizer_part);

  // Both take the same next step only if weights, running statistics and momentum are the same.
  train_step(model, optimizer);
  train_step(loaded, loaded_optimizer);
  for (const auto& tensors :
       {std::pair(model->parameters(), loaded->parameters()), std::pair(model->buffers(), loaded->buffers())}) {
    for (size_t i = 0; i < tensors.first.size(); ++i) EXPECT_TRUE(torch::equal(tensors.first[i], tensors.second[i]));
  }
}

TEST_F(Checkpoint, ReplacesTheOldOneAsAWhole) {
  const fs::path file = folder_ / "checkpoint.pt";
  std::ofstream(file) << "old";
  std::ifstream opened(file);  // still sees the old file, since the new one has taken its name and not its place
  torch::nn::Sequential model = make_model();
  regrad::models::save_checkpoint(file, *model, make_optimizer(model));
  std::string seen;
  opened >> seen;
  EXPECT_EQ(seen, "old");
  EXPECT_GT(fs::file_size(file), 3);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(Checkpoint, FailsLoudlyWhereItCannotWrite) {
  torch::nn::Sequential model = make_model();
  EXPECT_ANY_THROW(
      regrad::models::save_checkpoint(folder_ / "nowhere" / "checkpoint.pt", *model, make_optimizer(model)));
}

}  // namespace
