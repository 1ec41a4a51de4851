// SPDX-License-Identifier: Apache-2.0
#include "pool_client/worker_links.h"

#include <algorithm>
#include <array>
#include <utility>

namespace penstock::pool_client {

Result<void> DataLink::connect(net::SocketContext& context, net::Resolver& resolver, const wire::SealGrant& grant) {
  auto client = net::DataClient::connect(context, resolver, name_, offer_, grant);
  if (!client) return client.error();
  client_ = std::move(client).value();
  offer_ = {};
  return {};
}

DataLink::Outcome DataLink::fail(std::string fault) {
  fault_ = std::move(fault);
  return Outcome::kFault;
}

// Chunks are decrypted even if their batch is not awaited: the contents of a head are trustworthy only if its seal is
// valid.
DataLink::Outcome DataLink::keep_piece(loader::BatchMemory& memory, bool is_awaited) {
  const wire::SealedPiece& piece = client_->piece();
  const wire::BatchKey key = piece.head.key;
  if (!is_awaited || piece.head.payload_offset == 0) incoming_.erase(key);
  if (!is_awaited) {
    unwanted_.resize(piece.size());
    return client_->open(unwanted_) ? Outcome::kPiece : fail(client_->fault());
  }
  if (piece.head.payload_offset == 0) incoming_.try_emplace(key, memory, piece.head.payload_bytes);
  const auto found = incoming_.find(key);
  const auto room = found == incoming_.end() ? std::span<std::byte>()
                                             : found->second.room_for(piece.head.payload_offset, piece.size());
  if (room.empty()) return fail("it is not the next one of its batch");
  if (!client_->open(room)) {
    incoming_.erase(found);
    return fail(client_->fault());
  }
  found->second.add(piece.size());
  return Outcome::kPiece;
}

bool DataLink::has_whole(wire::BatchKey key) const {
  const auto found = incoming_.find(key);
  return found != incoming_.end() && found->second.is_whole();
}

std::optional<loader::IncomingBatch> DataLink::take_whole(wire::BatchKey key) {
  auto node = incoming_.extract(key);
  if (node.empty() || !node.mapped().is_whole()) return std::nullopt;
  return std::move(node.mapped());
}

namespace {

// A worker has at most some dozens of outstanding answers, and sends few other messages.
constexpr size_t kWaitingCountMax = 1024;

}  // namespace

bool WorkerLink::is_at(const std::string& host) const {
  return endpoint_.host == host || (data_ && data_->is_granted() && data_->endpoint().host == host);
}

std::optional<Instant> WorkerLink::due_at() const {
  const auto due = earlier(reconnect_at, socket_->due_at());
  return data_ && data_->is_granted() ? earlier(due, data_->due_at()) : due;
}

void WorkerLink::begin_link(const net::LinkName& name, const wire::SealOffer& offer) {
  end_link();
  data_.emplace(name, offer);
}

void WorkerLink::end_link() {
  waiting_.clear();
  data_.reset();
  passed_.reset();
}

bool WorkerLink::add_waiting(net::ReceivedPart part) {
  if (waiting_.size() >= kWaitingCountMax) return false;
  waiting_.push_back(std::move(part));
  return true;
}

void WorkerLink::hand_out(const wire::BlobRequest& request, const std::shared_ptr<const std::string>& blob) {
  if (blob == nullptr || request.offset >= blob->size()) {
    const auto answer = wire::write_blob_message(wire::BlobUnknown{.id = request.id});
    static_cast<void>(socket_->send(answer));
    return;
  }
  const auto head = wire::write_blob_message(
      wire::BlobPiece{.id = request.id, .offset = request.offset, .total_bytes = blob->size()});
  const uint64_t size = std::min<uint64_t>(wire::kBlobPieceBytesMax, blob->size() - request.offset);
  const auto piece = std::as_bytes(std::span(*blob)).subspan(request.offset, size);
  std::array<net::OutgoingPart, 2> parts{
      net::OutgoingPart{.bytes = head, .release = nullptr},
      net::OutgoingPart{.bytes = piece, .release = [blob] {}},  // keeps the blob until the part was sent
  };
  static_cast<void>(socket_->send(parts));
}

WorkerLinks::~WorkerLinks() {
  while (!links_.empty()) drop(links_.begin()->first);
  for (Resting& resting : resting_) {
    static_cast<void>(resting.socket->send(resting.goodbye));
    resting.socket->set_linger(net::kClosingLinger);
  }
}

Result<void> WorkerLinks::open(uint64_t worker_id, const net::Endpoint& endpoint,
                               std::unique_ptr<net::ClientSocket> socket) {
  const auto tag = ready_set_.add(socket->waitables());
  if (!tag) return tag.error();
  drop(worker_id);
  links_.try_emplace(worker_id, endpoint, std::move(socket), tag.value());
  worker_of_.emplace(tag.value(), worker_id);
  note_served(worker_id);  // it may be due later
  return {};
}

void WorkerLinks::close(uint64_t worker_id, std::chrono::milliseconds linger) {
  if (WorkerLink* link = find(worker_id)) link->socket().set_linger(linger);
  drop(worker_id);
}

void WorkerLinks::rest(uint64_t worker_id, std::vector<std::byte> goodbye, Instant now) {
  WorkerLink* link = find(worker_id);
  if (link == nullptr) return;
  auto socket = link->take_socket();
  drop(worker_id);
  forget_resting(worker_id);
  if (resting_.size() >= kRestingCountMax) resting_.pop_front();
  resting_.push_back(
      {.worker_id = worker_id, .socket = std::move(socket), .goodbye = std::move(goodbye), .since = now});
}

void WorkerLinks::forget_resting(uint64_t worker_id) {
  std::erase_if(resting_, [&](const Resting& resting) { return resting.worker_id == worker_id; });
}

void WorkerLinks::end_rest(Instant instant) {
  while (!resting_.empty() && resting_.front().since <= instant) resting_.pop_front();
}

void WorkerLinks::drop(uint64_t worker_id) {
  const auto found = links_.find(worker_id);
  if (found == links_.end()) return;
  drop_data(found->second);
  ready_set_.remove(found->second.tag());
  worker_of_.erase(found->second.tag());
  due_at_.erase(worker_id);
  links_.erase(found);
}

void WorkerLinks::drop_data(WorkerLink& link) {
  if (link.data_tag != 0) {
    ready_set_.remove(link.data_tag);
    worker_of_.erase(std::exchange(link.data_tag, 0));
  }
  link.end_link();
}

void WorkerLinks::begin_link(uint64_t worker_id, const net::LinkName& name, const wire::SealOffer& offer) {
  WorkerLink& link = links_.at(worker_id);
  drop_data(link);
  link.begin_link(name, offer);
}

void WorkerLinks::end_link(uint64_t worker_id) {
  drop_data(links_.at(worker_id));
  note_served(worker_id);
}

Result<void> WorkerLinks::connect_data(uint64_t worker_id, net::SocketContext& context, net::Resolver& resolver,
                                       const wire::SealGrant& grant) {
  WorkerLink& link = links_.at(worker_id);
  PENSTOCK_ASSERT(link.data() && link.data_tag == 0);
  if (auto connected = link.data()->connect(context, resolver, grant); !connected) return connected;
  const auto tag = ready_set_.add(link.data()->client().waitables());
  if (!tag) return tag.error();
  link.data_tag = tag.value();
  worker_of_.emplace(tag.value(), worker_id);
  note_served(worker_id);  // it may be due later
  return {};
}

WorkerLink* WorkerLinks::find(uint64_t worker_id) {
  const auto found = links_.find(worker_id);
  return found == links_.end() ? nullptr : &found->second;
}

std::vector<uint64_t> WorkerLinks::silent_since(Instant instant) const {
  std::vector<uint64_t> silent;
  for (const auto& [worker_id, link] : links_)
    if (!link.has_responded && !link.is_problem_reported && link.opened_at() <= instant) silent.push_back(worker_id);
  return silent;
}

std::vector<uint64_t> WorkerLinks::without_data_since(Instant instant) const {
  std::vector<uint64_t> without;
  for (const auto& [worker_id, link] : links_)
    if (link.data_missed_at && *link.data_missed_at <= instant) without.push_back(worker_id);
  return without;
}

void WorkerLinks::renew(uint64_t worker_id) {
  WorkerLink* link = find(worker_id);
  if (link == nullptr) return;
  link->socket().renew();
  drop_data(*link);
  mark_used(*link);
  note_served(worker_id);  // it may be due later
}

void WorkerLinks::mark_used(const WorkerLink& link) {
  ready_set_.mark_used(link.tag());
  if (link.data_tag != 0) ready_set_.mark_used(link.data_tag);
}

void WorkerLinks::send(uint64_t worker_id, std::span<const std::byte> message) {
  WorkerLink* link = find(worker_id);
  if (link == nullptr) return;
  static_cast<void>(link->socket().send(message));
  ready_set_.mark_used(link->tag());
}

void WorkerLinks::note_ready(uint64_t tag) {
  const auto found = worker_of_.find(tag);
  if (found != worker_of_.end()) ready_.insert(found->second);
}

void WorkerLinks::note_looked_up(const std::string& host) {
  for (const auto& [worker_id, link] : links_) {
    if (!link.is_at(host)) continue;
    ready_.insert(worker_id);
    mark_used(link);
  }
}

std::set<uint64_t> WorkerLinks::take_ready(Instant now) {
  for (const auto& [worker_id, at] : due_at_) {
    if (now < at) continue;
    ready_.insert(worker_id);
    mark_used(links_.at(worker_id));
  }
  return std::exchange(ready_, {});
}

void WorkerLinks::note_served(uint64_t worker_id) {
  const WorkerLink* link = find(worker_id);
  const auto due = link == nullptr ? std::nullopt : link->due_at();
  if (due) {
    due_at_.insert_or_assign(worker_id, *due);
  } else {
    due_at_.erase(worker_id);
  }
}

std::optional<Instant> WorkerLinks::due_at() const {
  std::optional<Instant> next;
  for (const auto& [worker_id, at] : due_at_) next = earlier(next, at);
  return next;
}

}  // namespace penstock::pool_client
