// SPDX-License-Identifier: Apache-2.0
#include "server/registration.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>
#include <variant>

#include "net/tcp_socket.h"
#include "wire/control_record.h"

namespace penstock::server {

using net::ConnectionEvent;

namespace {

// A controller that is started together with its workers answers sooner.
constexpr Duration kUnansweredTime = std::chrono::seconds(3);

}  // namespace

Result<std::unique_ptr<Registration>> Registration::open(net::SocketContext& context, net::Resolver& resolver,
                                                         const net::Endpoint& controller, const net::KeyRing& keys,
                                                         Description description, Instant now) {
  auto socket = net::ClientSocket::connect(context, resolver, controller, keys, net::Role::kController,
                                           {.limits = net::control_limits()});
  if (!socket) return socket.error();
  return std::make_unique<Registration>(std::move(socket).value(), std::move(description), now);
}

Registration::Registration(std::unique_ptr<net::ClientSocket> socket, Description description, Instant now)
    : socket_(std::move(socket)),
      description_(std::move(description)),
      enrolment_(description_.run.id, now),
      opened_at_(now) {}

Result<void> Registration::receive(session::WorkerSession& session, Instant now) {
  net::ClientReceipt receipt;
  for (;;) {
    auto received = socket_->try_receive(receipt);
    if (!received) return received.error();
    if (!received.value()) break;
    if (receipt.parts.size() != 1) continue;  // our controllers never send that
    if (auto taken = take(receipt.parts.front().bytes(), session, now); !taken) return taken;
  }
  while (const auto event = socket_->try_event()) {
    if (event->kind == ConnectionEvent::Kind::kRefused && event->is_final) return Fault{Errc::kFailed, event->reason};
    take_event(*event, now);
  }
  enrolment_.tick(session, now);
  if (!socket_->is_connected() && last_notice_.empty() && now - opened_at_ >= kUnansweredTime) {
    tell("no controller answers at " + socket_->endpoint().text() +
         " yet; start one there (penstock controller "
         "--bind " +
         socket_->endpoint().text() + "), or pass the address of the running controller");
  }
  return {};
}

Result<void> Registration::take(std::span<const std::byte> bytes, session::WorkerSession& session, Instant now) {
  auto message = wire::parse_control(bytes);
  if (!message)
    return Fault{Errc::kFailed, where() + " sent a message that cannot be read: " + message.error().message};
  if (const auto* refusal = std::get_if<wire::Refusal>(&message.value())) {
    if (!refusal->is_for_now) return Fault{Errc::kFailed, where() + " rejected this worker: " + refusal->reason};
    enrolment_.clock.heard(now);
    tell(where() + " does not accept this worker yet: " + refusal->reason);
    return {};
  }
  const auto* orders = std::get_if<wire::WorkerOrders>(&message.value());
  if (orders == nullptr) return {};
  has_answered_ = true;
  enrolment_.receive(*orders, session, now);
  return {};
}

void Registration::take_event(const ConnectionEvent& event, Instant now) {
  switch (event.kind) {
    case ConnectionEvent::Kind::kConnected:
      enrolment_.clock.connected(now);
      if (!last_notice_.empty()) tell(where() + " answers");
      break;
    case ConnectionEvent::Kind::kDisconnected:
      tell(where() + " does not answer any more; this worker continues, and tries to reconnect");
      break;
    case ConnectionEvent::Kind::kRefused: tell(event.reason); break;
  }
}

void Registration::report(const session::WorkerSession& session, Duration stuck, Instant now) {
  if (!enrolment_.take(session, now) || !socket_->is_connected()) return;
  if (enrolment_.clock.take_renewal(now)) return socket_->renew();
  auto report = enrolment_.report(session);
  report.endpoint = description_.endpoint;
  report.about = description_.about;
  report.name = description_.name;
  report.job_kinds = description_.job_kinds;
  report.torch = description_.torch;
  host_ = host_load_.read(now);
  report.host = host_;
  report.kept_bytes = kept_bytes_;
  report.kept_answers = kept_answers_;
  if (description_.log) report.log = description_.log->text();
  report.secret = description_.run.secret;
  report.decline_reason = decline_reason_;
  const auto stuck_ms = std::chrono::duration_cast<std::chrono::milliseconds>(stuck).count();
  report.stuck_ms = static_cast<uint32_t>(std::min<int64_t>(stuck_ms, std::numeric_limits<uint32_t>::max()));
  // A lost report is made up for by the next one.
  static_cast<void>(socket_->send(wire::write_control(report)));
}

void Registration::set_decline_reason(std::string_view reason) {
  decline_reason_ = reason.substr(0, wire::kControlReasonBytesMax);
}

void Registration::deregister() {
  if (!socket_->is_connected()) return;
  static_cast<void>(socket_->send(wire::write_control(
      wire::Deregistration{.id = description_.run.id, .is_worker = true, .secret = description_.run.secret})));
  socket_->set_linger(net::kClosingLinger);
}

std::optional<Duration> Registration::time_since_answer(Instant now) const {
  if (has_answered_) return enrolment_.clock.time_since_answer(now);
  return description_.name.empty() ? std::nullopt : std::optional<Duration>(now - opened_at_);
}

void Registration::tell(std::string text) {
  if (text == last_notice_) return;
  last_notice_ = text;
  notices_.push_back(std::move(text));
}

}  // namespace penstock::server
