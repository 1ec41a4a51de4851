// SPDX-License-Identifier: Apache-2.0
// Against a library of the tests' own in the place of NVIDIA's.
#include "pool_client/job_meter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
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

using namespace std::chrono_literals;
using wire::ToTrainer;

class JobMeterTest : public testing::Test {
 protected:
  JobMeterTest() { nvml_.use(5000); }

  // The first reading that is as the test has it; the last one where that takes 30 s.
  wire::GpuMeter read_until(const std::function<bool(const wire::GpuMeter&)>& is_right) {
    const Instant end = clock_now() + 30s;
    wire::GpuMeter gpu = meter_->read_gpu();
    while (!is_right(gpu) && clock_now() < end) {
      std::this_thread::sleep_for(1ms);
      gpu = meter_->read_gpu();
    }
    return gpu;
  }
  static bool is_known(const wire::GpuMeter& gpu) { return gpu.has_energy(); }
  static bool is_unknown(const wire::GpuMeter& gpu) { return !gpu.has_energy(); }

  static wire::PoolAnswer message(ToTrainer::Kind kind, uint64_t cpu_ns) {
    wire::PoolAnswer answer;
    answer.message.kind = kind;
    answer.message.is_fresh = kind == ToTrainer::Kind::kWelcome;
    answer.meter.cpu_ns = cpu_ns;
    return answer;
  }

  FakeNvml nvml_{PENSTOCK_FAKE_NVML};
  std::optional<JobMeter> meter_{std::in_place};
};

TEST_F(JobMeterTest, EnergyCountsFromWhenTheLibraryHasStarted) {
  meter_->open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  EXPECT_EQ(read_until(is_known), (wire::GpuMeter{.begin_uj = 5'000'000, .now_uj = 5'000'000}));
  nvml_.use(5123);
  const wire::GpuMeter later{.begin_uj = 5'000'000, .now_uj = 5'123'000};
  EXPECT_EQ(read_until([&](const wire::GpuMeter& gpu) { return gpu == later; }), later);
}

TEST_F(JobMeterTest, EnergyThatCannotBeReadOnceStaysUnknown) {
  meter_->open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  ASSERT_TRUE(read_until(is_known).has_energy());
  nvml_.use(std::nullopt);
  ASSERT_FALSE(read_until(is_unknown).has_energy());
  nvml_.use(5123);
  for (int count = 0; count < 3; ++count) EXPECT_FALSE(meter_->read_gpu().has_energy());
}

// A driver that hung held up every link of the trainer, and the end of the program.
TEST_F(JobMeterTest, DriverThatHangsHoldsUpNeitherReadingNorTheEnd) {
  meter_->open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  ASSERT_TRUE(read_until(is_known).has_energy());
  nvml_.hang(true);
  for (int count = 0; count < 3; ++count)
    EXPECT_EQ(meter_->read_gpu(), (wire::GpuMeter{.begin_uj = 5'000'000, .now_uj = 5'000'000}));
  meter_.reset();
}

// The program was ended by std::terminate.
TEST_F(JobMeterTest, DriverThatThrowsLeavesTheEnergyUnknown) {
  meter_->open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  ASSERT_TRUE(read_until(is_known).has_energy());
  nvml_.fail_by_throwing(true);
  EXPECT_EQ(read_until(is_unknown), wire::GpuMeter{});
}

TEST_F(JobMeterTest, WithoutGpuTheEnergyIsUnknown) { EXPECT_EQ(meter_->read_gpu(), wire::GpuMeter{}); }

TEST_F(JobMeterTest, OtherThreadsSeeWhatWorkersHaveSpent) {
  const Instant begin = clock_now();
  meter_->note_message(7, message(ToTrainer::Kind::kWelcome, 1'000), begin);
  meter_->note_message(7, message(ToTrainer::Kind::kPong, 4'000), begin + 1s);
  wire::PoolAnswer batch = message(ToTrainer::Kind::kAnswer, 4'000);
  batch.sample_count = 32;
  batch.payload_bytes = 100;
  meter_->note_batch(batch);
  meter_->note_parting(7, begin + 3s);
  const wire::JobCosts costs = meter_->costs();
  EXPECT_EQ(costs, meter_->totals());
  EXPECT_EQ(costs.sample_count, 32u);
  EXPECT_EQ(costs.cpu_ns, 3'000u);
}

}  // namespace
}  // namespace penstock::pool_client
