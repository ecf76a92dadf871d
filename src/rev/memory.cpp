#include "regrad/memory.h"

#include "regrad/error.h"

namespace regrad {

Memory Memory::store() { return Memory(Kind::store, 0); }

Memory Memory::reverse() { return Memory(Kind::reverse, 0); }

Memory Memory::recompute(int64_t segment) {
  if (segment < 1) {
    detail::throw_error(ErrorKind::invalid_argument, "Memory::recompute: a segment has " + std::to_string(segment) +
                                                         " layers; it must have at least 1.");
  }
  return Memory(Kind::recompute, segment);
}

std::string Memory::to_string() const {
  switch (kind_) {
    case Kind::store:
      return "store";
    case Kind::reverse:
      return "reverse";
    case Kind::recompute:
      break;
  }
  return "recompute(" + std::to_string(segment_) + ")";
}

}  // namespace regrad
