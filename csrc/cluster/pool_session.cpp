// SPDX-License-Identifier: Apache-2.0
#include "cluster/pool_session.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "cluster/worker_session.h"

namespace penstock::cluster {
namespace {

constexpr Duration kHelloTimeout = kPingInterval;                   // for a welcome
constexpr Duration kRefusedPause = std::chrono::milliseconds(100);  // before a worker is asked again
constexpr Duration kDiedPause = std::chrono::milliseconds(100);

}  // namespace

PoolSession::PoolSession(const PoolSessionOptions& options) : options_(options), dispatch_(options.dispatch) {
  PENSTOCK_ASSERT(options.trainer_id != 0, "0 stands for no trainer");
}

std::vector<PoolSession::Command> PoolSession::take_commands() { return std::exchange(commands_, {}); }

size_t PoolSession::open_count() const {
  return static_cast<size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& item) { return item.second.state == State::kOpen; }));
}

size_t PoolSession::declined_count() const {
  return static_cast<size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& item) { return item.second.has_declined; }));
}

// ---- The roster

void PoolSession::set_roster(std::span<const wire::RosterEntry> entries, Instant now) {
  std::vector<uint64_t> gone;
  for (const auto& known : peers_) {
    const bool is_named = std::any_of(entries.begin(), entries.end(),
                                      [&](const wire::RosterEntry& entry) { return entry.worker_id == known.first; });
    if (!is_named) gone.push_back(known.first);
  }
  for (const uint64_t worker_id : gone) {
    lose(peers_.at(worker_id), Loss::kSilent, now, now);
    part_from(worker_id);
  }
  for (const wire::RosterEntry& entry : entries) {
    const auto known = peers_.find(entry.worker_id);
    if (known != peers_.end() && entry.incarnation != known->second.incarnation) {
      // Messages of an incarnation that lost its lease are refused.
      lose(known->second, Loss::kSilent, now, now);
      part_from(entry.worker_id);
    }
    const bool is_new = !peers_.contains(entry.worker_id);
    if (is_new && entry.is_withdrawn) continue;
    if (is_new) {
      Peer peer;
      peer.incarnation = entry.incarnation;
      peer.renewal.heard(now);
      peers_.emplace(entry.worker_id, std::move(peer));
      commands_.push_back({.kind = Command::Kind::kConnect, .worker_id = entry.worker_id});
      greet(entry.worker_id, peers_.at(entry.worker_id), now);
      continue;
    }
    Peer& peer = peers_.at(entry.worker_id);
    if (!entry.is_withdrawn || peer.is_withdrawn) continue;
    peer.is_withdrawn = true;
    if (peer.slot) {
      dispatch_.drain_worker(*peer.slot, now);
    } else {
      send(entry.worker_id, peer, {.kind = wire::ToWorker::Kind::kBye});
      part_from(entry.worker_id);
    }
  }
  carry_out(now);
}

// ---- Links

void PoolSession::greet(uint64_t worker_id, Peer& peer, Instant now) {
  peer.link = Link(next_link_++);
  peer.state = State::kGreeting;
  peer.hello_at = now + kHelloTimeout;
  if (!peer.slot) peer.heard_at = now;
  peer.ping_at = now + kPingInterval;
  const auto outstanding = peer.slot ? dispatch_.outstanding(*peer.slot) : std::span<const wire::BatchKey>{};
  // A request that waits for a welcome is outstanding in the dispatch, and was never sent on any link.
  const auto is_delayed = [&](wire::BatchKey key) {
    return std::any_of(peer.delayed.begin(), peer.delayed.end(), [&](const Dispatch::Command& command) {
      return command.kind == Dispatch::Command::Kind::kAsk && command.key == key;
    });
  };
  std::vector<wire::BatchKey> repeated;
  std::copy_if(outstanding.begin(), outstanding.end(), std::back_inserter(repeated),
               [&](wire::BatchKey key) { return !is_delayed(key); });
  send(worker_id, peer,
       {.kind = wire::ToWorker::Kind::kHello,
        .is_continued = peer.slot.has_value(),
        .count = static_cast<uint32_t>(repeated.size())});
  for (const wire::BatchKey key : repeated) send_request(worker_id, peer, key);
}

void PoolSession::welcome(uint64_t worker_id, Peer& peer, bool is_fresh, Instant now) {
  if (peer.state != State::kGreeting) return;
  peer.state = State::kOpen;
  if (const auto blamed = std::exchange(peer.blamed, std::nullopt)) dispatch_.forgive(*blamed, now);
  if (peer.slot && is_fresh) {
    // The worker knows nothing of the requests that it had: they are asked for anew, of any worker.
    worker_of_.erase(*peer.slot);
    peer.delayed.clear();
    dispatch_.lose_worker(*std::exchange(peer.slot, std::nullopt), Loss::kSilent, now);
  }
  for (const Dispatch::Command& command : std::exchange(peer.delayed, {})) {
    if (command.kind == Dispatch::Command::Kind::kAsk) {
      if (dispatch_.is_unanswered(command.key)) send_request(worker_id, peer, command.key);
    } else {
      send(worker_id, peer, {.kind = wire::ToWorker::Kind::kCancel, .key = command.key});
    }
  }
  if (peer.slot) return;
  if (peer.is_withdrawn) {
    send(worker_id, peer, {.kind = wire::ToWorker::Kind::kBye});
    return part_from(worker_id);
  }
  peer.slot = next_slot_++;
  worker_of_.emplace(*peer.slot, worker_id);
  dispatch_.add_worker(*peer.slot, options_.credit_bytes, now);
}

// Ends the link: from here on nothing that was said on it counts.
void PoolSession::lose(Peer& peer, Loss loss, Instant retry_at, Instant now) {
  peer.state = State::kApart;
  peer.hello_at = retry_at;
  peer.delayed.clear();
  if (!peer.slot) return;
  worker_of_.erase(*peer.slot);
  dispatch_.lose_worker(*std::exchange(peer.slot, std::nullopt), loss, now);
}

// While the next link has to wait, others make what this worker owes.
void PoolSession::remake(uint64_t worker_id, Peer& peer, Instant now) {
  const Instant begins_at = peer.remaking.take(now);
  if (begins_at <= now) return greet(worker_id, peer, now);
  lose(peer, Loss::kSilent, begins_at, now);
  carry_out(now);
}

void PoolSession::part_from(uint64_t worker_id) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return;
  if (found->second.slot) worker_of_.erase(*found->second.slot);
  peers_.erase(found);
  commands_.push_back({.kind = Command::Kind::kDisconnect, .worker_id = worker_id});
}

bool PoolSession::is_in_force(uint64_t worker_id, uint32_t link) const {
  const auto found = peers_.find(worker_id);
  return found != peers_.end() && is_in_force(found->second, link);
}

bool PoolSession::is_in_force(const Peer& peer, uint32_t link) {
  return link == peer.link.number() && peer.state != State::kApart;
}

bool PoolSession::receive(uint64_t worker_id, const wire::ToTrainer& message, uint64_t bytes, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return false;
  Peer& peer = found->second;
  peer.renewal.heard(now);
  if (!is_in_force(peer, message.link)) return false;
  if (message.kind == wire::ToTrainer::Kind::kRefused || message.kind == wire::ToTrainer::Kind::kDeclined) {
    peer.has_declined = message.kind == wire::ToTrainer::Kind::kDeclined;
    lose(peer, Loss::kSilent, now + kRefusedPause, now);
    carry_out(now);
    return false;
  }
  if (message.kind == wire::ToTrainer::Kind::kBroken) {
    remake(worker_id, peer, now);
    return false;
  }
  switch (peer.link.receive(message.link, message.stamp)) {
    case Link::Receipt::kOld: return false;
    case Link::Receipt::kGap: remake(worker_id, peer, now); return false;
    case Link::Receipt::kNext: break;
  }
  peer.heard_at = now;
  bool counts = false;
  switch (message.kind) {
    case wire::ToTrainer::Kind::kWelcome: welcome(worker_id, peer, message.is_fresh, now); break;
    case wire::ToTrainer::Kind::kStarted:
      if (peer.slot) dispatch_.started(*peer.slot, message.key);
      break;
    case wire::ToTrainer::Kind::kAnswer:
      send(worker_id, peer, {.kind = wire::ToWorker::Kind::kAck, .key = message.key});
      counts = peer.slot && dispatch_.answered(*peer.slot, message.key, bytes, now);
      if (counts) peer.remaking.counted();
      break;
    case wire::ToTrainer::Kind::kHandedBack:
      if (peer.slot) dispatch_.handed_back(*peer.slot, message.key, now);
      break;
    case wire::ToTrainer::Kind::kLeaving:
      peer.is_leaving = true;
      if (peer.slot) dispatch_.drain_worker(*peer.slot, now);
      break;
    case wire::ToTrainer::Kind::kPong:
    case wire::ToTrainer::Kind::kRefused:
    case wire::ToTrainer::Kind::kDeclined:
    case wire::ToTrainer::Kind::kBroken: break;
  }
  carry_out(now);
  return counts;
}

void PoolSession::heard(uint64_t worker_id, uint32_t link, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return;
  found->second.renewal.heard(now);
  if (is_in_force(found->second, link)) found->second.heard_at = now;
}

void PoolSession::lose_track(uint64_t worker_id, uint32_t link, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  peer.renewal.heard(now);
  if (is_in_force(peer, link)) remake(worker_id, peer, now);
}

void PoolSession::died(uint64_t worker_id, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end() || found->second.state == State::kApart) return;
  Peer& peer = found->second;
  if (peer.slot && !peer.is_leaving) peer.blamed = dispatch_.running(*peer.slot);
  lose(peer, peer.is_leaving ? Loss::kLeft : Loss::kDied, now + kDiedPause, now);
  carry_out(now);
}

void PoolSession::connected(uint64_t worker_id, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end() || found->second.has_declined) return;
  found->second.renewal.heard(now);
  greet(worker_id, found->second, now);
}

void PoolSession::leave(Instant now) {
  while (!peers_.empty()) {
    const uint64_t worker_id = peers_.begin()->first;
    Peer& peer = peers_.begin()->second;
    if (peer.state != State::kApart) send(worker_id, peer, {.kind = wire::ToWorker::Kind::kBye});
    lose(peer, Loss::kLeft, now, now);
    part_from(worker_id);
  }
}

// ---- Requests

void PoolSession::ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content,
                      std::optional<uint64_t> preferred) {
  const auto peer = preferred ? peers_.find(*preferred) : peers_.end();
  dispatch_.ask(key, lane, now, std::move(content), peer == peers_.end() ? std::nullopt : peer->second.slot);
  carry_out(now);
}

void PoolSession::forget(wire::BatchKey key, Instant now) {
  dispatch_.forget(key, now);
  carry_out(now);
}

void PoolSession::forget_other_epochs(uint32_t epoch, Instant now) {
  dispatch_.forget_other_epochs(epoch, now);
  carry_out(now);
}

void PoolSession::end_lane(uint32_t epoch, wire::Lane lane, Instant now) {
  dispatch_.end_lane(epoch, lane, now);
  carry_out(now);
}

void PoolSession::carry_out(Instant now) {
  for (auto commands = dispatch_.take_commands(); !commands.empty(); commands = dispatch_.take_commands()) {
    for (const Dispatch::Command& command : commands) {
      if (command.kind == Dispatch::Command::Kind::kFail) {
        commands_.push_back({.kind = Command::Kind::kFail,
                             .key = command.key,
                             .death_count = command.death_count,
                             .content = command.content});
        continue;
      }
      const auto owner = worker_of_.find(command.worker);
      if (owner == worker_of_.end()) continue;  // lost meanwhile
      const uint64_t worker_id = owner->second;
      Peer& peer = peers_.at(worker_id);
      if (command.kind == Dispatch::Command::Kind::kIdle) {
        if (peer.state == State::kOpen) send(worker_id, peer, {.kind = wire::ToWorker::Kind::kBye});
        lose(peer, Loss::kLeft, now, now);
        part_from(worker_id);
      } else if (peer.state != State::kOpen) {
        peer.delayed.push_back(command);
      } else if (command.kind == Dispatch::Command::Kind::kAsk) {
        if (dispatch_.is_unanswered(command.key)) send_request(worker_id, peer, command.key);
      } else {
        send(worker_id, peer, {.kind = wire::ToWorker::Kind::kCancel, .key = command.key});
      }
    }
  }
}

void PoolSession::send_request(uint64_t worker_id, Peer& peer, wire::BatchKey key) {
  send(worker_id, peer,
       {.kind = wire::ToWorker::Kind::kRequest,
        .key = key,
        .lane = dispatch_.lane_of(key),
        .is_lane_start = dispatch_.is_lane_start(key)});
}

void PoolSession::send(uint64_t worker_id, Peer& peer, wire::ToWorker message) {
  message.trainer_id = options_.trainer_id;
  message.link = peer.link.number();
  message.stamp = peer.link.stamp();
  commands_.push_back({.kind = Command::Kind::kSend, .worker_id = worker_id, .message = message});
}

// ---- Time

void PoolSession::tick(Instant now) {
  for (auto& [worker_id, peer] : peers_) {
    if (peer.state == State::kApart) continue;
    // A worker answers what it is sent. Where this trainer is late with that, as after its process was stopped, the
    // silence since then is its own.
    const Instant due_at = peer.state == State::kOpen ? peer.ping_at : peer.hello_at;
    if (now > due_at) peer.heard_at = std::min(now, peer.heard_at + (now - due_at));
    if (now - peer.heard_at >= kLease) lose(peer, Loss::kSilent, now, now);
  }
  carry_out(now);  // others are asked for those now, so a hello must not repeat them
  for (auto& [worker_id, peer] : peers_) {
    if (peer.state != State::kOpen && !peer.has_declined && now >= peer.hello_at) {
      if (peer.renewal.take(now)) commands_.push_back({.kind = Command::Kind::kRenew, .worker_id = worker_id});
      greet(worker_id, peer, now);
    }
    if (peer.state == State::kOpen && now >= peer.ping_at) {
      peer.ping_at = now + kPingInterval;
      send(worker_id, peer, {.kind = wire::ToWorker::Kind::kPing});
    }
  }
  dispatch_.tick(now);
  carry_out(now);
}

std::optional<Instant> PoolSession::next_tick() const {
  std::optional<Instant> next = dispatch_.next_tick();
  for (const auto& [worker_id, peer] : peers_) {
    if (peer.state != State::kApart) next = earlier(next, peer.heard_at + kLease);
    if (!peer.has_declined) next = earlier(next, peer.state == State::kOpen ? peer.ping_at : peer.hello_at);
  }
  return next;
}

}  // namespace penstock::cluster
