// SPDX-License-Identifier: Apache-2.0
#include "loader/job_meter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "base/live_clock.h"
#include "fake_nvml.h"

namespace penstock::loader {
namespace {

using namespace std::chrono_literals;
using wire::ToTrainer;

class JobMeterTest : public testing::Test {
 protected:
  ~JobMeterTest() override { ::unsetenv("FAKE_NVML_MJ"); }

  // The first reading that is known; unknown where that takes 5 s.
  wire::GpuMeter read_when_open() {
    const Instant end = clock_now() + 5s;
    wire::GpuMeter gpu = meter_.read_gpu();
    while (!gpu.has_energy() && clock_now() < end) {
      std::this_thread::sleep_for(1ms);
      gpu = meter_.read_gpu();
    }
    return gpu;
  }

  static wire::PoolAnswer message(ToTrainer::Kind kind, uint64_t cpu_ns) {
    wire::PoolAnswer answer;
    answer.message.kind = kind;
    answer.message.is_fresh = kind == ToTrainer::Kind::kWelcome;
    answer.meter.cpu_ns = cpu_ns;
    return answer;
  }

  JobMeter meter_;
};

TEST_F(JobMeterTest, EnergyCountsFromWhenTheLibraryHasStarted) {
  ::setenv("FAKE_NVML_MJ", "5000", 1);
  meter_.open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  EXPECT_EQ(read_when_open(), (wire::GpuMeter{.begin_uj = 5'000'000, .now_uj = 5'000'000}));
  ::setenv("FAKE_NVML_MJ", "5123", 1);
  EXPECT_EQ(meter_.read_gpu(), (wire::GpuMeter{.begin_uj = 5'000'000, .now_uj = 5'123'000}));
}

TEST_F(JobMeterTest, EnergyThatCannotBeReadOnceStaysUnknown) {
  ::setenv("FAKE_NVML_MJ", "5000", 1);
  meter_.open_gpu(kFakeGpuUuid, PENSTOCK_FAKE_NVML);
  ASSERT_TRUE(read_when_open().has_energy());
  ::unsetenv("FAKE_NVML_MJ");
  EXPECT_FALSE(meter_.read_gpu().has_energy());
  ::setenv("FAKE_NVML_MJ", "5123", 1);
  EXPECT_FALSE(meter_.read_gpu().has_energy());
}

TEST_F(JobMeterTest, WithoutGpuTheEnergyIsUnknown) { EXPECT_EQ(meter_.read_gpu(), wire::GpuMeter{}); }

TEST_F(JobMeterTest, OtherThreadsSeeWhatWorkersHaveSpent) {
  const Instant begin = clock_now();
  meter_.note_message(7, message(ToTrainer::Kind::kWelcome, 1'000), begin);
  meter_.note_message(7, message(ToTrainer::Kind::kPong, 4'000), begin + 1s);
  wire::PoolAnswer batch = message(ToTrainer::Kind::kAnswer, 4'000);
  batch.sample_count = 32;
  batch.payload_bytes = 100;
  meter_.note_batch(batch);
  meter_.note_parting(7, begin + 3s);
  const wire::JobCosts costs = meter_.costs();
  EXPECT_EQ(costs, meter_.totals());
  EXPECT_EQ(costs.sample_count, 32u);
  EXPECT_EQ(costs.cpu_ns, 3'000u);
}

}  // namespace
}  // namespace penstock::loader
