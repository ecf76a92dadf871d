#include "models/data/fashion_mnist.h"

#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/functional/padding.h>

#include "models/data/idx.h"

namespace regrad::models {
namespace {

constexpr int64_t image_size = 28;
constexpr int64_t border = 2;

std::filesystem::path find_file(const std::filesystem::path& folder, const std::string& name) {
  const auto compressed = folder / (name + ".gz");
  const auto plain = folder / name;
  if (std::filesystem::exists(compressed)) return compressed;
  if (std::filesystem::exists(plain)) return plain;
  throw DataError(DataErrorKind::missing, compressed,
                  "is not there, nor the file without .gz; needed: the four files of Fashion-MNIST, which Debian's "
                  "package dataset-fashion-mnist puts into /usr/share/datasets/fashion-mnist");
}

LabelledImages read_part(const std::filesystem::path& folder, const std::string& part) {
  const auto images_file = find_file(folder, part + "-images-idx3-ubyte");
  const auto labels_file = find_file(folder, part + "-labels-idx1-ubyte");
  const torch::Tensor labels = read_idx(labels_file, 1);
  const torch::Tensor images = read_idx(images_file, 3);
  const auto mismatch = [](const std::filesystem::path& file, const std::string& problem) {
    return DataError(DataErrorKind::mismatch, file, problem);
  };
  if (images.size(1) != image_size || images.size(2) != image_size) {
    throw mismatch(images_file, c10::str("holds images of ", images.size(1), " x ", images.size(2),
                                         " pixels; needed: ", image_size, " x ", image_size));
  }
  if (images.size(0) == 0) throw mismatch(images_file, "holds no images; needed: at least one");
  if (images.size(0) != labels.size(0)) {
    throw mismatch(labels_file, c10::str("holds ", labels.size(0), " labels; needed: one for each of the ",
                                         images.size(0), " images of ", images_file.string()));
  }
  if (const auto largest = labels.max().item<int64_t>(); largest >= fashion_mnist_classes) {
    throw mismatch(labels_file,
                   c10::str("holds the label ", largest, "; needed: labels below ", fashion_mnist_classes));
  }
  return {.images = images, .labels = labels.to(torch::kInt64)};
}

}  // namespace

torch::Tensor FashionMnist::normalised(const torch::Tensor& images) const {
  namespace F = torch::nn::functional;
  const torch::Tensor padded = F::pad(images.unsqueeze(1), F::PadFuncOptions({border, border, border, border}));
  return padded.to(torch::kFloat32).div_(255).sub_(mean).div_(std);
}

FashionMnist read_fashion_mnist(const std::filesystem::path& folder) {
  FashionMnist data{.train = read_part(folder, "train"), .test = read_part(folder, "t10k"), .mean = 0, .std = 0};
  // Moments from counts of the 256 grey values: exact, and no copy of the images as numbers.
  const torch::Tensor counts = torch::bincount(data.train.images.flatten(), {}, 256).to(torch::kFloat64);
  const torch::Tensor grey = torch::arange(256, torch::kFloat64) / 255;
  const double pixels = static_cast<double>(data.train.images.numel());
  data.mean = (counts * grey).sum().item<double>() / pixels;
  data.std = ((counts * (grey - data.mean).square()).sum() / pixels).sqrt().item<double>();
  if (data.std == 0) {
    throw DataError(DataErrorKind::mismatch, find_file(folder, "train-images-idx3-ubyte"),
                    "all pixels are equal; needed: images");
  }
  return data;
}

Shuffle::Shuffle(int64_t size, int64_t batch, uint64_t seed)
    : size_(size), batch_(batch), generator_(at::detail::createCPUGenerator(seed)) {
  TORCH_CHECK_VALUE(1 <= batch && batch <= size, "Shuffle: batches of ", batch, " from ", size, " images");
}

torch::Tensor Shuffle::next() {
  if (!order_.defined() || position_ + batch_ > size_) {
    order_ = torch::randperm(size_, generator_, torch::kInt64);
    position_ = 0;
  }
  const torch::Tensor indices = order_.narrow(0, position_, batch_);
  position_ += batch_;
  return indices;
}

}  // namespace regrad::models
