#pragma once

#include <filesystem>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

namespace regrad::models {

/// Writes the parameters and buffers of `module` and the state of `optimizer` to `file`, as the entries "model" and
/// "optimizer" of an archive that torch::serialize::InputArchive reads. The file is written under another name beside
/// it, then renamed: whenever the program dies, `file` is whole, or the one that was there before.
/// @throws c10::Error or std::filesystem::filesystem_error when it cannot be written.
void save_checkpoint(const std::filesystem::path& file, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer);

}  // namespace regrad::models
