// SPDX-License-Identifier: Apache-2.0
#include "simulator/job_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <random>

#include "simulator/csv.h"

namespace penstock::simulator {
namespace {

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

}  // namespace penstock::simulator
