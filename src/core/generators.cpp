#include "core/generators.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

namespace regrad::detail {

/// What CPUGeneratorImpl::get_state() writes into a tensor.
struct GeneratorState::Twister {
  explicit Twister(at::CPUGeneratorImpl& generator)
      : engine(generator.engine()),
        next_float(generator.next_float_normal_sample()),
        next_double(generator.next_double_normal_sample()) {}

  bool operator==(const Twister& other) const {
    const at::mt19937_data_pod a = engine.data();
    const at::mt19937_data_pod b = other.engine.data();
    return a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ && a.seed_ == b.seed_ &&
           next_float == other.next_float && next_double == other.next_double && a.state_ == b.state_;
  }

  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

namespace {

at::CPUGeneratorImpl* as_twister(const at::Generator& generator) {
  return dynamic_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

/// States are byte tensors on the CPU.
bool equal_states(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

GeneratorState::GeneratorState(const at::Generator& generator) : generator_(generator) {
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  if (at::CPUGeneratorImpl* twister = as_twister(generator_)) {
    twister_ = std::make_shared<const Twister>(*twister);
  } else {
    bytes_ = generator_.get_state();
  }
}

bool GeneratorState::has_advanced() const {
  at::Generator handle = generator_;
  const std::lock_guard<std::mutex> lock(handle.mutex());
  if (twister_ != nullptr) return !(*twister_ == Twister(*as_twister(handle)));
  return !equal_states(bytes_, handle.get_state());
}

void GeneratorState::restore() const {
  at::Generator handle = generator_;
  const std::lock_guard<std::mutex> lock(handle.mutex());
  if (twister_ == nullptr) {
    handle.set_state(bytes_);
    return;
  }
  at::CPUGeneratorImpl& twister = *as_twister(handle);
  twister.set_engine(twister_->engine);
  twister.set_next_float_normal_sample(twister_->next_float);
  twister.set_next_double_normal_sample(twister_->next_double);
}

GeneratorStates GeneratorStates::capture() {
  GeneratorStates result;
  result.add(at::globalContext().defaultGenerator(at::kCPU));
  if (const auto accelerator = at::getAccelerator(); accelerator.has_value()) {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*accelerator);
    for (c10::DeviceIndex i = 0; i < hooks.deviceCount(); ++i) {
      result.add(at::globalContext().defaultGenerator(at::Device(*accelerator, i)));
    }
  }
  return result;
}

bool GeneratorStates::contains(const at::Generator& generator) const {
  return std::any_of(states_.begin(), states_.end(),
                     [&](const GeneratorState& state) { return state.generator() == generator; });
}

void GeneratorStates::add(const at::Generator& generator) {
  if (!contains(generator)) states_.emplace_back(generator);
}

void GeneratorStates::add(const GeneratorStates& others) {
  for (const GeneratorState& state : others.states_) {
    if (!contains(state.generator())) states_.push_back(state);
  }
}

void GeneratorStates::keep_advanced() {
  std::erase_if(states_, [](const GeneratorState& state) { return !state.has_advanced(); });
  states_.shrink_to_fit();
}

void GeneratorStates::restore() const {
  for (const GeneratorState& state : states_) state.restore();
}

GeneratorStates GeneratorStates::current() const {
  GeneratorStates result;
  for (const GeneratorState& state : states_) result.add(state.generator());
  return result;
}

}  // namespace regrad::detail
