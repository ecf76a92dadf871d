#pragma once

#include <string>

#include <CLI/CLI.hpp>

#include "regrad/memory.h"

namespace regrad::app {

/// The strategy that an argument names: "store", "reverse", "recompute" or "recompute=<segment>".
/// @throws CLI::ValidationError for anything else.
Memory parse_memory(const std::string& text);

/// The argument that names a strategy: the reverse of parse_memory.
std::string memory_argument(const Memory& memory);

/// Checks arguments for parse_memory.
CLI::Validator memory_validator();

}  // namespace regrad::app
