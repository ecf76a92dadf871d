#include "core/exchange_claims.h"

#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/describe.h"
#include "core/memory_of.h"
#include "core/torch_compat.h"
#include "regrad/error.h"

namespace regrad::detail {

namespace {

using c10::ThreadLocalDebugInfo;

/// Stands for an outermost second run and those nested in it. Torch's debug info is the one thread-local setting that
/// its engine takes along to other threads and that can hold something of ours.
struct Nesting : c10::DebugInfoBase {};
constexpr std::string_view kNestingName = "REGRAD_NESTING";
constexpr auto kNesting = own_debug_info_kind<c10::DebugInfoKind>(&kNestingName);

struct Claim {
  const c10::DebugInfoBase* owner = nullptr;
  int count = 0;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, Claim> claims;
};

/// Never destroyed: passes may end after static destructors have begun.
Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

[[noreturn]] void refuse(const at::Tensor& tensor, const std::string& function_name) {
  throw_error(ErrorKind::unsupported,
              function_name + " uses its buffer " + describe(tensor) +
                  " while a backward pass in another thread runs a function again that changes this buffer. Run one "
                  "after the other, or give each thread a module of its own.");
}

}  // namespace

ExchangeClaims::~ExchangeClaims() {
  if (claimed_.empty()) return;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const void* memory : claimed_) {
    const auto found = registry().claims.find(memory);
    if (--found->second.count == 0) registry().claims.erase(found);
  }
}

void ExchangeClaims::add(const at::Tensor& tensor, const std::string& function_name) {
  if (ThreadLocalDebugInfo::get(kNesting) == nullptr) nested_.emplace(kNesting, std::make_shared<Nesting>());
  const auto* owner = ThreadLocalDebugInfo::get(kNesting);
  claimed_.reserve(claimed_.size() + 1);
  bool is_free = true;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    Claim& claim = registry().claims[memory_of(tensor)];
    is_free = claim.count == 0 || claim.owner == owner;
    if (is_free) {
      claim.owner = owner;
      ++claim.count;
      claimed_.push_back(memory_of(tensor));
    }
  }
  if (!is_free) refuse(tensor, function_name);
}

void ExchangeClaims::check_free(const at::Tensor& tensor, const std::string& function_name) {
  bool is_free = true;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().claims.find(memory_of(tensor));
    is_free = found == registry().claims.end() || found->second.owner == ThreadLocalDebugInfo::get(kNesting);
  }
  if (!is_free) refuse(tensor, function_name);
}

}  // namespace regrad::detail
