#include <regrad/version.h>

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Version, TextIsMadeOfTheNumbers) {
  const std::string expected = std::to_string(REGRAD_VERSION_MAJOR) + "." + std::to_string(REGRAD_VERSION_MINOR) + "." +
                               std::to_string(REGRAD_VERSION_PATCH);
  EXPECT_EQ(REGRAD_VERSION, expected);
}

}  // namespace
