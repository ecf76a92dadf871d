#include "models/checkpoint.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <torch/serialize/archive.h>
#include <unistd.h>

namespace regrad::models {
namespace {

/// Waits until the file's bytes are on the disk: a rename may otherwise get there before them.
void flush_to_disk(const std::filesystem::path& file) {
  const int descriptor = open(file.c_str(), O_RDONLY | O_CLOEXEC);
  const bool flushed = descriptor >= 0 && fsync(descriptor) == 0;
  const int error = errno;
  if (descriptor >= 0) close(descriptor);
  if (!flushed) {
    throw std::filesystem::filesystem_error("cannot write the checkpoint", file,
                                            std::error_code(error, std::generic_category()));
  }
}

}  // namespace

void save_checkpoint(const std::filesystem::path& file, const torch::nn::Module& module,
                     const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive model_archive;
  module.save(model_archive);
  torch::serialize::OutputArchive optimizer_archive;
  optimizer.save(optimizer_archive);
  torch::serialize::OutputArchive archive;
  archive.write("model", model_archive);
  archive.write("optimizer", optimizer_archive);

  const std::filesystem::path partial = file.string() + ".partial";
  archive.save_to(partial.string());
  flush_to_disk(partial);
  std::filesystem::rename(partial, file);
}

}  // namespace regrad::models
