#pragma once

#include <CLI/CLI.hpp>

#include "apps/regrad/command.h"

namespace regrad::app {

/// Adds the subcommand `bench` and its options. When parsing meets it, `command` becomes the benchmark.
void add_bench_command(CLI::App& app, Command& command);

}  // namespace regrad::app
