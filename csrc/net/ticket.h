// SPDX-License-Identifier: Apache-2.0
#pragma once
// The token that a trainer shows to be admitted where a worker serves the pieces of batches. Each ticket is valid once.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/wiped.h"

namespace penstock::net {

// The name for a ticket in ZeroMQ's PLAIN, and the User-Id of a client that was admitted by one.
constexpr std::string_view kTicketHolder = "ticket";

// Wiped when it is destroyed or replaced. Thread-compatible.
class Ticket {
 public:
  // At most 255 characters, since it is sent as PLAIN's password.
  explicit Ticket(std::string text) : text_(std::move(text)) {}
  Ticket(const Ticket&) = default;
  Ticket& operator=(const Ticket& other) {
    Ticket copy(other);
    text_.swap(copy.text_);
    return *this;
  }
  ~Ticket() { wipe(std::as_writable_bytes(std::span(text_))); }

  const std::string& text() const { return text_; }

  // Takes the same time regardless of where the two differ, so that a ticket cannot be guessed character by character.
  bool is(std::string_view shown) const {
    if (shown.size() != text_.size()) return false;
    volatile unsigned char difference = 0;
    for (size_t place = 0; place < text_.size(); ++place)
      difference = difference | static_cast<unsigned char>(shown[place] ^ text_[place]);
    return difference == 0;
  }

 private:
  std::string text_;
};

}  // namespace penstock::net
