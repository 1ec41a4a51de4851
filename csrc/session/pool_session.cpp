// SPDX-License-Identifier: Apache-2.0
#include "session/pool_session.h"

#include <algorithm>
#include <utility>

#include "base/result.h"
#include "session/worker_session.h"

namespace penstock::session {
namespace {

constexpr Duration kHelloTimeout = kPingInterval;                   // time to wait for a welcome
constexpr Duration kRefusedPause = std::chrono::milliseconds(100);  // before the worker is asked again
constexpr Duration kDiedPause = std::chrono::milliseconds(100);
constexpr uint32_t kRemadeCountMax = 6;  // consecutive ones; even a bad network causes fewer
// The goodbye to a worker that was withdrawn or is leaving.
constexpr wire::ToWorker kBackLater{.kind = wire::ToWorker::Kind::kBye, .is_continued = true};

}  // namespace

PoolSession::PoolSession(const PoolSessionOptions& options) : options_(options), dispatch_(options.dispatch) {
  PENSTOCK_ASSERT(options.trainer_id != 0, "trainer_id must not be 0");
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
    if (!peers_.contains(entry.worker_id)) continue;
    Peer& peer = peers_.at(entry.worker_id);
    if (!entry.is_withdrawn || peer.is_withdrawn) continue;
    peer.is_withdrawn = true;
    if (peer.slot) {
      dispatch_.drain_worker(*peer.slot, now);
    } else {
      send(entry.worker_id, peer, kBackLater);
      part_from(entry.worker_id);
    }
  }
  name_waiting(entries);
  connect_to_waiting(now);
  carry_out(now);
}

// Workers that were waiting before keep their positions.
void PoolSession::name_waiting(std::span<const wire::RosterEntry> entries) {
  std::map<uint64_t, wire::RosterEntry> named;
  for (const wire::RosterEntry& entry : entries)
    if (!entry.is_withdrawn && !peers_.contains(entry.worker_id) && !dismissed_.contains(entry.worker_id))
      named.emplace(entry.worker_id, entry);
  std::deque<wire::RosterEntry> waiting;
  for (const wire::RosterEntry& before : waiting_) {
    const auto still = named.extract(before.worker_id);
    if (!still.empty()) waiting.push_back(still.mapped());
  }
  for (const auto& [worker_id, entry] : named) waiting.push_back(entry);
  waiting_ = std::move(waiting);
}

size_t PoolSession::silent_count() const {
  return static_cast<size_t>(
      std::count_if(peers_.begin(), peers_.end(), [](const auto& item) { return !item.second.has_responded; }));
}

void PoolSession::connect_to_waiting(Instant now) {
  if (waiting_.empty()) return;
  for (size_t silent = silent_count(); silent < kSilentCountMax && !waiting_.empty(); ++silent) {
    const wire::RosterEntry entry = waiting_.front();
    waiting_.pop_front();
    Peer peer;
    peer.incarnation = entry.incarnation;
    peer.named_at = now;
    peer.renewal.heard(now);
    peers_.emplace(entry.worker_id, std::move(peer));
    commands_.push_back({.kind = Command::Kind::kConnect, .worker_id = entry.worker_id});
    greet(entry.worker_id, peers_.at(entry.worker_id), now);
  }
}

// Workers that have not sent any message make room for others, and wait in their place.
void PoolSession::end_silent_turns(Instant now) {
  if (waiting_.empty()) return;
  std::vector<wire::RosterEntry> silent;
  for (const auto& [worker_id, peer] : peers_) {
    if (!peer.has_responded && now - peer.named_at >= kSilentTurn && silent.size() < waiting_.size())
      silent.push_back({.worker_id = worker_id, .incarnation = peer.incarnation});
  }
  for (const wire::RosterEntry& entry : silent) {
    part_from(entry.worker_id);
    waiting_.push_back(entry);
  }
  connect_to_waiting(now);
}

// ---- Links

void PoolSession::greet(uint64_t worker_id, Peer& peer, Instant now) {
  peer.link = Link(next_link_++);
  peer.state = State::kGreeting;
  peer.has_answer_waiting = false;
  peer.hello_at = now + kHelloTimeout;
  if (!peer.slot) peer.heard_at = now;
  peer.ping_at = now + kPingInterval;
  const auto outstanding = peer.slot ? dispatch_.outstanding(*peer.slot) : std::span<const wire::BatchKey>{};
  // A request that waits for a welcome is outstanding in the dispatch, but was never sent on any link.
  const auto is_delayed = [&](wire::BatchKey key) {
    return std::any_of(peer.delayed.begin(), peer.delayed.end(), [&](const Dispatch::Command& command) {
      return command.kind == Dispatch::Command::Kind::kSendRequest && command.key == key;
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

// While the next link has to wait, other workers make this worker's outstanding batches.
void PoolSession::make_anew(uint64_t worker_id, Peer& peer, Instant now) {
  if (++peer.remade_count > kRemadeCountMax) {
    end_for(worker_id, peer, std::nullopt,
            std::to_string(peer.remade_count) + " consecutive connections to it failed before it answered",
            /*is_dismissed=*/false, now);
    return carry_out(now);
  }
  const Instant begins_at = peer.remaking.take(now);
  if (begins_at <= now) return greet(worker_id, peer, now);
  lose(peer, Loss::kSilent, begins_at, now);
  carry_out(now);
}

void PoolSession::welcome(uint64_t worker_id, Peer& peer, bool is_fresh, Instant now) {
  if (peer.state != State::kGreeting) return;
  peer.state = State::kOpen;
  if (served_.size() >= kServedCountMax) served_.erase(served_.begin());
  served_.insert(worker_id);
  if (const auto blamed = std::exchange(peer.blamed, std::nullopt)) dispatch_.forgive(*blamed, now);
  if (peer.slot && is_fresh) {
    // The worker has lost the requests that it had: they are sent again, to any worker.
    worker_of_.erase(*peer.slot);
    peer.delayed.clear();
    dispatch_.lose_worker(*std::exchange(peer.slot, std::nullopt), Loss::kSilent, now);
  }
  for (const Dispatch::Command& command : std::exchange(peer.delayed, {})) {
    if (command.kind == Dispatch::Command::Kind::kSendRequest) {
      if (dispatch_.is_unanswered(command.key)) send_request(worker_id, peer, command.key);
    } else {
      send(worker_id, peer, {.kind = wire::ToWorker::Kind::kCancel, .key = command.key});
    }
  }
  if (peer.slot) return;
  if (peer.is_withdrawn) {
    send(worker_id, peer, kBackLater);
    return part_from(worker_id);
  }
  peer.slot = next_slot_++;
  worker_of_.emplace(*peer.slot, worker_id);
  dispatch_.add_worker(*peer.slot, options_.credit_bytes, now);
}

// Ends the link: from here on its messages no longer count.
void PoolSession::lose(Peer& peer, Loss loss, Instant retry_at, Instant now) {
  peer.state = State::kUnlinked;
  peer.hello_at = retry_at;
  peer.delayed.clear();
  if (!peer.slot) return;
  worker_of_.erase(*peer.slot);
  dispatch_.lose_worker(*std::exchange(peer.slot, std::nullopt), loss, now);
}

void PoolSession::part_from(uint64_t worker_id) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  if (peer.slot) worker_of_.erase(*peer.slot);
  Command command{.kind = Command::Kind::kDisconnect, .worker_id = worker_id};
  if (served_.contains(worker_id)) {
    command.rests = true;
    command.message = stamped(peer, {.kind = wire::ToWorker::Kind::kBye});
  }
  peers_.erase(found);
  commands_.push_back(std::move(command));
}

bool PoolSession::is_open(uint64_t worker_id) const {
  const auto found = peers_.find(worker_id);
  return found != peers_.end() && found->second.state == State::kOpen;
}

bool PoolSession::is_in_force(uint64_t worker_id, uint32_t link) const {
  const auto found = peers_.find(worker_id);
  return found != peers_.end() && is_in_force(found->second, link);
}

bool PoolSession::is_in_force(const Peer& peer, uint32_t link) {
  return link == peer.link.number() && peer.state != State::kUnlinked;
}

bool PoolSession::receive(uint64_t worker_id, const wire::ToTrainer& message, uint64_t bytes, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end()) return false;
  Peer& peer = found->second;
  peer.renewal.heard(now);
  if (!std::exchange(peer.has_responded, true)) connect_to_waiting(now);
  if (message.link >= next_link_) {
    distrust(worker_id, std::nullopt, "it sent a message on a connection that was never opened", now);
    return false;
  }
  if (!is_in_force(peer, message.link)) return false;
  // A refusal answers a hello. After a welcome, accepting it would make this trainer greet the worker again for ever.
  if (message.kind == wire::ToTrainer::Kind::kRefused && peer.state == State::kOpen) {
    distrust(worker_id, std::nullopt, "it refused a connection that it had accepted", now, Wrong::kMaybeInFlight);
    return false;
  }
  if (message.kind == wire::ToTrainer::Kind::kRefused || message.kind == wire::ToTrainer::Kind::kDeclined) {
    peer.has_declined = message.kind == wire::ToTrainer::Kind::kDeclined;
    lose(peer, Loss::kSilent, now + kRefusedPause, now);
    carry_out(now);
    return false;
  }
  if (message.kind == wire::ToTrainer::Kind::kBroken) {
    make_anew(worker_id, peer, now);
    return false;
  }
  if (message.stamp == 0) {
    distrust(worker_id, std::nullopt, "it sent a message without a number", now);
    return false;
  }
  using Kind = wire::ToTrainer::Kind;
  switch (peer.link.receive(message.link, message.stamp)) {
    case Link::Receipt::kOld: return false;
    case Link::Receipt::kGap:
      // The report of a death ends the link, so messages missing before it do not matter.
      if (message.kind == Kind::kDied) break;
      make_anew(worker_id, peer, now);
      return false;
    case Link::Receipt::kNext: break;
  }
  peer.heard_at = now;
  peer.has_answer_waiting = false;
  const bool is_of_request = message.kind == Kind::kStarted || message.kind == Kind::kAnswer ||
                             message.kind == Kind::kHandedBack || message.kind == Kind::kDied;
  if (is_of_request && peer.slot && !dispatch_.was_requested(*peer.slot, message.key)) {
    distrust(worker_id, std::nullopt, "it answered " + to_text(message.key) + ", which was not requested from it", now);
    return false;
  }
  bool counts = false;
  switch (message.kind) {
    case wire::ToTrainer::Kind::kWelcome: welcome(worker_id, peer, message.is_fresh, now); break;
    case wire::ToTrainer::Kind::kStarted:
      if (peer.slot) dispatch_.started(*peer.slot, message.key);
      break;
    case wire::ToTrainer::Kind::kAnswer:
      send(worker_id, peer, {.kind = wire::ToWorker::Kind::kAck, .key = message.key});
      counts = peer.slot && dispatch_.answered(*peer.slot, message.key, bytes, now);
      if (counts) {
        peer.remade_count = 0;
        peer.doubt_count = 0;
        peer.remaking.counted();
      }
      break;
    case wire::ToTrainer::Kind::kHandedBack:
      if (peer.slot) dispatch_.handed_back(*peer.slot, message.key, now);
      break;
    case wire::ToTrainer::Kind::kDied:
      // No welcome revokes this death: the worker's process has died in any case, even if the worker was leaving.
      if (peer.slot) dispatch_.started(*peer.slot, message.key);
      lose(peer, Loss::kDied, now + kDiedPause, now);
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
  if (is_in_force(peer, link)) make_anew(worker_id, peer, now);
}

void PoolSession::answer_waits(uint64_t worker_id) {
  const auto found = peers_.find(worker_id);
  if (found != peers_.end()) found->second.has_answer_waiting = true;
}

bool PoolSession::distrust(uint64_t worker_id, std::optional<wire::BatchKey> asked, std::string reason, Instant now,
                           Wrong wrong) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end() || found->second.state == State::kUnlinked) return false;
  const bool is_to_blame = wrong == Wrong::kByWorker || ++found->second.doubt_count > kDoubtCountMax;
  const bool is_dismissed = end_for(worker_id, found->second, asked, std::move(reason), is_to_blame, now);
  carry_out(now);
  return is_dismissed;
}

// Whether another worker works for this trainer, or has just been named and may do so.
bool PoolSession::has_other(uint64_t worker_id, Instant now) const {
  return std::any_of(peers_.begin(), peers_.end(), [&](const auto& item) {
    const Peer& peer = item.second;
    const bool is_usable = !peer.has_declined && !peer.is_leaving && !peer.is_withdrawn;
    const bool is_coming = !peer.has_responded && now - peer.named_at < kSilentTurn;
    return item.first != worker_id && is_usable && (peer.state == State::kOpen || is_coming);
  });
}

// The request that the worker was working on counts a death only if no other worker can make it.
bool PoolSession::end_for(uint64_t worker_id, Peer& peer, std::optional<wire::BatchKey> asked, std::string reason,
                          bool is_to_blame, Instant now) {
  const bool is_alone = !has_other(worker_id, now);
  const bool is_dismissed = is_to_blame && !is_alone;
  if (peer.slot && is_alone) {
    const auto outstanding = dispatch_.outstanding(*peer.slot);
    if (!asked) asked = dispatch_.running(*peer.slot);
    if (!asked && !outstanding.empty()) asked = outstanding.front();
    if (asked) dispatch_.started(*peer.slot, *asked);
  }
  peer.remade_count = 0;
  if (is_alone) peer.remaking.counted();
  commands_.push_back({.kind = Command::Kind::kDistrust,
                       .worker_id = worker_id,
                       .asked = is_alone ? asked : std::nullopt,
                       .reason = std::move(reason),
                       .is_dismissed = is_dismissed});
  const Instant greeted_at = is_alone ? now + kDiedPause : std::max(now + kDiedPause, peer.remaking.take(now));
  lose(peer, is_alone ? Loss::kDied : Loss::kSilent, greeted_at, now);
  if (!is_dismissed) return false;
  if (dismissed_.size() >= kDismissedCountMax) dismissed_.erase(dismissed_.begin());
  dismissed_.insert(worker_id);
  part_from(worker_id);
  return true;
}

void PoolSession::died(uint64_t worker_id, Instant now) {
  const auto found = peers_.find(worker_id);
  if (found == peers_.end() || found->second.state == State::kUnlinked) return;
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
  waiting_.clear();
  while (!peers_.empty()) {
    const uint64_t worker_id = peers_.begin()->first;
    Peer& peer = peers_.begin()->second;
    // Even a worker that serves another trainer by now may keep the process of this trainer's job.
    const bool is_served = served_.erase(worker_id) > 0;
    if (is_served || peer.state != State::kUnlinked) send(worker_id, peer, {.kind = wire::ToWorker::Kind::kBye});
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
      if (owner == worker_of_.end()) continue;  // lost in the meantime
      const uint64_t worker_id = owner->second;
      Peer& peer = peers_.at(worker_id);
      if (command.kind == Dispatch::Command::Kind::kIdle) {
        if (peer.state == State::kOpen) send(worker_id, peer, kBackLater);
        lose(peer, Loss::kLeft, now, now);
        part_from(worker_id);
      } else if (peer.state != State::kOpen) {
        peer.delayed.push_back(command);
      } else if (command.kind == Dispatch::Command::Kind::kSendRequest) {
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
  commands_.push_back({.kind = Command::Kind::kSend, .worker_id = worker_id, .message = stamped(peer, message)});
}

wire::ToWorker PoolSession::stamped(Peer& peer, wire::ToWorker message) const {
  message.trainer_id = options_.trainer_id;
  message.link = peer.link.number();
  message.stamp = peer.link.stamp();
  return message;
}

// ---- Time

void PoolSession::tick(Instant now) {
  for (auto& [worker_id, peer] : peers_) {
    if (peer.state == State::kUnlinked) continue;
    // A worker only responds to messages. If this trainer is late with its own, for example after its process was
    // stopped, it caused the silence since then.
    const Instant due_at = peer.state == State::kOpen ? peer.ping_at : peer.hello_at;
    if (now > due_at) peer.heard_at = std::min(now, peer.heard_at + (now - due_at));
    if (now - peer.heard_at < kLease) continue;
    if (peer.has_answer_waiting) {
      end_for(worker_id, peer, std::nullopt, "it answered, but the chunks of its batch did not arrive",
              /*is_dismissed=*/false, now);
    } else {
      lose(peer, Loss::kSilent, now, now);
    }
  }
  carry_out(now);  // other workers are asked for these now, so a hello must not repeat them
  end_silent_turns(now);
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
    if (peer.state != State::kUnlinked) next = earlier(next, peer.heard_at + kLease);
    if (!peer.has_declined) next = earlier(next, peer.state == State::kOpen ? peer.ping_at : peer.hello_at);
    if (!peer.has_responded && !waiting_.empty()) next = earlier(next, peer.named_at + kSilentTurn);
  }
  return next;
}

}  // namespace penstock::session
