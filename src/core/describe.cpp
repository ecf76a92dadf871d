#include "core/describe.h"

#include <sstream>

namespace regrad::detail {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

}  // namespace regrad::detail
