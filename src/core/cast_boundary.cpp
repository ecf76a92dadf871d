#include "core/cast_boundary.h"

#include <algorithm>
#include <cstdint>

#include <ATen/autocast_mode.h>

namespace regrad::detail {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

thread_local const CastBoundary* published = nullptr;

/// The leaf that `node` casts, or null.
AccumulateGrad* leaf_of_cast(Node* node) {
  if (node->num_outputs() != 1 || !node->next_edge(0).is_valid()) return nullptr;
  AccumulateGrad* leaf = as_accumulator(node->next_edge(0).function.get());
  return leaf != nullptr && node->name() == "ToCopyBackward0" ? leaf : nullptr;
}

at::ScalarType dtype_of(const Node& cast) { return c10::typeMetaToScalarType(cast.input_metadata(0).dtype()); }

/// Whether `cast`, of `leaf`, is the one in autocast's cache.
bool is_cached(Node* cast, const at::Tensor& leaf) {
  const auto device = leaf.device().type();
  if (!at::autocast::is_autocast_enabled(device) || !at::autocast::is_autocast_cache_enabled() ||
      leaf.scalar_type() != at::kFloat || dtype_of(*cast) != at::autocast::get_autocast_dtype(device)) {
    return false;
  }
  return at::autocast::cached_cast(dtype_of(*cast), leaf, device).grad_fn().get() == cast;
}

}  // namespace

AccumulateGrad* as_accumulator(Node* node) {
  // Accumulators alone have the largest sequence number: a cheap test before the cast.
  return node->sequence_nr() == UINT64_MAX ? dynamic_cast<AccumulateGrad*>(node) : nullptr;
}

CastBoundary CastBoundary::for_first_run() {
  CastBoundary boundary;
  if (published != nullptr) boundary.casts_ = published->casts_;
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  boundary.look_at_cache_ = at::autocast::is_autocast_cache_enabled() &&
                            std::any_of(devices.begin(), devices.end(), at::autocast::is_autocast_enabled);
  return boundary;
}

CastBoundary CastBoundary::for_replay() const {
  CastBoundary boundary;
  boundary.casts_ = casts_;
  return boundary;
}

Edge CastBoundary::outside_edge(const Edge& edge) {
  if (casts_.empty() && !look_at_cache_) return Edge();
  AccumulateGrad* leaf = leaf_of_cast(edge.function.get());
  if (leaf == nullptr) return Edge();
  for (const Cast& cast : casts_) {
    if (cast.leaf == leaf && cast.dtype == dtype_of(*edge.function)) return cast.edge;
  }
  if (look_at_cache_ && is_cached(edge.function.get(), leaf->variable)) {
    casts_.push_back({leaf, dtype_of(*edge.function), edge});
    return edge;
  }
  return Edge();
}

std::vector<AccumulateGrad*> CastBoundary::leaves() const {
  std::vector<AccumulateGrad*> result;
  result.reserve(casts_.size());
  for (const Cast& cast : casts_) result.push_back(cast.leaf);
  return result;
}

CastBoundary::Published::Published(const CastBoundary& boundary) : outer_(published) { published = &boundary; }

CastBoundary::Published::~Published() { published = outer_; }

}  // namespace regrad::detail
