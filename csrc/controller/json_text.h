// SPDX-License-Identifier: Apache-2.0
#pragma once
// Building blocks of the controller's JSON answers to operators.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::controller {

// Strings come from peers: all bytes other than plain ASCII are escaped one by one, so that the result is always JSON.
std::string json_quoted(std::string_view text);
const char* yes_or_no(bool value);

std::string number(double value);
// For a batch or a sample, which may take microseconds.
std::string fine_number(double value);
// With 15 digits for any magnitude; whole numbers are exact.
std::string exact_number(double value);
std::string seconds(std::chrono::nanoseconds time);
std::string number_or_null(std::optional<double> value);
std::string exact_or_null(std::optional<double> value);

struct EntryList {
  std::string json{};  // the entries, without brackets
  size_t left_out_count = 0;
};

// Omits each entry that does not fit, and only these: a large entry must not hide the following ones.
template <typename Entry, typename ToJson>
EntryList list_of(const std::vector<Entry>& entries, const ToJson& to_json, size_t bytes_max) {
  EntryList list;
  for (const Entry& entry : entries) {
    const std::string text = (list.json.empty() ? "" : ", ") + to_json(entry);
    if (list.json.size() + text.size() > bytes_max) {
      ++list.left_out_count;
    } else {
      list.json += text;
    }
  }
  return list;
}

}  // namespace penstock::controller
