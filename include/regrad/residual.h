#pragma once

// Includes torch::nn's Module, so it cannot compile as fast as recompute_grad.h.

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "regrad/error.h"
#include "regrad/export.h"
#include "regrad/pass.h"

namespace regrad {

namespace detail {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
using SideTensors = std::vector<at::Tensor>;

template <class F, class... Args>
concept returns_tensor = requires(F& f, Args... args) {
  { f(args...) } -> std::convertible_to<at::Tensor>;
};

/// The four signatures of a residual function, the shortest first.
template <class F>
concept residual_callable =
    returns_tensor<F, const at::Tensor&> || returns_tensor<F, const at::Tensor&, const SideTensors&> ||
    returns_tensor<F, const at::Tensor&, Pass> || returns_tensor<F, const at::Tensor&, const SideTensors&, Pass>;

/// A module, held as torch::nn holds one: `Linear` or `std::shared_ptr<LinearImpl>`.
template <class T>
concept module_pointer = std::derived_from<typename T::element_type, torch::nn::Module> &&
    std::same_as<T, std::shared_ptr<typename T::element_type>>;
template <class T>
concept module_holder = std::derived_from<T, torch::nn::ModuleHolder<typename T::ContainedType>>;

/// `forward` of a module as a callable.
template <class M>
struct ModuleForward {
  std::shared_ptr<M> module;

  template <class... Args>
  auto operator()(const Args&... args) const -> decltype(module->forward(args...)) {
    return module->forward(args...);
  }
};

template <class T>
concept residual_module = (module_pointer<T> && residual_callable<ModuleForward<typename T::element_type>>) ||
                          (module_holder<T> && residual_callable<ModuleForward<typename T::ContainedType>>);

}  // namespace detail

/// The function f or g of one reversible layer, with what it owns.
///
/// A callable or a module whose `forward` is one of
///     Tensor (Tensor x)
///     Tensor (Tensor x, TensorList side)       // or const std::vector<Tensor>&
///     Tensor (Tensor x, Pass)
///     Tensor (Tensor x, TensorList side, Pass)
/// The shortest signature that compiles is the one that is called. Tensors that a callable captures get their
/// gradient. Copies share the callable and the modules.
class REGRAD_EXPORT Residual {
 public:
  /// A module: its parameters and buffers are the layer's.
  template <class T>
  requires detail::residual_module<std::remove_cvref_t<T>> Residual(T&& module)
      : Residual(from_module(as_shared(std::forward<T>(module)))) {}

  /// A callable that owns no module.
  template <class F>
  requires(!std::same_as<std::remove_cvref_t<F>, Residual> && !detail::residual_module<std::remove_cvref_t<F>> &&
           detail::residual_callable<std::decay_t<F>>) Residual(F&& callable) {
    bind(std::make_shared<std::decay_t<F>>(std::forward<F>(callable)));
    // A callable without state is the same function wherever it is copied to.
    stateless_ = std::is_empty_v<std::decay_t<F>> || std::is_function_v<std::remove_pointer_t<std::decay_t<F>>>;
  }

  /// A callable and the modules that it uses, which the block registers.
  template <class F>
  requires detail::residual_callable<std::decay_t<F>> Residual(detail::Modules modules, F&& callable)
      : modules_(std::move(modules)) {
    bind(std::make_shared<std::decay_t<F>>(std::forward<F>(callable)));
  }

  /// Runs the function. x: the stream that it reads, any shape.
  /// @throws Error (invalid_argument) for side inputs that the function does not take.
  at::Tensor operator()(const at::Tensor& x, const std::vector<at::Tensor>& side = {}) const;

  bool takes_side_inputs() const noexcept { return takes_side_inputs_; }

  /// Whether this is one module itself, rather than a callable that uses modules.
  bool is_module() const noexcept { return static_cast<bool>(clone_); }

  const detail::Modules& modules() const noexcept { return modules_; }

  /// A copy with its own weights, on `device` if given.
  /// @throws Error (not_cloneable) for a callable with state or with modules, and for a module that has no `clone`
  /// or whose `clone` shares parameters.
  Residual clone(const std::optional<at::Device>& device = std::nullopt) const;

 private:
  Residual() = default;

  template <class M>
  static std::shared_ptr<M> as_shared(std::shared_ptr<M> module) {
    return module;
  }
  template <class H>
  requires detail::module_holder<H>
  static std::shared_ptr<typename H::ContainedType> as_shared(const H& holder) { return holder.ptr(); }

  template <class M>
  static Residual from_module(std::shared_ptr<M> module) {
    if (module == nullptr) detail::throw_error(ErrorKind::invalid_argument, "a residual function is an empty module");
    Residual residual;
    residual.modules_ = {module};
    residual.bind(std::make_shared<detail::ModuleForward<M>>(detail::ModuleForward<M>{module}));
    residual.clone_ = [](const std::shared_ptr<torch::nn::Module>& copy) {
      return from_module(std::dynamic_pointer_cast<M>(copy));
    };
    return residual;
  }

  template <class F>
  void bind(std::shared_ptr<F> f) {
    using detail::current_pass;
    using detail::returns_tensor;
    using detail::SideTensors;
    if constexpr (returns_tensor<F, const at::Tensor&>) {
      call_ = [f](const at::Tensor& x, const SideTensors&) -> at::Tensor { return (*f)(x); };
    } else if constexpr (returns_tensor<F, const at::Tensor&, const SideTensors&>) {
      takes_side_inputs_ = true;
      call_ = [f](const at::Tensor& x, const SideTensors& side) -> at::Tensor { return (*f)(x, side); };
    } else if constexpr (returns_tensor<F, const at::Tensor&, Pass>) {
      call_ = [f](const at::Tensor& x, const SideTensors&) -> at::Tensor { return (*f)(x, current_pass()); };
    } else {
      takes_side_inputs_ = true;
      call_ = [f](const at::Tensor& x, const SideTensors& side) -> at::Tensor { return (*f)(x, side, current_pass()); };
    }
  }

  std::function<at::Tensor(const at::Tensor&, const detail::SideTensors&)> call_;
  bool takes_side_inputs_ = false;
  bool stateless_ = false;
  detail::Modules modules_;
  /// Rebinds to a copy of the module; empty for callables.
  std::function<Residual(const std::shared_ptr<torch::nn::Module>&)> clone_;
};

namespace detail {

template <class F>
concept residual_factory =
    std::invocable<F&, int64_t> && std::constructible_from<Residual, std::invoke_result_t<F&, int64_t>>;

}  // namespace detail

/// The functions f, or g, of all layers of a block: one that all layers share, one per layer, or a factory.
class REGRAD_EXPORT Residuals {
 public:
  /// One function, or one module with its weights, shared by all layers.
  template <class T>
  requires(!std::same_as<std::remove_cvref_t<T>, Residuals> && std::constructible_from<Residual, T&&>)
      Residuals(T&& shared)
      : Residuals(each_layer_of(Residual(std::forward<T>(shared)))) {}

  /// A factory, called with the layer's number 0 .. num_layers - 1: each layer gets what it returns.
  template <class F>
  requires(!std::same_as<std::remove_cvref_t<F>, Residuals> && !std::constructible_from<Residual, F&&> &&
           detail::residual_factory<std::decay_t<F>>) Residuals(F&& factory)
      : Residuals(per_layer_of(std::forward<F>(factory))) {}

  /// One function per layer. The length must equal the number of layers.
  template <class T>
  requires std::constructible_from<Residual, const T&> Residuals(const std::vector<T>& list)
      : Residuals(list_of(std::vector<Residual>(list.begin(), list.end()))) {}
  Residuals(std::initializer_list<Residual> list) : Residuals(list_of(std::vector<Residual>(list))) {}

  /// The functions of `num_layers` layers; `name` is "f" or "g", for errors.
  /// @throws Error (invalid_argument) when a list has another length; what a factory throws.
  std::vector<Residual> make(int64_t num_layers, const char* name) const;

 private:
  using Make = std::function<std::vector<Residual>(int64_t num_layers, const char* name)>;
  struct FromMake {};
  Residuals(FromMake, Make make) : make_(std::move(make)) {}

  static Residuals each_layer_of(Residual shared);
  static Residuals list_of(std::vector<Residual> list);
  static Residuals factory_of(std::function<Residual(int64_t)> factory);
  template <class F>
  static Residuals per_layer_of(F factory) {
    return factory_of(
        [factory = std::make_shared<F>(std::move(factory))](int64_t layer) { return Residual((*factory)(layer)); });
  }

  template <class F>
  friend Residuals per_layer(F factory);
  friend REGRAD_EXPORT Residuals each_layer(Residual shared);

  Make make_;
};

/// Says outright that `factory` makes a function for each layer, where deduction could surprise: a generic lambda
/// `[](auto x)` is otherwise taken for a residual function.
template <class F>
Residuals per_layer(F factory) {
  return Residuals::per_layer_of(std::move(factory));
}

/// Says outright that all layers share `shared`.
REGRAD_EXPORT Residuals each_layer(Residual shared);

}  // namespace regrad
