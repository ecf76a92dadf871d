#include "core/state.h"

#include <algorithm>
#include <cstring>

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include "core/describe.h"
#include "core/kept_tensor.h"
#include "regrad/error.h"

namespace regrad::detail {

namespace {

/// Whether `tensor` still shares memory with its snapshot, or has the same bytes as a small one that was copied.
bool unchanged(const at::Tensor& tensor, const at::Tensor& before) {
  const at::Storage& now = tensor.storage();
  const at::Storage& then = before.storage();
  if (now.data() == then.data()) return true;
  return is_small(tensor) && is_small(before) && tensor.scalar_type() == before.scalar_type() &&
         now.nbytes() == then.nbytes() && std::memcmp(now.data(), then.data(), now.nbytes()) == 0;
}

/// A buffer can only be given earlier bytes while it is what it was.
void check_same_kind(const at::Tensor& tensor, const at::Tensor& before, const std::string& function_name) {
  if (tensor.storage().nbytes() != before.storage().nbytes() || tensor.device() != before.device() ||
      tensor.scalar_type() != before.scalar_type()) {
    throw_error(ErrorKind::tensor_modified, function_name + " needs its buffer as forward saw it, " + describe(before) +
                                                ", but it is now " + describe(tensor) +
                                                ". Run backward before the module is moved or converted.");
  }
}

}  // namespace

State::State(const Owner* owner, const std::string& function_name) {
  if (owner == nullptr) return;
  modes_ = owner->training_modes();
  for (const at::Tensor& buffer : owner->buffers()) {
    if (!buffer.defined() || !can_be_copy_on_write(buffer)) continue;
    ExchangeClaims::check_free(buffer, function_name);
    buffers_.push_back(buffer);
    buffers_before_.push_back(snapshot(buffer));
  }
}

void State::finish(const OperatorObserver& observer, const std::string& function_name) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_written_.push_back(observer.wrote(buffers_[i]) || !unchanged(buffers_[i], buffers_before_[i]));
    if (observer.only_updated(buffers_[i])) buffers_before_[i] = at::Tensor();
  }
  for (const TensorWrite& write : observer.writes) {
    const at::Tensor tensor = lock(write.tensor);
    if (!tensor.defined() || holds(tensor)) continue;
    if (tensor.requires_grad() && !tensor.is_leaf()) {
      throw_error(ErrorKind::unsupported,
                  function_name + " changes a captured tensor " + describe(tensor) +
                      " in place whose history is recorded. A replay cannot undo that: return the new value instead.");
    }
    if (!tensor.has_storage()) {
      throw_error(ErrorKind::unsupported, function_name + " changes a captured tensor without plain memory, " +
                                              describe(tensor) + ", in place. Return the new value instead.");
    }
    captured_.push_back({write.tensor, observer.only_updated(tensor) ? at::Tensor() : write.before});
  }
}

bool State::holds(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return false;
  return std::any_of(buffers_.begin(), buffers_.end(), [&](const at::Tensor& t) { return t.is_alias_of(tensor); }) ||
         std::any_of(captured_.begin(), captured_.end(), [&](const TensorWrite& write) {
           const at::Tensor t = lock(write.tensor);
           return t.defined() && t.is_alias_of(tensor);
         });
}

Tensors State::tensors() const {
  Tensors result = buffers_;
  for (const TensorWrite& write : captured_) result.push_back(lock(write.tensor));
  return result;
}

void State::restore() const {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& before = buffers_before_[i];
    if (before.defined() && !unchanged(buffers_[i], before)) buffers_[i].detach().copy_(before);
  }
  for (const TensorWrite& write : captured_) {
    const at::Tensor tensor = lock(write.tensor);
    if (tensor.defined() && write.before.defined()) tensor.detach().copy_(write.before);
  }
}

bool State::Substitutes::contain(const at::Tensor& tensor) const {
  return std::any_of(substitutes_.begin(), substitutes_.end(),
                     [&](const Substitute& s) { return s.tensor.is_alias_of(tensor); });
}

void State::Substitutes::add(const at::Tensor& tensor, c10::DataPtr memory) {
  const c10::NoGradGuard no_grad;
  const int64_t version = tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
  // An exchange would copy memory that is shared copy-on-write, and must not fail.
  tensor.storage().unsafeGetStorageImpl()->mutable_data();
  substitutes_.push_back({tensor.detach(), std::move(memory), version});
}

void State::Substitutes::claim(ExchangeClaims& claims, const std::string& function_name) const {
  for (const Substitute& s : substitutes_) claims.add(s.tensor, function_name);
}

void State::Substitutes::exchange() noexcept {
  for (Substitute& s : substitutes_) {
    s.memory = s.tensor.storage().unsafeGetStorageImpl()->set_data_ptr(std::move(s.memory));
    if (s.tensor.is_inference()) continue;
    auto counter = torch::autograd::impl::version_counter(s.tensor);  // a handle
    const auto current = static_cast<int64_t>(counter.current_version());
    counter.set_version(s.version);
    s.version = current;
  }
}

State::Scope::Scope(const State& state, const Owner* owner, const std::string& function_name, Substitutes* left)
    : left_(left), owner_(owner) {
  for (size_t i = 0; i < state.buffers_.size(); ++i) {
    substitute(state.buffers_[i], state.buffers_before_[i], state.buffers_written_[i], function_name);
  }
  for (const TensorWrite& write : state.captured_) {
    if (const at::Tensor tensor = lock(write.tensor); tensor.defined()) {
      substitute(tensor, write.before, /*is_written=*/true, function_name);
    }
  }
  if (owner_ != nullptr && owner_->training_modes() != state.modes_) {
    current_modes_ = owner_->training_modes();
    owner_->set_training_modes(state.modes_);
  }
  substitutes_.exchange();
}

State::Scope::~Scope() {
  if (!current_modes_.empty()) owner_->set_training_modes(current_modes_);
  substitutes_.exchange();
  if (left_ != nullptr) *left_ = std::move(substitutes_);
}

/// Prepares a copy of the earlier bytes, or of any where they do not matter, to be put under the tensor, so that views
/// of it follow. A tensor that the function only reads, and that is as it was, is left alone: passes in other threads
/// may read it too.
void State::Scope::substitute(const at::Tensor& tensor, const at::Tensor& before, bool is_written,
                              const std::string& function_name) {
  if (before.defined() && !is_written && unchanged(tensor, before)) return;
  if (before.defined()) check_same_kind(tensor, before, function_name);
  if (substitutes_.contain(tensor)) return;
  claims_.add(tensor, function_name);
  const at::DisableRecordFunctionGuard not_observed;  // as in snapshot()
  at::Tensor copy = copy_with_storage(before.defined() ? before : tensor);
  substitutes_.add(tensor, copy.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
}

}  // namespace regrad::detail
