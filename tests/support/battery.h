#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "support/compare.h"

namespace regrad::testing {

/// A part of a model, once written plainly and once with regrad. Both programs use the same tensors and functions.
struct Part {
  std::string name;
  /// What the programs are given: leaves that require grad, double precision.
  Tensors inputs;
  /// Every other leaf that gets a gradient: parameters, captured leaves, side inputs.
  Tensors leaves;
  /// What the functions change.
  Tensors buffers;
  std::function<Tensors(const Tensors& inputs)> plain;
  std::function<Tensors(const Tensors& inputs)> ours;

  /// How close gradients are to plain's.
  Tolerance tolerance;
  /// Counted up by each call of a function.
  std::shared_ptr<int> calls = std::make_shared<int>(0);
  /// How often a step of ours calls what a step of plain calls once.
  int evaluations = 2;
  /// Bytes that ours holds between forward and backward, beside inputs and leaves. Unchecked where not known.
  std::optional<int64_t> held_bytes;
};

inline std::ostream& operator<<(std::ostream& stream, const Part& part) { return stream << part.name; }

/// Checks that a part is like plain in every respect of the contract:
///   values, strides and gradients of all leaves, on leaves and on other tensors; which of the inputs require grad;
///   gradients against finite differences; second and third order; gradients of subsets of the leaves, by
///   autograd::grad and by backward's `inputs`; retained graphs; unused outputs; hooks and retain_grad; memory formats;
///   how often functions run; bytes held, at the peak and afterwards; buffers, generator and thread-local settings;
///   grad mode off; and the error for a parameter that is written between forward and backward.
void run_battery(const Part& part);

}  // namespace regrad::testing
