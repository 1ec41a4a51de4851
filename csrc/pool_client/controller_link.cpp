// SPDX-License-Identifier: Apache-2.0
#include "pool_client/controller_link.h"

#include <chrono>
#include <utility>
#include <variant>

#include "base/process.h"
#include "net/tcp_socket.h"
#include "wire/control_record.h"

namespace penstock::pool_client {

using net::ConnectionEvent;

Result<std::unique_ptr<ControllerLink>> ControllerLink::connect(net::SocketContext& context, net::Resolver& resolver,
                                                                const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                                Instant now) {
  auto socket = net::ClientSocket::connect(context, resolver, endpoint, keys, net::Role::kController,
                                           {.limits = net::control_limits()});
  if (!socket) return socket.error();
  return std::make_unique<ControllerLink>(std::move(socket).value(), now);
}

Result<void> ControllerLink::receive(Instant now) {
  net::ClientReceipt receipt;
  for (;;) {
    auto received = socket_->try_receive(receipt);
    if (!received) return received.error();
    if (!received.value()) break;
    if (receipt.parts.size() != 1) continue;  // no controller of this version sends that
    if (auto taken = take(receipt.parts.front().bytes(), now); !taken) return taken.error();
  }
  while (const auto event = socket_->try_event()) {
    if (event->kind == ConnectionEvent::Kind::kConnected) {
      trouble_.clear();
      enrolment_.clock.connected(now);
    }
    if (event->kind != ConnectionEvent::Kind::kRefused) continue;
    if (event->is_final) return Fault{Errc::kClosed, event->reason};
    trouble_ = event->reason;
  }
  return {};
}

Result<void> ControllerLink::take(std::span<const std::byte> bytes, Instant now) {
  auto message = wire::parse_control(bytes);
  if (!message)
    return Fault{message.error().code, "the controller at " + socket_->endpoint().text() +
                                           " sent an unreadable message: " + message.error().message};
  if (const auto* refusal = std::get_if<wire::Refusal>(&message.value())) {
    if (refusal->is_for_now) {
      enrolment_.clock.heard(now);
      trouble_ = refusal->reason;
      return {};
    }
    return Fault{Errc::kClosed,
                 "the controller at " + socket_->endpoint().text() + " rejected this trainer: " + refusal->reason};
  }
  auto* roster = std::get_if<wire::TrainerRoster>(&message.value());
  if (roster == nullptr) return {};
  has_answered_ = true;
  trouble_.clear();
  if (enrolment_.receive(*roster, now)) roster_ = std::move(*roster);
  return {};
}

bool ControllerLink::report(const std::function<wire::TrainerReport()>& make_report, Instant now) {
  if (!enrolment_.clock.take(now)) return false;
  if (socket_->is_connected() && enrolment_.clock.take_renewal(now)) socket_->renew();
  // A report that is lost is replaced by the next.
  if (socket_->is_connected()) static_cast<void>(socket_->send(wire::write_control(make_report())));
  return true;
}

void ControllerLink::send_plan(const wire::PlanReport& plan) {
  if (socket_->is_connected()) static_cast<void>(socket_->send(wire::write_control(plan)));
}

void ControllerLink::deregister(const wire::TrainerReport& last) {
  static_cast<void>(socket_->send(wire::write_control(last)));
  static_cast<void>(socket_->send(
      wire::write_control(wire::Deregistration{.id = last.trainer_id, .is_worker = false, .secret = last.secret})));
  socket_->set_linger(net::kClosingLinger);
}

void PoolStanding::note(Controller controller, size_t known_count, size_t open_count) {
  MutexLock lock(mutex_);
  controller_ = std::move(controller);
  known_count_ = known_count;
  open_count_ = open_count;
}

void PoolStanding::note_deaths(std::string deaths) {
  MutexLock lock(mutex_);
  deaths_ = std::move(deaths);
}

void PoolStanding::note_pool(size_t pool_count, size_t declined_count) {
  MutexLock lock(mutex_);
  pool_count_ = pool_count;
  declined_count_ = declined_count;
}

bool PoolStanding::note_refusal(uint64_t worker_id, const std::string& reason) {
  MutexLock lock(mutex_);
  make_room_for(worker_id);
  return std::exchange(refusals_[worker_id], reason) != reason;
}

bool PoolStanding::note_reported_refusal(uint64_t worker_id, const std::string& reason) {
  MutexLock lock(mutex_);
  make_room_for(worker_id);
  return refusals_.try_emplace(worker_id, reason).second;
}

void PoolStanding::forget_refusal(uint64_t worker_id) {
  MutexLock lock(mutex_);
  refusals_.erase(worker_id);
}

bool PoolStanding::note_numerics(uint64_t worker_id, const std::string& place, FamilySet differing) {
  MutexLock lock(mutex_);
  differing_workers_.erase(worker_id);
  if (differing == 0) return false;
  if (differing_workers_.size() >= kRefusalCountMax) differing_workers_.erase(differing_workers_.begin());
  differing_workers_[worker_id] = {place, differing};
  return !std::exchange(is_difference_reported_, true);
}

std::map<std::string, std::string> PoolStanding::workers_apart() const {
  MutexLock lock(mutex_);
  std::map<std::string, std::string> found;
  for (const auto& [worker_id, apart] : differing_workers_) found[apart.first] = spoken_families(apart.second);
  return found;
}

std::optional<Duration> PoolStanding::time_since_controller() const {
  MutexLock lock(mutex_);
  if (!controller_.has_answered) return std::nullopt;
  return controller_.time_since_answer;
}

std::string PoolStanding::describe_declined(const std::string& where) const {
  MutexLock lock(mutex_);
  return describe_missing_workers(where) + format_refusals();
}

std::string PoolStanding::describe_missing_workers(const std::string& where) const {
  const std::string program = job_kind_ == wire::JobKind::kPlugin ? "penstock-worker" : "penstock worker";
  const std::string start = "start some (" + program + " --controller " + where + ")";
  std::string text = "the controller at " + where + " has no worker for this trainer: ";
  if (declined_count_ == 0) {
    text += start + ", or wait until other trainers need fewer";
  } else if (declined_count_ < pool_count_) {
    text += std::to_string(declined_count_) + " of its " + std::to_string(pool_count_) +
            " have rejected this job, and other trainers use the others; " + start + " that can run it, or wait";
  } else {
    text += "all of its " + std::to_string(pool_count_) + " have rejected this job; " + start + " that can run it";
  }
  return text;
}

std::string PoolStanding::format_refusals() const {
  std::string text;
  size_t listed_count = 0;
  for (const auto& [worker_id, reason] : refusals_) {
    if (listed_count == kRefusalListedCountMax)
      return text + "; and " + std::to_string(refusals_.size() - listed_count) + " more";
    text += "; worker " + format_id(worker_id) + ": " + reason;
    ++listed_count;
  }
  return text;
}

void PoolStanding::make_room_for(uint64_t worker_id) {
  if (refusals_.size() >= kRefusalCountMax && !refusals_.contains(worker_id)) refusals_.erase(refusals_.begin());
}

std::string PoolStanding::describe(const std::string& where) const {
  MutexLock lock(mutex_);
  // First: starting other workers does not help until the cause of the deaths is known.
  const std::string deaths = deaths_.empty() ? "" : deaths_ + "; since then ";
  if (where.empty()) {
    return deaths + std::to_string(open_count_) + " of " + std::to_string(known_count_) +
           (known_count_ == 1 ? " worker" : " workers") + " of this process work for it" + format_refusals();
  }
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(controller_.time_since_answer).count();
  const std::string command = "penstock controller --bind " + where;
  std::string text;
  if (!controller_.has_answered && !controller_.trouble.empty()) {
    text = "the controller at " + where + " cannot be reached yet: " + controller_.trouble;
  } else if (!controller_.has_answered && !controller_.lookup_failure.empty()) {
    text = "the controller at " + where + " cannot be resolved: no address is known for this name (" +
           controller_.lookup_failure + "); correct the name, or use its address";
  } else if (!controller_.has_answered) {
    text = "no controller answered at " + where + " within " + std::to_string(seconds) + " s: start one there (" +
           command + "), or pass the address of the running controller";
  } else if (controller_.time_since_answer >= kUnresponsiveAfter) {
    text = "the controller at " + where + " last answered " + std::to_string(seconds) +
           " s ago: check whether it is running and can be reached, and restart it (" + command + "); " +
           std::to_string(open_count_) + " of " + std::to_string(known_count_) +
           (known_count_ == 1 ? " worker" : " workers") + " from it work for this trainer";
  } else if (known_count_ == 0) {
    text = describe_missing_workers(where);
  } else {
    text = std::to_string(open_count_) + " of " + std::to_string(known_count_) +
           (known_count_ == 1 ? " worker" : " workers") + " from the controller at " + where +
           (open_count_ == 1 ? " works" : " work") + " for this trainer";
  }
  return deaths + text + format_refusals();
}

}  // namespace penstock::pool_client
