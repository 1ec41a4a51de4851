// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reports of workers and trainers to a controller every kPingInterval, and its answers. All of it is state, not
// events: a lost report is made up for by the next, and a restarted controller knows everything within one interval.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace penstock::wire {

// Drawn by each run of a trainer or a worker. The run's id is derived from it and from the key of its connections
// (net/keys.h), so that knowing the id alone does not allow anyone to impersonate the run. No status shows it.
constexpr size_t kRunSecretBytes = 16;
using RunSecret = WipedArray<kRunSecretBytes>;

// The public half of a CURVE key. All zeros: no key.
constexpr size_t kPublicKeyBytes = 32;
using PublicKeyBytes = std::array<std::byte, kPublicKeyBytes>;

constexpr size_t kDeclinedCountMax = 64;  // trainers that a worker remembers having declined; older ones may ask again
constexpr size_t kRosterDeclineCountMax = 16;   // workers whose reasons for declining a roster contains
constexpr size_t kEngineWorkerCountMax = 4096;  // workers in an engine's report

constexpr uint64_t kUnknownEnergy = ~uint64_t{0};

// The resources that a worker's process has used since it started, as reported to its trainer with each message.
struct WorkerMeter {
  uint64_t cpu_ns = 0;                  // CPU time of all its threads together
  uint64_t energy_uj = kUnknownEnergy;  // its share of its machine's energy, if the machine reports it

  bool has_energy() const { return energy_uj != kUnknownEnergy; }

  friend bool operator==(const WorkerMeter&, const WorkerMeter&) = default;
};

// What makes a job's batches: a Python process, or penstock-worker with a plug-in. Each is a bit in a worker's set.
enum class JobKind : uint8_t { kPython = 1, kPlugin = 2 };
constexpr uint8_t kJobKinds = 0b11;
constexpr uint8_t kind_bit(JobKind kind) { return static_cast<uint8_t>(kind); }

// A version of torch, 256 times its major number plus its minor number; 0: unknown.
constexpr uint16_t torch_number(int major, int minor) { return static_cast<uint16_t>(major << 8 | minor); }

// The use of a worker's machine; all zeros if it is unknown.
struct HostLoad {
  uint16_t cpu_permille = 0;  // the busy part of all its CPUs in the last seconds
  uint16_t cpu_count = 0;
  uint64_t memory_bytes = 0;
  uint64_t memory_used_bytes = 0;  // without caches

  friend bool operator==(const HostLoad&, const HostLoad&) = default;
};
constexpr uint16_t kCpuCountMax = 65'535;
constexpr size_t kLogLinesMax = 3;  // of a worker in its reports
constexpr size_t kLogLineBytesMax = 200;
constexpr size_t kLogBytesMax = kLogLinesMax * (kLogLineBytesMax + 1);

struct WorkerReport {
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  std::string endpoint{};  // address for trainers
  bool is_draining = false;
  uint64_t trainer_id = 0;           // the trainer that it serves; 0: none
  std::string about{};               // its host, process and versions, human-readable
  std::vector<uint64_t> declined{};  // trainers whose job it cannot run, oldest first
  std::string decline_reason{};      // why it cannot run the latest trainer's job, human-readable
  std::string name{};                // by which the engine that started it identifies it; empty without an engine
  uint8_t job_kinds = kind_bit(JobKind::kPython);  // that it can run
  uint16_t torch = 0;                              // as torch_number()
  // How long it has been making a batch that is no longer wanted, once that is longer than its batches take; else 0. It
  // makes no other batches meanwhile.
  uint32_t stuck_ms = 0;
  HostLoad host{};
  uint64_t kept_bytes = 0;    // of the batches that it has made and its server keeps (session/named_batches.h)
  uint64_t kept_answers = 0;  // batches that it did not have to make, since it started
  std::string log{};          // the last lines of its log
  RunSecret secret{};         // of this run

  bool is_stuck() const { return stuck_ms > 0; }
  bool has_declined(uint64_t id) const { return std::find(declined.begin(), declined.end(), id) != declined.end(); }
  // Whether `decline_reason` is about this trainer.
  bool has_declined_last(uint64_t id) const { return !declined.empty() && declined.back() == id; }

  friend bool operator==(const WorkerReport&, const WorkerReport&) = default;
};

struct WorkerOrders {
  uint32_t incarnation = 0;  // to which the orders apply
  bool is_fenced = false;    // its lease expired: its answers from then on are rejected
  bool is_to_drain = false;
  // The trainer that it may serve. Without `is_settled` the controller has just started and cannot decide yet.
  uint64_t controller_id = 0;  // of this run of the controller
  uint64_t view = 0;           // increases with each change
  bool is_settled = false;
  uint64_t trainer_id = 0;  // 0: none
  bool is_to_part = false;  // leave the trainer that it serves, if that is another one
  // This worker's share of the bytes of batches that the pool keeps: its server keeps the shares of all its workers.
  // Counts if `is_settled`.
  uint64_t keep_bytes = 0;

  friend bool operator==(const WorkerOrders&, const WorkerOrders&) = default;
};

// How well a trainer is supplied: the only signal for scaling. Totals count from the start of the trainer.
struct QueueSignal {
  uint32_t ready_batches = 0;
  uint32_t wanted_batches = 0;   // target for ready and requested batches
  uint32_t asked_batches = 0;    // requested, not yet received
  uint64_t bytes_in_flight = 0;  // of received but undelivered batches, and of requested ones as far as known
  uint64_t waited_ns = 0;
  uint64_t delivered_batches = 0;
  bool is_paused = false;     // no batch was requested for much longer than its steps take, or no epoch is in progress
  uint64_t step_count = 0;    // training steps; pauses do not count
  uint64_t stepping_ns = 0;   // in steps, excluding waits
  uint64_t starved_ns = 0;    // waiting for a batch in the middle of an epoch
  uint64_t paused_ns = 0;     // evaluations, checkpoints, first steps, between epochs
  uint64_t made_batches = 0;  // received from workers
  uint64_t made_ns = 0;       // of one worker's time, for them
  uint64_t made_cpu_ns = 0;   // the part on CPUs; larger than made_ns with several threads
  uint64_t made_bytes = 0;    // their size on the link
  uint64_t link_bytes_per_s = 0;  // measured throughput of the link; 0: unknown
  uint64_t hedged_batches = 0;    // requested from a second worker because they were late

  friend bool operator==(const QueueSignal&, const QueueSignal&) = default;
};

// The time breakdown of a trainer's steps since it started. Every moment of a step has exactly one category: the
// program computes, it waits for a batch (the categories from `dataset_ns` to `order_ns`), it waits for other ranks, or
// the loader works in the trainer's thread.
struct StepTotals {
  uint64_t step_count = 0;
  uint64_t compute_ns = 0;
  uint64_t dataset_ns = 0;
  uint64_t collate_ns = 0;
  uint64_t prefix_ns = 0;
  uint64_t worker_ns = 0;  // for a free worker, or for a worker to start
  uint64_t wire_ns = 0;
  uint64_t device_ns = 0;
  uint64_t order_ns = 0;  // later batches had already arrived
  uint64_t ranks_ns = 0;
  uint64_t loader_ns = 0;

  friend bool operator==(const StepTotals&, const StepTotals&) = default;
};

// The resources that the pool's workers have used for a trainer, and their output. Totals count from the start of the
// trainer. A *tenancy* is the time during which one worker serves the trainer. Workers that the trainer started itself
// are excluded.
struct JobCosts {
  uint64_t served_ns = 0;              // of all tenancies together
  uint64_t cpu_ns = 0;                 // of the workers' processes, within their tenancies
  uint64_t energy_uj = 0;              // of the metered tenancies
  uint64_t tenancy_count = 0;          // started tenancies
  uint64_t metered_tenancy_count = 0;  // tenancies in which the worker knew its energy all the time
  uint64_t batch_count = 0;            // received
  uint64_t sample_count = 0;           // in them
  uint64_t batch_bytes = 0;            // their size as transferred

  friend bool operator==(const JobCosts&, const JobCosts&) = default;
};

// The energy used by a trainer's GPU, by the GPU's counter, which starts when its driver is loaded.
struct GpuMeter {
  uint64_t begin_uj = kUnknownEnergy;  // when the trainer started
  uint64_t now_uj = kUnknownEnergy;

  bool has_energy() const { return now_uj != kUnknownEnergy && begin_uj <= now_uj; }

  friend bool operator==(const GpuMeter&, const GpuMeter&) = default;
};

// A trainer's rank in its job. The trainers of one job share one `group`, not 0; 0: a single trainer.
struct JobRank {
  uint64_t group = 0;
  uint32_t rank = 0;
  uint32_t world_size = 1;

  friend bool operator==(const JobRank&, const JobRank&) = default;
};

struct TrainerReport {
  uint64_t trainer_id = 0;
  std::string job;  // its name, human-readable
  uint32_t worker_count_max = 0;
  QueueSignal queue{};
  StepTotals steps{};
  JobCosts costs{};
  GpuMeter gpu{};
  std::string about{};                  // as for a worker
  JobKind job_kind = JobKind::kPython;  // of its job
  uint16_t torch = 0;                   // the version that its job is made with
  JobRank job_rank{};
  RunSecret secret{};  // of this run

  friend bool operator==(const TrainerReport&, const TrainerReport&) = default;
};

// A worker in the controller's messages to trainers.
struct RosterEntry {
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  bool is_withdrawn = false;  // the trainer must stop using it

  friend bool operator==(const RosterEntry&, const RosterEntry&) = default;
};

// The workers of a trainer. Without `is_settled` the controller has just started and cannot decide yet.
struct TrainerRoster {
  struct Entry {
    RosterEntry worker{};
    std::string endpoint{};
    PublicKeyBytes key{};  // the worker's key at the controller, by which the trainer identifies it

    friend bool operator==(const Entry&, const Entry&) = default;
  };
  // Why a worker has declined this trainer. The worker also reports it itself; but its link ends with the roster
  // without it, and that roster may arrive first.
  struct Decline {
    uint64_t worker_id = 0;
    std::string reason{};

    friend bool operator==(const Decline&, const Decline&) = default;
  };
  uint64_t controller_id = 0;  // of this run of the controller
  uint64_t view = 0;           // increases with each change
  bool is_settled = false;
  uint32_t pool_count = 0;      // workers that are not leaving, including other trainers' workers
  uint32_t declined_count = 0;  // the part of them that has declined this trainer
  std::vector<Entry> entries{};
  std::vector<Decline> declines{};  // with known reasons, at most kRosterDeclineCountMax

  friend bool operator==(const TrainerRoster&, const TrainerRoster&) = default;
};

// A worker from the viewpoint of the engine that starts it.
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

// The state of an engine adapter: the limits that it was started with, and the workers that its engine runs. Money is
// in millionths.
struct ScaleReport {
  uint64_t adapter_id = 0;  // of this run of the adapter, not 0
  std::string engine{};     // its name, such as "local"
  uint32_t worker_count_min = 0;
  uint32_t worker_count_max = 0;
  uint64_t idle_ms = 0;                // how long workers must have been superfluous before they are released
  uint64_t start_allowance_ms = 0;     // a start that takes longer is reported
  uint64_t price_micros_per_hour = 0;  // of one worker; 0: no price
  bool has_budget = false;
  uint64_t budget_micros = 0;
  uint64_t spent_worker_ms = 0;  // time of all workers, since the start of the pool
  uint64_t refusal_count = 0;    // requests that the engine did not grant in full, since the start of the adapter
  std::string refusal{};         // the reason for the last refusal; empty once all were granted
  std::string trouble{};         // why the adapter cannot reach or trust its engine; empty if it can
  std::vector<EngineWorker> workers{};

  friend bool operator==(const ScaleReport&, const ScaleReport&) = default;
};

// An optional factor given by an operator, in millionths.
struct CostFactor {
  bool is_given = false;
  uint64_t micros = 0;

  friend bool operator==(const CostFactor&, const CostFactor&) = default;
};

// An operator requests the costs of the jobs. Without a price the controller uses the engine's price.
struct CostsRequest {
  CostFactor price_per_hour{};        // of a worker
  CostFactor energy_price_per_kwh{};  // in the same unit
  CostFactor gco2_per_kwh{};

  friend bool operator==(const CostsRequest&, const CostsRequest&) = default;
};

// The orders to an engine.
struct ScaleOrders {
  uint64_t adapter_id = 0;  // to which the orders apply
  uint32_t wanted_count = 0;
  std::string reason{};              // a sentence for people
  bool is_to_end = false;            // the pool ends: the adapter stops all workers, and then itself
  std::vector<std::string> stops{};  // names of workers to stop; they have been ordered to drain

  friend bool operator==(const ScaleOrders&, const ScaleOrders&) = default;
};

}  // namespace penstock::wire
