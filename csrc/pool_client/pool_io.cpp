// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_io.h"

#include <chrono>
#include <utility>

#include "base/process.h"

namespace penstock::pool_client {

namespace {

constexpr auto kUnresponsiveCheckInterval = std::chrono::seconds(1);  // interval for detecting silent workers

}  // namespace

PoolIo::PoolIo(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory, loader::StageChain& stages,
               loader::Inbox& inbox)
    : options_(options),
      run_(run),
      stages_(stages),
      memory_(options_.arena_bytes),
      session_({.trainer_id = run.id,
                .credit_bytes = options_.credit_bytes,
                .dispatch = {.depth_max = options_.depth, .quick_depth_max = session::kQuickDepth}}),
      connections_(options_, run_, std::move(directory)),
      news_(options_, session_, connections_, stages),
      reports_(options_, run_, session_, inbox),
      requests_(options_, session_, connections_, news_, reports_, stages, inbox),
      answers_(options_, session_, connections_, news_, reports_, requests_, blobs_, memory_, stages) {}

Result<void> PoolIo::begin() {
  raise_heap_thresholds();  // for the chunks of batches, which ZeroMQ allocates
  if (auto opened = connections_.open(); !opened) return opened;
  if (!options_.gpu_uuid.empty()) reports_.open_gpu();
  return {};
}

Result<void> PoolIo::serve() {
  if (options_.controller && connections_.controller() == nullptr) {
    if (auto connected = connections_.connect_to_controller(); !connected) return connected;
    set_roster(clock_now());
  }
  if (!options_.controller && session_.known_count() == 0) set_roster(clock_now());
  requests_.carry_out();  // the actions that were posted to the loop
  // One time for the whole turn: a worker heard in a turn is not silent at its end, however long the turn takes.
  const Instant now = clock_now();
  // Workers first: a worker's reason for declining must precede the roster that omits the worker.
  answers_.serve(now);
  if (auto served = serve_controller(now); !served) return served;
  requests_.connect_again(now);
  session_.tick(now);
  requests_.carry_out();
  note_standing(now);
  return {};
}

Result<bool> PoolIo::wait(int wake_fd, bool may_sleep) {
  return connections_.wait(wake_fd, may_sleep, session_.next_tick());
}

// Sends the goodbyes.
void PoolIo::end() {
  session_.leave(clock_now());
  requests_.carry_out();
  if (ControllerLink* controller = connections_.controller()) {
    wire::TrainerReport last = reports_.make(memory_.largest_bytes());  // includes the costs of the last half second
    last.worker_count_max = 0;
    controller->deregister(last);
  }
  connections_.close();
}

Result<void> PoolIo::serve_controller(Instant now) {
  ControllerLink* controller = connections_.take_ready_controller(now);
  if (controller == nullptr) return {};
  if (auto received = controller->receive(now); !received) return received.error();
  if (auto roster = controller->take_roster()) {
    connections_.directory().set_roster(std::move(roster->entries));
    set_roster(now);
    requests_.carry_out();  // first forgets ended links and their notes, then the roster's reasons are noted
    news_.note_declines(*roster);
  }
  const auto make_report = [this] { return reports_.make(memory_.largest_bytes()); };
  if (controller->report(make_report, now)) reports_.send_plan(*controller);
  return {};
}

void PoolIo::set_roster(Instant now) { session_.set_roster(connections_.directory().entries(), now); }

void PoolIo::note_standing(Instant now) {
  const size_t open_count = session_.open_count();
  const auto before = worker_count_.exchange(static_cast<uint32_t>(open_count));
  if (open_count > before) stages_.arrive({.kind = loader::Arrival::Kind::kGrown, .batch = {}, .error = {}});
  news_.note_workers(open_count, before > 0, now);
  if (now < silent_links_at_) return;
  silent_links_at_ = now + kUnresponsiveCheckInterval;
  connections_.links().end_rest(now - kRestMax);
  news_.note_silent_workers(now);
}

void PoolIo::begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes) {
  requests_.begin_epoch(epoch, std::move(lanes));
}

void PoolIo::ask(session::SharedContent content) { requests_.ask(std::move(content)); }

void PoolIo::recall(const loader::BatchRecord::Origin& origin) { requests_.recall(origin); }

void PoolIo::forget_recall(const loader::BatchRecord::Origin& origin) { requests_.forget_recall(origin); }

void PoolIo::lose_own_worker(uint64_t worker_id) {
  connections_.directory().forget_own(worker_id);
  set_roster(clock_now());
}

}  // namespace penstock::pool_client
