// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connection to its controller (ControllerLink), and the state of its connections to the pool in words
// (PoolStanding).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/numerics.h"
#include "base/result.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "session/enrolment.h"
#include "wire/control_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// A trainer's connection to its controller: it sends reports when they are due and receives rosters. Confined to the
// I/O thread.
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
  void send_plan(const wire::PlanReport& plan);
  // Makes a report due soon, after a change that the controller should know.
  void hurry(Instant now) { enrolment_.clock.hurry(now); }
  // Sends the last report and announces the end of this trainer. Sent messages may still need a moment to leave.
  void deregister(const wire::TrainerReport& last);

  Instant due_at() const { return enrolment_.clock.due_at(); }
  bool has_answered() const { return has_answered_; }
  // Why the controller's side ended the last attempt to connect, or why it does not accept this trainer yet; the
  // attempt is repeated.
  const std::string& trouble() const { return trouble_; }
  Duration time_since_answer(Instant now) const { return enrolment_.clock.time_since_answer(now); }
  net::ClientSocket& socket() { return *socket_; }

 private:
  Result<void> take(std::span<const std::byte> bytes, Instant now);

  std::unique_ptr<net::ClientSocket> socket_;
  session::TrainerEnrolment enrolment_;
  std::optional<wire::TrainerRoster> roster_;
  bool has_answered_ = false;
  std::string trouble_;
};

// A controller or a worker that is silent for this long is reported.
inline constexpr Duration kUnresponsiveAfter = std::chrono::seconds(5);
inline constexpr size_t kRefusalCountMax = 64;       // workers whose reasons are kept
inline constexpr size_t kRefusalListedCountMax = 8;  // and listed in one sentence

// The state of a trainer's connection to a pool, in words: for the user who waits. Thread-safe.
class PoolStanding {
 public:
  struct Controller {
    bool has_answered = false;
    std::string trouble{};         // why the connection failed
    std::string lookup_failure{};  // why its host name was not found
    Duration time_since_answer{};
  };

  explicit PoolStanding(wire::JobKind job_kind) : job_kind_(job_kind) {}

  void note(Controller controller, size_t known_count, size_t open_count);
  // Sets the description of the batch that the last workers died of, while there is no worker; otherwise empty.
  void note_deaths(std::string deaths);
  // Sets the number of the pool's workers, and how many of them cannot run this trainer's job.
  void note_pool(size_t pool_count, size_t declined_count);
  // Notes why the worker does not work for this trainer. Returns false if that reason is known already.
  bool note_refusal(uint64_t worker_id, const std::string& reason);
  // Notes a reason that the controller forwards, unless the worker itself has given one. Returns false if a reason is
  // known already.
  bool note_reported_refusal(uint64_t worker_id, const std::string& reason);
  void forget_refusal(uint64_t worker_id);
  // Notes the kernel families in which a worker's results differ from this process's. Returns true for the first worker
  // that differs in any.
  bool note_numerics(uint64_t worker_id, const std::string& place, FamilySet differing);

  // The time since the controller's last message; nullopt if it has never sent one.
  std::optional<Duration> time_since_controller() const;

  // The workers with different results, by place, and their kernel families for people.
  std::map<std::string, std::string> workers_apart() const;

  // A description in a sentence or two. `where` is the controller's address, empty without one.
  std::string describe(const std::string& where) const;
  // The same, once every worker has declined the job.
  std::string describe_declined(const std::string& where) const;

 private:
  std::string describe_missing_workers(const std::string& where) const
      PENSTOCK_REQUIRES(mutex_);  // that workers are missing
  std::string format_refusals() const PENSTOCK_REQUIRES(mutex_);
  void make_room_for(uint64_t worker_id) PENSTOCK_REQUIRES(mutex_);  // evicts a refusal if they are full

  const wire::JobKind job_kind_;  // determines the program to start as a worker
  mutable Mutex mutex_;
  Controller controller_ PENSTOCK_GUARDED_BY(mutex_);
  size_t known_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t pool_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t declined_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  size_t open_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  std::string deaths_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> refusals_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint64_t, std::pair<std::string, FamilySet>> differing_workers_ PENSTOCK_GUARDED_BY(mutex_);
  bool is_difference_reported_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

}  // namespace penstock::pool_client
