#pragma once

#include <cstdint>
#include <filesystem>
#include <utility>

#include <torch/types.h>

namespace regrad::models {

constexpr int64_t fashion_mnist_classes = 10;

/// Grey images and their classes.
struct LabelledImages {
  /// (count, 28, 28), uint8.
  torch::Tensor images;
  /// (count), int64, each in [0, fashion_mnist_classes).
  torch::Tensor labels;

  int64_t size() const { return labels.size(0); }
};

/// Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747).
struct FashionMnist {
  LabelledImages train;
  LabelledImages test;
  /// Mean and standard deviation of the training images' pixels, in units of 1/255.
  double mean;
  double std;

  /// Images as a network takes them: (count, 1, 32, 32), float32, with two black pixels added on each side, then
  /// shifted and scaled by mean and std. images: (count, 28, 28), uint8.
  torch::Tensor normalised(const torch::Tensor& images) const;
};

/// Reads the four files {train,t10k}-{images-idx3,labels-idx1}-ubyte of `folder`, each with or without the ending .gz.
/// @throws DataError.
FashionMnist read_fashion_mnist(const std::filesystem::path& folder);

/// Endless batches of a set's indices: each epoch goes through all of them in a new order, which depends on the seed
/// alone. What does not fill a batch at the end of an epoch is left out.
class Shuffle {
 public:
  /// 1 <= batch <= size.
  Shuffle(int64_t size, int64_t batch, uint64_t seed);

  /// The next batch: (batch), int64.
  torch::Tensor next();

  int64_t batches_per_epoch() const { return size_ / batch_; }

 private:
  int64_t size_;
  int64_t batch_;
  int64_t position_ = 0;
  at::Generator generator_;
  torch::Tensor order_;
};

}  // namespace regrad::models
