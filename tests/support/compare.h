#pragma once

#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace regrad::testing {

using Tensors = std::vector<torch::Tensor>;

/// How far two gradients may be apart: 0 means the same bits. Relative to the largest gradient of all, since a true
/// gradient of zero (a bias before batch norm) has nothing to be relative to.
struct Tolerance {
  double relative = 0;
};

/// What one run of a program left behind.
struct Outcome {
  Tensors outputs;
  Tensors gradients;  // of the leaves, in order; undefined where none arrived
  torch::Tensor random_after;
};

/// The sum of those that require grad times fixed random weights; undefined where none does.
torch::Tensor weighted_sum(const Tensors& tensors);

/// Runs `program` from `seed`, then backward from the sum of its outputs times fixed random weights, and collects.
Outcome run(const Tensors& leaves, const std::function<Tensors()>& program, uint64_t seed = 7);

/// Runs both from the same seed and expects the same outputs (bit for bit), the same gradients and the same state of
/// the generator afterwards.
void expect_like_plain(const Tensors& leaves, const std::function<Tensors()>& plain,
                       const std::function<Tensors()>& ours, Tolerance tolerance = {});

/// Expects equal definedness, dtype, sizes, and values within the tolerance.
void expect_close(const Tensors& expected, const Tensors& found, Tolerance tolerance = {});

/// Gradients of the leaves; and forgets them.
Tensors take_gradients(const Tensors& leaves);

/// Copies without history.
Tensors copies(const Tensors& tensors);

/// A random normal tensor that requires grad.
torch::Tensor leaf(torch::IntArrayRef sizes, torch::Dtype dtype = torch::kDouble);

}  // namespace regrad::testing
