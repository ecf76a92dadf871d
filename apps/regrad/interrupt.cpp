#include "apps/regrad/interrupt.h"

#include <csignal>

namespace regrad::app {
namespace {

volatile std::sig_atomic_t interrupt_requested = 0;

void note_interrupt(int /*signal*/) { interrupt_requested = 1; }

}  // namespace

InterruptGuard::InterruptGuard() {
  struct sigaction action = {};
  action.sa_handler = note_interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  sigaction(SIGINT, &action, nullptr);
}

InterruptGuard::~InterruptGuard() { std::signal(SIGINT, SIG_DFL); }

bool InterruptGuard::requested() noexcept { return interrupt_requested != 0; }

}  // namespace regrad::app
