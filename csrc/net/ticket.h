// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a trainer shows to be let in where a worker gives out the pieces of batches. A ticket is good once.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/wiped.h"

namespace penstock::net {

// The name of ZeroMQ's PLAIN that goes with a ticket, and the User-Id of whoever was let in by one.
constexpr std::string_view kTicketHolder = "ticket";

// Wiped when it is dropped or replaced. Thread-compatible.
class Ticket {
 public:
  // Of characters, at most 255, since it crosses as PLAIN's password.
  explicit Ticket(std::string text) : text_(std::move(text)) {}
  Ticket(const Ticket&) = default;
  Ticket& operator=(const Ticket& other) {
    Ticket copy(other);
    text_.swap(copy.text_);
    return *this;
  }
  ~Ticket() { wipe(std::as_writable_bytes(std::span(text_))); }

  const std::string& text() const { return text_; }

  // Takes as long wherever the two differ, so that nobody finds a ticket out character by character.
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
