#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include "core/generators.h"
#include "core/graph_walk.h"
#include "core/tensor_stamp.h"
#include "regrad/detail/function.h"

namespace regrad::detail {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// The tensor while somebody else still owns it; undefined afterwards.
at::Tensor lock(const WeakTensor& tensor);

/// A tensor from outside that a function read, as it was then.
struct TensorRead {
  WeakTensor tensor;
  TensorStamp then;
};

/// A tensor from outside that a function wrote in place, and its values before.
struct TensorWrite {
  WeakTensor tensor;
  at::Tensor before;
};

/// Watches the operators that run on this thread while it lives: which tensors from outside they read and write, and
/// which generators they are given. It sees what a graph cannot show: masks, counters, running statistics.
///
/// Blind to code under a disabled RecordFunction, to raw pointers, and to threads that the function starts.
/// About one microsecond an operator. Observers nest.
class OperatorObserver {
 public:
  /// own: tensors that are the function's inputs, not from outside. origin: tells the nodes of the function's graph.
  OperatorObserver(const Tensors& own, const NodeOrigin& origin);
  ~OperatorObserver();
  OperatorObserver(const OperatorObserver&) = delete;
  OperatorObserver& operator=(const OperatorObserver&) = delete;

  /// Throws what went wrong while watching; Torch swallows exceptions of callbacks.
  void rethrow_failure() const;

  std::vector<TensorRead> reads;
  std::vector<TensorWrite> writes;
  /// Generators passed to operators, as they were before.
  GeneratorStates generators;

  /// Whether an operator wrote into the tensor's memory.
  bool wrote(const at::Tensor& tensor) const;

  /// Whether every operator that was given the tensor's memory only updated it as running statistics, on which no
  /// result in training depends.
  bool only_updated(const at::Tensor& tensor) const;

  /// To be told what the function returned, which counts as read.
  void see_results(const Tensors& outputs);

  /// For the callbacks.
  void on_start(const at::RecordFunction& op);
  void on_end(const at::RecordFunction& op);
  OperatorObserver* outer() const { return outer_; }

 private:
  /// Memory from outside, and the first tensor on it that was seen: later ones may be passing views of it. Holding it
  /// weakly keeps its address from being used again.
  struct Outside {
    WeakTensor tensor;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  };

  static Outside outside(const at::Tensor& tensor);
  void see_input(const c10::IValue& value, bool is_written, bool is_read);
  void see_tensor(const at::Tensor& tensor, bool is_written, bool is_read);
  void see_output(const c10::IValue& value);
  bool has_history_from_here(const at::Tensor& tensor) const;

  NodeOrigin origin_;
  /// By address. What the function made, and what is from outside.
  std::unordered_set<const void*> made_;
  std::unordered_map<const void*, Outside> outside_;
  std::unordered_set<const void*> written_;
  std::unordered_set<const void*> read_;
  /// Operators call operators; only the outermost count.
  int depth_ = 0;
  std::exception_ptr failure_;
  OperatorObserver* outer_;
  at::CallbackHandle callback_ = 0;
};

}  // namespace regrad::detail
