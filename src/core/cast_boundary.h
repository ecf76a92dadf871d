#pragma once

#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "core/torch_compat.h"

namespace regrad::detail {

/// Autocast's cached casts of parameters, where a function's graph ends.
///
/// Autocast casts a weight once in its scope and hands the same cast to all later code, inside and outside of a
/// region. So the cast in the cache belongs to the outside, also where the region was the first to need it. A replay
/// runs without the cache and makes casts of its own: each stands for the cast of the first run.
class CastBoundary {
 public:
  /// For a first run: looks at autocast's cache, and at the casts that an enclosing replay stands in for.
  static CastBoundary for_first_run();

  /// The outside edge for which `edge` stands when its node casts a leaf; an invalid edge otherwise.
  /// In a first run it notes what it finds in the cache.
  torch::autograd::Edge outside_edge(const torch::autograd::Edge& edge);

  /// For a replay: the same casts, and no look at the cache.
  CastBoundary for_replay() const;

  /// The parameters that are cast.
  std::vector<torch::autograd::AccumulateGrad*> leaves() const;

  /// Makes the casts known to regions that run inside a replay, on this thread.
  class Published {
   public:
    explicit Published(const CastBoundary& boundary);
    ~Published();
    Published(const Published&) = delete;
    Published& operator=(const Published&) = delete;

   private:
    const CastBoundary* outer_;
  };

 private:
  struct Cast {
    torch::autograd::AccumulateGrad* leaf;
    at::ScalarType dtype;
    /// Owns the cast, which owns the leaf's accumulator and nothing else: no long graph hangs on it.
    torch::autograd::Edge edge;
  };

  std::vector<Cast> casts_;
  bool look_at_cache_ = false;
};

/// The accumulator of a leaf, or null for any other node.
torch::autograd::AccumulateGrad* as_accumulator(torch::autograd::Node* node);

}  // namespace regrad::detail
