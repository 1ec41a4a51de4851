// SPDX-License-Identifier: Apache-2.0
#include "wire/control_record.h"

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "base/bytes.h"
#include "wire/frame.h"

namespace penstock::wire {
namespace {

// In the order of the alternatives of ControlMessage, from 1.
constexpr uint8_t kKindMax = std::variant_size_v<ControlMessage>;

Fault malformed_control(std::string_view reason) { return malformed("a control message", reason); }

// One description of each message serves for reading and writing. A visitor sees the fields in wire order.
template <typename Visitor>
void fields(Visitor& visit, uint64_t& entry) {
  visit(entry);
}
template <typename Visitor>
void fields(Visitor& visit, WorkerReport& m) {
  visit(m.worker_id);
  visit(m.incarnation);
  visit(m.is_draining);
  visit(m.trainer_id);
  visit(m.endpoint, kControlNameBytesMax);
  visit(m.about, kControlAboutBytesMax);
  visit(m.declined, kDeclinedCountMax);
  visit(m.decline_reason, kControlReasonBytesMax);
  visit(m.name, kWorkerNameBytesMax);
  visit(m.job_kinds);
  visit(m.torch);
  visit(m.stuck_ms);
  visit(m.host.cpu_permille);
  visit(m.host.cpu_count);
  visit(m.host.memory_bytes);
  visit(m.host.memory_used_bytes);
  visit(m.kept_bytes);
  visit(m.kept_answers);
  visit(m.log, kLogBytesMax);
  visit(m.secret);
}
template <typename Visitor>
void fields(Visitor& visit, WorkerOrders& m) {
  visit(m.incarnation);
  visit(m.is_fenced);
  visit(m.is_to_drain);
  visit(m.controller_id);
  visit(m.view);
  visit(m.is_settled);
  visit(m.trainer_id);
  visit(m.is_to_part);
  visit(m.keep_bytes);
}
template <typename Visitor>
void fields(Visitor& visit, QueueSignal& m) {
  visit(m.ready_batches);
  visit(m.wanted_batches);
  visit(m.asked_batches);
  visit(m.bytes_in_flight);
  visit(m.waited_ns);
  visit(m.delivered_batches);
  visit(m.is_paused);
  visit(m.step_count);
  visit(m.stepping_ns);
  visit(m.starved_ns);
  visit(m.paused_ns);
  visit(m.made_batches);
  visit(m.made_ns);
  visit(m.made_cpu_ns);
  visit(m.made_bytes);
  visit(m.link_bytes_per_s);
  visit(m.hedged_batches);
}
template <typename Visitor>
void fields(Visitor& visit, StepTotals& m) {
  visit(m.step_count);
  visit(m.compute_ns);
  visit(m.dataset_ns);
  visit(m.collate_ns);
  visit(m.prefix_ns);
  visit(m.worker_ns);
  visit(m.wire_ns);
  visit(m.device_ns);
  visit(m.order_ns);
  visit(m.ranks_ns);
  visit(m.loader_ns);
}
template <typename Visitor>
void fields(Visitor& visit, JobCosts& m) {
  visit(m.served_ns);
  visit(m.cpu_ns);
  visit(m.energy_uj);
  visit(m.tenancy_count);
  visit(m.metered_tenancy_count);
  visit(m.batch_count);
  visit(m.sample_count);
  visit(m.batch_bytes);
}
template <typename Visitor>
void fields(Visitor& visit, GpuMeter& m) {
  visit(m.begin_uj);
  visit(m.now_uj);
}
template <typename Visitor>
void fields(Visitor& visit, JobRank& m) {
  visit(m.group);
  visit(m.rank);
  visit(m.world_size);
}
template <typename Visitor>
void fields(Visitor& visit, TrainerReport& m) {
  visit(m.trainer_id);
  visit(m.worker_count_max);
  fields(visit, m.queue);
  fields(visit, m.steps);
  fields(visit, m.costs);
  fields(visit, m.gpu);
  visit(m.job, kControlNameBytesMax);
  visit(m.about, kControlAboutBytesMax);
  visit(m.job_kind, JobKind::kPlugin);
  visit(m.torch);
  fields(visit, m.job_rank);
  visit(m.secret);
}
template <typename Visitor>
void fields(Visitor& visit, TrainerRoster::Entry& m) {
  visit(m.worker.worker_id);
  visit(m.worker.incarnation);
  visit(m.worker.is_withdrawn);
  visit(m.endpoint, kControlNameBytesMax);
  visit(m.key);
}
template <typename Visitor>
void fields(Visitor& visit, TrainerRoster::Decline& m) {
  visit(m.worker_id);
  visit(m.reason, kControlReasonBytesMax);
}
template <typename Visitor>
void fields(Visitor& visit, TrainerRoster& m) {
  visit(m.controller_id);
  visit(m.view);
  visit(m.is_settled);
  visit(m.pool_count);
  visit(m.declined_count);
  visit(m.entries, kRosterCountMax);
  visit(m.declines, kRosterDeclineCountMax);
}
template <typename Visitor>
void fields(Visitor& visit, Deregistration& m) {
  visit(m.id);
  visit(m.is_worker);
  visit(m.secret);
}
template <typename Visitor>
void fields(Visitor&, StatusRequest&) {}
template <typename Visitor>
void fields(Visitor& visit, Status& m) {
  visit(m.json, kControlTextBytesMax);
}
template <typename Visitor>
void fields(Visitor& visit, DrainRequest& m) {
  visit(m.worker_id);
}
template <typename Visitor>
void fields(Visitor& visit, DrainAnswer& m) {
  visit(m.worker_id);
  visit(m.is_known);
}
template <typename Visitor>
void fields(Visitor& visit, Refusal& m) {
  visit(m.reason, kControlAboutBytesMax);
  visit(m.is_for_now);
}
template <typename Visitor>
void fields(Visitor& visit, EngineWorker& m) {
  visit(m.name, kWorkerNameBytesMax);
  visit(m.state, EngineWorker::State::kStopping);
}
template <typename Visitor>
void fields(Visitor& visit, ScaleReport& m) {
  visit(m.adapter_id);
  visit(m.engine, kWorkerNameBytesMax);
  visit(m.worker_count_min);
  visit(m.worker_count_max);
  visit(m.idle_ms);
  visit(m.start_allowance_ms);
  visit(m.price_micros_per_hour);
  visit(m.has_budget);
  visit(m.budget_micros);
  visit(m.spent_worker_ms);
  visit(m.refusal_count);
  visit(m.refusal, kControlReasonBytesMax);
  visit(m.trouble, kControlReasonBytesMax);
  visit(m.workers, kEngineWorkerCountMax);
}
template <typename Visitor>
void fields(Visitor& visit, std::string& name) {
  visit(name, kWorkerNameBytesMax);
}
template <typename Visitor>
void fields(Visitor& visit, ScaleOrders& m) {
  visit(m.adapter_id);
  visit(m.wanted_count);
  visit(m.reason, kControlReasonBytesMax);
  visit(m.is_to_end);
  visit(m.stops, kEngineWorkerCountMax);
}
template <typename Visitor>
void fields(Visitor&, EndRequest&) {}
template <typename Visitor>
void fields(Visitor& visit, EndAnswer& m) {
  visit(m.has_engine);
}
template <typename Visitor>
void fields(Visitor& visit, CostFactor& m) {
  visit(m.is_given);
  visit(m.micros);
}
template <typename Visitor>
void fields(Visitor& visit, CostsRequest& m) {
  fields(visit, m.price_per_hour);
  fields(visit, m.energy_price_per_kwh);
  fields(visit, m.gco2_per_kwh);
}
template <typename Visitor>
void fields(Visitor& visit, Costs& m) {
  visit(m.json, kControlTextBytesMax);
}

template <typename Visitor>
void fields(Visitor& visit, PlanReport& m) {
  visit(m.trainer_id);
  visit(m.change_count);
  visit(m.json, kPlanBytesMax);
  visit(m.secret);
}
template <typename Visitor>
void fields(Visitor& visit, PlanRequest& m) {
  visit(m.trainer_id);
}
template <typename Visitor>
void fields(Visitor& visit, PlanAnswer& m) {
  visit(m.trainer_id);
  visit(m.json, kPlanBytesMax);
}

// Totals above the limit cannot be real, and would overflow when they are added up.
constexpr uint64_t kTotalMax = uint64_t{1} << 62;

class LargestNumber {
 public:
  template <PlainNumber T>
  void operator()(const T& value) {
    largest = std::max(largest, static_cast<uint64_t>(value));
  }
  uint64_t largest = 0;
};
template <typename... Part>
bool has_larger_total(Part&... parts) {
  LargestNumber number;
  (fields(number, parts), ...);
  return number.largest > kTotalMax;
}

// Detects values that a valid process never reports; nullptr if there are none.
template <typename Message>
const char* fault_of(Message&) {
  return nullptr;
}
const char* fault_of(WorkerReport& m) {
  if (m.worker_id == 0) return "a worker has no id";
  if (m.job_kinds == 0 || (m.job_kinds & ~kJobKinds) != 0) return "a worker runs unknown kinds of jobs";
  if (m.host.cpu_permille > 1000 || m.host.memory_used_bytes > m.host.memory_bytes)
    return "a worker's machine uses more than it has";
  if (m.kept_bytes > kTotalMax || m.kept_answers > kTotalMax) return "a total is too large to have been counted";
  return nullptr;
}
const char* fault_of(TrainerReport& m) {
  if (m.trainer_id == 0) return "a trainer has no id";
  if (m.job_kind != JobKind::kPython && m.job_kind != JobKind::kPlugin) return "a trainer has an unknown kind of job";
  if (m.job_rank.rank >= m.job_rank.world_size) return "a rank is not smaller than the number of ranks";
  if (has_larger_total(m.queue, m.steps, m.costs)) return "a total is too large to have been counted";
  return nullptr;
}

class Writer {
 public:
  // If this is inlined into write_control, where the vector is known to be empty, g++ 12 reports an overflow that
  // cannot happen.
  template <PlainNumber T>
  [[gnu::noinline]] void operator()(const T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      bytes.write<uint8_t>(value ? 1 : 0);
    } else {
      bytes.write(value);
    }
  }
  template <typename T>
  requires std::is_enum_v<T>
  void operator()(const T& value, T) { bytes.write(static_cast<uint8_t>(value)); }
  void operator()(const RunSecret& secret) { bytes.write_bytes(secret); }
  void operator()(const PublicKeyBytes& key) { bytes.write_bytes(key); }
  void operator()(const std::string& text, size_t bytes_max) {
    const auto kept = std::string_view(text).substr(0, bytes_max);
    bytes.write(static_cast<uint32_t>(kept.size()));
    bytes.write_text(kept);
  }
  template <typename Entry>
  void operator()(std::vector<Entry>& entries, size_t count_max) {
    const size_t count = std::min(entries.size(), count_max);
    bytes.write(static_cast<uint32_t>(count));
    for (size_t index = 0; index < count; ++index) fields(*this, entries[index]);
  }

  ByteWriter bytes;
};

// The first fault is kept; fields read after it are meaningless.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <PlainNumber T>
  void operator()(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      const auto byte = bytes_.read<uint8_t>();
      if (byte > 1) fail(malformed_control("a boolean is " + std::to_string(byte)));
      value = byte == 1;
    } else {
      value = bytes_.read<T>();
    }
  }
  template <typename T>
  requires std::is_enum_v<T>
  void operator()(T& value, T largest) {
    const auto byte = bytes_.read<uint8_t>();
    if (byte > static_cast<uint8_t>(largest)) fail(malformed_control("a state is " + std::to_string(byte)));
    value = static_cast<T>(byte);
  }
  void operator()(RunSecret& secret) { take(secret); }
  void operator()(PublicKeyBytes& key) { take(key); }
  void operator()(std::string& text, size_t bytes_max) {
    const auto size = bytes_.read<uint32_t>();
    if (size > bytes_max) return fail(too_large("a text", size, bytes_max));
    text = bytes_.take_text(size);
  }
  template <typename Entry>
  void operator()(std::vector<Entry>& entries, size_t count_max) {
    const auto count = bytes_.read<uint32_t>();
    if (count > count_max) return fail(too_large("a list", count, count_max));
    for (uint32_t index = 0; index < count && bytes_.ok() && !error_; ++index) fields(*this, entries.emplace_back());
  }

  template <typename Message>
  Result<ControlMessage> read() {
    Message message;
    fields(*this, message);
    if (error_) return *error_;
    if (!bytes_.ok()) return malformed_control("it ends before its last field");
    if (bytes_.remaining() != 0)
      return malformed_control(std::to_string(bytes_.remaining()) + " bytes follow its last field");
    if (const char* fault = fault_of(message)) return malformed_control(fault);
    return ControlMessage(std::move(message));
  }

 private:
  void take(std::span<std::byte> array) {
    const auto bytes = bytes_.take(array.size());
    std::copy(bytes.begin(), bytes.end(), array.begin());
  }
  static Fault too_large(const char* what, size_t seen, size_t expected) {
    return {Errc::kTooLarge, std::string(what) + " of a control message is " + std::to_string(seen) +
                                 ", above the cap of " + std::to_string(expected)};
  }
  void fail(Fault error) {
    if (!error_) error_ = std::move(error);
  }

  ByteReader bytes_;
  std::optional<Fault> error_;
};

template <size_t Index = 0>
Result<ControlMessage> read_kind(uint8_t kind, std::span<const std::byte> body) {
  if constexpr (Index == kKindMax) {
    return malformed_control("unknown kind " + std::to_string(kind));
  } else {
    if (kind == Index + 1) return Reader(body).read<std::variant_alternative_t<Index, ControlMessage>>();
    return read_kind<Index + 1>(kind, body);
  }
}

}  // namespace

std::vector<std::byte> write_control(const ControlMessage& message) {
  Writer writer;
  writer(kControlMagic);
  writer(kControlVersion);
  writer(static_cast<uint8_t>(message.index() + 1));
  writer(uint8_t{0});
  ControlMessage copy = message;
  std::visit([&](auto& alternative) { fields(writer, alternative); }, copy);
  return writer.bytes.take();
}

Result<ControlMessage> parse_control(std::span<const std::byte> bytes) {
  if (bytes.size() > kControlBytesMax) {
    return Fault{Errc::kTooLarge, "a control message of " + std::to_string(bytes.size()) +
                                      " bytes is above the cap of " + std::to_string(kControlBytesMax)};
  }
  ByteReader head(bytes);
  const auto magic = head.read<uint32_t>();
  const auto version = head.read<uint16_t>();
  const auto kind = head.read<uint8_t>();
  const auto reserved = head.read<uint8_t>();
  if (!head.ok() || magic != kControlMagic) return malformed_control("it does not start with PNC1");
  if (version != kControlVersion) {
    return Fault{Errc::kMismatch, "a control message has version " + std::to_string(version) +
                                      ", but this process uses version " + std::to_string(kControlVersion) +
                                      "; run the same version of penstock on both sides"};
  }
  if (reserved != 0) return malformed_control("a reserved byte is not zero");
  return read_kind(kind, bytes.subspan(head.position()));
}

}  // namespace penstock::wire
