// SPDX-License-Identifier: Apache-2.0
#include "loader/client.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "device/accelerator_device.h"
#include "device/cuda_device.h"
#include "loader/batch_stage.h"
#include "loader/client_io.h"
#include "loader/copy_stage.h"
#include "session/dispatch.h"

namespace penstock::loader {

using std::chrono::steady_clock;
using wire::ToJob;

namespace {

// Returns nullopt if the indices are not integers.
std::optional<int64_t> index_at(const session::RequestContent& content, uint64_t place) {
  const bool are_numbers = content.request.index_kind == wire::IndexKind::kIntegers ||
                           content.request.index_kind == wire::IndexKind::kInteger;
  if (!are_numbers || (place + 1) * sizeof(int64_t) > content.indices.size()) return std::nullopt;
  int64_t index = 0;
  std::memcpy(&index, content.indices.data() + place * sizeof index, sizeof index);
  return index;
}

constexpr uint64_t kBatchesToKnow = 8;  // before the measured time per batch is used

}  // namespace

// The trainer thread's half: order, epochs and the decision about who owns a delivered batch's memory.
class Client::Impl {
 public:
  struct Epoch {
    Epoch(uint32_t its_number, const session::RequestOrderOptions& order_options)
        : number(its_number), order(order_options) {}

    uint32_t number;
    session::RequestOrder order;
    uint64_t seed = 0;                                 // of the prefixes' random draws
    std::vector<std::byte> seeds;                      // of an early epoch
    uint64_t early_count = 0;                          // requests made before its start
    std::map<uint64_t, std::unique_ptr<Batch>> ready;  // arrived out of order
    // Requests whose batches were not delivered yet, and when they were made.
    struct Requested {
      Instant at{};
      session::SharedContent content{};
    };
    std::map<uint64_t, Requested> requested;
  };

  Impl(const ClientOptions& wanted, std::unique_ptr<BatchSource> its_source)
      : options(wanted), source(std::move(its_source)), inbox(source->inbox()), now(0, order_options({})) {}

  session::RequestOrderOptions order_options(const EpochStart& first) const {
    return {.shard_count = options.shard_count != 0 ? options.shard_count : options.worker_count,
            .outstanding_count_max = depth(),
            .overtaking_max = options.overtaking_max,
            .first_sequence = first.sequence,
            .missing = first.missing,
            .first_shard_id = first.shard_id,
            .frees_ended_shards = !source->has_bounded_memory()};
  }

  static std::unique_ptr<Impl> of_local_workers(const ClientOptions& options) {
    auto io = std::make_unique<ClientIo>(ClientIoOptions{
        .worker_count = options.worker_count,
        .arrival_count_max = 2 * options.worker_count * (std::max(options.prefetch_factor, options.slab_count) + 4),
        .any_worker_depth = options.any_worker ? options.prefetch_factor : 0});
    ClientIo* const local = io.get();
    auto impl = std::make_unique<Impl>(options, std::move(io));
    impl->local = local;
    return impl;
  }

  ClientIo& local_workers() const {
    PENSTOCK_ASSERT(local != nullptr, "this client has no local workers");
    return *local;
  }

  uint32_t slab_count() const { return options.slab_count != 0 ? options.slab_count : options.prefetch_factor; }

  // The number of batches requested ahead.
  uint32_t depth() const { return depth_of_worker() * std::max(1u, source->worker_count()); }

  // For pool workers, whose number may change at any time, more if batches are small and quickly made.
  uint32_t depth_of_worker() const {
    const uint64_t batch_count = inbox.counters().batches.value();
    if (source->has_bounded_memory() || batch_count < kBatchesToKnow || largest_batch_bytes == 0)
      return options.prefetch_factor;
    const auto usual = std::chrono::nanoseconds(inbox.counters().fetch_ns.value() / batch_count);
    if (usual >= session::kQuickBatch) return options.prefetch_factor;
    const auto fitting = std::min<uint64_t>(session::kQuickDepth, session::kQuickBytes / largest_batch_bytes);
    return std::max(options.prefetch_factor, static_cast<uint32_t>(fitting));
  }

  Result<void> start() {
    Stages stages;
    if (options.device) {
      auto device = device::open_device(*options.device);
      if (!device) return device.error();
      stages.staged_bytes_max = options.prefetch_bytes != 0 ? options.prefetch_bytes : kStagedBytes;
      stages.in_order.push_back(std::make_unique<CopyStage>(std::move(device).value()));
    } else if (options.pin_memory) {
      const auto owed_slab_count = source->has_bounded_memory() ? std::optional(slab_count()) : std::nullopt;
      stages.in_order.push_back(std::make_unique<PinStage>(device::open_cuda_watched_memory(), owed_slab_count));
    }
    if (options.ahead && !options.device) {
      stages.in_order.push_back(std::make_unique<AheadStage>(options.ahead, &device::open_device));
    }
    stages.tap = options.tap;
    return source->start(std::move(stages));
  }

  void begin_epoch(std::span<const std::byte> seeds, const EpochStart& first) {
    const uint32_t number = (early ? early->number : now.number) + 1;
    early.reset();
    now = Epoch(number, order_options(first));
    now.seed = first.seed;
    inbox.set_epochs(number, number);
    if (number > 1 || !seeds.empty()) announce(ToJob::Kind::kEpoch, number, seeds);
  }

  void drop_rest() {
    const uint32_t number = now.number;
    now = Epoch(number, order_options({}));
    inbox.set_epochs(number + 1, early ? early->number : number);
  }

  void begin_early(std::span<const std::byte> seeds, uint64_t seed) {
    PENSTOCK_ASSERT(!early, "the next epoch can start early only once");
    early.emplace(now.number + 1, order_options({}));
    early->seeds.assign(seeds.begin(), seeds.end());
    early->seed = seed;
    inbox.set_epochs(now.number, early->number);
    announce(ToJob::Kind::kEarlyEpoch, early->number, seeds);
  }

  void adopt_early() {
    PENSTOCK_ASSERT(early, "no epoch was started early");
    now = *std::move(early);
    early.reset();
    now.early_count = now.order.send_count();
    inbox.set_epochs(now.number, now.number);
    announce(ToJob::Kind::kEpoch, now.number, now.seeds);
  }

  void announce(ToJob::Kind kind, uint32_t number, std::span<const std::byte> seeds) {
    source->announce({.kind = kind, .key = {.epoch = number}, .seeds = seeds});
  }

  bool submit(const IndexSource::Indices& indices) {
    Epoch& epoch = early ? *early : now;
    // There may be fewer workers than when has_room() was called.
    if (!source->has_bounded_memory())
      epoch.order.set_outstanding_count_max(std::max(depth(), epoch.order.outstanding_count() + 1));
    const auto assignment = epoch.order.assign();
    if (!assignment) return false;
    const auto content = std::make_shared<session::RequestContent>(
        session::RequestContent{.request = {.index_kind = indices.kind,
                                            .sequence = assignment->sequence,
                                            .epoch = epoch.number,
                                            .shard_id = assignment->shard_id,
                                            .epoch_seed = epoch.seed,
                                            .first_place = indices.first_place},
                                .indices = {indices.body.begin(), indices.body.end()}});
    if (options.keep_indices) epoch.order.keep(assignment->sequence, content);
    epoch.requested.emplace(assignment->sequence, Epoch::Requested{.at = clock_now(), .content = content});
    source->fetch(content);
    return true;
  }

  bool has_room() const {
    if (outstanding_count() >= depth()) return false;
    const uint64_t undelivered_count = this->undelivered_count();
    if (undelivered_count == 0 || options.prefetch_bytes == 0) return true;
    if (largest_batch_bytes == 0) return false;
    uint64_t ready_count = now.ready.size();
    uint64_t bytes = ready_bytes(now);
    if (early) {
      ready_count += early->ready.size();
      bytes += ready_bytes(*early);
    }
    return bytes + (undelivered_count - ready_count + 1) * largest_batch_bytes <= options.prefetch_bytes;
  }

  static uint64_t ready_bytes(const Epoch& epoch) {
    uint64_t bytes = 0;
    for (const auto& [sequence, batch] : epoch.ready) bytes += batch->record().frame().payload_bytes;
    return bytes;
  }

  uint32_t outstanding_count() const {
    return now.order.outstanding_count() + (early ? early->order.outstanding_count() : 0);
  }
  uint32_t undelivered_count() const {
    return now.order.undelivered_count() + (early ? early->order.undelivered_count() : 0);
  }

  Event try_next() {
    for (;;) {
      switch (now.order.next()) {
        case session::RequestOrder::Next::kEnd: return {.kind = Event::Kind::kEnd, .batch = {}, .error = {}};
        case session::RequestOrder::Next::kReady: {
          const uint64_t sequence = now.order.ready_sequence();
          auto stored = now.ready.extract(sequence);
          PENSTOCK_ASSERT(!stored.empty(), "batch ", sequence, " arrived and is not stored");
          return deliver(std::move(stored.mapped()));
        }
        case session::RequestOrder::Next::kWait: break;
      }
      auto arrival = inbox.try_pop();
      if (!arrival) {
        log_awaited_batch();
        return {.kind = Event::Kind::kNothing, .batch = {}, .error = {}};
      }
      if (auto event = take(*arrival)) return std::move(*event);
    }
  }

  std::optional<Awaited> awaited() const {
    const auto oldest = now.order.awaited();
    if (!oldest) return std::nullopt;
    Awaited awaited{.worker_id = source->worker_of(oldest->shard_id), .sequence = oldest->sequence, .indices = {}};
    if (oldest->content) {
      awaited.index_kind = oldest->content->request.index_kind;
      awaited.indices = oldest->content->indices;
    }
    return awaited;
  }

  bool wait_until(steady_clock::time_point deadline) {
    const Instant begin = clock_now();
    const bool has_arrived = source->try_make_here() || inbox.wait_until(deadline);
    const Instant end = clock_now();
    ledger.note_wait(begin, end);
    inbox.counters().wait_ns.add(static_cast<uint64_t>((end - begin).count()));
    inbox.counters().waits.add(1);
    return has_arrived;
  }

  Result<std::unique_ptr<Batch>> recalled(const BatchRecord::Origin& origin, steady_clock::time_point deadline) {
    const wire::BatchRequest& wanted = origin.request->request;
    source->stages().await(wanted.epoch, wanted.sequence | wire::kRecallBit);
    for (;;) {
      while (auto batch = inbox.try_recalled()) {
        const wire::BatchFacts& its = batch->record().facts();
        if (its.epoch != wanted.epoch || its.sequence != (wanted.sequence | wire::kRecallBit)) continue;  // given up
        if (batch->record().withheld_bytes() > 0)
          return Fault{Errc::kMalformed, "a worker omitted parts of a batch that was requested in full"};
        if (const auto finished = source->stages().finish(*batch); !finished) return finished.error();
        batch->tensors().mark_held();
        if (!batch->record().remote_error()) inbox.counters().recalled_batches.add(1);
        return batch;
      }
      if (inbox.is_dead()) return Fault{Errc::kClosed, "the connection to the workers is closed"};
      if (!inbox.wait_for_recalled(deadline) && steady_clock::now() >= deadline)
        return Fault{Errc::kTimeout, "no worker has sent it yet"};
    }
  }

  void count_delivered(const Batch& batch) {
    const wire::BatchFacts& facts = batch.record().facts();
    auto& counters = inbox.counters();
    counters.batches.add(1);
    counters.batch_bytes.add(batch.record().bytes());
    const auto unit_ns = static_cast<uint64_t>(wire::kTimeUnit.count());
    counters.fetch_ns.add(facts.fetch_time * unit_ns);
    counters.prefix_ns.add(facts.prefix_time * unit_ns);
    counters.withheld_bytes.add(batch.record().withheld_bytes());
    if (facts.sequence < now.early_count) counters.early_batches.add(1);
    if (!batch.record().frame().boundary_keys.empty()) counters.boundary_batches.add(1);
    if (batch.tensors().was_widened_on_device()) counters.device_widened_batches.add(1);
    if ((facts.flags & wire::kBatchCompiled) != 0) counters.compiled_batches.add(1);
    if ((facts.flags & wire::kBatchThreadsDrew) != 0) counters.unrepeatable_batches.add(1);
  }

  ClientOptions options;
  std::unique_ptr<BatchSource> source;
  ClientIo* local = nullptr;  // `source`, if it has local workers
  Inbox& inbox;
  StepLedger ledger{inbox.counters()};
  Epoch now;
  std::optional<Epoch> early;  // the next epoch, whose first batches are requested already
  uint64_t largest_batch_bytes = 0;

 private:
  bool has_active_shard(uint32_t worker_id) const {
    const uint32_t shard_count = order_options({}).shard_count;
    for (uint32_t shard_id = worker_id; shard_id < shard_count; shard_id += options.worker_count) {
      if (now.order.is_active(shard_id)) return true;
    }
    return false;
  }

  // Returns the event that the arrival means to the trainer, or nullopt if it only had to be noted.
  std::optional<Event> take(Arrival& arrival) {
    switch (arrival.kind) {
      case Arrival::Kind::kLost:
        return Event{.kind = Event::Kind::kWorkerLost, .worker_id = arrival.worker_id, .batch = {}, .error = {}};
      case Arrival::Kind::kGone:
        return Event{.kind = Event::Kind::kWorkerGone, .worker_id = arrival.worker_id, .batch = {}, .error = {}};
      case Arrival::Kind::kGrown: return Event{.kind = Event::Kind::kMoreRoom, .batch = {}, .error = {}};
      case Arrival::Kind::kNews:
        return Event{.kind = Event::Kind::kNews, .batch = {}, .error = std::move(arrival.error)};
      case Arrival::Kind::kFailed:
        return Event{.kind = Event::Kind::kFailed,
                     .worker_id = arrival.worker_id,
                     .batch = {},
                     .error = std::move(arrival.error)};
      case Arrival::Kind::kEnd: {
        if (arrival.epoch != now.number) return std::nullopt;
        if (!now.order.is_outstanding(arrival.sequence)) return report_unrequested(arrival);
        const uint32_t shard_id = now.order.shard_ended(arrival.sequence);
        now.requested.erase(arrival.sequence);
        const uint32_t worker_id = source->worker_of(shard_id);
        if (worker_id != arrival.worker_id) return report_unrequested(arrival);
        const bool is_done = !has_active_shard(worker_id);
        if (is_done && !options.keep_workers) source->dismiss(arrival.worker_id);
        return Event{.kind = Event::Kind::kShardEnded,
                     .worker_id = arrival.worker_id,
                     .shard_id = shard_id,
                     .is_worker_done = is_done,
                     .state = std::move(arrival.state),
                     .batch = {},
                     .error = {}};
      }
      case Arrival::Kind::kBatch: break;
    }
    const bool is_early = early && arrival.epoch == early->number;
    if (!is_early && arrival.epoch != now.number) {
      inbox.counters().stale_batches.add(1);
      return std::nullopt;
    }
    Epoch& epoch = is_early ? *early : now;
    if (!epoch.order.is_outstanding(arrival.sequence)) return report_unrequested(arrival);
    largest_batch_bytes =
        std::max(largest_batch_bytes, std::max<uint64_t>(1, arrival.batch->record().frame().payload_bytes));
    const bool is_next = epoch.order.arrived(arrival.sequence);
    if (is_next && !is_early) return deliver(std::move(arrival.batch));
    epoch.ready.emplace(arrival.sequence, std::move(arrival.batch));
    return std::nullopt;
  }

  // For a worker that sends an answer to no request. The answer that it should have sent may never arrive.
  static Event report_unrequested(const Arrival& arrival) {
    const wire::BatchKey key{.epoch = arrival.epoch, .sequence = arrival.sequence};
    return {.kind = Event::Kind::kFailed,
            .worker_id = arrival.worker_id,
            .batch = {},
            .error = Fault{Errc::kMalformed, "worker " + std::to_string(arrival.worker_id) + " answered " +
                                                 wire::to_text(key) +
                                                 ", which was not requested from it or was already answered; trainer "
                                                 "and workers must run the same version of penstock"}};
  }

  Event deliver(std::unique_ptr<Batch> batch) {
    const uint64_t sequence = batch->record().facts().sequence;
    note_delivery(*batch);
    const uint32_t shard_id = now.order.delivered(sequence);
    const uint32_t worker_id = batch->record().facts().worker_id;
    if (const auto finished = source->stages().finish(*batch); !finished)
      return {.kind = Event::Kind::kFailed, .worker_id = worker_id, .batch = {}, .error = finished.error()};
    keep_or_copy(*batch);
    return {.kind = Event::Kind::kBatch,
            .worker_id = worker_id,
            .shard_id = shard_id,
            .batch = std::move(batch),
            .error = {}};
  }

  void note_delivery(Batch& batch) {
    const wire::BatchFacts& facts = batch.record().facts();
    const auto requested = now.requested.extract(facts.sequence);
    if (!requested.empty()) batch.record().times().asked_at = requested.mapped().at;
    StepLedger::Delivery delivery{.epoch = now.number,
                                  .sequence = facts.sequence,
                                  .times = batch.record().times(),
                                  .making = MakingTimes::of(facts),
                                  .bytes = batch.record().bytes()};
    if (ledger.has_waits()) {
      for (const auto& [number, later] : now.ready)
        delivery.later_ready_at = earlier(delivery.later_ready_at, later->record().times().staged_at);
    }
    ledger.deliver(delivery);
    const wire::SampleTimes& samples = facts.samples;
    const bool is_timed = samples.slowest_share != 0;
    const Duration slowest =
        is_timed ? delivery.making.dataset * samples.slowest_share / wire::kShareUnit : delivery.making.dataset;
    if (!ledger.is_slow(slowest)) return;
    SlowSample sample{
        .time = slowest, .epoch = now.number, .sequence = facts.sequence, .worker_id = delivery.times.worker_id};
    if (is_timed) sample.place = samples.slowest_place;
    if (is_timed && !requested.empty()) sample.index = index_at(*requested.mapped().content, samples.slowest_place);
    ledger.note_slow_sample(sample);
  }

  // The stages may hold a batch back while others are staged, but not the one that the trainer needs next.
  void log_awaited_batch() {
    const auto oldest = now.order.awaited();
    if (!oldest) return;
    source->stages().await(now.number, now.order.waits_for_oldest() ? std::optional(oldest->sequence) : std::nullopt);
  }

  // A worker needs prefetch_factor slabs to answer its requests. The user may hold the arena's other slabs. Beyond
  // that, batches are copied, so that a user who keeps every batch never stalls the stream.
  void keep_or_copy(Batch& batch) {
    if (!source->has_bounded_memory()) return batch.tensors().mark_held();
    if (!batch.tensors().lease()) return;
    if (batch.record().facts().is_transient) return;
    auto& view = batch.tensors().lease()->view();
    if (view.held_count() >= shm::spare_slab_count(view.alive_count(), slab_count())) {
      batch.tensors().copy_out();
      inbox.counters().copied_batches.add(1);
      return;
    }
    batch.tensors().lease()->mark_held();
  }
};

Client::Client(const ClientOptions& options) : impl_(Impl::of_local_workers(options)) {}
Client::Client(const ClientOptions& options, std::unique_ptr<BatchSource> source)
    : impl_(std::make_unique<Impl>(options, std::move(source))) {}
Client::~Client() = default;

Result<ChannelFds> Client::open_channel(uint32_t worker_id) { return impl_->local_workers().open_channel(worker_id); }
Result<void> Client::note_started(uint32_t worker_id, pid_t pid) {
  return impl_->local_workers().note_started(worker_id, pid);
}
Result<void> Client::start() { return impl_->start(); }
void Client::begin_epoch(std::span<const std::byte> seeds, const EpochStart& first) {
  impl_->begin_epoch(seeds, first);
}

void Client::drop_rest() { impl_->drop_rest(); }
void Client::begin_early(std::span<const std::byte> seeds, uint64_t seed) { impl_->begin_early(seeds, seed); }
void Client::adopt_early() { impl_->adopt_early(); }
bool Client::has_early() const { return impl_->early.has_value(); }

bool Client::submit(const IndexSource::Indices& indices) { return impl_->submit(indices); }

bool Client::has_room() const { return impl_->has_room(); }
uint32_t Client::depth() const { return impl_->depth(); }
uint32_t Client::undelivered_count() const { return impl_->undelivered_count(); }
uint32_t Client::shard_count() const { return impl_->order_options({}).shard_count; }
uint32_t Client::worker_count() const { return impl_->source->worker_count(); }
std::optional<LinkStanding> Client::link() const { return impl_->source->link(); }
wire::JobCosts Client::costs() const { return impl_->source->costs(); }
bool Client::may_any_worker() const { return impl_->options.any_worker; }
uint64_t Client::largest_batch_bytes() const { return impl_->largest_batch_bytes; }
bool Client::has_leaves_by_rank() const { return impl_->options.leaves_by_rank; }
bool Client::is_elastic() const { return !impl_->source->has_bounded_memory(); }

Client::Event Client::try_next() { return impl_->try_next(); }
void Client::recall(const BatchRecord::Origin& origin) { impl_->source->recall(origin); }
Result<std::unique_ptr<Batch>> Client::recalled(const BatchRecord::Origin& origin, steady_clock::time_point deadline) {
  return impl_->recalled(origin, deadline);
}
void Client::forget_recall(const BatchRecord::Origin& origin) { impl_->source->forget_recall(origin); }
void Client::count_delivered(const Batch& batch) { impl_->count_delivered(batch); }
void Client::note_pace(const TrainerPace& pace) { impl_->source->note_pace(pace); }

std::optional<Client::Awaited> Client::awaited() const { return impl_->awaited(); }

bool Client::wait_until(steady_clock::time_point deadline) { return impl_->wait_until(deadline); }

void Client::want_states(uint64_t every, uint64_t question) {
  const int64_t body[] = {static_cast<int64_t>(every), static_cast<int64_t>(question)};
  impl_->source->announce({.kind = ToJob::Kind::kStates,
                           .index_kind = wire::IndexKind::kIntegers,
                           .key = {.epoch = impl_->now.number},
                           .indices = std::as_bytes(std::span(body))});
}

Result<std::vector<std::byte>> Client::worker_states(steady_clock::time_point deadline) {
  impl_->inbox.drop_stale();  // a worker may need the memory of batches that are no longer wanted
  auto states = impl_->inbox.states_until(deadline);
  if (states) return *std::move(states);
  if (impl_->inbox.is_dead()) return Fault{Errc::kClosed, "the connection to the workers is closed"};
  return Fault{Errc::kTimeout, "no worker has sent its states yet"};
}

void Client::broadcast(ToJob::Kind kind, std::span<const std::byte> body) {
  impl_->source->announce({.kind = kind, .key = {.epoch = impl_->now.number}, .body = body});
}

void Client::stop() {
  if (!impl_.is_owner()) return;
  impl_->now.ready.clear();
  impl_->early.reset();
  impl_->source->stop();
}

void Client::retire_held() {
  if (impl_.is_owner()) impl_->source->retire_held();
}
StepLedger& Client::ledger() { return impl_->ledger; }
const loader::LoaderCounters& Client::counters() const { return impl_->inbox.counters(); }
uint32_t Client::outstanding_count() const {
  const uint32_t requested_count = impl_->outstanding_count();  // includes the arrivals in the inbox
  return requested_count - std::min(requested_count, static_cast<uint32_t>(impl_->inbox.arrival_count()));
}
uint32_t Client::stored_count() const {
  const size_t early_count = impl_->early ? impl_->early->ready.size() : 0;
  return static_cast<uint32_t>(impl_->now.ready.size() + early_count);
}
uint32_t Client::ready_count() const { return stored_count() + static_cast<uint32_t>(impl_->inbox.arrival_count()); }

}  // namespace penstock::loader
