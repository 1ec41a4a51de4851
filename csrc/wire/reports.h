// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reports of workers and trainers to a controller every kPingInterval, and its answers. All of it is state and not
// news: a report that is lost is made good by the next, and a controller that starts again knows all within one
// interval.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/wiped.h"

namespace penstock::wire {

// Drawn by each run of a trainer or a worker. The run's id follows from it and from the key of its connections
// (net/keys.h), so that nobody who knows the id alone can speak in its name. No status shows it.
constexpr size_t kRunSecretBytes = 16;
using RunSecret = WipedArray<kRunSecretBytes>;

// The public half of a CURVE key. All zeros are nobody's.
constexpr size_t kPublicKeyBytes = 32;
using PublicKeyBytes = std::array<std::byte, kPublicKeyBytes>;

constexpr size_t kDeclinedCountMax = 64;  // trainers that a worker remembers to have declined; older ones may ask again
constexpr size_t kRosterDeclineCountMax = 16;   // workers of which a roster says why they declined
constexpr size_t kEngineWorkerCountMax = 4096;  // workers of which an engine tells

constexpr uint64_t kUnknownEnergy = ~uint64_t{0};

// What a worker's process has spent since it began, as the worker tells its trainer with each message.
struct WorkerMeter {
  uint64_t cpu_ns = 0;                  // on CPUs, all its threads together
  uint64_t energy_uj = kUnknownEnergy;  // its part of its machine's energy, where the machine tells that

  bool has_energy() const { return energy_uj != kUnknownEnergy; }

  friend bool operator==(const WorkerMeter&, const WorkerMeter&) = default;
};

// What makes a job's batches: a Python process, or penstock-worker with a plug-in. Each is a bit in a worker's set.
enum class JobKind : uint8_t { kPython = 1, kPlugin = 2 };
constexpr uint8_t kJobKinds = 0b11;
constexpr uint8_t kind_bit(JobKind kind) { return static_cast<uint8_t>(kind); }

// A version of torch, 256 times its major number plus its minor one; 0: not told.
constexpr uint16_t torch_number(int major, int minor) { return static_cast<uint16_t>(major << 8 | minor); }

struct WorkerReport {
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  std::string endpoint{};  // where trainers reach it
  bool is_draining = false;
  uint64_t trainer_id = 0;           // that it works for; 0 for none
  std::string about{};               // its host, process and versions, for people
  std::vector<uint64_t> declined{};  // trainers whose job it cannot run, the latest last
  std::string decline_reason{};      // why it cannot run that of the latest, for people
  std::string name{};                // that the engine which started it knows it by; empty without an engine
  uint8_t job_kinds = kind_bit(JobKind::kPython);  // that it can run
  uint16_t torch = 0;                              // as torch_number()
  // For how long it has been at a batch that nobody wants any more, once that is longer than its batches take; else 0.
  // It makes nothing for anybody meanwhile.
  uint32_t stuck_ms = 0;
  RunSecret secret{};  // of this run

  bool is_stuck() const { return stuck_ms > 0; }
  bool has_declined(uint64_t id) const { return std::find(declined.begin(), declined.end(), id) != declined.end(); }
  // Whether `decline_reason` is about this trainer.
  bool has_declined_last(uint64_t id) const { return !declined.empty() && declined.back() == id; }

  friend bool operator==(const WorkerReport&, const WorkerReport&) = default;
};

struct WorkerOrders {
  uint32_t incarnation = 0;  // the one that they are for
  bool is_fenced = false;    // its lease ran out: its answers from then on are refused
  bool is_to_drain = false;
  // Whom it may serve. Without `is_settled` the controller has just started and knows too little to say.
  uint64_t controller_id = 0;  // of this run of the controller
  uint64_t view = 0;           // counts up as it changes
  bool is_settled = false;
  uint64_t trainer_id = 0;  // 0: none
  bool is_to_part = false;  // from a trainer that it serves, if that is another

  friend bool operator==(const WorkerOrders&, const WorkerOrders&) = default;
};

// How a trainer fares: the one signal that scaling follows. Totals count from the trainer's beginning.
struct QueueSignal {
  uint32_t ready_batches = 0;
  uint32_t wanted_batches = 0;   // that it would have ready or asked for
  uint32_t asked_batches = 0;    // and not here yet
  uint64_t bytes_in_flight = 0;  // of batches here and not delivered, and of those asked for as far as they are known
  uint64_t waited_ns = 0;
  uint64_t delivered_batches = 0;
  bool is_paused = false;   // it has not asked for a batch for much longer than its steps take, or no epoch is going on
  uint64_t step_count = 0;  // steps of training; pauses are none
  uint64_t stepping_ns = 0;       // in them, waiting apart
  uint64_t starved_ns = 0;        // waiting for a batch in the middle of an epoch
  uint64_t paused_ns = 0;         // evaluations, checkpoints, first steps, between epochs
  uint64_t made_batches = 0;      // that came from workers
  uint64_t made_ns = 0;           // of one worker's time, for them
  uint64_t made_cpu_ns = 0;       // of it, on CPUs; more than it with several threads
  uint64_t made_bytes = 0;        // of them, on the link
  uint64_t link_bytes_per_s = 0;  // that the link was measured to carry; 0: not known
  uint64_t hedged_batches = 0;    // asked of a second worker, since they were late

  friend bool operator==(const QueueSignal&, const QueueSignal&) = default;
};

// Where the time of a trainer's steps has gone since it began. Every moment of a step is in exactly one place: the
// program computes, it waits for a batch (in the places from `dataset_ns` to `order_ns`), it waits for other ranks, or
// the loader works in the trainer's thread.
struct StepTotals {
  uint64_t step_count = 0;
  uint64_t compute_ns = 0;
  uint64_t dataset_ns = 0;
  uint64_t collate_ns = 0;
  uint64_t prefix_ns = 0;
  uint64_t worker_ns = 0;  // for a free worker, or for one to start
  uint64_t wire_ns = 0;
  uint64_t device_ns = 0;
  uint64_t order_ns = 0;  // later batches were here
  uint64_t ranks_ns = 0;
  uint64_t loader_ns = 0;

  friend bool operator==(const StepTotals&, const StepTotals&) = default;
};

// What the pool's workers have spent on a trainer, and given for it. Totals count from the trainer's beginning. A
// *tenancy* is the time for which one worker serves the trainer. Workers of the trainer's own are not in it.
struct JobCosts {
  uint64_t served_ns = 0;              // of all tenancies together
  uint64_t cpu_ns = 0;                 // of the workers' processes, within their tenancies
  uint64_t energy_uj = 0;              // of the metered tenancies
  uint64_t tenancy_count = 0;          // that began
  uint64_t metered_tenancy_count = 0;  // of them, those in which the worker has known its energy all the time
  uint64_t batch_count = 0;            // that came
  uint64_t sample_count = 0;           // in them
  uint64_t batch_bytes = 0;            // of them, as they crossed

  friend bool operator==(const JobCosts&, const JobCosts&) = default;
};

// What a trainer's GPU has used, by the GPU's own counter, which begins when its driver is loaded.
struct GpuMeter {
  uint64_t begin_uj = kUnknownEnergy;  // when the trainer began
  uint64_t now_uj = kUnknownEnergy;

  bool has_energy() const { return now_uj != kUnknownEnergy && begin_uj <= now_uj; }

  friend bool operator==(const GpuMeter&, const GpuMeter&) = default;
};

// Which rank of its job a trainer is. The trainers of one job have one `group`, not 0; 0: it is alone.
struct JobRank {
  uint64_t group = 0;
  uint32_t rank = 0;
  uint32_t world_size = 1;

  friend bool operator==(const JobRank&, const JobRank&) = default;
};

struct TrainerReport {
  uint64_t trainer_id = 0;
  std::string job;  // its name, for people
  uint32_t worker_count_max = 0;
  QueueSignal queue{};
  StepTotals steps{};
  JobCosts costs{};
  GpuMeter gpu{};
  std::string about{};                  // as for a worker
  JobKind job_kind = JobKind::kPython;  // of its job
  uint16_t torch = 0;                   // that its job is made with
  JobRank job_rank{};
  RunSecret secret{};  // of this run

  friend bool operator==(const TrainerReport&, const TrainerReport&) = default;
};

// A worker as the controller tells trainers of it.
struct RosterEntry {
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  bool is_withdrawn = false;  // the trainer is to do without it

  friend bool operator==(const RosterEntry&, const RosterEntry&) = default;
};

// The workers of a trainer. Without `is_settled` the controller has just started and knows too little to say.
struct TrainerRoster {
  struct Entry {
    RosterEntry worker{};
    std::string endpoint{};
    PublicKeyBytes key{};  // that the worker shows to the controller, and by which the trainer knows it

    friend bool operator==(const Entry&, const Entry&) = default;
  };
  // Why a worker has declined this trainer. The worker says so itself, too; but its link ends with the roster that does
  // without it, and that roster can be here first.
  struct Decline {
    uint64_t worker_id = 0;
    std::string reason{};

    friend bool operator==(const Decline&, const Decline&) = default;
  };
  uint64_t controller_id = 0;  // of this run of the controller
  uint64_t view = 0;           // counts up as it changes
  bool is_settled = false;
  uint32_t pool_count = 0;      // workers that are not leaving, whosever they are
  uint32_t declined_count = 0;  // of them, those that have declined this trainer
  std::vector<Entry> entries{};
  std::vector<Decline> declines{};  // as far as the reasons are known, kRosterDeclineCountMax at most

  friend bool operator==(const TrainerRoster&, const TrainerRoster&) = default;
};

// A worker as the engine that starts it sees it.
struct EngineWorker {
  enum class State : uint8_t {
    kStarting = 0,
    kRunning = 1,
    kStopping = 2,
  };
  std::string name{};
  State state = State::kStarting;

  friend bool operator==(const EngineWorker&, const EngineWorker&) = default;
};

// How an engine adapter stands: the limits that it was started with, and what its engine runs. Money is in millionths.
struct ScaleReport {
  uint64_t adapter_id = 0;  // of this run of the adapter, not 0
  std::string engine{};     // its name, such as "local"
  uint32_t worker_count_min = 0;
  uint32_t worker_count_max = 0;
  uint64_t idle_ms = 0;                // for which workers must have been too many before they are given back
  uint64_t start_allowance_ms = 0;     // a start that takes longer is reported
  uint64_t price_micros_per_hour = 0;  // of one worker; 0 if there is none
  bool has_budget = false;
  uint64_t budget_micros = 0;
  uint64_t spent_worker_ms = 0;  // time of all workers, since the pool began
  uint64_t refusal_count = 0;    // of requests that the engine did not grant in full, since the adapter began
  std::string refusal{};         // why not the last of them; empty once all were granted
  std::string trouble{};         // why the adapter cannot reach or trust its engine; empty if it can
  std::vector<EngineWorker> workers{};

  friend bool operator==(const ScaleReport&, const ScaleReport&) = default;
};

// A factor that an operator gives or does not give, in millionths.
struct CostFactor {
  bool is_given = false;
  uint64_t micros = 0;

  friend bool operator==(const CostFactor&, const CostFactor&) = default;
};

// The operator asks what the jobs have cost. Without a price the controller takes the one that its engine has.
struct CostsRequest {
  CostFactor price_per_hour{};        // of a worker
  CostFactor energy_price_per_kwh{};  // in the same unit
  CostFactor gco2_per_kwh{};

  friend bool operator==(const CostsRequest&, const CostsRequest&) = default;
};

// What an engine is to run.
struct ScaleOrders {
  uint64_t adapter_id = 0;  // that they are for
  uint32_t wanted_count = 0;
  std::string reason{};              // a sentence for people
  bool is_to_end = false;            // the pool ends: the adapter stops all workers, and then itself
  std::vector<std::string> stops{};  // names of workers to stop; they have been told to drain

  friend bool operator==(const ScaleOrders&, const ScaleOrders&) = default;
};

}  // namespace penstock::wire
