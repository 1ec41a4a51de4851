// SPDX-License-Identifier: Apache-2.0
#pragma once
// What jobs cost: CostLedger, the controller's account of jobs, including ended ones, and the bill of a job in everyday
// units. Pure.

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "wire/reports.h"

namespace penstock::costs {

constexpr size_t kLedgerJobCountMax = 1024;    // above it, the user with the most jobs loses its cheapest one
constexpr size_t kLedgerTrainerCountMax = 64;  // trainers of a job that have not left

// Trainers report totals, so that a restarted controller knows the cost of the running jobs. A program's clients of one
// dataset, for example for consecutive epochs, are one job. Thread-compatible.
class CostLedger {
 public:
  // `user` is the user whose key the trainer uses; empty for the role's key. Jobs of different users are different
  // jobs.
  void reported(const wire::TrainerReport& report, Instant now, const std::string& user = {});
  // The trainer left and sends no further reports.
  void left(uint64_t trainer_id);

  struct Job {
    std::string user{};
    std::string name{};
    std::string about{};  // its process, for people
    wire::JobCosts costs{};
    wire::GpuMeter gpu{};  // from the start of its first trainer to its last report, if all of its trainers know it
    bool is_running = false;
    Duration since_report{};
  };
  // The job with the most recent report is first.
  std::vector<Job> jobs(Instant now) const;
  // The number of jobs whose costs are no longer known.
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
    std::map<uint64_t, Open> open{};  // by trainer; a trainer that lost its lease may return with its totals
    Instant reported_at{};
  };

  static void close(Entry& entry, std::map<uint64_t, Open>::iterator trainer);
  void make_room();

  std::map<Key, Entry> jobs_;
  std::map<uint64_t, Key> job_of_;  // by trainer that has not left
  uint64_t forgotten_count_ = 0;
};

// The factors of a bill, which an operator provides.
struct CostFactors {
  std::optional<double> price_per_hour{};        // of a worker
  std::optional<double> energy_price_per_kwh{};  // in the same unit
  std::optional<double> gco2_per_kwh{};

  friend bool operator==(const CostFactors&, const CostFactors&) = default;
};

// The cost of a job in everyday units, from its totals and the factors. Unknown values are nullopt, and a sum with an
// unknown part is unknown, too.
struct Bill {
  double worker_hours = 0;
  double cpu_hours = 0;
  double bytes = 0;
  double batches = 0;
  double samples = 0;
  std::optional<double> energy_j{};      // of the workers, if each that served knew its energy
  std::optional<double> gpu_energy_j{};  // of the trainer's GPU; not included in the following fields
  std::optional<double> money{};         // for worker hours and energy, as far as they have a price
  std::optional<double> gco2{};
};

Bill bill_of(const wire::JobCosts& costs, const CostFactors& factors, const wire::GpuMeter& gpu = {});

// The same per 1,000 samples; nullopt while there are no samples.
std::optional<Bill> per_thousand_samples(const Bill& bill);

}  // namespace penstock::costs
