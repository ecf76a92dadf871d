#include "support/random_functions.h"

#include <algorithm>
#include <array>
#include <map>
#include <sstream>

namespace regrad::testing {

namespace {

using Sizes = std::vector<int64_t>;

/// How an operation uses its input x.
enum class Uses {
  never,
  once,
  several,      // several edges lead to x
  may_pass_on,  // the result may be x itself
  by_the_rest,  // all further operations are its body
};

/// What an operation uses that other functions, or other forwards, use too. Once, but for own_several_times: its own
/// parameter.
enum class Shared { nothing, tied, captured, side, own_several_times };

enum class Slope { smooth, kink };

struct Operation {
  const char* name;
  Uses uses;
  OwnSizes (*own)(const Sizes& x);
  const char* source;
  torch::Tensor (*run)(torch::Tensor x, const Own& own, const Tensors& side, const Surroundings& around);
  Shared shared = Shared::nothing;
  Slope slope = Slope::smooth;
};

/// An operation whose code is both run and printed, so that a printed program is what ran. The code changes `x` and may
/// read p and b (its own parameters and buffers), side and around.
#define REGRAD_CODE(...) \
#__VA_ARGS__, [](torch::Tensor x, [[maybe_unused]] const Own& own, [[maybe_unused]] const Tensors& side, \
                   [[maybe_unused]] const Surroundings& around) -> torch::Tensor {                   \
    [[maybe_unused]] const auto& [p, b] = own;                                                       \
    __VA_ARGS__                                                                                      \
    return x;                                                                                        \
  }

// Sizes of an operation's own tensors. L: the size of the last dimension, C: of dimension 1, the channels.
OwnSizes none(const Sizes&) { return {}; }
OwnSizes per_last(const Sizes& x) { return {.parameters = {{x.back()}, {x.back()}}}; }
OwnSizes per_channel(const Sizes& x) { return {.parameters = {{x[1]}, {x[1]}}}; }
OwnSizes matrix(const Sizes& x) { return {.parameters = {{x.back(), x.back()}, {x.back()}}}; }
OwnSizes attention_weights(const Sizes& x) { return {.parameters = {{3 * x.back(), x.back()}}}; }
OwnSizes statistics(const Sizes& x) { return {.parameters = {{x[1]}, {x[1]}}, .buffers = {{x[1]}, {x[1]}, {}}}; }
/// Of instance norm, where a matrix counts as one instance of N channels.
OwnSizes instance_statistics(const Sizes& x) {
  const int64_t channels = x.size() == 2 ? x[0] : x[1];
  return {.parameters = {{channels}, {channels}}, .buffers = {{channels}, {channels}}};
}
OwnSizes counter(const Sizes&) { return {.buffers = {{}}}; }
OwnSizes power_iteration(const Sizes& x) { return {.parameters = {{x.back(), x.back()}}, .buffers = {{x.back()}}}; }
OwnSizes kernel(const Sizes& x) {
  if (x.size() == 2) return {.parameters = {{1, 1, 3}, {1}}};
  if (x.size() == 3) return {.parameters = {{x[1], x[1], 3}, {x[1]}}};
  return {.parameters = {{x[1], x[1], 3, 3}, {x[1]}}};
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> list{
      // Elementwise.
      {"tanh", Uses::once, none, REGRAD_CODE(x = torch::tanh(x);)},
      {"scale", Uses::once, none, REGRAD_CODE(x = x * 0.5;)},
      {"gelu", Uses::once, none, REGRAD_CODE(x = torch::gelu(x);)},
      {"silu", Uses::once, none, REGRAD_CODE(x = torch::silu(x);)},
      {"softmax", Uses::once, none, REGRAD_CODE(x = torch::softmax(x, -1);)},
      {"gate", Uses::several, none, REGRAD_CODE(x = x * torch::sigmoid(x);)},
      {"relu", Uses::once, none, REGRAD_CODE(x = torch::relu(x);), Shared::nothing, Slope::kink},
      {"max_pool", Uses::once, none,
       REGRAD_CODE(x = torch::max_pool1d(x.reshape({1, 1, x.numel()}), 3, 1, 1).view(x.sizes());), Shared::nothing,
       Slope::kink},
      {"cumsum", Uses::once, none, REGRAD_CODE(x = torch::cumsum(x, -1) * 0.3;)},
      {"through_float", Uses::once, none, REGRAD_CODE(x = torch::sin(x.to(torch::kFloat)).to(x.dtype());)},
      {"custom_function", Uses::once, per_last, REGRAD_CODE(x = custom_sine(x, p[0]);)},
      // Without the input, or without its gradient.
      {"constant", Uses::never, none, REGRAD_CODE(x = torch::full(x.sizes(), 0.25, x.options());)},
      {"parameter_alone", Uses::never, per_last, REGRAD_CODE(x = p[0].expand(x.sizes());)},
      {"detach", Uses::never, none, REGRAD_CODE(x = torch::cos(x.detach());)},
      {"detached_factor", Uses::once, per_last, REGRAD_CODE(x = x * torch::sigmoid(x.detach() + p[0].detach());)},
      {"no_grad", Uses::once, none, REGRAD_CODE(torch::Tensor mean; {
         const torch::NoGradGuard no_grad;
         mean = x.mean();
       } x = x - mean;)},
      {"branch_on_requires_grad", Uses::once, per_last,
       REGRAD_CODE(x = x.requires_grad() ? torch::sin(x * p[0]) : torch::cos(x);)},
      // Weights.
      {"linear", Uses::once, matrix, REGRAD_CODE(x = torch::linear(x, p[0], p[1]);)},
      {"normalised_weight", Uses::once, matrix, REGRAD_CODE(x = torch::linear(x, p[0] / (1 + p[0].norm()), p[1]);),
       Shared::own_several_times},
      {"residual_linear", Uses::several, matrix, REGRAD_CODE(x = x + torch::tanh(torch::linear(x, p[0], p[1]));)},
      {"convolution", Uses::once, kernel,
       REGRAD_CODE(
           if (x.dim() == 4) { x = torch::conv2d(x, p[0], p[1], 1, 1); } else if (x.dim() == 3) {
             x = torch::conv1d(x, p[0], p[1], 1, 1);
           } else { x = torch::conv1d(x.unsqueeze(1), p[0], p[1], 1, 1).squeeze(1); })},
      {"attention", Uses::once, attention_weights,
       REGRAD_CODE(const auto qkv = torch::linear(x.dim() == 2 ? x.unsqueeze(0) : x, p[0]).chunk(3, -1);
                   x = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]).view_as(x);)},
      {"self_attention_with_dropout", Uses::several, none,
       REGRAD_CODE(const auto q = x.unsqueeze(0);
                   x = at::scaled_dot_product_attention(q, q, q, {}, around.train ? 0.2 : 0, true).squeeze(0);)},
      // Norms.
      {"layer_norm", Uses::once, per_last, REGRAD_CODE(x = torch::layer_norm(x, {x.size(-1)}, p[0], p[1]);)},
      {"group_norm", Uses::once, per_channel, REGRAD_CODE(x = torch::group_norm(x, 1, p[0], p[1]);)},
      {"batch_norm", Uses::once, statistics,
       REGRAD_CODE(if (around.train) b[2].add_(1);
                   x = torch::batch_norm(x, p[0], p[1], b[0], b[1], around.train, 0.1, 1e-5, false);)},
      {"instance_norm", Uses::once, instance_statistics,
       REGRAD_CODE(x = torch::instance_norm(x.dim() == 2 ? x.unsqueeze(0) : x, p[0], p[1], b[0], b[1], around.train,
                                            0.1, 1e-5, false)
                           .view_as(x);)},
      {"batch_norm_then_its_mean", Uses::once, statistics,
       REGRAD_CODE(x = torch::batch_norm(x, p[0], p[1], b[0], b[1], around.train, 0.1, 1e-5, false);
                   x = x + torch::tanh(x) * b[0].mean();)},
      // State that results depend on.
      {"counter", Uses::once, counter, REGRAD_CODE(b[0].add_(1); x = x * (b[0] * 0.2);)},
      {"power_iteration", Uses::once, power_iteration, REGRAD_CODE({
         const torch::NoGradGuard no_grad;
         b[0].copy_(torch::mv(p[0], b[0]) / (1 + b[0].norm()));
       } x = torch::linear(x, p[0] / (1 + torch::dot(b[0].clone(), torch::mv(p[0], b[0].clone())).pow(2)));),
       Shared::own_several_times},
      // Randomness.
      {"dropout", Uses::may_pass_on, none, REGRAD_CODE(x = torch::dropout(x, 0.3, around.train);)},
      {"feature_dropout", Uses::may_pass_on, none, REGRAD_CODE(x = torch::feature_dropout(x, 0.3, around.train);)},
      {"noise", Uses::once, none, REGRAD_CODE(x = x * torch::rand_like(x);)},
      {"odd_normals", Uses::once, none, REGRAD_CODE(x = x + torch::randn({3}, x.options()).mean() * 0.1;)},
      // In place on intermediates.
      {"in_place", Uses::once, none, REGRAD_CODE(x = x * 1.5; x.tanh_().mul_(0.5);)},
      {"in_place_on_view", Uses::once, none,
       REGRAD_CODE(x = x.clone(); x.slice(-1, 0, 2).mul_(0.5); x.transpose(0, -1).add_(1);)},
      {"in_place_with_parameter", Uses::once, per_last,
       REGRAD_CODE(const auto sum = torch::zeros_like(x); sum.add_(x).mul_(p[0]); x = sum;)},
      {"index_put", Uses::once, per_last,
       REGRAD_CODE(x = x + 1; x.slice(0, 0, 1).copy_(p[0].expand_as(x.slice(0, 0, 1)));)},
      // Views.
      {"identity_view", Uses::once, none, REGRAD_CODE(x = x.view_as(x);)},
      {"transposes", Uses::once, none, REGRAD_CODE(x = x.transpose(0, -1).contiguous().transpose(0, -1);)},
      {"transpose_twice", Uses::once, none, REGRAD_CODE(x = x.transpose(0, -1).transpose(0, -1);)},
      {"reshapes", Uses::once, none, REGRAD_CODE(x = torch::sin(x.reshape({x.numel()})).view(x.sizes());)},
      {"chunk_and_cat", Uses::once, none,
       REGRAD_CODE(auto parts = x.chunk(2, -1); std::reverse(parts.begin(), parts.end()); x = torch::cat(parts, -1);)},
      {"narrow_and_cat", Uses::several, none,
       REGRAD_CODE(const auto half = x.size(0) / 2;
                   x = torch::cat({x.narrow(0, half, x.size(0) - half), x.narrow(0, 0, half)}, 0);)},
      {"as_strided", Uses::once, none,
       REGRAD_CODE(const auto y = torch::tanh(x).contiguous();
                   x = y.as_strided(y.sizes(), y.strides(), y.storage_offset());)},
      {"flip", Uses::once, none, REGRAD_CODE(x = x.flip({-1});)},
      {"roll", Uses::once, none, REGRAD_CODE(x = x.roll(1, 0);)},
      // Tensors that functions share.
      {"tied_weight", Uses::once, none, REGRAD_CODE(x = torch::linear(x, around.tied) * 0.3;), Shared::tied},
      {"captured_tensor", Uses::once, none, REGRAD_CODE(x = torch::tanh(x * around.captured);), Shared::captured},
      {"captured_tensor_alone", Uses::never, none, REGRAD_CODE(x = around.captured.expand(x.sizes());),
       Shared::captured},
      {"side_input", Uses::once, none, REGRAD_CODE(x = torch::sin(x * side[0]);), Shared::side},
      {"side_input_alone", Uses::never, none, REGRAD_CODE(x = side[0].expand(x.sizes());), Shared::side},
      // A region inside f or g. It is applied here by make_function and source_of.
      {"nested_region", Uses::by_the_rest, none, "", nullptr},
  };
  return list;
}

const Operation& operation(size_t number) { return operations().at(number); }

/// Runs operations from number `first` on.
torch::Tensor run_from(size_t first, const Operations& list, torch::Tensor x, const Tensors& side,
                       const std::vector<Own>& own, const Surroundings& around) {
  for (size_t i = first; i < list.size(); ++i) {
    if (operation(list[i]).uses == Uses::by_the_rest) {
      const auto rest = [=, &own, &around](const torch::Tensor& inner) {
        return run_from(i + 1, list, inner, side, own, around);
      };
      return region(around, rest, x);
    }
    x = operation(list[i]).run(x, own[i], side, around);
  }
  return x;
}

}  // namespace

size_t operation_count() { return operations().size(); }

std::string operation_name(size_t number) { return operation(number).name; }

RandomFunction make_function(const Operations& list, const std::vector<int64_t>& sizes) {
  RandomFunction function;
  for (const size_t number : list) function.own.push_back(operation(number).own(sizes));
  function.body = [list](torch::Tensor x, const Tensors& side, const std::vector<Own>& own,
                         const Surroundings& around) { return run_from(0, list, x, side, own, around); };
  return function;
}

bool one_term_each(const Operations& list) {
  std::map<Shared, int> uses_of_shared;
  for (const size_t number : list) {
    const Shared shared = operation(number).shared;
    if (shared != Shared::nothing && shared != Shared::own_several_times && ++uses_of_shared[shared] > 1) return false;
  }
  for (const size_t number : list) {  // up to the first that gives a tensor other than the input
    const Uses uses = operation(number).uses;
    if (uses == Uses::several) return false;
    if (uses == Uses::never || uses == Uses::once) return true;
  }
  return true;
}

bool reuses_own_parameter(const Operations& list) {
  return std::any_of(list.begin(), list.end(),
                     [](size_t number) { return operation(number).shared == Shared::own_several_times; });
}

bool has_kink(const Operations& list) {
  return std::any_of(list.begin(), list.end(), [](size_t number) { return operation(number).slope == Slope::kink; });
}

namespace {

template <class Enum>
std::string pick(Enum value, std::initializer_list<const char*> names) {
  return names.begin()[static_cast<size_t>(value)];
}

std::string text(bool value) { return value ? "true" : "false"; }

std::string text(const Sizes& sizes) {
  std::string result = "{";
  for (const int64_t size : sizes) result += (result.size() > 1 ? ", " : "") + std::to_string(size);
  return result + "}";
}

std::string text(const std::vector<Sizes>& list) {
  std::string result = "{";
  for (const Sizes& sizes : list) result += (result.size() > 1 ? ", " : "") + text(sizes);
  return result + "}";
}

void write_function(std::ostream& out, const char* name, const Operations& list) {
  out << "torch::Tensor " << name << "(torch::Tensor x, [[maybe_unused]] const Tensors& side,\n"
      << "                [[maybe_unused]] const std::vector<Own>& own, [[maybe_unused]] const Surroundings& around) "
         "{\n";
  size_t regions = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const Operation& op = operation(list[i]);
    if (op.uses == Uses::by_the_rest) {
      out << "  return region(around, [=, &own, &around]([[maybe_unused]] torch::Tensor x) {\n";
      ++regions;
      continue;
    }
    out << "  {  // " << op.name << "\n"
        << "    [[maybe_unused]] const auto& [p, b] = own[" << i << "];\n"
        << "    " << op.source << "\n  }\n";
  }
  out << "  return x;\n";
  for (; regions > 0; --regions) out << "  }, x);\n";
  out << "}\n\n";
}

void write_own(std::ostream& out, const RandomFunction& function) {
  out << "{";
  for (size_t i = 0; i < function.own.size(); ++i) {
    const OwnSizes& own = function.own[i];
    out << (i > 0 ? ", " : "") << "{";
    if (!own.parameters.empty()) out << ".parameters = " << text(own.parameters);
    if (!own.parameters.empty() && !own.buffers.empty()) out << ", ";
    if (!own.buffers.empty()) out << ".buffers = " << text(own.buffers);
    out << "}";
  }
  out << "}";
}

std::string dtype_name(torch::ScalarType dtype) {
  switch (dtype) {
    case torch::kDouble:
      return "torch::kDouble";
    case torch::kFloat:
      return "torch::kFloat";
    case torch::kHalf:
      return "torch::kHalf";
    default:
      return "torch::kBFloat16";
  }
}

void write_settings(std::ostream& out, const Settings& s) {
  out << "  const Settings settings{\n"
      << "      .sizes = " << text(s.sizes) << ",\n"
      << "      .dtype = " << dtype_name(s.dtype) << ",\n"
      << "      .depth = " << s.depth << ",\n"
      << "      .way = Way::"
      << pick(s.way, {"store", "recompute", "reverse", "recompute_functions", "recompute_stack", "recompute_block"})
      << ",\n"
      << "      .segment = " << s.segment << ",\n"
      << "      .layout = Layout::" << pick(s.layout, {"contiguous", "channels_last", "transposed", "sliced"}) << ",\n"
      << "      .source = Source::" << pick(s.source, {"two_leaves", "same_tensor", "halves"}) << ",\n"
      << "      .loss = LossOf::" << pick(s.loss, {"both", "y1", "y2"}) << ",\n"
      << "      .steps = Steps::" << pick(s.steps, {"one", "two", "overlapping"}) << ",\n"
      << "      .train = " << text(s.train) << ",\n"
      << "      .registered = " << text(s.registered) << ",\n"
      << "      .x1_requires_grad = " << text(s.x1_requires_grad) << ",\n"
      << "      .x2_requires_grad = " << text(s.x2_requires_grad) << ",\n"
      << "      .side_requires_grad = " << text(s.side_requires_grad) << ",\n"
      << "      .shared_require_grad = " << text(s.shared_require_grad) << ",\n"
      << "      .parameters_require_grad = " << text(s.parameters_require_grad) << ",\n"
      << "      .seed = " << s.seed << ",\n"
      << "      .same_order = " << text(s.same_order) << ",\n"
      << "  };\n";
}

}  // namespace

std::string source_of(const Settings& settings, const Operations& f, const Operations& g) {
  std::ostringstream out;
  out << "// Save as tests/reproduce_test.cpp, build the target reproduce_test and run build/bin/reproduce_test.\n"
      << "#include <algorithm>\n#include <iostream>\n\n#include \"support/random_program.h\"\n\n"
      << "using namespace regrad::testing;\n\n";
  write_function(out, "f", f);
  write_function(out, "g", g);
  out << "int main() {\n";
  write_settings(out, settings);
  for (const auto& [name, list] : {std::pair("f", f), std::pair("g", g)}) {
    out << "  const std::vector<OwnSizes> own_" << name;
    write_own(out, make_function(list, settings.sizes));
    out << ";\n";
  }
  out << "  const std::string differences = compare_with_plain(settings, {f, own_f}, {g, own_g});\n"
      << "  std::cout << (differences.empty() ? \"as plain\" : \"unlike plain:\" + differences) << std::endl;\n"
      << "  return differences.empty() ? 0 : 1;\n"
      << "}\n";
  return out.str();
}

}  // namespace regrad::testing
