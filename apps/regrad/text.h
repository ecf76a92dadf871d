#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace regrad::app {

/// "512 B", "31.2 MiB".
std::string format_bytes(int64_t bytes);

/// "18.3 ms", "0.612 s".
std::string format_seconds(double seconds);

/// "2:05", "1:02:05": minutes and seconds, rounded.
std::string format_duration(double seconds);

/// Lines of aligned columns, the first row being the heading. The first column is aligned to the left, the others to
/// the right.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

}  // namespace regrad::app
