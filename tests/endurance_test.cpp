// Contract clause 8: nothing is held once a graph is gone, in whichever way it goes, and nothing grows over many steps.

#include <malloc.h>
#include <unistd.h>

#include <fstream>
#include <stdexcept>
#include <thread>

#include <ATen/ThreadLocalState.h>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/engine_queue.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;
using torch::autograd::grad;

namespace {

using Residue = std::function<torch::Tensor(torch::Tensor)>;

struct Failure : std::runtime_error {
  Failure() : std::runtime_error("the function fails") {}
};

/// Lets a function fail at one of its calls.
class Fuse {
 public:
  /// At the `call`-th from now, counted from 1; 0 for never.
  void set(int call) { remaining_ = call; }
  void pass() {
    if (remaining_ > 0 && --remaining_ == 0) throw Failure();
  }

 private:
  int remaining_ = 0;
};

/// A graph's outputs, and the module that made them, if any.
struct Graph {
  std::shared_ptr<void> model;
  Tensors outputs;
};

/// Something of regrad that runs `f` on x.
struct Program {
  std::string name;
  std::function<Graph(const torch::Tensor& x, const Residue& f)> run;
};

class SilentWarnings {
 public:
  SilentWarnings() = default;

 private:
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Silent silent_;
  c10::WarningUtils::WarningHandlerGuard guard_{&silent_};
};

Program block_program(const Memory& memory) {
  return {"block under " + memory.to_string(), [memory](const torch::Tensor& x, const Residue& f) {
            const auto with_side = [f](torch::Tensor t, at::TensorList side) { return f(t) * side[0]; };
            regrad::RevBlock block(regrad::RevBlockOptions(3).f(with_side).g(f).memory(memory));
            const SilentWarnings silent;  // of p, which no module owns
            const auto [y1, y2] = block->forward(x, x * 2, {.f = {x.cos()}});
            return Graph{block.ptr(), {y1, y2}};
          }};
}

Graph run_sequential(const torch::Tensor& x, const Residue& f) {
  const torch::nn::Functional module(f);
  const torch::nn::Sequential sequential(module, module, module);
  return {sequential.ptr(), {regrad::checkpoint_sequential(sequential, 2, x), x * 1}};
}

Graph run_nested(const torch::Tensor& x, const Residue& f) {
  const auto outer = [f](torch::Tensor t) { return f(recompute_grad(f)(t)); };
  return {nullptr, {recompute_grad(outer)(x), recompute_grad(f)(x)}};
}

/// Outputs that depend on different tensors: two graph nodes of one call.
Graph run_two_outputs(const torch::Tensor& x, const Residue& f) {
  const auto both = [f](torch::Tensor a, torch::Tensor b) { return std::make_tuple(f(a), f(b) * a); };
  const auto [first, second] = recompute_grad(both)(x, x * 2);
  return {nullptr, {first, second}};
}

Graph run_custom_gradient(const torch::Tensor& x, const Residue& f) {
  const auto gradient = [f](const Tensors& inputs, const Tensors& variables, const Tensors&, const Tensors& d) {
    regrad::CustomGradients result{{f(d[0] * inputs[0])}, variables};
    return result;
  };
  const auto custom = regrad::with_custom_grad([f](torch::Tensor t) { return f(t); }, gradient);
  return {nullptr, {custom(x), recompute_grad([custom](torch::Tensor t) { return custom(t); })(x)}};
}

std::vector<Program> all_programs() {
  return {block_program(Memory::store()),
          block_program(Memory::recompute(1)),
          block_program(Memory::recompute(2)),
          block_program(Memory::reverse()),
          {"checkpoint_sequential", run_sequential},
          {"nested regions", run_nested},
          {"a region with two outputs", run_two_outputs},
          {"with_custom_grad", run_custom_gradient}};
}

torch::Tensor loss_of(const Tensors& outputs) { return (outputs[0] * outputs[1]).sum(); }

class Endurance : public testing::Test {
 protected:
  Endurance() { torch::manual_seed(1); }

  /// A function that captures `token`.
  Residue function_with(std::shared_ptr<int> token) {
    return [token = std::move(token), p = p_, this](torch::Tensor t) {
      fuse_.pass();
      return (t * p).sin();
    };
  }

  /// Runs each program and lets its graph go by `way`, which drops the graph that it is given. Then expects that no
  /// byte and no closure is held.
  void expect_nothing_held(const std::function<void(Graph graph)>& way) {
    for (const Program& program : all_programs()) {
      SCOPED_TRACE(program.name);
      expect_nothing_held([&](const Residue& f) { way(program.run(x_, f)); });
    }
  }

  void expect_nothing_held(const std::function<void(const Residue& f)>& program) {
    auto token = std::make_shared<int>();
    const std::weak_ptr<int> alive = token;
    const regrad::MemoryMeter meter;
    {
      const Residue f = function_with(std::move(token));
      program(f);
    }
    fuse_.set(0);
    take_gradients({x_, p_});
    queue_.drain();
    EXPECT_EQ(meter.current_bytes(), 0);
    EXPECT_TRUE(alive.expired());
  }

  const EngineQueue queue_;
  torch::Tensor x_ = leaf({3, 4});
  torch::Tensor p_ = leaf({4});
  Fuse fuse_;
};

TEST_F(Endurance, Clause8_Backward) {
  expect_nothing_held([](Graph graph) {
    const auto loss = loss_of(graph.outputs);
    loss.backward();
  });
}

/// Outputs that outlive backward and their module hold themselves and nothing else.
TEST_F(Endurance, Clause8_OutputsThatAreStillHeldAfterBackward) {
  for (const Program& program : all_programs()) {
    SCOPED_TRACE(program.name);
    auto token = std::make_shared<int>();
    const std::weak_ptr<int> alive = token;
    const regrad::MemoryMeter meter;
    Tensors outputs = program.run(x_, function_with(std::move(token))).outputs;
    loss_of(outputs).backward();
    take_gradients({x_, p_});
    EXPECT_TRUE(alive.expired());
    EXPECT_EQ(meter.current_bytes(), static_cast<int64_t>(outputs[0].nbytes() + outputs[1].nbytes()));
  }
}

TEST_F(Endurance, Clause8_NoBackward) {
  expect_nothing_held([](Graph graph) { const auto loss = loss_of(graph.outputs); });
}

TEST_F(Endurance, Clause8_TheModuleGoesFirst) {
  expect_nothing_held([](Graph graph) {
    graph.model = nullptr;
    loss_of(graph.outputs).backward();
  });
}

TEST_F(Endurance, Clause8_TheOutputsGoFirst) {
  expect_nothing_held([](Graph graph) {
    auto loss = loss_of(graph.outputs);
    graph.outputs.clear();
    loss.backward();
  });
}

TEST_F(Endurance, Clause8_PartOfTheOutputs) {
  for (const size_t kept : {0U, 1U}) {
    expect_nothing_held([&](Graph graph) {
      graph.outputs[1 - kept] = torch::Tensor();
      graph.outputs[kept].sum().backward();
    });
    expect_nothing_held([&](Graph graph) {
      graph.outputs[kept].sum().backward();
      graph.outputs[kept] = torch::Tensor();
    });
    expect_nothing_held([&](Graph graph) { graph.outputs[kept] = torch::Tensor(); });
  }
}

TEST_F(Endurance, Clause8_RetainedGraph) {
  expect_nothing_held([](Graph graph) {
    const auto loss = loss_of(graph.outputs);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
  });
}

/// Two passes hold no more than one: what the first rebuilt is gone.
TEST_F(Endurance, Clause8_ARetainedGraphDoesNotGrow) {
  for (const Program& program : all_programs()) {
    SCOPED_TRACE(program.name);
    const Graph graph = program.run(x_, function_with(nullptr));
    const auto loss = loss_of(graph.outputs);
    const regrad::MemoryMeter meter;
    for (int pass = 0; pass < 3; ++pass) {
      loss.backward({}, /*retain_graph=*/true);
      take_gradients({x_, p_});
      EXPECT_EQ(meter.current_bytes(), 0);
    }
  }
}

TEST_F(Endurance, Clause8_CreateGraph) {
  expect_nothing_held([&](Graph graph) {
    const auto first = grad({loss_of(graph.outputs)}, {x_, p_}, {}, true, true);
    graph = {};
    const auto penalty = first[0].square().sum() + first[1].square().sum();
    const auto second = grad({penalty}, {x_, p_}, {}, true, true);
  });
  expect_nothing_held([&](Graph graph) {
    const auto first = grad({loss_of(graph.outputs)}, {x_, p_}, {}, true, true);
    (first[0].square().sum() + first[1].square().sum()).backward();
  });
}

TEST_F(Endurance, Clause8_APassThatStopsMidway) {
  expect_nothing_held([&](Graph graph) {
    const auto loss = loss_of(graph.outputs);
    grad({loss}, {graph.outputs[0]}, {}, true);
    grad({loss}, {p_}, {}, true);
    grad({loss}, {x_}, {});
  });
}

TEST_F(Endurance, Clause8_ExceptionInForward) {
  for (const Program& program : all_programs()) {
    SCOPED_TRACE(program.name);
    bool finished = false;
    for (int call = 1; !finished; ++call) {
      expect_nothing_held([&](const Residue& f) {
        fuse_.set(call);
        try {
          program.run(x_, f);
          finished = true;
        } catch (const Failure&) {
        }
      });
    }
  }
}

TEST_F(Endurance, Clause8_ExceptionInBackward) {
  for (const Program& program : all_programs()) {
    for (const bool retain_graph : {false, true}) {
      SCOPED_TRACE(program.name + (retain_graph ? ", retained" : ""));
      bool finished = false;
      for (int call = 1; !finished; ++call) {
        expect_nothing_held([&](const Residue& f) {
          const Graph graph = program.run(x_, f);
          fuse_.set(call);
          try {
            loss_of(graph.outputs).backward({}, retain_graph);
            finished = true;
          } catch (const Failure&) {
          }
        });
      }
    }
  }
}

TEST_F(Endurance, Clause8_ExceptionInAHook) {
  expect_nothing_held([&](Graph graph) {
    const auto hook = [](const torch::Tensor&) -> torch::Tensor { throw Failure(); };
    const unsigned key = x_.register_hook(hook);
    EXPECT_THROW(loss_of(graph.outputs).backward(), Failure);
    x_.remove_hook(key);
  });
}

TEST_F(Endurance, Clause8_TheGraphGoesInAHook) {
  expect_nothing_held([&](Graph graph) {
    auto loss = loss_of(graph.outputs);
    const auto drop_all = [&](const torch::Tensor& gradient) {
      graph = {};
      loss = torch::Tensor();
      return gradient;
    };
    const unsigned key = p_.register_hook(drop_all);
    loss.backward();
    p_.remove_hook(key);
  });
  // The hook of an output, which comes before any replay.
  expect_nothing_held([&](Graph graph) {
    auto loss = loss_of(graph.outputs);
    graph.outputs[0].register_hook([&](const torch::Tensor& gradient) {
      graph.model = nullptr;
      graph.outputs[1] = torch::Tensor();
      loss = torch::Tensor();
      return gradient;
    });
    loss.backward();
  });
}

/// On another thread, which reports to the meter of this one.
void elsewhere(const std::function<void()>& program) {
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    program();
  }).join();
}

TEST_F(Endurance, Clause8_InAnotherThread) {
  expect_nothing_held([](Graph graph) { elsewhere([&] { graph = {}; }); });
  expect_nothing_held([](Graph graph) {
    elsewhere([&] {
      loss_of(graph.outputs).backward();
      graph = {};
    });
  });
  for (const Program& program : all_programs()) {
    SCOPED_TRACE(program.name);
    expect_nothing_held([&](const Residue& f) {
      Graph graph;
      elsewhere([&] { graph = program.run(x_, f); });
      loss_of(graph.outputs).backward();
    });
  }
}

// --- Many steps

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kOwnHeap = false;  // the sanitizer's, which keeps what was freed
#else
constexpr bool kOwnHeap = true;
#endif

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t heap_bytes() { return static_cast<int64_t>(mallinfo2().uordblks); }

/// Runs `step` 10,000 times and expects that nothing has grown since the first 1,000.
void expect_no_growth(const std::function<void()>& step) {
  constexpr int kWarmUp = 1000;
  constexpr int kSteps = 10000;
  const regrad::MemoryMeter meter;
  int64_t bytes = 0, heap = 0, resident = 0;
  for (int i = 0; i < kSteps; ++i) {
    if (i == kWarmUp) {
      bytes = meter.current_bytes();
      heap = heap_bytes();
      resident = resident_bytes();
    }
    step();
    if (i >= kWarmUp && meter.current_bytes() != bytes)
      FAIL() << meter.current_bytes() - bytes << " bytes by step " << i;
  }
  if (!kOwnHeap) return;
  // The smallest object that a step could leave behind takes 32 bytes of heap: 288,000 bytes in 9,000 steps. What grows
  // for other reasons, hash tables and the like, doubles now and then by a few thousand bytes.
  EXPECT_LT(heap_bytes() - heap, 64 * 1024);
  // One graph node a step, 150 bytes, would be 1.3 MB. A freed heap may be scattered over some more pages than before.
  EXPECT_LT(resident_bytes() - resident, 1024 * 1024);
}

torch::nn::Sequential small_net() { return torch::nn::Sequential(torch::nn::BatchNorm1d(4), torch::nn::Dropout(0.1)); }

TEST_F(Endurance, C33_TenThousandStepsOfABlock) {
  const auto x = torch::randn({3, 4});
  regrad::RevBlock block(regrad::RevBlockOptions(1).f(small_net()).g(torch::nn::Linear(4, 4)));
  expect_no_growth([&] {
    const auto [y1, y2] = block->forward(x, x);
    (y1 * y2).sum().backward();
    take_gradients(block->parameters());
  });
}

TEST_F(Endurance, C33_TenThousandStepsOfARegion) {
  const auto region = recompute_grad([net = small_net()](torch::Tensor t) mutable { return net->forward(t); });
  expect_no_growth([&] {
    const auto x = x_.to(torch::kFloat);
    region(x).square().sum().backward();
    take_gradients({x_});
  });
}

/// A step that fails, in forward and in backward by turns.
TEST_F(Endurance, C33_TenThousandStepsThatFail) {
  const Residue f = function_with(nullptr);
  const SilentWarnings silent;
  int step = 0;
  expect_no_growth([&] {
    fuse_.set(1 + ++step % 4);
    const auto run = [&] {
      const auto [y1, y2] = regrad::rev_block(x_, x_, f, f);
      (y1 * y2).sum().backward();
    };
    EXPECT_THROW(run(), Failure);
    take_gradients({x_, p_});
  });
}

}  // namespace
