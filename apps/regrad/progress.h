#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace regrad::app {

/// Progress through a known number of steps, on stderr: a bar that is redrawn in place on a terminal, and elsewhere a
/// plain line now and then.
class Progress {
 public:
  /// label: what is going on, e.g. "train". total: the number of steps, at least 1.
  Progress(std::string label, int64_t total);

  /// Ends the bar's line.
  ~Progress();

  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// done: steps behind us. details: figures to show beside them, if any.
  void update(int64_t done, const std::string& details = {});

 private:
  using Clock = std::chrono::steady_clock;

  std::string time_left(int64_t done) const;
  std::string figures(int64_t done, const std::string& details) const;
  void draw_bar(int64_t done, const std::string& details);

  std::string label_;
  int64_t total_;
  bool on_terminal_;
  bool drawn_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_shown_{};
};

}  // namespace regrad::app
