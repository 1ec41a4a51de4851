// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's connection to the controller of its pool: reports go out when they are due, orders come in and are carried
// out. What people should know of it is said once, when it changes.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "cluster/enrolment.h"
#include "cluster/instant.h"
#include "cluster/work_desk.h"
#include "transport/client_socket.h"
#include "transport/endpoint.h"
#include "transport/key_ring.h"

namespace penstock::worker {

// Confined to the I/O thread.
class Registration {
 public:
  // `endpoint` and `about` are what a report says of this worker.
  struct Card {
    uint64_t worker_id = 0;
    std::string endpoint;
    std::string about;
  };
  static Result<std::unique_ptr<Registration>> open(transport::SocketContext& context,
                                                    const transport::Endpoint& controller,
                                                    const transport::KeyRing& keys, Card card, cluster::Instant now);
  // For `open`.
  Registration(std::unique_ptr<transport::ClientSocket> socket, Card card, cluster::Instant now);

  // Takes what has come, and has `desk` do it. kFailed with the reason if the controller will have nothing to do with
  // this worker.
  Result<void> receive(cluster::WorkDesk& desk, cluster::Instant now);
  // Sends a report if one is due.
  void report(const cluster::WorkDesk& desk, cluster::Instant now);
  // What reports say of the latest trainer that was declined.
  void set_decline_reason(std::string_view reason);
  // Has one go out now.
  void hurry(cluster::Instant now) { enrolment_.clock.hurry(now); }
  // Says that this worker ends. What was sent may still take a moment to leave.
  void say_farewell();

  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  uint32_t incarnation() const { return enrolment_.incarnation(); }
  cluster::Instant due_at() const { return enrolment_.clock.due_at(); }
  // For how long a controller that had answered has said nothing.
  std::optional<cluster::Duration> silence(cluster::Instant now) const;
  transport::ClientSocket& socket() { return *socket_; }

 private:
  Result<void> take(std::span<const std::byte> bytes, cluster::WorkDesk& desk, cluster::Instant now);
  void take_event(const transport::ConnectionEvent& event, cluster::Instant now);
  void tell(std::string text);
  std::string where() const { return "the controller at " + socket_->endpoint().text(); }

  std::unique_ptr<transport::ClientSocket> socket_;
  Card card_;
  cluster::WorkerEnrolment enrolment_;
  cluster::Instant opened_at_;
  bool has_answered_ = false;
  std::string decline_reason_;
  std::string told_;  // last
  std::vector<std::string> notices_;
};

}  // namespace penstock::worker
