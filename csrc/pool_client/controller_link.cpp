// SPDX-License-Identifier: Apache-2.0
#include "pool_client/controller_link.h"

#include <utility>
#include <variant>

#include "net/control_limits.h"
#include "wire/control_record.h"

namespace penstock::pool_client {

using net::ConnectionEvent;

Result<std::unique_ptr<ControllerLink>> ControllerLink::connect(net::SocketContext& context, net::Resolver& resolver,
                                                                const net::Endpoint& endpoint, const net::KeyRing& keys,
                                                                Instant now) {
  auto socket = net::ClientSocket::connect(context, resolver, endpoint, keys, net::Role::kController,
                                           {.limits = net::control_limits()});
  if (!socket) return socket.error();
  return std::make_unique<ControllerLink>(std::move(socket).value(), now);
}

Result<void> ControllerLink::receive(Instant now) {
  net::ClientReceipt receipt;
  for (;;) {
    auto received = socket_->try_receive(receipt);
    if (!received) return received.error();
    if (!received.value()) break;
    if (receipt.parts.size() != 1) continue;  // no controller of this version sends that
    if (auto taken = take(receipt.parts.front().bytes(), now); !taken) return taken.error();
  }
  while (const auto event = socket_->try_event()) {
    if (event->kind == ConnectionEvent::Kind::kConnected) {
      trouble_.clear();
      enrolment_.clock.connected(now);
    }
    if (event->kind != ConnectionEvent::Kind::kRefused) continue;
    if (event->is_final) return Fault{Errc::kClosed, event->reason};
    trouble_ = event->reason;
  }
  return {};
}

Result<void> ControllerLink::take(std::span<const std::byte> bytes, Instant now) {
  auto message = wire::parse_control(bytes);
  if (!message)
    return Fault{message.error().code, "the controller at " + socket_->endpoint().text() +
                                           " sent an unreadable message: " + message.error().message};
  if (const auto* refusal = std::get_if<wire::Refusal>(&message.value())) {
    if (refusal->is_for_now) {
      enrolment_.clock.heard(now);
      trouble_ = refusal->reason;
      return {};
    }
    return Fault{Errc::kClosed,
                 "the controller at " + socket_->endpoint().text() + " rejected this trainer: " + refusal->reason};
  }
  auto* roster = std::get_if<wire::TrainerRoster>(&message.value());
  if (roster == nullptr) return {};
  has_answered_ = true;
  trouble_.clear();
  if (enrolment_.receive(*roster, now)) roster_ = std::move(*roster);
  return {};
}

bool ControllerLink::report(const std::function<wire::TrainerReport()>& make_report, Instant now) {
  if (!enrolment_.clock.take(now)) return false;
  if (socket_->is_connected() && enrolment_.clock.take_renewal(now)) socket_->renew();
  // A report that is lost is replaced by the next.
  if (socket_->is_connected()) static_cast<void>(socket_->send(wire::write_control(make_report())));
  return true;
}

void ControllerLink::tell_plan(const wire::PlanReport& plan) {
  if (socket_->is_connected()) static_cast<void>(socket_->send(wire::write_control(plan)));
}

void ControllerLink::say_farewell(const wire::TrainerReport& last) {
  static_cast<void>(socket_->send(wire::write_control(last)));
  static_cast<void>(socket_->send(
      wire::write_control(wire::Farewell{.id = last.trainer_id, .is_worker = false, .secret = last.secret})));
  socket_->set_linger(net::kFarewellTime);
}

}  // namespace penstock::pool_client
