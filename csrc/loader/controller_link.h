// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connection to its controller: reports go out when they are due, rosters come in.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "base/result.h"
#include "cluster/enrolment.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "wire/control_record.h"
#include "wire/reports.h"

namespace penstock::loader {

// Confined to the I/O thread.
class ControllerLink {
 public:
  static Result<std::unique_ptr<ControllerLink>> connect(net::SocketContext& context, net::Resolver& resolver,
                                                         const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                         Instant now);
  // For `connect`.
  ControllerLink(std::unique_ptr<net::ClientSocket> socket, Instant now)
      : socket_(std::move(socket)), enrolment_(now) {}

  // Takes the messages that have come. kClosed with the reason if the controller refuses this trainer.
  Result<void> receive(Instant now);
  // The newest roster, if there is one that was not taken yet.
  std::optional<wire::TrainerRoster> take_roster() { return std::exchange(roster_, std::nullopt); }

  // Sends the report of `make_report`, if one is due.
  // Returns whether one was due.
  bool report(const std::function<wire::TrainerReport()>& make_report, Instant now);
  // Tells of the plan in force, which is text for people. Lost where the controller is not there.
  void tell_plan(const wire::PlanReport& plan);
  // Something changed that the controller should know now.
  void hurry(Instant now) { enrolment_.clock.hurry(now); }
  // Says that this trainer ends, after its last report. Messages that were sent may still take a moment to leave.
  void say_farewell(const wire::TrainerReport& last);

  Instant due_at() const { return enrolment_.clock.due_at(); }
  bool has_answered() const { return has_answered_; }
  // Why the last attempt to connect failed, when the controller's side ended it, or why it does not take this trainer
  // yet; it is tried again.
  const std::string& trouble() const { return trouble_; }
  Duration silence(Instant now) const { return enrolment_.clock.silence(now); }
  net::ClientSocket& socket() { return *socket_; }

 private:
  Result<void> take(std::span<const std::byte> bytes, Instant now);

  std::unique_ptr<net::ClientSocket> socket_;
  cluster::TrainerEnrolment enrolment_;
  std::optional<wire::TrainerRoster> roster_;
  bool has_answered_ = false;
  std::string trouble_;
};

}  // namespace penstock::loader
