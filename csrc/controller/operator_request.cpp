// SPDX-License-Identifier: Apache-2.0
#include "controller/operator_request.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <variant>

#include "net/client_socket.h"
#include "net/control_limits.h"
#include "net/readiness.h"

namespace penstock::controller {

using net::ConnectionEvent;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

Result<wire::ControlMessage> ask_controller(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                            const wire::ControlMessage& question, steady_clock::time_point deadline) {
  net::SocketContext context;
  auto connected = net::ClientSocket::connect(context, endpoint, keys.own(), keys.controller_key(),
                                              {.limits = net::control_limits()});
  if (!connected) return connected.error();
  net::ClientSocket& client = *connected.value();
  const auto bytes = wire::write_control(question);
  bool is_asked = false;
  net::ClientReceipt receipt;
  for (;;) {
    while (const auto event = client.try_event()) {
      if (event->kind == ConnectionEvent::Kind::kRefused) return Error{Errc::kClosed, event->reason};
      if (event->kind == ConnectionEvent::Kind::kDisconnected) is_asked = false;
    }
    if (client.is_connected() && !is_asked) is_asked = static_cast<bool>(client.send(bytes));
    auto received = client.try_receive(receipt);
    if (!received) return received.error();
    if (received.value()) {
      if (receipt.parts.size() != 1) return Error{Errc::kMalformed, "the controller's answer is not in one part"};
      auto answer = wire::parse_control(receipt.parts.front().bytes());
      if (!answer) return answer.error();
      if (auto* refusal = std::get_if<wire::Refusal>(&answer.value()))
        return Error{Errc::kFailed, "the controller at " + endpoint.text() + " refused: " + refusal->reason};
      return answer;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) {
      return Error{Errc::kTimeout, "no controller answered at " + endpoint.text() +
                                       "; start one there (penstock controller --bind " + endpoint.text() +
                                       "), or name the address of the one that runs"};
    }
    if (auto waited = net::wait_readable(client.waitables(), {}, {}, left); !waited) return waited.error();
  }
}

}  // namespace penstock::controller
