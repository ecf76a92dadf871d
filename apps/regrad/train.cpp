#include "apps/regrad/train.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/utils.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include "apps/regrad/error.h"
#include "apps/regrad/interrupt.h"
#include "apps/regrad/memory_argument.h"
#include "apps/regrad/progress.h"
#include "apps/regrad/text.h"
#include "apps/regrad/trainer.h"
#include "models/checkpoint.h"
#include "models/data/fashion_mnist.h"
#include "regrad/version.h"

namespace regrad::app {
namespace {

using Json = nlohmann::ordered_json;

/// A file of one JSON object a line, each on the disk's way as soon as it is written.
class JsonLog {
 public:
  explicit JsonLog(const std::filesystem::path& file) : stream_(file) {
    if (!stream_) {
      throw std::filesystem::filesystem_error("cannot write the log", file, std::make_error_code(std::errc::io_error));
    }
    stream_.exceptions(std::ios::failbit | std::ios::badbit);  // a full disk is an error
  }

  void write(const Json& record) { stream_ << record.dump() << std::endl; }

 private:
  std::ofstream stream_;
};

int64_t total_steps(const TrainOptions& options, const models::Shuffle& shuffle) {
  return options.epochs ? *options.epochs * shuffle.batches_per_epoch() : options.steps;
}

Json start_record(const TrainOptions& options, int64_t steps, const models::FashionMnist& data) {
  return {{"event", "start"},
          {"regrad", REGRAD_VERSION},
          {"torch", TORCH_VERSION},
          {"memory", memory_argument(options.memory)},
          {"batch", options.batch},
          {"steps", steps},
          {"learning_rate", options.learning_rate},
          {"seed", options.seed},
          {"threads", options.threads},
          {"data", options.data.string()},
          {"train_images", data.train.size()},
          {"test_images", data.test.size()}};
}

/// Trains until done or interrupted. Returns the number of steps that were made.
int64_t run_steps(Trainer& trainer, const models::FashionMnist& data, models::Shuffle& shuffle,
                  const TrainOptions& options, int64_t steps, JsonLog& log) {
  Progress progress("train", steps);
  for (int64_t step = 0; step < steps; ++step) {
    if (InterruptGuard::requested()) return step;
    const torch::Tensor batch = shuffle.next();
    const double rate = scheduled_rate(step, steps, options.learning_rate);
    const StepFigures figures = trainer.step(data.normalised(data.train.images.index_select(0, batch)),
                                             data.train.labels.index_select(0, batch), rate);
    const double images_per_second = static_cast<double>(options.batch) / figures.seconds;
    log.write({{"event", "step"},
               {"step", step + 1},
               {"learning_rate", rate},
               {"loss", figures.loss},
               {"accuracy", figures.accuracy},
               {"seconds", figures.seconds},
               {"images_per_second", images_per_second},
               {"peak_bytes", figures.peak_bytes}});
    progress.update(step + 1, fmt::format("loss {:.3f}  acc {:.0f} %  {:.0f} images/s  {} activations", figures.loss,
                                          100 * figures.accuracy, images_per_second, format_bytes(figures.peak_bytes)));
  }
  return steps;
}

/// The share of the test images that the network classifies rightly, or nothing when interrupted.
std::optional<double> test_accuracy(Trainer& trainer, const models::FashionMnist& data) {
  constexpr int64_t batch = 200;
  const int64_t total = data.test.size();
  int64_t correct = 0;
  Progress progress("test", total);
  for (int64_t done = 0; done < total;) {
    if (InterruptGuard::requested()) return std::nullopt;
    const int64_t count = std::min(batch, total - done);
    correct += trainer.count_correct(data.normalised(data.test.images.narrow(0, done, count)),
                                     data.test.labels.narrow(0, done, count));
    done += count;
    progress.update(done,
                    fmt::format("accuracy {:.1f} %", 100 * static_cast<double>(correct) / static_cast<double>(done)));
  }
  return static_cast<double>(correct) / static_cast<double>(total);
}

struct StrategyCost {
  Memory memory;
  double step_seconds;
  int64_t peak_bytes;
};

/// What a step takes under the run's own strategy, store and recompute: the second step of a new network for each, on
/// the same batch. The trained network has no part in it. Nothing when interrupted.
std::optional<std::vector<StrategyCost>> compare_strategies(const TrainOptions& options,
                                                            const models::FashionMnist& data) {
  std::vector<Memory> strategies{options.memory};
  for (const Memory& other : {Memory::store(), Memory::recompute()}) {
    if (other != options.memory) strategies.push_back(other);
  }
  const torch::Tensor images = data.normalised(data.train.images.narrow(0, 0, options.batch));
  const torch::Tensor labels = data.train.labels.narrow(0, 0, options.batch);
  std::vector<StrategyCost> costs;
  for (const Memory& memory : strategies) {
    if (InterruptGuard::requested()) return std::nullopt;
    Trainer trainer(memory);
    trainer.step(images, labels, /*learning_rate=*/0);
    const StepFigures figures = trainer.step(images, labels, /*learning_rate=*/0);
    costs.push_back({.memory = memory, .step_seconds = figures.seconds, .peak_bytes = figures.peak_bytes});
  }
  return costs;
}

void print_results(const std::vector<StrategyCost>& costs, double accuracy, const TrainOptions& options) {
  std::vector<std::vector<std::string>> rows{{"memory", "time per step", "peak memory", "test accuracy"}};
  for (const StrategyCost& cost : costs) {
    rows.push_back({memory_argument(cost.memory), format_seconds(cost.step_seconds), format_bytes(cost.peak_bytes),
                    cost.memory == options.memory ? fmt::format("{:.1f} %", 100 * accuracy) : "-"});
  }
  fmt::print("\n{}\nOne step each with batch {} after a warm-up step; peak memory is above the step's start.\n",
             format_table(rows), options.batch);
  fmt::print("test accuracy {:.1f} %\n", 100 * accuracy);
}

Json result_record(const std::vector<StrategyCost>& costs, double accuracy) {
  Json strategies = Json::array();
  for (const StrategyCost& cost : costs) {
    strategies.push_back({{"memory", memory_argument(cost.memory)},
                          {"step_seconds", cost.step_seconds},
                          {"peak_bytes", cost.peak_bytes}});
  }
  return {{"event", "result"}, {"test_accuracy", accuracy}, {"strategies", strategies}};
}

int say_interrupted(JsonLog& log, int64_t steps_made, int64_t steps, const std::filesystem::path& checkpoint) {
  log.write({{"event", "interrupted"}, {"steps", steps_made}});
  spdlog::warn("interrupted after step {} of {}; the network as it is then is in {}", steps_made, steps,
               checkpoint.string());
  return interrupted_exit_code;
}

}  // namespace

int train(const TrainOptions& options) {
  const models::FashionMnist data = models::read_fashion_mnist(options.data);
  if (options.batch > data.train.size()) {
    throw UsageError(fmt::format("--batch is {}, but {} holds {} training images", options.batch, options.data.string(),
                                 data.train.size()));
  }
  std::filesystem::create_directories(options.output);
  JsonLog log(options.output / "log.jsonl");
  const std::filesystem::path checkpoint = options.output / "checkpoint.pt";

  const InterruptGuard interrupt_guard;
  at::set_num_threads(options.threads);
  torch::manual_seed(options.seed);
  models::Shuffle shuffle(data.train.size(), options.batch, options.seed);
  const int64_t steps = total_steps(options, shuffle);
  Trainer trainer(options.memory);
  spdlog::info("RevNet-38 on {} images, memory {}, batch {}, {} steps, {} threads", data.train.size(),
               memory_argument(options.memory), options.batch, steps, options.threads);
  log.write(start_record(options, steps, data));

  const int64_t steps_made = run_steps(trainer, data, shuffle, options, steps, log);
  models::save_checkpoint(checkpoint, *trainer.net(), trainer.optimizer());
  if (steps_made < steps) return say_interrupted(log, steps_made, steps, checkpoint);
  spdlog::info("checkpoint written to {}", checkpoint.string());

  const std::optional<double> accuracy = test_accuracy(trainer, data);
  if (!accuracy) return say_interrupted(log, steps_made, steps, checkpoint);
  const auto costs = compare_strategies(options, data);
  if (!costs) return say_interrupted(log, steps_made, steps, checkpoint);
  log.write(result_record(*costs, *accuracy));
  print_results(*costs, *accuracy, options);
  return 0;
}

}  // namespace regrad::app
