#include "rev/block_forward.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include "core/edges.h"
#include "core/environment.h"
#include "core/graph_walk.h"
#include "core/input_guard.h"
#include "core/replay.h"
#include "core/supported.h"
#include "regrad/error.h"
#include "rev/block_call.h"
#include "rev/half_step.h"

namespace regrad::detail {

namespace {

std::shared_ptr<const Function> make_function(const Residual& residual, size_t layer, const char* which) {
  auto function = std::make_shared<Function>();
  function->name = "layers." + std::to_string(layer) + "." + which;
  function->owner = owner_of(residual.modules());
  function->run = [residual](const Tensors& arguments) {
    return Tensors{residual(arguments.front(), Tensors(arguments.begin() + 1, arguments.end()))};
  };
  return function;
}

/// The same function for replays. Where it returns its input or a captured tensor, a view of that: a result of its own.
std::shared_ptr<const Function> with_own_result(const std::shared_ptr<const Function>& plain) {
  auto function = std::make_shared<Function>(*plain);
  function->run = [plain](const Tensors& arguments) {
    const NodeOrigin origin;
    const at::Tensor result = plain->run(arguments).front();
    if (!result.defined() || !result.requires_grad()) return Tensors{result};
    const bool is_argument = std::any_of(arguments.begin(), arguments.end(),
                                         [&](const at::Tensor& argument) { return argument.is_same(result); });
    const bool is_own = !is_argument && !result.is_leaf() && origin.made_here(*result.grad_fn());
    return Tensors{is_own ? result : result.view_as(result)};
  };
  return function;
}

const Tensors& side_of(const SideInputs& side, size_t step) { return step % 2 == 0 ? side.f : side.g; }

/// The leaves behind a residual that was computed by plain operations.
void add_leaves(const at::Tensor& residual, const NodeOrigin& origin, Tensors& leaves) {
  const auto edge = gradient_edge(residual);
  if (!edge.is_valid()) return;
  CastBoundary casts;
  append_leaves(walk_graph({edge}, origin, {}, casts).exits, leaves);
}

}  // namespace

BlockFunctions::BlockFunctions(const std::vector<Residual>& f, const std::vector<Residual>& g) {
  for (size_t layer = 0; layer < f.size(); ++layer) {
    functions_.push_back(make_function(f[layer], layer, "f"));
    functions_.push_back(make_function(g[layer], layer, "g"));
    takes_side_inputs_.push_back(f[layer].takes_side_inputs());
    takes_side_inputs_.push_back(g[layer].takes_side_inputs());
  }
  for (const auto& function : functions_) replayed_.push_back(with_own_result(function));
}

void BlockFunctions::check_side_inputs(const SideInputs& side) const {
  for (size_t step = 0; step < functions_.size(); ++step) {
    const size_t count = side_of(side, step).size();
    if (count == 0 || takes_side_inputs_[step]) continue;
    throw_error(ErrorKind::invalid_argument,
                functions_[step]->name + " takes no side inputs, but " + std::to_string(count) +
                    " were given. Give it the signature (Tensor, TensorList), or pass no side inputs.");
  }
}

at::Tensor BlockFunctions::run(size_t step, const at::Tensor& stream, const SideInputs& side) const {
  Tensors arguments{stream};
  const Tensors& more = side_of(side, step);
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_plainly(*functions_[step], arguments).front();
}

std::tuple<at::Tensor, at::Tensor> BlockFunctions::forward(const at::Tensor& x1, const at::Tensor& x2,
                                                           const SideInputs& side, const Memory& memory,
                                                           Tensors* leaves) const {
  check_side_inputs(side);
  Streams streams{x1, x2};
  const bool record = c10::GradMode::is_enabled();
  if (!record || memory.kind() == Memory::Kind::store) {
    for (size_t step = 0; step < functions_.size(); ++step) {
      const NodeOrigin origin;
      const at::Tensor residual = run(step, streams[1 - step % 2], side);
      if (record && leaves != nullptr) add_leaves(residual, origin, *leaves);
      streams[step % 2] = add_residual(streams[step % 2], residual, functions_[step]->name);
    }
    return {streams[0], streams[1]};
  }

  check_supported({x1, x2}, "a block");
  check_supported(side.f, "a block, as a side input of f,");
  check_supported(side.g, "a block, as a side input of g,");
  const int64_t layers = static_cast<int64_t>(functions_.size() / 2);
  std::shared_ptr<BlockCall> call;
  if (memory.kind() == Memory::Kind::reverse) {
    call = std::make_shared<ReverseCall>(side.f, side.g);
  } else {
    call = std::make_shared<RecomputeCall>(static_cast<size_t>(std::min(memory.segment(), layers)), side.f, side.g);
  }
  const auto environment = Environment::capture();
  for (size_t step = 0; step < functions_.size(); ++step) {
    call->keep_before(step, streams);
    streams[step % 2] = BlockCall::first_step(call, replayed_[step], streams, side_of(side, step), environment, leaves);
  }
  call->keep_last(streams);
  return {streams[0], streams[1]};
}

std::tuple<at::Tensor, at::Tensor> BlockFunctions::inverse(const at::Tensor& y1, const at::Tensor& y2,
                                                           const SideInputs& side) const {
  check_side_inputs(side);
  Streams streams{y1, y2};
  for (size_t step = functions_.size(); step-- > 0;) {
    at::Tensor& stream = streams[step % 2];
    const at::Tensor residual = run(step, streams[1 - step % 2], side);
    check_residual(stream, residual, functions_[step]->name);
    stream = stream - residual;
  }
  return {streams[0], streams[1]};
}

}  // namespace regrad::detail
