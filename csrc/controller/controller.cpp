// SPDX-License-Identifier: Apache-2.0
#include "controller/controller.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <utility>
#include <variant>

#include "base/identity.h"
#include "base/live_clock.h"
#include "controller/pool_costs.h"
#include "controller/pool_status.h"
#include "net/control_limits.h"
#include "net/readiness.h"

namespace penstock::controller {

Result<std::unique_ptr<Controller>> Controller::start(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                      cluster::RosterOptions shares) {
  PENSTOCK_ASSERT(keys.own_role() == Role::kController, "a controller was given the keys of another role");
  const auto id = draw_identity();
  if (!id) return id.error();
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  auto authenticator = net::Authenticator::start(*context.value());
  if (!authenticator) return authenticator.error();
  const net::ServerSocketOptions options{.allowed_roles = {Role::kWorker, Role::kTrainer, Role::kOperator},
                                         .limits = net::control_limits()};
  auto server = net::ServerSocket::bind(*context.value(), *authenticator.value(), endpoint, keys, options);
  if (!server) return server.error();
  return std::make_unique<Controller>(std::move(context).value(), std::move(authenticator).value(),
                                      std::move(server).value(), keys.users(), id.value(), std::move(shares));
}

Controller::Controller(std::unique_ptr<net::SocketContext> context, std::unique_ptr<net::Authenticator> authenticator,
                       std::unique_ptr<net::ServerSocket> server, net::UserKeys users, uint64_t controller_id,
                       cluster::RosterOptions shares)
    : context_(std::move(context)),
      authenticator_(std::move(authenticator)),
      server_(std::move(server)),
      users_(std::move(users)),
      roster_(controller_id, clock_now(), std::move(shares)) {}

Result<void> Controller::run(int stop_fd) {
  const std::array<net::Waitable, 1> sockets{server_->waitable()};
  const std::array<int, 1> fds{stop_fd};
  std::array<bool, 1> is_readable{};
  for (;;) {
    const auto has_more = serve();
    if (!has_more) return has_more.error();
    const auto timeout = has_more.value() ? std::chrono::milliseconds(0) : wait_time(roster_.next_tick(), clock_now());
    if (auto waited = net::wait_readable(sockets, fds, is_readable, timeout); !waited) return waited;
    if (is_readable[0]) return {};
  }
}

Result<bool> Controller::serve() {
  bool has_more = true;
  for (int count = 0; count < kMessagesInTurn && has_more; ++count) {
    auto received = server_->try_receive(receipt_);
    if (!received) return received.error();
    has_more = received.value();
    if (has_more) receive(receipt_, clock_now());
  }
  roster_.tick(clock_now());
  push_rosters();
  return has_more;
}

void Controller::receive(const net::ServerReceipt& receipt, Instant now) {
  ++counters_.messages;
  if (!receipt.offence.empty()) {
    ++counters_.refused;
    return;
  }
  if (receipt.parts.size() != 1)
    return refuse(receipt.peer, "a message of " + std::to_string(receipt.parts.size()) + " parts was sent to the " +
                                    "controller, which takes messages of one");
  const auto message = wire::parse_control(receipt.parts.front().bytes());
  if (!message) return refuse(receipt.peer, message.error().message);
  take(receipt.peer, message.value(), now);
}

void Controller::take(const net::Peer& peer, const wire::ControlMessage& message, Instant now) {
  const Role role = peer.identity.role;
  if (const auto* worker = std::get_if<wire::WorkerReport>(&message); worker != nullptr && role == Role::kWorker) {
    if (!may_report(peer, "worker", worker->worker_id, roster_.may_report_worker(worker->worker_id))) return;
    return send(peer.routing_id, roster_.worker_reported(*worker, now));
  }
  if (const auto* trainer = std::get_if<wire::TrainerReport>(&message); trainer != nullptr && role == Role::kTrainer) {
    if (!may_report(peer, "trainer", trainer->trainer_id, roster_.may_report_trainer(trainer->trainer_id))) return;
    trainers_[trainer->trainer_id] = peer.routing_id;
    costs_.reported(*trainer, now);
    const auto user = users_.find(peer.identity.key);
    return send(peer.routing_id,
                roster_.trainer_reported(*trainer, now, user == users_.end() ? std::string() : user->second));
  }
  if (const auto* plan = std::get_if<wire::PlanReport>(&message); plan != nullptr && role == Role::kTrainer) {
    if (!trainers_.contains(plan->trainer_id)) return;  // it reports itself first, and its plan again
    plans_[plan->trainer_id] = {.json = plan->json, .change_count = plan->change_count};
    return;
  }
  if (const auto* farewell = std::get_if<wire::Farewell>(&message)) {
    if (farewell->is_worker && role == Role::kWorker) return roster_.worker_left(farewell->id, now);
    if (!farewell->is_worker && role == Role::kTrainer) {
      costs_.left(farewell->id);
      plans_.erase(farewell->id);
      return roster_.trainer_left(farewell->id, now);
    }
  }
  if (role == Role::kOperator) return take_of_operator(peer, message, now);
  refuse_role(peer);
}

// A connection is that of one process, so that one key cannot fill the pool with workers, or with trainers, that are
// not there.
bool Controller::may_report(const net::Peer& peer, const std::string& what, uint64_t id, bool has_room) {
  const Reporter reporter{peer.identity.role, id};
  const auto bound = reporter_at_.find(peer.routing_id);
  if (bound != reporter_at_.end() && bound->second != reporter) {
    refuse(peer, "a connection must report one " + what + ", got reports of " + spoken_id(bound->second.second) +
                     " and " + spoken_id(id) + "; connect once for each");
    return false;
  }
  if (!has_room) {
    refuse(peer, "this pool has " + std::to_string(cluster::kPoolCountMax) + " " + what +
                     "s, the most that it can have; start another controller for more");
    return false;
  }
  if (bound != reporter_at_.end()) return true;
  std::string& connection = connection_of_[reporter];
  reporter_at_.erase(connection);  // that it had before this one
  connection = peer.routing_id;
  reporter_at_.emplace(connection, reporter);
  return true;
}

void Controller::take_of_operator(const net::Peer& peer, const wire::ControlMessage& message, Instant now) {
  if (std::holds_alternative<wire::StatusRequest>(message))
    return send(peer.routing_id, wire::Status{status_json(roster_, scaling_, plans_, endpoint().text(), now,
                                                          wire::kControlTextBytesMax)});
  if (const auto* asked = std::get_if<wire::CostsRequest>(&message)) {
    const auto factors = factors_of(*asked, scaling_.standing(now));
    return send(peer.routing_id, wire::Costs{costs_json(costs_, factors, now, wire::kControlTextBytesMax)});
  }
  if (const auto* asked = std::get_if<wire::PlanRequest>(&message)) {
    const auto plan = plans_.find(asked->trainer_id);
    return send(peer.routing_id, wire::PlanAnswer{.trainer_id = asked->trainer_id,
                                                  .json = plan == plans_.end() ? std::string() : plan->second.json});
  }
  if (const auto* drain = std::get_if<wire::DrainRequest>(&message)) {
    const bool is_known = roster_.drain(drain->worker_id, now);
    return send(peer.routing_id, wire::DrainAnswer{.worker_id = drain->worker_id, .is_known = is_known});
  }
  if (const auto* report = std::get_if<wire::ScaleReport>(&message)) {
    auto orders = scaling_.adapter_reported(*report, roster_, now);
    if (!orders) return refuse(peer, orders.error().message);
    return send(peer.routing_id, std::move(orders).value());
  }
  if (std::holds_alternative<wire::EndRequest>(message))
    return send(peer.routing_id, wire::EndAnswer{.has_engine = scaling_.end(now)});
  refuse_role(peer);
}

void Controller::refuse_role(const net::Peer& peer) {
  refuse(peer, "the key that was shown is that of a " + std::string(net::role_name(peer.identity.role)) +
                   ", which may not send this to a controller; use the key of the role that may");
}

void Controller::refuse(const net::Peer& peer, std::string reason) {
  ++counters_.refused;
  send(peer.routing_id, wire::Refusal{std::move(reason)});
}

void Controller::push_rosters() {
  for (const uint64_t trainer_id : roster_.changed_trainers()) {
    const auto roster = roster_.roster_of(trainer_id);
    if (const auto known = trainers_.find(trainer_id); known != trainers_.end()) send(known->second, roster);
  }
  forget_reporters();
  if (trainers_.size() <= 2 * roster_.trainers(clock_now()).size() + 16) return;
  std::set<uint64_t> alive;  // whose routing ids are still of use
  for (const auto& trainer : roster_.trainers(clock_now())) alive.insert(trainer.report.trainer_id);
  std::erase_if(trainers_, [&](const auto& item) { return !alive.contains(item.first); });
  std::erase_if(plans_, [&](const auto& item) { return !alive.contains(item.first); });
}

// Those that have gone. Who reports again is bound again.
void Controller::forget_reporters() {
  if (connection_of_.size() <= 2 * roster_.count() + 16) return;
  std::erase_if(connection_of_, [&](const auto& item) {
    const auto& [role, id] = item.first;
    if (role == Role::kWorker ? roster_.has_worker(id) : roster_.has_trainer(id)) return false;
    reporter_at_.erase(item.second);
    return true;
  });
}

void Controller::send(const std::string& routing_id, const wire::ControlMessage& message) {
  const auto bytes = wire::write_control(message);
  static_cast<void>(server_->send(routing_id, bytes));
}

}  // namespace penstock::controller
