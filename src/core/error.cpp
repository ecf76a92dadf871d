#include "regrad/error.h"

namespace regrad {

Error::Error(ErrorKind kind, const std::string& message) : c10::Error("regrad: " + message), kind_(kind) {}

namespace detail {

void throw_error(ErrorKind kind, const std::string& message) { throw Error(kind, message); }

}  // namespace detail
}  // namespace regrad
