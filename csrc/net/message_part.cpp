// SPDX-License-Identifier: Apache-2.0
#include "net/message_part.h"

#include <zmq.h>

#include "base/assert.h"

namespace penstock::net {
namespace {

zmq_msg_t* message(void* storage) { return static_cast<zmq_msg_t*>(storage); }

}  // namespace

ReceivedPart::ReceivedPart() {
  static_assert(sizeof(zmq_msg_t) == sizeof storage_ && alignof(zmq_msg_t) <= alignof(void*));
  zmq_msg_init(message(handle()));
}

ReceivedPart::ReceivedPart(ReceivedPart&& other) noexcept : ReceivedPart() { *this = std::move(other); }

ReceivedPart& ReceivedPart::operator=(ReceivedPart&& other) noexcept {
  // Closes this part's message and takes the other's, which is empty afterwards.
  if (this != &other) zmq_msg_move(message(handle()), message(other.handle()));
  return *this;
}

ReceivedPart::~ReceivedPart() { zmq_msg_close(message(handle())); }

std::span<const std::byte> ReceivedPart::bytes() const {
  auto* part = const_cast<zmq_msg_t*>(reinterpret_cast<const zmq_msg_t*>(storage_.data()));
  return {static_cast<const std::byte*>(zmq_msg_data(part)), zmq_msg_size(part)};
}

}  // namespace penstock::net
