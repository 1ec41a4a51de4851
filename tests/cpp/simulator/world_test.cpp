// SPDX-License-Identifier: Apache-2.0
#include "simulator/world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace penstock::simulator {
namespace {

constexpr std::string_view kTable =
    "# a trace\n"
    "submit_s,duration_s,num_gpus,vc\r\n"
    "30,100,1,a\n"
    "\n"
    "10,59,1,a\n"
    "20,60,8,b\n"
    "20,70.5,16,a\n"
    "5,200,2,a\n"
    "6,200,0,a\n";

std::vector<double> arrivals(const JobFilter& filter) {
  auto table = parse_jobs("trace.csv", kTable, filter);
  EXPECT_TRUE(table);
  std::vector<double> found;
  for (const Job& job : table.value().jobs) found.push_back(job.submit_s);
  return found;
}

std::string job_fault(const std::string& text) {
  auto table = parse_jobs("trace.csv", text, {.gpus_max = 8});
  EXPECT_FALSE(table) << text;
  return table ? "" : table.error().message;
}

std::string fault_of_row(const std::string& row) { return job_fault("submit_s,duration_s,num_gpus,vc\n" + row + "\n"); }

TEST(JobTable, HasTheJobsThatTheFilterLeavesByTheirArrival) {
  EXPECT_EQ(arrivals({.gpus_max = 16}), (std::vector<double>{5, 10, 20, 20, 30}));
  EXPECT_EQ(arrivals({.vc = "a", .duration_min_s = 60, .gpus_max = 8}), (std::vector<double>{5, 30}));
  EXPECT_EQ(arrivals({.vc = "a", .duration_min_s = 60, .gpus_max = 8, .job_count_max = 1}), (std::vector<double>{5}));
  EXPECT_EQ(arrivals({.vc = "b", .gpus_max = 8}), (std::vector<double>{20}));
  EXPECT_EQ(arrivals({.gpus_max = 16, .job_skip_count = 3, .job_count_max = 1}), (std::vector<double>{20}));
}

TEST(JobTable, ModelsMayBeNamed) {
  auto table =
      parse_jobs("trace.csv", "submit_s,duration_s,num_gpus,vc,model\n0,60,1,a,small\n1,60,1,a,\n", {.gpus_max = 1});
  ASSERT_TRUE(table);
  std::vector<Job>& jobs = table.value().jobs;
  const std::vector<Profile> profiles{{.model = "large", .model_class = "image", .speeds = {1}},
                                      {.model = "small", .model_class = "other", .speeds = {1}}};
  ASSERT_TRUE(assign_models(jobs, profiles, {1, 0, 0}, 0));
  EXPECT_EQ(jobs[0].profile, 1U);
  EXPECT_EQ(jobs[1].profile, 0U);
  jobs[0].model = "tiny";
  EXPECT_EQ(assign_models(jobs, profiles, {1, 0, 0}, 0).error().message,
            "a job has the model 'tiny', which is not among 2 profiles; use one of them, or no model");
}

TEST(JobTable, AWindowBeyondTheLastJobIsAFault) {
  const auto table = parse_jobs("trace.csv", "submit_s,duration_s,num_gpus,vc\n0,60,1,a\n",
                                {.gpus_max = 1, .job_skip_count = 5, .job_count_max = 5});
  ASSERT_FALSE(table);
  EXPECT_EQ(table.error().message,
            "trace.csv: the first 5 jobs would be skipped, but there are only 1; take fewer windows, or smaller "
            "ones");
}

TEST(JobTable, AFaultNamesTheFileTheLineAndBothSides) {
  EXPECT_EQ(fault_of_row("1,x,1,a"),
            "trace.csv, line 2: duration_s is 'x'; expected a number from 0 to 10000000000; correct this line");
  EXPECT_EQ(fault_of_row("1,60,1.5,a"),
            "trace.csv, line 2: num_gpus is '1.5'; expected a whole number from 0 to 1000000; correct this line");
  EXPECT_EQ(fault_of_row("1,60,1"), "trace.csv, line 2: 3 fields; expected 4 as in the first row; correct this line");
  EXPECT_EQ(
      job_fault("a,b\n1,2\n"),
      "trace.csv, line 1: the first row has other columns; expected submit_s,duration_s,num_gpus,vc[,model]; correct "
      "this line");
  EXPECT_EQ(
      job_fault("# nothing\n"),
      "trace.csv, line 1: the table is empty; expected submit_s,duration_s,num_gpus,vc[,model]; correct this line");
  for (const std::string row :
       {"-1,60,1,a", "nan,60,1,a", "inf,60,1,a", "1,60,-1,a", "1,60,1e9,a", ",60,1,a", "1 ,6,1,a"})
    EXPECT_NE(fault_of_row(row).find("line 2: "), std::string::npos) << row;
}

TEST(JobTable, NoJobThatIsLeftIsAFault) {
  EXPECT_EQ(fault_of_row("1,60,9,a"),
            "trace.csv: none of 1 jobs is left; at least one with 1 to 8 GPUs that is long enough is required; choose "
            "another VC or a larger cluster");
}

TEST(JobTable, SyntheticJobsFollowFromTheirSeedAndHaveTheirLoad) {
  const SyntheticJobs options{.job_count = 2000, .gpu_count = 64, .load = 0.8, .seed = 3};
  auto table = synthetic_jobs(options);
  auto again = synthetic_jobs(options);
  ASSERT_TRUE(table);
  ASSERT_TRUE(again);
  const std::vector<Job>& jobs = table.value().jobs;
  double gpu_s = 0;
  for (size_t job = 0; job < jobs.size(); ++job) {
    gpu_s += jobs[job].duration_s * jobs[job].gpus;
    EXPECT_EQ(jobs[job].submit_s, again.value().jobs[job].submit_s);
    EXPECT_GE(jobs[job].duration_s, 60);
    EXPECT_LE(jobs[job].gpus, 16U);
  }
  EXPECT_TRUE(std::is_sorted(jobs.begin(), jobs.end(), [](auto& a, auto& b) { return a.submit_s < b.submit_s; }));
  // The span to the arrival that would follow the last one.
  EXPECT_NEAR(gpu_s / 64 / jobs.back().submit_s, 0.8, 0.02);
  auto other = synthetic_jobs({.job_count = 2000, .gpu_count = 64, .load = 0.8, .seed = 4});
  EXPECT_NE(other.value().jobs[0].duration_s, jobs[0].duration_s);
  EXPECT_FALSE(synthetic_jobs({.job_count = 0}));
  EXPECT_FALSE(synthetic_jobs({.load = 0}));
}

std::string profile_fault(const std::string& text) {
  auto table = parse_profiles("models.csv", text);
  EXPECT_FALSE(table) << text;
  return table ? "" : table.error().message;
}

TEST(ProfileTable, HasTheModelsWithTheirSpeeds) {
  auto table = parse_profiles(
      "models.csv",
      "# speeds\nmodel,class,iteration_s,batch,cpu1,cpu2\nnet,image,0.5,64,0.5,1\ntext,language,1,2,1,1\n");
  ASSERT_TRUE(table);
  ASSERT_EQ(table.value().profiles.size(), 2U);
  const Profile& net = table.value().profiles[0];
  EXPECT_EQ(net.model, "net");
  EXPECT_EQ(net.model_class, "image");
  EXPECT_EQ(net.iteration_s, 0.5);
  EXPECT_EQ(net.batch, 64);
  EXPECT_EQ(net.sample_bytes, 0);
  EXPECT_EQ(net.speeds, (std::vector<double>{0.5, 1}));
}

TEST(ProfileTable, MayTellTheBytesOfASample) {
  auto table = parse_profiles("m", "model,class,iteration_s,batch,sample_bytes,cpu1\nnet,image,0.5,64,1000,1\n");
  ASSERT_TRUE(table);
  EXPECT_EQ(table.value().profiles[0].bytes_per_s(), 128'000);
}

TEST(ProfileTable, AFaultNamesTheFileTheLineAndBothSides) {
  const std::string header = "model,class,iteration_s,batch,cpu1,cpu2\n";
  EXPECT_EQ(profile_fault(header + "net,picture,1,1,1,1\n"),
            "models.csv, line 2: class is 'picture'; expected image, language, speech or other; correct this line");
  EXPECT_EQ(profile_fault(header + "net,image,1,1,1,0.5\n"),
            "models.csv, line 2: cpu2 is '0.5'; expected a number from 1 to 1000000000; correct this line");
  EXPECT_EQ(profile_fault(header + "net,image,1,1,1\n"),
            "models.csv, line 2: 5 fields; expected 6 as in the first row; correct this line");
  EXPECT_EQ(profile_fault(header),
            "models.csv, line 1: no model follows the first row; expected at least one; correct this "
            "line");
  for (const std::string text : {"", "model,class,iteration_s,batch\n", "model,class,iteration_s,batch,cpu2\n",
                                 "model,class,iteration_s,batch,sample_bytes\n"})
    EXPECT_NE(profile_fault(text).find("models.csv, line 1: "), std::string::npos) << text;
  for (const std::string row : {",image,1,1,1,1", "a,image,0,1,1,1", "a,image,1,-1,1,1", "a,image,1,1,0,1"})
    EXPECT_NE(profile_fault(header + row).find("models.csv, line 2: "), std::string::npos) << row;
}

}  // namespace
}  // namespace penstock::simulator
