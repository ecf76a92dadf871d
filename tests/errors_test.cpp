// Errors: early, typed, and saying where and what; a user's own exception passes through. And values against a
// reference without Torch.

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "regrad/regrad.h"
#include "support/compare.h"
#include "support/plain_block.h"
#include "support/surroundings.h"

using namespace regrad::testing;
using regrad::checkpoint_sequential;
using regrad::Error;
using regrad::ErrorKind;
using regrad::Memory;
using regrad::Pass;
using regrad::recompute_grad;
using regrad::Residual;
using regrad::RevBlock;
using regrad::RevBlockOptions;
namespace nn = torch::nn;

namespace {

const std::vector<Memory> kMemories{Memory::store(), Memory::recompute(1), Memory::recompute(3), Memory::reverse()};
const std::vector<Memory> kReplaying{Memory::recompute(1), Memory::recompute(3), Memory::reverse()};

const Residue kSine = [](torch::Tensor t) { return t.sin(); };

struct UsersOwn : std::runtime_error {
  int number;
  explicit UsersOwn(int n) : std::runtime_error("the user's own"), number(n) {}
};

// --- C26

TEST(Errors, C26_UsersExceptionInForward) {
  const auto x = leaf({4, 4});
  const Residue fails = [](torch::Tensor t) {
    torch::rand({3});
    if (t.defined()) throw UsersOwn(5);
    return t;
  };
  // Plain leaves the generator advanced, and so do we.
  const auto after = [&](auto program) {
    torch::manual_seed(1);
    EXPECT_THROW(program(), UsersOwn);
    return surroundings();
  };
  const auto expected = after([&] { fails(x); });
  EXPECT_EQ(expected, after([&] { recompute_grad(fails)(x); }));
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({kSine, fails}, {kSine, kSine}, memory);
    EXPECT_EQ(expected, after([&] { run_block(block, x, x); }));
  }
}

TEST(Errors, C26_UsersExceptionInReplayAlone) {
  torch::manual_seed(1);
  const auto x = leaf({4, 4});
  const auto p = leaf({4, 4});
  nn::BatchNorm1d norm(4);
  norm->to(torch::kDouble);
  bool failing = true;
  const auto f = [&](torch::Tensor t, Pass pass) {
    t = norm->forward(torch::dropout(t.mm(p), 0.5, true));
    if (pass == Pass::recompute && failing) {
      at::autocast::set_autocast_enabled(at::kCPU, true);  // left behind by what failed
      torch::GradMode::set_enabled(false);
      throw UsersOwn(6);
    }
    return t;
  };
  const Tensors leaves{x, p};
  const auto check = [&](const std::function<torch::Tensor()>& forward) {
    failing = true;
    const torch::Tensor loss = forward();
    const auto before = surroundings();
    const auto mean = norm->running_mean.clone();
    const auto count = norm->num_batches_tracked.item<int64_t>();
    try {
      loss.backward({}, /*retain_graph=*/true);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const UsersOwn& error) {
      EXPECT_EQ(error.number, 6);
    }
    EXPECT_EQ(before, surroundings());
    EXPECT_TRUE(norm->running_mean.equal(mean));
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), count);
    take_gradients(leaves);
    failing = false;  // the graph can still be used, and gives what it would have given
    loss.backward({}, true);
    const Tensors first = take_gradients(leaves);
    loss.backward();
    expect_close(first, take_gradients(leaves));
    EXPECT_EQ(before, surroundings());
  };
  const auto region = recompute_grad(f);
  check([&] { return region(region(x)).pow(2).sum(); });
  for (const Memory memory : kReplaying) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block(RevBlockOptions(2).f(Residual(f)).g(kSine).memory(memory));
    check([&] {
      const auto y = run_block(block, x, x * 2);
      return (y[0] * y[1]).sum();
    });
  }
}

TEST(Errors, C26_ThrownThingsOfAnyType) {
  const auto x = leaf({4, 4});
  const auto region = recompute_grad([](torch::Tensor t, Pass pass) {
    if (pass == Pass::recompute) throw 7;
    return t.sin();
  });
  const auto y = region(x).sum();
  EXPECT_THROW(y.backward(), int);
  EXPECT_FALSE(regrad::is_recomputing());
}

TEST(Errors, C26_TorchErrorInAFunctionPassesThrough) {
  const auto x = leaf({4, 4});
  const auto f = [](torch::Tensor t) { return t.mm(torch::ones({3, 3}, torch::kDouble)); };
  const auto message = [](const std::function<void()>& program) -> std::string {
    try {
      program();
    } catch (const Error& error) {
      return "regrad: " + error.msg();
    } catch (const c10::Error& error) {
      return error.msg();
    }
    return "nothing";
  };
  const auto expected = message([&] { f(x); });
  EXPECT_EQ(expected, message([&] { recompute_grad(f)(x); }));
  for (const Memory memory : kMemories) {
    RevBlock block = make_block({f}, {kSine}, memory);
    EXPECT_EQ(expected, message([&] { run_block(block, x, x); }));
  }
}

// --- C27

TEST(Errors, C27_FunctionThatChangesTheShape) {
  const auto x = torch::randn({2, 3, 4});
  const Residue wider = [](torch::Tensor t) { return torch::cat({t, t}, 1); };
  const Residue broadcast = [](torch::Tensor t) { return t.sum(0, true); };
  for (const Memory memory : kMemories) {
    for (const bool grad : {true, false}) {
      const torch::AutoGradMode mode(grad);
      SCOPED_TRACE(memory.to_string() + (grad ? "" : ", no grad"));
      RevBlock in_f = make_block({kSine, wider}, {kSine, kSine}, memory);
      expect_error(ErrorKind::stream_mismatch, {"layers.1.f", "[2, 6, 4]", "[2, 3, 4]"},
                   [&] { run_block(in_f, x, x); });
      RevBlock in_g = make_block({kSine}, {broadcast}, memory);
      expect_error(ErrorKind::stream_mismatch, {"layers.0.g", "[1, 3, 4]", "[2, 3, 4]"},
                   [&] { run_block(in_g, x, x); });
    }
  }
  RevBlock in_inverse = make_block({kSine, wider}, {kSine, kSine});
  expect_error(ErrorKind::stream_mismatch, {"layers.1.f", "[2, 6, 4]", "[2, 3, 4]"},
               [&] { in_inverse->inverse(x, x); });
}

TEST(Errors, C27_FunctionThatChangesTheDtype) {
  const auto x = torch::randn({3, 4});
  const Residue to_double = [](torch::Tensor t) { return t.to(torch::kDouble); };
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({kSine, kSine, kSine}, {kSine, kSine, to_double}, memory);
    expect_error(ErrorKind::stream_mismatch, {"layers.2.g", "Double[3, 4]", "Float[3, 4]"},
                 [&] { run_block(block, x, x); });
  }
}

TEST(Errors, C27_FunctionThatChangesTheDevice) {
  const auto x = torch::randn({3, 4});
  const Residue to_meta = [](torch::Tensor t) { return t.to(torch::kMeta); };
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({to_meta}, {kSine}, memory);
    expect_error(ErrorKind::stream_mismatch, {"layers.0.f", "meta", "cpu"}, [&] { run_block(block, x, x); });
  }
}

TEST(Errors, C27_FunctionThatReturnsNothing) {
  const auto x = torch::randn({3, 4});
  const Residue nothing = [](torch::Tensor) { return torch::Tensor(); };
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({nothing}, {kSine}, memory);
    expect_error(ErrorKind::stream_mismatch, {"layers.0.f", "undefined", "Float[3, 4]"},
                 [&] { run_block(block, x, x); });
  }
}

TEST(Errors, C27_UndefinedStreams) {
  const auto x = torch::randn({3, 4});
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({kSine}, {kSine}, memory);
    EXPECT_THROW(run_block(block, x, torch::Tensor()), c10::Error);
    EXPECT_THROW(run_block(block, torch::Tensor(), x), c10::Error);
  }
}

TEST(Errors, C27_OddSplitsAndMissingAxes) {
  const auto split = [](int64_t dim) { return regrad::SplitRevBlock(make_block({kSine}, {kSine}), dim); };
  expect_error(ErrorKind::invalid_argument, {"dimension 1", "[2, 5]", "even"}, [&] {
    split(1)->forward(torch::randn({2, 5}));
  });
  expect_error(ErrorKind::invalid_argument, {"dimension -1", "[2, 5]"}, [&] {
    split(-1)->inverse(torch::randn({2, 5}));
  });
  expect_error(ErrorKind::invalid_argument, {"dimension 2", "[2, 4]"}, [&] {
    split(2)->forward(torch::randn({2, 4}));
  });
  expect_error(ErrorKind::invalid_argument, {"dimension -3"}, [&] { split(-3)->forward(torch::randn({2, 4})); });
  expect_error(ErrorKind::invalid_argument, {"dimension 0"}, [&] { split(0)->forward(torch::randn({})); });
  expect_error(ErrorKind::invalid_argument, {"undefined"}, [&] { split(0)->forward(torch::Tensor()); });
}

TEST(Errors, C27_WrongListLengths) {
  const std::vector<nn::Linear> two{nn::Linear(4, 4), nn::Linear(4, 4)};
  const auto one = [](int64_t) { return nn::Linear(4, 4); };
  expect_error(ErrorKind::invalid_argument, {"for f", "2", "3"}, [&] { RevBlock(RevBlockOptions(3).f(two).g(one)); });
  expect_error(ErrorKind::invalid_argument, {"for g", "2", "1"}, [&] { RevBlock(RevBlockOptions(1).f(one).g(two)); });
  const auto x = torch::randn({3, 4});
  expect_error(ErrorKind::invalid_argument, {"for f", "2", "5"}, [&] { regrad::rev_block(x, x, two, one, 5); });
  expect_error(ErrorKind::invalid_argument, {"for f", "0", "1"},
               [&] { RevBlock(RevBlockOptions(1).f(std::vector<nn::Linear>()).g(one)); });
}

TEST(Errors, C27_CountsOutOfRange) {
  const auto one = [](int64_t) { return nn::Linear(4, 4); };
  const auto x = torch::randn({3, 4});
  for (const int64_t count : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const std::string number = std::to_string(count);
    expect_error(ErrorKind::invalid_argument, {number, "layers"},
                 [&] { RevBlock(RevBlockOptions(count).f(one).g(one)); });
    expect_error(ErrorKind::invalid_argument, {number, "layers"}, [&] { regrad::rev_block(x, x, one, one, count); });
    expect_error(ErrorKind::invalid_argument, {number}, [&] { Memory::recompute(count); });
    expect_error(ErrorKind::invalid_argument, {number},
                 [&] { checkpoint_sequential(nn::Sequential(nn::Linear(4, 4)), count, x); });
  }
  expect_error(ErrorKind::invalid_argument, {"0 modules"}, [&] { checkpoint_sequential(nn::Sequential(), 1, x); });
}

TEST(Errors, C27_MissingFunctions) {
  const auto one = [](int64_t) { return nn::Linear(4, 4); };
  expect_error(ErrorKind::invalid_argument, {"no f"}, [&] { RevBlock(RevBlockOptions(2).g(one)); });
  expect_error(ErrorKind::invalid_argument, {"no g"}, [&] { RevBlock(RevBlockOptions(2).f(one)); });
  expect_error(ErrorKind::invalid_argument, {"empty module"},
               [&] { RevBlock(RevBlockOptions(1).f(std::shared_ptr<nn::LinearImpl>()).g(one)); });
}

TEST(Errors, C27_SideInputsThatAFunctionDoesNotTake) {
  const auto x = torch::randn({3, 4});
  for (const Memory memory : kMemories) {
    SCOPED_TRACE(memory.to_string());
    RevBlock block = make_block({kSine, kSine}, {kSine, kSine}, memory);
    expect_error(ErrorKind::invalid_argument, {"layers.0.f", "1"}, [&] { run_block(block, x, x, {.f = {x}}); });
    expect_error(ErrorKind::invalid_argument, {"layers.0.g", "2"}, [&] { run_block(block, x, x, {.g = {x, x}}); });
    expect_error(ErrorKind::invalid_argument, {"layers.0.f"}, [&] { block->inverse(x, x, {.f = {x}}); });
  }
}

TEST(Errors, C27_AFactoryThatThrowsPassesThrough) {
  const auto factory = [](int64_t layer) {
    if (layer == 2) throw UsersOwn(2);
    return nn::Linear(4, 4);
  };
  EXPECT_THROW(RevBlock(RevBlockOptions(3).f(factory).g(factory)), UsersOwn);
}

// --- C28

using Matrix = std::vector<std::vector<double>>;

Matrix zeros(size_t rows, size_t columns) { return Matrix(rows, std::vector<double>(columns, 0)); }

Matrix to_matrix(const torch::Tensor& t) {
  const auto d = t.detach().to(torch::kDouble).contiguous().view({t.dim() == 2 ? t.size(0) : 1, t.size(-1)});
  Matrix m = zeros(static_cast<size_t>(d.size(0)), static_cast<size_t>(d.size(1)));
  for (size_t r = 0; r < m.size(); ++r) {
    for (size_t c = 0; c < m[r].size(); ++c)
      m[r][c] = d[static_cast<int64_t>(r)][static_cast<int64_t>(c)].item<double>();
  }
  return m;
}

double largest_difference(const Matrix& m, const torch::Tensor& t) {
  const Matrix other = to_matrix(t);
  double largest = 0;
  EXPECT_EQ(m.size(), other.size());
  for (size_t r = 0; r < m.size(); ++r) {
    for (size_t c = 0; c < m[r].size(); ++c) largest = std::max(largest, std::abs(m[r][c] - other[r][c]));
  }
  return largest;
}

/// y = tanh(x W^T + b) and its gradients, in loops.
struct HandWrittenLayer {
  Matrix w, b, dw, db;
  Matrix x, y;

  explicit HandWrittenLayer(const nn::Linear& l)
      : w(to_matrix(l->weight)), b(to_matrix(l->bias)), dw(zeros(4, 4)), db(zeros(1, 4)) {}

  Matrix forward(const Matrix& input) {
    x = input;
    y = zeros(x.size(), 4);
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t o = 0; o < 4; ++o) {
        double sum = b[0][o];
        for (size_t i = 0; i < 4; ++i) sum += x[r][i] * w[o][i];
        y[r][o] = std::tanh(sum);
      }
    }
    return y;
  }

  Matrix backward(const Matrix& dy) {
    Matrix dx = zeros(x.size(), 4);
    for (size_t r = 0; r < x.size(); ++r) {
      for (size_t o = 0; o < 4; ++o) {
        const double d = dy[r][o] * (1 - y[r][o] * y[r][o]);
        db[0][o] += d;
        for (size_t i = 0; i < 4; ++i) {
          dw[o][i] += d * x[r][i];
          dx[r][i] += d * w[o][i];
        }
      }
    }
    return dx;
  }
};

Matrix sum(Matrix a, const Matrix& b) {
  for (size_t r = 0; r < a.size(); ++r) {
    for (size_t c = 0; c < a[r].size(); ++c) a[r][c] += b[r][c];
  }
  return a;
}

TEST(Errors, C28_ValuesAndGradientsOfLoopsWithoutTorch) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const double tolerance = dtype == torch::kFloat ? 2e-6 : 1e-13;
    for (const Memory memory : kMemories) {
      SCOPED_TRACE(memory.to_string() + " " + c10::toString(dtype));
      torch::manual_seed(1);
      std::vector<nn::Linear> f, g;
      std::vector<HandWrittenLayer> hand_f, hand_g;
      const auto x1 = leaf({5, 4}, dtype), x2 = leaf({5, 4}, dtype);
      for (int i = 0; i < 4; ++i) {
        for (auto* list : {&f, &g}) {
          list->emplace_back(4, 4);
          list->back()->to(dtype);
        }
        hand_f.emplace_back(f.back());
        hand_g.emplace_back(g.back());
      }
      const auto residuals = [](const std::vector<nn::Linear>& list) {
        std::vector<Residual> result;
        for (const auto& l : list) {
          result.emplace_back(std::vector<std::shared_ptr<nn::Module>>{l.ptr()},
                              [l = l](torch::Tensor t) mutable { return l->forward(t).tanh(); });
        }
        return result;
      };
      RevBlock block(RevBlockOptions(4).f(residuals(f)).g(residuals(g)).memory(memory));

      Matrix a = to_matrix(x1), b = to_matrix(x2);
      for (size_t i = 0; i < 4; ++i) {
        a = sum(a, hand_f[i].forward(b));
        b = sum(b, hand_g[i].forward(a));
      }
      const auto y = run_block(block, x1, x2);
      EXPECT_LE(largest_difference(a, y[0]), tolerance);
      EXPECT_LE(largest_difference(b, y[1]), tolerance);

      const auto d1 = torch::randn({5, 4}, torch::dtype(dtype)), d2 = torch::randn({5, 4}, torch::dtype(dtype));
      Matrix da = to_matrix(d1), db = to_matrix(d2);
      for (size_t i = 4; i-- > 0;) {
        da = sum(da, hand_g[i].backward(db));
        db = sum(db, hand_f[i].backward(da));
      }
      torch::autograd::backward({y[0], y[1]}, {d1, d2});
      EXPECT_LE(largest_difference(da, x1.grad()), 10 * tolerance);
      EXPECT_LE(largest_difference(db, x2.grad()), 10 * tolerance);
      for (size_t i = 0; i < 4; ++i) {
        SCOPED_TRACE(i);
        EXPECT_LE(largest_difference(hand_f[i].dw, f[i]->weight.grad()), 20 * tolerance);
        EXPECT_LE(largest_difference(hand_f[i].db, f[i]->bias.grad()), 20 * tolerance);
        EXPECT_LE(largest_difference(hand_g[i].dw, g[i]->weight.grad()), 20 * tolerance);
        EXPECT_LE(largest_difference(hand_g[i].db, g[i]->bias.grad()), 20 * tolerance);
      }
    }
  }
}

// --- Contract, clause 10: each kind

TEST(Errors, Clause10_AnErrorIsATorchErrorWithAKind) {
  try {
    Memory::recompute(0);
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("Memory::recompute"), std::string::npos);
    const auto* typed = dynamic_cast<const Error*>(&error);
    ASSERT_NE(typed, nullptr);
    EXPECT_EQ(typed->kind(), ErrorKind::invalid_argument);
  }
}

TEST(Errors, Clause10_ErrorInBackwardKeepsItsType) {
  const auto x = leaf({4, 4});
  int runs = 0;
  const auto y = recompute_grad([&](torch::Tensor t) { return t * ++runs; })(x).sum();
  expect_error(ErrorKind::replay_differs, {}, [&] { y.backward(); });
}

TEST(Errors, Clause10_InputModified) {
  expect_error(ErrorKind::input_modified, {"relu(x) instead of relu_(x)"},
               [] { recompute_grad([](torch::Tensor t) { return t.relu_(); })(leaf({2}) * 1); });
}

TEST(Errors, Clause10_TensorModifiedNamesTheParameter) {
  nn::Linear linear(4, 4);
  const auto y = recompute_grad(linear)(torch::randn({2, 4})).sum();
  {
    const torch::NoGradGuard no_grad;
    linear->bias.add_(1);
  }
  expect_error(ErrorKind::tensor_modified, {"bias", "Float[4]", "version"}, [&] { y.backward(); });
}

TEST(Errors, Clause10_UnsupportedTensors) {
  const auto x = leaf({4, 4});
  const auto tangent = torch::ones({4, 4}, torch::kDouble);
  const auto level = torch::autograd::forward_ad::enter_dual_level();
  const auto dual = torch::_make_dual(x * 1, tangent, static_cast<int64_t>(level));
  const auto region = recompute_grad(kSine);
  expect_error(ErrorKind::unsupported, {"forward-mode"}, [&] { region(dual); });
  for (const Memory memory : kReplaying) {
    RevBlock block = make_block({kSine}, {kSine}, memory);
    expect_error(ErrorKind::unsupported, {"forward-mode"}, [&] { run_block(block, x, dual); });
  }
  torch::autograd::forward_ad::exit_dual_level(level);
}

TEST(Errors, Clause10_UnsupportedWriteToACapturedNonLeaf) {
  const auto x = leaf({4, 4});
  const auto captured = x * 2;
  expect_error(ErrorKind::unsupported, {"captured", "in place"}, [&] {
    recompute_grad([&](torch::Tensor t) {
      captured.add_(1);
      return t * captured;
    })(x);
  });
}

TEST(Errors, Clause10_NotCloneable) {
  const auto p = leaf({4, 4});
  RevBlock block = make_block({kSine, [p](torch::Tensor t) { return t.mm(p); }}, {kSine, kSine});
  expect_error(ErrorKind::not_cloneable, {"layers.0.f"}, [&] { block->clone(); });
}

/// Gradients under reverse, in float, of a block whose streams start as x1 and x2, against plain.
void expect_no_false_alarm(torch::Tensor x1, torch::Tensor x2, const Residues& f, const Residues& g) {
  const torch::Tensor scale = torch::ones({}).requires_grad_();
  const auto gradient = [&](const std::function<Tensors()>& streams) {
    const auto y = streams();
    (y[0].pow(2).sum() + y[1].sin().sum()).backward();
    return take_gradients({scale})[0];
  };
  const auto expected = gradient([&] { return plain_block(x1 * scale, x2 * scale, f, g); });
  RevBlock block = make_block(f, g);
  const auto found = gradient([&] { return run_block(block, x1 * scale, x2 * scale); });
  EXPECT_TRUE(torch::allclose(expected, found, 1e-3)) << expected << found;
}

TEST(Errors, Clause10_NoFalseAlarmOnAStreamOfZeros) {
  // Rebuilt, it is rounding, of which no relative error can be small.
  torch::manual_seed(1);
  const Residue tanh = [](torch::Tensor t) { return t.tanh(); };
  const Residue mixed = [w = torch::randn({8, 8})](torch::Tensor t) { return t.mm(w).tanh(); };
  const auto x = torch::randn({32, 8}), zeros = torch::zeros({32, 8});
  for (const Residue& f : {tanh, mixed}) {
    expect_no_false_alarm(x, zeros, {f, f, f}, {mixed, f, mixed});
    expect_no_false_alarm(zeros, x, {f, f, f}, {mixed, f, mixed});
    expect_no_false_alarm(zeros, zeros, {f, f, f}, {mixed, f, mixed});
  }
}

TEST(Errors, Clause10_NoFalseAlarmOnZerosInPlaces) {
  // Padding: one channel, one row, one half.
  torch::manual_seed(1);
  const Residue relu = [](torch::Tensor t) { return t.relu(); };
  const Residue mixed = [w = torch::randn({8, 8})](torch::Tensor t) { return t.mm(w).tanh(); };
  const auto x1 = torch::randn({32, 8}), x2 = torch::randn({32, 8});
  const auto padded = [](torch::Tensor t, int64_t dim, int64_t size) {
    t = t.clone();
    t.narrow(dim, 0, size).zero_();
    return t;
  };
  for (const auto& [dim, size] : {std::pair<int64_t, int64_t>{1, 1}, {0, 1}, {0, 16}, {1, 4}}) {
    expect_no_false_alarm(x1, padded(x2, dim, size), {relu, relu, relu}, {mixed, relu, mixed});
    expect_no_false_alarm(padded(x1, dim, size), padded(x2, dim, size), {relu, relu, relu}, {mixed, mixed, relu});
  }
}

TEST(Errors, Clause10_MeterUnavailable) {
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(config, {ActivityType::CPU});
  torch::autograd::profiler::enableProfiler(config, {ActivityType::CPU});
  expect_error(ErrorKind::meter_unavailable, {}, [] { const regrad::MemoryMeter meter; });
  torch::autograd::profiler::disableProfiler();
  const regrad::MemoryMeter meter;
  const auto bytes = torch::empty({16});
  EXPECT_EQ(meter.current_bytes(), 64);
}

}  // namespace
