#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace regrad::detail {

/// The state of one random generator at one moment. 2.5 KB for the CPU's, the size of its Mersenne twister; few bytes
/// for others.
class GeneratorState {
 public:
  explicit GeneratorState(const at::Generator& generator);

  const at::Generator& generator() const { return generator_; }

  /// Whether the generator is in another state now.
  bool has_advanced() const;

  /// Sets the generator to this state.
  void restore() const;

 private:
  struct Twister;

  at::Generator generator_;
  std::shared_ptr<const Twister> twister_;  // of a CPU generator: no tensor is made to look at it
  at::Tensor bytes_;                        // of any other
};

/// States of random generators at one moment: the default generators of the CPU and of every accelerator device,
/// and others that are added by hand.
///
/// The default generators belong to the process: another thread that draws during a replay gets the replay's numbers.
class GeneratorStates {
 public:
  /// The default generators' states now.
  static GeneratorStates capture();

  /// Adds the state of `generator` unless it is there already.
  void add(const at::Generator& generator);

  /// Adds all of `others` that are not there already.
  void add(const GeneratorStates& others);

  /// Forgets the generators that have not advanced since.
  void keep_advanced();

  /// Sets the generators to these states.
  void restore() const;

  /// Where these generators are now.
  GeneratorStates current() const;

 private:
  bool contains(const at::Generator& generator) const;

  std::vector<GeneratorState> states_;
};

}  // namespace regrad::detail
