// SPDX-License-Identifier: Apache-2.0
#pragma once
// The Cursor reads the tokens of the IR text, from which parse_graph() (ir_text.h) makes statements.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::graph {

// Reads the tokens of the IR text, one line at a time. After the first unexpected token the cursor stays in a failed
// state, with line and column, so that a statement can be read as a whole and checked once. Thread-compatible.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}

  // Moves to the next line that is not empty; returns false at the end of the text.
  bool next_line();

  bool ok() const { return !error_.has_value(); }
  const Fault& error() const { return *error_; }
  void fail(std::string_view expected, Errc code = Errc::kMalformed);  // only the first failure counts

  bool at_line_end();
  bool peek(std::string_view token);      // does the token follow, blanks skipped?
  bool try_take(std::string_view token);  // the same, and takes it
  void take(std::string_view token);      // must be next
  void take_line_end();

  std::string take_name();      // letters, digits, '_'
  std::string take_operator();  // ns::name.overload
  std::string take_quoted();
  std::string take_digest();          // 32 hex digits in quotes
  uint32_t take_count(uint32_t max);  // only digits
  std::string_view take_number();     // an integer's or float's characters, not yet parsed

 private:
  void skip_blanks();
  char current() const { return position_ < line_.size() ? line_[position_] : '\0'; }
  int take_hex_digit();

  std::string_view text_;  // the lines after the current one
  std::string_view line_;
  size_t line_number_ = 0;
  size_t position_ = 0;
  std::optional<Fault> error_;
};

}  // namespace penstock::graph
