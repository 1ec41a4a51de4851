// SPDX-License-Identifier: Apache-2.0
#include "replica/relay.h"

#include <ATen/ops/empty_like.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <span>
#include <system_error>

#include "base/clock.h"
#include "base/process.h"

namespace penstock::replica {

uint64_t ReplicaAnswer::bytes() const {
  uint64_t bytes = nest.size() + state.size() + text.size();
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_meta()) bytes += tensor.nbytes();
  return bytes;
}

ReplicaStore::ReplicaStore(size_t follower_count, uint64_t bytes_max)
    : bytes_max_(bytes_max), followers_(follower_count) {}

// ---- For the leader

void ReplicaStore::asked(uint32_t epoch, const RequestDigest& request) {
  const MutexLock lock(mutex_);
  is_stopped_ = false;
  epoch_ = epoch;
  requested_at_ = clock_now();
  entries_.try_emplace(
      {epoch, request.sequence},
      Entry{.digest = request.value, .answer = {}, .taken_by = std::vector<bool>(followers_.size(), false)});
  changed_.notify_all();
}

void ReplicaStore::arrived(uint32_t epoch, uint64_t sequence, std::shared_ptr<const ReplicaAnswer> answer) {
  const MutexLock lock(mutex_);
  const uint64_t bytes = answer->bytes();
  while (!is_stopped_) {
    const auto slow = slow_follower(bytes);
    if (slow != awaited_) {
      awaited_ = slow;
      awaited_since_ = clock_now();
    }
    if (!slow) break;
    changed_.wait(mutex_);
  }
  awaited_.reset();
  const auto entry = entries_.find({epoch, sequence});
  if (entry == entries_.end() || entry->second.answer) return;  // all have skipped it, or it is a duplicate
  entry->second.answer = std::move(answer);
  for (size_t follower = 0; follower < followers_.size(); ++follower)
    if (!entry->second.taken_by[follower]) followers_[follower].untaken_bytes += bytes;
  changed_.notify_all();
}

void ReplicaStore::stop() {
  const MutexLock lock(mutex_);
  is_stopped_ = true;
  changed_.notify_all();
}

std::optional<std::pair<size_t, Duration>> ReplicaStore::awaited_follower() const {
  const MutexLock lock(mutex_);
  if (!awaited_) return std::nullopt;
  return std::pair(*awaited_, clock_now() - awaited_since_);
}

// A follower that waits for a missing batch is not slow: others delay it.
std::optional<size_t> ReplicaStore::slow_follower(uint64_t more_bytes) const {
  for (size_t follower = 0; follower < followers_.size(); ++follower) {
    const Follower& it = followers_[follower];
    if (!it.is_waiting && it.untaken_bytes > 0 && it.untaken_bytes + more_bytes > bytes_max_) return follower;
  }
  return std::nullopt;
}

// ---- For a follower

ReplicaStore::Taken ReplicaStore::take(size_t follower, const RequestDigest& request, Instant requested_at,
                                       Deadline deadline) {
  const MutexLock lock(mutex_);
  for (bool is_late = false;;) {
    const auto entry = find(request);
    if (entry != entries_.end()) pass_by(entry->first.first, follower);
    if (entry != entries_.end() && entry->second.answer) {
      followers_[follower].is_waiting = false;
      auto answer = entry->second.answer;
      take_from(entry, follower);
      changed_.notify_all();
      return {.answer = std::move(answer)};
    }
    if (auto refusal = refusal_of(request, requested_at, clock_now()); !refusal.empty())
      return {.refusal = std::move(refusal)};
    if (!std::exchange(followers_[follower].is_waiting, true)) changed_.notify_all();
    if (is_late) return {};
    is_late = !changed_.wait_until(mutex_, deadline);
  }
}

std::map<ReplicaStore::Key, ReplicaStore::Entry>::iterator ReplicaStore::find(const RequestDigest& request) {
  const auto fits = [&](const auto& entry) {
    return entry.first.second == request.sequence && entry.second.digest == request.value;
  };
  // Two epochs without random numbers may have identical requests: the first epoch is the next one.
  return std::find_if(entries_.begin(), entries_.end(), fits);
}

void ReplicaStore::take_from(std::map<Key, Entry>::iterator entry, size_t follower) {
  if (!entry->second.taken_by[follower]) {
    entry->second.taken_by[follower] = true;
    if (entry->second.answer) followers_[follower].untaken_bytes -= entry->second.answer->bytes();
  }
  const auto& taken_by = entry->second.taken_by;
  if (std::all_of(taken_by.begin(), taken_by.end(), [](bool is_taken) { return is_taken; })) entries_.erase(entry);
}

// A follower that requests a batch of an epoch requests no more batches of earlier epochs.
void ReplicaStore::pass_by(uint32_t epoch, size_t follower) {
  for (auto at = entries_.begin(); at != entries_.end() && at->first.first < epoch;) take_from(at++, follower);
}

std::string ReplicaStore::refusal_of(const RequestDigest& request, Instant requested_at, Instant now) const {
  const bool leader_advanced = requested_at_ > requested_at && now - requested_at > kPatience;
  if (!leader_advanced) return "";
  bool is_of_old_epoch = false;
  for (const auto& [key, entry] : entries_)
    if (key.second == request.sequence && entry.digest == request.value) {
      if (key.first == epoch_) return "";
      is_of_old_epoch = true;
    }
  if (is_of_old_epoch) return "has started another epoch and left this one before this batch was made";
  const auto other = entries_.find({epoch_, request.sequence});
  const bool is_past = other == entries_.end() && !entries_.empty() && entries_.rbegin()->first.first == epoch_ &&
                       entries_.rbegin()->first.second > request.sequence;
  if (other == entries_.end() && !is_past) return "";
  return "has requested another batch at this position, or has already sent this one to all ranks";
}

namespace {

constexpr auto kLook = std::chrono::milliseconds(200);  // how often a waiting thread checks whether to stop

// The flags that describe the batch, as opposed to the memory in which it was received.
constexpr uint8_t kFlagsOfContent = wire::kBatchRaises | wire::kBatchThreadsDrew | wire::kBatchDatasetStays;

RequestDigest digest_of(uint64_t sequence, wire::IndexKind kind, std::span<const std::byte> indices,
                        std::span<const std::byte> seeds, uint64_t epoch_seed, uint64_t first_place) {
  ContentDigest digest;
  digest.add(static_cast<uint64_t>(kind));
  digest.add(indices);
  digest.add(seeds);
  digest.add(epoch_seed);
  digest.add(first_place);
  return {.sequence = sequence, .value = digest.value()};
}

RequestDigest digest_of(const session::RequestContent& content) {
  const wire::BatchRequest& request = content.request;
  const std::span<const std::byte> seeds =
      content.seeds ? std::span<const std::byte>(*content.seeds) : std::span<const std::byte>();
  return digest_of(request.sequence, request.index_kind, content.indices, seeds, request.epoch_seed,
                   request.first_place);
}

RequestDigest digest_of(const server::PoolWork& work) {
  return digest_of(work.number(), work.index_kind, work.indices, work.seeds, work.epoch_seed, work.first_place);
}

bool is_read_by_any(uint32_t index, const std::vector<std::vector<uint32_t>>& absent) {
  return std::ranges::any_of(absent, [&](const auto& leaves) { return !std::ranges::binary_search(leaves, index); });
}

// Copies the batch, so that the leader's program cannot change the followers' batches. `absent` as in ReplicaAnswer.
std::shared_ptr<const ReplicaAnswer> copy_of(loader::Batch& batch, std::vector<std::vector<uint32_t>> absent = {}) {
  auto answer = std::make_shared<ReplicaAnswer>();
  answer->state.assign(batch.record().state().begin(), batch.record().state().end());
  if (const auto& error = batch.record().remote_error()) {
    answer->kind = ReplicaAnswer::Kind::kError;
    answer->type_name = error->type_name;
    answer->text = error->text;
    return answer;
  }
  answer->flags = batch.record().facts().flags & kFlagsOfContent;
  for (const at::Tensor& tensor : batch.tensors().all()) {
    const bool is_read = absent.empty() || is_read_by_any(static_cast<uint32_t>(answer->tensors.size()), absent);
    answer->tensors.push_back(is_read ? tensor.clone() : at::empty_like(tensor, tensor.options().device(at::kMeta)));
  }
  answer->absent = std::move(absent);
  answer->nest.assign(batch.record().frame().nest.begin(), batch.record().frame().nest.end());
  return answer;
}

}  // namespace

Result<std::shared_ptr<Relay>> Relay::start(RelayOptions options) {
  // A forked child has neither the threads nor the sockets, so it does not destroy anything.
  const std::shared_ptr<Relay> relay(new Relay(std::move(options)), [owner = ::getpid()](Relay* it) {
    if (::getpid() == owner) std::default_delete<Relay>()(it);
  });
  for (const FollowerSeat& seat : relay->options_.followers)
    if (auto opened = relay->open_follower(seat); !opened) return opened.error();
  try {
    for (size_t follower = 0; follower < relay->followers_.size(); ++follower)
      relay->followers_[follower].thread = std::thread([self = relay.get(), follower] { self->run(follower); });
  } catch (const std::system_error& error) {
    return Fault{Errc::kNoMemory,
                 std::string("starting a thread pk_relay, which forwards batches to a rank, failed: ") + error.what() +
                     "; raise the limit of processes and threads (ulimit -u, pids of a container)"};
  }
  return relay;
}

Relay::Relay(RelayOptions options)
    : options_(std::move(options)), store_(options_.followers.size(), options_.held_bytes_max) {}

void Relay::close() {
  is_closing_.store(true);
  store_.stop();
  for (Follower& follower : followers_)
    if (follower.thread.joinable()) follower.thread.join();
  followers_.clear();
}

Result<net::KeyRing> Relay::key_ring(const FollowerSeat& seat) const {
  auto own = net::KeyPair::parse_secret(options_.keys.secret_text().text());
  if (!own) return own.error();
  // Only this follower's key is accepted. The roles without a part in this get new keys, which are not used elsewhere.
  net::PublicKeys keys{.roles = {net::KeyPair::generate().public_key(), seat.key, options_.keys.public_key(),
                                 net::KeyPair::generate().public_key()}};
  return net::KeyRing(net::Role::kWorker, std::move(own).value(), std::move(keys), net::KeyOrigin::kGiven);
}

Result<void> Relay::open_follower(const FollowerSeat& seat) {
  auto keys = key_ring(seat);
  if (!keys) return keys.error();
  net::Endpoint bind{.host = options_.bind_host, .port = 0};
  server::PoolServerOptions options{.bind = std::move(bind), .keys = std::move(keys).value()};
  options.about = host_name() + ", " + options_.leader;
  options.arena_bytes = options_.arena_bytes;
  options.handover = seat.handover;
  options.watches_parent = false;
  auto server = worker::PoolServer::start(std::move(options));
  if (!server) return server.error();
  addresses_.push_back(
      {.worker_id = server.value()->worker_id(), .endpoint = server.value()->advertised(), .handover = seat.handover});
  followers_.push_back({.server = std::move(server).value(), .thread = {}});
  return {};
}

// ---- The leader's side

void Relay::asked(const session::RequestContent& content) {
  if (followers_.empty()) return;
  uint32_t epoch = 0;
  {
    const MutexLock lock(mutex_);
    const auto [place, is_new] = epoch_of_.try_emplace(content.request.epoch, epoch_count_ + 1);
    if (is_new) ++epoch_count_;
    epoch = place->second;
  }
  store_.asked(epoch, digest_of(content));
}

std::shared_ptr<const ReplicaAnswer> Relay::divide(std::unique_ptr<loader::Batch>& batch) const {
  const bool has_leaves = !batch->record().remote_error() && !batch->record().raises();
  if (options_.leaves.empty() || !has_leaves) return copy_of(*batch);
  auto division = divide_leaves(batch->record().frame().nest, options_.leaves, followers_.size());
  if (!division) {
    auto error = loader::Batch::from_error(
        batch->record().facts(),
        {.type_name = "ValueError", .text = division.error().message, .worker = {}, .cause = {}});
    error->record().times() = batch->record().times();
    error->record().set_state(batch->record().state());
    batch = std::move(error);
    return copy_of(*batch);
  }
  std::shared_ptr<const ReplicaAnswer> answer;
  if (!followers_.empty()) answer = copy_of(*batch, std::move(division.value().absent));
  for (const uint32_t leaf : division.value().absent_here) batch->leave_out(leaf);
  return answer;
}

void Relay::arrived(loader::Arrival& arrival) {
  std::optional<uint32_t> epoch;
  {
    const MutexLock lock(mutex_);
    const auto place = epoch_of_.find(arrival.epoch);
    if (place != epoch_of_.end()) epoch = place->second;
  }
  if (!epoch && !followers_.empty()) return;
  auto answer = arrival.kind == loader::Arrival::Kind::kBatch
                    ? divide(arrival.batch)
                    : std::make_shared<const ReplicaAnswer>(ReplicaAnswer{.kind = ReplicaAnswer::Kind::kEnd});
  if (epoch) store_.arrived(*epoch, arrival.sequence, std::move(answer));
}

void Relay::source_stopped() {
  store_.stop();
  const MutexLock lock(mutex_);
  epoch_of_.clear();
}

std::optional<std::pair<std::string, Duration>> Relay::awaited_follower() const {
  const auto awaited = store_.awaited_follower();
  if (!awaited) return std::nullopt;
  return std::pair(options_.followers[awaited->first].name, awaited->second);
}

// ---- The followers' side

void Relay::run(size_t follower) {
  begin_own_thread("pk_relay");
  try {
    serve(follower);
  } catch (...) {
    fail(follower, current_exception_text());
  }
}

// This ends the leader's program, and the followers' programs too, because their worker dies.
void Relay::fail(size_t follower, const std::string& what) {
  failure_.set(Fault{Errc::kFailed, "the thread pk_relay, which forwards batches to " +
                                        options_.followers[follower].name + ", failed: " + what});
  store_.stop();
}

void Relay::serve(size_t follower) {
  worker::PoolServer& server = *followers_[follower].server;
  while (!is_closing_.load()) {
    const auto work = server.next(std::chrono::steady_clock::now() + kLook);
    if (work) {
      answer(follower, *work.value());
    } else if (work.error().code != Errc::kTimeout) {
      return;  // the server has ended, and the follower notices
    }
  }
}

void Relay::answer(size_t follower, const server::PoolWork& work) {
  worker::PoolServer& server = *followers_[follower].server;
  const RequestDigest request = digest_of(work);
  const Instant requested_at = clock_now();
  ReplicaStore::Taken taken;
  while (!taken.answer && taken.refusal.empty()) {
    if (is_closing_.load() || !server.is_wanted()) return server.give_up();
    taken = store_.take(follower, request, requested_at, std::chrono::steady_clock::now() + kLook);
  }
  const auto fail = [&](const std::string& type_name, const std::string& text) {
    // Only a state can make an error too large, and this error has no state.
    static_cast<void>(server.answer_error(work, {.type_name = type_name, .text = text}, {}));
  };
  if (!taken.refusal.empty()) {
    return fail("penstock.errors.RankError",
                options_.followers[follower].name + " requested batch " + std::to_string(work.number()) +
                    " of an epoch, but " + options_.leader + ", which forwards its batches to this rank, " +
                    taken.refusal +
                    "; the ranks of a replica_group must create and read their loaders in the same way");
  }
  const ReplicaAnswer& answer = *taken.answer;
  handed_count_.fetch_add(1);
  switch (answer.kind) {
    case ReplicaAnswer::Kind::kEnd: return server.answer_end(work);
    case ReplicaAnswer::Kind::kError:
      if (auto sent = server.answer_error(work, {.type_name = answer.type_name, .text = answer.text}, answer.state);
          !sent)
        fail(answer.type_name, answer.text);
      return;
    case ReplicaAnswer::Kind::kBatch: break;
  }
  server.writer().begin();
  worker::BatchContent content{.tensors = answer.tensors, .boundary_keys = {}, .nest = answer.nest};
  if (!answer.absent.empty()) content.withheld = answer.absent[follower];
  const auto sent = server.answer(work, std::move(content), {.flags = answer.flags, .state = answer.state});
  if (!sent) fail("penstock.errors.PenstockError", "forwarding a batch failed: " + sent.error().message);
}

}  // namespace penstock::replica
