#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>
#include <zlib.h>

#include "models/data/fashion_mnist.h"
#include "models/data/idx.h"

namespace {

namespace fs = std::filesystem;
using regrad::models::DataError;
using regrad::models::DataErrorKind;

/// A folder that goes when the test ends.
class Data : public testing::Test {
 protected:
  Data() {
    std::string name = (fs::temp_directory_path() / "regrad_data_XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~Data() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }

  fs::path write_compressed(const std::string& name, const std::string& bytes) const {
    const fs::path path = folder_ / name;
    const gzFile file = gzopen(path.c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return path;
  }

  fs::path folder_;
};

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string idx(const std::vector<uint32_t>& sizes, const std::string& values) {
  std::string bytes{0, 0, 8, static_cast<char>(sizes.size())};
  for (const uint32_t size : sizes) bytes += big_endian(size);
  return bytes + values;
}

std::string counting(size_t count) {
  std::string values;
  for (size_t i = 0; i < count; ++i) values += static_cast<char>(i % 251);
  return values;
}

template <class F>
void expect_data_error(DataErrorKind kind, const std::vector<std::string>& words, F&& run) {
  try {
    run();
    ADD_FAILURE() << "no error";
  } catch (const DataError& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const auto& word : words) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST_F(Data, IdxReadsPlainAndCompressedFiles) {
  const std::string bytes = idx({2, 3, 5}, counting(30));
  const torch::Tensor wanted = torch::arange(30).to(torch::kUInt8).view({2, 3, 5});
  EXPECT_TRUE(torch::equal(regrad::models::read_idx(write("plain", bytes), 3), wanted));
  EXPECT_TRUE(torch::equal(regrad::models::read_idx(write_compressed("compressed.gz", bytes), 3), wanted));
}

TEST_F(Data, IdxReadsMoreThanOneChunk) {
  const size_t size = 3'000'000;
  const torch::Tensor values = regrad::models::read_idx(write_compressed("large.gz", idx({size}, counting(size))), 1);
  EXPECT_TRUE(torch::equal(values, torch::arange(static_cast<int64_t>(size)).remainder(251).to(torch::kUInt8)));
}

TEST_F(Data, IdxMayBeEmpty) {
  EXPECT_EQ(regrad::models::read_idx(write("empty", idx({0, 28, 28}, "")), 3).sizes(),
            (std::vector<int64_t>{0, 28, 28}));
}

TEST_F(Data, IdxRefusesWhatIsNoFile) {
  expect_data_error(DataErrorKind::missing, {"absent", "No such file"},
                    [&] { regrad::models::read_idx(folder_ / "absent", 1); });
  expect_data_error(DataErrorKind::missing, {folder_.string(), "folder"},
                    [&] { regrad::models::read_idx(folder_, 1); });
}

TEST_F(Data, IdxRefusesAWrongMagic) {
  expect_data_error(DataErrorKind::wrong_magic, {"text", "68 65 6c 6c", "00 00 08 03"},
                    [&] { regrad::models::read_idx(write("text", "hello, world"), 3); });
  const fs::path floats = write("floats", std::string{0, 0, 0x0d, 1} + big_endian(1) + "1234");
  expect_data_error(DataErrorKind::wrong_magic, {"00 00 0d 01"}, [&] { regrad::models::read_idx(floats, 1); });
  const fs::path labels = write("labels", idx({4}, "abcd"));
  expect_data_error(DataErrorKind::wrong_magic, {"00 00 08 01", "00 00 08 03"},
                    [&] { regrad::models::read_idx(labels, 3); });
}

TEST_F(Data, IdxRefusesATruncatedFile) {
  expect_data_error(DataErrorKind::truncated, {"0 bytes", "16"},
                    [&] { regrad::models::read_idx(write("nothing", ""), 3); });
  expect_data_error(DataErrorKind::truncated, {"10 bytes", "16"}, [&] {
    regrad::models::read_idx(write("header", idx({2, 3, 5}, "").substr(0, 10)), 3);
  });
  expect_data_error(DataErrorKind::truncated, {"29 values", "[2, 3, 5]", "30"}, [&] {
    regrad::models::read_idx(write("short", idx({2, 3, 5}, counting(29))), 3);
  });
}

TEST_F(Data, IdxRefusesATruncatedCompressedFile) {
  const fs::path whole = write_compressed("whole.gz", idx({1000}, counting(1000)));
  for (const uintmax_t missing : {1, 8, 100}) {  // within the trailer, the trailer, and within the data
    SCOPED_TRACE(missing);
    const fs::path cut = folder_ / "cut.gz";
    fs::copy_file(whole, cut, fs::copy_options::overwrite_existing);
    fs::resize_file(cut, fs::file_size(whole) - missing);
    expect_data_error(DataErrorKind::truncated, {"cut.gz"}, [&] { regrad::models::read_idx(cut, 1); });
  }
}

TEST_F(Data, IdxRefusesADamagedCompressedFile) {
  const fs::path file = write_compressed("damaged.gz", idx({1000}, counting(1000)));
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(static_cast<std::streamoff>(fs::file_size(file)) - 8);  // the checksum
  stream << "????";
  stream.close();
  expect_data_error(DataErrorKind::unreadable, {"damaged.gz"}, [&] { regrad::models::read_idx(file, 1); });
}

TEST_F(Data, IdxRefusesTrailingBytes) {
  expect_data_error(DataErrorKind::trailing_bytes, {"long", "30"}, [&] {
    regrad::models::read_idx(write("long", idx({2, 3, 5}, counting(31))), 3);
  });
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * int64_t{1024};
}

TEST_F(Data, IdxAllocatesNoMoreThanTheFileHolds) {
  const uint32_t most = 0xffffffff;
  const int64_t before = peak_resident_bytes();
  expect_data_error(DataErrorKind::truncated, {"3 values", "4294967295"},
                    [&] { regrad::models::read_idx(write("one", idx({most}, "abc")), 1); });
  EXPECT_LT(peak_resident_bytes() - before, int64_t{64} << 20);
  // More than 64 bits can count.
  expect_data_error(DataErrorKind::truncated, {"more than any file"}, [&] {
    regrad::models::read_idx(write("three", idx({most, most, most}, "abc")), 3);
  });
}

/// Tests that start from a sound folder of tiny parts and then break something.
class FashionMnistData : public Data {
 protected:
  FashionMnistData() {
    write_compressed("train-images-idx3-ubyte.gz", idx({3, 28, 28}, counting(3 * 784)));
    write_compressed("train-labels-idx1-ubyte.gz", idx({3}, {0, 9, 4}));
    write("t10k-images-idx3-ubyte", idx({2, 28, 28}, std::string(2 * 784, '\x33')));
    write("t10k-labels-idx1-ubyte", idx({2}, {1, 2}));
  }

  void expect_refused(DataErrorKind kind, const std::vector<std::string>& words) const {
    expect_data_error(kind, words, [&] { regrad::models::read_fashion_mnist(folder_); });
  }
};

TEST_F(FashionMnistData, ReadsAllFourFiles) {
  const auto data = regrad::models::read_fashion_mnist(folder_);
  EXPECT_EQ(data.train.size(), 3);
  EXPECT_EQ(data.test.size(), 2);
  EXPECT_TRUE(torch::equal(data.train.labels, torch::tensor({0, 9, 4}, torch::kInt64)));
  EXPECT_TRUE(torch::equal(data.test.images, torch::full({2, 28, 28}, 0x33, torch::kUInt8)));
  const torch::Tensor pixels = data.train.images.to(torch::kFloat64) / 255;
  EXPECT_NEAR(data.mean, pixels.mean().item<double>(), 1e-12);
  EXPECT_NEAR(data.std, pixels.std(/*unbiased=*/false).item<double>(), 1e-12);
}

TEST_F(FashionMnistData, NormalisesByTheTrainingImages) {
  const auto data = regrad::models::read_fashion_mnist(folder_);
  const torch::Tensor images = data.normalised(data.train.images);
  ASSERT_EQ(images.sizes(), (std::vector<int64_t>{3, 1, 32, 32}));
  EXPECT_EQ(images.scalar_type(), torch::kFloat32);
  using torch::indexing::Slice;
  const torch::Tensor inner = images.index({Slice(), 0, Slice(2, 30), Slice(2, 30)});
  EXPECT_NEAR(inner.mean().item<double>(), 0, 1e-6);
  EXPECT_NEAR(inner.std(/*unbiased=*/false).item<double>(), 1, 1e-6);
  const float black = static_cast<float>(-data.mean / data.std);
  EXPECT_NEAR(images.index({1, 0, 1, 31}).item<float>(), black, 1e-6);
  EXPECT_NEAR(images.index({0, 0, 2, 3}).item<float>(), (1 / 255.0 - data.mean) / data.std, 1e-6);
}

TEST_F(FashionMnistData, RefusesAMissingFile) {
  fs::remove(folder_ / "t10k-labels-idx1-ubyte");
  expect_refused(DataErrorKind::missing, {"t10k-labels-idx1-ubyte", "dataset-fashion-mnist"});
}

TEST_F(FashionMnistData, RefusesCountsThatDiffer) {
  write_compressed("train-labels-idx1-ubyte.gz", idx({4}, {0, 9, 4, 1}));
  expect_refused(DataErrorKind::mismatch, {"train-labels", "4 labels", "3 images", "train-images"});
}

TEST_F(FashionMnistData, RefusesOtherImageSizes) {
  write("t10k-images-idx3-ubyte", idx({2, 28, 27}, counting(2 * 28 * 27)));
  expect_refused(DataErrorKind::mismatch, {"t10k-images", "28 x 27", "28 x 28"});
}

TEST_F(FashionMnistData, RefusesLabelsOutOfRange) {
  write_compressed("train-labels-idx1-ubyte.gz", idx({3}, {0, 10, 4}));
  expect_refused(DataErrorKind::mismatch, {"train-labels", "label 10", "below 10"});
}

TEST_F(FashionMnistData, RefusesEmptyAndUniformImages) {
  write_compressed("train-images-idx3-ubyte.gz", idx({3, 28, 28}, std::string(3 * 784, '\x07')));
  expect_refused(DataErrorKind::mismatch, {"train-images", "equal"});
  write_compressed("train-images-idx3-ubyte.gz", idx({0, 28, 28}, ""));
  write_compressed("train-labels-idx1-ubyte.gz", idx({0}, ""));
  expect_refused(DataErrorKind::mismatch, {"train-images", "no images"});
}

std::vector<int64_t> epoch(regrad::models::Shuffle& shuffle) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < shuffle.batches_per_epoch(); ++i) {
    const torch::Tensor batch = shuffle.next();
    indices.insert(indices.end(), batch.data_ptr<int64_t>(), batch.data_ptr<int64_t>() + batch.numel());
  }
  return indices;
}

TEST(Shuffle, DependsOnTheSeedAlone) {
  regrad::models::Shuffle first(1000, 10, 7);
  torch::manual_seed(1);
  regrad::models::Shuffle again(1000, 10, 7);
  regrad::models::Shuffle other(1000, 10, 8);
  const auto order = epoch(first);
  EXPECT_EQ(epoch(again), order);
  EXPECT_NE(epoch(other), order);
  EXPECT_NE(epoch(first), order);
}

TEST(Shuffle, AnEpochVisitsEachImageAtMostOnce) {
  regrad::models::Shuffle shuffle(103, 10, 7);
  EXPECT_EQ(shuffle.batches_per_epoch(), 10);
  for (int i = 0; i < 3; ++i) {
    const auto indices = epoch(shuffle);
    EXPECT_EQ(std::set<int64_t>(indices.begin(), indices.end()).size(), 100);
  }
}

TEST(Shuffle, RefusesABatchLargerThanTheSet) { EXPECT_THROW(regrad::models::Shuffle(9, 10, 7), c10::Error); }

}  // namespace
