// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker or a trainer stands with its controller: when to report next, which answers are worth anything, and when
// to give the controller up. Pure.

#include <cstdint>
#include <optional>

#include "base/instant.h"
#include "cluster/renewal.h"
#include "cluster/worker_session.h"
#include "wire/reports.h"

namespace penstock::cluster {

// For how long a worker goes by the last orders of a controller that is silent. Who it serves, and who it was given to,
// may come all the same; a trainer that was given a worker by a controller that died before the worker knew may not.
constexpr Duration kOrdersGoodFor = std::chrono::seconds(10);

// When a report is due. A value type.
class ReportClock {
 public:
  explicit ReportClock(Instant now) : due_at_(now), heard_at_(now), renewal_(now) {}

  // True once every kPingInterval.
  bool take(Instant now) {
    if (now < due_at_) return false;
    due_at_ = now + kPingInterval;
    return true;
  }
  // Something changed that the controller should know now.
  void hurry(Instant now) { due_at_ = now; }
  void heard(Instant now) {
    heard_at_ = now;
    renewal_.heard(now);
  }
  // There is a connection, another than before if there was one.
  void connected(Instant now) {
    renewal_.heard(now);
    hurry(now);
  }
  // Whether to make the connection anew, if there is one, because nothing has come over it for long.
  bool take_renewal(Instant now) { return renewal_.take(now); }

  Instant due_at() const { return due_at_; }
  // For how long the controller has said nothing.
  Duration silence(Instant now) const { return now - heard_at_; }

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

  // True when a report is due: as the clock says, and at once when the worker is free or has begun for somebody else.
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
    if (orders.incarnation != incarnation_) return;  // of a report before
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
  }

  void tick(WorkerSession& session, Instant now) const {
    if (clock.silence(now) >= kOrdersGoodFor) session.serve_anyone();
  }

  uint64_t worker_id() const { return worker_id_; }
  uint32_t incarnation() const { return incarnation_; }

  ReportClock clock;

 private:
  uint64_t worker_id_;
  uint32_t incarnation_ = 1;
  uint64_t controller_id_ = 0;  // of the orders in force
  uint64_t view_ = 0;
  uint64_t reported_trainer_id_ = 0;
};

// A trainer's side of its enrolment with a controller: tells which roster is newer. A value type.
class TrainerEnrolment {
 public:
  explicit TrainerEnrolment(Instant now) : clock(now) {}

  // True if the session is to follow this roster.
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

}  // namespace penstock::cluster
