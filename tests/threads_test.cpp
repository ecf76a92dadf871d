// Contract clause 9: independent models train in parallel threads, graphs can be used from any thread, and no lock is
// held while a function or the engine runs. Sizes are tiny and everything is done many times, so that races show; the
// preset `tsan` runs this under the thread sanitizer.

#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "regrad/regrad.h"
#include "support/compare.h"

using namespace regrad::testing;
using regrad::Memory;
using regrad::recompute_grad;
using torch::autograd::grad;

namespace {

const std::vector<Memory> kStrategies{Memory::store(), Memory::recompute(1), Memory::recompute(2), Memory::reverse()};

constexpr int64_t kRows = 5;
constexpr int64_t kFeatures = 4;

/// Starts all threads at one moment, and hands on what one of them throws.
void in_threads(int count, const std::function<void(int)>& body) {
  std::barrier start(count);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(count));
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      try {
        body(i);
      } catch (...) {
        failures[static_cast<size_t>(i)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
}

torch::Tensor randn(at::IntArrayRef sizes, at::Generator& generator) {
  return torch::randn(sizes, generator, torch::TensorOptions(torch::kDouble));
}

/// A function with running statistics, a buffer that its result depends on, and random numbers from a generator of its
/// own: the default one belongs to the whole process.
class PartImpl : public torch::nn::Module {
 public:
  explicit PartImpl(uint64_t seed)
      : generator_(at::detail::createCPUGenerator(seed)),
        norm_(register_module("norm", torch::nn::BatchNorm1d(kFeatures))),
        weight_(register_parameter("weight", randn({kFeatures, kFeatures}, generator_) * 0.3)),
        count_(register_buffer("count", torch::zeros({1}))) {
    to(torch::kDouble);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      count_.add_(1);
    }
    auto y = norm_(x).matmul(weight_).tanh();
    if (is_training()) y = y * (at::rand(y.sizes(), generator_, y.options()) > 0.2);
    return y + count_ * 0.01;
  }

 private:
  at::Generator generator_;
  torch::nn::BatchNorm1d norm_;
  torch::Tensor weight_;
  torch::Tensor count_;
};
TORCH_MODULE(Part);

regrad::RevBlock make_block(uint64_t seed, const Memory& memory, int64_t layers = 3) {
  return regrad::RevBlock(
      regrad::RevBlockOptions(layers)
          .f([seed](int64_t layer) { return Part(seed * 100 + 2 * static_cast<uint64_t>(layer)); })
          .g([seed](int64_t layer) { return Part(seed * 100 + 2 * static_cast<uint64_t>(layer) + 1); })
          .memory(memory));
}

torch::Tensor loss_of(regrad::RevBlock& block, const torch::Tensor& x) {
  const auto [y1, y2] = block->forward(x, x * 2);
  return (y1 * y2).mean();
}

/// Parameters and buffers.
Tensors state_of(const torch::nn::Module& module) {
  Tensors state = module.parameters();
  for (const auto& buffer : module.buffers()) state.push_back(buffer);
  return state;
}

/// A few steps of gradient descent on a model of a block, nested regions and a checkpointed sequential. Returns the
/// parameters and buffers at the end.
Tensors train(uint64_t seed, const Memory& memory, int steps) {
  auto generator = at::detail::createCPUGenerator(seed);
  regrad::RevBlock block = make_block(seed, memory);
  const Part inner(seed + 50);
  const torch::nn::Sequential tail(Part(seed + 51), Part(seed + 52));
  const torch::nn::ModuleList model(block.ptr(), inner.ptr(), tail.ptr());
  const auto nested = recompute_grad([inner](const torch::Tensor& t) { return recompute_grad(inner)(t).sin(); });
  for (int step = 0; step < steps; ++step) {
    const auto [y1, y2] = block->forward(randn({kRows, kFeatures}, generator), randn({kRows, kFeatures}, generator));
    regrad::checkpoint_sequential(tail, 2, nested(y1 + y2)).square().sum().backward();
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) {
      parameter.sub_(parameter.grad(), 0.05);
      parameter.mutable_grad() = torch::Tensor();
    }
  }
  return copies(state_of(*model));
}

TEST(Threads, Clause9_EightThreadsTrainModelsOfTheirOwn) {
  constexpr int kThreads = 8;
  constexpr int kSteps = 12;
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    std::vector<Tensors> expected, found(kThreads);
    for (int i = 0; i < kThreads; ++i) expected.push_back(train(static_cast<uint64_t>(i), memory, kSteps));
    in_threads(kThreads,
               [&](int i) { found[static_cast<size_t>(i)] = train(static_cast<uint64_t>(i), memory, kSteps); });
    for (size_t i = 0; i < kThreads; ++i) expect_close(expected[i], found[i]);
  }
}

TEST(Threads, Clause9_BackwardOnAnotherThreadThanForward) {
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    const auto step = [&](bool elsewhere) {
      auto generator = at::detail::createCPUGenerator(3);
      regrad::RevBlock block = make_block(3, memory);
      const Part part(7);
      const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
      torch::Tensor loss = loss_of(block, recompute_grad(part)(x));
      const auto backward = [&] {
        loss.backward();
        loss = torch::Tensor();  // the graph is released here
      };
      elsewhere ? std::thread(backward).join() : backward();
      Tensors result{x.grad()};
      for (const auto& parameter : block->parameters()) result.push_back(parameter.grad());
      for (const auto& parameter : part->parameters()) result.push_back(parameter.grad());
      for (const auto& buffer : block->buffers()) result.push_back(buffer);
      return result;
    };
    const Tensors expected = step(false);
    for (int i = 0; i < 50; ++i) expect_close(expected, step(true));
  }
}

/// Two graphs on the same module, whose second runs go on at the same time.
void run_two_graphs_of_one_module(const Memory& memory, bool training, int repetitions) {
  auto generator = at::detail::createCPUGenerator(4);
  regrad::RevBlock block = make_block(4, memory);
  block->train(training);
  const Tensors parameters = block->parameters();
  const std::vector<torch::Tensor> x{randn({kRows, kFeatures}, generator), randn({kRows, kFeatures}, generator)};
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    Tensors losses;
    for (const auto& input : x) losses.push_back(loss_of(block, input));
    const Tensors buffers = copies(block->buffers());
    std::vector<Tensors> expected, found(2);
    for (const auto& loss : losses) expected.push_back(grad({loss}, parameters, {}, /*retain_graph=*/true));
    in_threads(2, [&](int i) {
      const auto n = static_cast<size_t>(i);
      found[n] = grad({std::exchange(losses[n], torch::Tensor())}, parameters);
    });
    for (size_t i = 0; i < 2; ++i) expect_close(expected[i], found[i]);
    expect_close(buffers, block->buffers());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Threads, Clause9_TwoGraphsOfOneModuleInEvaluation) {
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    run_two_graphs_of_one_module(memory, /*training=*/false, 200);
  }
}

TEST(Threads, Clause9_TwoPassesThroughOneRetainedGraph) {
  auto generator = at::detail::createCPUGenerator(5);
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    regrad::RevBlock block = make_block(5, memory);
    block->eval();
    Part part(8);
    part->eval();
    Tensors inputs{x};
    for (const auto& parameter : block->parameters()) inputs.push_back(parameter);
    for (const auto& parameter : part->parameters()) inputs.push_back(parameter);
    const auto loss = loss_of(block, recompute_grad(part)(x));
    const Tensors expected = grad({loss}, inputs, {}, true);
    for (int repetition = 0; repetition < 100; ++repetition) {
      std::vector<Tensors> found(3);
      in_threads(3, [&](int i) {
        // One of them goes half of the way: no weight of the first layers, nor what is before.
        const bool stops_early = i == 2;
        found[static_cast<size_t>(i)] = grad({loss}, {stops_early ? inputs[inputs.size() / 2] : x}, {}, true);
      });
      expect_close({expected[0]}, found[0]);
      expect_close({expected[0]}, found[1]);
      expect_close({expected[inputs.size() / 2]}, found[2]);
      if (HasFailure()) return;
    }
  }
}

/// Several outputs of one region, whose graph nodes share a second run within one pass but not between passes.
TEST(Threads, Clause9_TwoPassesThroughARegionWithSeveralOutputs) {
  auto generator = at::detail::createCPUGenerator(6);
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  const auto a = randn({kFeatures}, generator).requires_grad_();
  const auto b = randn({kFeatures}, generator).requires_grad_();
  const auto both =
      recompute_grad([=](const torch::Tensor& t) { return std::make_tuple((t * a).sin(), (t * b).cos()); });
  const auto [first, second] = both(x);
  const auto loss = (first * second).sum();
  const Tensors inputs{x, a, b};
  const Tensors expected = grad({loss}, inputs, {}, true);
  for (int repetition = 0; repetition < 300; ++repetition) {
    std::vector<Tensors> found(2);
    in_threads(2, [&](int i) { found[static_cast<size_t>(i)] = grad({loss}, inputs, {}, true); });
    for (const Tensors& gradients : found) expect_close(expected, gradients);
    if (HasFailure()) return;
  }
}

/// f in a region in a region ..., `depth` of them.
torch::Tensor nested(int depth, const torch::Tensor& weight, const torch::Tensor& x) {
  if (depth == 0) return (x * weight).sin();
  return recompute_grad([=](const torch::Tensor& t) { return nested(depth - 1, weight, t); })(x);
}

/// Beyond 60 engine runs inside each other Torch goes on in another thread.
TEST(Threads, Clause9_SeventyRegionsInsideEachOther) {
  auto generator = at::detail::createCPUGenerator(7);
  const auto x = randn({kFeatures}, generator).requires_grad_(), p = randn({kFeatures}, generator).requires_grad_();
  const Tensors expected = grad({(x * p).sin().sum()}, {x, p});
  const Tensors alone = grad({nested(70, p, x).sum()}, {x, p});
  expect_close(expected, alone);
  for (int repetition = 0; repetition < 2; ++repetition) {
    std::vector<Tensors> found(2);
    in_threads(2, [&](int i) { found[static_cast<size_t>(i)] = grad({nested(70, p, x).sum()}, {x, p}); });
    for (const Tensors& gradients : found) expect_close(expected, gradients);
  }
}

torch::Tensor around_norm(int depth, torch::nn::BatchNorm1d norm, const torch::Tensor& x) {
  if (depth == 0) return norm->forward(x);
  return recompute_grad([=](const torch::Tensor& t) { return around_norm(depth - 1, norm, t); })(x);
}

/// All levels exchange the same buffers. Beyond a depth of sixty the engine goes on in another thread, which is no
/// other pass.
TEST(Threads, Clause9_SeventyRegionsAroundABatchNorm) {
  auto generator = at::detail::createCPUGenerator(13);
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  torch::nn::BatchNorm1d norm(kFeatures);
  norm->to(torch::kDouble);
  const Tensors expected = grad({norm->forward(x).sin().sum()}, {x, norm->weight});
  const auto y = around_norm(70, norm, x);
  const Tensors buffers = copies(norm->buffers());
  expect_close(expected, grad({y.sin().sum()}, {x, norm->weight}));
  expect_close(buffers, norm->buffers());
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

/// Functions that take a mutex of the user's, in both passes and in several branches of a graph: a lock of ours that
/// were held meanwhile could be waited for by whoever holds that mutex.
TEST(Threads, C33_FunctionsThatTakeAMutex) {
  auto generator = at::detail::createCPUGenerator(8);
  std::mutex mutex;
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  const auto p = randn({kFeatures}, generator).requires_grad_();
  const auto plain = [=](const torch::Tensor& t) { return (t * p).sin(); };
  const auto f = [&](const torch::Tensor& t) {
    const std::lock_guard<std::mutex> lock(mutex);
    return recompute_grad(plain)(t);
  };
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    regrad::RevBlock block(regrad::RevBlockOptions(2).f(f).g(f).memory(memory));
    const auto forward = [&] {
      const auto [y1, y2] = block->forward(x, x * 2);
      return (y1 * recompute_grad(f)(y2)).sum() + recompute_grad(f)(x).sum();
    };
    const torch::Tensor shared = forward();
    const Tensors expected = grad({shared}, {x, p}, {}, true);
    for (int repetition = 0; repetition < 50; ++repetition) {
      std::vector<Tensors> found(4);
      in_threads(4, [&](int i) {
        found[static_cast<size_t>(i)] = grad({i % 2 == 0 ? shared : forward()}, {x, p}, {}, true);
      });
      for (const Tensors& gradients : found) expect_close(expected, gradients);
    }
  }
}

/// A place where two threads meet. Gives up in the end, so that a lock which keeps one of them away fails the test.
class Meeting {
 public:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t meeting = ++arrivals_;
    changed_.notify_all();
    const bool met = changed_.wait_for(lock, std::chrono::seconds(20),
                                       [&] { return missed_ || arrivals_ >= meeting + meeting % 2; });
    if (met) return;
    missed_ = true;
    ADD_FAILURE() << "only one of two threads is inside the function";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrivals_ = 0;
  bool missed_ = false;
};

/// Two passes through one graph, whose second runs wait for each other.
TEST(Threads, Clause9_FunctionsThatMeetInTheirSecondRuns) {
  auto generator = at::detail::createCPUGenerator(11);
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  const auto p = randn({kFeatures}, generator).requires_grad_();
  Meeting meeting;
  const auto f = [&, p](const torch::Tensor& t) {
    if (regrad::is_recomputing()) meeting.wait();
    return (t * p).sin();
  };
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    regrad::RevBlock block(regrad::RevBlockOptions(2).f(f).g(f).memory(memory));
    const auto [y1, y2] = block->forward(x, x * 2);
    const auto loss = (y1 * recompute_grad(f)(y2)).sum();
    for (int repetition = 0; repetition < 20; ++repetition) {
      std::vector<Tensors> found(2);
      in_threads(2, [&](int i) { found[static_cast<size_t>(i)] = grad({loss}, {x, p}, {}, true); });
      expect_close(found[0], found[1]);
      if (HasFailure()) return;
    }
  }
}

/// Batch norm in training mode: a second run works on a copy of the statistics, in the place of the module's own.
TEST(Threads, Clause9_TwoPassesThatChangeOneBufferAreRefused) {
  auto generator = at::detail::createCPUGenerator(12);
  const auto x = randn({kRows, kFeatures}, generator).requires_grad_();
  torch::nn::BatchNorm1d norm(kFeatures);
  norm->to(torch::kDouble);
  std::function<void()> meanwhile;
  const auto f = [&, norm](const torch::Tensor& t) mutable {
    if (regrad::is_recomputing() && meanwhile) std::exchange(meanwhile, nullptr)();
    return norm->forward(t);
  };
  for (const Memory& memory : {Memory::recompute(1), Memory::reverse()}) {
    SCOPED_TRACE(memory.to_string());
    const std::vector<std::shared_ptr<torch::nn::Module>> modules{norm.ptr()};
    regrad::RevBlock block(regrad::RevBlockOptions(1)
                               .f(regrad::each_layer(regrad::Residual(modules, f)))
                               .g(regrad::each_layer(regrad::Residual(modules, f)))
                               .memory(memory));
    const auto forward = [&] {
      const auto [y1, y2] = block->forward(x, x * 2);
      return (y1 * y2).sum();
    };
    const auto first = forward(), second = forward();
    const Tensors expected = grad({first}, {x}, {}, true);
    const Tensors buffers = copies(norm->buffers());
    int refused = 0;
    meanwhile = [&] {
      std::thread([&] {
        for (const auto& attempt :
             std::vector<std::function<void()>>{[&] { grad({second}, {x}); }, [&] { forward(); }}) {
          try {
            attempt();
          } catch (const regrad::Error& error) {
            if (error.kind() == regrad::ErrorKind::unsupported) ++refused;
          }
        }
      }).join();
    };
    expect_close(expected, grad({first}, {x}));
    EXPECT_EQ(refused, 2) << "a backward and a forward in another thread";
    expect_close(buffers, norm->buffers());
    forward();
  }
}

/// What a function captured runs code of its own when it goes: it may call regrad, and take the user's locks.
TEST(Threads, Clause9_ReleaseRunsUserCodeWithoutOurLocks) {
  auto generator = at::detail::createCPUGenerator(9);
  const auto x = randn({kFeatures}, generator).requires_grad_();
  struct RunsABackward {
    torch::Tensor loss, x;
    std::atomic<int>* count;
    ~RunsABackward() {
      if (grad({loss}, {x})[0].defined()) ++*count;
    }
  };
  for (const Memory& memory : kStrategies) {
    SCOPED_TRACE(memory.to_string());
    std::atomic<int> count = 0;
    constexpr int kRepetitions = 100;
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      torch::Tensor loss;
      {
        const auto other = recompute_grad([](const torch::Tensor& t) { return t.sin(); })(x).sum();
        const std::shared_ptr<RunsABackward> token(new RunsABackward{other, x, &count});
        const auto f = [token](const torch::Tensor& t) { return t.sin(); };
        const auto [y1, y2] = regrad::rev_block(x, x * 2, f, f, 2);
        loss = (y1 + recompute_grad(f)(y2)).sum();
      }
      // One thread runs backward, another drops the graph.
      torch::Tensor same = loss;
      in_threads(2, [&](int i) {
        if (i == 0) std::exchange(loss, torch::Tensor()).backward();
        if (i == 1) same = torch::Tensor();
      });
      x.mutable_grad() = torch::Tensor();
    }
    EXPECT_EQ(count, kRepetitions);
  }
}

/// The first copy-on-write alias of a tensor changes its storage. Many threads make theirs at once, and each must be
/// safe from what the caller writes later.
TEST(Threads, Clause9_AliasesOfOneTensorAreMadeInManyThreads) {
  auto generator = at::detail::createCPUGenerator(10);
  const auto p = randn({kFeatures}, generator).requires_grad_();
  const auto f = [](const torch::Tensor& t, const torch::Tensor& weight) { return (t * weight).sin(); };
  for (int repetition = 0; repetition < 1000; ++repetition) {
    const auto x = randn({kRows, kFeatures}, generator);
    const Tensors expected = grad({f(x, p).sum()}, {p});
    Tensors outputs(4);
    in_threads(4, [&](int i) { outputs[static_cast<size_t>(i)] = recompute_grad(f)(x, p); });
    x.zero_();
    for (const auto& output : outputs) expect_close(expected, grad({output.sum()}, {p}));
    if (HasFailure()) return;
  }
}

}  // namespace
