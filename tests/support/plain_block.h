#pragma once

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "regrad/regrad.h"
#include "support/compare.h"

namespace regrad::testing {

/// A memory strategy, and how close it keeps gradients to plain in double precision.
struct Strategy {
  Memory memory;
  Tolerance tolerance;
};

inline const std::vector<Strategy> kStrategies{
    {Memory::store(), {}},
    {Memory::recompute(1), {}},
    {Memory::recompute(3), {}},
    {Memory::reverse(), {1e-12}},
};

/// A tensor that is used several times inside a function and also outside has its contributions summed in another
/// order.
inline constexpr Tolerance kRounding{1e-14};
inline Tolerance at_least(Tolerance a, Tolerance b) { return {std::max(a.relative, b.relative)}; }

using Residue = std::function<torch::Tensor(torch::Tensor)>;
using Residues = std::vector<Residue>;

/// Reversible residual layers as anybody would write them by hand.
inline Tensors plain_block(torch::Tensor x1, torch::Tensor x2, const Residues& f, const Residues& g) {
  for (size_t i = 0; i < f.size(); ++i) {
    x1 = x1 + f[i](x2);
    x2 = x2 + g[i](x1);
  }
  return {x1, x2};
}

inline RevBlock make_block(const Residues& f, const Residues& g, Memory memory = Memory::reverse()) {
  return RevBlock(RevBlockOptions(static_cast<int64_t>(f.size())).f(f).g(g).memory(memory));
}

inline Tensors run_block(RevBlock& block, torch::Tensor x1, torch::Tensor x2, const SideInputs& side = {}) {
  const auto [y1, y2] = block->forward(x1, x2, side);
  return {y1, y2};
}

/// A block of f and g under every strategy against plain_block on the streams that `start` makes: values, gradients of
/// the leaves, generator. `finish` turns (y1, y2) into the program's outputs.
inline void expect_block_like_plain(
    const Tensors& leaves, const Residues& f, const Residues& g, const std::function<Tensors()>& start,
    Tolerance extra = {}, const std::function<Tensors(Tensors)>& finish = [](Tensors y) { return y; }) {
  for (const Strategy& strategy : kStrategies) {
    SCOPED_TRACE(strategy.memory.to_string());
    RevBlock block = make_block(f, g, strategy.memory);
    expect_like_plain(
        leaves,
        [&] {
          const Tensors x = start();
          return finish(plain_block(x[0], x[1], f, g));
        },
        [&] {
          const Tensors x = start();
          return finish(run_block(block, x[0], x[1]));
        },
        at_least(strategy.tolerance, extra));
  }
}

inline std::string name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
      return "invalid_argument";
    case ErrorKind::stream_mismatch:
      return "stream_mismatch";
    case ErrorKind::input_modified:
      return "input_modified";
    case ErrorKind::tensor_modified:
      return "tensor_modified";
    case ErrorKind::variables_differ:
      return "variables_differ";
    case ErrorKind::replay_differs:
      return "replay_differs";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::not_cloneable:
      return "not_cloneable";
    case ErrorKind::meter_unavailable:
      return "meter_unavailable";
  }
  return "another kind";
}

/// Expects regrad::Error of this kind, with each of `words` in its message.
inline void expect_error(ErrorKind kind, const std::vector<std::string>& words, const std::function<void()>& program) {
  try {
    program();
  } catch (const Error& error) {
    EXPECT_EQ(name_of(kind), name_of(error.kind())) << error.msg();
    for (const std::string& word : words) {
      EXPECT_NE(error.msg().find(word), std::string::npos) << "no \"" << word << "\" in: " << error.msg();
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected regrad::Error (" << name_of(kind) << "), but this was thrown: " << error.what();
    return;
  }
  ADD_FAILURE() << "expected regrad::Error (" << name_of(kind) << "), but nothing was thrown";
}

}  // namespace regrad::testing
