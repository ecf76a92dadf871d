#include "models/data/idx.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <limits>
#include <memory>
#include <sstream>
#include <vector>

#include <c10/util/StringUtil.h>
#include <zlib.h>

namespace regrad::models {
namespace {

constexpr uint8_t unsigned_byte = 8;

/// A file of bytes; zlib passes through what is not compressed.
class ByteReader {
 public:
  explicit ByteReader(const std::filesystem::path& path) : path_(path) {
    if (std::filesystem::is_directory(path)) {
      throw DataError(DataErrorKind::missing, path, "is a folder; needed: a file");
    }
    errno = 0;
    file_.reset(gzopen(path.c_str(), "rb"));
    if (!file_) {
      throw DataError(DataErrorKind::missing, path, c10::str("cannot be opened: ", std::strerror(errno)));
    }
  }

  /// Up to `count` bytes; fewer only where the file ends.
  size_t read(uint8_t* to, size_t count) {
    size_t done = 0;
    while (done < count) {
      const auto wanted = static_cast<unsigned>(std::min<size_t>(count - done, std::numeric_limits<int>::max()));
      const int got = gzread(file_.get(), to + done, wanted);
      int status = Z_OK;
      const char* message = gzerror(file_.get(), &status);
      if (status == Z_BUF_ERROR) {
        throw DataError(DataErrorKind::truncated, path_, "the compressed data end too early; needed: a whole file");
      }
      if (got < 0) {
        throw DataError(DataErrorKind::unreadable, path_,
                        c10::str("cannot be read: ", status == Z_ERRNO ? std::strerror(errno) : message));
      }
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    return done;
  }

 private:
  struct Close {
    void operator()(gzFile file) const { gzclose(file); }
  };

  std::filesystem::path path_;
  std::unique_ptr<gzFile_s, Close> file_;
};

std::string hexadecimal(const std::vector<uint8_t>& bytes) {
  std::ostringstream text;
  for (const uint8_t byte : bytes) {
    text << (text.tellp() > 0 ? " " : "") << std::hex << std::setw(2) << std::setfill('0') << int{byte};
  }
  return text.str();
}

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

std::vector<int64_t> read_sizes(ByteReader& reader, const std::filesystem::path& file, int64_t axes) {
  const auto truncated = [&](size_t found, int64_t needed) {
    return DataError(DataErrorKind::truncated, file, c10::str("holds ", found, " bytes; its header needs ", needed));
  };
  const int64_t header_bytes = 4 + 4 * axes;
  std::vector<uint8_t> magic(4);
  if (const size_t found = reader.read(magic.data(), magic.size()); found < magic.size()) {
    throw truncated(found, header_bytes);
  }
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != unsigned_byte || magic[3] != axes) {
    throw DataError(DataErrorKind::wrong_magic, file,
                    c10::str("begins with the bytes ", hexadecimal(magic),
                             "; needed: ", hexadecimal({0, 0, unsigned_byte, static_cast<uint8_t>(axes)}),
                             ", an IDX file of unsigned bytes with ", axes, " axes"));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(4 * axes));
  if (const size_t found = reader.read(bytes.data(), bytes.size()); found < bytes.size()) {
    throw truncated(magic.size() + found, header_bytes);
  }
  std::vector<int64_t> sizes;
  for (size_t at = 0; at < bytes.size(); at += 4) sizes.push_back(big_endian(bytes.data() + at));
  return sizes;
}

}  // namespace

DataError::DataError(DataErrorKind kind, const std::filesystem::path& file, const std::string& problem)
    : std::runtime_error(file.string() + ": " + problem), kind_(kind) {}

torch::Tensor read_idx(const std::filesystem::path& file, int64_t axes) {
  constexpr size_t chunk = size_t{1} << 20;

  ByteReader reader(file);
  const std::vector<int64_t> sizes = read_sizes(reader, file, axes);
  const std::string sizes_text = c10::str(c10::IntArrayRef(sizes));
  size_t announced = 1;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(announced, static_cast<size_t>(size), &announced)) {
      throw DataError(DataErrorKind::truncated, file,
                      c10::str("announces ", sizes_text, " values, more than any file holds"));
    }
  }

  // The header is not to be trusted with an allocation: the vector grows with what the file has.
  std::vector<uint8_t> bytes;
  while (bytes.size() < announced) {
    const size_t before = bytes.size();
    bytes.resize(before + std::min(chunk, announced - before));
    const size_t got = reader.read(bytes.data() + before, bytes.size() - before);
    if (before + got < bytes.size()) {
      throw DataError(
          DataErrorKind::truncated, file,
          c10::str("holds ", before + got, " values; its header announces ", sizes_text, ", which is ", announced));
    }
  }
  // Reading on to the end also lets zlib compare its checksum.
  uint8_t extra = 0;
  if (reader.read(&extra, 1) != 0) {
    throw DataError(DataErrorKind::trailing_bytes, file,
                    c10::str("goes on after the ", announced, " values that its header announces"));
  }
  return torch::from_blob(bytes.data(), sizes, torch::kUInt8).clone();
}

}  // namespace regrad::models
