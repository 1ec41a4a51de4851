// SPDX-License-Identifier: Apache-2.0
#include "controller/operator_request.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <variant>

#include "transport/client_socket.h"
#include "transport/control_limits.h"
#include "transport/readiness.h"

namespace penstock::controller {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using transport::ConnectionEvent;

Result<transport::ControlMessage> ask_controller(const transport::Endpoint& endpoint, const transport::KeyRing& keys,
                                                 const transport::ControlMessage& question,
                                                 steady_clock::time_point deadline) {
  transport::SocketContext context;
  auto connected = transport::ClientSocket::connect(context, endpoint, keys.own(), keys.controller_key(),
                                                    {.limits = transport::control_limits()});
  if (!connected) return connected.error();
  transport::ClientSocket& client = *connected.value();
  const auto bytes = transport::write_control(question);
  bool is_asked = false;
  transport::ClientReceipt receipt;
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
      auto answer = transport::parse_control(receipt.parts.front().bytes());
      if (!answer) return answer.error();
      if (auto* refusal = std::get_if<transport::Refusal>(&answer.value()))
        return Error{Errc::kFailed, "the controller at " + endpoint.text() + " refused: " + refusal->reason};
      return answer;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) {
      return Error{Errc::kTimeout, "no controller answered at " + endpoint.text() +
                                       "; start one there (penstock controller --bind " + endpoint.text() +
                                       "), or name the address of the one that runs"};
    }
    if (auto waited = transport::wait_readable(client.waitables(), {}, {}, left); !waited) return waited.error();
  }
}

}  // namespace penstock::controller
