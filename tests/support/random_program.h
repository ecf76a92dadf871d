#pragma once

// A training program on a stack of reversible residual layers, run plainly and with regrad, and compared. Its functions
// f and g come from the grammar in random_functions.h, or from the source text that a failing property prints.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "regrad/regrad.h"
#include "support/compare.h"

namespace regrad::testing {

/// How a stream lies in memory. Those that do not fit its rank are contiguous.
enum class Layout { contiguous, channels_last, transposed, sliced };

/// Where the streams come from: a leaf each, one tensor for both, or the halves of one leaf.
enum class Source { two_leaves, same_tensor, halves };

/// How regrad runs the layers: a RevBlock by one of its strategies; recompute_grad of each f and g, of the whole plain
/// stack, or of a reversible RevBlock.
enum class Way { store, recompute, reverse, recompute_functions, recompute_stack, recompute_block };

enum class LossOf { both, y1, y2 };

/// One training step; one after the other; or both forwards before one backward.
enum class Steps { one, two, overlapping };

struct Settings {
  std::vector<int64_t> sizes;  // of each stream, rank 2 to 4
  torch::ScalarType dtype = torch::kDouble;
  int64_t depth = 1;
  Way way = Way::store;
  int64_t segment = 1;  // of Way::recompute
  Layout layout = Layout::contiguous;
  Source source = Source::two_leaves;
  LossOf loss = LossOf::both;
  Steps steps = Steps::one;
  bool train = true;
  bool registered = false;  // f and g are modules; otherwise lambdas that capture them
  bool x1_requires_grad = true;
  bool x2_requires_grad = true;
  bool side_requires_grad = true;
  bool shared_require_grad = true;  // the tied weight and the leaf behind the captured tensor
  bool parameters_require_grad = true;
  uint64_t seed = 0;
  /// Whether regrad adds up all gradients in plain's order: see docs/design.md, "Limits".
  bool same_order = true;
};

/// What f and g see beside their input and their own tensors.
struct Surroundings {
  bool train = true;
  bool with_regrad = false;
  torch::Tensor tied;      // a parameter of several functions: (L, L), where L is the size of the last dimension
  torch::Tensor captured;  // with a gradient history from outside: (L)
};

/// The sizes of the tensors that one operation of f or g owns.
struct OwnSizes {
  std::vector<std::vector<int64_t>> parameters = {};
  std::vector<std::vector<int64_t>> buffers = {};
};

struct Own {
  Tensors parameters;
  Tensors buffers;
};

using Body = std::function<torch::Tensor(torch::Tensor x, const Tensors& side, const std::vector<Own>& own,
                                         const Surroundings& around)>;

/// f or g of every layer. Each layer has tensors of its own, of the same sizes.
struct RandomFunction {
  Body body;
  std::vector<OwnSizes> own;  // of each operation
};

/// Runs the program plainly and with regrad. Returns what differs, in words; "" where nothing does.
std::string compare_with_plain(const Settings& settings, const RandomFunction& f, const RandomFunction& g);

/// A region inside f or g: recomputed with regrad, and plainly run otherwise.
template <class F>
torch::Tensor region(const Surroundings& around, F function, const torch::Tensor& x) {
  return around.with_regrad ? recompute_grad(function)(x) : function(x);
}

/// sin(x * w) as a custom autograd function. w: (L).
torch::Tensor custom_sine(const torch::Tensor& x, const torch::Tensor& w);

}  // namespace regrad::testing
