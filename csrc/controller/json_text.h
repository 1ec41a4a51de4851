// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pieces of the JSON that a controller answers operators with.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::controller {

// Texts come from peers: whatever is no plain ASCII is escaped byte by byte, so that the result is JSON in any case.
std::string json_quoted(std::string_view text);
const char* yes_or_no(bool value);

std::string number(double value);
// Of a batch or a sample, which may take microseconds.
std::string fine_number(double value);
// With 15 digits, however large or small it is: whole numbers as they are.
std::string exact_number(double value);
std::string seconds(std::chrono::nanoseconds time);
std::string number_or_null(std::optional<double> value);
std::string exact_or_null(std::optional<double> value);

struct EntryList {
  std::string json{};  // the entries alone
  size_t left_out_count = 0;
};

// Leaves out each entry that does not fit, and no other: one large entry must not hide those behind it.
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
