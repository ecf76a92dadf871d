#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "core/describe.h"
#include "core/training_modes.h"
#include "regrad/error.h"
#include "regrad/rev_block.h"

namespace regrad {

SplitRevBlockImpl::SplitRevBlockImpl(RevBlock block, int64_t dim)
    : torch::nn::Module("regrad::SplitRevBlock"), block_(std::move(block)), dim_(dim) {
  register_module("block", block_);
}

std::tuple<at::Tensor, at::Tensor> SplitRevBlockImpl::split(const at::Tensor& x) const {
  const bool has_dim = x.defined() && dim_ >= -x.dim() && dim_ < x.dim();
  if (!has_dim || x.size(dim_) % 2 != 0) {
    detail::throw_error(ErrorKind::invalid_argument,
                        "a SplitRevBlock along dimension " + std::to_string(dim_) + " was given " +
                            detail::describe(x) + ": it needs an even size there, to split in two equal streams.");
  }
  const auto halves = x.chunk(2, dim_);
  return {halves[0], halves[1]};
}

at::Tensor SplitRevBlockImpl::forward(const at::Tensor& x) {
  const auto [x1, x2] = split(x);
  const auto [y1, y2] = block_->forward(x1, x2);
  return at::cat({y1, y2}, dim_);
}

at::Tensor SplitRevBlockImpl::inverse(const at::Tensor& y) {
  const auto [y1, y2] = split(y);
  const auto [x1, x2] = block_->inverse(y1, y2);
  return at::cat({x1, x2}, dim_);
}

std::shared_ptr<torch::nn::Module> SplitRevBlockImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<SplitRevBlockImpl>(
      RevBlock(std::dynamic_pointer_cast<RevBlockImpl>(block_->clone(device))), dim_);
  detail::copy_training_modes(*this, *copy);
  return copy;
}

void SplitRevBlockImpl::pretty_print(std::ostream& stream) const {
  stream << "regrad::SplitRevBlock(dim=" << dim_ << ")";
}

}  // namespace regrad
