// Compiled with NDEBUG in every configuration: without it, RecordFunction::inputs() throws in every callback.
#include "core/operator_observer.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>

#include "core/kept_tensor.h"
#include "core/memory_of.h"

namespace regrad::detail {

at::Tensor lock(const WeakTensor& tensor) {
  auto owned = tensor.lock();
  return owned.defined() ? at::Tensor(std::move(owned)) : at::Tensor();
}

namespace {

thread_local OperatorObserver* innermost = nullptr;

/// Which arguments an operator writes to.
struct WrittenArguments {
  std::vector<size_t> always;
  /// Running statistics, which the schemas of normalisation layers do not mark as written. They are when the
  /// argument at `training` is true.
  std::vector<size_t> statistics;
  std::optional<size_t> training;
};

WrittenArguments written_arguments_of(const c10::FunctionSchema& schema) {
  WrittenArguments result;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const std::string& name = argument.name();
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      result.always.push_back(i);
    } else if (name == "running_mean" || name == "running_var") {
      result.statistics.push_back(i);
    } else if (name == "training" || name == "train" || name == "use_input_stats") {
      result.training = i;
    }
  }
  return result;
}

/// Looked up once per operator and thread: copying a schema is slow.
const WrittenArguments& written_arguments(const at::RecordFunction& op, const c10::OperatorName& name) {
  thread_local std::unordered_map<c10::OperatorName, WrittenArguments> known;
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  return known.emplace(name, written_arguments_of(*op.operator_schema())).first->second;
}

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& op) {
  for (OperatorObserver* o = innermost; o != nullptr; o = o->outer()) o->on_start(op);
  return nullptr;
}

void end(const at::RecordFunction& op, at::ObserverContext*) {
  for (OperatorObserver* o = innermost; o != nullptr; o = o->outer()) o->on_end(op);
}

}  // namespace

OperatorObserver::OperatorObserver(const Tensors& own, const NodeOrigin& origin) : origin_(origin), outer_(innermost) {
  for (const at::Tensor& tensor : own) {
    if (tensor.defined()) made_.insert(memory_of(tensor));
  }
  innermost = this;
  if (outer_ == nullptr) {
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end)
                                               .needsInputs(true)
                                               .needsOutputs(true)
                                               .scopes({at::RecordScope::FUNCTION}));
  }
}

OperatorObserver::~OperatorObserver() {
  if (outer_ == nullptr) at::removeCallback(callback_);
  innermost = outer_;
}

void OperatorObserver::rethrow_failure() const {
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

void OperatorObserver::see_results(const Tensors& outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.defined()) read_.insert(memory_of(output));
  }
}

OperatorObserver::Outside OperatorObserver::outside(const at::Tensor& tensor) {
  Outside result{WeakTensor(tensor.getIntrusivePtr()), std::nullopt};
  if (tensor.has_storage()) result.storage = tensor.storage().getWeakStorageImpl();
  return result;
}

bool OperatorObserver::wrote(const at::Tensor& tensor) const { return written_.contains(memory_of(tensor)); }

bool OperatorObserver::only_updated(const at::Tensor& tensor) const {
  return wrote(tensor) && !read_.contains(memory_of(tensor));
}

void OperatorObserver::on_start(const at::RecordFunction& op) {
  const auto name = op.operator_name();
  if (!name.has_value()) return;  // a scope that the user marks, not an operator
  if (depth_++ > 0) return;
  try {
    const WrittenArguments& written = written_arguments(op, *name);
    const auto inputs = op.inputs();
    const bool training = written.training.has_value() && *written.training < inputs.size() &&
                          inputs[*written.training].isBool() && inputs[*written.training].toBool();
    const auto contains = [](const std::vector<size_t>& list, size_t i) {
      return std::find(list.begin(), list.end(), i) != list.end();
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      // In training, the result of a normalisation depends on the batch alone.
      const bool is_statistic = training && contains(written.statistics, i);
      see_input(inputs[i], is_statistic || contains(written.always, i), /*is_read=*/!is_statistic);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void OperatorObserver::on_end(const at::RecordFunction& op) {
  if (!op.operator_name().has_value() || depth_ == 0 || --depth_ > 0) return;
  try {
    for (const c10::IValue& value : op.outputs()) see_output(value);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void OperatorObserver::see_input(const c10::IValue& value, bool is_written, bool is_read) {
  if (value.isTensor()) {
    see_tensor(value.toTensor(), is_written, is_read);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) see_tensor(tensor, is_written, is_read);
  } else if (value.isList()) {  // lists of optional tensors
    for (const c10::IValue& element : value.toListRef()) see_input(element, is_written, is_read);
  } else if (value.isGenerator()) {
    generators.add(value.toGenerator());
  } else if (value.isStorage()) {
    // A tensor will be set on it, which does not make its memory.
    const c10::Storage storage = value.toStorage();
    const void* memory = storage.unsafeGetStorageImpl();
    if (!made_.contains(memory)) {
      outside_.try_emplace(memory, Outside{WeakTensor(at::Tensor().getIntrusivePtr()), storage.getWeakStorageImpl()});
    }
  }
}

void OperatorObserver::see_tensor(const at::Tensor& tensor, bool is_written, bool is_read) {
  if (!tensor.defined()) return;
  const void* memory = memory_of(tensor);
  if (made_.contains(memory)) return;
  if (!outside_.contains(memory) && has_history_from_here(tensor)) {
    made_.insert(memory);
    return;
  }
  const auto [found, is_new] = outside_.try_emplace(memory, outside(tensor));
  if (is_read) read_.insert(memory);
  if (is_written) {
    const at::Tensor first = lock(found->second.tensor);
    const at::Tensor& owner = first.defined() ? first : tensor;
    if (written_.insert(memory).second) {
      writes.push_back({WeakTensor(owner.getIntrusivePtr()), snapshot(owner)});
    }
    return;
  }
  if (is_new && !tensor.is_inference()) {
    reads.push_back({WeakTensor(tensor.getIntrusivePtr()), TensorStamp(tensor)});
  }
}

/// Whether the function made a tensor where no callback saw it, under a disabled RecordFunction.
bool OperatorObserver::has_history_from_here(const at::Tensor& tensor) const {
  if (!tensor.requires_grad() || tensor.is_leaf()) return false;
  const auto node = tensor.is_view() ? tensor._base().grad_fn() : tensor.grad_fn();
  return node != nullptr && origin_.made_here(*node);
}

void OperatorObserver::see_output(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && !outside_.contains(memory_of(tensor))) made_.insert(memory_of(tensor));
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) see_output(tensor);
  }
}

}  // namespace regrad::detail
