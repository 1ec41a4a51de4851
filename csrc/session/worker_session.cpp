// SPDX-License-Identifier: Apache-2.0
#include "session/worker_session.h"

#include <algorithm>
#include <utility>

#include "base/result.h"
#include "wire/reports.h"

namespace penstock::session {

std::vector<WorkerSession::Command> WorkerSession::take_commands() { return std::exchange(commands_, {}); }

void WorkerSession::receive(const wire::ToWorker& message, Instant now) {
  if (message.kind == wire::ToWorker::Kind::kHello) return greet(message, now);
  if (!tenant_ || tenant_->trainer_id != message.trainer_id) {
    // A goodbye to a forgotten trainer needs no answer.
    if (message.kind != wire::ToWorker::Kind::kBye) answer_unlinked(message, wire::ToTrainer::Kind::kBroken);
    return;
  }
  // A trainer that leaves for good needs no more of this link, even if messages were lost on it before.
  if (message.kind == wire::ToWorker::Kind::kBye && !message.is_continued) return abandon();
  switch (tenant_->link.receive(message.link, message.stamp)) {
    case Link::Receipt::kOld: return;
    case Link::Receipt::kGap:
      tenant_->is_broken = true;
      tenant_->heard_at = now;
      return answer_unlinked(message, wire::ToTrainer::Kind::kBroken);
    case Link::Receipt::kNext: break;
  }
  tenant_->heard_at = now;
  // After its hello and the requests that it repeats, a trainer sends no messages until it has read the welcome.
  if (tenant_->repeated_count == 0) tenant_->is_fresh = false;
  switch (message.kind) {
    case wire::ToWorker::Kind::kHello: break;
    case wire::ToWorker::Kind::kRequest: return take(message);
    case wire::ToWorker::Kind::kCancel: return cancel(message.key);
    case wire::ToWorker::Kind::kAck: return drop_held(message.key);
    case wire::ToWorker::Kind::kPing: return send(wire::ToTrainer::Kind::kPong);
    case wire::ToWorker::Kind::kBye: return abandon();
  }
}

void WorkerSession::greet(const wire::ToWorker& hello, Instant now) {
  if (is_declined(hello.trainer_id)) return answer_unlinked(hello, wire::ToTrainer::Kind::kDeclined);
  const bool is_known = tenant_ && tenant_->trainer_id == hello.trainer_id;
  if (is_past(hello)) return;
  const bool is_assigned = assigned_id_.value_or(hello.trainer_id) == hello.trainer_id;
  if (!is_known && (is_draining_ || tenant_ || !is_assigned))
    return answer_unlinked(hello, wire::ToTrainer::Kind::kRefused);
  // A hello that continues a link may refer to one from before this worker forgot the trainer, if the welcome sent
  // after that was lost.
  const bool is_fresh = !is_known || tenant_->is_fresh || !hello.is_continued;
  if (is_fresh) abandon();
  tenant_ = Tenant{.trainer_id = hello.trainer_id, .link = Link(hello.link), .heard_at = now};
  tenant_->repeated_count = hello.count;
  tenant_->is_fresh = is_fresh;
  if (tenant_->link.receive(hello.link, hello.stamp) != Link::Receipt::kNext) {
    tenant_->is_broken = true;
    return answer_unlinked(hello, wire::ToTrainer::Kind::kBroken);
  }
  queue_.clear();
  for (auto& [key, is_claimed] : held_) is_claimed = false;
  if (running_) running_->is_wanted = false;
  if (hello.count == 0) drop_unclaimed();
  send(wire::ToTrainer::Kind::kWelcome, {}, is_fresh);
  if (is_draining_) send(wire::ToTrainer::Kind::kLeaving);
}

// A link is opened only once. If duplicates of its messages arrive, a worker that has forgotten the trainer in the
// meantime would otherwise be on that link again without its state.
bool WorkerSession::is_past(const wire::ToWorker& hello) const {
  if (tenant_ && tenant_->trainer_id == hello.trainer_id && hello.link <= tenant_->link.number()) return true;
  return std::any_of(forgotten_.begin(), forgotten_.end(), [&](const auto& forgotten) {
    return forgotten.first == hello.trainer_id && hello.link <= forgotten.second;
  });
}

void WorkerSession::take(const wire::ToWorker& message) {
  const bool is_repeated = tenant_->repeated_count > 0;
  if (is_repeated) --tenant_->repeated_count;
  // Requests that are repeated to a worker that has forgotten them will be sent again.
  if (!(is_repeated && tenant_->is_fresh)) {
    if (const auto held = held_.find(message.key); held != held_.end()) {
      held->second = true;
      send(wire::ToTrainer::Kind::kAnswer, message.key);
    } else if (is_running(message)) {
      running_->is_wanted = true;
    } else if (is_draining_) {
      send(wire::ToTrainer::Kind::kHandedBack, message.key);
    } else {
      queue_.push_back({.key = message.key, .lane = message.lane, .is_lane_start = message.is_lane_start});
    }
  }
  if (is_repeated && tenant_->repeated_count == 0) drop_unclaimed();
}

// The same number from another trainer is a different batch, and batches that were started before a trainer was given
// up do not fit its lanes.
bool WorkerSession::is_running(const wire::ToWorker& request) const {
  return running_ && running_->trainer_id == request.trainer_id && running_->key == request.key;
}

void WorkerSession::cancel(wire::BatchKey key) {
  std::erase_if(queue_, [&](const Request& request) { return request.key == key; });
  drop_held(key);
  if (running_ && running_->key == key) running_->is_wanted = false;
}

std::optional<WorkerSession::Request> WorkerSession::begin() {
  const auto request = next();
  if (running_ || !request) return std::nullopt;
  return begin(request->key);
}

WorkerSession::Request WorkerSession::begin(wire::BatchKey key) {
  const auto found =
      std::find_if(queue_.begin(), queue_.end(), [&](const Request& request) { return request.key == key; });
  PENSTOCK_ASSERT(found != queue_.end() && !running_, "a request was started that is not next");
  const Request request = *found;
  queue_.erase(found);
  running_ = Running{.trainer_id = tenant_->trainer_id, .key = request.key, .is_wanted = true};
  send(wire::ToTrainer::Kind::kStarted, request.key);
  return request;
}

std::optional<WorkerSession::Request> WorkerSession::next() const {
  // An answer that the trainer will not ask for again still takes up its credit.
  if (queue_.empty() || tenant_->repeated_count > 0) return std::nullopt;
  return queue_.front();
}

void WorkerSession::finished() {
  PENSTOCK_ASSERT(running_, "a request was finished without a start");
  const Running done = *running_;
  running_.reset();
  // The trainer is about to repeat the requests that it still wants; a lane's earlier batches cannot be made again.
  const bool may_be_claimed = tenant_ && tenant_->trainer_id == done.trainer_id && tenant_->repeated_count > 0;
  if (!done.is_wanted && may_be_claimed) {
    held_.emplace(done.key, false);
    return;
  }
  if (!done.is_wanted) {
    commands_.push_back({.kind = Command::Kind::kDrop, .key = done.key});
    return;
  }
  held_.emplace(done.key, true);
  send(wire::ToTrainer::Kind::kAnswer, done.key);
}

void WorkerSession::hand_back() {
  PENSTOCK_ASSERT(running_, "a request was returned without a start");
  drain();
  const Running begun = *std::exchange(running_, std::nullopt);
  if (begun.is_wanted) send(wire::ToTrainer::Kind::kHandedBack, begun.key);
}

bool WorkerSession::may_be_wanted() const {
  if (!running_) return false;
  return running_->is_wanted || (tenant_ && tenant_->trainer_id == running_->trainer_id && tenant_->repeated_count > 0);
}

void WorkerSession::tick(Instant now) {
  if (tenant_ && now - tenant_->heard_at >= kLease) abandon();
}

std::optional<Instant> WorkerSession::next_tick() const {
  return tenant_ ? std::optional(tenant_->heard_at + kLease) : std::nullopt;
}

void WorkerSession::drain() {
  if (is_draining_) return;
  is_draining_ = true;
  if (!tenant_) return;
  send(wire::ToTrainer::Kind::kLeaving);
  for (const Request& request : std::exchange(queue_, {})) send(wire::ToTrainer::Kind::kHandedBack, request.key);
}

void WorkerSession::assign(uint64_t trainer_id, bool is_to_part) {
  assigned_id_ = trainer_id;
  if (!is_to_part || !tenant_ || tenant_->trainer_id == trainer_id) return;
  // The trainer requests its outstanding batches from others as soon as it knows.
  send_unstamped(wire::ToTrainer::Kind::kBroken);
  abandon();
}

void WorkerSession::abandon() {
  if (tenant_) forgotten_.emplace_back(tenant_->trainer_id, tenant_->link.number());
  if (forgotten_.size() > kForgottenCountMax) forgotten_.pop_front();
  tenant_.reset();
  queue_.clear();
  if (running_) running_ = Running{.trainer_id = 0, .key = running_->key, .is_wanted = false};
  for (auto& [key, is_claimed] : held_) is_claimed = false;
  drop_unclaimed();
}

void WorkerSession::lose_process(uint64_t trainer_id) {
  const bool is_tenants = tenant_ && tenant_->trainer_id == trainer_id;
  if (!is_tenants) return running_.reset();
  if (is_wanted() && !tenant_->is_broken) {
    send(wire::ToTrainer::Kind::kDied, running_->key);
  } else {
    send_unstamped(wire::ToTrainer::Kind::kBroken);
  }
  running_.reset();
  abandon();
}

void WorkerSession::decline() {
  if (!tenant_) return;
  send_unstamped(wire::ToTrainer::Kind::kDeclined);
  declined_.push_back(tenant_->trainer_id);
  if (declined_.size() > wire::kDeclinedCountMax) declined_.pop_front();
  abandon();
}

bool WorkerSession::is_declined(uint64_t trainer_id) const {
  return std::find(declined_.begin(), declined_.end(), trainer_id) != declined_.end();
}

void WorkerSession::send(wire::ToTrainer::Kind kind, wire::BatchKey key, bool is_fresh) {
  // Messages on a broken link do not count, and the trainer asks for the held answers again on the next one.
  if (!tenant_ || tenant_->is_broken) return;
  commands_.push_back({.kind = Command::Kind::kSend,
                       .trainer_id = tenant_->trainer_id,
                       .message = {.kind = kind,
                                   .link = tenant_->link.number(),
                                   .stamp = tenant_->link.stamp(),
                                   .key = key,
                                   .is_fresh = is_fresh}});
}

void WorkerSession::answer_unlinked(const wire::ToWorker& message, wire::ToTrainer::Kind kind) {
  commands_.push_back({.kind = Command::Kind::kSend,
                       .trainer_id = message.trainer_id,
                       .message = {.kind = kind, .link = message.link}});
}

// Accepted even if messages on the trainer's link were lost.
void WorkerSession::send_unstamped(wire::ToTrainer::Kind kind) {
  answer_unlinked({.trainer_id = tenant_->trainer_id, .link = tenant_->link.number()}, kind);
}

size_t WorkerSession::claimed_count() const {
  const auto is_claimed = [](const auto& held) { return held.second; };
  return static_cast<size_t>(std::count_if(held_.begin(), held_.end(), is_claimed));
}

void WorkerSession::drop_held(wire::BatchKey key) {
  if (held_.erase(key) > 0) commands_.push_back({.kind = Command::Kind::kDrop, .key = key});
}

void WorkerSession::drop_unclaimed() {
  std::vector<wire::BatchKey> unclaimed;
  for (const auto& [key, is_claimed] : held_)
    if (!is_claimed) unclaimed.push_back(key);
  for (const wire::BatchKey key : unclaimed) drop_held(key);
}

}  // namespace penstock::session
