#pragma once

// The grammar of f and g: lists of operations that keep the shape and dtype of their input.

#include <cstddef>
#include <string>
#include <vector>

#include "support/random_program.h"

namespace regrad::testing {

/// Numbers of operations, from 0 to operation_count() - 1, simpler ones first. They run one after the other.
using Operations = std::vector<size_t>;

size_t operation_count();
std::string operation_name(size_t operation);

/// f or g made of operations, for streams of these sizes.
RandomFunction make_function(const Operations& operations, const std::vector<int64_t>& sizes);

/// Whether gradients of the function's input and of what several functions share are sums of at most one term per
/// function; more are added up in another order than in plain.
bool one_term_each(const Operations& operations);

/// Whether an operation uses one of its own parameters several times.
bool reuses_own_parameter(const Operations& operations);

/// Whether a derivative jumps somewhere: rounding may then change a gradient by any amount.
bool has_kink(const Operations& operations);

/// A program's C++ source: what to put in a file of its own to run it again.
std::string source_of(const Settings& settings, const Operations& f, const Operations& g);

}  // namespace regrad::testing
