// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connection to its controller: it sends reports when they are due and receives rosters.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/instant.h"
#include "base/result.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "session/enrolment.h"
#include "wire/control_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// Confined to the I/O thread.
class ControllerLink {
 public:
  static Result<std::unique_ptr<ControllerLink>> connect(net::SocketContext& context, net::Resolver& resolver,
                                                         const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                         Instant now);
  // Used by `connect`.
  ControllerLink(std::unique_ptr<net::ClientSocket> socket, Instant now)
      : socket_(std::move(socket)), enrolment_(now) {}

  // Processes the received messages. Fails with kClosed and the reason if the controller refuses this trainer.
  Result<void> receive(Instant now);
  // Returns the newest roster, unless it was taken already.
  std::optional<wire::TrainerRoster> take_roster() { return std::exchange(roster_, std::nullopt); }

  // Sends the report that `make_report` returns, if one is due. Returns whether one was due.
  bool report(const std::function<wire::TrainerReport()>& make_report, Instant now);
  // Sends the plan in force, a text for people. It is lost if the controller is not connected.
  void tell_plan(const wire::PlanReport& plan);
  // Makes a report due soon, after a change that the controller should know.
  void hurry(Instant now) { enrolment_.clock.hurry(now); }
  // Sends the last report and announces the end of this trainer. Sent messages may still need a moment to leave.
  void say_farewell(const wire::TrainerReport& last);

  Instant due_at() const { return enrolment_.clock.due_at(); }
  bool has_answered() const { return has_answered_; }
  // Why the controller's side ended the last attempt to connect, or why it does not accept this trainer yet; the
  // attempt is repeated.
  const std::string& trouble() const { return trouble_; }
  Duration silence(Instant now) const { return enrolment_.clock.silence(now); }
  net::ClientSocket& socket() { return *socket_; }

 private:
  Result<void> take(std::span<const std::byte> bytes, Instant now);

  std::unique_ptr<net::ClientSocket> socket_;
  session::TrainerEnrolment enrolment_;
  std::optional<wire::TrainerRoster> roster_;
  bool has_answered_ = false;
  std::string trouble_;
};

}  // namespace penstock::pool_client
