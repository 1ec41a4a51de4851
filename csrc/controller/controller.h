// SPDX-License-Identifier: Apache-2.0
#pragma once
// The controller process: a socket and a clock around scheduling/roster.h and scheduling/pool_scaling.h, on one thread.
// Workers, trainers and operators are distinguished by the role of their key. A request that the role may not make is
// refused with a reason, and so is a message that does not belong to this protocol.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/result.h"
#include "controller/pool_status.h"
#include "costs/cost_ledger.h"
#include "net/authenticator.h"
#include "net/keys.h"
#include "net/server_socket.h"
#include "scheduling/pool_scaling.h"
#include "scheduling/roster.h"
#include "session/enrolment.h"
#include "wire/control_record.h"

namespace penstock::controller {

inline constexpr int kMessagesPerTurn = 256;

struct ControllerCounters {
  uint64_t messages = 0;
  uint64_t refused = 0;  // messages that were malformed, of another version, or not allowed for that role
};

// Confined to one thread.
class Controller {
 public:
  // Listens. `keys` are the keys of the role controller. An address that other machines can reach requires explicit
  // keys.
  static Result<std::unique_ptr<Controller>> start(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                   scheduling::RosterOptions shares = {});

  // For `start`.
  Controller(std::unique_ptr<net::SocketContext> context, std::unique_ptr<net::Authenticator> authenticator,
             std::unique_ptr<net::ServerSocket> server, uint64_t controller_id, scheduling::RosterOptions shares);
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;

  const net::Endpoint& endpoint() const { return server_->endpoint(); }

  // A line for people; `is_failure` for a member that has left without announcing it.
  using Log = std::function<void(const std::string& line, bool is_failure)>;

  // Serves until `stop_fd` is readable. Blocks. `log`, if there is one, gets a line for each worker and each trainer
  // that joins or leaves, with the reason; the lines contain text that these processes have chosen.
  Result<void> run(int stop_fd, const Log& log = {});
  // Takes the messages that are available, at most kMessagesPerTurn, so that leases expire and the stop request is
  // noticed under any load. Returns true if there may be more. Never blocks.
  Result<bool> serve();

  const ControllerCounters& counters() const { return counters_; }

 private:
  using Role = net::Role;

  void receive(const net::ServerReceipt& receipt, Instant now);
  void take(const net::Peer& peer, const wire::ControlMessage& message, Instant now);
  // Whether this id belongs to the peer's own run. A peer that claims another run's id is refused and reported to
  // operators.
  bool is_own_run(const net::Peer& peer, uint64_t id, const wire::RunSecret& secret, Instant now);
  // Records, for operators, the action of a process with the peer's key.
  void note_offence(const net::Peer& peer, const std::string& deed, Instant now);
  bool may_report(const net::Peer& peer, uint64_t id, Instant now);
  // Whether a process that is not known yet may be added to the roster.
  bool may_come(const net::Peer& peer, const std::string& what, Instant now);
  void take_of_operator(const net::Peer& peer, const wire::ControlMessage& message, Instant now);
  void refuse(const net::Peer& peer, std::string reason);
  void refuse_for_now(const net::Peer& peer, std::string reason);
  void refuse_role(const net::Peer& peer);
  void log_events(const Log& log);
  void push_orders();
  void push_rosters();
  void forget_reporters();
  // Does not reach a peer that is gone, which will report again.
  void send(const std::string& routing_id, const wire::ControlMessage& message);

  // In order of construction; destroyed in reverse.
  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::Authenticator> authenticator_;
  std::unique_ptr<net::ServerSocket> server_;
  scheduling::Roster roster_;
  scheduling::PoolScaling scaling_;
  costs::CostLedger costs_;
  session::Newcomers newcomers_;
  // The worker or trainer that reports over a connection, by routing id, and the last connection of each.
  using Reporter = std::pair<Role, uint64_t>;
  std::map<std::string, Reporter> reporter_at_;
  std::map<Reporter, std::string> connection_of_;
  std::map<uint64_t, std::string> trainers_;  // routing id of the last report, by trainer
  std::map<uint64_t, KnownPlan> plans_;       // by trainer
  ControllerStanding standing_;
  ControllerCounters counters_;
  net::ServerReceipt receipt_;
};

}  // namespace penstock::controller
