// SPDX-License-Identifier: Apache-2.0
#include "simulator/world.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <sstream>
#include <string>

namespace penstock::simulator {
namespace {

Result<void> draw_models(const std::vector<Job*>& jobs, const std::vector<Profile>& profiles,
                         std::array<double, 3> split, uint64_t seed) {
  constexpr std::array<std::string_view, 3> kClasses{"image", "language", "speech"};
  std::array<std::vector<size_t>, 3> of_class;
  double sum = 0;
  for (size_t kind = 0; kind < kClasses.size(); ++kind) {
    for (size_t profile = 0; profile < profiles.size(); ++profile)
      if (profiles[profile].model_class == kClasses[kind]) of_class[kind].push_back(profile);
    if (split[kind] < 0 || (split[kind] > 0 && of_class[kind].empty()))
      return Fault{Errc::kMalformed, "the split gives " + std::to_string(split[kind]) + " to the class " +
                                         std::string(kClasses[kind]) + ", which has a total of " +
                                         std::to_string(of_class[kind].size()) + " profiles"};
    sum += split[kind];
  }
  if (!(sum > 0)) return Fault{Errc::kMalformed, "the split is 0 for every class, but must have a positive share"};
  std::mt19937_64 random(seed);
  for (Job* job : jobs) {
    double point = sum * static_cast<double>(random() >> 11) * 0x1p-53;
    size_t kind = 0;
    while (kind + 1 < split.size() && (point >= split[kind] || split[kind] == 0)) point -= split[kind++];
    while (of_class[kind].empty()) --kind;
    job->profile = of_class[kind][random() % of_class[kind].size()];
  }
  return {};
}

}  // namespace

double Profile::speed(double cpus_per_gpu) const {
  if (cpus_per_gpu >= static_cast<double>(speeds.size())) return speeds.back();
  const auto below = static_cast<size_t>(cpus_per_gpu);
  const double low = below == 0 ? 0.0 : speeds[below - 1];
  const double part = cpus_per_gpu - static_cast<double>(below);
  return part == 0 ? low : low + part * (speeds[below] - low);
}

double Profile::cpus_needed() const {
  const auto first = std::find(speeds.begin(), speeds.end(), speeds.back());
  return static_cast<double>(first - speeds.begin() + 1);
}

std::optional<CpuPolicy> cpu_policy_named(std::string_view name) {
  const auto found = std::find(kCpuPolicyNames.begin(), kCpuPolicyNames.end(), name);
  if (found == kCpuPolicyNames.end()) return std::nullopt;
  return static_cast<CpuPolicy>(found - kCpuPolicyNames.begin());
}

Result<void> assign_models(std::vector<Job>& jobs, const std::vector<Profile>& profiles, std::array<double, 3> split,
                           uint64_t seed) {
  std::vector<Job*> drawn;
  for (Job& job : jobs) {
    if (job.model.empty()) {
      drawn.push_back(&job);
      continue;
    }
    const auto found = std::find_if(profiles.begin(), profiles.end(),
                                    [&](const Profile& profile) { return profile.model == job.model; });
    if (found == profiles.end())
      return Fault{Errc::kMalformed, "a job has the model '" + job.model + "', which is not among " +
                                         std::to_string(profiles.size()) + " profiles; use one of them, or no model"};
    job.profile = static_cast<size_t>(found - profiles.begin());
  }
  return drawn.empty() ? Result<void>{} : draw_models(drawn, profiles, split, seed);
}

Result<void> check_world(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings) {
  if (cluster.gpu_count() == 0 || cluster.cpus_per_gpu == 0 || !(cluster.link_bytes_per_s >= 0))
    return Fault{Errc::kMalformed,
                 "the cluster has no server, GPU or CPU, or a negative bandwidth; at least one of each is required"};
  if (!(settings.interval_s > 0) || !(settings.horizon_s > 0) || !(settings.start_delay_s >= 0) ||
      !(settings.move_cost_s >= 0) || !(settings.noise >= 0) || !(settings.restart_cost_s >= 0))
    return Fault{Errc::kMalformed,
                 "an interval or a horizon is not positive, or a delay, a cost or the noise is negative"};
  for (const Profile& profile : profiles) {
    const bool rises = std::is_sorted(profile.speeds.begin(), profile.speeds.end());
    if (profile.speeds.empty() || !rises || !(profile.speeds.front() > 0) || !(profile.iteration_s > 0))
      return Fault{Errc::kMalformed,
                   "the profile of " + profile.model +
                       " has speeds that decrease or are not positive, but they must be positive and increasing"};
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const Job& it = jobs[job];
    const std::string name = "job " + std::to_string(job);
    if (it.gpus == 0 || it.gpus > cluster.gpu_count())
      return Fault{Errc::kMalformed, name + " has " + std::to_string(it.gpus) + " GPUs, but must have 1 to " +
                                         std::to_string(cluster.gpu_count()) + ", inclusive"};
    if (!(it.duration_s > 0) || !(it.submit_s >= 0) || !std::isfinite(it.duration_s + it.submit_s))
      return Fault{Errc::kMalformed, name + " has a time that is negative or not a number, or no duration"};
    if (it.profile >= profiles.size()) return Fault{Errc::kMalformed, name + " has no profile"};
  }
  return {};
}

namespace {

// A row of a table.
struct CsvRow {
  size_t line = 0;  // from 1
  std::vector<std::string_view> fields{};
};

struct NumberRange {
  double low = 0;
  double high = 0;
};

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

// "FILE, line N: SEEN; EXPECTED".
Fault csv_error(std::string_view file, size_t line, const std::string& seen, const std::string& expected) {
  return {Errc::kMalformed, std::string(file) + ", line " + std::to_string(line) + ": " + seen + "; expected " +
                                expected + "; correct this line"};
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

// The number in a field, which must be within the range.
Result<double> csv_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                          NumberRange range) {
  return number_in(file, row, column, name, range, false);
}

Result<double> csv_whole_number(std::string_view file, const CsvRow& row, size_t column, std::string_view name,
                                NumberRange range) {
  return number_in(file, row, column, name, range, true);
}

// Views into `text`, without the carriage return at the end of a line.
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

constexpr std::string_view kJobHeader = "submit_s,duration_s,num_gpus,vc[,model]";
constexpr std::array<std::string_view, 5> kJobColumns{"submit_s", "duration_s", "num_gpus", "vc", "model"};
constexpr size_t kJobColumnsMin = 4;
constexpr NumberRange kSeconds{0, 1e10};
constexpr NumberRange kGpus{0, 1e6};

// For synthetic jobs: the shares of jobs with 1, 2, 4, 8 and 16 GPUs, and the durations.
constexpr std::array<double, 5> kGpuShares{0.6, 0.1, 0.1, 0.15, 0.05};
constexpr double kMedianSeconds = 3600;
constexpr double kDurationSpread = 1.2;  // standard deviation of the logarithm
constexpr NumberRange kDurationSeconds{60, 2 * 86400};

Result<Job> parse_job(std::string_view file, const CsvRow& row, size_t column_count) {
  if (row.fields.size() != column_count)
    return csv_error(file, row.line, std::to_string(row.fields.size()) + " fields",
                     std::to_string(column_count) + " as in the first row");
  auto submit_s = csv_number(file, row, 0, kJobColumns[0], kSeconds);
  if (!submit_s) return submit_s.error();
  auto duration_s = csv_number(file, row, 1, kJobColumns[1], kSeconds);
  if (!duration_s) return duration_s.error();
  auto gpus = csv_whole_number(file, row, 2, kJobColumns[2], kGpus);
  if (!gpus) return gpus.error();
  return Job{.submit_s = submit_s.value(),
             .duration_s = duration_s.value(),
             .gpus = static_cast<uint32_t>(gpus.value()),
             .model = column_count > kJobColumnsMin ? std::string(row.fields[kJobColumnsMin]) : ""};
}

bool arrives_before(const Job& a, const Job& b) { return a.submit_s < b.submit_s; }

// In (0, 1], the same on every platform.
double uniform(std::mt19937_64& random) { return (static_cast<double>(random() >> 11) + 1) * 0x1p-53; }

double normal(std::mt19937_64& random) {
  const double radius = std::sqrt(-2 * std::log(uniform(random)));
  return radius * std::cos(2 * std::numbers::pi * uniform(random));
}

Job synthetic_job(uint32_t gpu_count, std::mt19937_64& random) {
  double point = uniform(random);
  size_t power = 0;
  while (power + 1 < kGpuShares.size() && point > kGpuShares[power]) point -= kGpuShares[power++];
  const double duration_s = kMedianSeconds * std::exp(kDurationSpread * normal(random));
  return {.duration_s = std::clamp(duration_s, kDurationSeconds.low, kDurationSeconds.high),
          .gpus = std::min(1U << power, gpu_count)};
}

}  // namespace

Result<JobTable> parse_jobs(std::string_view file, std::string_view text, const JobFilter& filter) {
  const std::vector<CsvRow> rows = csv_rows(text);
  if (rows.empty()) return csv_error(file, 1, "the table is empty", std::string(kJobHeader));
  const size_t column_count = rows[0].fields.size();
  if (column_count < kJobColumnsMin || column_count > kJobColumns.size() ||
      !std::equal(rows[0].fields.begin(), rows[0].fields.end(), kJobColumns.begin()))
    return csv_error(file, rows[0].line, "the first row has other columns", std::string(kJobHeader));
  if (rows.size() - 1 > kTableJobsMax)
    return csv_error(file, rows[kTableJobsMax + 1].line, "one job more than " + std::to_string(kTableJobsMax),
                     "the end of the table");
  JobTable table;
  for (size_t index = 1; index < rows.size(); ++index) {
    auto job = parse_job(file, rows[index], column_count);
    if (!job) return job.error();
    const Job& it = job.value();
    const bool is_in_cluster = filter.vc.empty() || rows[index].fields[3] == filter.vc;
    if (is_in_cluster && it.duration_s > 0 && it.duration_s >= filter.duration_min_s && it.gpus > 0 &&
        it.gpus <= filter.gpus_max)
      table.jobs.push_back(it);
  }
  std::stable_sort(table.jobs.begin(), table.jobs.end(), arrives_before);
  const size_t left_count = table.jobs.size();
  table.jobs.erase(table.jobs.begin(),
                   table.jobs.begin() + static_cast<ptrdiff_t>(std::min(filter.job_skip_count, left_count)));
  if (left_count > 0 && table.jobs.empty())
    return Fault{Errc::kMalformed, std::string(file) + ": the first " + std::to_string(filter.job_skip_count) +
                                       " jobs would be skipped, but there are only " + std::to_string(left_count) +
                                       "; take fewer windows, or smaller ones"};
  if (filter.job_count_max > 0 && table.jobs.size() > filter.job_count_max) table.jobs.resize(filter.job_count_max);
  if (table.jobs.empty())
    return Fault{Errc::kMalformed, std::string(file) + ": none of " + std::to_string(rows.size() - 1) +
                                       " jobs is left" + (filter.vc.empty() ? "" : " in the VC '" + filter.vc + "'") +
                                       "; at least one with 1 to " + std::to_string(filter.gpus_max) +
                                       " GPUs that is long enough is required; choose another VC or a larger cluster"};
  return table;
}

Result<JobTable> synthetic_jobs(const SyntheticJobs& options) {
  if (options.job_count == 0 || options.job_count > kTableJobsMax || options.gpu_count == 0 || !(options.load > 0))
    return Fault{Errc::kMalformed, "synthetic jobs were requested with " + std::to_string(options.job_count) +
                                       " jobs, " + std::to_string(options.gpu_count) + " GPUs and a load of " +
                                       std::to_string(options.load) + "; 1 to " + std::to_string(kTableJobsMax) +
                                       " jobs, a GPU and a positive load are required"};
  std::mt19937_64 random(options.seed);
  JobTable table;
  double gpu_s = 0, arrival = 0;
  for (size_t index = 0; index < options.job_count; ++index) {
    Job job = synthetic_job(options.gpu_count, random);
    job.submit_s = arrival;
    gpu_s += job.duration_s * job.gpus;
    arrival -= std::log(uniform(random));
    table.jobs.push_back(job);
  }
  const double scale_s = gpu_s / (options.load * options.gpu_count) / std::max(arrival, 1e-9);
  for (Job& job : table.jobs) job.submit_s *= scale_s;
  return table;
}

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
