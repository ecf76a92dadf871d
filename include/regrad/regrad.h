#pragma once

// Everything. Programs that use one part alone compile faster with its own header: recompute_grad.h needs no torch::nn.

#include "regrad/error.h"             // IWYU pragma: export
#include "regrad/memory.h"            // IWYU pragma: export
#include "regrad/memory_meter.h"      // IWYU pragma: export
#include "regrad/pass.h"              // IWYU pragma: export
#include "regrad/recompute.h"         // IWYU pragma: export
#include "regrad/recompute_grad.h"    // IWYU pragma: export
#include "regrad/residual.h"          // IWYU pragma: export
#include "regrad/rev_block.h"         // IWYU pragma: export
#include "regrad/version.h"           // IWYU pragma: export
#include "regrad/with_custom_grad.h"  // IWYU pragma: export
