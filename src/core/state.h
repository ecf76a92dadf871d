#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "core/exchange_claims.h"
#include "core/operator_observer.h"
#include "regrad/detail/function.h"

namespace regrad::detail {

/// What a function keeps between calls, as its first run found it: registered buffers, tensors from outside that it
/// wrote in place, and the training modes of its modules.
///
/// Values are held as copy-on-write aliases: no bytes for what stays unchanged. Small ones are copied. Of running
/// statistics in training, on which no result depends, no value is held.
class State {
 public:
  State() = default;

  /// Right before the first run. Owner may be null.
  /// @throws Error (unsupported) when a pass in another thread works on one of its buffers.
  State(const Owner* owner, const std::string& function_name);

  /// Right after it, with what was seen of it.
  /// @throws Error (unsupported) when it changed a tensor with a gradient history in place.
  void finish(const OperatorObserver& observer, const std::string& function_name);

  /// Registered buffers, and tensors from outside that the function wrote; undefined where they are gone.
  Tensors tensors() const;

  /// Writes the first values back for good.
  void restore() const;

  /// Whether this holds the value of `tensor`.
  bool holds(const at::Tensor& tensor) const;

  /// Other memory and another version for tensors: those that a replay works on, while theirs is put aside.
  class Substitutes {
   public:
    bool contain(const at::Tensor& tensor) const;
    void add(const at::Tensor& tensor, c10::DataPtr memory);

    /// @throws Error (unsupported) when a pass in another thread has exchanged one of them.
    void claim(ExchangeClaims& claims, const std::string& function_name) const;

    /// Exchanges memory and version of each tensor with what is put aside.
    void exchange() noexcept;

   private:
    struct Substitute {
      /// An alias, which keeps its memory when the tensor itself is given another, by Module::to for one.
      at::Tensor tensor;
      c10::DataPtr memory;
      int64_t version;
    };
    std::vector<Substitute> substitutes_;
  };

  /// While it lives, the function sees the first run's state; then everything is as it was.
  class Scope {
   public:
    /// left: null, or receives at the end what the function left of the state. Its graph may have saved that.
    Scope(const State& state, const Owner* owner, const std::string& function_name, Substitutes* left);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void substitute(const at::Tensor& tensor, const at::Tensor& before, bool is_written,
                    const std::string& function_name);

    ExchangeClaims claims_;
    Substitutes substitutes_;
    Substitutes* left_;
    const Owner* owner_;
    std::vector<bool> current_modes_;
  };

 private:
  Tensors buffers_;
  /// Undefined where the value does not matter; so in captured_.
  Tensors buffers_before_;
  /// Whether the function writes it.
  std::vector<bool> buffers_written_;
  std::vector<TensorWrite> captured_;
  std::vector<bool> modes_;
};

}  // namespace regrad::detail
