// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between a controller and workers, trainers, operators and engine adapters, as bytes: one part each,
// below kControlBytesMax. The connection's key identifies the sender of a message, not the message's content; a message
// that names the sender's run contains the run's secret. PROTOCOL.md is the specification.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"
#include "wire/reports.h"

namespace penstock::wire {

constexpr uint32_t kControlMagic = 0x31434e50;  // "PNC1"
constexpr uint16_t kControlVersion = 9;

// Caps, checked before any allocation.
constexpr size_t kControlNameBytesMax = 256;  // of an endpoint or a job name
constexpr size_t kControlAboutBytesMax = 4096;
constexpr size_t kControlReasonBytesMax = 1024;   // of a reason to decline a trainer (worker) or a request (engine)
constexpr size_t kWorkerNameBytesMax = 128;       // of an engine's name for a worker
constexpr size_t kControlTextBytesMax = 4 << 20;  // of a status
constexpr size_t kPlanBytesMax = 64 << 10;        // of the text of a trainer's plan
constexpr size_t kRosterCountMax = 4096;
constexpr size_t kControlBytesMax = kControlTextBytesMax + 1024;
static_assert(kRosterCountMax * (kControlNameBytesMax + 64) + kRosterDeclineCountMax * (kControlReasonBytesMax + 12) <
              kControlBytesMax);
static_assert(kEngineWorkerCountMax * (kWorkerNameBytesMax + 8) + 4 * kControlReasonBytesMax < kControlBytesMax);

// A worker or a trainer ends voluntarily.
struct Deregistration {
  uint64_t id = 0;
  bool is_worker = false;
  RunSecret secret{};

  friend bool operator==(const Deregistration&, const Deregistration&) = default;
};
struct StatusRequest {
  friend bool operator==(const StatusRequest&, const StatusRequest&) = default;
};
struct Status {
  std::string json;

  friend bool operator==(const Status&, const Status&) = default;
};
struct DrainRequest {
  uint64_t worker_id = 0;

  friend bool operator==(const DrainRequest&, const DrainRequest&) = default;
};
struct DrainAnswer {
  uint64_t worker_id = 0;
  bool is_known = false;

  friend bool operator==(const DrainAnswer&, const DrainAnswer&) = default;
};
// The controller rejects the sender, with the reason: another version, a name that is taken. If the refusal is only
// temporary, the sender reports again.
struct Refusal {
  std::string reason;
  bool is_for_now = false;

  friend bool operator==(const Refusal&, const Refusal&) = default;
};

// The costs of the jobs; csrc/controller/pool_status.h defines the fields.
struct Costs {
  std::string json;

  friend bool operator==(const Costs&, const Costs&) = default;
};

// The plan of a trainer's cut, human-readable: JSON. Empty if it has none. Sent when it changes, and repeated
// occasionally.
struct PlanReport {
  uint64_t trainer_id = 0;
  uint64_t change_count = 0;  // how often the set of moved calls has changed
  std::string json;
  RunSecret secret{};

  friend bool operator==(const PlanReport&, const PlanReport&) = default;
};
// From an operator. The answer is empty if the trainer has no plan, or is unknown.
struct PlanRequest {
  uint64_t trainer_id = 0;

  friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};
struct PlanAnswer {
  uint64_t trainer_id = 0;
  std::string json;

  friend bool operator==(const PlanAnswer&, const PlanAnswer&) = default;
};

// Ends the pool: its engine stops all workers, and the adapter ends. Answered like a drain request.
struct EndRequest {
  friend bool operator==(const EndRequest&, const EndRequest&) = default;
};
struct EndAnswer {
  bool has_engine = false;  // an engine reports to the controller, and receives the order to end

  friend bool operator==(const EndAnswer&, const EndAnswer&) = default;
};

using ControlMessage = std::variant<WorkerReport, WorkerOrders, TrainerReport, TrainerRoster, Deregistration,
                                    StatusRequest, Status, DrainRequest, DrainAnswer, Refusal, ScaleReport, ScaleOrders,
                                    EndRequest, EndAnswer, CostsRequest, Costs, PlanReport, PlanRequest, PlanAnswer>;

// Texts and rosters above their caps are truncated.
std::vector<std::byte> write_control(const ControlMessage& message);

// kMalformed, kTooLarge, or kMismatch for another version.
Result<ControlMessage> parse_control(std::span<const std::byte> bytes);

}  // namespace penstock::wire
