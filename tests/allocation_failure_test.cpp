// Contract clause 8: a failed allocation leaves everything usable. Each tensor allocation of a training step fails in
// turn, wherever it is: in a function, in its replay, or in regrad itself.

#include <string>
#include <vector>

#include <ATen/record_function.h>

#include "regrad/regrad.h"
#include "support/autocast.h"
#include "support/compare.h"
#include "support/engine_queue.h"
#include "support/failing_allocator.h"
#include "support/surroundings.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;
using Duration = FailingAllocator::Duration;
using Failure = FailingAllocator::Failure;

namespace {

constexpr int64_t kRows = 6;
constexpr int64_t kFeatures = 4;

torch::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

/// While it is set, parts note the generator's state after each of their first runs.
Tensors* generator_log = nullptr;

/// Draws random numbers, and has buffers of all kinds: running statistics, counters, one of which its result depends
/// on, and a table that is large enough to be kept copy-on-write.
class PartImpl : public torch::nn::Module {
 public:
  PartImpl()
      : norm_(register_module("norm", torch::nn::BatchNorm1d(kFeatures))),
        linear_(register_module("linear", torch::nn::Linear(kFeatures, kFeatures))),
        dropout_(register_module("dropout", torch::nn::Dropout(0.3))),
        count_(register_buffer("count", torch::zeros({1}, torch::kDouble))),
        table_(register_buffer("table", torch::rand({1100}, torch::kDouble))) {
    to(torch::kDouble);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      count_.add_(0.01);
    }
    const auto y = dropout_(linear_(norm_(x).tanh())) + count_ * table_.mean();
    if (generator_log != nullptr && !regrad::is_recomputing()) generator_log->push_back(generator_state());
    return y;
  }

 private:
  torch::nn::BatchNorm1d norm_;
  torch::nn::Linear linear_;
  torch::nn::Dropout dropout_;
  torch::Tensor count_, table_;
};
TORCH_MODULE(Part);

/// A training step: the loss of an input, and its backward.
struct Step {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(const torch::Tensor& x)> loss;
  bool second_order = false;
};

/// Backward of the loss, or of a gradient penalty.
void run_backward(const Step& step, const torch::Tensor& loss, const Tensors& leaves) {
  if (!step.second_order) return loss.backward();
  const Tensors gradients = torch::autograd::grad({loss}, leaves, {}, true, true);
  torch::Tensor penalty = loss;
  for (const auto& gradient : gradients) penalty = penalty + gradient.square().sum();
  penalty.backward();
}

Step block_step(const Memory& memory, int64_t layers = 2) {
  const auto make = [](int64_t) { return Part(); };
  const regrad::RevBlock block(regrad::RevBlockOptions(layers).f(make).g(make).memory(memory));
  return {"block under " + memory.to_string(), block.ptr(), [block = block](const torch::Tensor& x) mutable {
            const auto [y1, y2] = block->forward(x, x * 2);
            return (y1 * y2).sum();
          }};
}

/// A step of two parts, joined by `join`.
template <class Join>
Step parts_step(const std::string& name, Join join) {
  const Part a, b;
  const torch::nn::Sequential both(a, b);
  return {name, both.ptr(), [=](const torch::Tensor& x) -> torch::Tensor { return join(a, b, x).square().sum(); }};
}

Step sequential_step() {
  const torch::nn::Sequential sequential(Part{}, Part{}, Part{}, Part{});
  return {"checkpoint_sequential", sequential.ptr(),
          [=](const torch::Tensor& x) { return regrad::checkpoint_sequential(sequential, 3, x).square().sum(); }};
}

torch::Tensor nested(Part a, Part b, const torch::Tensor& x) {
  const auto outer = [a, b](const torch::Tensor& t) mutable { return b(recompute_grad(a)(t).sin()); };
  return recompute_grad(outer)(x);
}

/// Two outputs that depend on different parameters: two graph nodes that share one second run.
torch::Tensor two_outputs(Part a, Part b, const torch::Tensor& x) {
  const auto both = [a, b](const torch::Tensor& t) mutable { return std::make_tuple(a(t), b(t)); };
  const auto [first, second] = recompute_grad(both)(x);
  return first * second;
}

/// `part` with a gradient of its own, which is no true one.
auto with_own_gradient(Part part) {
  const auto gradient = [](const Tensors& inputs, const Tensors& variables, const Tensors&,
                           const Tensors& grad_outputs) {
    regrad::CustomGradients gradients{{grad_outputs[0] * inputs[0]}, {}};
    for (const auto& variable : variables) gradients.variables.push_back(variable * 2);
    return gradients;
  };
  return regrad::with_custom_grad([part](const torch::Tensor& t) mutable { return part(t); }, gradient);
}

torch::Tensor custom_gradient(Part a, Part b, const torch::Tensor& x) {
  return recompute_grad(with_own_gradient(b))(with_own_gradient(a)(x));
}

Step under_autocast(Step step) {
  step.name += " under autocast";
  step.loss = [loss = step.loss](const torch::Tensor& x) {
    const Autocast autocast;
    return loss(x);
  };
  // Double precision takes no part in autocast.
  step.module->to(torch::kFloat);
  return step;
}

Step with_second_order(Step step) {
  step.name += ", second order";
  step.second_order = true;
  return step;
}

std::vector<Step> all_steps() {
  const auto region = [](Part a, Part b, const torch::Tensor& x) { return recompute_grad(b)(recompute_grad(a)(x)); };
  return {
      block_step(Memory::store()),
      block_step(Memory::recompute(1)),
      block_step(Memory::recompute(2)),
      block_step(Memory::reverse()),
      parts_step("regions", region),
      parts_step("nested regions", nested),
      parts_step("a region with two outputs", two_outputs),
      parts_step("with_custom_grad", custom_gradient),
      sequential_step(),
      with_second_order(block_step(Memory::reverse(), 1)),
      with_second_order(block_step(Memory::recompute(1), 1)),
      with_second_order(parts_step("nested regions", nested)),
      under_autocast(block_step(Memory::reverse())),
      under_autocast(parts_step("regions", region)),
  };
}

bool equals_one_of(const torch::Tensor& tensor, const Tensors& list) {
  return std::any_of(list.begin(), list.end(), [&](const torch::Tensor& other) { return tensor.equal(other); });
}

/// Runs one step again and again from the same state, and knows what it leaves when nothing fails.
class Rehearsal {
 public:
  explicit Rehearsal(const Step& step) : step_(step) {
    const auto dtype = step.module->parameters().front().scalar_type();
    leaves_ = step.module->parameters();
    leaves_.push_back(x_ = leaf({kRows, kFeatures}, dtype));
    buffers_ = step.module->buffers();
    modes_ = modes();
    values_ = copies(leaves_);
    buffers_before_ = copies(buffers_);
    reset();
    first_states_ = {generator_state()};
    generator_log = &first_states_;
    torch::Tensor loss = step_.loss(x_);
    generator_log = nullptr;
    buffers_after_ = copies(buffers_);
    run_backward(step_, loss, leaves_);
    loss_ = loss.detach().clone();
    gradients_ = take_gradients(leaves_);
    reset();
  }

  /// The step, with its `number`-th allocation failing. Returns false when it has fewer.
  bool fail_at(int64_t number, Failure failure, Duration duration) {
    reset();
    const int64_t held = allocator_.held_bytes();
    bool in_backward = false;
    bool thrown = false;
    allocator_.arm(number, failure, duration);
    try {
      const torch::Tensor loss = step_.loss(x_);
      in_backward = true;
      run_backward(step_, loss, leaves_);
    } catch (const std::bad_alloc&) {
      thrown = true;
      EXPECT_TRUE(failure == Failure::bad_alloc);
    } catch (const c10::Error& error) {
      thrown = true;
      EXPECT_NE(error.msg().find("injected"), std::string::npos) << error.msg();
    }
    if (!allocator_.disarm()) {
      EXPECT_FALSE(thrown);
      return false;
    }
    EXPECT_TRUE(thrown) << "the failure was lost";
    in_backward ? expect_state_after_forward() : expect_state_within_forward();
    expect_nothing_else_changed();
    for (auto& leaf : leaves_) leaf.mutable_grad() = torch::Tensor();
    queue_.drain();
    EXPECT_EQ(allocator_.held_bytes(), held);
    return true;
  }

  /// The step from the same state, unhindered.
  void expect_next_step_is_right() {
    reset();
    const int64_t held = allocator_.held_bytes();
    {
      const torch::Tensor loss = step_.loss(x_);
      run_backward(step_, loss, leaves_);
      expect_result(loss);
    }
    EXPECT_EQ(allocator_.held_bytes(), held);
  }

  /// Backward on a retained graph with its `number`-th allocation failing, then on the same graph unhindered.
  bool fail_in_backward_and_try_again(int64_t number, Failure failure, Duration duration) {
    reset();
    const torch::Tensor loss = step_.loss(x_);
    const int64_t held = allocator_.held_bytes();
    const auto backward = [&] { loss.backward({}, /*retain_graph=*/true); };
    allocator_.arm(number, failure, duration);
    bool thrown = false;
    try {
      backward();
    } catch (const std::exception&) {
      thrown = true;
    }
    if (!allocator_.disarm()) return false;
    EXPECT_TRUE(thrown) << "the failure was lost";
    take_gradients(leaves_);
    queue_.drain();
    EXPECT_EQ(allocator_.held_bytes(), held);
    backward();
    expect_result(loss);
    return true;
  }

 private:
  void reset() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(buffers_before_[i]);
    take_gradients(leaves_);
    torch::manual_seed(5);
  }

  std::vector<bool> modes() const {
    std::vector<bool> result;
    for (const auto& module : step_.module->modules()) result.push_back(module->is_training());
    return result;
  }

  /// As plain: parts that ran have drawn and have updated their buffers; one that failed may have done some of that.
  void expect_state_within_forward() {
    EXPECT_TRUE(equals_one_of(generator_state(), first_states_));
    for (size_t i = 0; i < buffers_.size(); ++i) {
      EXPECT_TRUE(equals_one_of(buffers_[i], {buffers_before_[i], buffers_after_[i]})) << "buffer " << i;
    }
  }

  void expect_state_after_forward() {
    EXPECT_TRUE(generator_state().equal(first_states_.back()));
    SCOPED_TRACE("buffers");
    expect_close(buffers_after_, buffers_);
  }

  void expect_nothing_else_changed() {
    EXPECT_EQ(thread_settings(), settings_);
    EXPECT_EQ(modes(), modes_);
    for (const auto& leaf : leaves_) EXPECT_TRUE(leaf.requires_grad());
    SCOPED_TRACE("parameters and input");
    expect_close(values_, leaves_);
  }

  void expect_result(const torch::Tensor& loss) {
    expect_close({loss_}, {loss});
    {
      SCOPED_TRACE("gradients");
      expect_close(gradients_, take_gradients(leaves_));
    }
    expect_state_after_forward();
    expect_nothing_else_changed();
  }

  FailingAllocator& allocator_ = FailingAllocator::instance();
  const std::string settings_ = thread_settings();
  const EngineQueue queue_;
  Step step_;
  torch::Tensor x_;
  Tensors leaves_, buffers_;
  Tensors values_, buffers_before_, buffers_after_;
  std::vector<bool> modes_;
  /// The generator's states in forward.
  Tensors first_states_;
  torch::Tensor loss_;
  Tensors gradients_;
};

const std::pair<Failure, Duration> kWays[] = {
    {Failure::torch_error, Duration::once},
    {Failure::bad_alloc, Duration::until_disarmed},
};

class AllocationFailure : public testing::TestWithParam<size_t> {
 protected:
  AllocationFailure() { torch::manual_seed(1); }
};

TEST_P(AllocationFailure, Clause8_TheNextStepIsRight) {
  FailingAllocator::instance();
  const Step step = all_steps()[GetParam()];
  SCOPED_TRACE(step.name);
  Rehearsal rehearsal(step);
  rehearsal.expect_next_step_is_right();
  for (const auto& [failure, duration] : kWays) {
    if (step.second_order && duration == Duration::once) continue;  // slow, and no other way
    int64_t number = 1;
    for (; rehearsal.fail_at(number, failure, duration) && !HasFailure(); ++number) {
      SCOPED_TRACE("allocation " + std::to_string(number));
      rehearsal.expect_next_step_is_right();
    }
    EXPECT_FALSE(HasFailure()) << "when allocation " << number << " failed";
    EXPECT_GT(number, 20) << "this test needs a step that allocates";
  }
}

TEST_P(AllocationFailure, Clause8_ARetainedGraphCanBeUsedAgain) {
  FailingAllocator::instance();
  Step step = all_steps()[GetParam()];
  step.second_order = false;
  SCOPED_TRACE(step.name);
  Rehearsal rehearsal(step);
  for (const auto& [failure, duration] : kWays) {
    int64_t number = 1;
    while (!HasFailure() && rehearsal.fail_in_backward_and_try_again(number, failure, duration)) ++number;
    EXPECT_FALSE(HasFailure()) << "when allocation " << number << " of backward failed";
    EXPECT_GT(number, 10) << "this test needs a backward that allocates";
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, AllocationFailure, testing::Range(size_t{0}, all_steps().size()));

}  // namespace
