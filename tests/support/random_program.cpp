#include "support/random_program.h"

#include <cmath>
#include <sstream>
#include <tuple>

namespace regrad::testing {

namespace {

struct CustomSine : torch::autograd::Function<CustomSine> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor w) {
    context->save_for_backward({x, w});
    return torch::sin(x * w);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto saved = context->get_saved_variables();
    const auto inner = gradients[0] * torch::cos(saved[0] * saved[1]);
    return {inner * saved[1], (inner * saved[0]).sum_to_size(saved[1].sizes())};
  }
};

/// f or g of one layer, as a module.
struct FunctionModuleImpl : torch::nn::Module {
  Body body;
  std::vector<Own> own;
  const Surroundings* around;

  torch::Tensor forward(const torch::Tensor& x, const Tensors& side) { return body(x, side, own, *around); }
};
TORCH_MODULE(FunctionModule);

using LayerFunction = std::function<torch::Tensor(const torch::Tensor&, const Tensors&)>;

LayerFunction call(FunctionModule module) {
  return [module](const torch::Tensor& x, const Tensors& side) mutable { return module->forward(x, side); };
}

/// Everything that a program starts from, made anew from the seed for each run.
class World {
 public:
  World(const Settings& settings, const RandomFunction& f, const RandomFunction& g)
      : settings_(settings), generator_(at::detail::createCPUGenerator(settings.seed)) {
    const int64_t last = settings.sizes.back();
    make_stream_leaves();
    side_ = new_leaf({last}, settings.side_requires_grad);
    around_.tied = new_leaf({last, last}, settings.shared_require_grad);
    around_.captured = new_leaf({last}, settings.shared_require_grad).neg();  // saves nothing: serves several backwards
    around_.train = settings.train;
    for (int64_t layer = 0; layer < settings.depth; ++layer) {
      f_.push_back(new_function(f));
      g_.push_back(new_function(g));
    }
  }

  /// The streams, as the program makes them from the leaves in each step.
  Tensors streams() const {
    if (settings_.source == Source::same_tensor) return {laid_out(stream_leaves_[0]), laid_out(stream_leaves_[0])};
    if (settings_.source == Source::halves) {
      const auto halves = stream_leaves_[0].chunk(2, 0);
      return {halves[0], halves[1]};
    }
    return {laid_out(stream_leaves_[0]), laid_out(stream_leaves_[1])};
  }

  const Tensors& leaves() const { return leaves_; }
  const Tensors& buffers() const { return buffers_; }
  Tensors side() const { return {side_}; }
  const std::vector<FunctionModule>& f() const { return f_; }
  const std::vector<FunctionModule>& g() const { return g_; }
  void use_regrad() { around_.with_regrad = true; }

 private:
  torch::Tensor random(torch::IntArrayRef sizes) {
    return torch::randn(sizes, generator_, torch::dtype(torch::kDouble)).to(settings_.dtype);
  }

  torch::Tensor new_leaf(torch::IntArrayRef sizes, bool requires_grad, double scale = 1) {
    return own_leaf(random(sizes) * scale, requires_grad);
  }

  torch::Tensor own_leaf(torch::Tensor leaf, bool requires_grad) {
    leaf.set_requires_grad(requires_grad);
    leaves_.push_back(leaf);
    return leaf;
  }

  void make_stream_leaves() {
    if (settings_.source == Source::halves) {
      auto sizes = settings_.sizes;
      sizes[0] *= 2;
      stream_leaves_ = {new_leaf(sizes, settings_.x1_requires_grad)};
      return;
    }
    for (const bool requires_grad : {settings_.x1_requires_grad, settings_.x2_requires_grad}) {
      stream_leaves_.push_back(new_leaf(leaf_sizes(), requires_grad));
    }
  }

  /// What laid_out turns into a stream's sizes.
  std::vector<int64_t> leaf_sizes() const {
    auto sizes = settings_.sizes;
    if (settings_.layout == Layout::transposed) std::swap(sizes.front(), sizes.back());
    if (settings_.layout == Layout::sliced) sizes.back() += 2;
    return sizes;
  }

  torch::Tensor laid_out(const torch::Tensor& leaf) const {
    switch (settings_.layout) {
      case Layout::contiguous:
        return leaf;
      case Layout::channels_last:
        return leaf.dim() == 4 ? leaf.contiguous(at::MemoryFormat::ChannelsLast) : leaf;
      case Layout::transposed:
        return leaf.transpose(0, -1);
      case Layout::sliced:
        return leaf.narrow(-1, 1, leaf.size(-1) - 2);
    }
    return leaf;
  }

  /// Weights of about half of what keeps a stream's size: the inverse then amplifies rounding little.
  double weight_scale(const std::vector<int64_t>& sizes) const {
    int64_t fan_in = 1;
    for (size_t i = 1; i < sizes.size(); ++i) fan_in *= sizes[i];
    return 0.5 / std::sqrt(static_cast<double>(std::max<int64_t>(fan_in, 1)));
  }

  FunctionModule new_function(const RandomFunction& function) {
    FunctionModule module;
    module->body = function.body;
    module->around = &around_;
    for (size_t i = 0; i < function.own.size(); ++i) {
      Own own;
      for (const auto& sizes : function.own[i].parameters) {
        own.parameters.push_back(new_leaf(sizes, settings_.parameters_require_grad, weight_scale(sizes)));
        module->register_parameter(name("p", i, own.parameters.size()), own.parameters.back(),
                                   settings_.parameters_require_grad);
      }
      for (const auto& sizes : function.own[i].buffers) {
        own.buffers.push_back(torch::ones(sizes, settings_.dtype));
        module->register_buffer(name("b", i, own.buffers.size()), own.buffers.back());
        buffers_.push_back(own.buffers.back());
      }
      module->own.push_back(own);
    }
    return module;
  }

  static std::string name(const char* kind, size_t operation, size_t number) {
    return kind + std::to_string(operation) + "_" + std::to_string(number);
  }

  Settings settings_;
  at::Generator generator_;
  Surroundings around_;
  torch::Tensor side_;
  Tensors stream_leaves_;
  Tensors leaves_;
  Tensors buffers_;
  std::vector<FunctionModule> f_;
  std::vector<FunctionModule> g_;
};

using Stack = std::function<Tensors(const Tensors& streams, const Tensors& side)>;

Tensors plain_stack(std::vector<LayerFunction> f, std::vector<LayerFunction> g, const Tensors& streams,
                    const Tensors& side) {
  auto x1 = streams[0];
  auto x2 = streams[1];
  for (size_t i = 0; i < f.size(); ++i) {
    x1 = x1 + f[i](x2, side);
    x2 = x2 + g[i](x1, side);
  }
  return {x1, x2};
}

std::vector<LayerFunction> calls(const std::vector<FunctionModule>& modules) {
  std::vector<LayerFunction> result;
  for (const FunctionModule& module : modules) result.push_back(call(module));
  return result;
}

Stack make_plain(const World& world) {
  return [f = calls(world.f()), g = calls(world.g())](const Tensors& streams, const Tensors& side) {
    return plain_stack(f, g, streams, side);
  };
}

std::vector<LayerFunction> recomputed(const std::vector<FunctionModule>& modules, bool registered) {
  std::vector<LayerFunction> result;
  for (const FunctionModule& module : modules) {
    if (registered) {
      result.push_back(recompute_grad(module));
    } else {
      result.push_back(recompute_grad(call(module)));
    }
  }
  return result;
}

std::vector<Residual> residuals(const std::vector<FunctionModule>& modules, bool registered) {
  std::vector<Residual> result;
  for (const FunctionModule& module : modules) {
    result.push_back(registered ? Residual(module) : Residual(call(module)));
  }
  return result;
}

Memory memory_of(const Settings& settings) {
  switch (settings.way) {
    case Way::store:
      return Memory::store();
    case Way::recompute:
      return Memory::recompute(settings.segment);
    default:
      return Memory::reverse();
  }
}

Stack make_block(const Settings& settings, const World& world) {
  RevBlock block(RevBlockOptions(settings.depth)
                     .f(residuals(world.f(), settings.registered))
                     .g(residuals(world.g(), settings.registered))
                     .memory(memory_of(settings)));
  return [block](const Tensors& streams, const Tensors& side) mutable {
    const auto [y1, y2] = block->forward(streams[0], streams[1], {.f = side, .g = side});
    return Tensors{y1, y2};
  };
}

Stack make_ours(const Settings& settings, const World& world) {
  switch (settings.way) {
    case Way::store:
    case Way::recompute:
    case Way::reverse:
      return make_block(settings, world);
    case Way::recompute_functions:
      return [f = recomputed(world.f(), settings.registered), g = recomputed(world.g(), settings.registered)](
                 const Tensors& streams, const Tensors& side) { return plain_stack(f, g, streams, side); };
    case Way::recompute_stack:
      return recompute_grad(make_plain(world));
    case Way::recompute_block:
      return recompute_grad(make_block(settings, world));
  }
  return {};
}

double epsilon(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kDouble:
      return std::ldexp(1, -52);
    case torch::kFloat:
      return std::ldexp(1, -23);
    case torch::kHalf:
      return std::ldexp(1, -10);
    default:
      return std::ldexp(1, -7);  // bfloat16
  }
}

/// Whether both lie alike in memory. The stride of a dimension of size 1 means nothing.
bool same_layout(const torch::Tensor& a, const torch::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.numel() > 0 && a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

double largest(const torch::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.detach().to(torch::kDouble).abs().max().item<double>() : 0;
}

double difference(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() ? largest(a.detach().to(torch::kDouble) - b.detach().to(torch::kDouble)) : 0;
}

torch::Tensor random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

void set_random_state(const torch::Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(state);
}

/// A tensor with the value of `value`, whose gradient goes to `x`.
struct Substitute : torch::autograd::Function<Substitute> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor, const torch::Tensor& value) {
    return value.detach();
  }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors gradients) { return {gradients[0], {}}; }
};

/// What regrad does to rounding, by hand: gradients of one half-step are added up before they join others, and the
/// streams are rebuilt from the last ones where the strategy does so. The measure of how far regrad may be from plain.
class StackByHand {
 public:
  StackByHand(const World& world, bool rebuild) : rebuild_(rebuild) {
    for (size_t i = 0; i < world.f().size(); ++i) {
      functions_.push_back(world.f()[i]);
      functions_.push_back(world.g()[i]);
    }
  }

  /// The largest relative error of a rebuilt stream.
  double lost() const { return lost_; }

  Tensors operator()(const Tensors& streams, const Tensors& side) {
    std::vector<State> states;
    Tensors read;  // by each half-step
    Tensors x = streams;
    for (size_t step = 0; step < functions_.size(); ++step) {
      states.push_back(state(step));
      read.push_back(x[1 - step % 2]);
      x[step % 2] = x[step % 2] + call(step, read[step], side);
    }
    std::vector<State> states_after;
    for (size_t step = 0; step < functions_.size(); ++step) states_after.push_back(state(step));

    if (rebuild_) rebuild({x[0].detach(), x[1].detach()}, side, states, read);

    x = streams;
    for (size_t step = 0; step < functions_.size(); ++step) {
      restore(step, states[step]);
      x[step % 2] = x[step % 2] + call(step, Substitute::apply(x[1 - step % 2], read[step]), side);
    }
    for (size_t step = 0; step < functions_.size(); ++step) restore(step, states_after[step]);
    return x;
  }

 private:
  /// What a function depends on beside its arguments.
  struct State {
    torch::Tensor random;
    Tensors buffers;
  };

  State state(size_t step) const {
    State state{random_state(), {}};
    for (const Own& own : functions_[step]->own) {
      for (const auto& buffer : own.buffers) state.buffers.push_back(buffer.clone());
    }
    return state;
  }

  void restore(size_t step, const State& state) const {
    set_random_state(state.random);
    size_t next = 0;
    for (const Own& own : functions_[step]->own) {
      // By variable_data, as a graph may have saved the buffer: its version stays.
      for (const auto& buffer : own.buffers) buffer.variable_data().copy_(state.buffers[next++]);
    }
  }

  /// Runs a function on tensors of its own, so that it adds up its gradients for them alone.
  torch::Tensor call(size_t step, const torch::Tensor& x, const Tensors& side) const {
    const FunctionModule& function = functions_[step];
    Surroundings around = *function->around;
    around.tied = own_edge(around.tied);
    around.captured = own_edge(around.captured);
    std::vector<Own> own = function->own;
    for (Own& of_operation : own) {
      for (auto& parameter : of_operation.parameters) parameter = own_edge(parameter);
    }
    return function->body(x, {own_edge(side[0])}, own, around);
  }

  static torch::Tensor own_edge(const torch::Tensor& t) { return Substitute::apply(t, t); }

  /// The inverse, from the last streams y. Overwrites `read`.
  void rebuild(Tensors y, const Tensors& side, const std::vector<State>& states, Tensors& read) {
    for (size_t step = functions_.size(); step-- > 0;) {
      const bool requires_grad = read[step].requires_grad();
      lost_ = std::max(lost_, difference(read[step], y[1 - step % 2]) / (largest(read[step]) + 1e-30));
      read[step] = y[1 - step % 2].detach().set_requires_grad(requires_grad);
      restore(step, states[step]);
      y[step % 2] = y[step % 2] - call(step, read[step], side).detach();
    }
  }

  bool rebuild_;
  double lost_ = 0;
  std::vector<FunctionModule> functions_;
};

/// What a run of the program left behind.
struct Left {
  std::string error;                    // "" where nothing was thrown
  std::optional<ErrorKind> error_kind;  // of regrad's own errors
  Tensors outputs;
  Tensors gradients;  // of the leaves; undefined where none arrived
  Tensors buffers;
  Tensors random_states;  // of the default generator, after each forward and at the end
};

/// The sum of the chosen outputs times fixed random weights; undefined where nothing requires grad.
torch::Tensor loss_of(const Tensors& outputs, const Settings& settings) {
  auto generator = at::detail::createCPUGenerator(settings.seed + 1);
  torch::Tensor loss;
  for (size_t i = 0; i < 2; ++i) {
    const auto weights = torch::randn(outputs[i].sizes(), generator, torch::dtype(torch::kDouble)).to(settings.dtype);
    const bool chosen = settings.loss == LossOf::both || (settings.loss == LossOf::y1) == (i == 0);
    if (!chosen || !outputs[i].requires_grad()) continue;
    const auto term = (outputs[i] * weights).to(torch::kDouble).sum();
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

void take_steps(const Settings& settings, const World& world, const Stack& stack, Left& left) {
  torch::Tensor both;
  for (int step = 0; step < (settings.steps == Steps::one ? 1 : 2); ++step) {
    const Tensors outputs = stack(world.streams(), world.side());
    left.outputs.insert(left.outputs.end(), outputs.begin(), outputs.end());
    left.random_states.push_back(random_state());
    const auto loss = loss_of(outputs, settings);
    if (!loss.defined()) continue;
    if (settings.steps == Steps::overlapping) {
      both = both.defined() ? both + loss : loss;
    } else {
      loss.backward();
    }
  }
  if (both.defined()) both.backward();
}

Left run(const Settings& settings, const World& world, const Stack& stack) {
  Left left;
  torch::manual_seed(settings.seed);
  try {
    take_steps(settings, world, stack, left);
  } catch (const Error& error) {
    left.error = error.msg();
    left.error_kind = error.kind();
  } catch (const c10::Error& error) {
    left.error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    left.error = error.what();
  }
  left.random_states.push_back(random_state());
  for (const auto& buffer : world.buffers()) left.buffers.push_back(buffer.clone());
  left.gradients = take_gradients(world.leaves());
  return left;
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.reshape({a.numel()})
      .contiguous()
      .view(torch::kByte)
      .equal(b.reshape({b.numel()}).contiguous().view(torch::kByte));
}

/// Collects what differs between plain and regrad.
class Report {
 public:
  void expect_same(const std::string& what, const Tensors& plain, const Tensors& ours) {
    if (plain.size() != ours.size()) {
      add(what + "s") << ": " << ours.size() << ", but plain has " << plain.size();
      return;
    }
    for (size_t i = 0; i < plain.size(); ++i) {
      const std::string name = what + " " + std::to_string(i);
      if (expect_same_kind(name, plain[i], ours[i]) && plain[i].defined() && !same_bits(plain[i], ours[i])) {
        add(name) << ": not the same bits, largest difference " << difference(plain[i], ours[i]);
      }
    }
  }

  /// tolerances: one per tensor.
  void expect_close(const std::string& what, const Tensors& plain, const Tensors& ours,
                    const std::vector<double>& tolerances) {
    for (size_t i = 0; i < plain.size(); ++i) {
      const std::string name = what + " " + std::to_string(i);
      if (!expect_same_kind(name, plain[i], ours[i]) || !plain[i].defined()) continue;
      const double found = difference(plain[i], ours[i]);
      if (!(found <= tolerances[i])) {
        add(name) << ": off by " << found << ", but at most " << tolerances[i]
                  << " is rounding; plain's largest value is " << largest(plain[i]);
      }
    }
  }

  std::ostream& add(const std::string& what) { return text_ << "\n  " << what; }
  std::string text() const { return text_.str(); }

 private:
  bool expect_same_kind(const std::string& name, const torch::Tensor& plain, const torch::Tensor& ours) {
    if (plain.defined() != ours.defined()) {
      add(name) << (plain.defined() ? " is undefined" : " is defined, unlike plain's");
      return false;
    }
    if (!plain.defined()) return true;
    if (plain.requires_grad() != ours.requires_grad()) add(name) << ": requires_grad is " << ours.requires_grad();
    if (plain.dtype() != ours.dtype() || plain.sizes() != ours.sizes()) {
      add(name) << ": another dtype or shape than plain's";
      return false;
    }
    if (!same_layout(plain, ours)) add(name) << ": strides " << ours.strides() << ", not " << plain.strides();
    return true;
  }

  std::ostringstream text_;
};

bool all_finite(const Tensors& tensors) {
  for (const auto& t : tensors) {
    if (t.defined() && !std::isfinite(largest(t))) return false;
  }
  return true;
}

/// How far the gradient of each leaf may be from plain's: twice as far as that of a stack by hand, or the rounding of
/// a sum of several terms.
std::vector<double> tolerances(const Settings& settings, const Tensors& plain, const Tensors& by_hand) {
  double largest_of_all = 0;
  for (const auto& gradient : plain) largest_of_all = std::max(largest_of_all, largest(gradient));
  std::vector<double> result;
  for (size_t i = 0; i < plain.size(); ++i) {
    result.push_back(2 * difference(plain[i], by_hand[i]) + 16 * epsilon(settings.dtype) * largest_of_all);
  }
  return result;
}

/// The relative error of a rebuilt stream from which on reverse may refuse to go on (ErrorKind::replay_differs).
constexpr double kLostPrecision = 0.05;

bool is_rebuilt(Way way) { return way == Way::reverse || way == Way::recompute_block; }

}  // namespace

torch::Tensor custom_sine(const torch::Tensor& x, const torch::Tensor& w) { return CustomSine::apply(x, w); }

std::string compare_with_plain(const Settings& settings, const RandomFunction& f, const RandomFunction& g) {
  const World plain_world(settings, f, g);
  const Left plain = run(settings, plain_world, make_plain(plain_world));
  World our_world(settings, f, g);
  our_world.use_regrad();
  const Left ours = run(settings, our_world, make_ours(settings, our_world));
  const World world_by_hand(settings, f, g);
  StackByHand stack_by_hand(world_by_hand, is_rebuilt(settings.way));
  const Left by_hand = run(settings, world_by_hand, std::ref(stack_by_hand));

  const bool refused = ours.error_kind == ErrorKind::replay_differs && stack_by_hand.lost() > kLostPrecision;
  if (refused) return "";
  Report report;
  report.expect_same("output", plain.outputs, ours.outputs);
  report.expect_same("buffer", plain.buffers, ours.buffers);
  report.expect_same("random state", plain.random_states, ours.random_states);
  if (plain.error != ours.error) {
    report.add("error") << ": \"" << ours.error << "\", but plain's is \"" << plain.error << "\"";
  }
  if (plain.error != by_hand.error) report.add("error by hand") << ": " << by_hand.error;
  if (!plain.error.empty() || !ours.error.empty() || !by_hand.error.empty()) return report.text();
  if (!is_rebuilt(settings.way) && settings.same_order) {
    report.expect_same("gradient", plain.gradients, ours.gradients);
  } else if (all_finite(plain.gradients) && all_finite(by_hand.gradients)) {
    report.expect_close("gradient", plain.gradients, ours.gradients,
                        tolerances(settings, plain.gradients, by_hand.gradients));
  }
  return report.text();
}

}  // namespace regrad::testing
