// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rows of a CSV table without quotes. Empty lines and lines that start with '#' are skipped. Pure.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace penstock::simulator {

struct CsvRow {
  size_t line = 0;  // from 1
  std::vector<std::string_view> fields{};
};

// Views into `text`, without the carriage return at the end of a line.
std::vector<CsvRow> csv_rows(std::string_view text);

// kMalformed: "FILE, line N: SEEN; EXPECTED".
Fault csv_error(std::string_view file, size_t line, const std::string& seen, const std::string& expected);

struct NumberRange {
  double low = 0;
  double high = 0;
};

// The number in a field, which must be within the range.
Result<double> csv_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                          NumberRange range);
Result<double> csv_whole_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                                NumberRange range);

}  // namespace penstock::simulator
