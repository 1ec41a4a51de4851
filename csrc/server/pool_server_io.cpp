// SPDX-License-Identifier: Apache-2.0
#include "server/pool_server_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/process.h"
#include "base/result.h"
#include "net/socket.h"
#include "server/job_output.h"

namespace penstock::server {

using session::WorkerSession;
using std::chrono::milliseconds;
using wire::ToTrainer;
using wire::ToWorker;

namespace {

constexpr auto kLookInterval = milliseconds(200);  // between checks of the parent and of the controller's silence
constexpr int kReceiveCountMax = 256;              // before other events are handled
constexpr size_t kChoiceCountMax = 16;             // requests among which the next batch is chosen
constexpr int kKeptAnswersATurn = 16;              // before other events are handled

}  // namespace

PoolServerIo::PoolServerIo(const PoolServerOptions& options, const net::RunId& run, Maker& maker, shm::SlabPool* slabs)
    : options_(options), run_(run), parent_(options.parent_pid), maker_(maker), slabs_(slabs) {}

// Unless its loop has ended it, other workers may still wake it.
PoolServerIo::~PoolServerIo() {
  if (options_.store) options_.store->leave(run_.id);
}

Result<void> PoolServerIo::begin() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return Fault{Errc::kNoMemory, std::string("opening a pipe failed: ") + std::strerror(errno)};
  signal_read_fd_ = FileDescriptor(ends[0]);
  signal_write_fd_ = FileDescriptor(ends[1]);
  auto resolver = net::Resolver::open();
  if (!resolver) return resolver.error();
  resolver_ = std::move(resolver).value();
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  context_ = std::move(context).value();
  auto authenticator = net::Authenticator::start(*context_);
  if (!authenticator) return authenticator.error();
  authenticator_ = std::move(authenticator).value();
  auto server =
      net::ServerSocket::bind(*context_, *authenticator_, options_.bind, options_.keys,
                              {.allowed_roles = {net::Role::kTrainer}, .sharer_count = options_.sharer_count});
  if (!server) return server.error();
  server_ = std::move(server).value();
  endpoint_ = server_->endpoint();
  net::Endpoint advertised = options_.advertised.value_or(endpoint_);
  if (advertised.port == 0) advertised.port = endpoint_.port;
  advertised_ = advertised.text();
  advertised_host_ = advertised.host;
  if (auto opened = open_data_port(); !opened) return opened;
  if (!options_.handover.empty()) {
    PENSTOCK_ASSERT(slabs_ != nullptr, "slabs are required to send batches");
    auto handover = SlabHandover::listen(options_.handover, *slabs_);
    if (!handover) return handover.error();
    handover_ = std::move(handover).value();
  }
  if (auto opened = open_energy_meter(); !opened) return opened;
  if (options_.store) options_.store->join(run_.id, [&maker = maker_] { maker.wake(); });
  if (!options_.controller) return {};
  auto registration = Registration::open(*context_, *resolver_, *options_.controller, options_.keys,
                                         {.run = run_,
                                          .endpoint = advertised_,
                                          .about = options_.about,
                                          .name = options_.name,
                                          .job_kinds = options_.job_kinds,
                                          .torch = options_.torch,
                                          .log = options_.log},
                                         clock_now());
  if (!registration) return registration.error();
  registration_ = std::move(registration).value();
  session_.assign(0, /*is_to_part=*/false);  // the controller will send this worker's assignment
  return {};
}

Result<void> PoolServerIo::open_energy_meter() {
  const bool is_meter_required = !options_.powercap.empty();
  auto meter = EnergyMeter::open(is_meter_required ? options_.powercap : kPowercapFolder,
                                 [&maker = maker_] { return maker.cpu_time(); });
  if (meter) {
    energy_.emplace(std::move(meter).value());
  } else if (is_meter_required) {
    return Fault{Errc::kFailed,
                 meter.error().message + "; without --powercap the worker runs, but its energy consumption is unknown"};
  }
  return {};
}

wire::WorkerMeter PoolServerIo::meter() const {
  wire::WorkerMeter meter{.cpu_ns = static_cast<uint64_t>(maker_.cpu_time().count())};
  if (!energy_) return meter;
  if (const auto energy_uj = energy_->process_uj()) meter.energy_uj = energy_uj.value();
  return meter;
}

Result<void> PoolServerIo::open_data_port() {
  const net::Endpoint bind = options_.data_bind.value_or(net::Endpoint{.host = options_.bind.host, .port = 0});
  auto data = net::DataServer::bind(*context_, *authenticator_, bind,
                                    {.origin = options_.keys.origin(),
                                     .worker_id = run_.id,
                                     .ciphers = options_.ciphers,
                                     .sharer_count = options_.sharer_count},
                                    [&maker = maker_] { maker.wake(); });
  if (!data) return data.error();
  data_ = std::move(data).value();
  data_endpoint_ = data_->endpoint();
  net::Endpoint advertised = options_.data_advertised.value_or(net::Endpoint{.host = advertised_host_, .port = 0});
  if (advertised.port == 0) advertised.port = data_endpoint_.port;
  data_advertised_ = advertised.text();
  return {};
}

void PoolServerIo::end_because(End end) {
  if (std::exchange(has_ended_, true)) return;
  // Before the main thread is notified, since it may then end the process.
  if (end.word && options_.supervisor) options_.supervisor(*end.word, end.text);
  maker_.close(std::move(end.reason));
  outbox_.clear();
  held_.clear();
  copies_.clear();
  if (options_.store) options_.store->leave(run_.id);
  blobs_ = {};
  if (registration_) registration_->deregister();
  registration_.reset();
  handover_.reset();
  data_.reset();
  server_.reset();
  authenticator_.reset();
  context_.reset();
}

void PoolServerIo::end() { end_because({.reason = {Errc::kClosed, "this worker was stopped"}}); }

Result<void> PoolServerIo::serve() {
  if (has_ended_) {
    grace_.note(is_orphan());
    return {};
  }
  const Instant now = clock_now();
  if (auto received = receive(now); !received) {
    end_because({.reason = received.error()});
    return {};
  }
  // A worker that the controller refuses would be refused again.
  if (auto heard = registration_ ? registration_->receive(session_, now) : Result<void>(); !heard) {
    end_because({.reason = heard.error(), .word = ExitWord::kUseless});
    return {};
  }
  take_signals(now);
  session_.tick(now);
  if (options_.store) serve_store();
  serve_maker(now);
  carry_out();
  note_standing();
  if (energy_) energy_->tick(now);
  for (std::string& notice : server_->take_notices()) maker_.add_notice(std::move(notice));
  outbox_.pump(*server_, *data_, handover_.get(), outbox_.has_messages() ? meter() : wire::WorkerMeter{});
  if (registration_) {
    registration_->report(session_, maker_watch_.is_stuck() ? maker_watch_.abandoned() : Duration(0), now);
    for (std::string& notice : registration_->take_notices()) maker_.add_notice(std::move(notice));
  }
  if (auto end = end_of(now)) end_because(*std::move(end));
  if (!has_ended_ && options_.supervisor) end_lost_process(now);
  return {};
}

Result<void> PoolServerIo::receive(Instant now) {
  net::ServerReceipt receipt;
  for (int count = 0; count < kReceiveCountMax; ++count) {
    auto received = server_->try_receive(receipt);
    if (!received) return received.error();
    if (!received.value()) break;
    if (receipt.parts.empty()) continue;  // the message violated the protocol
    const auto first = receipt.parts.front().bytes();
    const bool has_piece = receipt.parts.size() == 2;
    const auto piece = has_piece ? receipt.parts[1].bytes() : std::span<const std::byte>();
    if (wire::is_blob_message(first)) {
      if (auto message = wire::parse_blob_message(first, piece.size()))
        take_blob(message.value(), piece, receipt.peer, now);
      continue;
    }
    const auto request = wire::parse_to_worker(first);
    if (request && receipt.parts.size() == 1) {
      take_request(request.value(), receipt.peer, now);
    } else if (!request && request.error().code == Errc::kMismatch) {
      // The trainer's parser reports the fault when it reads this answer.
      outbox_.push({.routing_id = receipt.peer.routing_id,
                    .message = {.kind = ToTrainer::Kind::kDeclined},
                    .worker_id = run_.id,
                    .text = request.error().message});
    }
  }
  return data_->receive();
}

// An id does not authenticate its sender: a trainer's ids are shown to operators, and to all who read their dashboard.
bool PoolServerIo::is_of_its_trainer(const wire::PoolRequest& request, const net::Peer& peer) {
  const ToWorker& message = request.message;
  if (message.kind != ToWorker::Kind::kHello) {
    const auto route = routes_.find(message.trainer_id);
    return route == routes_.end() || route->second.routing_id == peer.routing_id;
  }
  if (net::run_id_of(peer.identity.key, request.secret) == message.trainer_id) return true;
  refuse_impostor(message, peer);
  return false;
}

void PoolServerIo::refuse_impostor(const ToWorker& hello, const net::Peer& peer) {
  outbox_.push({.routing_id = peer.routing_id,
                .message = {.kind = ToTrainer::Kind::kRefused, .link = hello.link},
                .worker_id = run_.id,
                .text = "trainer " + format_id(hello.trainer_id) + " belongs to another key or process"});
  if (!impostors_.insert(peer.identity.key).second) return;
  maker_.add_notice("rejected a process that falsely claims to be trainer " + format_id(hello.trainer_id) +
                    "; it has the key of " + (peer.user.empty() ? "the role trainer" : "the user " + peer.user) +
                    ": check who holds that key");
}

void PoolServerIo::take_request(const wire::PoolRequest& request, const net::Peer& peer, Instant now) {
  const ToWorker& message = request.message;
  if (!is_of_its_trainer(request, peer)) return;
  Route& route = routes_[message.trainer_id];
  // A message of an earlier link was in transit on the earlier connection.
  if (message.link >= route.link) {
    route.link = message.link;
    route.routing_id = peer.routing_id;
    route.key = peer.identity.key;
  }
  if (request.offer && message.link == route.link) route.offer = *request.offer;
  const size_t queued_before = session_.queued_count();
  session_.receive(message, now);
  const size_t queued_count = session_.queued_count();
  if (message.kind == ToWorker::Kind::kRequest && queued_count == queued_before + 1) {
    PoolWork work{.trainer_id = message.trainer_id,
                  .key = message.key,
                  .lane = message.lane,
                  .is_lane_start = message.is_lane_start,
                  .index_kind = request.index_kind,
                  .epoch_seed = request.epoch_seed,
                  .first_place = request.first_place,
                  .link_bytes_per_s = request.link_mb_per_s * 1e6,
                  .indices = {request.indices.begin(), request.indices.end()},
                  .seeds = {request.seeds.begin(), request.seeds.end()},
                  .state = {request.state.begin(), request.state.end()},
                  .blobs = {request.blobs.begin(), request.blobs.end()}};
    work.name = name_of(work, peer.identity.key);
    work.is_named = work.name != nullptr;
    queued_.emplace(message.key, std::move(work));
  }
  if (message.kind == ToWorker::Kind::kCancel && queued_count < queued_before) queued_.erase(message.key);
  carry_out();
  if (message.kind == ToWorker::Kind::kBye && !message.is_continued && session_.trainer_id() != message.trainer_id)
    maker_.end_trainer(message.trainer_id);
  // As long as this worker has any state of a trainer, no other peer can send a goodbye in the trainer's name.
  std::erase_if(routes_, [&](const auto& item) {
    return item.first != session_.trainer_id() && !maker_.has_process_of(item.first);
  });
}

void PoolServerIo::take_blob(const wire::BlobMessage& message, std::span<const std::byte> bytes, const net::Peer& peer,
                             Instant now) {
  // Other peers who know the job's id could corrupt its bytes, or claim that there are none.
  const auto route = running_ ? routes_.find(running_->trainer_id) : routes_.end();
  if (route == routes_.end() || route->second.routing_id != peer.routing_id) return;
  if (const auto* piece = std::get_if<wire::BlobPiece>(&message); piece != nullptr) {
    if (!fetch_ || fetch_->id() != piece->id) return;
    if (auto taken = fetch_->receive(*piece, bytes, now); !taken) maker_.give_blob(piece->id, taken.error());
    if (fetch_->is_whole()) {
      auto whole = fetch_->take_bytes();
      blobs_.put(route->second.key, piece->id, whole);
      maker_.give_blob(piece->id, std::move(whole));
    }
  }
  if (const auto* unknown = std::get_if<wire::BlobUnknown>(&message); unknown != nullptr) {
    maker_.give_blob(unknown->id, Fault{Errc::kUnsupported, "the trainer does not have the blobs of its job"});
  }
}

// ---- The thread that makes batches

void PoolServerIo::serve_maker(Instant now) {
  auto asked = maker_.take_needs();
  if (asked.is_to_drain && !session_.is_draining()) drain(now);
  if (asked.result) take_result(*std::move(asked.result), now);
  if (asked.lost_process_of != 0) lose_process(asked.lost_process_of);
  if (asked.failure && !failure_) failure_ = std::move(asked.failure);
  finish_given_up();
  if (ahead_ && !is_next(*ahead_)) {
    release(*ahead_);
    ahead_.reset();
    maker_.drop_ahead();
    asked.wants_work = false;  // for now
    maker_.wake();
  }
  if (asked.wants_work) begin_work();
  send_ahead();
  fetch_blob(asked.blob, now);
  const bool is_wanted = session_.may_be_wanted();
  maker_.set_wanted(is_wanted);
  has_maker_ = has_maker_ || asked.wants_work;
  if (asked.wants_work || !has_maker_)
    maker_watch_.note(MakerWatch::State::kWaiting, now);
  else
    maker_watch_.note(running_ && is_wanted ? MakerWatch::State::kMaking : MakerWatch::State::kAbandoned, now);
}

void PoolServerIo::take_result(PoolResult result, Instant now) {
  PENSTOCK_ASSERT(running_, "a result without work");
  if (result.kind == PoolResult::Kind::kHandedBack) {
    if (!session_.is_draining()) shortage_ = std::move(result.text);
    session_.hand_back();
    if (registration_) registration_->hurry(now);
    release(*running_);
    running_.reset();
    return;
  }
  if (result.kind == PoolResult::Kind::kDied) {
    death_description_ = std::move(result.text);
    return lose_process(running_->trainer_id);
  }
  if (result.kind == PoolResult::Kind::kGivenUp) {
    is_given_up_ = true;
    return;
  }
  if (result.kind == PoolResult::Kind::kDeclined) {
    if (session_.trainer_id() == running_->trainer_id) {
      if (declined_.size() >= wire::kDeclinedCountMax) declined_.erase(declined_.begin());
      if (registration_) registration_->set_decline_reason(result.text);
      declined_[running_->trainer_id] = std::move(result.text);
      session_.decline();
    }
    release(*running_);
  } else {
    maker_watch_.note_made(std::chrono::steady_clock::now() - running_since_);
    const auto made = std::make_shared<const PoolResult>(std::move(result));
    held_[running_->key] = made;
    keep(*running_, made);
  }
  const auto done = std::exchange(running_, nullptr);
  session_.finished();
}

void PoolServerIo::lose_process(uint64_t trainer_id) {
  session_.lose_process(trainer_id);
  if (running_) release(*running_);
  running_.reset();
  is_given_up_ = false;
}

// A batch that was given up as unwanted may have been requested again at the same moment.
void PoolServerIo::finish_given_up() {
  if (!is_given_up_ || session_.may_be_wanted()) return;
  is_given_up_ = false;
  release(*running_);
  running_.reset();
  session_.finished();
}

void PoolServerIo::begin_work() {
  if (is_given_up_) {
    if (!session_.is_wanted()) return;
    is_given_up_ = false;
    return maker_.offer(running_);
  }
  if (running_ || !session_.next()) return;
  for (int count = 0; count < kKeptAnswersATurn; ++count) {
    const auto choice = choose();
    if (!choice) return;
    session_.begin(choice->key);
    const auto found = queued_.find(choice->key);
    PENSTOCK_ASSERT(found != queued_.end(), "a request was queued without its bytes");
    PoolWork work = std::move(found->second);
    queued_.erase(found);
    if (!choice->kept) return offer(std::move(work));
    held_[work.key] = choice->kept;
    ++kept_answers_;
    session_.finished();
  }
  maker_.wake();
}

std::optional<PoolServerIo::Choice> PoolServerIo::choose() {
  const auto& queue = session_.queue();
  if (queue.empty()) return std::nullopt;
  if (ahead_) return Choice{.key = queue.front().key};
  MachineStore* const store = options_.store.get();
  for (size_t place = 0; place < std::min(queue.size(), kChoiceCountMax); ++place) {
    const wire::BatchKey key = queue[place].key;
    const auto found = queued_.find(key);
    PENSTOCK_ASSERT(found != queued_.end(), "a request was queued without its bytes");
    const PoolWork& work = found->second;
    if (!work.name) {
      if (place > 0) break;
      return Choice{.key = key};
    }
    auto answer = store->ask(*work.name, {.worker_id = run_.id, .trainer_id = work.trainer_id}, place == 0);
    if (answer.kind == BatchStore::Found::Kind::kWait) continue;
    store->stop_waiting(run_.id);
    return Choice{.key = key, .kept = std::move(answer.result)};
  }
  return std::nullopt;
}

void PoolServerIo::offer(PoolWork work) {
  running_since_ = std::chrono::steady_clock::now();
  if (ahead_) {
    running_ = std::exchange(ahead_, nullptr);
    return maker_.offer(running_);
  }
  if (work_tenancy_ != tenancy_) maker_watch_.begin_tenancy();
  work_tenancy_ = work.tenancy = tenancy_;
  work.begun_at = running_since_;
  work.cpu_begun_at = process_cpu_time();
  work.is_handed_over = handover_ && handover_->is_on();
  running_ = std::make_shared<const PoolWork>(std::move(work));
  maker_.offer(running_);
}

// Work handed ahead must not need the server, and dropping it before it starts must lose no data: a lane cannot step
// back by a batch, and the parts of another job have to be fetched.
void PoolServerIo::send_ahead() {
  if (ahead_ || !running_ || is_given_up_ || !session_.is_wanted() || !maker_.wants_ahead()) return;
  const auto request = session_.next();
  if (!request) return;
  const auto found = queued_.find(request->key);
  PENSTOCK_ASSERT(found != queued_.end(), "a request was queued without its bytes");
  const auto is_alone = [](const PoolWork& work) { return work.lane == wire::kNoLane && !work.is_recall(); };
  const PoolWork& next = found->second;
  if (!is_alone(next) || !is_alone(*running_) || next.trainer_id != running_->trainer_id ||
      tenancy_ != running_->tenancy || next.blobs != running_->blobs)
    return;
  if (next.name && !options_.store->ask_ahead(*next.name, {.worker_id = run_.id, .trainer_id = next.trainer_id}))
    return;
  auto work = std::make_shared<PoolWork>(next);
  work->tenancy = tenancy_;
  ahead_ = std::move(work);
  maker_.send_ahead(ahead_);
}

bool PoolServerIo::is_next(const PoolWork& work) const {
  const auto request = session_.next();
  return request && !is_given_up_ && request->key == work.key && session_.trainer_id() == work.trainer_id &&
         tenancy_ == work.tenancy;
}

// ---- Kept batches

std::shared_ptr<const session::BatchName> PoolServerIo::name_of(const PoolWork& work,
                                                                const net::PublicKey& owner) const {
  const bool is_function = work.lane == wire::kNoLane && !work.is_recall() && work.state.empty() &&
                           work.index_kind != wire::IndexKind::kNone && !work.seeds.empty() && !work.blobs.empty();
  if (!is_function || !options_.store || !options_.store->is_on()) return nullptr;
  const auto append = [](std::string& text, std::span<const std::byte> bytes) {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  const auto append_number = [&](std::string& text, uint64_t number) {
    append(text, std::as_bytes(std::span(&number, 1)));
  };
  auto name = std::make_shared<session::BatchName>();
  append(name->group, std::as_bytes(std::span(owner.bytes())));
  for (const wire::BlobId& blob : work.blobs) append(name->group, std::as_bytes(std::span(blob)));
  append_number(name->samples, static_cast<uint64_t>(work.index_kind));
  append(name->samples, work.indices);
  append_number(name->epoch, work.epoch_seed);
  append(name->epoch, work.seeds);
  append_number(name->place, work.number());
  append_number(name->place, work.first_place);
  return options_.store->is_passed_over(*name) ? nullptr : name;
}

void PoolServerIo::release(const PoolWork& work) {
  if (work.name) options_.store->release(*work.name, {.worker_id = run_.id, .trainer_id = work.trainer_id});
}

void PoolServerIo::keep(const PoolWork& work, const std::shared_ptr<const PoolResult>& result) {
  if (!work.name) return;
  if (!result->batch) return release(work);
  if (!result->may_be_kept)
    return options_.store->refuse(*work.name, {.worker_id = run_.id, .trainer_id = work.trainer_id});
  const auto id = options_.store->admit(*work.name, {.worker_id = run_.id, .trainer_id = work.trainer_id}, *result);
  if (!id) return;
  auto batch = options_.store->new_batch(result->batch->payload().size(), result->batch->record_bytes());
  if (!batch) return options_.store->drop(*id);
  copies_.push_back({.id = *id, .source = result, .batch = std::move(batch).value()});
  maker_.wake();
}

// One step a turn, since trainers expect answers to their pings meanwhile.
void PoolServerIo::copy_kept() {
  if (copies_.empty()) return;
  Copy& copy = copies_.front();
  const auto copied = copy.batch->copy_step(copy.source->batch->payload());
  if (!copied) {
    options_.store->drop(copy.id);
    copies_.pop_front();
  } else if (copied.value()) {
    auto kept = std::make_shared<PoolResult>();
    kept->answer = copy.source->answer;
    kept->flags = copy.source->flags;
    kept->fetch_time = copy.source->fetch_time;
    kept->prefix_time = copy.source->prefix_time;
    kept->samples = copy.source->samples;
    kept->cpu_share = copy.source->cpu_share;
    kept->sample_count = copy.source->sample_count;
    kept->dataset_size = copy.source->dataset_size;
    kept->batch = std::move(copy.batch);
    options_.store->settle(copy.id, std::move(kept));
    copies_.pop_front();
  }
  if (!copies_.empty()) maker_.wake();
}

void PoolServerIo::serve_store() {
  copy_kept();
  if (session_.queued_count() == 0) options_.store->stop_waiting(run_.id);
  if (!registration_) return;
  options_.store->set_share(run_.id, registration_->keep_bytes());
  // Only a new reading counts: an earlier one includes the batches that were dropped because of it.
  if (registration_->host() != noted_load_) {
    noted_load_ = registration_->host();
    options_.store->note_memory(noted_load_);
  }
  registration_->set_kept(options_.store->bytes_made_by(run_.id), kept_answers_);
}

void PoolServerIo::fetch_blob(const std::optional<wire::BlobId>& id, Instant now) {
  if (!id || !running_) return fetch_.reset();
  const auto route = routes_.find(running_->trainer_id);
  if (route == routes_.end()) return;
  if (const auto* kept = blobs_.find(route->second.key, *id); kept != nullptr) return maker_.give_blob(*id, *kept);
  if (!fetch_ || fetch_->id() != *id) fetch_.emplace(*id, options_.blob_bytes_max);
  for (const wire::BlobRequest& request : fetch_->take_requests(now))
    static_cast<void>(server_->send(route->second.routing_id, wire::write_blob_message(request)));
}

// ---- Commands of the session

void PoolServerIo::carry_out() {
  for (const WorkerSession::Command& command : session_.take_commands()) {
    if (command.kind == WorkerSession::Command::Kind::kDrop) {
      held_.erase(command.key);
      outbox_.drop(command.key);
      continue;
    }
    const auto route = routes_.find(command.trainer_id);
    if (route == routes_.end()) continue;
    const ToTrainer& message = command.message;
    std::optional<wire::SealGrant> grant;
    if (message.kind == ToTrainer::Kind::kWelcome) {
      outbox_.clear();  // the messages in the queue belong to the previous link
      if (message.is_fresh) ++tenancy_;
      if (handover_) handover_->begin(command.trainer_id, message.link);
      auto begun = data_->begin(command.trainer_id, message.link, route->second.offer);
      route->second.offer = {};
      if (!begun) {
        failure_ = begun.error();
        continue;
      }
      grant = std::move(begun).value();
      grant->data_endpoint = data_advertised_;
      grant->numerics = options_.numerics;
    }
    outbox_.push({.routing_id = route->second.routing_id,
                  .message = message,
                  .worker_id = run_.id,
                  .incarnation = registration_ ? registration_->incarnation() : 1,
                  .result = message.kind == ToTrainer::Kind::kAnswer ? held_.at(message.key) : nullptr,
                  .text = reason_of(command),
                  .grant = std::move(grant)});
  }
  if (session_.trainer_id() == 0) {
    data_->end();
    if (handover_) handover_->end();
  }
  // The session clears its queue without a command for each request.
  if (session_.queued_count() == 0) queued_.clear();
}

std::string PoolServerIo::reason_of(const WorkerSession::Command& command) const {
  if (command.message.kind == ToTrainer::Kind::kDeclined) {
    const auto found = declined_.find(command.trainer_id);
    return found != declined_.end() ? found->second : std::string();
  }
  if (command.message.kind == ToTrainer::Kind::kDied) return death_description_;
  if (command.message.kind != ToTrainer::Kind::kRefused) return {};
  if (session_.is_draining()) return "it is leaving";
  return session_.trainer_id() != 0 ? "it serves another trainer"
                                    : "the pool's controller has not assigned it to this trainer yet";
}

// ---- The end

void PoolServerIo::take_signals(Instant now) {
  std::array<uint8_t, 64> numbers{};
  const ssize_t count = ::read(signal_read_fd_.get(), numbers.data(), numbers.size());
  for (ssize_t place = 0; place < count; ++place) {
    const int number = numbers[static_cast<size_t>(place)];
    if (number != SIGTERM && number != SIGINT) continue;
    if (++signal_count_ > 1) ::_exit(128 + number);
    first_signal_ = number;
    if (!session_.is_draining()) drain(now);
  }
}

void PoolServerIo::drain(Instant now) {
  session_.drain();
  if (registration_) registration_->hurry(now);
}

void PoolServerIo::note_standing() {
  using Cause = Standing::DrainCause;
  Standing standing = standing_;
  standing.trainer_id = session_.trainer_id();
  if (session_.is_draining() && standing.drain_cause == Cause::kNone) {
    standing.drain_cause = !shortage_.empty()         ? Cause::kShortage
                           : first_signal_ == SIGTERM ? Cause::kSigterm
                           : first_signal_ == SIGINT  ? Cause::kSigint
                                                      : Cause::kOrder;
    standing.left_count = static_cast<uint32_t>(session_.held_count()) + (session_.is_busy() ? 1 : 0);
  }
  if (standing == standing_) return;
  standing_ = standing;
  maker_.set_standing(standing_);
}

std::optional<PoolServerIo::End> PoolServerIo::end_of(Instant now) const {
  if (failure_) return End{.reason = *failure_, .word = ExitWord::kFailed, .text = failure_->message};
  if (is_orphan()) return End{.reason = {Errc::kClosed, "the process that started this worker has ended"}};
  // A trainer that has not yet read that its batch is handed back would take the end for a death caused by the batch.
  const bool is_understood = shortage_.empty() || session_.trainer_id() == 0;
  if (session_.is_draining() && session_.is_empty() && outbox_.is_empty() && is_understood) {
    End end{.reason = {Errc::kClosed, "this worker was drained"}};
    end.word = shortage_.empty() ? ExitWord::kDrained : ExitWord::kFailed;
    end.text = shortage_;
    return end;
  }
  const auto time_since_answer = registration_ ? registration_->time_since_answer(now) : std::nullopt;
  if (time_since_answer && *time_since_answer >= options_.patience && is_idle()) {
    return End{.reason = {Errc::kFailed, "the controller at " + options_.controller->text() + " has not answered for " +
                                             format_duration(*time_since_answer) +
                                             ", and this worker is idle; restart it when a controller is running"},
               .word = ExitWord::kUseless};
  }
  return std::nullopt;
}

void PoolServerIo::end_lost_process(Instant now) {
  if (session_.is_draining() && !drained_at_) drained_at_ = now;
  const bool is_late = is_drain_over(drained_at_, options_.drain_grace, now);
  std::string text;
  if (maker_watch_.is_lost(options_.abandoned_grace)) {
    const std::string batch = running_ ? to_text(running_->key) : "a batch that was already answered";
    text = "it worked on " + batch + " for " + format_duration(maker_watch_.abandoned()) +
           " although it was no longer needed: its dataset hangs, or took far longer than for other batches";
    if (maker_.end_work(text) && !is_late) return;
  } else if (is_late) {
    const std::string left =
        (running_ ? "it was still making " + to_text(running_->key) : "its trainer had not received its batches") +
        ", which other workers make now";
    const std::string time = format_duration(now - *drained_at_);
    text = shortage_.empty() ? time + " after it was drained " + left + "; raise --grace to give it more time"
                             : shortage_ + "; " + time + " after that " + left;
  } else {
    return;
  }
  const bool was_told = session_.is_draining() && shortage_.empty();
  const ExitWord word = was_told ? ExitWord::kDrained : ExitWord::kFailed;
  if (!options_.ends_process) {
    End end{.reason = {Errc::kFailed, text}};
    end.word = word;
    end.text = std::move(text);
    return end_because(std::move(end));
  }
  options_.supervisor(word, text);
  ::_exit(EXIT_FAILURE);
}

Result<bool> PoolServerIo::wait(int wake_fd, bool may_sleep) {
  const Instant now = clock_now();
  std::optional<Instant> due = now + kLookInterval;
  std::vector<net::Waitable> sockets;
  if (!has_ended_) {
    sockets.push_back(server_->waitable());
    sockets.push_back(data_->waitable());
    due = earlier(earlier(due, session_.next_tick()), maker_.due_at());
    if (registration_) {
      for (const auto& waitable : registration_->socket().waitables()) sockets.push_back(waitable);
      due = earlier(due, registration_->due_at());
    }
    if (fetch_) due = earlier(due, fetch_->due_at());
  }
  std::vector<int> fds{wake_fd};
  constexpr size_t kResolverPlace = 2;
  constexpr size_t kMakerPlace = 3;
  if (!has_ended_) {  // afterwards these events are irrelevant
    fds.push_back(signal_read_fd_.get());
    fds.push_back(resolver_->fd());
    const auto of_maker = maker_.fds();
    fds.insert(fds.end(), of_maker.begin(), of_maker.end());
  }
  const auto is_readable = std::make_unique<bool[]>(fds.size());
  const auto timeout = may_sleep ? wait_time(due, now) : milliseconds(0);
  if (auto waited = net::wait_readable(sockets, fds, std::span(is_readable.get(), fds.size()), timeout); !waited)
    return waited.error();
  // The controller's client fetches the answer itself, in each turn.
  if (!has_ended_ && is_readable[kResolverPlace]) static_cast<void>(resolver_->take_done());
  std::vector<int> of_maker;
  for (size_t place = kMakerPlace; place < fds.size(); ++place)
    if (is_readable[place]) of_maker.push_back(fds[place]);
  if (!of_maker.empty()) maker_.note_readable(of_maker);
  return is_readable[0];
}

bool PoolServerIo::is_orphan() const { return options_.watches_parent && parent_.is_gone(); }

}  // namespace penstock::server
