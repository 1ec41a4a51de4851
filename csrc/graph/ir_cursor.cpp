// SPDX-License-Identifier: Apache-2.0
#include "graph/ir_cursor.h"

#include <charconv>

#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

// Not the <cctype> functions: they read the process's locale.
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_char(char c) { return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

}  // namespace

bool Cursor::next_line() {
  while (ok() && !text_.empty()) {
    const size_t end = text_.find('\n');
    line_ = text_.substr(0, end);
    text_ = end == std::string_view::npos ? std::string_view() : text_.substr(end + 1);
    ++line_number_;
    position_ = 0;
    if (!at_line_end()) return true;
  }
  return false;
}

void Cursor::fail(std::string_view expected, Errc code) {
  if (error_) return;
  std::string seen = "the end of the line";
  if (position_ < line_.size()) {
    seen = "'";
    for (const char c : line_.substr(position_, 16)) seen += c >= 0x20 && c < 0x7f ? c : '?';
    seen += "'";
  }
  error_ = Fault{code, "the graph's text has " + seen + " at line " + std::to_string(line_number_) + ", column " +
                           std::to_string(position_ + 1) + " where " + std::string(expected) + " was expected"};
}

void Cursor::skip_blanks() {
  while (current() == ' ') ++position_;
}

bool Cursor::at_line_end() {
  skip_blanks();
  return position_ == line_.size();
}

bool Cursor::peek(std::string_view token) {
  skip_blanks();
  return ok() && line_.substr(position_, token.size()) == token;
}

bool Cursor::try_take(std::string_view token) {
  if (!peek(token)) return false;
  // A word must end with the token: `group` does not match the start of `groups`.
  const size_t end = position_ + token.size();
  if (is_name_char(token.back()) && end < line_.size() && is_name_char(line_[end])) return false;
  position_ = end;
  return true;
}

void Cursor::take(std::string_view token) {
  if (ok() && !try_take(token)) fail("'" + std::string(token) + "'");
}

void Cursor::take_line_end() {
  if (ok() && !at_line_end()) fail("the end of the line");
}

std::string Cursor::take_name() {
  skip_blanks();
  const size_t start = position_;
  while (is_name_char(current())) ++position_;
  const size_t size = position_ - start;
  if (size == 0 || size > kNameBytesMax) {
    position_ = start;
    fail("a name of 1 to " + std::to_string(kNameBytesMax) + " letters, digits or '_'");
    return {};
  }
  return std::string(line_.substr(start, size));
}

std::string Cursor::take_operator() {
  std::string op = take_name();
  if (!peek("::")) fail("'::' and the rest of an operator's name");
  while (ok() && try_take("::")) op += "::" + take_name();
  if (ok() && try_take(".")) op += "." + take_name();
  if (ok() && op.size() > kNameBytesMax)
    fail("an operator's name of at most " + std::to_string(kNameBytesMax) + " bytes");
  return op;
}

int Cursor::take_hex_digit() {
  const char c = current();
  int digit = -1;
  if (is_digit(c)) digit = c - '0';
  if (c >= 'a' && c <= 'f') digit = c - 'a' + 10;
  if (digit >= 0) ++position_;
  return digit;
}

std::string Cursor::take_quoted() {
  take("\"");
  std::string content;
  while (ok()) {
    if (position_ >= line_.size()) fail("a closing '\"'");
    if (content.size() > kQuotedBytesMax)
      fail("a quoted text of at most " + std::to_string(kQuotedBytesMax) + " bytes", Errc::kTooLarge);
    if (!ok()) break;
    const char c = line_[position_++];
    if (c == '"') return content;
    if (c != '\\') {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
        --position_;
        fail("a printable character or an escape");
      }
      content += c;
      continue;
    }
    const char escape = current();
    if (position_ < line_.size()) ++position_;
    switch (escape) {
      case '"': content += '"'; break;
      case '\\': content += '\\'; break;
      case 'n': content += '\n'; break;
      case 'r': content += '\r'; break;
      case 't': content += '\t'; break;
      case 'x': {
        const int high = take_hex_digit();
        const int low = high < 0 ? -1 : take_hex_digit();
        if (low < 0) fail("two hex digits in lower case");
        content += static_cast<char>(high * 16 + low);
        break;
      }
      default: fail("an escape among \\\" \\\\ \\n \\r \\t \\xHH");
    }
  }
  return {};
}

std::string Cursor::take_digest() {
  std::string digest = take_quoted();
  bool is_hex = digest.size() == 32;
  for (const char c : digest) is_hex = is_hex && (is_digit(c) || (c >= 'a' && c <= 'f'));
  if (ok() && !is_hex) fail("32 hex digits in quotes before this");
  return digest;
}

uint32_t Cursor::take_count(uint32_t max) {
  skip_blanks();
  const size_t start = position_;
  while (is_digit(current())) ++position_;
  uint32_t count = 0;
  const auto [end, failure] = std::from_chars(line_.data() + start, line_.data() + position_, count);
  if (position_ == start || failure != std::errc() || count > max) {
    position_ = start;
    fail("a number from 0 to " + std::to_string(max));
    return 0;
  }
  return count;
}

std::string_view Cursor::take_number() {
  skip_blanks();
  const size_t start = position_;
  if (current() == '-') ++position_;
  while (is_name_char(current()) || current() == '.' ||
         ((current() == '-' || current() == '+') && line_[position_ - 1] == 'e'))
    ++position_;
  return line_.substr(start, position_ - start);
}

}  // namespace penstock::graph
