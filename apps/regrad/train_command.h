#pragma once

#include <CLI/CLI.hpp>

#include "apps/regrad/command.h"

namespace regrad::app {

/// Adds the subcommand `train` and its options. When parsing meets it, `command` becomes the training run.
void add_train_command(CLI::App& app, Command& command);

}  // namespace regrad::app
