#include "apps/regrad/bench_command.h"

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "apps/regrad/bench.h"
#include "apps/regrad/memory_argument.h"
#include "apps/regrad/workloads.h"

namespace regrad::app {

namespace {

/// "conv 16, transformer 8, ..."
std::string default_batches() {
  std::string text;
  for (const std::string& name : workload_names()) {
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(default_batch(name));
  }
  return text;
}

}  // namespace

void add_bench_command(CLI::App& app, Command& command) {
  const auto options = std::make_shared<BenchOptions>();
  const auto memory = std::make_shared<std::vector<std::string>>();
  for (const Memory& strategy : options->memory) memory->push_back(memory_argument(strategy));
  const CLI::Range positive(int64_t{1}, std::numeric_limits<int64_t>::max());

  CLI::App* bench_app = app.add_subcommand(
      "bench", "Measure the time and the peak memory of training steps against the same network without regrad");
  bench_app->add_option("--workload", options->workloads, "Comma list of networks")
      ->delimiter(',')
      ->check(CLI::IsMember(workload_names()))
      ->capture_default_str();
  bench_app->add_option("--layers", options->layers, "Comma list of depths")
      ->delimiter(',')
      ->check(positive)
      ->capture_default_str();
  bench_app->add_option("--memory", *memory, "Comma list of store, reverse, recompute[=segment]")
      ->delimiter(',')
      ->check(memory_validator())
      ->capture_default_str();
  bench_app->option_defaults()->take_last();
  bench_app->add_option("--batch", options->batch, "Default: " + default_batches())->check(positive);
  bench_app->add_option("--threads", options->threads, "Of Torch")->check(CLI::Range(1, 1024))->capture_default_str();
  bench_app
      ->add_option("--rounds", options->rounds,
                   "Timed steps of each; the ratio is the median of the ratios within a round")
      ->check(positive)
      ->capture_default_str();
  bench_app->add_flag("--json", options->json, "Print a JSON array instead of a table");
  bench_app->add_flag("--keep-pages", options->keep_pages,
                      "Have the C library keep freed memory: plain then need not touch fresh pages in each step");
  bench_app->callback([=, &command] {
    options->memory.clear();
    for (const std::string& strategy : *memory) options->memory.push_back(parse_memory(strategy));
    command = [options] { return bench(*options); };
  });
}

}  // namespace regrad::app
