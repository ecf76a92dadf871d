#include "core/generators.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

namespace regrad::detail {

namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// States are byte tensors on the CPU.
bool equal_states(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace

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
  return std::any_of(states_.begin(), states_.end(), [&](const auto& entry) { return entry.first == generator; });
}

void GeneratorStates::add(const at::Generator& generator) {
  if (!contains(generator)) states_.emplace_back(generator, state_of(generator));
}

void GeneratorStates::add(const GeneratorStates& others) {
  for (const auto& entry : others.states_) {
    if (!contains(entry.first)) states_.push_back(entry);
  }
}

void GeneratorStates::keep_advanced() {
  std::erase_if(states_, [](const auto& entry) { return equal_states(entry.second, state_of(entry.first)); });
  states_.shrink_to_fit();
}

void GeneratorStates::restore() const {
  for (const auto& [generator, state] : states_) {
    at::Generator handle = generator;
    const std::lock_guard<std::mutex> lock(handle.mutex());
    handle.set_state(state);
  }
}

GeneratorStates GeneratorStates::current() const {
  GeneratorStates result;
  for (const auto& entry : states_) result.add(entry.first);
  return result;
}

}  // namespace regrad::detail
