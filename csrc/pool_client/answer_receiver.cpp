// SPDX-License-Identifier: Apache-2.0
#include "pool_client/answer_receiver.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "base/process.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

using net::ConnectionEvent;
using session::PoolSession;
using wire::AnswerKind;
using wire::ToTrainer;

namespace {

constexpr size_t kMessagesPerTurn = 16;            // of one worker, so that no other waits long
constexpr uint64_t kOpenedBytesInTurn = 16 << 20;  // of all workers; beyond this no further worker is served: ~10 ms
// For a closed connection: twice libzmq's queue limit, since libzmq alternates between it and the next connection.
constexpr size_t kMessagesOfTheDead = 2 * size_t{wire::MessageLimits{}.received_messages_max};

}  // namespace

AnswerReceiver::AnswerReceiver(const PoolIoOptions& options, session::PoolSession& session,
                               PoolConnections& connections, PoolNews& news, TrainerReports& reports,
                               TrainerRequests& requests, const BlobStore& blobs, loader::BatchMemory& memory,
                               loader::StageChain& stages)
    : options_(options),
      session_(session),
      connections_(connections),
      news_(news),
      reports_(reports),
      requests_(requests),
      blobs_(blobs),
      memory_(memory),
      stages_(stages) {}

void AnswerReceiver::serve(Instant now) {
  opened_bytes_ = 0;
  const std::set<uint64_t> ready = links().take_ready(now);
  const auto first = ready.upper_bound(last_opened_);
  std::vector<uint64_t> in_order(first, ready.end());
  in_order.insert(in_order.end(), ready.begin(), first);
  for (const uint64_t worker_id : in_order) {
    if (opened_bytes_ < kOpenedBytesInTurn) last_opened_ = worker_id;
    serve_worker(worker_id, now);
  }
}

void AnswerReceiver::serve_worker(uint64_t worker_id, Instant now) {
  if (const WorkerLink* link = links().find(worker_id)) links().mark_used(*link);
  serve_data(worker_id, now);
  receive_from(worker_id, kMessagesPerTurn, now);
  take_waiting(worker_id, now);  // an answer that is no longer awaited must not block others
  while (WorkerLink* link = links().find(worker_id)) {
    if (link->reconnect_at && now >= *link->reconnect_at) {
      link->reconnect_at.reset();
      if (auto begun = link->socket().reconnect(); !begun) link->reconnect_at = now + kReconnectPause;
    }
    const auto event = link->socket().try_event();
    if (!event) return links().note_served(worker_id);
    // Its earlier messages count: they are received first.
    if (event->kind == ConnectionEvent::Kind::kDisconnected) receive_from(worker_id, kMessagesOfTheDead, now);
    if (links().find(worker_id) == link) take_event(worker_id, *link, *event, now);
    requests_.carry_out();
  }
}

void AnswerReceiver::take_event(uint64_t worker_id, WorkerLink& link, const ConnectionEvent& event, Instant now) {
  switch (event.kind) {
    case ConnectionEvent::Kind::kConnected: return session_.connected(worker_id, now);
    case ConnectionEvent::Kind::kDisconnected:
      links().end_link(worker_id);
      link.data_missed_at.reset();
      news_.note_lost(link);
      return session_.died(worker_id, now);
    case ConnectionEvent::Kind::kRefused: break;
  }
  if (event.is_final) link.reconnect_at = now + kReconnectPause;
  if (!event.is_final || std::exchange(link.is_problem_reported, true)) return;
  news_.tell("worker " + format_id(worker_id) + " cannot be used: " + event.reason);
}

// ---- Messages

void AnswerReceiver::receive_from(uint64_t worker_id, size_t message_count_max, Instant now) {
  net::ClientReceipt receipt;
  for (size_t count = 0; count < message_count_max; ++count) {
    WorkerLink* link = links().find(worker_id);
    if (link == nullptr) return;
    auto received = link->socket().try_receive(receipt);
    if (!received) return stages_.fail(0, received.error());
    if (!received.value()) return;
    if (receipt.offence.empty()) {
      take_message(worker_id, *link, receipt.parts, now);
    } else {
      refuse_message(worker_id, *link, "it sent a message that workers do not send: " + receipt.offence, now);
    }
    requests_.carry_out();
  }
}

void AnswerReceiver::take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts,
                                  Instant now) {
  const auto first = parts.front().bytes();
  if (wire::is_blob_message(first) && parts.size() <= 2) {
    const auto message = wire::parse_blob_message(first, parts.size() == 2 ? parts[1].bytes().size() : 0);
    if (!message) return refuse_message(worker_id, link, message.error().message, now);
    const auto* request = std::get_if<wire::BlobRequest>(&message.value());
    if (request == nullptr) return refuse_message(worker_id, link, "it sent a blob, but only trainers send blobs", now);
    return link.hand_out(*request, blobs_.find(request->id));
  }
  if (parts.size() > 1)
    return refuse_message(worker_id, link, "it sent " + std::to_string(parts.size()) + " parts, but the maximum is one",
                          now);
  take_answer(worker_id, link, std::move(parts.front()), now);
}

// A message that cannot be read may be the answer to a request.
void AnswerReceiver::refuse_message(uint64_t worker_id, WorkerLink& link, const std::string& what, Instant now) {
  if (!session_.distrust(worker_id, std::nullopt, what, now)) news_.complain(worker_id, link, what);
}

// A refusal, a broken link and the death of the worker's process are processed immediately: in these cases the chunks
// of a waiting answer may never arrive. All other messages keep their order behind the waiting answer.
void AnswerReceiver::take_answer(uint64_t worker_id, WorkerLink& link, net::ReceivedPart part, Instant now) {
  const auto parsed = wire::parse_to_trainer(part.bytes());
  if (!parsed) return refuse_message(worker_id, link, parsed.error().message, now);
  const wire::PoolAnswer& answer = parsed.value();
  if (answer.worker_id != worker_id) {  // another worker uses this address now, unless this one has answered a hello
    if (session_.is_open(worker_id))
      refuse_message(worker_id, link, "it sent a message in the name of worker " + format_id(answer.worker_id), now);
    return;
  }
  if (!std::exchange(link.has_responded, true)) news_.standing().forget_refusal(worker_id);
  note_message(worker_id, link, answer);
  const bool ends_link = answer.message.stamp == 0 || answer.message.kind == ToTrainer::Kind::kDied;
  const bool has_turn = ends_link || (!link.has_waiting() && !waits_for_pieces(link, answer));
  if (has_turn) return take_answer_in_turn(worker_id, link, answer, now);
  const bool is_of_link = session_.is_in_force(worker_id, answer.message.link);
  if (!link.add_waiting(std::move(part))) return lose_track(worker_id, answer.message.link, now);
  // Without a connection to the worker's data port the chunks cannot arrive: a network fault, and reported as one.
  if (is_of_link && !link.data_missed_at) session_.answer_waits(worker_id);
}

bool AnswerReceiver::waits_for_pieces(WorkerLink& link, const wire::PoolAnswer& answer) const {
  return answer.kind == AnswerKind::kBatch && !answer.place && link.data() &&
         answer.message.link == link.data()->number() && session_.dispatch().is_unanswered(answer.message.key) &&
         !link.data()->has_whole(answer.message.key);
}

void AnswerReceiver::take_waiting(uint64_t worker_id, Instant now) {
  for (;;) {
    WorkerLink* link = links().find(worker_id);
    if (link == nullptr || !link->has_waiting()) return;
    const auto answer = wire::parse_to_trainer(link->first_waiting().bytes());  // parsed before, so valid
    if (waits_for_pieces(*link, answer.value())) return;
    const net::ReceivedPart part = std::move(link->first_waiting());
    link->drop_first_waiting();
    take_answer_in_turn(worker_id, *link, wire::parse_to_trainer(part.bytes()).value(), now);
    requests_.carry_out();
  }
}

void AnswerReceiver::note_message(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer) {
  if (!session_.is_in_force(worker_id, answer.message.link)) return;
  if (answer.message.kind == ToTrainer::Kind::kWelcome) links().forget_resting(worker_id);
  reports_.note_message(worker_id, connections_.directory().is_own(worker_id), link, answer);
}

// ---- Answers whose turn it is

void AnswerReceiver::take_answer_in_turn(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer,
                                         Instant now) {
  const ToTrainer& message = answer.message;
  const bool is_in_force = session_.is_in_force(worker_id, message.link);
  const bool is_refusal = message.kind == ToTrainer::Kind::kRefused || message.kind == ToTrainer::Kind::kDeclined;
  // A greeting is answered by one refusal; a worker's further refusals are ignored.
  if (is_refusal && is_in_force) {
    news_.note_refusal(worker_id, answer);
    link.is_refused = message.kind == ToTrainer::Kind::kRefused;
  }
  if (answer.grant && is_in_force) {
    if (std::exchange(link.is_refused, false)) news_.standing().forget_refusal(worker_id);
    requests_.note_numerics(worker_id, answer.grant->numerics);
    connect_data(worker_id, link, *answer.grant, now);
  }
  const bool is_awaited = session_.dispatch().is_unanswered(message.key);
  const wire::Lane lane = is_awaited ? session_.dispatch().lane_of(message.key) : wire::kNoLane;
  std::optional<loader::IncomingBatch> whole;
  if (answer.place && is_in_force) {  // a batch that is not awaited releases its slab
    auto taken = take_slab(link, answer);
    if (!taken) {
      link.is_handover_given_up = true;
      news_.tell("worker " + news_.format_place(worker_id) +
                 " now sends its batches over a socket, because its memory cannot be used: " + taken.error().message);
      return lose_track(worker_id, message.link, now);
    }
    whole.emplace(std::move(taken).value());
  } else if (answer.kind == AnswerKind::kBatch && is_awaited && is_in_force) {
    if (link.data()) whole = link.data()->take_whole(message.key);
    if (!whole || whole->payload_bytes() != answer.payload_bytes) {
      session_.distrust(worker_id, message.key, "the chunks of a batch do not match its answer", now,
                        PoolSession::Wrong::kMaybeInFlight);
      return;
    }
  }
  const bool has_crossed = whole && !answer.place;
  const Instant came_at = clock_now();
  const session::SharedContent content = whole ? session_.dispatch().content_of(message.key) : nullptr;
  std::unique_ptr<loader::Batch> batch;  // of an answer that may count
  if (is_awaited && is_in_force && message.kind == ToTrainer::Kind::kAnswer) {
    auto read = read_answer(worker_id, answer, lane, std::move(whole));
    if (!read) {
      session_.distrust(worker_id, message.key, read.error().message, now);
      return;
    }
    batch = std::move(read).value();
  }
  if (has_crossed) {
    const bool is_narrow = batch && !batch->record().remote_error() && batch->record().is_narrow();
    reports_.note_crossing(worker_id, answer, is_narrow, came_at);
  }
  const bool counts = session_.receive(worker_id, message, answer.payload_bytes, now);
  const bool has_ended = is_in_force && !session_.is_in_force(worker_id, message.link);
  if (message.kind == ToTrainer::Kind::kDied && has_ended) note_death(worker_id, link, answer, is_awaited);
  if (!counts) return;
  accept(worker_id, answer, lane, content, std::move(batch), now);
}

void AnswerReceiver::accept(uint64_t worker_id, const wire::PoolAnswer& answer, wire::Lane lane,
                            const session::SharedContent& content, std::unique_ptr<loader::Batch> batch, Instant now) {
  const BatchKey key = answer.message.key;
  news_.note_answered(key);
  reports_.note_made(connections_.directory().is_own(worker_id), answer, content.get());
  if (answer.kind == AnswerKind::kEnd) return requests_.end_lane(key, lane, now);
  if (lane != wire::kNoLane) requests_.note_progress(lane, answer.state);
  if (requests_.is_compared(key)) return requests_.note_compared(worker_id, *batch);
  if (lane == wire::kNoLane) requests_.compare_kinds(worker_id, answer, *batch, content, now);
  std::optional<loader::NarrowArrival> narrow;
  if (!batch->record().remote_error() && batch->record().is_narrow())
    narrow = loader::NarrowArrival{.place = news_.format_place(worker_id)};
  batch->record().times().worker_id = worker_id;
  batch->record().times().made_at =
      std::min(reports_.written_at(worker_id, Duration(answer.sent_at)).value_or(clock_now()), clock_now());
  if (batch->record().withheld_bytes() > 0) batch->record().set_origin({.request = content, .worker_id = worker_id});
  requests_.deliver(key, std::move(batch), std::move(narrow));
}

Result<std::unique_ptr<loader::Batch>> AnswerReceiver::read_answer(uint64_t worker_id, const wire::PoolAnswer& answer,
                                                                   wire::Lane lane,
                                                                   std::optional<loader::IncomingBatch> whole) {
  if (answer.kind == AnswerKind::kEnd) {
    if (lane != wire::kNoLane) return std::unique_ptr<loader::Batch>();
    return Fault{Errc::kMalformed, "it reported the end of a shard when it was asked for " +
                                       wire::to_text(answer.message.key) + ", which belongs to no shard"};
  }
  if (has_other_dataset(answer)) return error_of_dataset(answer, news_.format_place(worker_id));
  const bool is_received = whole && !answer.place;
  auto batch = loader::batch_of(answer, std::move(whole), format_id(worker_id),
                                {.allow_pickle = options_.allow_pickle, .is_python = options_.is_python});
  if (batch && batch.value()->record().withheld_bytes() > 0 && !may_withhold(answer.message.key))
    return Fault{Errc::kMalformed, "it omitted tensors of a batch although its request does not permit it"};
  if (batch && is_received) memory_.note_received(answer.payload_bytes);  // after reading: an error may claim any size
  if (batch || batch.error().code != Errc::kNoMemory) return batch;
  return loader::error_of_damage(answer.message.key, news_.format_place(worker_id), batch.error());
}

bool AnswerReceiver::has_other_dataset(const wire::PoolAnswer& answer) const {
  return answer.kind == AnswerKind::kBatch && !wire::is_recall(answer.message.key) &&
         options_.reported_size.size != wire::kSizeUnknown && answer.dataset_size != options_.reported_size.size;
}

// It is unknown which of two workers has the right one.
std::unique_ptr<loader::Batch> AnswerReceiver::error_of_dataset(const wire::PoolAnswer& answer,
                                                                const std::string& place) const {
  return loader::error_in_batch(answer.message.key, place,
                                "its dataset has " + loader::format_dataset_size(answer.dataset_size) +
                                    ", but the dataset of worker " + options_.reported_size.by +
                                    ", which determines this epoch, has " +
                                    loader::format_dataset_size(options_.reported_size.size) +
                                    "; use the same files and the same version of the dataset on all workers");
}

bool AnswerReceiver::may_withhold(BatchKey key) const {
  const session::SharedContent content = session_.dispatch().content_of(key);
  if (!content || content->blobs->empty()) return false;
  const auto last = blobs_.find(content->blobs->back());
  return !last || wire::is_shipment(std::as_bytes(std::span(*last)));
}

Result<loader::IncomingBatch> AnswerReceiver::take_slab(WorkerLink& link, const wire::PoolAnswer& answer) {
  if (!link.passed()) return Fault{Errc::kMalformed, "it names a slab on a connection without shared memory"};
  auto lease = link.passed()->lease(*answer.place);
  if (!lease) return lease.error();
  if (answer.payload_bytes > lease.value()->view().slab_bytes())
    return Fault{Errc::kMalformed, "it names a batch that is larger than its slab"};
  const uint64_t slab_bytes = lease.value()->view().slab_bytes();
  return loader::IncomingBatch({.lease = std::move(lease).value(),
                                .is_transient = answer.place->is_transient,
                                .backed_bytes = std::min(answer.place->slab_bytes, slab_bytes)},
                               answer.payload_bytes);
}

// The link has ended with the process, and no more of its chunks follow.
void AnswerReceiver::note_death(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, bool is_awaited) {
  links().end_link(worker_id);
  link.data_missed_at.reset();
  news_.note_lost(link);
  if (is_awaited) news_.note_end(answer);
}

// ---- The chunks of batches

void AnswerReceiver::connect_data(uint64_t worker_id, WorkerLink& link, const wire::SealGrant& grant, Instant now) {
  if (!link.data() || link.data()->is_granted()) return;  // a repeated welcome
  if (auto connected = connections_.connect_data(worker_id, grant); !connected)
    news_.complain(worker_id, link, connected.error().message);
  if (!link.data_missed_at) link.data_missed_at = now;
}

void AnswerReceiver::serve_data(uint64_t worker_id, Instant now) {
  if (opened_bytes_ < kOpenedBytesInTurn) receive_pieces(worker_id, kMessagesPerTurn, now);
  for (;;) {
    WorkerLink* link = links().find(worker_id);
    if (link == nullptr || !link->data() || !link->data()->is_granted()) return;
    const uint32_t number = link->data()->number();
    const auto event = link->data()->client().try_event();
    if (!event) return;
    switch (event->kind) {
      case ConnectionEvent::Kind::kConnected: link->data_missed_at.reset(); break;
      case ConnectionEvent::Kind::kRefused: news_.complain(worker_id, *link, event->reason); break;
      case ConnectionEvent::Kind::kDisconnected:
        // Its earlier chunks count; libzmq queues fewer of them than this limit.
        receive_pieces(worker_id, kMessagesPerTurn, now);
        lose_track(worker_id, number, now);
    }
  }
}

void AnswerReceiver::receive_pieces(uint64_t worker_id, size_t piece_count_max, Instant now) {
  const auto is_awaited = [this](BatchKey key) { return session_.dispatch().is_unanswered(key); };
  for (size_t count = 0; count < piece_count_max; ++count) {
    WorkerLink* link = links().find(worker_id);
    if (link == nullptr || !link->data() || !link->data()->is_granted()) return;
    const uint32_t number = link->data()->number();
    const auto outcome = link->data()->take_piece(memory_, is_awaited);
    if (outcome == DataLink::Outcome::kNothing) return;
    if (outcome == DataLink::Outcome::kPiece) {
      opened_bytes_ += link->data()->client().piece().size();
      session_.heard(worker_id, number, now);
      take_waiting(worker_id, now);
      continue;
    }
    if (!session_.is_in_force(worker_id, number)) return;
    session_.distrust(worker_id, std::nullopt, "a chunk of a batch is invalid: " + link->data()->fault(), now,
                      PoolSession::Wrong::kMaybeInFlight);
    return requests_.carry_out();
  }
}

void AnswerReceiver::lose_track(uint64_t worker_id, uint32_t number, Instant now) {
  if (!session_.is_in_force(worker_id, number)) return;
  links().end_link(worker_id);
  session_.lose_track(worker_id, number, now);
  requests_.carry_out();
}

}  // namespace penstock::pool_client
