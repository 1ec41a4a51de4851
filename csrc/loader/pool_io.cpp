// SPDX-License-Identifier: Apache-2.0
#include "loader/pool_io.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>

#include "base/live_clock.h"

namespace penstock::loader {

using cluster::PoolSession;
using net::ConnectionEvent;
using net::Endpoint;
using std::chrono::milliseconds;
using wire::AnswerKind;
using wire::ToTrainer;
using wire::ToWorker;

namespace {

constexpr size_t kActionCountMax = 1 << 20;  // bounded by the requests outstanding, far below this
constexpr size_t kArrivalCountMax = 1 << 20;
constexpr size_t kMessagesInTurn = 16;                // of one worker, so that no other waits for long
constexpr auto kReconnectPause = milliseconds(2000);  // after a refusal that libzmq takes for final, or no descriptor
constexpr auto kIdleAfter = std::chrono::seconds(2);  // without a request: others may have the workers
constexpr auto kSilenceLooked = std::chrono::seconds(1);  // how often silent workers are looked for
constexpr size_t kQuotedSampleCountMax = 64;

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string spoken_samples(wire::IndexKind kind, std::span<const std::byte> indices) {
  if (kind != wire::IndexKind::kInteger && kind != wire::IndexKind::kIntegers) return "";
  const size_t count = indices.size() / sizeof(int64_t);
  std::string text = " (samples ";
  for (size_t place = 0; place < std::min(count, kQuotedSampleCountMax); ++place) {
    int64_t index = 0;
    std::memcpy(&index, indices.data() + place * sizeof index, sizeof index);
    text += (place > 0 ? ", " : "") + std::to_string(index);
  }
  if (count > kQuotedSampleCountMax) text += " and " + std::to_string(count - kQuotedSampleCountMax) + " more";
  return text + ")";
}

wire::Descriptor descriptor_of(wire::BatchKey key) { return {.sequence = key.sequence, .epoch = key.epoch}; }

}  // namespace

PoolIo::PoolIo(PoolIoOptions options, uint64_t trainer_id, std::optional<net::KeyRing> own_keys,
               std::vector<OwnWorker> own_workers)
    : BatchSource(kArrivalCountMax),
      options_(std::move(options)),
      trainer_id_(trainer_id),
      own_keys_(std::move(own_keys)),
      own_workers_(std::move(own_workers)),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      actions_(kActionCountMax),
      memory_(options_.arena_bytes),
      session_({.trainer_id = trainer_id,
                .credit_bytes = options_.credit_bytes,
                .dispatch = {.depth_max = options_.depth}}) {}

PoolIo::~PoolIo() { stop(); }

// ---- The trainer's thread

Result<void> PoolIo::start(std::unique_ptr<BatchStage> stage) {
  PENSTOCK_ASSERT(!thread_.joinable(), "the I/O thread runs already");
  if (!wake_fd_) return Error{Errc::kNoMemory, std::string("eventfd failed: ") + std::strerror(errno)};
  auto ready_set = net::ReadySet::open();
  if (!ready_set) return ready_set.error();
  stage_ = std::move(stage);
  context_ = std::make_unique<net::SocketContext>();
  ready_set_ = std::move(ready_set).value();
  links_ = std::make_unique<WorkerLinks>(*ready_set_);
  try {
    thread_ = std::jthread([this](const std::stop_token& token) { run_to_the_end(token); });
  } catch (const std::system_error& error) {
    return Error{Errc::kNoMemory, std::string("starting the thread that receives batches failed: ") + error.what() +
                                      "; raise the limit of processes and threads (ulimit -u, pids of a container)"};
  }
  return {};
}

void PoolIo::stop() {
  if (thread_.joinable()) {
    thread_.request_stop();
    inbox_.close();
    actions_.close();
    wake();
    thread_.join();
  }
  inbox_.clear();
  stage_.reset();
  context_.reset();
}

void PoolIo::use_blobs(std::vector<wire::BlobId> ids) {
  blobs_ = std::make_shared<const std::vector<wire::BlobId>>(std::move(ids));
}

void PoolIo::set_lanes(std::map<wire::Lane, LanePlaces::Place> places) { next_lanes_ = std::move(places); }

void PoolIo::lose_own_worker(uint64_t worker_id) {
  post([this, worker_id] {
    std::erase_if(own_workers_, [&](const OwnWorker& worker) { return worker.worker_id == worker_id; });
    set_roster(clock_now());
  });
}

void PoolIo::fetch(const wire::Request& request, std::span<const std::byte> body) {
  PENSTOCK_ASSERT(blobs_ != nullptr, "a batch was asked for before its job was named");
  Asked asked{.index_kind = request.index_kind,
              .indices = {body.begin(), body.end()},
              .epoch_seed = request.epoch_seed,
              .lane = options_.is_iterable ? request.shard_id + 1 : wire::kNoLane,
              .blobs = blobs_};
  const BatchKey key{.epoch = request.epoch, .sequence = request.sequence};
  post([this, key, asked = std::move(asked)]() mutable { ask(key, std::move(asked)); });
}

void PoolIo::announce(const wire::Request& request, std::span<const std::byte> body) {
  PENSTOCK_ASSERT(request.kind == wire::RequestKind::kEpoch, "a pool is told nothing else");
  post([this, epoch = request.epoch, seeds = std::vector<std::byte>(body.begin(), body.end()),
        lanes = std::exchange(next_lanes_, {})]() mutable {
    lanes_.begin(std::move(lanes));
    begin_epoch(epoch, std::move(seeds));
  });
}

void PoolIo::finish(Batch& batch) {
  if (stage_) stage_->finish(batch);
}

void PoolIo::post(std::function<void()> action) {
  if (actions_.push(std::move(action))) wake();
}

void PoolIo::wake() {
  // As in ClientIo: a sleeper is always woken, and a busy thread seldom.
  if (is_awake_.exchange(true)) return;
  const uint64_t one = 1;
  static_cast<void>(::write(wake_fd_.get(), &one, sizeof one));
}

std::string PoolIo::describe() const {
  const bool has_answered = standing_.controller_silence().has_value();
  return standing_.describe(options_.controller.text(),
                            has_answered ? "" : net::lookup_failure(options_.controller.host));
}

// ---- The I/O thread

void PoolIo::run_to_the_end(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "pk_pool_io");
  try {
    run(stop);
  } catch (const std::exception& error) {
    inbox_.fail(0, {Errc::kFailed, std::string("receiving batches of the pool failed: ") + error.what()});
  }
  part();
}

void PoolIo::run(const std::stop_token& stop) {
  if (auto begun = begin(); !begun) return inbox_.fail(0, begun.error());
  while (!stop.stop_requested()) {
    while (auto action = actions_.try_pop()) {
      (*action)();
      carry_out();
    }
    const Instant now = clock_now();
    // Why a worker declines comes before the roster that does without it.
    for (const uint64_t worker_id : links_->take_ready(now)) serve_worker(worker_id, now);
    if (auto served = serve_controller(now); !served) return inbox_.fail(0, served.error());
    connect_again(now);
    session_.tick(clock_now());
    carry_out();
    note_standing(clock_now());
    if (auto waited = wait(stop); !waited) return inbox_.fail(0, waited.error());
  }
}

Result<void> PoolIo::begin() {
  auto controller = ControllerLink::connect(*context_, options_.controller, options_.keys, clock_now());
  if (!controller) return controller.error();
  controller_ = std::move(controller).value();
  const auto controller_tag = ready_set_->add(controller_->socket().waitables());
  if (!controller_tag) return controller_tag.error();
  controller_tag_ = controller_tag.value();
  const auto wake_tag = ready_set_->add(wake_fd_.get());
  if (!wake_tag) return wake_tag.error();
  wake_tag_ = wake_tag.value();
  set_roster(clock_now());
  return {};
}

// Says goodbye. Sockets die on the thread that made them.
void PoolIo::part() {
  session_.leave(clock_now());
  carry_out();
  if (controller_) controller_->say_farewell(trainer_id_);
  links_.reset();
  ready_set_.reset();
  controller_.reset();
}

Result<void> PoolIo::wait(const std::stop_token& stop) {
  std::optional<Instant> due = earlier(controller_->due_at(), session_.next_tick());
  due = earlier(due, links_->due_at());
  for (const auto& [worker_id, at] : connect_again_at_) due = earlier(due, at);
  auto timeout = wait_time(due, clock_now());
  if (stage_ && stage_->reclaim() > 0) timeout = std::min(timeout, kReclaimInterval);
  is_awake_.store(false);
  // The set is asked all the same: it tells of links that have more than is taken in a turn.
  if (actions_.size() > 0 || stop.stop_requested()) timeout = milliseconds(0);
  const auto ready = ready_set_->wait(timeout);
  is_awake_.store(true);
  if (!ready) return ready.error();
  for (const uint64_t tag : ready.value()) {
    if (tag == wake_tag_) {
      uint64_t count = 0;
      static_cast<void>(::read(wake_fd_.get(), &count, sizeof count));
    }
    if (tag == controller_tag_) is_controller_ready_ = true;
    links_->note_ready(tag);
  }
  return {};
}

// ---- The controller

Result<void> PoolIo::serve_controller(Instant now) {
  if (!std::exchange(is_controller_ready_, false) && now < controller_->due_at()) return {};
  ready_set_->stir(controller_tag_);  // also when no wait told of it
  if (auto received = controller_->receive(now); !received) return received.error();
  if (auto roster = controller_->take_roster()) {
    pool_workers_ = std::move(roster->entries);
    set_roster(now);
    note_unfitness(roster->pool_count, roster->unfit_count);
  }
  controller_->report([this] { return make_report(); }, now);
  return {};
}

void PoolIo::set_roster(Instant now) {
  std::vector<wire::RosterEntry> entries;
  for (const OwnWorker& worker : own_workers_) entries.push_back({.worker_id = worker.worker_id, .incarnation = 1});
  for (const auto& entry : pool_workers_) entries.push_back(entry.worker);
  session_.set_roster(entries, now);
}

wire::TrainerReport PoolIo::make_report() {
  const auto& counters = inbox_.counters();
  const auto ready = ready_count_.load() + static_cast<uint32_t>(inbox_.arrival_count());
  return {.trainer_id = trainer_id_,
          .job = options_.job,
          .worker_count_max = is_idle(clock_now()) ? 0 : options_.worker_count_max,
          .queue = {.ready_batches = ready,
                    .asked_batches = static_cast<uint32_t>(asked_.size()),
                    .bytes_in_flight = (ready + asked_.size()) * memory_.largest_bytes(),
                    .waited_ns = counters.wait_ns.value(),
                    .delivered_batches = counters.batches.value()},
          .about = options_.about};
}

// ---- Workers

void PoolIo::connect(uint64_t worker_id) {
  connect_again_at_.erase(worker_id);
  const auto own = std::find_if(own_workers_.begin(), own_workers_.end(),
                                [&](const OwnWorker& worker) { return worker.worker_id == worker_id; });
  const auto named = std::find_if(pool_workers_.begin(), pool_workers_.end(),
                                  [&](const auto& entry) { return entry.worker.worker_id == worker_id; });
  if (own == own_workers_.end() && named == pool_workers_.end()) return;
  const bool is_own = own != own_workers_.end();
  auto endpoint = is_own ? Result<Endpoint>(own->endpoint) : Endpoint::parse(named->endpoint);
  if (!endpoint) return tell("worker " + spoken_worker(worker_id) + " cannot be used: " + endpoint.error().message);
  const net::KeyRing& keys = is_own ? *own_keys_ : options_.keys;
  auto socket =
      net::ClientSocket::connect(*context_, endpoint.value(), keys.own(), keys.public_key(net::Role::kWorker));
  const auto opened = socket ? links_->open(worker_id, endpoint.value(), std::move(socket).value()) : socket.error();
  if (!opened) {
    // No descriptor was left, most likely. The session asks for a connection once, so it is for us to try again.
    connect_again_at_[worker_id] = clock_now() + kReconnectPause;
    const std::string reason = "connecting to " + endpoint.value().text() + " failed: " + opened.error().message;
    if (standing_.note_refusal(worker_id, reason))
      tell("worker " + spoken_worker(worker_id) + " cannot be used yet: " + reason);
    return;
  }
  standing_.forget_refusal(worker_id);
}

void PoolIo::connect_again(Instant now) {
  std::vector<uint64_t> worker_ids;
  for (const auto& [worker_id, at] : connect_again_at_) {
    if (now >= at) worker_ids.push_back(worker_id);
  }
  for (const uint64_t worker_id : worker_ids) connect(worker_id);
}

void PoolIo::serve_worker(uint64_t worker_id, Instant now) {
  receive_from(worker_id, kMessagesInTurn, now);
  while (WorkerLink* link = links_->find(worker_id)) {
    if (link->reconnect_at && now >= *link->reconnect_at) {
      link->reconnect_at.reset();
      if (auto begun = link->socket().reconnect(); !begun) link->reconnect_at = now + kReconnectPause;
    }
    const auto event = link->socket().try_event();
    if (!event) return links_->note_served(worker_id);
    // What it had sent before counts: it is received first.
    if (event->kind == ConnectionEvent::Kind::kDisconnected)
      receive_from(worker_id, std::numeric_limits<size_t>::max(), now);
    if (links_->find(worker_id) == link) take_event(worker_id, *link, *event, now);
    carry_out();
  }
}

void PoolIo::take_event(uint64_t worker_id, WorkerLink& link, const ConnectionEvent& event, Instant now) {
  switch (event.kind) {
    case ConnectionEvent::Kind::kConnected: return session_.connected(worker_id, now);
    case ConnectionEvent::Kind::kDisconnected:
      link.forget_pieces();
      lost_at_ = link.endpoint().text();
      return session_.died(worker_id, now);
    case ConnectionEvent::Kind::kRefused: break;
  }
  if (event.is_final) link.reconnect_at = now + kReconnectPause;
  if (!event.is_final || std::exchange(link.is_trouble_told, true)) return;
  tell("worker " + spoken_worker(worker_id) + " cannot be used: " + event.reason);
}

void PoolIo::receive_from(uint64_t worker_id, size_t message_count_max, Instant now) {
  net::ClientReceipt receipt;
  for (size_t count = 0; count < message_count_max; ++count) {
    WorkerLink* link = links_->find(worker_id);
    if (link == nullptr) return;
    auto received = link->socket().try_receive(receipt);
    if (!received) return inbox_.fail(0, received.error());
    if (!received.value()) return;
    if (receipt.offence.empty()) {
      take_message(worker_id, *link, receipt.parts, now);
      carry_out();
    } else if (!std::exchange(link->is_trouble_told, true)) {
      tell("worker " + spoken_worker(worker_id) + " at " + link->endpoint().text() +
           " sent what no worker sends: " + receipt.offence);
    }
  }
}

void PoolIo::take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now) {
  const auto head = parts.front().bytes();
  const auto piece = parts.size() == 2 ? parts[1].bytes() : std::span<const std::byte>();
  const auto complain = [&](const std::string& what) {
    if (std::exchange(link.is_trouble_told, true)) return;
    tell("worker " + spoken_worker(worker_id) + " at " + link.endpoint().text() + " cannot be used: " + what);
  };
  if (parts.size() > 2) return complain("it sent " + std::to_string(parts.size()) + " parts where two are the most");
  if (wire::is_blob_message(head)) {
    const auto message = wire::parse_blob_message(head, piece.size());
    if (!message) return complain(message.error().message);
    const auto* wish = std::get_if<wire::BlobWish>(&message.value());
    if (wish == nullptr) return complain("it sent a blob, which only trainers do");
    return link.hand_out(*wish, shelf_.find(wish->id));
  }
  const auto answer = wire::parse_to_trainer(head, piece.size());
  if (!answer) return complain(answer.error().message);
  if (answer.value().worker_id != worker_id) return;  // of another worker that listens there now
  if (!std::exchange(link.has_spoken, true)) standing_.forget_refusal(worker_id);
  take_answer(worker_id, link, answer.value(), piece, now);
}

void PoolIo::take_answer(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer,
                         std::span<const std::byte> piece, Instant now) {
  const ToTrainer& message = answer.message;
  if (message.kind == ToTrainer::Kind::kRefused || message.kind == ToTrainer::Kind::kUnfit)
    note_refusal(worker_id, answer);
  // Of a batch that nobody waits for any more the bytes are left alone.
  const bool is_awaited = asked_.contains(message.key);
  if (!piece.empty() && is_awaited && !link.take_piece(answer, piece, memory_)) {
    // Something before it was lost: as if this one were.
    static_cast<void>(session_.receive(worker_id, {.kind = ToTrainer::Kind::kBroken, .link = message.link}, 0, now));
    return;
  }
  if (message.kind == ToTrainer::Kind::kPiece) {
    static_cast<void>(session_.receive(worker_id, message, 0, now));  // a sign of life
    return;
  }
  std::optional<IncomingBatch> whole;
  if (answer.kind == AnswerKind::kBatch && is_awaited) {
    whole = link.take_whole(message.key);
    if (!whole) {
      static_cast<void>(session_.receive(worker_id, {.kind = ToTrainer::Kind::kBroken, .link = message.link}, 0, now));
      return;
    }
  }
  const bool counts = session_.receive(worker_id, message, answer.payload_bytes, now);
  if (!counts) return;
  was_served_ = true;
  const wire::Lane lane = asked_.at(message.key).lane;
  if (answer.kind == AnswerKind::kEnd) return end_lane(message.key, lane, now);
  if (lane != wire::kNoLane) lanes_.answered(lane, answer.state);
  if (whole) memory_.note_received(answer.payload_bytes);  // not what an error claims
  deliver(message.key, make_batch(worker_id, answer, std::move(whole)));
}

std::unique_ptr<Batch> PoolIo::make_batch(uint64_t worker_id, const wire::PoolAnswer& answer,
                                          std::optional<IncomingBatch> whole) {
  wire::Descriptor descriptor = descriptor_of(answer.message.key);
  descriptor.flags = answer.flags;
  descriptor.fetch_time = answer.fetch_time;
  descriptor.prefix_time = answer.prefix_time;
  Batch::RemoteError error{.type_name = {}, .text = {}, .worker = spoken_worker(worker_id)};
  if (whole) {
    auto made = whole->finish(descriptor, answer.record_bytes, options_.allow_pickle);
    if (made) {
      made.value()->set_state(answer.state);
      return std::move(made).value();
    }
    error.type_name = "penstock.errors.PenstockError";
    error.text = "the batch cannot be read: " + made.error().message;
    error.worker = spoken_place(worker_id);
  } else {
    const std::string_view text = text_of(answer.body);
    const size_t end = std::min(text.find('\0'), text.size());
    error.type_name = text.substr(0, end);
    error.text = text.substr(std::min(end + 1, text.size()));
  }
  auto batch = Batch::from_error(descriptor, std::move(error));
  batch->set_state(answer.state);
  return batch;
}

void PoolIo::end_lane(BatchKey key, wire::Lane lane, Instant now) {
  ended_lanes_.insert(lane);
  session_.end_lane(key.epoch, lane, now);
  std::erase_if(asked_, [&](const auto& item) { return item.second.lane == lane; });
  answered_at_ = now;
  if (inbox_.is_stale(key.epoch)) return;
  inbox_.arrive({.kind = Arrival::Kind::kEnd, .epoch = key.epoch, .sequence = key.sequence, .batch = {}, .error = {}});
}

bool PoolIo::is_idle(Instant now) const { return asked_.empty() && now - answered_at_ >= kIdleAfter; }

void PoolIo::deliver(BatchKey key, std::unique_ptr<Batch> batch) {
  asked_.erase(key);
  answered_at_ = clock_now();
  if (inbox_.is_stale(key.epoch)) return inbox_.counters().stale_batches.add(1);
  if (stage_ && !batch->remote_error()) {
    if (auto begun = stage_->begin(*batch); !begun) return inbox_.fail(0, begun.error());
  }
  inbox_.arrive({.kind = Arrival::Kind::kBatch,
                 .epoch = key.epoch,
                 .sequence = key.sequence,
                 .batch = std::move(batch),
                 .error = {}});
}

std::string PoolIo::spoken_place(uint64_t worker_id) const {
  const WorkerLink* link = links_->find(worker_id);
  return spoken_worker(worker_id) + (link == nullptr ? "" : " at " + link->endpoint().text());
}

void PoolIo::note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer) {
  const std::string reason(text_of(answer.body));
  if (reason.empty()) return;
  if (standing_.note_refusal(worker_id, reason) && answer.message.kind == ToTrainer::Kind::kUnfit)
    tell("worker " + spoken_place(worker_id) + " does not work for this trainer: " + reason);
}

// When every worker has declined nothing will ever come, unless others join: that is an error for a job that nobody
// has run yet. The worker that ran another may come back.
void PoolIo::note_unfitness(uint32_t pool_count, uint32_t unfit_count) {
  standing_.note_pool(pool_count, unfit_count);
  const bool is_hopeless =
      unfit_count > 0 && unfit_count == pool_count && session_.unfit_count() == session_.known_count();
  if (!std::exchange(is_hopeless_, is_hopeless) && is_hopeless) {
    const std::string news = "no worker of the pool can run this job: " + describe();
    if (was_served_) return tell(news + "; training goes on when one joins that can");
    inbox_.fail(0, {Errc::kFailed, news});
  }
}

// ---- Requests

void PoolIo::begin_epoch(uint32_t epoch, std::vector<std::byte> seeds) {
  const Instant now = clock_now();
  for (const auto& [key, asked] : asked_) session_.forget(key, now);
  asked_.clear();
  for (const wire::Lane lane : ended_lanes_) session_.end_lane(epoch_, lane, now);
  ended_lanes_.clear();
  epoch_ = epoch;
  seeds_ = std::move(seeds);
}

void PoolIo::ask(BatchKey key, Asked asked) {
  if (key.epoch != epoch_ || ended_lanes_.contains(asked.lane)) return;
  const uint64_t bytes = asked.indices.size() + seeds_.size() + asked.blobs->size() * sizeof(wire::BlobId);
  if (bytes > wire::kPoolBodyBytesMax / 2) {
    return deliver(key, Batch::from_error(descriptor_of(key),
                                          {.type_name = "ValueError",
                                           .text = "the indices of " + wire::to_text(key) + " are " +
                                                   std::to_string(asked.indices.size()) +
                                                   " bytes, more than a request to a pool may have; use smaller "
                                                   "batches, or indices that are integers",
                                           .worker = {}}));
  }
  const Instant now = clock_now();
  if (is_idle(now) && controller_) controller_->hurry(now);
  const wire::Lane lane = asked.lane;
  asked_.insert_or_assign(key, std::move(asked));
  session_.ask(key, lane, now);
}

void PoolIo::carry_out() {
  using Kind = PoolSession::Command::Kind;
  for (auto commands = session_.take_commands(); !commands.empty(); commands = session_.take_commands()) {
    for (const PoolSession::Command& command : commands) {
      switch (command.kind) {
        case Kind::kConnect: connect(command.worker_id); break;
        case Kind::kDisconnect:
          connect_again_at_.erase(command.worker_id);
          if (const WorkerLink* link = links_->find(command.worker_id); link != nullptr && !link->has_spoken)
            standing_.forget_refusal(command.worker_id);         // that it is silent is of no interest any more
          links_->close(command.worker_id, net::kFarewellTime);  // a goodbye may be on its way
          break;
        case Kind::kRenew: links_->renew(command.worker_id); break;
        case Kind::kSend: send(command); break;
        case Kind::kFail: fail_batch(command.key, command.death_count); break;
      }
    }
  }
}

void PoolIo::send(const PoolSession::Command& command) {
  if (links_->find(command.worker_id) == nullptr) return;
  wire::PoolRequest request{.message = command.message};
  std::vector<std::byte> state;
  if (command.message.kind == ToWorker::Kind::kRequest) {
    const auto found = asked_.find(command.message.key);
    if (found == asked_.end()) return;  // forgotten meanwhile
    const Asked& asked = found->second;
    if (command.message.is_lane_start) state = lanes_.start_of(command.message.lane);
    request.index_kind = asked.index_kind;
    request.epoch_seed = asked.epoch_seed;
    request.indices = asked.indices;
    request.seeds = seeds_;
    request.state = state;
    request.blobs = *asked.blobs;
  }
  // What does not get through leaves a gap in the link's stamps, which the worker notices.
  links_->send(command.worker_id, wire::write_to_worker(request));
}

void PoolIo::fail_batch(BatchKey key, uint32_t death_count) {
  const auto found = asked_.find(key);
  if (found == asked_.end()) return;
  const std::string samples = spoken_samples(found->second.index_kind, found->second.indices);
  deliver(key, Batch::from_error(
                   descriptor_of(key),
                   {.type_name = "RuntimeError",
                    .text = std::to_string(death_count) + " workers died one after the other while they made " +
                            wire::to_text(key) + samples + ", the last ones with nothing else to do" +
                            (lost_at_.empty() ? "" : " (one of them at " + lost_at_ + ")") +
                            "; look for what ends the process there (memory, a crash in native code): run it with "
                            "num_workers=0 and pool=\"\"",
                    .worker = {}}));
}

// ---- What the user is told

void PoolIo::note_standing(Instant now) {
  const size_t open_count = session_.open_count();
  const auto before = worker_count_.exchange(static_cast<uint32_t>(open_count));
  if (open_count > before) inbox_.arrive({.kind = Arrival::Kind::kGrown, .batch = {}, .error = {}});
  const auto silence = controller_->silence(now);
  if (controller_->has_answered() && silence >= kSilenceTold) {
    if (!std::exchange(is_silence_told_, true))
      tell("the controller at " + options_.controller.text() + " has not answered for " +
           std::to_string(std::chrono::duration_cast<std::chrono::seconds>(silence).count()) +
           " s; training goes on with the workers that it has, and new ones join once a controller is there again");
  } else {
    is_silence_told_ = false;
  }
  standing_.note({.has_answered = controller_->has_answered(), .trouble = controller_->trouble(), .silence = silence},
                 session_.known_count(), open_count);
  if (now < silent_links_at_) return;
  silent_links_at_ = now + kSilenceLooked;
  for (const uint64_t worker_id : links_->silent_since(now - kSilenceTold)) {
    const WorkerLink& link = *links_->find(worker_id);
    const std::string reason = "has not answered at " + link.endpoint().text() +
                               "; see that this machine can reach it there (firewalls, penstock worker --advertise)";
    if (standing_.note_refusal(worker_id, reason)) tell("worker " + spoken_worker(worker_id) + " " + reason);
  }
}

void PoolIo::tell(std::string news) {
  inbox_.arrive({.kind = Arrival::Kind::kNews, .batch = {}, .error = Error{Errc::kFailed, std::move(news)}});
}

}  // namespace penstock::loader
