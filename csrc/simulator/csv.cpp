// SPDX-License-Identifier: Apache-2.0
#include "simulator/csv.h"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <sstream>

namespace penstock::simulator {
namespace {

constexpr size_t kShownMax = 40;  // bytes of a field in a message

std::string shown(std::string_view field) {
  return "'" + std::string(field.substr(0, kShownMax)) + (field.size() > kShownMax ? "...'" : "'");
}

std::string text_of(double number) {
  std::ostringstream out;
  out.precision(15);
  out << number;
  return out.str();
}

Result<double> number_in(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                         NumberRange range, bool is_whole) {
  const std::string_view field = row.fields[column];
  double value = 0;
  const auto [end, code] = std::from_chars(field.data(), field.data() + field.size(), value);
  const bool is_number = code == std::errc() && end == field.data() + field.size() && std::isfinite(value);
  if (is_number && value >= range.low && value <= range.high && (!is_whole || value == std::floor(value))) return value;
  return csv_error(file, row.line, std::string(name) + " is " + shown(field),
                   std::string(is_whole ? "a whole number" : "a number") + " from " + text_of(range.low) + " to " +
                       text_of(range.high));
}

}  // namespace

std::vector<CsvRow> csv_rows(std::string_view text) {
  std::vector<CsvRow> rows;
  for (size_t line = 1; !text.empty(); ++line) {
    const size_t end = text.find('\n');
    std::string_view here = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (here.ends_with('\r')) here.remove_suffix(1);
    if (here.empty() || here.front() == '#') continue;
    CsvRow row{.line = line};
    for (size_t comma = here.find(','); comma != std::string_view::npos; comma = here.find(',')) {
      row.fields.push_back(here.substr(0, comma));
      here.remove_prefix(comma + 1);
    }
    row.fields.push_back(here);
    rows.push_back(std::move(row));
  }
  return rows;
}

Fault csv_error(std::string_view file, size_t line, const std::string& seen, const std::string& expected) {
  return {Errc::kMalformed, std::string(file) + ", line " + std::to_string(line) + ": " + seen + "; expected " +
                                expected + "; correct this line"};
}

Result<double> csv_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                          NumberRange range) {
  return number_in(file, row, column, name, range, false);
}

Result<double> csv_whole_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                                NumberRange range) {
  return number_in(file, row, column, name, range, true);
}

}  // namespace penstock::simulator
