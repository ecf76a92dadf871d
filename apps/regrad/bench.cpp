#include "apps/regrad/bench.h"

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include "apps/regrad/memory_argument.h"
#include "apps/regrad/progress.h"
#include "apps/regrad/step_measurement.h"
#include "apps/regrad/text.h"
#include "apps/regrad/workloads.h"
#include "regrad/rev_block.h"

namespace regrad::app {
namespace {

/// What one strategy took on one workload. What has no value could not be measured, for want of memory.
struct Row {
  std::string workload;
  int64_t layers;
  Memory memory;
  int threads;
  std::optional<double> step_seconds;
  std::optional<double> plain_step_seconds;
  /// The median, over the rounds, of the strategy's time divided by plain's in the same round.
  std::optional<double> step_ratio;
  std::optional<int64_t> peak_bytes;
  std::optional<int64_t> plain_peak_bytes;
  int64_t input_bytes;
  std::optional<double> max_relative_gradient_error;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Without this, plain pays for fresh pages in each step, since the C library gives large freed blocks back to the
/// system; a training run's allocator may or may not do so.
void keep_freed_pages() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
}

/// Bytes that the system can give without swapping, where it tells.
std::optional<int64_t> available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::string unit;
  for (int64_t kibibytes = 0; file >> name >> kibibytes; std::getline(file, unit)) {
    if (name == "MemAvailable:") return kibibytes * 1024;
  }
  return std::nullopt;
}

/// Whether storing every activation of the workload fits into memory; says so if not.
bool plain_fits(const std::string& name, const Workload& workload) {
  const int64_t needed = predict_plain_bytes(workload);
  const auto available = available_bytes();
  if (!available || needed < *available) return true;
  spdlog::warn("{} with {} layers: storing all activations takes {}, but only {} are free: plain and store are skipped",
               name, workload.layers(), format_bytes(needed), format_bytes(*available));
  return false;
}

RevBlock make_block(const Workload& workload) {
  const auto residuals = [](const std::vector<std::shared_ptr<Branch>>& branches) {
    return Residuals(std::vector<Residual>(branches.begin(), branches.end()));
  };
  return RevBlock(RevBlockOptions(workload.layers()).f(residuals(workload.f)).g(residuals(workload.g)));
}

/// One of those that are compared: plain, or the block under a strategy.
struct Contestant {
  Forward forward;
  std::vector<double> seconds;
};

/// The rows of one workload at one depth.
std::vector<Row> measure(const std::string& name, int64_t layers, const BenchOptions& options) {
  torch::manual_seed(1);
  const Workload workload = make_workload(name, layers, options.batch);
  RevBlock block = make_block(workload);
  const bool fits = plain_fits(name, workload);

  std::optional<StepMemory> plain_memory;
  std::vector<Contestant> contestants;
  if (fits) {
    contestants.push_back({.forward = plain_forward(workload), .seconds = {}});
    plain_memory = measure_memory(workload, contestants.front().forward);
  }

  std::vector<Row> rows;
  for (const Memory& memory : options.memory) {
    Row row{.workload = name,
            .layers = layers,
            .memory = memory,
            .threads = options.threads,
            .step_seconds = {},
            .plain_step_seconds = {},
            .step_ratio = {},
            .peak_bytes = {},
            .plain_peak_bytes = {},
            .input_bytes = workload.input_bytes(),
            .max_relative_gradient_error = {}};
    if (fits || memory != Memory::store()) {
      contestants.push_back({.forward =
                                 [&block, memory](const torch::Tensor& x1, const torch::Tensor& x2) {
                                   block->set_memory(memory);
                                   return block->forward(x1, x2);
                                 },
                             .seconds = {}});
      const StepMemory found = measure_memory(workload, contestants.back().forward);
      row.peak_bytes = found.peak_bytes;
      if (plain_memory) {
        row.plain_peak_bytes = plain_memory->peak_bytes;
        row.max_relative_gradient_error = max_relative_error(found.gradients, plain_memory->gradients);
      }
    }
    rows.push_back(std::move(row));
  }
  plain_memory.reset();

  // Interleaved, so that a slow spell of the machine slows all of them.
  Progress progress(fmt::format("{} {} layers", name, layers), options.rounds);
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (Contestant& contestant : contestants) contestant.seconds.push_back(time_step(workload, contestant.forward));
    progress.update(round + 1);
  }

  size_t next = fits ? 1 : 0;
  for (Row& row : rows) {
    if (!row.peak_bytes) continue;
    const std::vector<double>& seconds = contestants[next++].seconds;
    row.step_seconds = median(seconds);
    if (!fits) continue;
    const std::vector<double>& plain_seconds = contestants.front().seconds;
    row.plain_step_seconds = median(plain_seconds);
    std::vector<double> ratios;
    for (size_t round = 0; round < seconds.size(); ++round) ratios.push_back(seconds[round] / plain_seconds[round]);
    row.step_ratio = median(ratios);
  }
  return rows;
}

using Json = nlohmann::ordered_json;

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::optional<double> peak_over_input(const Row& row) {
  if (!row.peak_bytes) return std::nullopt;
  return static_cast<double>(*row.peak_bytes) / static_cast<double>(row.input_bytes);
}

/// Forward and backward of one layer, f and g included: where these do next to nothing, what the layer itself costs.
std::optional<double> overhead_per_layer(const Row& row) {
  if (row.workload != "tiny" || !row.step_seconds) return std::nullopt;
  return *row.step_seconds / static_cast<double>(row.layers);
}

Json to_json(const Row& row) {
  Json json{{"workload", row.workload},
            {"layers", row.layers},
            {"memory", memory_argument(row.memory)},
            {"threads", row.threads},
            {"step_seconds", or_null(row.step_seconds)},
            {"plain_step_seconds", or_null(row.plain_step_seconds)},
            {"step_ratio", or_null(row.step_ratio)},
            {"peak_bytes", or_null(row.peak_bytes)},
            {"plain_peak_bytes", or_null(row.plain_peak_bytes)},
            {"input_bytes", row.input_bytes},
            {"peak_over_input", or_null(peak_over_input(row))},
            {"max_relative_gradient_error", or_null(row.max_relative_gradient_error)}};
  if (const auto overhead = overhead_per_layer(row)) json["overhead_per_layer_seconds"] = *overhead;
  return json;
}

template <class T, class Format>
std::string or_dash(const std::optional<T>& value, Format format) {
  return value ? format(*value) : "-";
}

void print_table(const std::vector<Row>& rows) {
  const auto ratio = [](double value) { return fmt::format("{:.2f}", value); };
  const auto error = [](double value) { return fmt::format("{:.1e}", value); };
  std::vector<std::vector<std::string>> cells{{"workload", "layers", "memory", "step", "plain step", "ratio", "peak",
                                               "plain peak", "peak/input", "gradient error", "per layer"}};
  for (const Row& row : rows) {
    cells.push_back({row.workload, std::to_string(row.layers), memory_argument(row.memory),
                     or_dash(row.step_seconds, format_seconds), or_dash(row.plain_step_seconds, format_seconds),
                     or_dash(row.step_ratio, ratio), or_dash(row.peak_bytes, format_bytes),
                     or_dash(row.plain_peak_bytes, format_bytes), or_dash(peak_over_input(row), ratio),
                     or_dash(row.max_relative_gradient_error, error),
                     or_dash(overhead_per_layer(row), format_seconds)});
  }
  fmt::print("{}", format_table(cells));
}

}  // namespace

int bench(const BenchOptions& options) {
  if (options.keep_pages) keep_freed_pages();
  at::set_num_threads(options.threads);
  std::vector<Row> rows;
  for (const std::string& workload : options.workloads) {
    for (const int64_t layers : options.layers) {
      for (Row& row : measure(workload, layers, options)) rows.push_back(std::move(row));
    }
  }
  if (options.json) {
    Json array = Json::array();
    for (const Row& row : rows) array.push_back(to_json(row));
    fmt::print("{}\n", array.dump(2));
  } else {
    print_table(rows);
  }
  return 0;
}

}  // namespace regrad::app
