// SPDX-License-Identifier: Apache-2.0
#include "controller/json_text.h"

#include <array>
#include <cstdio>

namespace penstock::controller {
namespace {

std::string printed(const char* form, double value) {
  std::array<char, 400> text;  // the largest double has 309 digits before the point
  std::snprintf(text.data(), text.size(), form, value);
  return text.data();
}

}  // namespace

std::string json_quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      std::array<char, 8> escaped;
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", byte);
      result += escaped.data();
    }
  }
  return result + "\"";
}

const char* yes_or_no(bool value) { return value ? "true" : "false"; }

std::string number(double value) { return printed("%.3f", value); }
std::string fine_number(double value) { return printed("%.7f", value); }
std::string exact_number(double value) { return printed("%.15g", value); }
std::string seconds(std::chrono::nanoseconds time) { return number(std::chrono::duration<double>(time).count()); }
std::string number_or_null(std::optional<double> value) { return value ? number(*value) : "null"; }
std::string exact_or_null(std::optional<double> value) { return value ? exact_number(*value) : "null"; }

}  // namespace penstock::controller
