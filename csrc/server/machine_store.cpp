// SPDX-License-Identifier: Apache-2.0
#include "server/machine_store.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/bytes.h"

namespace penstock::server {

using session::BatchName;
using session::Claimant;
using wire::FromStore;
using wire::ToStore;
using Comparison = session::NamedBatches::Comparison;
using FoundKind = BatchStore::Found::Kind;

namespace {

constexpr Duration kMadeBytesInterval = std::chrono::milliseconds(500);  // between readings of a worker's bytes
constexpr size_t kSparseGroupsMax = 1024;
constexpr std::string_view kOfGuest = "penstock: a guest of a store of batches";
constexpr std::string_view kOfHost = "penstock: the host of a store of batches";

template <size_t kSize>
std::array<std::byte, kSize> draw() {
  std::array<std::byte, kSize> bytes{};
  PENSTOCK_ASSERT(::getrandom(bytes.data(), kSize, 0) == static_cast<ssize_t>(kSize), "no random bytes");
  return bytes;
}

wire::StoreProof prove(const StorePlace& place, std::string_view side, const wire::StoreNonce& of_host,
                       const wire::StoreNonce& of_guest) {
  std::array<std::byte, 2 * sizeof(wire::StoreNonce)> nonces{};
  std::ranges::copy(of_host, nonces.begin());
  std::ranges::copy(of_guest, nonces.begin() + sizeof(wire::StoreNonce));
  return net::keyed_hash(place.secret.bytes(), side, nonces);
}

// In a time that does not depend on the first difference.
bool is_equal(const wire::StoreProof& one, const wire::StoreProof& other) {
  std::byte difference{};
  for (size_t index = 0; index < one.size(); ++index) difference |= one[index] ^ other[index];
  return difference == std::byte{};
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }
std::string name_part(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

wire::StoreName record_of(const BatchName& name) {
  return {.group = bytes_of(name.group),
          .samples = bytes_of(name.samples),
          .epoch = bytes_of(name.epoch),
          .place = bytes_of(name.place)};
}
BatchName name_of(const wire::StoreName& name) {
  return {.group = name_part(name.group),
          .samples = name_part(name.samples),
          .epoch = name_part(name.epoch),
          .place = name_part(name.place)};
}
bool is_short(const BatchName& name) { return record_of(name).bytes() <= wire::kStoreNameBytesMax; }

wire::StoreBatch record_of(const PoolResult& result) {
  const auto payload = result.batch->payload();
  return {.flags = result.flags,
          .cpu_share = result.cpu_share,
          .fetch_time = result.fetch_time,
          .prefix_time = result.prefix_time,
          .samples = result.samples,
          .sample_count = result.sample_count,
          .dataset_size = result.dataset_size,
          .record_bytes = result.batch->record_bytes(),
          .payload_bytes = payload.size(),
          .payload = payload.size() <= wire::kStoreInlineBytesMax ? payload : std::span<const std::byte>()};
}

// Null if there is no memory for it, or if its file does not match the message.
std::shared_ptr<const PoolResult> result_of_record(const wire::StoreBatch& record, FileDescriptor file) {
  Result<std::unique_ptr<KeptBatch>> batch = Fault{Errc::kMalformed, "a kept batch has no file"};
  if (!record.payload.empty()) {
    batch = KeptBatch::of_size(record.payload_bytes, record.record_bytes);
    if (!batch) return nullptr;
    const auto copied = batch.value()->copy_step(record.payload);
    if (!copied || !copied.value()) return nullptr;
  } else if (file) {
    batch = KeptBatch::of_file(std::move(file), record.payload_bytes, record.record_bytes);
  }
  if (!batch) return nullptr;
  auto result = std::make_shared<PoolResult>();
  result->answer = wire::AnswerKind::kBatch;
  result->flags = record.flags;
  result->fetch_time = record.fetch_time;
  result->prefix_time = record.prefix_time;
  result->samples = record.samples;
  result->cpu_share = record.cpu_share;
  result->sample_count = record.sample_count;
  result->dataset_size = record.dataset_size;
  result->batch = std::move(batch).value();
  return result;
}

// The file of a kept batch that does not follow its message: its own, or `copied`, a copy.
int file_for(const PoolResult& result, FileDescriptor& copied) {
  const auto* batch = dynamic_cast<const KeptBatch*>(result.batch.get());
  if (batch != nullptr && batch->file() >= 0) return batch->file();
  auto file = file_of(result.batch->payload());
  if (!file) return -1;
  copied = std::move(file).value();
  return copied.get();
}

}  // namespace

std::optional<StorePlace> StorePlace::of(const net::KeyRing& keys, const std::string& controller,
                                         std::span<const std::string> installation) {
  // Two containers may share a network, and with it the names of sockets, but not their files.
  struct stat mounts {};
  struct stat root {};
  if (::stat("/proc/self/ns/mnt", &mounts) != 0 || ::stat("/", &root) != 0) return std::nullopt;
  ByteWriter text;
  const auto add = [&text](std::string_view part) {
    text.write(static_cast<uint64_t>(part.size()));
    text.write_text(part);
  };
  add(controller);
  for (const std::string& part : installation) add(part);
  for (const uint64_t number : {uint64_t{wire::kStoreVersion}, uint64_t{::geteuid()}, uint64_t{::getegid()},
                                uint64_t{mounts.st_ino}, uint64_t{root.st_dev}, uint64_t{root.st_ino}})
    text.write(number);
  net::SecretKey secret;
  std::ranges::copy(net::keyed_hash(keys.own().secret_key().bytes(), "penstock: a store of batches", text.bytes()),
                    secret.bytes().begin());
  const auto public_part = net::keyed_hash(secret.bytes(), "penstock: the name of a store of batches", {});
  std::string name = "penstock-kept-";
  for (const std::byte byte : std::span(public_part).first(16)) append_hex(name, static_cast<uint8_t>(byte));
  return StorePlace{.name = std::move(name), .secret = std::move(secret)};
}

MachineStore::MachineStore(std::optional<StorePlace> place)
    : place_(std::move(place)), loop_("pk_kept_batches", "which shares kept batches with other workers", *this) {}

MachineStore::~MachineStore() { loop_.stop(); }

Result<void> MachineStore::start() { return place_ ? loop_.start() : Result<void>(); }

// ---- For the workers of this server

void MachineStore::join(uint64_t worker_id, std::function<void()> wake) {
  MutexLock lock(mutex_);
  local_.join(worker_id, wake);
  members_[worker_id] = {.wake = std::move(wake)};
  if (calls_) call({.kind = ToStore::Kind::kJoin, .worker_id = worker_id});
}

void MachineStore::leave(uint64_t worker_id) {
  MutexLock lock(mutex_);
  if (members_.erase(worker_id) == 0) return;
  local_.leave(worker_id);
  if (calls_) call({.kind = ToStore::Kind::kLeave, .worker_id = worker_id});
}

void MachineStore::set_share(uint64_t worker_id, uint64_t bytes) {
  MutexLock lock(mutex_);
  const auto member = members_.find(worker_id);
  if (member == members_.end() || member->second.share == bytes) return;
  member->second.share = bytes;
  is_on_ = std::any_of(members_.begin(), members_.end(), [](const auto& item) { return item.second.share > 0; });
  if (calls_ && call({.kind = ToStore::Kind::kJoin, .worker_id = worker_id, .number = bytes})) return;
  local_.set_share(worker_id, bytes);
  loop_.wake();
}

BatchStore::Answer MachineStore::ask(const BatchName& name, const Claimant& by, bool may_wait) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.ask(name, by, may_wait);
  if (!is_short(name)) return {};
  auto reply = call({.kind = ToStore::Kind::kAsk,
                     .may_wait = may_wait,
                     .worker_id = by.worker_id,
                     .trainer_id = by.trainer_id,
                     .name = record_of(name)});
  if (reply) note_sparse(name.group, reply->message.is_sparse);
  if (!reply || reply->message.kind == FromStore::Kind::kMake) return {};
  if (reply->message.kind == FromStore::Kind::kWait) {
    if (const auto member = members_.find(by.worker_id); may_wait && member != members_.end())
      member->second.waits = true;
    return {.kind = FoundKind::kWait};
  }
  auto result = result_of(*std::move(reply));
  return {.kind = result ? FoundKind::kKept : FoundKind::kMake, .result = std::move(result)};
}

bool MachineStore::ask_ahead(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.ask_ahead(name, by).kind == FoundKind::kMake;
  if (!is_short(name)) return true;
  const auto reply = call({.kind = ToStore::Kind::kAsk,
                           .is_ahead = true,
                           .worker_id = by.worker_id,
                           .trainer_id = by.trainer_id,
                           .name = record_of(name)});
  if (reply) note_sparse(name.group, reply->message.is_sparse);
  return !reply || reply->message.kind == FromStore::Kind::kMake;
}

bool MachineStore::is_passed_over(const BatchName& name) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.is_passed_over(name);
  return sparse_.contains(name.group) && !session::is_chosen(name);
}

void MachineStore::stop_waiting(uint64_t worker_id) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.stop_waiting(worker_id);
  const auto member = members_.find(worker_id);
  if (member == members_.end() || !std::exchange(member->second.waits, false)) return;
  call({.kind = ToStore::Kind::kStopWaiting, .worker_id = worker_id});
}

std::optional<MachineStore::Id> MachineStore::admit(const BatchName& name, const Claimant& by,
                                                    const PoolResult& result) {
  const auto compare = [&result](const PoolResult& twin) {
    return result.draws_nothing ? compare_batches(*twin.batch, *result.batch) : Comparison::kDifferent;
  };
  const uint64_t bytes = result.batch->payload().size();
  const Duration making = (int64_t{result.fetch_time} + result.prefix_time) * wire::kTimeUnit;
  const session::MadeBatch made{
      .bytes = bytes, .draws_nothing = result.draws_nothing, .is_cheap = session::is_cheap(making, bytes)};
  MutexLock lock(mutex_);
  if (!calls_) {
    std::optional<Comparison> comparison;
    if (const auto twin = local_.twin_of(name)) comparison = compare(*twin);
    const auto number = local_.admit(name, by, made, comparison);
    return number ? std::optional(Id{.era = era_, .number = *number}) : std::nullopt;
  }
  if (!is_short(name)) return std::nullopt;
  ToStore question{.kind = ToStore::Kind::kAdmit,
                   .draws_nothing = made.draws_nothing,
                   .is_cheap = made.is_cheap,
                   .worker_id = by.worker_id,
                   .trainer_id = by.trainer_id,
                   .number = bytes,
                   .name = record_of(name)};
  auto reply = call(question);
  if (reply && reply->message.kind == FromStore::Kind::kCompare) {
    const auto twin = result_of(*std::move(reply));
    const Comparison comparison = twin ? compare(*twin) : Comparison::kUnclear;
    question.comparison = comparison == Comparison::kEqual       ? ToStore::Comparison::kEqual
                          : comparison == Comparison::kDifferent ? ToStore::Comparison::kDifferent
                                                                 : ToStore::Comparison::kUnclear;
    reply = call(question);
  }
  if (!reply || reply->message.kind != FromStore::Kind::kAdmitted || reply->message.number == 0) return std::nullopt;
  return Id{.era = era_, .number = reply->message.number};
}

Result<std::unique_ptr<KeptBatch>> MachineStore::new_batch(uint64_t payload_bytes, uint32_t record_bytes) {
  const bool is_shared = role_ == Role::kGuest || has_guests_;
  const bool has_file = is_shared && payload_bytes > wire::kStoreInlineBytesMax;
  return KeptBatch::of_size(payload_bytes, record_bytes,
                            has_file ? KeptBatch::Form::kShared : KeptBatch::Form::kPrivate);
}

void MachineStore::settle(Id id, std::shared_ptr<const PoolResult> result) {
  MutexLock lock(mutex_);
  if (id.era != era_) return;
  if (!calls_) return local_.settle(id.number, std::move(result));
  ToStore message{.kind = ToStore::Kind::kSettle, .number = id.number, .batch = record_of(*result)};
  FileDescriptor copied;
  const int file = message.batch->payload.empty() ? file_for(*result, copied) : -1;
  if (message.batch->payload.empty() && file < 0) message = {.kind = ToStore::Kind::kDrop, .number = id.number};
  call(message, file);
}

void MachineStore::drop(Id id) {
  MutexLock lock(mutex_);
  if (id.era != era_) return;
  if (!calls_) return local_.drop(id.number);
  call({.kind = ToStore::Kind::kDrop, .number = id.number});
}

void MachineStore::release(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.release(name, by);
  if (!is_short(name)) return;
  call({.kind = ToStore::Kind::kRelease,
        .worker_id = by.worker_id,
        .trainer_id = by.trainer_id,
        .name = record_of(name)});
}

void MachineStore::refuse(const BatchName& name, const Claimant& by) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.refuse(name, by);
  if (!is_short(name)) return;
  call({.kind = ToStore::Kind::kRefuse,
        .worker_id = by.worker_id,
        .trainer_id = by.trainer_id,
        .name = record_of(name)});
}

uint64_t MachineStore::bytes_made_by(uint64_t worker_id) {
  MutexLock lock(mutex_);
  if (!calls_) return local_.bytes_made_by(worker_id);
  const auto member = members_.find(worker_id);
  if (member == members_.end()) return 0;
  const Instant now = clock_now();
  if (now - member->second.made_bytes_read_at < kMadeBytesInterval) return member->second.made_bytes;
  member->second.made_bytes_read_at = now;
  const auto reply = call({.kind = ToStore::Kind::kCount, .worker_id = worker_id});
  member->second.made_bytes = reply ? reply->message.number : 0;
  return member->second.made_bytes;
}

// ---- A guest's questions

// Nullopt if there is no host any more; this server keeps its batches alone from then on.
std::optional<MachineStore::Reply> MachineStore::call(const ToStore& question, int file) {
  const auto bytes = wire::write_to_store(question);
  const std::span<const std::byte> parts[] = {bytes};
  const auto sent = calls_->send(parts, file >= 0 ? std::span<const int>(&file, 1) : std::span<const int>());
  auto message = sent ? calls_->receive(std::chrono::steady_clock::now() + kStoreAnswerMax)
                      : Result<shm::Channel::Message>(sent.error());
  auto parsed = message ? wire::parse_from_store(message.value().bytes) : Result<FromStore>(message.error());
  if (!parsed) {
    lose_host();
    return std::nullopt;
  }
  Reply reply{.message = parsed.value()};
  if (!message.value().fds.empty()) reply.file = std::move(message.value().fds.front());
  return reply;
}

void MachineStore::note_sparse(const std::string& group, bool is_sparse) {
  if (!is_sparse) {
    sparse_.erase(group);
    return;
  }
  if (sparse_.size() >= kSparseGroupsMax) sparse_.clear();
  sparse_.insert(group);
}

void MachineStore::lose_host() {
  calls_.reset();
  sparse_.clear();
  ++era_;
  role_ = Role::kAlone;
  for (auto& [id, member] : members_) {
    member.waits = false;
    local_.set_share(id, member.share);
    member.wake();
  }
  loop_.wake();
}

std::shared_ptr<const PoolResult> MachineStore::result_of(Reply reply) {
  return reply.message.batch ? result_of_record(*reply.message.batch, std::move(reply.file)) : nullptr;
}

// ---- The loop

Result<void> MachineStore::serve() {
  const Instant now = clock_now();
  if (wakes_) serve_wakes();
  if (listener_) serve_guests(now);
  if (!wakes_ && !listener_ && is_on_ && now >= retry_at_) open(now);
  return {};
}

Result<bool> MachineStore::wait(int wake_fd, bool may_sleep) {
  std::vector<pollfd> items{{.fd = wake_fd, .events = POLLIN, .revents = 0}};
  const bool is_pausing = clock_now() < accept_at_;
  if (listener_ && !is_pausing) items.push_back({.fd = listener_->fd(), .events = POLLIN, .revents = 0});
  for (const auto& peer : peers_) {
    const int unsent = peer->channel.has_unsent() ? POLLOUT : 0;
    items.push_back({.fd = peer->channel.fd(), .events = static_cast<short>(POLLIN | unsent), .revents = 0});
  }
  if (wakes_) items.push_back({.fd = wakes_->fd(), .events = POLLIN, .revents = 0});
  const bool has_unproven =
      std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return !peer->is_proven; });
  const bool is_searching = !wakes_ && !listener_ && is_on_;
  const auto timeout = !may_sleep ? std::chrono::milliseconds(0)
                       : has_unproven || is_searching || is_pausing
                           ? std::chrono::ceil<std::chrono::milliseconds>(kStoreRetry)
                           : std::chrono::milliseconds(-1);
  if (::poll(items.data(), items.size(), static_cast<int>(timeout.count())) < 0 && errno != EINTR)
    return Fault{Errc::kFailed,
                 std::string("waiting for the other workers of this machine failed: ") + std::strerror(errno)};
  return (items.front().revents & POLLIN) != 0;
}

void MachineStore::end() {
  for (const auto& peer : peers_) part_from(*peer);
  peers_.clear();
  listener_.reset();
  wakes_.reset();
  MutexLock lock(mutex_);
  if (calls_) lose_host();
  role_ = Role::kAlone;
}

void MachineStore::open(Instant now) {
  retry_at_ = now + kStoreRetry;
  if (auto listener = shm::ChannelListener::bind(place_->name)) {
    listener_.emplace(std::move(listener).value());
    role_ = Role::kHost;
    return;
  }
  uint64_t guest_id = 0;
  const auto random = draw<sizeof guest_id>();
  std::memcpy(&guest_id, random.data(), sizeof guest_id);
  auto calls = connect(guest_id, /*is_for_wakes=*/false);
  if (!calls) return;
  auto wakes = connect(guest_id, /*is_for_wakes=*/true);
  if (!wakes) return;
  begin_as_guest(std::move(calls).value(), std::move(wakes).value());
}

Result<shm::Channel> MachineStore::connect(uint64_t guest_id, bool is_for_wakes) const {
  auto channel = shm::Channel::connect(place_->name, wire::kStoreMessageBytesMax);
  if (!channel) return channel.error();
  const auto deadline = std::chrono::steady_clock::now() + kStoreAnswerMax;
  const auto next = [&]() -> Result<FromStore> {
    const auto message = channel.value().receive(deadline);
    if (!message) return message.error();
    return wire::parse_from_store(message.value().bytes);
  };
  const Fault is_strange{Errc::kFailed, "the process at the address of kept batches is no worker with this key"};
  const auto challenge = next();
  if (!challenge) return challenge.error();
  if (challenge.value().kind != FromStore::Kind::kChallenge) return is_strange;
  const wire::StoreNonce of_host = challenge.value().nonce;
  const auto nonce = draw<sizeof(wire::StoreNonce)>();
  const auto hello = wire::write_to_store({.kind = ToStore::Kind::kHello,
                                           .is_for_wakes = is_for_wakes,
                                           .number = guest_id,
                                           .nonce = nonce,
                                           .proof = prove(*place_, kOfGuest, of_host, nonce)});
  const std::span<const std::byte> parts[] = {hello};
  if (auto sent = channel.value().send(parts); !sent) return sent.error();
  const auto accepted = next();
  if (!accepted) return accepted.error();
  if (accepted.value().kind != FromStore::Kind::kAccepted ||
      !is_equal(accepted.value().proof, prove(*place_, kOfHost, of_host, nonce)))
    return is_strange;
  return channel;
}

// The batches that this server has kept alone are dropped.
void MachineStore::begin_as_guest(shm::Channel calls, shm::Channel wakes) {
  MutexLock lock(mutex_);
  ++era_;
  calls_.emplace(std::move(calls));
  sparse_.clear();
  for (auto& [id, member] : members_) {
    local_.leave(id);
    local_.join(id, member.wake);
    member.made_bytes_read_at = {};
    if (!call({.kind = ToStore::Kind::kJoin, .worker_id = id, .number = member.share})) return;
  }
  wakes_.emplace(std::move(wakes));
  role_ = Role::kGuest;
  for (const auto& [id, member] : members_) member.wake();
}

void MachineStore::serve_wakes() {
  bool is_woken = false;
  bool is_open = true;
  for (;;) {
    auto message = wakes_->next();
    if (message && message.value()) {
      const auto parsed = wire::parse_from_store(message.value()->bytes);
      is_open = parsed && parsed.value().kind == FromStore::Kind::kWake;
      is_woken = true;
      if (is_open) continue;
    }
    const auto filled = message && is_open ? wakes_->fill() : Result<bool>(Fault{Errc::kClosed, "it is over"});
    is_open = static_cast<bool>(filled);
    if (!is_open || !filled.value()) break;
  }
  MutexLock lock(mutex_);
  if (!is_open || !calls_) {
    if (calls_) lose_host();
    wakes_.reset();
    return;
  }
  if (!is_woken) return;
  for (const auto& [id, member] : members_) member.wake();
}

// ---- The host

void MachineStore::serve_guests(Instant now) {
  accept_guests(now);
  for (auto& peer : peers_) {
    const bool is_late = !peer->is_proven && now - peer->accepted_at >= kStoreProofMax;
    if (!is_late && serve_guest(*peer)) continue;
    part_from(*peer);
    peer.reset();
  }
  std::erase(peers_, nullptr);
  has_guests_ = std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->is_proven; });
}

void MachineStore::accept_guests(Instant now) {
  if (now < accept_at_) return;
  for (;;) {
    auto channel = listener_->accept(wire::kStoreMessageBytesMax);
    if (!channel) {
      // No descriptor may be left; the guest keeps its batches alone meanwhile.
      if (channel.error().code != Errc::kTimeout) accept_at_ = now + kStoreRetry;
      return;
    }
    const auto unproven = static_cast<size_t>(
        std::count_if(peers_.begin(), peers_.end(), [](const auto& peer) { return !peer->is_proven; }));
    if (unproven >= kStoreUnprovenMax || peers_.size() >= kStorePeerCountMax) continue;
    auto peer = std::make_unique<Peer>(std::move(channel).value());
    peer->accepted_at = now;
    peer->nonce = draw<sizeof(wire::StoreNonce)>();
    const auto challenge = wire::write_from_store({.kind = FromStore::Kind::kChallenge, .nonce = peer->nonce});
    const std::span<const std::byte> parts[] = {challenge};
    if (peer->channel.post(parts)) peers_.push_back(std::move(peer));
  }
}

// Returns whether the connection lasts.
bool MachineStore::serve_guest(Peer& peer) {
  if (peer.channel.has_unsent() && !peer.channel.flush()) return false;
  for (;;) {
    auto message = peer.channel.next();
    if (!message) return false;
    if (!message.value()) {
      const auto filled = peer.channel.fill();
      if (!filled) return false;
      if (!filled.value()) break;
      continue;
    }
    const auto question = wire::parse_to_store(message.value()->bytes);
    // A guest waits for each answer.
    if (!question || peer.channel.has_unsent()) return false;
    const bool is_hello = question.value().kind == ToStore::Kind::kHello;
    if (is_hello == peer.is_proven || peer.is_for_wakes) return false;
    if (!(is_hello ? welcome(peer, question.value()) : answer(peer, question.value(), message.value()->fds)))
      return false;
  }
  if (!peer.is_for_wakes || peer.channel.has_unsent() || !peer.is_woken->exchange(false)) return true;
  const auto wake = wire::write_from_store({.kind = FromStore::Kind::kWake});
  const std::span<const std::byte> parts[] = {wake};
  return static_cast<bool>(peer.channel.post(parts));
}

bool MachineStore::welcome(Peer& peer, const ToStore& hello) {
  if (!is_equal(hello.proof, prove(*place_, kOfGuest, peer.nonce, hello.nonce))) return false;
  peer.guest_id = hello.number;
  peer.is_for_wakes = hello.is_for_wakes;
  if (peer.is_for_wakes) {
    const auto calls = std::find_if(peers_.begin(), peers_.end(), [&](const auto& other) {
      return other && other->is_proven && !other->is_for_wakes && other->guest_id == peer.guest_id;
    });
    if (calls == peers_.end()) return false;
    peer.is_woken = (*calls)->is_woken;
  } else {
    peer.is_woken = std::make_shared<std::atomic<bool>>(false);
  }
  peer.is_proven = true;
  const auto accepted = wire::write_from_store(
      {.kind = FromStore::Kind::kAccepted, .proof = prove(*place_, kOfHost, peer.nonce, hello.nonce)});
  const std::span<const std::byte> parts[] = {accepted};
  return static_cast<bool>(peer.channel.post(parts));
}

bool MachineStore::answer(Peer& peer, const ToStore& question, std::span<FileDescriptor> files) {
  using Kind = ToStore::Kind;
  const Claimant by{.worker_id = question.worker_id, .trainer_id = question.trainer_id};
  const bool is_of_worker = question.kind != Kind::kJoin && question.kind != Kind::kSettle &&
                            question.kind != Kind::kDrop && question.kind != Kind::kLeave;
  if (is_of_worker && !peer.workers.contains(by.worker_id)) return false;
  FromStore reply;
  std::shared_ptr<const PoolResult> result;
  switch (question.kind) {
    case Kind::kHello: return false;
    case Kind::kJoin:
      if (peer.workers.insert(by.worker_id).second) {
        local_.join(by.worker_id, [is_woken = peer.is_woken, &loop = loop_] {
          is_woken->store(true);
          loop.wake();
        });
      }
      local_.set_share(by.worker_id, question.number);
      break;
    case Kind::kLeave:
      if (peer.workers.erase(by.worker_id) > 0) local_.leave(by.worker_id);
      break;
    case Kind::kAsk: {
      if (question.is_ahead) {
        const auto found = local_.ask_ahead(name_of(question.name), by);
        reply.kind = found.kind == FoundKind::kMake ? FromStore::Kind::kMake : FromStore::Kind::kWait;
        reply.is_sparse = found.is_sparse;
        break;
      }
      auto found = local_.ask(name_of(question.name), by, question.may_wait);
      reply.kind = found.kind == FoundKind::kKept   ? FromStore::Kind::kKept
                   : found.kind == FoundKind::kWait ? FromStore::Kind::kWait
                                                    : FromStore::Kind::kMake;
      reply.is_sparse = found.is_sparse;
      result = std::move(found.result);
      break;
    }
    case Kind::kStopWaiting: local_.stop_waiting(by.worker_id); break;
    case Kind::kAdmit: {
      const BatchName name = name_of(question.name);
      if (question.comparison == ToStore::Comparison::kNone) result = local_.twin_of(name);
      if (result) {
        reply.kind = FromStore::Kind::kCompare;
        break;
      }
      std::optional<Comparison> comparison;
      if (question.comparison == ToStore::Comparison::kEqual) comparison = Comparison::kEqual;
      if (question.comparison == ToStore::Comparison::kDifferent) comparison = Comparison::kDifferent;
      if (question.comparison == ToStore::Comparison::kUnclear) comparison = Comparison::kUnclear;
      reply.kind = FromStore::Kind::kAdmitted;
      const session::MadeBatch made{
          .bytes = question.number, .draws_nothing = question.draws_nothing, .is_cheap = question.is_cheap};
      reply.number = local_.admit(name, by, made, comparison).value_or(0);
      break;
    }
    case Kind::kSettle: settle_of(question, files); break;
    case Kind::kDrop: local_.drop(question.number); break;
    case Kind::kRelease: local_.release(name_of(question.name), by); break;
    case Kind::kRefuse: local_.refuse(name_of(question.name), by); break;
    case Kind::kCount: reply.number = local_.bytes_made_by(by.worker_id); break;
  }
  FileDescriptor copied;
  int file = -1;
  if (result) {
    reply.batch = record_of(*result);
    if (reply.batch->payload.empty()) {
      file = file_for(*result, copied);
      // Without memory for a copy, the guest makes the batch, as if it was not kept.
      if (file < 0) {
        reply = reply.kind == FromStore::Kind::kCompare ? FromStore{.kind = FromStore::Kind::kAdmitted}
                                                        : FromStore{.kind = FromStore::Kind::kMake};
      }
    }
  }
  const auto bytes = wire::write_from_store(reply);
  const std::span<const std::byte> parts[] = {bytes};
  if (file < 0) return static_cast<bool>(peer.channel.post(parts));
  const auto sent = peer.channel.try_send(parts, {&file, 1});
  return sent && sent.value();
}

void MachineStore::settle_of(const ToStore& question, std::span<FileDescriptor> files) {
  auto result = result_of_record(*question.batch, files.empty() ? FileDescriptor() : std::move(files.front()));
  if (!result) return local_.drop(question.number);
  local_.settle(question.number, std::move(result));
}

void MachineStore::part_from(Peer& peer) {
  for (const uint64_t worker_id : peer.workers) local_.leave(worker_id);
  peer.workers.clear();
}

}  // namespace penstock::server
