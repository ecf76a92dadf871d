#include <mutex>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "core/edges.h"
#include "core/environment.h"
#include "core/input_guard.h"
#include "core/kept_tensor.h"
#include "core/replay.h"
#include "core/supported.h"
#include "regrad/error.h"
#include "regrad/with_custom_grad.h"

namespace regrad::detail {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

/// Graph node whose gradient is a user's function. Inputs: the differentiable outputs. Next edges: inputs, variables.
class CustomGradientNode : public torch::autograd::Node {
 public:
  CustomGradientNode(CustomGradient gradient, const Tensors& inputs, const Tensors& variables, edge_list edges)
      : Node(std::move(edges)), gradient_(std::move(gradient)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
    for (const at::Tensor& variable : variables) variables_.emplace_back(variable, /*is_output=*/false);
  }

  /// To be called once the outputs have this node as their gradient function. input_of_output: the number of this
  /// node's input for each output, or -1.
  void save_outputs(const Tensors& outputs, std::vector<int64_t> input_of_output) {
    for (size_t o = 0; o < outputs.size(); ++o)
      outputs_.emplace_back(outputs[o], /*is_output=*/input_of_output[o] >= 0);
    input_of_output_ = std::move(input_of_output);
  }

  std::string name() const override { return "regrad::CustomGradient"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    for (auto* list : {&inputs_, &variables_, &outputs_}) {
      for (SavedVariable& saved : *list) saved.reset_data();
    }
    gradient_ = nullptr;
  }

 protected:
  variable_list apply(variable_list&& gradients) override {
    Tensors inputs;
    Tensors outputs;
    Tensors variables;
    CustomGradient gradient;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
      for (const SavedVariable& saved : inputs_) inputs.push_back(saved.unpack());
      for (const SavedVariable& saved : outputs_) outputs.push_back(saved.unpack(getptr()));
      for (const SavedVariable& saved : variables_) variables.push_back(saved.unpack());
      gradient = gradient_;
    }
    Tensors grad_outputs(outputs.size());
    for (size_t o = 0; o < outputs.size(); ++o) {
      if (input_of_output_[o] >= 0) grad_outputs[o] = gradients[static_cast<size_t>(input_of_output_[o])];
    }
    CustomGradients result = gradient(inputs, variables, outputs, grad_outputs);
    check_count("inputs", result.inputs.size(), inputs.size());
    check_count("variables", result.variables.size(), variables.size());
    variable_list all = std::move(result.inputs);
    all.insert(all.end(), result.variables.begin(), result.variables.end());
    return all;
  }

 private:
  static void check_count(const char* what, size_t found, size_t needed) {
    if (found == needed) return;
    throw_error(ErrorKind::invalid_argument, "the gradient function of with_custom_grad returned " +
                                                 std::to_string(found) + " gradients of " + what + ", but there are " +
                                                 std::to_string(needed) +
                                                 ". Return one for each, undefined where it is zero.");
  }

  CustomGradient gradient_;
  std::vector<SavedVariable> inputs_;
  std::vector<SavedVariable> variables_;
  std::vector<SavedVariable> outputs_;
  std::vector<int64_t> input_of_output_;
  bool released_ = false;
};

}  // namespace

Tensors apply_custom_gradient(Function function, const Tensors& inputs, const CustomGradient& gradient) {
  if (!c10::GradMode::is_enabled()) return run_plainly(function, inputs);
  check_supported(inputs, function.name);
  const std::string name = function.name;

  Tensors arguments;
  for (const at::Tensor& input : inputs) arguments.push_back(copy_on_write_alias(input));
  FirstRun run = Replay::first_run(std::make_shared<Function>(std::move(function)), inputs, std::move(arguments),
                                   Environment::capture(), OutputCheck::none);
  if (run.differentiable.empty()) return std::move(run.outputs);

  edge_list edges;
  for (size_t i = 0; i < inputs.size(); ++i) edges.push_back(gradient_edge(inputs[i]));
  Tensors variables;
  for (const Edge& exit : run.exits) {
    const AccumulateGrad* accumulator = as_accumulator(exit.function.get());
    if (accumulator == nullptr) {
      throw_error(ErrorKind::unsupported, name + " captures a tensor that requires grad and is not a leaf, made by " +
                                              exit.function->name() +
                                              ": its gradient function could not name it. Pass it as an input.");
    }
    edges.push_back(exit);
    variables.push_back(accumulator->variable);
  }

  const auto node = make_node<CustomGradientNode>(gradient, inputs, variables, std::move(edges));
  std::vector<int64_t> input_of_output(run.outputs.size(), -1);
  for (const size_t o : run.differentiable) {
    input_of_output[o] = node->num_inputs();
    run.outputs[o] = without_history(run.outputs[o]);
    attach(run.outputs[o], node);
  }
  node->save_outputs(run.outputs, std::move(input_of_output));
  return std::move(run.outputs);
}

}  // namespace regrad::detail
