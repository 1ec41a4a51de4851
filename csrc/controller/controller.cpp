// SPDX-License-Identifier: Apache-2.0
#include "controller/controller.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <utility>
#include <variant>

#include "controller/pool_status.h"
#include "transport/control_limits.h"
#include "transport/identity.h"
#include "transport/live_clock.h"
#include "transport/readiness.h"

namespace penstock::controller {

using cluster::Instant;
using transport::clock_now;
using transport::wait_time;

Result<std::unique_ptr<Controller>> Controller::start(const transport::Endpoint& endpoint,
                                                      const transport::KeyRing& keys) {
  PENSTOCK_ASSERT(keys.own_role() == Role::kController, "a controller was given the keys of another role");
  const auto id = transport::draw_identity();
  if (!id) return id.error();
  auto context = std::make_unique<transport::SocketContext>();
  auto authenticator = transport::Authenticator::start(*context);
  if (!authenticator) return authenticator.error();
  const transport::ServerOptions options{.allowed_roles = {Role::kWorker, Role::kTrainer, Role::kOperator},
                                         .limits = transport::control_limits()};
  auto server = transport::ServerSocket::bind(*context, *authenticator.value(), endpoint, keys, options);
  if (!server) return server.error();
  return std::make_unique<Controller>(std::move(context), std::move(authenticator).value(), std::move(server).value(),
                                      id.value());
}

Controller::Controller(std::unique_ptr<transport::SocketContext> context,
                       std::unique_ptr<transport::Authenticator> authenticator,
                       std::unique_ptr<transport::ServerSocket> server, uint64_t controller_id)
    : context_(std::move(context)),
      authenticator_(std::move(authenticator)),
      server_(std::move(server)),
      roster_(controller_id, clock_now()) {}

Result<void> Controller::run(int stop_fd) {
  const std::array<transport::Waitable, 1> sockets{server_->waitable()};
  const std::array<int, 1> fds{stop_fd};
  std::array<bool, 1> is_readable{};
  transport::ServerReceipt receipt;
  for (;;) {
    for (;;) {
      auto received = server_->try_receive(receipt);
      if (!received) return received.error();
      if (!received.value()) break;
      receive(receipt, clock_now());
    }
    roster_.tick(clock_now());
    push_rosters();
    const auto timeout = wait_time(roster_.next_tick(), clock_now());
    if (auto waited = transport::wait_readable(sockets, fds, is_readable, timeout); !waited) return waited;
    if (is_readable[0]) return {};
  }
}

void Controller::receive(const transport::ServerReceipt& receipt, Instant now) {
  ++counters_.messages;
  if (!receipt.offence.empty()) {
    ++counters_.refused;
    return;
  }
  if (receipt.parts.size() != 1)
    return refuse(receipt.peer, "a message of " + std::to_string(receipt.parts.size()) + " parts was sent to the " +
                                    "controller, which takes messages of one");
  const auto message = transport::parse_control(receipt.parts.front().bytes());
  if (!message) return refuse(receipt.peer, message.error().message);
  take(receipt.peer, message.value(), now);
}

void Controller::take(const transport::Peer& peer, const transport::ControlMessage& message, Instant now) {
  const Role role = peer.identity.role;
  if (const auto* worker = std::get_if<cluster::WorkerReport>(&message); worker != nullptr && role == Role::kWorker)
    return send(peer.routing_id, roster_.worker_reported(*worker, now));
  if (const auto* trainer = std::get_if<cluster::TrainerReport>(&message);
      trainer != nullptr && role == Role::kTrainer) {
    trainers_[trainer->trainer_id] = peer.routing_id;
    return send(peer.routing_id, roster_.trainer_reported(*trainer, now));
  }
  if (const auto* farewell = std::get_if<transport::Farewell>(&message)) {
    if (farewell->is_worker && role == Role::kWorker) return roster_.worker_left(farewell->id, now);
    if (!farewell->is_worker && role == Role::kTrainer) return roster_.trainer_left(farewell->id, now);
  }
  if (std::holds_alternative<transport::StatusRequest>(message) && role == Role::kOperator)
    return send(peer.routing_id,
                transport::Status{status_json(roster_, endpoint().text(), now, transport::kControlTextBytesMax)});
  if (const auto* drain = std::get_if<transport::DrainRequest>(&message); drain != nullptr && role == Role::kOperator) {
    const bool is_known = roster_.drain(drain->worker_id, now);
    return send(peer.routing_id, transport::DrainAnswer{.worker_id = drain->worker_id, .is_known = is_known});
  }
  refuse(peer, "the key that was shown is that of a " + std::string(transport::role_name(role)) +
                   ", which may not send this to a controller; use the key of the role that may");
}

void Controller::refuse(const transport::Peer& peer, std::string reason) {
  ++counters_.refused;
  send(peer.routing_id, transport::Refusal{std::move(reason)});
}

void Controller::push_rosters() {
  for (const uint64_t trainer_id : roster_.changed_trainers()) {
    const auto roster = roster_.roster_of(trainer_id);
    if (const auto known = trainers_.find(trainer_id); known != trainers_.end()) send(known->second, roster);
  }
  if (trainers_.size() <= 2 * roster_.trainers(clock_now()).size() + 16) return;
  std::set<uint64_t> alive;  // whose routing ids are still of use
  for (const auto& trainer : roster_.trainers(clock_now())) alive.insert(trainer.report.trainer_id);
  std::erase_if(trainers_, [&](const auto& item) { return !alive.contains(item.first); });
}

void Controller::send(const std::string& routing_id, const transport::ControlMessage& message) {
  const auto bytes = transport::write_control(message);
  static_cast<void>(server_->send(routing_id, bytes));
}

}  // namespace penstock::controller
