// SPDX-License-Identifier: Apache-2.0
#include "simulator/profile_table.h"

#include <algorithm>
#include <array>
#include <string>

#include "simulator/csv.h"

namespace penstock::simulator {
namespace {

constexpr std::string_view kProfileHeader = "model,class,iteration_s,batch[,sample_bytes],cpu1,cpu2,...";
constexpr std::array<std::string_view, 4> kProfileColumns{"model", "class", "iteration_s", "batch"};
constexpr std::array<std::string_view, 4> kClasses{"image", "language", "speech", "other"};
constexpr NumberRange kPositive{1e-9, 1e9};
constexpr NumberRange kBytes{0, 1e12};

struct Columns {
  bool has_bytes = false;
  size_t first_cpu = 0;
  size_t count = 0;
};

Result<Columns> parse_header(std::string_view file, const CsvRow& row) {
  const auto& fields = row.fields;
  Columns columns{.count = fields.size()};
  bool is_good = fields.size() > kProfileColumns.size() &&
                 std::equal(kProfileColumns.begin(), kProfileColumns.end(), fields.begin());
  columns.has_bytes = is_good && fields[kProfileColumns.size()] == "sample_bytes";
  columns.first_cpu = kProfileColumns.size() + (columns.has_bytes ? 1 : 0);
  is_good = is_good && columns.first_cpu < columns.count && columns.count - columns.first_cpu <= kTableCpusMax;
  for (size_t column = columns.first_cpu; is_good && column < columns.count; ++column)
    is_good = fields[column] == "cpu" + std::to_string(column - columns.first_cpu + 1);
  if (!is_good) return csv_error(file, row.line, "the first row has other columns", std::string(kProfileHeader));
  return columns;
}

Result<Profile> parse_profile(std::string_view file, const CsvRow& row, const Columns& columns) {
  if (row.fields.size() != columns.count)
    return csv_error(file, row.line, std::to_string(row.fields.size()) + " fields",
                     std::to_string(columns.count) + " as in the first row");
  if (row.fields[0].empty()) return csv_error(file, row.line, "the model has no name", "a name");
  if (std::find(kClasses.begin(), kClasses.end(), row.fields[1]) == kClasses.end())
    return csv_error(file, row.line, "class is '" + std::string(row.fields[1].substr(0, 40)) + "'",
                     "image, language, speech or other");
  Profile profile{.model = std::string(row.fields[0]), .model_class = std::string(row.fields[1])};
  auto iteration_s = csv_number(file, row, 2, "iteration_s", kPositive);
  if (!iteration_s) return iteration_s.error();
  auto batch = csv_number(file, row, 3, "batch", kPositive);
  if (!batch) return batch.error();
  profile.iteration_s = iteration_s.value();
  profile.batch = batch.value();
  if (columns.has_bytes) {
    auto bytes = csv_number(file, row, 4, "sample_bytes", kBytes);
    if (!bytes) return bytes.error();
    profile.sample_bytes = bytes.value();
  }
  for (size_t column = columns.first_cpu; column < columns.count; ++column) {
    const double least = profile.speeds.empty() ? kPositive.low : profile.speeds.back();  // CPUs slow no job down
    auto speed =
        csv_number(file, row, column, "cpu" + std::to_string(column - columns.first_cpu + 1), {least, kPositive.high});
    if (!speed) return speed.error();
    profile.speeds.push_back(speed.value());
  }
  return profile;
}

}  // namespace

Result<ProfileTable> parse_profiles(std::string_view file, std::string_view text) {
  const std::vector<CsvRow> rows = csv_rows(text);
  if (rows.empty()) return csv_error(file, 1, "the table is empty", std::string(kProfileHeader));
  auto columns = parse_header(file, rows[0]);
  if (!columns) return columns.error();
  ProfileTable table;
  for (size_t index = 1; index < rows.size(); ++index) {
    auto profile = parse_profile(file, rows[index], columns.value());
    if (!profile) return profile.error();
    table.profiles.push_back(std::move(profile).value());
  }
  if (table.profiles.empty()) return csv_error(file, rows[0].line, "no model follows the first row", "at least one");
  return table;
}

}  // namespace penstock::simulator
