#include "apps/regrad/train_command.h"

#include <limits>
#include <memory>
#include <string>

#include <ATen/Parallel.h>

#include "apps/regrad/memory_argument.h"
#include "apps/regrad/train.h"

namespace regrad::app {

void add_train_command(CLI::App& app, Command& command) {
  const auto options = std::make_shared<TrainOptions>();
  const auto memory = std::make_shared<std::string>(memory_argument(options->memory));
  const auto epochs = std::make_shared<int64_t>(0);
  options->threads = at::get_num_threads();
  const CLI::Range positive(int64_t{1}, std::numeric_limits<int64_t>::max());

  CLI::App* train_app = app.add_subcommand("train", "Train RevNet-38 on Fashion-MNIST");
  train_app->option_defaults()->take_last();
  train_app->add_option("--memory", *memory, "How activations come back: store, reverse or recompute[=segment]")
      ->check(memory_validator())
      ->capture_default_str();
  train_app->add_option("--batch", options->batch, "Images per step")->check(positive)->capture_default_str();
  CLI::Option* steps_option =
      train_app->add_option("--steps", options->steps, "Training steps")->check(positive)->capture_default_str();
  CLI::Option* epochs_option =
      train_app->add_option("--epochs", *epochs, "Passes through the training images, instead of --steps")
          ->check(positive)
          ->excludes(steps_option);
  train_app->add_option("--learning-rate", options->learning_rate, "Highest learning rate of the schedule")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  train_app->add_option("--seed", options->seed, "Of weights and of the images' order")->capture_default_str();
  train_app->add_option("--threads", options->threads, "Of Torch")->check(CLI::Range(1, 1024))->capture_default_str();
  train_app->add_option("--data", options->data, "Folder of Fashion-MNIST's four files")->capture_default_str();
  train_app->add_option("--output", options->output, "Folder for log.jsonl and checkpoint.pt")->capture_default_str();
  train_app->callback([=, &command] {
    options->memory = parse_memory(*memory);
    if (epochs_option->count() > 0) options->epochs = *epochs;
    command = [options] { return train(*options); };
  });
}

}  // namespace regrad::app
