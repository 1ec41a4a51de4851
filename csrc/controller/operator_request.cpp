// SPDX-License-Identifier: Apache-2.0
#include "controller/operator_request.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "net/client_socket.h"
#include "net/socket.h"
#include "net/tcp_socket.h"

namespace penstock::controller {

using net::ConnectionEvent;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

// A controller to which many clients without a known key connect closes one of the connections to make room, and it may
// close this one. A controller with other keys refuses every attempt.
constexpr int kRefusalsMax = 3;

}  // namespace

Result<wire::ControlMessage> query_controller(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                              const wire::ControlMessage& question, steady_clock::time_point deadline) {
  auto resolver = net::Resolver::open();
  if (!resolver) return resolver.error();
  const auto context = net::SocketContext::open();
  if (!context) return context.error();
  auto connected = net::ClientSocket::connect(*context.value(), *resolver.value(), endpoint, keys,
                                              net::Role::kController, {.limits = net::control_limits()});
  if (!connected) return connected.error();
  net::ClientSocket& client = *connected.value();
  const auto bytes = wire::write_control(question);
  bool is_request_sent = false;
  int refusal_count = 0;
  std::string refusal;
  const std::array<int, 1> fds{resolver.value()->fd()};
  std::array<bool, 1> is_looked_up{};
  net::ClientReceipt receipt;
  for (;;) {
    static_cast<void>(resolver.value()->take_done());
    while (const auto event = client.try_event()) {
      if (event->kind == ConnectionEvent::Kind::kConnected) {
        refusal.clear();
        refusal_count = 0;
      }
      if (event->kind == ConnectionEvent::Kind::kRefused) {
        refusal = event->reason;
        if (event->is_final || ++refusal_count == kRefusalsMax) return Fault{Errc::kClosed, refusal};
      }
      if (event->kind == ConnectionEvent::Kind::kDisconnected) is_request_sent = false;
    }
    if (client.is_connected() && !is_request_sent) is_request_sent = static_cast<bool>(client.send(bytes));
    auto received = client.try_receive(receipt);
    if (!received) return received.error();
    if (received.value()) {
      if (receipt.parts.size() != 1) return Fault{Errc::kMalformed, "the controller's answer must have one part"};
      auto answer = wire::parse_control(receipt.parts.front().bytes());
      if (!answer) return answer.error();
      if (auto* refused = std::get_if<wire::Refusal>(&answer.value()))
        return Fault{Errc::kFailed, "the controller at " + endpoint.text() + " refused: " + refused->reason};
      return answer;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (!client.lookup_failure().empty()) {
      return Fault{Errc::kClosed, "the controller at " + endpoint.text() + " cannot be resolved: no " +
                                      "address is known for this name (" + client.lookup_failure() +
                                      "); correct the name, or use its address"};
    }
    if (left.count() <= 0) {
      if (!refusal.empty()) return Fault{Errc::kClosed, refusal};
      return Fault{Errc::kTimeout, "no controller answered at " + endpoint.text() +
                                       "; start one there (penstock controller --bind " + endpoint.text() +
                                       "), or pass the address of the running controller"};
    }
    const auto due = client.due_at();
    const auto timeout = due ? std::min(left, wait_time(due, clock_now())) : left;
    if (auto waited = net::wait_readable(client.waitables(), fds, is_looked_up, timeout); !waited)
      return waited.error();
  }
}

}  // namespace penstock::controller
