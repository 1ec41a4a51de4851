// SPDX-License-Identifier: Apache-2.0
// Against a library of the tests' own in the place of NVIDIA's.
#include "pool_client/gpu_energy.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "fake_nvml.h"

namespace penstock::pool_client {
namespace {

class GpuEnergyTest : public testing::Test {
 protected:
  GpuEnergyTest() { nvml_.use(5000); }

  static std::string refusal(const std::string& uuid, const std::string& library = PENSTOCK_FAKE_NVML) {
    const auto opened = GpuEnergy::open(uuid, library);
    EXPECT_FALSE(opened);
    if (opened) return {};
    EXPECT_EQ(opened.error().code, Errc::kUnsupported);
    return opened.error().message;
  }

  FakeNvml nvml_{PENSTOCK_FAKE_NVML};
};

TEST_F(GpuEnergyTest, IsReadInMicrojoules) {
  const auto energy = GpuEnergy::open(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  ASSERT_TRUE(energy) << energy.error().message;
  EXPECT_EQ(energy.value()->read().value(), 5'000'000u);
  nvml_.use(5123);
  EXPECT_EQ(energy.value()->read().value(), 5'123'000u);
}

TEST_F(GpuEnergyTest, MachineWithoutTheLibraryDoesNotTell) {
  EXPECT_NE(refusal(kFakeGpuUuid, "libpenstock-has-no-such.so.1").find("cannot open shared object file"),
            std::string::npos);
}

TEST_F(GpuEnergyTest, LibraryWithoutTheFunctionsIsTooOld) {
  EXPECT_NE(refusal(kFakeGpuUuid, "libc.so.6").find("is too old"), std::string::npos);
}

TEST_F(GpuEnergyTest, GpuThatIsNotThereIsNamed) {
  EXPECT_NE(refusal("GPU-0").find("there is no GPU GPU-0"), std::string::npos);
}

TEST_F(GpuEnergyTest, GpuThatDoesNotCountIsUnknownAndNotZero) {
  nvml_.use(std::nullopt);
  EXPECT_NE(refusal(kFakeGpuUuid).find("failed with 3"), std::string::npos);
}

}  // namespace
}  // namespace penstock::pool_client
