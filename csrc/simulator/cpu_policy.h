// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a cluster's CPUs each running job is to have, by each of the policies that share them as a pool. Pure. A
// CPU is a worker. What a policy knows of a job is what a trainer and its workers measure.
//
//   tf-data-service  as many workers as the trainer's rate needs, at most four times those that there are
//   penstock         cluster::gpu_progress on what was measured
//
// The first asks for each job by itself. Each job has one CPU a GPU for sure; the rest is granted in the order in which
// the jobs began.
//
// Cachew's and Ray Data's rules are left out. Cachew looks again after stable periods and Ray Data gives workers back
// once they idle; a rule without these would say nothing about either.

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/world.h"

namespace penstock::simulator {

struct PooledJob {
  uint64_t job_id = 0;
  uint32_t gpus = 1;
  uint32_t count = 0;       // CPUs that it has
  double needed_count = 1;  // CPUs that keep its GPUs busy, as measured
  double share_max = 1;     // of its speed with enough CPUs, that its link lets it have, as measured
};

// Estimates how many workers keep a trainer busy: seconds of one worker for a batch over those of a step that waits for
// nothing. The place of a live demand side.
double measured_need(double worker_s, double trainer_s);

// In the order in which the jobs began. `count` of 0: the job is new.
std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    uint32_t cpus_per_gpu, const Settings& settings);

// Synergy's tuning inside one server: each demand if they fit; else the jobs with most beyond their share give back
// down to it until they do.
std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count);

}  // namespace penstock::simulator
