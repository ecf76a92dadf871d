#include <algorithm>
#include <string>
#include <utility>

#include "core/register_modules.h"
#include "core/training_modes.h"
#include "regrad/error.h"
#include "regrad/recompute.h"
#include "regrad/recompute_grad.h"

namespace regrad {

namespace {

/// Runs modules [first, last) of a Sequential one after the other.
at::Tensor run_range(torch::nn::SequentialImpl& sequential, size_t first, size_t last, at::Tensor x) {
  for (size_t i = first; i < last; ++i) x = (sequential.begin() + static_cast<int64_t>(i))->forward<at::Tensor>(x);
  return x;
}

}  // namespace

RecomputeImpl::RecomputeImpl(Residual inner) : torch::nn::Module("regrad::Recompute"), inner_(std::move(inner)) {
  detail::register_modules(*this, "inner", inner_.modules());
}

at::Tensor RecomputeImpl::forward(const at::Tensor& x) {
  detail::Function function;
  function.name = "the inner module of a Recompute";
  function.owner = detail::owner_of(inner_.modules());
  function.run = [inner = inner_](const detail::Tensors& inputs) { return detail::Tensors{inner(inputs.front())}; };
  return detail::recompute(std::move(function), {x}, {}).front();
}

std::shared_ptr<torch::nn::Module> RecomputeImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<RecomputeImpl>(inner_.clone(device));
  detail::copy_training_modes(*this, *copy);
  return copy;
}

void RecomputeImpl::pretty_print(std::ostream& stream) const { stream << "regrad::Recompute()"; }

at::Tensor checkpoint_sequential(const torch::nn::Sequential& sequential, int64_t segments, const at::Tensor& x) {
  const size_t size = sequential->size();
  if (segments < 1 || size == 0) {
    detail::throw_error(ErrorKind::invalid_argument, "checkpoint_sequential was asked for " + std::to_string(segments) +
                                                         " segments of " + std::to_string(size) +
                                                         " modules; both must be at least 1.");
  }
  const size_t parts = std::min(static_cast<size_t>(segments), size);
  const std::shared_ptr<torch::nn::SequentialImpl> modules = sequential.ptr();
  at::Tensor result = x;
  for (size_t part = 0; part < parts; ++part) {
    const size_t first = part * size / parts;
    const size_t last = (part + 1) * size / parts;
    if (part + 1 == parts) return run_range(*modules, first, last, result);
    detail::Function function;
    function.name = "modules " + std::to_string(first) + " to " + std::to_string(last - 1) + " of a Sequential";
    std::vector<std::shared_ptr<torch::nn::Module>> owned;
    for (size_t i = first; i < last; ++i) owned.push_back((*modules)[i]);
    function.owner = detail::owner_of(std::move(owned));
    function.run = [modules, first, last](const detail::Tensors& inputs) {
      return detail::Tensors{run_range(*modules, first, last, inputs.front())};
    };
    result = detail::recompute(std::move(function), {result}, {}).front();
  }
  return result;
}

}  // namespace regrad
