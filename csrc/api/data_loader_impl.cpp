// SPDX-License-Identifier: Apache-2.0
#include "api/data_loader_impl.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "api/batch_origin.h"
#include "api/commit_ledger.h"
#include "api/exceptions.h"
#include "api/index_order.h"
#include "api/loader_state.h"
#include "api/surroundings.h"
#include "api/worker_set.h"
#include "base/clock.h"
#include "dataset/nest_value.h"
#include "loader/counters.h"
#include "loader/step_ledger.h"
#include "penstock/data_loader.h"
#include "penstock/filtered.h"

namespace penstock {

using std::chrono::steady_clock;
using Event = loader::Client::Event;

namespace {

constexpr double kNanosecond = 1e-9;
constexpr auto kCheckInterval = std::chrono::seconds(1);  // how often a waiting trainer checks its workers

}  // namespace

// NOLINTNEXTLINE(performance-unnecessary-value-param): a loader takes its dataset, as the public constructor shows
DataLoader::Impl::Impl(AnyDataset dataset, Options options) : options_(api::with_ranks(std::move(options))) {
  api::check_options(dataset, options_);
  auto running = std::make_unique<Running>();
  running->workers = api::make_workers(dataset, options_);
  const api::DatasetShape shape = running->workers->shape();
  api::check_options_of(shape, options_);
  built_ = {.is_iterable = shape.is_iterable,
            .sample_count = {},
            .shard_count = api::shard_count_of(shape, options_),
            .selection = {},
            .options = &options_};
  if (!shape.is_iterable) built_.sample_count = shape.sample_count;
  if (const auto kept = std::dynamic_pointer_cast<FilteredDataset>(dataset.by_index()))
    built_.selection = kept->selection();
  running_.emplace(std::move(running));
  if (options_.commit != Commit::kNone)
    commits_ = std::make_shared<api::CommitLedger>(api::title_of(dataset), !options_.batch_size);
}

void DataLoader::Impl::check_owner() const {
  if (running_->is_owner()) return;
  throw Error(ErrorKind::kUnsupported,
              "a DataLoader must be used in the process that created it, but this process was forked from it; create "
              "the loader in the child process");
}

DataLoader::Impl::Running& DataLoader::Impl::running() {
  check_owner();
  Running& running = **running_;
  if (!running.stream) {
    running.workers->start();
    running.stream = std::make_unique<loader::Stream>(
        running.workers->client(), loader::StreamOptions{.is_iterable = built_.is_iterable,
                                                         .asks_while_room = options_.prefetch_bytes > 0,
                                                         .may_begin_early = false,
                                                         .is_seeded_by_batch = true});
  }
  return running;
}

// ---- Epochs

void DataLoader::Impl::begin_epoch() {
  static_cast<void>(running());
  ++begun_count_;
  is_over_ = false;
  has_epoch_to_come_ = true;
  begin_part();
}

void DataLoader::Impl::begin_redelivery() {
  const bool has_some = commits("redeliver()").has_repeats();
  static_cast<void>(running());
  ++begun_count_;
  is_over_ = !has_some;
  has_epoch_to_come_ = false;
  if (has_some) begin_part();
}

// Starts an earlier epoch with batches to repeat, or the epoch itself. Returns whether there is one left.
bool DataLoader::Impl::begin_part() {
  if (commits_ && commits_->has_repeats()) {
    begin_repeat(commits_->take_repeat());
    return true;
  }
  if (!std::exchange(has_epoch_to_come_, false)) return false;
  if (loaded_state_) {
    const Value state = *std::exchange(loaded_state_, std::nullopt);
    begin_from(api::read_state(built_, state));
  } else {
    begin_fresh();
  }
  return true;
}

void DataLoader::Impl::begin_repeat(api::CommitLedger::Repeat repeat) {
  const Running& running = this->running();
  const api::PlacesLeft left = repeat.content.left();
  api::EpochAccount account{.epoch = repeat.content.seed_epoch, .start = built_.take_generators()};
  account.base_seed = repeat.content.base_seed;
  account.resumed_left = left;
  account.commits = std::move(repeat.epoch);
  account.progress = std::make_shared<loader::EpochProgress>(running.workers->client()->shard_count());
  const uint64_t count = left.delivered_count();
  const auto last_shard_id = count > 0 ? std::optional((count - 1) % account.progress->shard_count()) : std::nullopt;
  account.progress->resume(count, count, last_shard_id);
  if (api::StepMeter* const meter = running.workers->meter()) begin_meter(*meter);
  const wire::EpochSeeds seeds{
      .base_seed = repeat.content.base_seed, .epoch = repeat.content.seed_epoch, .by_sample = options_.shard_by_rank};
  running.workers->set_starts(seeds, api::ResumePoint());
  loader::EpochPlan plan{
      .seeds = seeds, .base_generator = options_.generator, .progress = account.progress, .missing = left.missing};
  account_ = std::move(account);
  if (const auto share = api::share_of(options_))
    for (auto& [place, batch] : repeat.content.batches) batch = api::part_of(batch, *share);
  const bool is_single = options_.sampler && !options_.batch_size;
  const auto kind = is_single ? wire::IndexKind::kInteger : wire::IndexKind::kIntegers;
  running.stream->begin_epoch(std::move(plan),
                              std::make_unique<api::RepeatedOrder>(std::move(repeat.content.batches), kind));
}

void DataLoader::Impl::begin_fresh() { begin({.epoch = epoch_count_, .start = built_.take_generators()}, nullptr); }

void DataLoader::Impl::begin_from(const api::LoadedState& loaded) {
  epoch_count_ = loaded.epoch;
  if (loaded.is_finished_in_epoch) {
    ++epoch_count_;
    return begin_fresh();
  }
  loaded.generators.restore_own(options_.generator);
  const bool is_replayed = loaded.point || !loaded.generators.is_current();
  api::EpochAccount account{.epoch = epoch_count_, .start = loaded.generators};
  const api::ResumePoint* point = loaded.point ? &*loaded.point : nullptr;
  if (!is_replayed) return begin(std::move(account), point);
  const api::GeneratorsReplayed replayed(loaded.generators);
  begin(std::move(account), point);
}

void DataLoader::Impl::begin(api::EpochAccount account, const api::ResumePoint* point) {
  Running& running = this->running();
  int64_t base_seed = api::draw_seed(options_.generator);
  account.progress = std::make_shared<loader::EpochProgress>(running.workers->client()->shard_count());
  if (point != nullptr) {
    base_seed = point->base_seed;
    account.progress->resume(point->answered_count, point->yielded_count, point->last_shard_id);
    account.resumed_left = point->left;
    for (const auto& [shard_id, start] : point->starts)
      account.progress->set_shard_answers(shard_id, start.batch_count);
    account.resumed_states = point->shard_states;
  }
  account.base_seed = base_seed;
  auto share = api::share_of(options_);
  if (share && point != nullptr) *share = api::share_at(*share, *point);
  if (share) account.share.emplace(static_cast<uint64_t>(built_.order_size().value_or(0)), *share);
  if (api::StepMeter* const meter = running.workers->meter()) begin_meter(*meter);
  const wire::EpochSeeds seeds{.base_seed = base_seed, .epoch = epoch_count_++, .by_sample = options_.shard_by_rank};
  running.workers->set_starts(seeds, point != nullptr ? *point : api::ResumePoint());
  loader::EpochPlan plan{.seeds = seeds,
                         .base_generator = options_.generator,
                         .progress = account.progress,
                         .missing = account.resumed_left.missing};
  if (commits_) {
    loader::Stream* const stream = running.stream.get();
    std::function<api::PulledBatch(uint64_t)> pull_again;
    if (!options_.sampler) pull_again = [stream](uint64_t place) { return api::pulled_of(stream->indices_at(place)); };
    account.commits = commits_->begin_epoch(account.resumed_left, seeds.epoch, seeds.base_seed, std::move(pull_again));
  } else if (!built_.is_iterable && has_free_order()) {
    account.delivered.emplace(account.resumed_left);
  }
  account_ = std::move(account);
  if (built_.is_iterable) {
    running.stream->begin_epoch(std::move(plan), std::make_unique<api::ShardOrder>(options_.batch_size));
  } else if (options_.sampler) {
    options_.sampler->begin_epoch(seeds.epoch);
    std::unique_ptr<loader::IndexSource> order;
    std::function<api::PulledBatch()> step_of_ranks;
    if (share) {
      auto shared = std::make_unique<api::SharedSamplerOrder>(options_.sampler, built_.order_size().value_or(0), *share,
                                                              account_->resumed_left.missing);
      step_of_ranks = [of = shared.get()] { return of->last_step(); };
      order = std::move(shared);
    } else {
      order = std::make_unique<api::SamplerOrder>(options_.sampler, options_.batch_size, options_.drop_last,
                                                  account_->resumed_left);
    }
    if (commits_) {
      order = std::make_unique<api::RecordedOrder>(std::move(order), commits_, account_->commits,
                                                   account_->resumed_left, std::move(step_of_ranks));
    }
    running.stream->begin_epoch(std::move(plan), std::move(order));
  } else {
    running.stream->begin_epoch(std::move(plan), {.sample_count = *built_.sample_count,
                                                  .batch_size = options_.batch_size.value_or(1),
                                                  .drop_last = options_.drop_last,
                                                  .shuffle = options_.shuffle,
                                                  .generator = options_.generator,
                                                  .share = share});
  }
}

void DataLoader::Impl::begin_meter(api::StepMeter& meter) {
  const uint32_t workers = std::max(1u, running().workers->client()->worker_count());
  meter.begin(workers, workers * static_cast<uint32_t>(options_.prefetch_factor));
}

// ---- Batches

namespace {

double seconds_now() { return std::chrono::duration<double>(steady_clock::now().time_since_epoch()).count(); }

graph::DeliveredWork delivered_work(const loader::Client& client, bool sends_whole) {
  const loader::LoaderCounters& counters = client.counters();
  graph::DeliveredWork work{.batches = counters.batches.value(),
                            .with_boundary = counters.boundary_batches.value(),
                            .fetch_s = static_cast<double>(counters.fetch_ns.value()) * kNanosecond,
                            .prefix_s = static_cast<double>(counters.prefix_ns.value()) * kNanosecond,
                            .bytes = counters.batch_bytes.value()};
  if (const auto link = client.link()) {
    work.workers = client.worker_count();
    work.link.bytes_per_s = link->bytes_per_s > 0 ? link->bytes_per_s : graph::kUnknownLinkBytesPerS;
    work.link.sends_whole = sends_whole;
  }
  return work;
}

// The leaves of a batch that stayed with its worker. Puts placeholder tensors without own memory in their positions.
std::optional<BatchOrigin::Withheld> withheld_of(loader::Batch& batch, const std::shared_ptr<api::WorkerSet>& workers,
                                                 int64_t number) {
  if (batch.record().withheld_bytes() == 0) return std::nullopt;
  if (!workers->notes_origins() || workers->withholding() == nullptr) {
    throw Error(ErrorKind::kWorker,
                "a worker omitted tensors of a batch without permission; trainer and workers must run the same version "
                "of penstock");
  }
  BatchOrigin::Withheld withheld{
      .leaves = {}, .maker = batch.record().origin().value(), .workers = workers, .batch_number = number, .came = {}};
  const auto leaf_count = static_cast<uint32_t>(batch.record().frame().leaf_count());
  for (uint32_t leaf = 0; leaf < leaf_count; ++leaf) {
    if (!batch.record().is_withheld(leaf)) continue;
    const at::Tensor meta = batch.tensors().meta(leaf);
    const at::Tensor one = at::zeros({}, meta.options().device(workers->device().value_or(at::kCPU)));
    static_cast<void>(batch.tensors().all());
    batch.tensors().set_stand_in(leaf, one.expand(meta.sizes()));
    withheld.leaves.insert(leaf);
  }
  return withheld;
}

}  // namespace

std::optional<Batch> DataLoader::Impl::next() {
  if (is_over_) return std::nullopt;
  if (!account_) api::refuse("next() was called before begin_epoch(); start an epoch first");
  for (;;) {
    auto batch = next_of_part();
    if (batch || !begin_part()) return batch;
  }
}

std::optional<Batch> DataLoader::Impl::next_of_part() {
  if (account_->progress->is_finished()) return std::nullopt;
  const Running& running = this->running();
  loader::StepLedger& ledger = running.stream->client().ledger();
  api::StepMeter* const meter = running.workers->meter();
  const double called_at_s = seconds_now();
  ledger.enter(clock_now());
  if (meter != nullptr && !meter->has_begun()) begin_meter(*meter);  // created in the middle of the epoch
  if (meter != nullptr) meter->note_call();
  try {
    auto batch = take();
    ledger.leave(clock_now());
    if (meter != nullptr && batch) {
      const bool sends_whole = running.workers->withholding() == nullptr;
      meter->note(called_at_s, seconds_now(), delivered_work(running.stream->client(), sends_whole));
    }
    return batch;
  } catch (...) {
    ledger.leave(clock_now());
    throw;
  }
}

std::optional<Batch> DataLoader::Impl::take() {
  Running& running = this->running();
  const auto deadline =
      options_.timeout.count() > 0 ? steady_clock::now() + options_.timeout : steady_clock::time_point::max();
  for (;;) {
    Event event = running.stream->next(std::min(deadline, steady_clock::now() + kCheckInterval));
    switch (event.kind) {
      case Event::Kind::kBatch: return to_batch(event);
      case Event::Kind::kEnd: return std::nullopt;
      case Event::Kind::kFailed: api::raise(*event.error);
      case Event::Kind::kNews: TORCH_WARN(event.error->message); break;
      case Event::Kind::kNothing:
        running.workers->check();
        if (steady_clock::now() < deadline) break;
        throw Error(ErrorKind::kTimeout,
                    "DataLoader timed out after " + std::to_string(options_.timeout.count()) + " milliseconds");
      default: break;  // worker events
    }
  }
}

Batch DataLoader::Impl::to_batch(Event& event) {
  loader::Batch& batch = *event.batch;
  const Running& running = this->running();
  if (const auto& remote = batch.record().remote_error())
    api::raise_remote(*remote, running.workers->place_of(remote->worker));
  const auto number = static_cast<int64_t>(batch.record().facts().sequence);
  auto withheld = withheld_of(batch, running.workers, number);
  const size_t leaf_count = batch.record().frame().leaf_count();
  const auto leaves_end = batch.tensors().all().begin() + static_cast<ptrdiff_t>(leaf_count);
  const std::vector<at::Tensor> leaves(batch.tensors().all().begin(), leaves_end);
  auto value = dataset::read_value(batch.record().frame().nest, leaves);
  if (!value) {
    account_->progress->note_error();
    api::raise(value.error());
  }
  Batch given(std::move(value).value(), number);
  if (account_->delivered) account_->delivered->note(batch.record().facts().sequence);
  if (account_->commits)
    BatchAccess::set_mark(given, commits_->deliver(*account_->commits, batch.record().facts().sequence));
  if (!running.workers->notes_origins()) return given;
  if (withheld) withheld->came = BatchAccess::value_of(given);
  const auto& keys = batch.record().frame().boundary_keys;
  const bool is_incomplete = withheld.has_value();
  auto origin = std::make_shared<BatchOrigin>(leaves, std::vector<std::string>(keys.begin(), keys.end()),
                                              std::vector<at::Tensor>(leaves_end, batch.tensors().all().end()),
                                              std::move(withheld));
  if (is_incomplete) running.workers->note_incomplete(origin);
  BatchAccess::set_origin(given, std::move(origin));
  return given;
}

// ---- Position

std::optional<int64_t> DataLoader::Impl::size() const {
  if (built_.is_iterable) return std::nullopt;
  const auto sample_count = built_.order_size();
  return sample_count ? std::optional(api::batch_count_of(options_, *sample_count)) : std::nullopt;
}

// Whether batches may overtake others.
bool DataLoader::Impl::has_free_order() const {
  return api::overtaking_max(options_) > 0 && (*running_)->workers->is_parallel();
}

void DataLoader::Impl::check_can_resume(const char* call) const {
  if (!options_.shard_by_rank || commits_ || !has_free_order()) return;
  throw Error(ErrorKind::kUnsupported,
              std::string(call) +
                  " with shard_by_rank requires in_order = true, with which all ranks deliver their steps in the same "
                  "order; set in_order = true, or commit the steps");
}

Value DataLoader::Impl::state() const {
  check_can_resume("state()");
  Value state = loaded_state_ ? api::opened(*loaded_state_)
                              : api::make_state(built_, account_ ? &*account_ : nullptr, epoch_count_, commits_.get());
  if (commits_) state = api::with_commits(state, *commits_);
  return options_.shard_by_rank ? api::sealed(state) : state;
}

void DataLoader::Impl::load_state(const Value& state) {
  check_can_resume("load_state()");
  api::CommitsState commits;
  if (!state.is_none()) commits = api::read_state(built_, state).commits;
  account_.reset();
  loaded_state_ = state.is_none() ? std::nullopt : std::optional(state);
  if (commits_) commits_->load(std::move(commits));
}

// Resumes the rest of the epoch from a state, as a new loader would that loads it, over the same workers. Checks
// everything before it changes anything.
void DataLoader::Impl::reshard(api::JobPlace job, const Value* state) {
  check_owner();
  if (!options_.shard_by_rank) {
    throw Error(ErrorKind::kUnsupported,
                "reshard() requires shard_by_rank, got a loader whose samples are not shared by ranks; set "
                "Options::shard_by_rank");
  }
  check_can_resume("reshard()");
  if (const size_t count = outstanding().size(); count > 0) {
    throw Error(ErrorKind::kUnsupported,
                "reshard() requires that every delivered batch is committed, got " + std::to_string(count) +
                    " outstanding batches, which the ranks of the new size would deliver again; commit them first");
  }
  Options resharded = api::resharded(options_, job);
  const Value present = this->state();
  const bool is_in_epoch = account_ && !account_->progress->is_finished();
  api::BuiltLoader built = built_;
  built.options = &resharded;
  api::LoadedState loaded = api::read_state(built, state != nullptr ? *state : present);
  std::swap(options_, resharded);
  if (!is_in_epoch) {
    if (state != nullptr) load_state(*state);
    return;
  }
  try {
    if (commits_) commits_->load(std::move(loaded.commits));
    begin_from(loaded);
  } catch (...) {
    options_ = std::move(resharded);
    load_state(present);
    throw;
  }
}

// ---- Commits

api::CommitLedger& DataLoader::Impl::commits(const char* call) const {
  if (!commits_) {
    throw Error(ErrorKind::kUnsupported,
                std::string(call) +
                    " requires commit=manual, got commit=none, with which the state covers the batches that were "
                    "delivered; set Options::commit to Commit::kManual");
  }
  return *commits_;
}

void DataLoader::Impl::commit(const Batch& batch) { commits("commit()").commit(BatchAccess::mark_of(batch)); }
void DataLoader::Impl::commit(const BatchId& id) { commits("commit()").commit(id); }
std::vector<BatchId> DataLoader::Impl::outstanding() const {
  return commits_ ? commits_->outstanding() : std::vector<BatchId>();
}

namespace {

StepTimes step_times(const loader::LoaderCounters& counters) {
  const wire::StepTotals totals = loader::StepLedger::totals(counters);
  const auto seconds = [](uint64_t time_ns) { return static_cast<double>(time_ns) * kNanosecond; };
  return {.steps = totals.step_count,
          .compute_s = seconds(totals.compute_ns),
          .dataset_s = seconds(totals.dataset_ns),
          .collate_s = seconds(totals.collate_ns),
          .prefix_s = seconds(totals.prefix_ns),
          .worker_s = seconds(totals.worker_ns),
          .wire_s = seconds(totals.wire_ns),
          .device_s = seconds(totals.device_ns),
          .order_s = seconds(totals.order_ns),
          .loader_s = seconds(totals.loader_ns)};
}

}  // namespace

Stats DataLoader::Impl::stats() const {
  if (!running_->is_owner() || !(*running_)->stream) return {};
  const Running& running = **running_;
  const loader::LoaderCounters& counters = running.stream->client().counters();
  return {.batches = counters.batches.value(),
          .batch_bytes = counters.batch_bytes.value(),
          .wait_s = static_cast<double>(counters.wait_ns.value()) * kNanosecond,
          .fetch_s = static_cast<double>(counters.fetch_ns.value()) * kNanosecond,
          .boundary = counters.boundary_batches.value(),
          .withheld_bytes = counters.withheld_bytes.value(),
          .recalled = counters.recalled_batches.value(),
          .ready = running.stream->ready_count(),
          .worker_count = running.stream->client().worker_count(),
          .ledger = step_times(counters)};
}

DataLoader::DataLoader(AnyDataset dataset, Options options, TorchVersion torch) {
  api::check_torch(torch, "this program");
  impl_ = std::make_unique<Impl>(std::move(dataset), std::move(options));
}
DataLoader::~DataLoader() = default;
DataLoader::DataLoader(DataLoader&&) noexcept = default;
DataLoader& DataLoader::operator=(DataLoader&&) noexcept = default;

DataLoader::Iterator DataLoader::first() {
  Iterator iterator(*this, impl_->begun_count());
  ++iterator;
  return iterator;
}

DataLoader::Iterator DataLoader::begin() {
  impl_->begin_epoch();
  return first();
}

DataLoader::Redelivery DataLoader::redeliver() {
  static_cast<void>(impl_->commits("redeliver()"));
  return Redelivery(*this);
}

DataLoader::Iterator DataLoader::first_of_redelivery() {
  impl_->begin_redelivery();
  return first();
}

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  if (is_at_end_) return *this;
  if (loader_->impl_->begun_count() != epoch_) {
    api::refuse("an iterator of an earlier epoch was advanced; the loader returns the batches of one epoch at a time");
  }
  batch_ = Batch();  // frees its memory for the next batch
  auto batch = loader_->impl_->next();
  is_at_end_ = !batch;
  if (batch) batch_ = *std::move(batch);
  return *this;
}

void DataLoader::begin_epoch() { impl_->begin_epoch(); }
void DataLoader::begin_redelivery() { impl_->begin_redelivery(); }
void DataLoader::commit(const Batch& batch) { impl_->commit(batch); }
void DataLoader::commit(const BatchId& id) { impl_->commit(id); }
std::vector<BatchId> DataLoader::outstanding() const { return impl_->outstanding(); }
std::optional<Batch> DataLoader::next() { return impl_->next(); }
std::optional<int64_t> DataLoader::size() const { return impl_->size(); }
State DataLoader::state() const { return StateAccess::make(impl_->state()); }
void DataLoader::reshard(int64_t rank, int64_t world_size) {
  impl_->reshard({.rank = rank, .world_size = world_size}, nullptr);
}
void DataLoader::reshard(int64_t rank, int64_t world_size, const State& state) {
  impl_->reshard({.rank = rank, .world_size = world_size}, &StateAccess::value_of(state));
}
void DataLoader::load_state(const State& state) { impl_->load_state(StateAccess::value_of(state)); }
Stats DataLoader::stats() const { return impl_->stats(); }

}  // namespace penstock
