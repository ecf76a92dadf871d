#pragma once

#include <vector>

namespace torch::nn {
class Module;
}

namespace regrad::detail {

/// Adds the training mode of `module`, then of all modules below it, parents first.
void append_training_modes(torch::nn::Module& module, std::vector<bool>& modes);

/// Sets modes in that order, and returns where those of the next module begin.
std::vector<bool>::const_iterator set_training_modes(torch::nn::Module& module,
                                                     std::vector<bool>::const_iterator modes);

/// For two modules of the same structure.
void copy_training_modes(const torch::nn::Module& from, torch::nn::Module& to);

}  // namespace regrad::detail
