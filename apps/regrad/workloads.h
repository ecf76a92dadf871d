#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/types.h>

namespace regrad::app {

/// A residual function: a module from a stream to a tensor of the stream's shape.
class Branch : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(const torch::Tensor& x) = 0;
};

/// A deep two-stream network, y1 = x1 + f(x2) and y2 = x2 + g(y1) in each layer, with data to run one step of it.
struct Workload {
  std::vector<std::shared_ptr<Branch>> f;
  std::vector<std::shared_ptr<Branch>> g;
  /// The streams: leaves that require grad, of one shape.
  torch::Tensor x1;
  torch::Tensor x2;
  /// The loss is (y1 * w1).sum() + (y2 * w2).sum(); shaped as the streams.
  torch::Tensor w1;
  torch::Tensor w2;

  int64_t layers() const { return static_cast<int64_t>(f.size()); }

  /// Bytes of both streams.
  int64_t input_bytes() const { return static_cast<int64_t>(x1.nbytes() + x2.nbytes()); }

  /// The streams and the parameters of all layers.
  std::vector<torch::Tensor> leaves() const;
};

/// The names that make_workload takes.
///
/// | name        | f, g                                                              | stream, default batch |
/// |-------------|-------------------------------------------------------------------|-----------------------|
/// | conv        | BN-ReLU-conv3x3-BN-ReLU-conv3x3, both                             | (16, 32, 32, 32)      |
/// | transformer | LayerNorm, self-attention of 4 heads; LayerNorm, MLP of 4x, GELU  | (8, 256, 256)         |
/// | mlp         | Linear, Tanh, both                                                | (4096, 256)           |
/// | tiny        | multiplication by a small number, both: next to no work           | (1, 8)                |
std::vector<std::string> workload_names();

/// name: one of workload_names().
int64_t default_batch(const std::string& name);

/// Every leaf has a gradient of zeros already. layers, batch >= 1; batch 0 means the default.
Workload make_workload(const std::string& name, int64_t layers, int64_t batch);

}  // namespace regrad::app
