// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker's connection to the controller of its pool: sends reports when they are due, and carries out the orders that
// arrive. A notice for the user is printed once, when it changes.

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "server/host_load.h"
#include "session/enrolment.h"
#include "session/worker_session.h"
#include "wire/reports.h"

namespace penstock::server {

// Confined to the I/O thread.
class Registration {
 public:
  // All fields except `run` describe this worker in its reports.
  struct Description {
    net::RunId run{};
    std::string endpoint;
    std::string about;
    std::string name;  // by which its engine identifies it; empty without an engine
    uint8_t job_kinds = wire::kind_bit(wire::JobKind::kPython);
    uint16_t torch = 0;                    // as wire::torch_number()
    std::shared_ptr<const LogTail> log{};  // null: its reports contain no lines
  };
  static Result<std::unique_ptr<Registration>> open(net::SocketContext& context, net::Resolver& resolver,
                                                    const net::Endpoint& controller, const net::KeyRing& keys,
                                                    Description description, Instant now);
  // For `open`.
  Registration(std::unique_ptr<net::ClientSocket> socket, Description description, Instant now);

  // Takes the messages that have arrived and makes `session` carry them out. kFailed with the reason if the controller
  // refuses this worker.
  Result<void> receive(session::WorkerSession& session, Instant now);
  // Sends a report if one is due. `stuck` is how long the worker has been stuck, as measured by MakerWatch; 0: not
  // stuck.
  void report(const session::WorkerSession& session, Duration stuck, Instant now);
  // The reason for declining the latest trainer, included in reports.
  void set_decline_reason(std::string_view reason);
  // Makes a report due now.
  void hurry(Instant now) { enrolment_.clock.hurry(now); }
  // Reports that this worker ends. Earlier messages may still take a moment to leave.
  void deregister();

  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  uint32_t incarnation() const { return enrolment_.incarnation(); }
  // This worker's share of the bytes of batches that the pool keeps; 0 until the controller has sent it.
  uint64_t keep_bytes() const { return enrolment_.keep_bytes(); }
  // Included in reports: the bytes of kept batches that this worker has made, and the batches that it did not make.
  void set_kept(uint64_t bytes, uint64_t answers) {
    kept_bytes_ = bytes;
    kept_answers_ = answers;
  }
  // The use of this machine, as last reported.
  const wire::HostLoad& host() const { return host_; }
  Instant due_at() const { return enrolment_.clock.due_at(); }
  // How long a controller that had answered has been silent. A controller that never answered may be started later,
  // except for a worker started by an engine: the controller that ordered it is gone then.
  std::optional<Duration> time_since_answer(Instant now) const;
  net::ClientSocket& socket() { return *socket_; }

 private:
  Result<void> take(std::span<const std::byte> bytes, session::WorkerSession& session, Instant now);
  void take_event(const net::ConnectionEvent& event, Instant now);
  void tell(std::string text);
  std::string where() const { return "the controller at " + socket_->endpoint().text(); }

  std::unique_ptr<net::ClientSocket> socket_;
  Description description_;
  session::WorkerEnrolment enrolment_;
  HostLoadMeter host_load_;
  wire::HostLoad host_;
  uint64_t kept_bytes_ = 0;
  uint64_t kept_answers_ = 0;
  Instant opened_at_;
  bool has_answered_ = false;
  std::string decline_reason_;
  std::string last_notice_;  // the last notice
  std::vector<std::string> notices_;
};

}  // namespace penstock::server
