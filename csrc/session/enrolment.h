// SPDX-License-Identifier: Apache-2.0
#pragma once
// The relation of a worker or a trainer to its controller: when to report next, which answers are valid, and when to
// give the controller up. RenewalClock and RemakeClock determine when a silent connection and a broken link are
// replaced. Newcomers limits how many unknown processes a controller admits. Pure.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/clock.h"
#include "session/worker_session.h"
#include "wire/reports.h"

namespace penstock::session {

constexpr Duration kRenewAfter = std::chrono::seconds(2);  // more than a lease
constexpr Duration kRenewAfterMax = std::chrono::seconds(32);

// When to replace a silent connection. Bytes that were sent into a cut link wait in TCP, whose retransmission timeout
// doubles each time: the connection remains silent for up to as long again as the link was cut. A new connection works
// immediately. On a slow link it loses the bytes in transit, so the wait doubles each time. A value type.
class RenewalClock {
 public:
  explicit RenewalClock(Instant now) : begun_at_(now) {}

  void heard(Instant now) {
    begun_at_ = now;
    patience_ = kRenewAfter;
  }
  // Returns true when it is time, and the next time after twice as long.
  bool take(Instant now) {
    if (now - begun_at_ < patience_) return false;
    begun_at_ = now;
    patience_ = std::min(2 * patience_, kRenewAfterMax);
    return true;
  }

 private:
  Instant begun_at_;
  Duration patience_ = kRenewAfter;
};

constexpr Duration kRemakePause = std::chrono::milliseconds(100);
constexpr Duration kRemakePauseMax = std::chrono::milliseconds(1600);

// When to open a link after one whose messages did not fit together. The first one is opened immediately. Until an
// answer counts, the interval between links doubles: every link costs a key agreement, a connection and a repetition of
// all requests, and a worker or a device in transit that damages each of them would otherwise make the trainer repeat
// this as fast as messages cross. A value type.
class RemakeClock {
 public:
  // An answer counted.
  void counted() { pause_ = Duration(0); }
  // When to open the link after the one that ends now.
  Instant take(Instant now) {
    begun_at_ = std::max(now, begun_at_ + pause_);
    pause_ = std::clamp(2 * pause_, kRemakePause, kRemakePauseMax);
    return begun_at_;
  }

 private:
  Instant begun_at_{};  // start of the last replacement link
  Duration pause_{};
};

// How long a worker follows the last orders of a silent controller. Meanwhile the trainer that it serves, and the one
// that it was assigned to, may connect; a trainer that was promised the worker by a controller that died before the
// worker learned of it may not.
constexpr Duration kOrdersValidity = std::chrono::seconds(10);

// Determines when a report is due. A value type.
class ReportClock {
 public:
  explicit ReportClock(Instant now) : due_at_(now), heard_at_(now), renewal_(now) {}

  // Returns true once every kPingInterval.
  bool take(Instant now) {
    if (now < due_at_) return false;
    due_at_ = now + kPingInterval;
    return true;
  }
  // A change has occurred that the controller should know about immediately.
  void hurry(Instant now) { due_at_ = now; }
  void heard(Instant now) {
    heard_at_ = now;
    renewal_.heard(now);
  }
  // There is a new connection, which replaces the previous one if there was one.
  void connected(Instant now) {
    renewal_.heard(now);
    hurry(now);
  }
  // Whether to replace the connection, if there is one, because no data has arrived on it for a long time.
  bool take_renewal(Instant now) { return renewal_.take(now); }

  Instant due_at() const { return due_at_; }
  // The time since the controller's last message.
  Duration time_since_answer(Instant now) const { return now - heard_at_; }

 private:
  Instant due_at_;
  Instant heard_at_;
  RenewalClock renewal_;
};

// A worker's side of its enrolment with a controller. A value type.
class WorkerEnrolment {
 public:
  WorkerEnrolment(uint64_t worker_id, Instant now) : clock(now), worker_id_(worker_id) {}

  wire::WorkerReport report(const WorkerSession& session) const {
    return {.worker_id = worker_id_,
            .incarnation = incarnation_,
            .endpoint = {},
            .is_draining = session.is_draining(),
            .trainer_id = session.trainer_id(),
            .about = {},
            .declined = {session.declined().begin(), session.declined().end()}};
  }

  // Returns true when a report is due: by the clock, and immediately when the worker becomes free or starts to serve
  // another trainer.
  bool take(const WorkerSession& session, Instant now) {
    if (session.trainer_id() != reported_trainer_id_) clock.hurry(now);
    reported_trainer_id_ = session.trainer_id();
    return clock.take(now);
  }
  Instant due_at(const WorkerSession& session) const {
    return session.trainer_id() != reported_trainer_id_ ? Instant{} : clock.due_at();
  }

  // Carries out the controller's orders.
  void receive(const wire::WorkerOrders& orders, WorkerSession& session, Instant now) {
    clock.heard(now);
    if (orders.incarnation != incarnation_) return;  // they answer a report of an earlier incarnation
    if (orders.is_fenced) {
      session.abandon();
      ++incarnation_;
      clock.hurry(now);
    }
    if (orders.is_to_drain) session.drain();
    const bool is_older = orders.controller_id == controller_id_ && orders.view < view_;
    if (!orders.is_settled || is_older) return;
    controller_id_ = orders.controller_id;
    view_ = orders.view;
    session.assign(orders.trainer_id, orders.is_to_part);
    keep_bytes_ = orders.keep_bytes;
  }

  void tick(WorkerSession& session, Instant now) const {
    if (clock.time_since_answer(now) >= kOrdersValidity) session.serve_anyone();
  }

  uint64_t worker_id() const { return worker_id_; }
  uint32_t incarnation() const { return incarnation_; }
  // This worker's share of the bytes that the pool keeps.
  uint64_t keep_bytes() const { return keep_bytes_; }

  ReportClock clock;

 private:
  uint64_t worker_id_;
  uint32_t incarnation_ = 1;
  uint64_t controller_id_ = 0;  // the controller whose orders are in force
  uint64_t view_ = 0;
  uint64_t reported_trainer_id_ = 0;
  uint64_t keep_bytes_ = 0;
};

// A trainer's side of its enrolment with a controller: decides which roster is newer. A value type.
class TrainerEnrolment {
 public:
  explicit TrainerEnrolment(Instant now) : clock(now) {}

  // Returns true if the session has to follow this roster.
  bool receive(const wire::TrainerRoster& roster, Instant now) {
    clock.heard(now);
    if (roster.controller_id == controller_id_ && roster.view < view_) return false;
    controller_id_ = roster.controller_id;
    view_ = roster.view;
    return roster.is_settled;
  }

  ReportClock clock;

 private:
  uint64_t controller_id_ = 0;
  uint64_t view_ = 0;
};

constexpr double kNewcomersAtOnce = 1024;  // all ranks of a large job, or the workers that an engine starts together
constexpr double kNewcomersPerSecond = 16;

// How many unknown trainers or workers the holders of one key may register: a burst, and then a number per second. Each
// of them occupies one of the controller's places and causes a new assignment of all workers; a rejected one reports
// again after kPingInterval. Thread-compatible.
class Newcomers {
 public:
  // Whether one more process with a key of this name may register. There are few names: one per accepted key.
  bool take(const std::string& key_name, Instant now) {
    const auto [place, is_new] = budgets_.try_emplace(key_name, Budget{.left = kNewcomersAtOnce, .at = now});
    Budget& budget = place->second;
    const double earned = std::chrono::duration<double>(now - budget.at).count() * kNewcomersPerSecond;
    budget = {.left = std::min(kNewcomersAtOnce, budget.left + earned), .at = now};
    if (budget.left < 1) return false;
    --budget.left;
    return true;
  }

 private:
  struct Budget {
    double left;
    Instant at;
  };
  std::map<std::string, Budget> budgets_;
};

}  // namespace penstock::session
