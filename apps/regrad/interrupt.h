#pragma once

namespace regrad::app {

/// While one lives, the first SIGINT (Ctrl-C) is noted instead of ending the program; a second one ends it.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();

  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  /// Whether SIGINT has come.
  static bool requested() noexcept;
};

/// What a program that SIGINT stopped returns, by the convention of shells.
constexpr int interrupted_exit_code = 130;

}  // namespace regrad::app
