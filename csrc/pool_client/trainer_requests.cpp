// SPDX-License-Identifier: Apache-2.0
#include "pool_client/trainer_requests.h"

#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/process.h"
#include "loader/incoming_batch.h"
#include "net/client_socket.h"
#include "net/seal.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

using wire::BatchKey;
using wire::ToWorker;

namespace {

constexpr uint64_t kComparedBytesMax = 32 << 20;  // of a batch that is compared with another worker's: some 10 ms

}  // namespace

TrainerRequests::TrainerRequests(const PoolIoOptions& options, session::PoolSession& session,
                                 PoolConnections& connections, PoolNews& news, TrainerReports& reports,
                                 loader::StageChain& stages, loader::Inbox& inbox)
    : options_(options),
      session_(session),
      connections_(connections),
      news_(news),
      reports_(reports),
      stages_(stages),
      inbox_(inbox) {}

// ---- From the trainer

void TrainerRequests::begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes) {
  const Instant now = clock_now();
  session_.forget_other_epochs(epoch, now);
  for (const wire::Lane lane : ended_lanes_) session_.end_lane(epoch_, lane, now);
  ended_lanes_.clear();
  news_.forget_epoch();
  lanes_.begin(std::move(lanes));
  epoch_ = epoch;
}

void TrainerRequests::ask(session::SharedContent content) {
  const BatchKey key{.epoch = content->request.epoch, .sequence = content->request.sequence};
  const wire::Lane lane = options_.is_iterable ? content->request.shard_id + 1 : wire::kNoLane;
  if (key.epoch != epoch_ || ended_lanes_.contains(lane)) return;
  const uint64_t bytes =
      content->indices.size() + content->seeds->size() + content->blobs->size() * sizeof(wire::BlobId);
  if (bytes > wire::kPoolBodyBytesMax / 2) return deliver(key, loader::error_of_indices(key, content->indices.size()));
  const Instant now = clock_now();
  hurry_if_idle(now);
  session_.ask(key, lane, now, std::move(content));
}

void TrainerRequests::recall(const loader::BatchRecord::Origin& origin) {
  const Instant now = clock_now();
  const wire::BatchRequest& request = origin.request->request;
  const BatchKey key = wire::recall_of({.epoch = request.epoch, .sequence = request.sequence});
  if (session_.dispatch().is_unanswered(key)) return;
  hurry_if_idle(now);
  session_.ask(key, wire::kNoLane, now, origin.request, origin.worker_id);
}

void TrainerRequests::forget_recall(const loader::BatchRecord::Origin& origin) {
  const wire::BatchRequest& request = origin.request->request;
  const BatchKey key = wire::recall_of({.epoch = request.epoch, .sequence = request.sequence});
  news_.forget(key);
  session_.forget(key, clock_now());
}

void TrainerRequests::hurry_if_idle(Instant now) {
  ControllerLink* controller = connections_.controller();
  if (controller != nullptr && reports_.is_idle(now)) controller->hurry(now);
}

// ---- The session's commands

void TrainerRequests::carry_out() {
  using Kind = Command::Kind;
  for (auto commands = session_.take_commands(); !commands.empty(); commands = session_.take_commands()) {
    for (const Command& command : commands) {
      switch (command.kind) {
        case Kind::kConnect: connect(command.worker_id); break;
        case Kind::kDisconnect: disconnect(command); break;
        case Kind::kRenew: connections_.links().renew(command.worker_id); break;
        case Kind::kSend: send(command); break;
        case Kind::kFail: deliver(command.key, news_.error_in_place(command)); break;
        case Kind::kDistrust: end_distrusted(command); break;
      }
    }
  }
}

void TrainerRequests::connect(uint64_t worker_id) {
  connections_.forget_failure(worker_id);
  const auto place = connections_.directory().find(worker_id);
  if (!place) return;
  const auto& endpoint = place->endpoint;
  if (!endpoint) return news_.tell("worker " + format_id(worker_id) + " cannot be used: " + endpoint.error().message);
  if (const auto connected = connections_.connect(worker_id, *place, endpoint.value()); !connected) {
    const std::string reason = "connecting to " + endpoint.value().text() + " failed: " + connected.error().message;
    if (news_.standing().note_refusal(worker_id, reason))
      news_.tell("worker " + format_id(worker_id) + " cannot be used yet: " + reason);
    return;
  }
  news_.standing().forget_refusal(worker_id);
}

void TrainerRequests::connect_again(Instant now) {
  for (const uint64_t worker_id : connections_.due_again(now)) connect(worker_id);
}

void TrainerRequests::disconnect(const Command& command) {
  const uint64_t worker_id = command.worker_id;
  WorkerLinks& links = connections_.links();
  connections_.forget_failure(worker_id);
  kinds_.forget(worker_id);
  reports_.note_parting(worker_id);
  if (const WorkerLink* link = links.find(worker_id); link != nullptr && !link->has_responded)
    news_.standing().forget_refusal(worker_id);  // its silence is no longer relevant
  // A goodbye may still be queued.
  if (!command.rests) return links.close(worker_id, net::kClosingLinger);
  wire::PoolRequest goodbye{.message = command.message};
  goodbye.message.trainer_id = connections_.run_id_with(worker_id);
  links.rest(worker_id, wire::write_to_worker(goodbye), clock_now());
}

void TrainerRequests::send(const Command& command) {
  WorkerLink* link = connections_.links().find(command.worker_id);
  if (link == nullptr) return;
  wire::PoolRequest request{.message = command.message};
  request.message.trainer_id = connections_.run_id_with(command.worker_id);
  if (command.message.kind == ToWorker::Kind::kCancel && link->data()) link->data()->forget(command.message.key);
  if (command.message.kind == ToWorker::Kind::kHello) {
    begin_link(command.worker_id, command.message.link, request.offer.emplace());
    request.secret = connections_.run().secret;
  }
  if (command.message.kind == ToWorker::Kind::kPing && !link->pinged_at) link->pinged_at = clock_now();
  std::vector<std::byte> state;
  session::SharedContent content;
  if (command.message.kind == ToWorker::Kind::kRequest) {
    content = session_.dispatch().content_of(command.message.key);
    if (!content) return;  // forgotten meanwhile
    if (command.message.is_lane_start) state = lanes_.start_of(command.message.lane);
    request.index_kind = content->request.index_kind;
    request.epoch_seed = content->request.epoch_seed;
    request.first_place = content->request.first_place;
    request.link_mb_per_s = reports_.link_mb_per_s();
    request.indices = content->indices;
    request.seeds = *content->seeds;
    request.state = state;
    request.blobs = *content->blobs;
  }
  // A message that is lost leaves a gap in the link's stamps, which the worker notices.
  auto bytes = wire::write_to_worker(request);
  connections_.links().send(command.worker_id, bytes);
  if (request.offer) wipe(bytes);
}

void TrainerRequests::begin_link(uint64_t worker_id, uint32_t number, wire::SealOffer& offer) {
  const auto nonce = net::draw_seal_nonce();
  if (!nonce) return stages_.fail(0, nonce.error());
  offer = {.ciphers = options_.ciphers, .nonce = nonce.value()};
  connections_.begin_link(worker_id, number, offer);
  if (auto connected = connections_.connect_handover(worker_id, number, inbox_.counters().arenas); !connected)
    news_.tell("worker " + news_.format_place(worker_id) +
               " sends its batches over a socket: " + connected.error().message);
}

void TrainerRequests::end_distrusted(const Command& command) {
  news_.note_wrong_answer(command);
  WorkerLink* link = connections_.links().find(command.worker_id);
  if (link == nullptr) return;
  connections_.links().end_link(command.worker_id);
  link->data_missed_at.reset();
  news_.note_distrust(command, *link);
}

// ---- To the trainer

void TrainerRequests::deliver(BatchKey key, std::unique_ptr<loader::Batch> batch,
                              std::optional<loader::NarrowArrival> narrow) {
  if (kinds_.awaits(key)) return kinds_.give_up();  // the error in place of a comparison batch, which has no consumer
  reports_.note_answered(clock_now());
  if (!wire::is_recall(key) && inbox_.is_stale(key.epoch)) return inbox_.counters().stale_batches.add(1);
  stages_.arrive({.kind = loader::Arrival::Kind::kBatch,
                  .epoch = key.epoch,
                  .sequence = key.sequence,
                  .batch = std::move(batch),
                  .narrow = std::move(narrow),
                  .error = {}});
}

void TrainerRequests::end_lane(BatchKey key, wire::Lane lane, Instant now) {
  ended_lanes_.insert(lane);
  session_.end_lane(key.epoch, lane, now);
  reports_.note_answered(now);
  if (inbox_.is_stale(key.epoch)) return;
  stages_.arrive(
      {.kind = loader::Arrival::Kind::kEnd, .epoch = key.epoch, .sequence = key.sequence, .batch = {}, .error = {}});
}

// ---- The comparison of workers

void TrainerRequests::note_numerics(uint64_t worker_id, const Numerics& numerics) {
  if (options_.numerics == Numerics{}) return;
  kinds_.note(worker_id, numerics);
  news_.note_numerics(worker_id, numerics);
}

void TrainerRequests::note_compared(uint64_t worker_id, const loader::Batch& batch) {
  const auto digest = batch.record().remote_error() ? std::nullopt : batch.tensors().content();
  if (!digest) return kinds_.give_up();
  if (auto difference = kinds_.finish(worker_id, news_.format_place(worker_id), *digest))
    news_.tell(std::move(*difference));
}

// A lane's batches depend on each other, and the results of prefixes are compared by the owner of the model.
void TrainerRequests::compare_kinds(uint64_t worker_id, const wire::PoolAnswer& answer, const loader::Batch& batch,
                                    const session::SharedContent& content, Instant now) {
  const BatchKey key = answer.message.key;
  const bool may_be_made_again = content && content->blobs->size() == 1 && !wire::is_recall(key) &&
                                 (answer.flags & (wire::kBatchRaises | wire::kBatchThreadsDrew)) == 0;
  if (batch.record().remote_error() || !may_be_made_again || answer.payload_bytes > kComparedBytesMax) return;
  const auto other = kinds_.choose(worker_id, [this](uint64_t id) { return session_.is_open(id); });
  const auto digest = other ? batch.tensors().content() : std::nullopt;
  if (!digest) return;
  kinds_.begin(wire::recall_of(key), worker_id, news_.format_place(worker_id), *digest);
  session_.ask(wire::recall_of(key), wire::kNoLane, now, content, other);
}

}  // namespace penstock::pool_client
