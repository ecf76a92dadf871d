#include "apps/regrad/memory_argument.h"

#include <charconv>
#include <string_view>

namespace regrad::app {

Memory parse_memory(const std::string& text) {
  if (text == "store") return Memory::store();
  if (text == "reverse") return Memory::reverse();
  if (text == "recompute") return Memory::recompute();
  constexpr std::string_view prefix = "recompute=";
  if (text.starts_with(prefix)) {
    int64_t segment = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, segment);
    if (error == std::errc() && stop == end && segment >= 1) return Memory::recompute(segment);
  }
  throw CLI::ValidationError("'" + text +
                             "' is no memory strategy; needed: store, reverse, recompute or recompute=<layers per "
                             "segment, at least 1>");
}

std::string memory_argument(const Memory& memory) {
  switch (memory.kind()) {
    case Memory::Kind::store:
      return "store";
    case Memory::Kind::reverse:
      return "reverse";
    case Memory::Kind::recompute:
      return memory.segment() == 1 ? "recompute" : "recompute=" + std::to_string(memory.segment());
  }
  return memory.to_string();
}

CLI::Validator memory_validator() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        try {
          parse_memory(text);
          return {};
        } catch (const CLI::ValidationError& error) {
          return error.what();
        }
      },
      "STRATEGY");
}

}  // namespace regrad::app
