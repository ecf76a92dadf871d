#include <exception>
#include <memory>
#include <string>

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <torch/version.h>
#include <CLI/CLI.hpp>

#include "apps/regrad/bench_command.h"
#include "apps/regrad/error.h"
#include "apps/regrad/train_command.h"
#include "regrad/version.h"

namespace {

constexpr int failure = 1;
constexpr int wrong_usage = 2;

/// Runs the chosen command. Failures become a message and an exit code.
int run(const regrad::app::Command& command) {
  try {
    return command();
  } catch (const regrad::app::UsageError& error) {
    spdlog::error(error.what());
    return wrong_usage;
  } catch (const c10::Error& error) {
    spdlog::error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    spdlog::error(error.what());
  }
  return failure;
}

}  // namespace

int main(int argc, char** argv) {
  // Results go to stdout and everything else to stderr.
  spdlog::set_default_logger(spdlog::stderr_color_mt("regrad"));
  spdlog::set_pattern("%n: %^%l%$: %v");

  CLI::App app("Trains deep networks in memory that does not grow with depth.", "regrad");
  app.set_version_flag("--version", fmt::format("regrad {}\nTorch {}", REGRAD_VERSION, TORCH_VERSION));
  app.require_subcommand(1);
  regrad::app::Command command;
  regrad::app::add_train_command(app, command);
  regrad::app::add_bench_command(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : wrong_usage;
  }
  return run(command);
}
