// SPDX-License-Identifier: Apache-2.0
#include "scheduling/scaling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock::scheduling {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kReportInterval = milliseconds(500);

double in_seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

// A job whose workers are granted `grant_delay` after they are asked for: in each interval as many batches are made as
// the slowest of trainer, workers, storage, link and sampler allows.
class Job {
 public:
  double step_s = 0.05;
  double worker_s = 0.6;
  double cpu_share = 1;
  double storage_batches_per_s = 1e9;  // of all workers together
  double link_batches_per_s = 1e9;
  double sampler_batches_per_s = 1e9;
  double noise = 0;  // of each interval's times, one standard deviation
  uint32_t granted_max = 64;
  Duration grant_delay = milliseconds(1500);
  Duration join_time{};      // for which no batch comes, as the next ones were asked of workers that have just come
  uint32_t epoch_steps = 0;  // 0: an epoch without an end
  Duration validation{};     // after each epoch, by another loader, to which the workers go
  bool has_persistent_iterator = true;  // else each epoch's iterator counts its steps from 0

  JobScaler scaler;
  uint32_t worker_count = 0;
  Instant now{};

  // Lets the job train for so long, and returns its batches a second over that time.
  double train(Duration time) {
    const double before = delivered_;
    const Instant end = now + time;
    while (now < end) {
      step();
      if (epoch_steps > 0 && delivered_ >= epoch_end_ - 1e-9) validate();
    }
    return (delivered_ - before) / in_seconds(time);
  }
  // It does something else, as in an evaluation.
  void pause(Duration time) {
    report_.queue.is_paused = true;
    for (Duration passed{}; passed < time; passed += kReportInterval) {
      report_.queue.paused_ns += static_cast<uint64_t>(kReportInterval.count());
      now += kReportInterval;
      scaler.note(report_, worker_count, now);
    }
    report_.queue.is_paused = false;
  }
  double ceiling() const { return 1 / step_s; }

 private:
  void step() {
    now += kReportInterval;
    follow();
    const double interval_s = in_seconds(kReportInterval);
    std::normal_distribution<double> normal;
    const double worker_now_s = worker_s * std::max(0.2, 1 + noise * normal(random_));
    const double step_now_s = step_s * std::max(0.2, 1 + noise * normal(random_));
    if (worker_count > joined_count_) joining_until_ = now + join_time;
    joined_count_ = worker_count;
    const double present = now < joining_until_ ? 0.0 : worker_count;
    const double made_per_s =
        std::min({present / worker_now_s, storage_batches_per_s, link_batches_per_s, sampler_batches_per_s});
    double wanted_count = interval_s / step_now_s;
    double to_make = 2.0 * worker_count + wanted_count - stored_;
    if (epoch_steps > 0) {
      if (epoch_end_ == 0) epoch_end_ = epoch_steps;
      wanted_count = std::min(wanted_count, epoch_end_ - delivered_);
      to_make = std::min(to_make, epoch_end_ - made_);
    }
    const double made_count = std::clamp(to_make, 0.0, made_per_s * interval_s);
    const double count = std::min(stored_ + made_count, wanted_count);
    const bool is_starved = count < wanted_count;
    stored_ += made_count - count;
    made_ += made_count;
    delivered_ += count;
    // Workers that share a disk take longer each; those that wait for the link or the sampler do not.
    double each_s = worker_now_s;
    if (made_per_s == storage_batches_per_s) each_s = worker_count / storage_batches_per_s;
    made_s_ += made_count * each_s;
    stepping_s_ += count * step_now_s;
    if (is_starved) starved_s_ += interval_s - count * step_now_s;
    wire::QueueSignal& queue = report_.queue;
    queue.delivered_batches = static_cast<uint64_t>(delivered_);
    queue.step_count = static_cast<uint64_t>(delivered_ - stepped_before_);
    queue.made_batches = static_cast<uint64_t>(made_);
    queue.stepping_ns = static_cast<uint64_t>(stepping_s_ * 1e9);
    queue.starved_ns = static_cast<uint64_t>(starved_s_ * 1e9);
    queue.made_ns = static_cast<uint64_t>(made_s_ * 1e9);
    queue.made_cpu_ns = static_cast<uint64_t>(made_s_ * cpu_share * 1e9);
    queue.made_bytes = static_cast<uint64_t>(made_ * 1e6);
    queue.link_bytes_per_s = link_batches_per_s < 1e9 ? static_cast<uint64_t>(link_batches_per_s * 1e6) : 0;
    queue.wanted_batches = 2 * worker_count;
    queue.ready_batches = is_starved ? 0 : static_cast<uint32_t>(stored_);
    uint32_t to_request = queue.wanted_batches - std::min(queue.ready_batches, queue.wanted_batches);
    if (epoch_steps > 0) to_request = std::min(to_request, static_cast<uint32_t>(epoch_end_ - made_));
    queue.asked_batches = made_per_s == sampler_batches_per_s ? 1 : to_request;
    report_.worker_count_max = granted_max;
    scaler.note(report_, worker_count, now);
  }
  void validate() {
    const uint32_t own_count = std::exchange(worker_count, 0);
    report_.worker_count_max = 0;
    pause(validation);
    worker_count = own_count;
    made_ = std::max(made_, delivered_);
    if (!has_persistent_iterator) {
      stepped_before_ = delivered_;
      stepping_s_ = starved_s_ = 0;
    }
    stored_ = 0;
    epoch_end_ = delivered_ + epoch_steps;
  }
  void follow() {
    const uint32_t wanted = std::min(std::max(scaler.demand(), 1U), granted_max);
    if (wanted != wanted_) wanted_since_ = now;
    wanted_ = wanted;
    if (now - wanted_since_ >= grant_delay) worker_count = wanted_;
  }

  wire::TrainerReport report_{.trainer_id = 1, .job = "job", .worker_count_max = 64};
  std::mt19937 random_{7};
  double epoch_end_ = 0;  // of all that is delivered
  double stepped_before_ = 0;
  double delivered_ = 0, made_ = 0, stored_ = 0, made_s_ = 0, stepping_s_ = 0, starved_s_ = 0;
  uint32_t wanted_ = 0;
  Instant wanted_since_{};
  uint32_t joined_count_ = 0;
  Instant joining_until_{};
};

TEST(Scaling, ReachesTheCeilingWithinThirtySeconds) {
  for (const double worker_s : {0.02, 0.1, 0.6, 1.5}) {
    Job job;
    job.worker_s = worker_s;
    job.train(seconds(30));
    EXPECT_GE(job.train(seconds(30)), 0.98 * job.ceiling()) << worker_s;
    const double needed = worker_s / job.step_s;
    EXPECT_LE(job.worker_count, std::max<double>(kFirstDemand, std::ceil(needed * 1.4))) << worker_s;
  }
}

TEST(Scaling, ChangesNothingMoreOnceTheCeilingIsReached) {
  for (const double noise : {0.0, 0.1, 0.25}) {
    Job job;
    job.noise = noise;
    job.train(seconds(60));
    const uint64_t before = job.scaler.change_count();
    job.train(seconds(1200));
    EXPECT_LE(job.scaler.change_count() - before, 20U) << noise;  // one in a minute
    if (noise == 0) {
      EXPECT_EQ(job.scaler.change_count(), before);
    }
    EXPECT_EQ(job.scaler.limit(), JobLimit::kTrainer) << job.scaler.reason();
  }
}

TEST(Scaling, WorkersThatKeepTheTrainerBusyAreToldFromThoseToSpare) {
  Job job;
  job.worker_s = 12.6 * job.step_s;
  job.train(seconds(60));
  EXPECT_EQ(job.scaler.busy_count(), 13U);
  EXPECT_GT(job.scaler.demand(), 13U);
  EXPECT_EQ(JobScaler(5).busy_count(), 0U) << "it asks for nothing";
}

TEST(Scaling, AJobOfFewWorkersKeepsFew) {
  Job job;
  job.worker_s = 0.01;
  job.train(seconds(120));
  EXPECT_LE(job.worker_count, 2U);
}

TEST(Scaling, AJobThatStorageLimitsIsLeftAlone) {
  Job job;
  job.cpu_share = 0.1;
  job.storage_batches_per_s = 8;  // the work of five workers
  job.worker_s = 0.6;
  job.train(seconds(60));
  EXPECT_LE(job.worker_count, 10U) << job.scaler.reason();
  EXPECT_GE(job.worker_count, 5U) << job.scaler.reason();
  const uint64_t before = job.scaler.change_count();
  EXPECT_GE(job.train(seconds(600)), 0.98 * 8);
  EXPECT_LE(job.scaler.change_count() - before, 10U);
  EXPECT_EQ(job.scaler.limit(), JobLimit::kStorage) << limit_name(job.scaler.limit());
}

TEST(Scaling, AJobThatTheLinkLimitsIsLeftAlone) {
  Job job;
  job.link_batches_per_s = 8;
  job.train(seconds(60));
  EXPECT_LE(job.worker_count, 10U) << job.scaler.reason();
  EXPECT_GE(job.train(seconds(600)), 0.98 * 8);
  EXPECT_EQ(job.scaler.limit(), JobLimit::kLink) << limit_name(job.scaler.limit());
}

TEST(Scaling, AJobThatItsSamplerLimitsIsLeftAlone) {
  Job job;
  job.sampler_batches_per_s = 5;
  job.train(seconds(120));
  EXPECT_LE(job.worker_count, 8U) << job.scaler.reason();
  EXPECT_EQ(job.scaler.limit(), JobLimit::kSampler) << limit_name(job.scaler.limit());
}

TEST(Scaling, AJobThatIsNotGrantedWhatItWantsKeepsWantingIt) {
  Job job;
  job.granted_max = 64;
  job.worker_s = 0.6;
  job.train(seconds(30));
  const uint32_t wanted = job.scaler.demand();
  EXPECT_GE(wanted, 12U);
  Job poor;
  poor.grant_delay = seconds(100000);  // nobody has any to give
  poor.worker_count = 5;
  poor.train(seconds(300));
  EXPECT_EQ(poor.worker_count, 5U);
  EXPECT_GE(poor.scaler.demand(), 12U) << poor.scaler.reason();
  EXPECT_EQ(poor.scaler.limit(), JobLimit::kWorkers);
  EXPECT_NEAR(poor.scaler.progress(6), 0.5, 0.02);
}

// Workers were taken away, and batches that were left hid for a while that they were missing. One more seemed to be of
// no use then, and the job was left without the others.
TEST(Scaling, BatchesThatAreLeftDoNotHideThatWorkersAreMissing) {
  for (const auto& [worker_s, step_s, taken_count, time] :
       {std::tuple(0.6, 0.05, 7U, seconds(6)), {0.6, 0.1, 6U, seconds(4)}, {0.8, 0.1, 7U, seconds(4)}}) {
    Job job;
    job.worker_s = worker_s;
    job.step_s = step_s;
    job.train(seconds(60));
    ASSERT_GT(job.worker_count, taken_count);
    job.grant_delay = seconds(100000);
    job.worker_count -= taken_count;
    job.train(time);
    ++job.worker_count;
    job.train(seconds(8));
    job.grant_delay = milliseconds(500);
    job.train(seconds(10));
    EXPECT_GE(job.train(seconds(60)), 0.95 * job.ceiling()) << taken_count << ": " << job.scaler.reason();
  }
}

// Another job has left. The batches that its workers were asked for first were late, so they seemed to be of no use.
TEST(Scaling, WorkersThatHaveJustComeAreNotTakenForUseless) {
  for (int half_seconds = 0; half_seconds < 70; ++half_seconds) {
    Job job;
    job.join_time = milliseconds(2500);
    job.grant_delay = seconds(100000);
    job.worker_count = 8;
    job.train(seconds(60) + milliseconds(500) * half_seconds);
    job.grant_delay = milliseconds(500);
    job.train(seconds(15));
    EXPECT_GE(job.train(seconds(30)), 0.98 * job.ceiling()) << half_seconds << ": " << job.scaler.reason();
  }
}

TEST(Scaling, AJobThatMayHaveNoMoreIsToldSo) {
  Job job;
  job.granted_max = 6;
  job.train(seconds(60));
  EXPECT_EQ(job.scaler.demand(), 6U);
  EXPECT_NE(job.scaler.reason().find("but it may have at most 6;"), std::string::npos) << job.scaler.reason();
}

TEST(Scaling, PausesAreNotStarvation) {
  Job job;
  job.train(seconds(60));
  const uint32_t wanted = job.scaler.demand();
  const uint64_t before = job.scaler.change_count();
  for (int round = 0; round < 10; ++round) {
    job.pause(seconds(40));
    job.train(seconds(20));
  }
  EXPECT_EQ(job.scaler.demand(), wanted) << job.scaler.reason();
  EXPECT_EQ(job.scaler.change_count(), before);
}

// A job of 51 ms of a worker and 200 ms of the trainer was said to have use for 3 workers, for which it waited "30% of
// the time for 2": at the end of an epoch it lived on its last batches. With its workers away for the validation in
// between, nothing was measured that could have put that right.
TEST(Scaling, AJobThatItsTrainerLimitsNeedsOneWorkerWhateverItDoesBetweenEpochs) {
  for (const uint32_t epoch_steps : {40U, 18U, 14U, 12U, 8U, 4U}) {
    for (const Duration validation : {Duration{}, Duration(milliseconds(500)), Duration(seconds(20))}) {
      for (const uint32_t granted_max : {2U, 4U, 64U}) {
        Job job;
        job.step_s = 0.2;
        job.worker_s = 0.051;
        job.cpu_share = 0.05;
        job.grant_delay = milliseconds(500);
        job.epoch_steps = epoch_steps;
        job.validation = validation;
        job.granted_max = granted_max;
        const std::string what = std::to_string(epoch_steps) + " steps, " + std::to_string(in_seconds(validation)) +
                                 " s, " + std::to_string(granted_max) + " workers: ";
        for (int epoch = 0; epoch * epoch_steps < 200; ++epoch) job.train(milliseconds(200 * epoch_steps));
        ASSERT_TRUE(job.scaler.measured()) << what;
        for (int look = 0; look < 20; ++look) {
          job.train(seconds(5));
          ASSERT_EQ(job.scaler.training_demand(), 1U) << what << job.scaler.reason();
          ASSERT_EQ(job.scaler.limit(), JobLimit::kTrainer) << what << job.scaler.reason();
        }
      }
    }
  }
}

// Each epoch's iterator counted its steps anew, and that was taken for another trainer: nothing was ever measured.
TEST(Scaling, AJobIsMeasuredOverTheIteratorsOfItsEpochs) {
  for (const uint32_t epoch_steps : {8U, 14U, 40U}) {
    Job job;
    job.step_s = 0.2;
    job.worker_s = 0.051;
    job.has_persistent_iterator = false;
    job.epoch_steps = epoch_steps;
    job.validation = seconds(1);
    job.granted_max = 4;
    job.train(seconds(120));
    ASSERT_TRUE(job.scaler.measured()) << epoch_steps;
    EXPECT_EQ(job.scaler.training_demand(), 1U) << job.scaler.reason();
  }
}

TEST(Scaling, AJobOfShortEpochsThatNeedsMoreWorkersIsGivenThem) {
  Job job;
  job.epoch_steps = 20;
  job.validation = seconds(3);
  job.granted_max = 64;
  job.train(seconds(120));
  EXPECT_GE(job.scaler.training_demand(), 12U) << job.scaler.reason();
  EXPECT_LE(job.scaler.training_demand(), 20U) << job.scaler.reason();
}

// "794 wanted" by a program that only counts its batches.
TEST(Scaling, ATrainerWithoutWorkWantsNoMoreThanCouldBeSeenToHelp) {
  Job job;
  job.step_s = 1e-5;
  job.worker_s = 0.05;
  job.granted_max = 4096;
  job.grant_delay = seconds(100000);
  job.worker_count = 2;
  job.train(seconds(60));
  EXPECT_EQ(job.scaler.demand(), 16U) << job.scaler.reason();
}

TEST(Scaling, FollowsABatchThatTakesAnotherTime) {
  Job job;
  job.train(seconds(120));
  job.worker_s = 1.8;
  job.train(seconds(90));
  EXPECT_GE(job.train(seconds(30)), 0.98 * job.ceiling()) << job.scaler.reason();
  job.worker_s = 0.2;
  job.train(seconds(180));
  EXPECT_GE(job.train(seconds(30)), 0.98 * job.ceiling()) << job.scaler.reason();
  EXPECT_LE(job.worker_count, 16U) << job.scaler.reason();
}

TEST(Scaling, ATrainerThatCountsAnewIsMeasuredAnew) {
  Job job;
  job.train(seconds(60));
  JobScaler scaler = job.scaler;
  scaler.note({.trainer_id = 1, .job = "job", .worker_count_max = 64, .queue = {.delivered_batches = 1}}, 3, job.now);
  EXPECT_EQ(scaler.demand(), kFirstDemand);
  EXPECT_FALSE(scaler.measured());
}

TEST(Scaling, ATrainerThatAsksForNothingHasNoDemand) {
  JobScaler scaler;
  scaler.note({.trainer_id = 1, .job = "job", .worker_count_max = 0}, 3, Instant{});
  EXPECT_EQ(scaler.demand(), 0U);
  EXPECT_EQ(scaler.progress(3), 0);
}

}  // namespace
}  // namespace penstock::scheduling
