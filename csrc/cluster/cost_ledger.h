// SPDX-License-Identifier: Apache-2.0
#pragma once
// The controller's account of what jobs have cost, those that have ended included. Trainers report totals, so that a
// controller that starts again knows what the jobs that run have cost. A program's clients of one dataset, as those of
// one epoch after the other, are one job. Pure.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/instant.h"
#include "wire/reports.h"

namespace penstock::cluster {

constexpr size_t kLedgerJobCountMax = 1024;    // then the user with most of them loses the one that has cost least
constexpr size_t kLedgerTrainerCountMax = 64;  // of a job that have not said goodbye

// Thread-compatible.
class CostLedger {
 public:
  // `user` is the one whose key the trainer shows; empty for the role's key. Jobs of two users are two jobs.
  void reported(const wire::TrainerReport& report, Instant now, const std::string& user = {});
  // It said goodbye, so nothing more comes of it.
  void left(uint64_t trainer_id);

  struct Job {
    std::string user{};
    std::string name{};
    std::string about{};  // its process, for people
    wire::JobCosts costs{};
    wire::GpuMeter gpu{};  // from the beginning of its first trainer to its last report, if all of them know it
    bool is_running = false;
    Duration since_report{};
  };
  // The job that was heard last comes first.
  std::vector<Job> jobs(Instant now) const;
  // Jobs whose costs are not known any more.
  uint64_t forgotten_count() const { return forgotten_count_; }

 private:
  struct Key {
    std::string user;
    std::string name;
    std::string about;

    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Open {
    wire::JobCosts costs{};
    wire::GpuMeter gpu{};
    Instant reported_at{};
  };
  struct Entry {
    wire::JobCosts ended{};
    std::optional<wire::GpuMeter> ended_gpu{};
    std::map<uint64_t, Open> open{};  // by trainer. One that lost its lease may come back with its totals.
    Instant reported_at{};
  };

  static void close(Entry& entry, std::map<uint64_t, Open>::iterator trainer);
  void make_room();

  std::map<Key, Entry> jobs_;
  std::map<uint64_t, Key> job_of_;  // by trainer that has not said goodbye
  uint64_t forgotten_count_ = 0;
};

}  // namespace penstock::cluster
