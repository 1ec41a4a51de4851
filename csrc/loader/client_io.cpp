// SPDX-License-Identifier: Apache-2.0
#include "loader/client_io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "base/child_process.h"
#include "base/clock.h"
#include "base/result.h"

namespace penstock::loader {

using session::Dispatch;
using shm::Channel;
using std::chrono::milliseconds;
using wire::AnswerKind;
using wire::BatchKey;
using wire::FromJob;
using wire::ToJob;

namespace {

// A worker that has answered receives its next request within some tenths of a millisecond. Requests for far more work
// than that wait in the trainer for the first free worker, not behind a slow batch.
constexpr auto kRequestAheadBelow = std::chrono::milliseconds(5);
constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();

}  // namespace

ToJob work_of(const session::RequestContent& content) {
  const wire::BatchRequest& request = content.request;
  return {.kind = ToJob::Kind::kWork,
          .index_kind = request.index_kind,
          .key = {.epoch = request.epoch, .sequence = request.sequence},
          .lane = request.shard_id + 1,
          .epoch_seed = request.epoch_seed,
          .first_place = request.first_place,
          .indices = content.indices};
}

LocalDispatch::LocalDispatch(uint32_t worker_count, uint32_t depth)
    : dispatch_({.depth_max = depth, .request_ahead_below = kRequestAheadBelow, .hedges = false, .blames_all = true}),
      workers_(worker_count) {}

std::vector<LocalDispatch::Send> LocalDispatch::take_sends() { return std::exchange(sends_, {}); }

std::vector<LocalDispatch::Failure> LocalDispatch::take_failures() { return std::exchange(failures_, {}); }

void LocalDispatch::announce(ToJob::Kind kind, uint32_t epoch, Message message, Instant now) {
  if (kind == ToJob::Kind::kEarlyEpoch) {
    // Announced with the early epoch's first request, so that a worker does not switch to it before its other requests
    // of this epoch arrive.
    early_epoch_ = epoch;
    early_message_ = std::move(message);
    for (Worker& worker : workers_) worker.knows_early = false;
    return;
  }
  early_epoch_.reset();
  dispatch_.forget_other_epochs(epoch, now);
  // A worker skips requests of finished epochs, so a late worker may never answer.
  for (uint32_t worker_id = 0; worker_id < workers_.size(); ++worker_id) end_lateness(worker_id, now);
  for (uint32_t worker_id = 0; worker_id < workers_.size(); ++worker_id) sends_.push_back({worker_id, message});
  carry_out(now);
}

void LocalDispatch::ask(BatchKey key, session::SharedContent content, Instant now) {
  dispatch_.ask(key, wire::kNoLane, now, std::move(content));
  carry_out(now);
}

void LocalDispatch::worker_joined(uint32_t worker_id, Instant now) {
  dispatch_.add_worker(worker_id, kNoBound, now);
  carry_out(now);
}

void LocalDispatch::worker_died(uint32_t worker_id, Instant now) {
  ++lost_count_;
  workers_[worker_id].is_dead = true;
  dispatch_.lose_worker(worker_id, session::Loss::kDied, now);
  carry_out(now);
}

bool LocalDispatch::answered(uint32_t worker_id, BatchKey key, bool dataset_stays, Instant now) {
  Worker& worker = workers_[worker_id];
  if (worker.dataset_stays != dataset_stays) {
    worker.dataset_stays = dataset_stays;
    dispatch_.set_hedges(std::ranges::all_of(
        workers_, [](const Worker& one) { return one.is_dead || one.dataset_stays.value_or(true); }));
  }
  end_lateness(worker_id, now);
  const bool counts = dispatch_.answered(worker_id, key, 1, now);
  carry_out(now);
  return counts;
}

void LocalDispatch::tick(Instant now) {
  dispatch_.tick(now);
  carry_out(now);
}

void LocalDispatch::carry_out(Instant now) {
  for (auto commands = dispatch_.take_commands(); !commands.empty(); commands = dispatch_.take_commands()) {
    for (const Dispatch::Command& command : commands) {
      switch (command.kind) {
        case Dispatch::Command::Kind::kSendRequest: send_request(command.worker, command.key); break;
        case Dispatch::Command::Kind::kFail: failures_.push_back({command.key, command.death_count}); break;
        case Dispatch::Command::Kind::kCancel:  // a local worker makes it anyway, and its answer is dropped
          if (!command.has_come) break;
          workers_[command.worker].is_late = true;
          dispatch_.lose_worker(command.worker, session::Loss::kSilent, now);
          break;
        case Dispatch::Command::Kind::kIdle: break;
      }
    }
  }
}

void LocalDispatch::end_lateness(uint32_t worker_id, Instant now) {
  Worker& worker = workers_[worker_id];
  if (std::exchange(worker.is_late, false) && !worker.is_dead) dispatch_.add_worker(worker_id, kNoBound, now);
}

void LocalDispatch::send_request(uint32_t worker_id, BatchKey key) {
  const auto content = dispatch_.content_of(key);
  if (!content) return;  // forgotten right after its assignment
  Worker& worker = workers_[worker_id];
  if (early_epoch_ == key.epoch && !worker.knows_early) {
    worker.knows_early = true;
    sends_.push_back({worker_id, early_message_});
  }
  sends_.push_back({worker_id, wire::write_to_job(work_of(*content))});
}

namespace {

std::vector<std::byte> copy_of(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

Fault wrong_answer(const std::string& what) {
  return {Errc::kMalformed, "a local worker sent an invalid message: " + what};
}

wire::BatchFacts facts_of_message(uint32_t worker_id, const FromJob& message) {
  return {.flags = message.flags,
          .is_transient = message.place && message.place->is_transient,
          .sequence = message.key.sequence,
          .epoch = message.key.epoch,
          .worker_id = worker_id,
          .record_bytes = message.record_bytes,
          .record_offset = message.payload_bytes - message.record_bytes,
          .slab_bytes = message.place ? message.place->slab_bytes : 0,
          .fetch_time = message.fetch_time,
          .prefix_time = message.prefix_time,
          .samples = message.samples};
}

}  // namespace

ClientIo::ClientIo(const ClientIoOptions& options)
    : BatchSource(options.arrival_count_max),
      options_(options),
      loop_("pk_client_io", "which receives batches from local workers", *this) {
  workers_.reserve(options_.worker_count);
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id)
    workers_.emplace_back(views_, inbox_.counters().arenas);
  if (options_.any_worker_depth > 0) dispatch_.emplace(options_.worker_count, options_.any_worker_depth);
}

ClientIo::~ClientIo() { stop(); }

Result<ChannelFds> ClientIo::open_channel(uint32_t worker_id) {
  Worker& worker = workers_.at(worker_id);
  PENSTOCK_ASSERT(!worker.channel, "worker ", worker_id, " already has a channel");
  auto ends = Channel::open_pair();
  if (!ends) return ends.error();
  worker.channel.emplace(std::move(ends.value().here));
  worker.worker_end = std::move(ends.value().there);
  return ChannelFds{.trainer = worker.channel->fd(), .worker = worker.worker_end.get()};
}

Result<void> ClientIo::note_started(uint32_t worker_id, pid_t pid) {
  Worker& worker = workers_.at(worker_id);
  worker.worker_end.reset();
  if (pid == 0) return {};
  worker.process = open_process_handle(pid);
  if (worker.process) return {};
  const int error_number = errno;
  worker.has_ended = error_number == ESRCH;
  // A system without process handles is no reason to fail: usually the end of a worker also shows on its channel.
  if (error_number != EMFILE && error_number != ENFILE && error_number != ENOMEM) return {};
  return Fault{Errc::kNoMemory, std::string("watching a worker's process failed: ") + std::strerror(error_number) +
                                    "; raise the limit of open files (ulimit -n)"};
}

Result<void> ClientIo::start(Stages stages) {
  if (auto started = stages_.start(std::move(stages)); !started) return started;
  return loop_.start();
}

void ClientIo::stop() {
  inbox_.close();
  stages_.close();
  loop_.stop();
  stages_.stop();
  end();  // in case the loop was never started
}

void ClientIo::fetch(const std::shared_ptr<session::RequestContent>& content) {
  if (dispatch_) {
    loop_.post([this, content] {
      dispatch_->ask({.epoch = content->request.epoch, .sequence = content->request.sequence}, content, clock_now());
      send_dispatched();
    });
    return;
  }
  loop_.post([this, content] {
    const auto head = wire::to_job_head(work_of(*content));
    const std::span<const std::byte> parts[] = {head, content->indices};
    post(worker_of(content->request.shard_id), parts);
  });
}

void ClientIo::announce(const ToJob& message) {
  auto bytes = wire::write_to_job(message);
  const bool is_epoch = message.kind == ToJob::Kind::kEpoch || message.kind == ToJob::Kind::kEarlyEpoch;
  if (is_epoch && dispatch_) {
    loop_.post([this, kind = message.kind, epoch = message.key.epoch, bytes = std::move(bytes)]() mutable {
      dispatch_->announce(kind, epoch, std::move(bytes), clock_now());
      send_dispatched();
    });
    return;
  }
  loop_.post([this, shared = std::make_shared<const std::vector<std::byte>>(std::move(bytes))] {
    for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) post(worker_id, shared);
  });
}

void ClientIo::dismiss(uint32_t worker_id) {
  loop_.post([this, worker_id] { leave(worker_id); });
}

Result<void> ClientIo::begin() {
  auto ready_set = net::ReadySet::open();
  if (!ready_set) return ready_set.error();
  ready_set_ = std::move(ready_set).value();
  for (uint32_t worker_id = 0; worker_id < options_.worker_count; ++worker_id) {
    Worker& worker = workers_[worker_id];
    if (!worker.channel) continue;
    const auto channel_tag = ready_set_->add(worker.channel->fd());
    if (!channel_tag) return channel_tag.error();
    worker.channel_tag = channel_tag.value();
    watched_.emplace(worker.channel_tag, Watched{.worker_id = worker_id, .is_process = false});
    if (worker.has_ended) serve_process(worker_id);
    if (!worker.process) continue;
    const auto process_tag = ready_set_->add(worker.process.get());
    if (!process_tag) return process_tag.error();
    worker.process_tag = process_tag.value();
    watched_.emplace(worker.process_tag, Watched{.worker_id = worker_id, .is_process = true});
  }
  return {};
}

Result<void> ClientIo::serve() {
  for (const uint64_t tag : ready_) {
    const auto found = watched_.find(tag);
    if (found == watched_.end()) continue;  // its worker was lost in this turn
    const Watched watched = found->second;
    if (watched.is_process) {
      serve_process(watched.worker_id);
    } else {
      serve_channel(watched.worker_id);
    }
  }
  ready_.clear();
  if (dispatch_) {
    dispatch_->tick(clock_now());
    send_dispatched();
  }
  return {};
}

Result<bool> ClientIo::wait(int wake_fd, bool may_sleep) {
  if (wake_tag_ == 0) {
    const auto tag = ready_set_->add(wake_fd);
    if (!tag) return tag.error();
    wake_tag_ = tag.value();
  }
  auto timeout = milliseconds(-1);
  if (const auto next = dispatch_ ? dispatch_->next_tick() : std::nullopt)
    timeout = std::max(milliseconds(1), wait_time(next, clock_now()));
  if (!may_sleep) timeout = milliseconds(0);  // descriptors that are ready are collected in any case
  const auto ready = ready_set_->wait(timeout);
  if (!ready) return ready.error();
  bool is_woken = false;
  for (const uint64_t tag : ready.value()) {
    is_woken = is_woken || tag == wake_tag_;
    if (tag != wake_tag_) ready_.push_back(tag);
  }
  return is_woken;
}

void ClientIo::end() {
  watched_.clear();
  ready_set_.reset();
  for (Worker& worker : workers_) {
    if (worker.channel) worker.channel->shut_down();
    worker.channel.reset();
    worker.worker_end.reset();
    worker.process.reset();
  }
}

void ClientIo::send_dispatched() {
  for (const auto& send : dispatch_->take_sends()) {
    const std::span<const std::byte> parts[] = {send.message};
    post(send.worker_id, parts);
  }
  for (const auto& failure : dispatch_->take_failures()) {
    const std::string text =
        std::to_string(failure.death_count) + " workers in a row died while making " + wire::to_text(failure.key) +
        "; check these samples for the cause (memory, a crash in native code): run the program with num_workers=0";
    stages_.arrive({.kind = Arrival::Kind::kBatch,
                    .epoch = failure.key.epoch,
                    .sequence = failure.key.sequence,
                    .batch = Batch::from_error({.sequence = failure.key.sequence, .epoch = failure.key.epoch},
                                               {.type_name = "RuntimeError", .text = text, .worker = {}}),
                    .error = {}});
  }
}

void ClientIo::post(uint32_t worker_id, Channel::Parts parts) {
  auto& channel = workers_[worker_id].channel;
  if (channel) note_posted(worker_id, channel->post(parts));
}

void ClientIo::post(uint32_t worker_id, const Message& message) {
  auto& channel = workers_[worker_id].channel;
  if (channel) note_posted(worker_id, channel->post(message));
}

// A request that cannot be sent still counts as assigned to its worker, so another worker makes it only if this one is
// lost.
void ClientIo::note_posted(uint32_t worker_id, const Result<void>& posted) {
  // The end of a peer is detected on the receiving side, after the peer's last answer.
  if (posted || posted.error().code == Errc::kClosed) return watch_output(worker_id);
  give_up(worker_id, {posted.error().code, "worker " + std::to_string(worker_id) + ": " + posted.error().message});
}

void ClientIo::watch_output(uint32_t worker_id) {
  Worker& worker = workers_[worker_id];
  const bool has_unsent = worker.channel->has_unsent();
  if (std::exchange(worker.is_output_watched, has_unsent) == has_unsent) return;
  if (auto watched = ready_set_->watch_output(worker.channel_tag, has_unsent); !watched)
    stages_.fail(worker_id, watched.error());
}

void ClientIo::serve_channel(uint32_t worker_id) {
  auto& channel = workers_[worker_id].channel;
  if (channel->has_unsent()) note_posted(worker_id, channel->flush());
  if (channel) static_cast<void>(receive(worker_id));
}

void ClientIo::serve_process(uint32_t worker_id) {
  while (receive(worker_id)) {
  }
  if (workers_[worker_id].channel) lose(worker_id);
}

bool ClientIo::receive(uint32_t worker_id) {
  auto& channel = workers_[worker_id].channel;
  const auto filled = channel->fill();
  if (!filled && filled.error().code == Errc::kClosed) {
    lose(worker_id);
    return false;
  }
  if (!filled) {
    give_up(worker_id, filled.error());
    return false;
  }
  if (!filled.value()) return false;
  while (channel) {  // ends if a reaction to an answer cannot be sent
    const auto message = channel->next();
    if (!message) {
      give_up(worker_id, message.error());
    } else if (!message.value()) {
      return true;
    } else {
      receive_message(worker_id, *message.value());
    }
  }
  return false;
}

void ClientIo::give_up(uint32_t worker_id, const Fault& fault) {
  if (dispatch_ && dispatch_->has_others()) {
    stages_.arrive({.kind = Arrival::Kind::kNews,
                    .worker_id = worker_id,
                    .batch = {},
                    .error = Fault{fault.code, "worker " + std::to_string(worker_id) +
                                                   " is no longer used, and the other workers make its batches: " +
                                                   fault.message}});
  } else {
    stages_.fail(worker_id, fault);
  }
  lose(worker_id);
}

void ClientIo::refuse(uint32_t worker_id, const Fault& fault) {
  if (dispatch_) {
    give_up(worker_id, fault);
  } else {
    stages_.fail(worker_id, fault);
  }
}

// `received` must not be used once its worker was given up: its bytes belong to the channel.
void ClientIo::receive_message(uint32_t worker_id, const Channel::Message& received) {
  const auto parsed = wire::parse_from_job(received.bytes, wire::kLocalBodyBytesMax);
  if (!parsed) return refuse(worker_id, parsed.error());
  const FromJob& message = parsed.value();
  if (!received.fds.empty() && message.answer != AnswerKind::kBatch)
    return refuse(worker_id, wrong_answer("a message that mentions no files has files attached"));
  switch (message.kind) {
    case FromJob::Kind::kReady:
      if (std::exchange(workers_[worker_id].is_ready, true)) return refuse(worker_id, wrong_answer("it started twice"));
      if (!dispatch_) return;
      dispatch_->worker_joined(worker_id, clock_now());
      return send_dispatched();
    case FromJob::Kind::kStates: return inbox_.arrive_states(copy_of(message.state));
    case FromJob::Kind::kResult: break;
    case FromJob::Kind::kGivenUp:
    case FromJob::Kind::kDeclined:
    case FromJob::Kind::kBlobRequest:
      return refuse(worker_id, wrong_answer("only a job process gives up, rejects or requests blobs"));
  }
  if (message.answer == AnswerKind::kBatch) return receive_batch(worker_id, message, received.fds);
  if (message.answer == AnswerKind::kError)
    return refuse(worker_id, wrong_answer("an error of its dataset must be a batch that raises"));
  if (dispatch_) return refuse(worker_id, wrong_answer("a dataset without shards ended"));
  if (inbox_.is_stale(message.key.epoch)) return;
  stages_.arrive({.kind = Arrival::Kind::kEnd,
                  .worker_id = worker_id,
                  .epoch = message.key.epoch,
                  .sequence = message.key.sequence,
                  .state = copy_of(message.state),
                  .batch = {},
                  .error = {}});
}

void ClientIo::receive_batch(uint32_t worker_id, const FromJob& message, std::span<FileDescriptor> fds) {
  const wire::BatchKey key = message.key;
  auto batch = make_batch(worker_id, message, fds);
  if (!batch) return refuse(worker_id, batch.error());
  bool counts = true;
  if (dispatch_) {
    const bool dataset_stays = (message.flags & wire::kBatchDatasetStays) != 0;
    counts = dispatch_->answered(worker_id, key, dataset_stays, clock_now());
    send_dispatched();
  }
  if (inbox_.is_stale(key.epoch) || !counts) {  // the batch's destructor releases its slab
    inbox_.counters().stale_batches.add(1);
    return;
  }
  stages_.arrive({.kind = Arrival::Kind::kBatch,
                  .worker_id = worker_id,
                  .epoch = key.epoch,
                  .sequence = key.sequence,
                  .batch = std::move(batch).value(),
                  .error = {}});
}

Result<std::unique_ptr<Batch>> ClientIo::make_batch(uint32_t worker_id, const FromJob& message,
                                                    std::span<FileDescriptor> files) {
  constexpr bool kAllowPickle = true;  // local workers are child processes of this process
  const wire::BatchFacts facts = facts_of_message(worker_id, message);
  Result<std::unique_ptr<Batch>> batch = std::unique_ptr<Batch>();
  if (!message.state.empty()) return wrong_answer("the state of its dataset must be sent in a batch");
  if (message.place) {
    PassedMemory& memory = workers_[worker_id].memory;
    if (message.is_new_arena) {
      if (files.empty()) return Fault{Errc::kMalformed, "a worker announced a new arena without its file descriptor"};
      if (auto taken = memory.take_arena(message.place->arena_id, files.front()); !taken) return taken.error();
      files = files.subspan(1);
    }
    auto lease = memory.lease(*message.place);
    if (!lease) return lease.error();
    batch = Batch::from_slab(facts, std::move(lease).value(), kAllowPickle);
  } else {
    inbox_.counters().inline_batches.add(1);
    batch = Batch::from_parts(facts, copy_of(message.payload.last(facts.record_bytes)),
                              copy_of(message.payload.first(facts.record_offset)), kAllowPickle);
  }
  if (!batch) return batch;
  if (batch.value()->record().is_narrow())
    return Fault{Errc::kMalformed, "a batch of this machine has compressed tensors"};
  const uint32_t file_count = batch.value()->record().frame().shared_file_count();
  if (file_count != files.size())
    return Fault{Errc::kMalformed, "a worker passed " + std::to_string(files.size()) +
                                       " files with a batch whose tensors lie in " + std::to_string(file_count)};
  if (file_count == 0) return batch;
  std::vector<FileDescriptor> owned(std::make_move_iterator(files.begin()), std::make_move_iterator(files.end()));
  if (auto set = batch.value()->tensors().set_shared_files(std::move(owned)); !set) return set.error();
  return batch;
}

// Stops sending to the worker, receiving from it and watching its process.
void ClientIo::leave(uint32_t worker_id) {
  Worker& worker = workers_[worker_id];
  if (!worker.channel) return;
  for (const uint64_t tag : {worker.channel_tag, worker.process_tag}) {
    ready_set_->remove(tag);
    watched_.erase(tag);
  }
  worker.channel->shut_down();
  worker.channel.reset();
  worker.process.reset();
}

void ClientIo::lose(uint32_t worker_id) {
  leave(worker_id);
  auto kind = Arrival::Kind::kLost;
  if (dispatch_) {
    dispatch_->worker_died(worker_id, clock_now());
    if (dispatch_->has_workers()) kind = Arrival::Kind::kGone;
  }
  stages_.arrive({.kind = kind, .worker_id = worker_id, .batch = {}, .error = {}});
  if (dispatch_) send_dispatched();
}

}  // namespace penstock::loader
