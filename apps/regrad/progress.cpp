#include "apps/regrad/progress.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "apps/regrad/text.h"

namespace regrad::app {
namespace {

constexpr auto redraw_interval = std::chrono::milliseconds(100);
constexpr auto line_interval = std::chrono::seconds(10);

size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), on_terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (drawn_) std::fputc('\n', stderr);
}

void Progress::update(int64_t done, const std::string& details) {
  const auto now = Clock::now();
  const bool is_last = done == total_;
  if (!is_last && now - last_shown_ < (on_terminal_ ? Clock::duration(redraw_interval) : line_interval)) return;
  last_shown_ = now;
  if (on_terminal_) {
    draw_bar(done, details);
  } else {
    fmt::print(stderr, "{} {}\n", label_, figures(done, details));
  }
}

std::string Progress::time_left(int64_t done) const {
  const std::chrono::duration<double> elapsed = Clock::now() - start_;
  return format_duration(elapsed.count() / static_cast<double>(std::max<int64_t>(done, 1)) *
                         static_cast<double>(total_ - done));
}

std::string Progress::figures(int64_t done, const std::string& details) const {
  return fmt::format("{}/{}  {} left{}{}", done, total_, time_left(done), details.empty() ? "" : "  ", details);
}

void Progress::draw_bar(int64_t done, const std::string& details) {
  constexpr size_t narrowest_bar = 5;
  constexpr size_t widest_bar = 30;
  const std::string text = figures(done, details);
  const size_t width = terminal_width() - 1;  // a full line would wrap
  const size_t around_bar = label_.size() + text.size() + 4;
  const size_t bar = std::clamp(width - std::min(width, around_bar), narrowest_bar, widest_bar);
  const size_t filled = bar * static_cast<size_t>(done) / static_cast<size_t>(total_);
  const std::string line = fmt::format("{} [{:#<{}}{:.<{}}] {}", label_, "", filled, "", bar - filled, text);
  fmt::print(stderr, "\r{}\x1b[K", line.substr(0, width));
  std::fflush(stderr);
  drawn_ = true;
}

}  // namespace regrad::app
