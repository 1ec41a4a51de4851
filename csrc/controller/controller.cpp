// SPDX-License-Identifier: Apache-2.0
#include "controller/controller.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "base/process.h"
#include "controller/pool_status.h"
#include "net/socket.h"
#include "net/tcp_socket.h"

namespace penstock::controller {
namespace {

// A connection belongs to one worker, trainer or operator. The controller has one server and opens no other descriptors
// for its peers.
constexpr net::HolderRoom kRoom{.count_max = 4 * scheduling::kPoolCountMax, .descriptors_for_each = 2};

std::string name_of_key(const net::Peer& peer) {
  if (!peer.user.empty()) return "the user " + peer.user;
  if (!peer.machine.empty()) return "the machine " + peer.machine;
  return "the role " + std::string(net::role_name(peer.identity.role));
}

scheduling::WorkerHolder holder_of(const net::Peer& peer) {
  scheduling::WorkerHolder holder{.machine = peer.machine, .address = peer.address};
  std::ranges::copy(peer.identity.key.bytes(), holder.key.begin());
  return holder;
}

}  // namespace

Result<std::unique_ptr<Controller>> Controller::start(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                      scheduling::RosterOptions shares) {
  PENSTOCK_ASSERT(keys.own_role() == Role::kController, "a controller was given the keys of another role");
  const auto id = draw_identity();
  if (!id) return id.error();
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  auto authenticator = net::Authenticator::start(*context.value());
  if (!authenticator) return authenticator.error();
  const net::ServerSocketOptions options{.allowed_roles = {Role::kWorker, Role::kTrainer, Role::kOperator},
                                         .limits = net::control_limits(),
                                         .room = kRoom};
  auto server = net::ServerSocket::bind(*context.value(), *authenticator.value(), endpoint, keys, options);
  if (!server) return server.error();
  return std::make_unique<Controller>(std::move(context).value(), std::move(authenticator).value(),
                                      std::move(server).value(), id.value(), std::move(shares));
}

Controller::Controller(std::unique_ptr<net::SocketContext> context, std::unique_ptr<net::Authenticator> authenticator,
                       std::unique_ptr<net::ServerSocket> server, uint64_t controller_id,
                       scheduling::RosterOptions shares)
    : context_(std::move(context)),
      authenticator_(std::move(authenticator)),
      server_(std::move(server)),
      roster_(controller_id, clock_now(), std::move(shares)),
      standing_{.endpoint = server_->endpoint().text()} {}

Result<void> Controller::run(int stop_fd, const Log& log) {
  const std::array<net::Waitable, 1> sockets{server_->waitable()};
  const std::array<int, 1> fds{stop_fd};
  std::array<bool, 1> is_readable{};
  for (;;) {
    const auto has_more = serve();
    if (!has_more) return has_more.error();
    log_events(log);
    const auto timeout = has_more.value() ? std::chrono::milliseconds(0) : wait_time(roster_.next_tick(), clock_now());
    if (auto waited = net::wait_readable(sockets, fds, is_readable, timeout); !waited) return waited;
    if (is_readable[0]) return {};
  }
}

void Controller::log_events(const Log& log) {
  for (const scheduling::MemberEvent& event : roster_.take_events()) {
    if (!log) continue;
    const std::string who = std::string(event.is_worker ? "worker " : "trainer ") + format_id(event.id).substr(0, 8);
    log(event.has_joined ? who + " joined: " + event.text : who + " left: " + event.text, event.is_failure);
  }
}

Result<bool> Controller::serve() {
  bool has_more = true;
  for (int count = 0; count < kMessagesPerTurn && has_more; ++count) {
    auto received = server_->try_receive(receipt_);
    if (!received) return received.error();
    has_more = received.value();
    if (has_more) receive(receipt_, clock_now());
  }
  roster_.tick(clock_now());
  push_orders();
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
                                    "controller, which accepts only messages of one part");
  const auto message = wire::parse_control(receipt.parts.front().bytes());
  if (!message) return refuse(receipt.peer, message.error().message);
  take(receipt.peer, message.value(), now);
}

void Controller::take(const net::Peer& peer, const wire::ControlMessage& message, Instant now) {
  const Role role = peer.identity.role;
  if (const auto* worker = std::get_if<wire::WorkerReport>(&message); worker != nullptr && role == Role::kWorker) {
    if (!is_own_run(peer, worker->worker_id, worker->secret, now)) return;
    if (!may_report(peer, worker->worker_id, now)) return;
    return send(peer.routing_id, roster_.worker_reported(*worker, now, holder_of(peer)));
  }
  if (const auto* trainer = std::get_if<wire::TrainerReport>(&message); trainer != nullptr && role == Role::kTrainer) {
    if (!is_own_run(peer, trainer->trainer_id, trainer->secret, now)) return;
    if (!may_report(peer, trainer->trainer_id, now)) return;
    trainers_[trainer->trainer_id] = peer.routing_id;
    costs_.reported(*trainer, now, peer.user);
    const auto roster = roster_.trainer_reported(*trainer, now, peer.user);
    push_orders();  // so that its workers expect the trainer when it connects
    return send(peer.routing_id, roster);
  }
  if (const auto* plan = std::get_if<wire::PlanReport>(&message); plan != nullptr && role == Role::kTrainer) {
    if (!is_own_run(peer, plan->trainer_id, plan->secret, now)) return;
    if (!trainers_.contains(plan->trainer_id)) return;  // it reports itself first, and then its plan again
    plans_[plan->trainer_id] = {.json = plan->json, .change_count = plan->change_count};
    return;
  }
  const auto* deregistration = std::get_if<wire::Deregistration>(&message);
  if (deregistration != nullptr && role == (deregistration->is_worker ? Role::kWorker : Role::kTrainer)) {
    if (!is_own_run(peer, deregistration->id, deregistration->secret, now)) return;
    if (deregistration->is_worker) return roster_.worker_left(deregistration->id, now);
    costs_.left(deregistration->id);
    plans_.erase(deregistration->id);
    return roster_.trainer_left(deregistration->id, now);
  }
  if (role == Role::kOperator) return take_of_operator(peer, message, now);
  refuse_role(peer);
}

// The id alone is widely known: the status and dashboards show it.
bool Controller::is_own_run(const net::Peer& peer, uint64_t id, const wire::RunSecret& secret, Instant now) {
  if (net::run_id_of(peer.identity.key, secret) == id) return true;
  const std::string what(net::role_name(peer.identity.role));
  note_offence(peer, "claimed to be " + what + " " + format_id(id) + ", but is not", now);
  refuse(peer,
         what + " " + format_id(id) + " belongs to another key or process; a process must report only its own run");
  return false;
}

void Controller::note_offence(const net::Peer& peer, const std::string& deed, Instant now) {
  const std::string name = name_of_key(peer);
  Offences& offences = standing_.offences;
  if (offences.size() >= kOffendersMax && !offences.contains(name)) {
    offences.erase(std::min_element(offences.begin(), offences.end(),
                                    [](const auto& a, const auto& b) { return a.second.at < b.second.at; }));
  }
  Offence& offence = offences[name];
  offence.text = "a process with the key of " + name + " " + deed;
  offence.at = now;
  ++offence.count;
}

// A connection represents one process, so that one key cannot fill the pool with workers or trainers that do not exist.
bool Controller::may_report(const net::Peer& peer, uint64_t id, Instant now) {
  const Role role = peer.identity.role;
  const std::string what(net::role_name(role));
  const Reporter reporter{role, id};
  const auto bound = reporter_at_.find(peer.routing_id);
  if (bound != reporter_at_.end() && bound->second != reporter) {
    refuse(peer, "a connection must report one " + what + ", got reports of " + format_id(bound->second.second) +
                     " and " + format_id(id) + "; connect once for each");
    return false;
  }
  const bool is_known = role == Role::kWorker ? roster_.has_worker(id) : roster_.has_trainer(id);
  if (!is_known && !may_come(peer, what, now)) return false;
  if (bound != reporter_at_.end()) return true;
  std::string& connection = connection_of_[reporter];
  reporter_at_.erase(connection);  // its previous connection
  connection = peer.routing_id;
  reporter_at_.emplace(connection, reporter);
  return true;
}

// A controller that has just started knows no processes yet.
bool Controller::may_come(const net::Peer& peer, const std::string& what, Instant now) {
  const std::string key_name = name_of_key(peer);
  if (roster_.is_settled(now) && !newcomers_.take(key_name, now)) {
    const std::string most = std::to_string(static_cast<int>(session::kNewcomersPerSecond)) + " new ones a second";
    note_offence(peer, "connected one " + what + " more than the limit of " + most + " per key", now);
    refuse_for_now(peer, "the key of " + key_name + " connects more " + what + "s than the limit of " + most +
                             "; this one has to wait");
    return false;
  }
  const bool has_room = peer.identity.role == Role::kWorker ? roster_.make_room_for_worker(holder_of(peer), now)
                                                            : roster_.make_room_for_trainer(peer.user, now);
  if (!has_room)
    refuse_for_now(peer, "this pool already has " + std::to_string(scheduling::kPoolCountMax) + " " + what +
                             "s, which is the maximum; wait until some end, or start another controller");
  return has_room;
}

void Controller::take_of_operator(const net::Peer& peer, const wire::ControlMessage& message, Instant now) {
  if (std::holds_alternative<wire::StatusRequest>(message)) {
    standing_.key_trouble = server_->key_trouble();
    return send(peer.routing_id,
                wire::Status{status_json(roster_, scaling_, plans_, standing_, now, wire::kControlTextBytesMax)});
  }
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
  refuse(peer, "the key belongs to a " + std::string(net::role_name(peer.identity.role)) +
                   ", which may not send this request to a controller; use a key of the right role");
}

void Controller::refuse(const net::Peer& peer, std::string reason) {
  ++counters_.refused;
  send(peer.routing_id, wire::Refusal{std::move(reason)});
}

void Controller::refuse_for_now(const net::Peer& peer, std::string reason) {
  ++counters_.refused;
  send(peer.routing_id, wire::Refusal{.reason = std::move(reason), .is_for_now = true});
}

void Controller::push_orders() {
  for (const auto& [worker_id, orders] : roster_.take_orders()) {
    const auto known = connection_of_.find({Role::kWorker, worker_id});
    if (known != connection_of_.end()) send(known->second, orders);
  }
}

void Controller::push_rosters() {
  for (const uint64_t trainer_id : roster_.changed_trainers()) {
    const auto roster = roster_.roster_of(trainer_id);
    if (const auto known = trainers_.find(trainer_id); known != trainers_.end()) send(known->second, roster);
  }
  forget_reporters();
  if (trainers_.size() <= 2 * roster_.trainers(clock_now()).size() + 16) return;
  std::set<uint64_t> alive;  // with routing ids still in use
  for (const auto& trainer : roster_.trainers(clock_now())) alive.insert(trainer.report.trainer_id);
  std::erase_if(trainers_, [&](const auto& item) { return !alive.contains(item.first); });
  std::erase_if(plans_, [&](const auto& item) { return !alive.contains(item.first); });
}

// Forgets the reporters that have left. One that reports again is bound again.
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
