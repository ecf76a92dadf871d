#include "support/battery.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "regrad/error.h"
#include "regrad/memory_meter.h"
#include "support/surroundings.h"

namespace regrad::testing {

namespace {

using Program = std::function<Tensors(const Tensors& inputs)>;

/// Gradients that pass through a replay twice (second order) lose precision twice.
Tolerance looser(Tolerance tolerance) { return {std::max(1e-12, 100 * tolerance.relative)}; }

/// Sums of several contributions may have another order.
Tolerance rounding(Tolerance tolerance) { return {std::max(1e-14, tolerance.relative)}; }

class Battery {
 public:
  explicit Battery(const Part& part) : part_(part), all_(part.inputs) {
    all_.insert(all_.end(), part.leaves.begin(), part.leaves.end());
    for (const torch::Tensor& buffer : part.buffers) initial_buffers_.push_back(buffer.clone());
  }

  void run() {
    check("values and gradients of leaves", [&] { values_and_gradients([](torch::Tensor x) { return x; }); });
    check("values and gradients of tensors with a history",
          [&] { values_and_gradients([](torch::Tensor x) { return x * 1; }); });
    check("transposed inputs", [&] {
      values_and_gradients(
          [](torch::Tensor x) { return x.dim() < 2 ? x : x.transpose(0, 1).contiguous().transpose(0, 1); });
    });
    check("channels last", [&] {
      values_and_gradients(
          [](torch::Tensor x) { return x.dim() == 4 ? x.contiguous(at::MemoryFormat::ChannelsLast) : x; });
    });
    check("two steps that add their gradients", [&] { accumulation(); });
    check("some inputs without grad", [&] { some_inputs_without_grad(); });
    check("finite differences", [&] { finite_differences(); });
    check("gradient penalty", [&] { gradient_penalty(); });
    check("mixed partials", [&] { mixed_partials(); });
    check("subsets of leaves", [&] { subsets_of_leaves(); });
    check("retained graph", [&] { retained_graph(); });
    check("unused outputs", [&] { unused_outputs(); });
    check("hooks", [&] { hooks(); });
    check("calls", [&] { calls(); });
    check("bytes", [&] { bytes(); });
    check("surroundings", [&] { surroundings_stay(); });
    check("grad mode off", [&] { grad_mode_off(); });
    check("a leaf that is modified", [&] { modified_leaf(); });
  }

 private:
  template <class F>
  void check(const char* what, const F& f) {
    SCOPED_TRACE(what);
    f();
  }

  /// Everything that a program can change is as at the start.
  void start() const {
    take_gradients(all_);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < initial_buffers_.size(); ++i) torch::Tensor(part_.buffers[i]).copy_(initial_buffers_[i]);
    torch::manual_seed(7);
  }

  Tensors forward(const Program& program) const { return forward(program, part_.inputs); }

  Tensors forward(const Program& program, const Tensors& inputs) const {
    start();
    return program(inputs);
  }

  /// Not linear in the outputs, so that second order reaches the cotangents too.
  static torch::Tensor loss_of(Tensors outputs) {
    for (torch::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) output = output.sin();
    }
    return weighted_sum(outputs);
  }

  Tensors copy_of_buffers() const {
    Tensors copies;
    for (const torch::Tensor& buffer : part_.buffers) copies.push_back(buffer.clone());
    return copies;
  }

  Tensors gradients(const Program& program, const Tensors& inputs) const {
    loss_of(forward(program, inputs)).backward();
    return take_gradients(all_);
  }

  struct Observed {
    Tensors outputs, gradients, buffers_after_forward, buffers_after_backward;
    std::string after_forward, after_backward;
  };

  Observed observe(const Program& program, const Tensors& inputs) const {
    Observed result;
    result.outputs = forward(program, inputs);
    result.buffers_after_forward = copy_of_buffers();
    result.after_forward = surroundings();
    loss_of(result.outputs).backward();
    result.gradients = take_gradients(all_);
    result.buffers_after_backward = copy_of_buffers();
    result.after_backward = surroundings();
    return result;
  }

  void values_and_gradients(const std::function<torch::Tensor(torch::Tensor)>& change) const {
    const auto changed = [&](const Program& program) {
      return [&](const Tensors& inputs) {
        Tensors others;
        for (const torch::Tensor& input : inputs) others.push_back(change(input));
        return program(others);
      };
    };
    const Observed plain = observe(changed(part_.plain), part_.inputs);
    const Observed ours = observe(changed(part_.ours), part_.inputs);
    ASSERT_EQ(plain.outputs.size(), ours.outputs.size());
    expect_close(plain.outputs, ours.outputs);
    for (size_t i = 0; i < plain.outputs.size(); ++i) {
      EXPECT_EQ(plain.outputs[i].requires_grad(), ours.outputs[i].requires_grad()) << "output " << i;
      EXPECT_EQ(plain.outputs[i].strides(), ours.outputs[i].strides()) << "output " << i;
    }
    expect_close(plain.gradients, ours.gradients, part_.tolerance);
    for (size_t i = 0; i < plain.gradients.size(); ++i) {
      if (!plain.gradients[i].defined()) continue;
      EXPECT_EQ(plain.gradients[i].strides(), ours.gradients[i].strides()) << "gradient " << i;
    }
    expect_close(plain.buffers_after_forward, ours.buffers_after_forward);
    expect_close(plain.buffers_after_backward, ours.buffers_after_backward);
    EXPECT_EQ(plain.after_forward, ours.after_forward);
    EXPECT_EQ(plain.after_backward, ours.after_backward);
  }

  /// With a loss whose gradient is one dense tensor, which identities hand on.
  void accumulation() const {
    const auto steps = [&](const Program& program) {
      start();
      for (int step = 0; step < 2; ++step) {
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (const torch::Tensor& output : program(part_.inputs)) {
          if (output.requires_grad()) loss = loss + (output * torch::ones_like(output)).sum();
        }
        loss.backward();
      }
      return take_gradients(all_);
    };
    expect_close(steps(part_.plain), steps(part_.ours), rounding(part_.tolerance));
  }

  void some_inputs_without_grad() const {
    const size_t combinations = size_t{1} << part_.inputs.size();
    for (size_t with_grad = 0; with_grad < combinations; ++with_grad) {
      SCOPED_TRACE(with_grad);
      Tensors inputs;
      for (size_t i = 0; i < part_.inputs.size(); ++i) {
        inputs.push_back((with_grad >> i & 1) != 0 ? part_.inputs[i] : part_.inputs[i].detach());
      }
      const auto step = [&](const Program& program) {
        const Tensors outputs = forward(program, inputs);
        const torch::Tensor loss = loss_of(outputs);
        if (loss.defined()) loss.backward();
        return take_gradients(all_);
      };
      expect_close(step(part_.plain), step(part_.ours), part_.tolerance);
    }
  }

  /// Central differences of fourth order along one random direction for each leaf, of plain's values.
  void finite_differences() const {
    const Tensors found = gradients(part_.ours, part_.inputs);
    auto generator = at::detail::createCPUGenerator(9);
    const double epsilon = 1e-4;  // errors: 1e-17 times the fifth derivative, and 1e-12 from rounding
    double scale = 1;
    for (const torch::Tensor& g : found) {
      if (g.defined()) scale = std::max(scale, g.norm().item<double>());
    }
    for (size_t i = 0; i < all_.size(); ++i) {
      const torch::Tensor direction = torch::randn(all_[i].sizes(), generator, torch::dtype(torch::kDouble));
      const auto loss_at = [&](double step) {
        const torch::Tensor before = all_[i].detach().clone();
        {
          const torch::NoGradGuard no_grad;
          torch::Tensor(all_[i]).add_(direction, step);
        }
        const double loss = loss_of(forward(part_.plain)).item<double>();
        const torch::NoGradGuard no_grad;
        torch::Tensor(all_[i]).copy_(before);
        return loss;
      };
      const double expected =
          (8 * (loss_at(epsilon) - loss_at(-epsilon)) - (loss_at(2 * epsilon) - loss_at(-2 * epsilon))) /
          (12 * epsilon);
      const double along = found[i].defined() ? (found[i] * direction).sum().item<double>() : 0;
      EXPECT_NEAR(expected, along, 1e-7 * scale) << "leaf " << i;
    }
  }

  void gradient_penalty() const {
    const auto step = [&](const Program& program) {
      const torch::Tensor loss = loss_of(forward(program));
      torch::Tensor penalty = torch::zeros({}, torch::kDouble);
      for (const torch::Tensor& g : torch::autograd::grad({loss}, all_, {}, true, true, /*allow_unused=*/true)) {
        if (g.defined()) penalty = penalty + g.square().sum();
      }
      (penalty + loss).backward();
      return take_gradients(all_);
    };
    expect_close(step(part_.plain), step(part_.ours), looser(part_.tolerance));
  }

  /// The derivative of some leaves' gradients by all leaves, and once more by the first input.
  void mixed_partials() const {
    const auto step = [&](const Program& program) {
      const torch::Tensor loss = loss_of(forward(program));
      Tensors result;
      const Tensors first = torch::autograd::grad({loss}, all_, {}, true, true, /*allow_unused=*/true);
      const size_t every = (first.size() + 5) / 6;  // about six of them
      for (size_t i = 0; i < first.size(); i += every) {
        const torch::Tensor& g = first[i];
        if (!g.defined() || !g.requires_grad()) continue;
        const Tensors second = torch::autograd::grad({weighted_sum({g})}, all_, {}, true, true, /*allow_unused=*/true);
        for (const torch::Tensor& s : second) result.push_back(s.defined() ? s.detach() : torch::zeros({}));
        const bool third = second.front().defined() && second.front().requires_grad() && all_.size() <= 4;
        if (!third) continue;
        for (const torch::Tensor& t :
             torch::autograd::grad({weighted_sum({second.front()})}, all_, {}, true, false, /*allow_unused=*/true)) {
          result.push_back(t.defined() ? t : torch::zeros({}));
        }
      }
      return result;
    };
    expect_close(step(part_.plain), step(part_.ours), looser(part_.tolerance));
  }

  /// All subsets of few leaves; of many, each alone, all but each, and each with its neighbour.
  std::vector<std::vector<size_t>> subsets() const {
    const size_t count = all_.size();
    std::vector<std::vector<size_t>> result;
    const auto add = [&](const auto& contains) {
      std::vector<size_t> subset;
      for (size_t i = 0; i < count; ++i) {
        if (contains(i)) subset.push_back(i);
      }
      if (!subset.empty()) result.push_back(std::move(subset));
    };
    if (count <= 5) {
      for (size_t bits = 1; bits < size_t{1} << count; ++bits) add([&](size_t i) { return (bits >> i & 1) != 0; });
    } else {
      for (size_t k = 0; k < count; ++k) {
        add([&](size_t i) { return i == k; });
        add([&](size_t i) { return i != k; });
        add([&](size_t i) { return i == k || i == (k + 1) % count; });
      }
    }
    return result;
  }

  /// autograd::grad and backward(inputs): the gradients asked for, and nothing else.
  void subsets_of_leaves() const {
    const Tensors expected = gradients(part_.plain, part_.inputs);
    for (const auto& subset : subsets()) {
      SCOPED_TRACE(::testing::PrintToString(subset));
      Tensors wanted, expected_here;
      for (const size_t i : subset) {
        wanted.push_back(all_[i]);
        expected_here.push_back(expected[i]);
      }
      const Tensors found =
          torch::autograd::grad({loss_of(forward(part_.ours))}, wanted, {}, false, false, /*allow_unused=*/true);
      expect_close(expected_here, found, rounding(part_.tolerance));
      for (const torch::Tensor& gradient : take_gradients(all_)) EXPECT_FALSE(gradient.defined());

      const torch::Tensor loss = loss_of(forward(part_.ours));
      torch::autograd::backward({loss}, {}, {}, false, wanted);
      const Tensors accumulated = take_gradients(all_);
      Tensors found_here;
      for (size_t i = 0; i < all_.size(); ++i) {
        if (std::find(subset.begin(), subset.end(), i) != subset.end()) {
          found_here.push_back(accumulated[i]);
        } else {
          EXPECT_FALSE(accumulated[i].defined()) << "leaf " << i << " was not asked for";
        }
      }
      expect_close(expected_here, found_here, rounding(part_.tolerance));
    }
  }

  /// The second backward adds exactly what the first gave; after one that frees the graph comes Torch's error.
  void retained_graph() const {
    const torch::Tensor loss = loss_of(forward(part_.ours));
    loss.backward({}, /*retain_graph=*/true);
    Tensors once;
    for (const torch::Tensor& leaf : all_) once.push_back(leaf.grad().defined() ? leaf.grad() * 2 : torch::Tensor());
    loss.backward({}, /*retain_graph=*/false);
    expect_close(once, take_gradients(all_), rounding(part_.tolerance));
    try {
      loss.backward();
      ADD_FAILURE() << "a backward through a freed graph went through";
    } catch (const c10::Error& error) {
      EXPECT_NE(error.msg().find("backward through the graph a second time"), std::string::npos) << error.msg();
    }
    take_gradients(all_);
  }

  void unused_outputs() const {
    const size_t count = forward(part_.plain).size();
    for (size_t used = 1; used + 1 < size_t{1} << count; ++used) {
      SCOPED_TRACE(used);
      const auto step = [&](const Program& program) {
        const Tensors outputs = forward(program);
        Tensors some;
        for (size_t i = 0; i < count; ++i) {
          if ((used >> i & 1) != 0) some.push_back(outputs[i]);
        }
        const torch::Tensor loss = loss_of(some);
        if (loss.defined()) loss.backward();
        return take_gradients(all_);
      };
      expect_close(step(part_.plain), step(part_.ours), part_.tolerance);
    }
  }

  /// Each leaf has a hook that multiplies by ten; each input and output of the part, a hook and retain_grad.
  void hooks() const {
    struct Seen {
      Tensors gradients, retained;
      std::vector<int> fired;
    };
    const auto step = [&](const Program& program) {
      Seen seen;
      seen.fired.resize(all_.size());
      std::vector<unsigned> handles;
      for (size_t i = 0; i < all_.size(); ++i) {
        handles.push_back(all_[i].register_hook([&seen, i](const torch::Tensor& gradient) {
          ++seen.fired[i];
          return gradient * 10;
        }));
      }
      Tensors inputs;
      for (const torch::Tensor& input : part_.inputs) {
        inputs.push_back(input * 1);
        inputs.back().retain_grad();
        inputs.back().register_hook([](const torch::Tensor& gradient) { return gradient * 3; });
      }
      Tensors outputs = forward(program, inputs);
      for (torch::Tensor& output : outputs) {
        if (!output.requires_grad() || output.is_leaf()) continue;
        output.retain_grad();
        output.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
      }
      loss_of(outputs).backward();
      seen.gradients = take_gradients(all_);
      for (const torch::Tensor& t : inputs) seen.retained.push_back(t.grad());
      for (const torch::Tensor& t : outputs) seen.retained.push_back(t.grad());
      for (size_t i = 0; i < all_.size(); ++i) all_[i].remove_hook(handles[i]);
      return seen;
    };
    const Seen plain = step(part_.plain);
    const Seen ours = step(part_.ours);
    EXPECT_EQ(plain.fired, ours.fired);
    expect_close(plain.gradients, ours.gradients, part_.tolerance);
    expect_close(plain.retained, ours.retained, part_.tolerance);
  }

  void calls() const {
    *part_.calls = 0;
    forward(part_.plain);
    const int once = *part_.calls;
    if (once == 0) return;  // the part does not count
    *part_.calls = 0;
    const torch::Tensor loss = loss_of(forward(part_.ours));
    EXPECT_EQ(*part_.calls, once) << "in forward";
    loss.backward();
    EXPECT_EQ(*part_.calls, once * part_.evaluations) << "in forward and backward";
    take_gradients(all_);
  }

  void bytes() const {
    const auto step = [&](const Program& program, int64_t& held) {
      start();
      for (torch::Tensor leaf : all_) leaf.mutable_grad() = torch::zeros_like(leaf);
      const MemoryMeter meter;
      {
        const Tensors outputs = program(part_.inputs);
        held = meter.current_bytes();
        for (const torch::Tensor& output : outputs) {
          if (output.requires_grad()) output.sum().backward({}, /*retain_graph=*/&output != &outputs.back());
        }
      }
      EXPECT_EQ(meter.current_bytes(), 0) << "bytes are left";
      take_gradients(all_);
      return meter.peak_bytes();
    };
    int64_t held = 0, held_again = 0;
    const int64_t peak = step(part_.ours, held);
    EXPECT_EQ(peak, step(part_.ours, held_again)) << "the peak of a second step";
    EXPECT_EQ(held, held_again);
    if (part_.held_bytes.has_value()) {
      EXPECT_EQ(held, *part_.held_bytes);
    }

    // A graph that is dropped without a backward.
    const MemoryMeter meter;
    forward(part_.ours);
    EXPECT_EQ(meter.current_bytes(), 0) << "bytes are left by a graph that was dropped";
  }

  void surroundings_stay() const {
    start();
    const Tensors outputs = part_.ours(part_.inputs);
    const torch::Tensor loss = loss_of(outputs);
    const std::string before = surroundings();
    const Tensors buffers = copy_of_buffers();
    loss.backward();
    EXPECT_EQ(before, surroundings());
    expect_close(buffers, copy_of_buffers());
    take_gradients(all_);
  }

  void grad_mode_off() const {
    const torch::NoGradGuard no_grad;
    const Tensors expected = forward(part_.plain);
    const MemoryMeter meter;
    const Tensors found = forward(part_.ours);
    int64_t of_outputs = 0;
    for (const torch::Tensor& output : found) {
      EXPECT_FALSE(output.requires_grad());
      of_outputs += static_cast<int64_t>(output.storage().nbytes());
    }
    EXPECT_LE(meter.current_bytes(), of_outputs);
    expect_close(expected, found);
  }

  /// Where plain raises an error, we raise one or know the value of then; and the step after it is right.
  void modified_leaf() const {
    const Tensors expected = gradients(part_.plain, part_.inputs);
    for (size_t i = part_.inputs.size(); i < all_.size(); ++i) {
      SCOPED_TRACE("leaf " + std::to_string(i));
      const auto raises = [&](const Program& program) {
        const torch::Tensor before = all_[i].detach().clone();
        const torch::Tensor loss = loss_of(forward(program));
        const auto set = [&](const torch::Tensor& value) {
          const torch::NoGradGuard no_grad;
          torch::Tensor(all_[i]).copy_(value);
        };
        set(before * 1.5);
        bool raised = false;
        try {
          loss.backward();
          expect_close(expected, take_gradients(all_), rounding(part_.tolerance));
        } catch (const Error& error) {
          raised = true;
          EXPECT_EQ(error.kind(), ErrorKind::tensor_modified) << error.msg();
        } catch (const c10::Error&) {
          raised = true;
        }
        set(before);
        take_gradients(all_);
        return raised;
      };
      if (raises(part_.plain)) raises(part_.ours);
    }
    expect_close(expected, gradients(part_.ours, part_.inputs), rounding(part_.tolerance));
  }

  const Part& part_;
  /// Inputs, then other leaves.
  Tensors all_;
  Tensors initial_buffers_;
};

}  // namespace

void run_battery(const Part& part) {
  SCOPED_TRACE(part.name);
  Battery(part).run();
}

}  // namespace regrad::testing
