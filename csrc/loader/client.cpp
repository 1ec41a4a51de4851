// SPDX-License-Identifier: Apache-2.0
#include "loader/client.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "loader/client_io.h"

namespace penstock::loader {

using std::chrono::steady_clock;
using transport::Request;
using transport::RequestKind;

// The trainer thread's half: order, epochs and the decision who owns a delivered batch's memory.
class Client::Impl {
 public:
  explicit Impl(const ClientOptions& wanted)
      : options(wanted),
        order(order_options(wanted, {})),
        io(ClientIoOptions{.worker_count = wanted.worker_count,
                           .arrival_count_max = 2 * wanted.worker_count * (wanted.prefetch_factor + 4)}) {}

  static cluster::RequestOrderOptions order_options(const ClientOptions& options, const EpochStart& first) {
    return {.shard_count = options.shard_count != 0 ? options.shard_count : options.worker_count,
            .outstanding_count_max = options.prefetch_factor * options.worker_count,
            .in_order = options.in_order,
            .first_sequence = first.sequence,
            .first_shard_id = first.shard_id};
  }

  Result<void> start() {
    std::unique_ptr<BatchStage> stage;
    if (options.device_index >= 0) {
      auto made = make_cuda_stage(options.device_index);
      if (!made) return made.error();
      stage = std::move(made).value();
    } else if (options.pin_memory) {
      stage = make_pin_stage();
    }
    return io.start(std::move(stage));
  }

  void begin_epoch(std::span<const std::byte> seeds, const EpochStart& first) {
    order = cluster::RequestOrder(order_options(options, first));
    ready.clear();
    asked.clear();
    if (stream) index_buffer = stream->take_buffer();
    stream.reset();
    ++epoch;
    io.set_epoch(epoch);
    const auto index_kind = seeds.empty() ? transport::IndexKind::kNone : transport::IndexKind::kPickle;
    if (epoch > 1 || !seeds.empty()) broadcast(RequestKind::kEpoch, seeds, index_kind);
  }

  void broadcast(RequestKind kind, std::span<const std::byte> body,
                 transport::IndexKind index_kind = transport::IndexKind::kNone) {
    const Request request{.kind = kind, .index_kind = index_kind, .body_bytes = body.size(), .epoch = epoch};
    for (uint32_t worker_id = 0; worker_id < options.worker_count; ++worker_id) {
      io.send(worker_id, transport::write_message(request, body));
    }
  }

  bool submit(transport::IndexKind kind, std::span<const std::byte> body) {
    const auto assignment = order.assign();
    if (!assignment) return false;
    const Request request{.kind = RequestKind::kFetch,
                          .index_kind = kind,
                          .sequence = assignment->sequence,
                          .body_bytes = body.size(),
                          .epoch = epoch,
                          .shard_id = assignment->shard_id};
    asked.emplace(assignment->sequence, Asked{kind, {body.begin(), body.end()}});
    io.send(worker_of(assignment->shard_id), transport::write_message(request, body));
    return true;
  }

  bool has_room() const {
    if (order.outstanding_count() >= order.outstanding_count_max()) return false;
    const uint64_t undelivered_count = order.undelivered_count();
    if (undelivered_count == 0 || options.prefetch_bytes == 0) return true;
    if (largest_batch_bytes == 0) return false;
    uint64_t bytes = (undelivered_count - ready.size() + 1) * largest_batch_bytes;
    for (const auto& [sequence, batch] : ready) bytes += batch->frame().payload_bytes;
    return bytes <= options.prefetch_bytes;
  }

  void submit_after_delivery() {
    if (options.prefetch_bytes == 0) {
      submit_from_stream();
      return;
    }
    while (has_room() && submit_from_stream()) {
    }
  }

  bool submit_from_stream() {
    const auto indices = stream->next();
    return indices && submit(transport::IndexKind::kIntegers, std::as_bytes(*indices));
  }

  Event try_next() {
    for (;;) {
      switch (order.next()) {
        case cluster::RequestOrder::Next::kEnd: return {.kind = Event::Kind::kEnd, .batch = {}, .error = {}};
        case cluster::RequestOrder::Next::kReady: {
          const uint64_t sequence = order.ready_sequence();
          auto stored = ready.extract(sequence);
          PENSTOCK_ASSERT(!stored.empty(), "batch ", sequence, " arrived and is not stored");
          return deliver(std::move(stored.mapped()));
        }
        case cluster::RequestOrder::Next::kWait: break;
      }
      auto arrival = io.try_pop();
      if (!arrival) return {.kind = Event::Kind::kNothing, .batch = {}, .error = {}};
      if (auto event = take(*arrival)) return std::move(*event);
    }
  }

  std::optional<Awaited> awaited() const {
    const auto oldest = order.awaited();
    if (!oldest) return std::nullopt;
    const Asked& request = asked.at(oldest->sequence);
    return Awaited{.worker_id = worker_of(oldest->shard_id),
                   .sequence = oldest->sequence,
                   .index_kind = request.kind,
                   .indices = request.indices};
  }

  bool wait_until(steady_clock::time_point deadline) {
    const auto begin = steady_clock::now();
    const bool has_arrived = io.wait_until(deadline);
    const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now() - begin);
    io.counters().wait_ns.add(static_cast<uint64_t>(waited.count()));
    io.counters().waits.add(1);
    return has_arrived;
  }

  struct Asked {
    transport::IndexKind kind;
    std::vector<std::byte> indices;
  };

  ClientOptions options;
  cluster::RequestOrder order;
  ClientIo io;
  std::optional<IndexStream> stream;
  at::Tensor index_buffer;  // of the last epoch's stream
  uint32_t epoch = 0;
  std::map<uint64_t, std::unique_ptr<Batch>> ready;  // arrived out of turn
  std::map<uint64_t, Asked> asked;                   // and not delivered yet
  uint64_t largest_batch_bytes = 0;

 private:
  uint32_t worker_of(uint32_t shard_id) const { return shard_id % options.worker_count; }
  bool has_active_shard(uint32_t worker_id) const {
    const uint32_t shard_count = order_options(options, {}).shard_count;
    for (uint32_t shard_id = worker_id; shard_id < shard_count; shard_id += options.worker_count) {
      if (order.is_active(shard_id)) return true;
    }
    return false;
  }

  // What an arrival means to the trainer now, or nothing when it only had to be noted.
  std::optional<Event> take(Arrival& arrival) {
    switch (arrival.kind) {
      case Arrival::Kind::kLost:
        return Event{.kind = Event::Kind::kWorkerLost, .worker_id = arrival.worker_id, .batch = {}, .error = {}};
      case Arrival::Kind::kFailed:
        return Event{.kind = Event::Kind::kFailed,
                     .worker_id = arrival.worker_id,
                     .batch = {},
                     .error = std::move(arrival.error)};
      case Arrival::Kind::kEnd: {
        if (arrival.epoch != epoch) return std::nullopt;
        const uint32_t worker_id = worker_of(order.shard_ended(arrival.sequence));
        asked.erase(arrival.sequence);
        PENSTOCK_ASSERT(worker_id == arrival.worker_id, "worker ", arrival.worker_id, " ended a shard of another");
        const bool is_done = !has_active_shard(worker_id);
        if (is_done && !options.keep_workers) io.dismiss(arrival.worker_id);
        return Event{.kind = Event::Kind::kShardEnded,
                     .worker_id = arrival.worker_id,
                     .is_worker_done = is_done,
                     .batch = {},
                     .error = {}};
      }
      case Arrival::Kind::kBatch: break;
    }
    if (arrival.epoch != epoch) {
      io.counters().stale_batches.add(1);
      return std::nullopt;
    }
    largest_batch_bytes = std::max(largest_batch_bytes, std::max<uint64_t>(1, arrival.batch->frame().payload_bytes));
    if (order.arrived(arrival.sequence)) return deliver(std::move(arrival.batch));
    ready.emplace(arrival.sequence, std::move(arrival.batch));
    return std::nullopt;
  }

  Event deliver(std::unique_ptr<Batch> batch) {
    const uint32_t shard_id = order.delivered(batch->descriptor().sequence);
    asked.erase(batch->descriptor().sequence);
    io.finish(*batch);
    settle_memory(*batch);
    auto& counters = io.counters();
    counters.batches.add(1);
    counters.batch_bytes.add(batch->frame().payload_bytes);
    counters.fetch_ns.add(batch->descriptor().fetch_ns);
    if (!batch->frame().boundary_keys.empty()) counters.boundary_batches.add(1);
    if ((batch->descriptor().flags & transport::kDescriptorThreadsDrew) != 0) counters.unrepeatable_batches.add(1);
    const uint32_t worker_id = batch->descriptor().worker_id;
    return {.kind = Event::Kind::kBatch,
            .worker_id = worker_id,
            .shard_id = shard_id,
            .batch = std::move(batch),
            .error = {}};
  }

  // A worker needs prefetch_factor slabs to answer what is asked of it. What an arena has beyond them the user may
  // hold; from there on batches are copied, so that a user who keeps every batch never stalls the stream.
  void settle_memory(Batch& batch) {
    if (!batch.lease()) return;
    if ((batch.descriptor().flags & transport::kDescriptorTransient) != 0) return;
    auto& view = batch.lease()->view();
    if (view.held_count() >= transport::spare_slab_count(view.alive_count(), options.prefetch_factor)) {
      batch.copy_out();
      io.counters().copied_batches.add(1);
      return;
    }
    batch.lease()->mark_held();
  }
};

Client::Client(const ClientOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Client::~Client() = default;

const std::string& Client::endpoint() const { return impl_->io.endpoint(); }
Result<void> Client::start() { return impl_->start(); }
void Client::begin_epoch(std::span<const std::byte> seeds, const EpochStart& first) {
  impl_->begin_epoch(seeds, first);
}

bool Client::submit(transport::IndexKind kind, std::span<const std::byte> body) { return impl_->submit(kind, body); }

bool Client::has_room() const { return impl_->has_room(); }

void Client::use_index_stream(IndexStreamOptions options) {
  impl_->stream.emplace(std::move(options), std::move(impl_->index_buffer));
}
bool Client::submit_from_stream() { return impl_->submit_from_stream(); }

Client::Event Client::try_next() {
  Event event = impl_->try_next();
  if (event.kind == Event::Kind::kBatch && impl_->stream) impl_->submit_after_delivery();
  return event;
}

std::optional<Client::Awaited> Client::awaited() const { return impl_->awaited(); }

bool Client::wait_until(steady_clock::time_point deadline) { return impl_->wait_until(deadline); }

void Client::broadcast(RequestKind kind, std::span<const std::byte> body) { impl_->broadcast(kind, body); }

void Client::stop() {
  if (!impl_.is_owner()) return;
  impl_->ready.clear();
  impl_->io.stop();
}

void Client::retire_held() { impl_->io.retire_held(); }
const telemetry::LoaderCounters& Client::counters() const { return impl_->io.counters(); }
uint32_t Client::outstanding_count() const {
  const uint32_t asked_count = impl_->order.outstanding_count();  // those that wait in the queue of arrivals included
  return asked_count - std::min(asked_count, static_cast<uint32_t>(impl_->io.arrival_count()));
}
uint32_t Client::ready_count() const { return static_cast<uint32_t>(impl_->ready.size() + impl_->io.arrival_count()); }

}  // namespace penstock::loader
