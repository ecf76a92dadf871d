// Uses a header and a function of regrad, headers from both of Torch's include folders, and an error that crosses the
// library's boundary.

#include <cstdio>
#include <cstdlib>
#include <memory>

#include <ATen/ops/empty.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

#include <regrad/error.h>
#include <regrad/memory_meter.h>
#include <regrad/version.h>

namespace {

bool meter_counts() {
  const regrad::MemoryMeter meter;
  const at::Tensor tensor = at::empty({100}, at::kFloat);
  return meter.current_bytes() == 400;
}

bool error_is_caught_by_its_type() {
  const c10::DebugInfoGuard other_listener(c10::DebugInfoKind::PROFILER_STATE, std::make_shared<c10::DebugInfoBase>());
  try {
    const regrad::MemoryMeter meter;
  } catch (const regrad::Error& error) {
    return error.kind() == regrad::ErrorKind::meter_unavailable;
  }
  return false;
}

}  // namespace

int main() {
  std::printf("regrad %s on Torch %s\n", REGRAD_VERSION, TORCH_VERSION);
  return meter_counts() && error_is_caught_by_its_type() ? EXIT_SUCCESS : EXIT_FAILURE;
}
