// SPDX-License-Identifier: Apache-2.0
#include "controller/pool_status.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "base/result.h"

namespace penstock::controller {
namespace {

std::string printed(const char* form, double value) {
  std::array<char, 400> text;  // the largest double has 309 digits before the point
  std::snprintf(text.data(), text.size(), form, value);
  return text.data();
}

// Strings come from peers: all bytes other than plain ASCII are escaped one by one, so that the result is always JSON.
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
// For a batch or a sample, which may take microseconds.
std::string fine_number(double value) { return printed("%.7f", value); }
// With 15 digits for any magnitude; whole numbers are exact.
std::string exact_number(double value) { return printed("%.15g", value); }
std::string seconds(std::chrono::nanoseconds time) { return number(std::chrono::duration<double>(time).count()); }
std::string number_or_null(std::optional<double> value) { return value ? number(*value) : "null"; }
std::string exact_or_null(std::optional<double> value) { return value ? exact_number(*value) : "null"; }

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

constexpr size_t kStatusBytesMin = 16 << 10;
constexpr size_t kEngineTextBytesMax = 400;
constexpr size_t kStatusFrameBytes = 256;  // the text around the two lists, including their counts

std::string id_or_null(uint64_t id) { return id == 0 ? "null" : json_quoted(spoken_id(id)); }

std::string worker_json(const scheduling::Roster::WorkerStatus& worker) {
  const wire::WorkerReport& report = worker.report;
  std::string json = "{\"id\": " + json_quoted(spoken_id(report.worker_id));
  json += ", \"incarnation\": " + std::to_string(report.incarnation);
  json += ", \"endpoint\": " + json_quoted(report.endpoint) + ", \"about\": " + json_quoted(report.about);
  json += ", \"machine\": " + (worker.machine.empty() ? "null" : json_quoted(worker.machine));
  json += ", \"trainer\": " + id_or_null(report.trainer_id) + ", \"assigned_to\": " + id_or_null(worker.assigned_to);
  json += std::string(", \"is_withdrawn\": ") + yes_or_no(worker.is_withdrawn);
  json += std::string(", \"is_draining\": ") + yes_or_no(report.is_draining);
  json += ", \"stuck_s\": " + (report.is_stuck() ? seconds(std::chrono::milliseconds(report.stuck_ms)) : "null");
  json += ", \"unfit_for\": [";
  for (size_t index = 0; index < report.declined.size(); ++index)
    json += (index == 0 ? "" : ", ") + json_quoted(spoken_id(report.declined[index]));
  json += "], \"unfit_reason\": " + (report.declined.empty() ? "null" : json_quoted(report.decline_reason));
  return json + ", \"since_report_s\": " + seconds(worker.since_report) + "}";
}

std::string steps_json(const wire::StepTotals& steps) {
  const auto in_seconds = [](uint64_t time_ns) { return fine_number(static_cast<double>(time_ns) / 1e9); };
  std::string json = "{\"steps\": " + std::to_string(steps.step_count);
  json += ", \"compute_s\": " + in_seconds(steps.compute_ns) + ", \"dataset_s\": " + in_seconds(steps.dataset_ns);
  json += ", \"collate_s\": " + in_seconds(steps.collate_ns) + ", \"prefix_s\": " + in_seconds(steps.prefix_ns);
  json += ", \"worker_s\": " + in_seconds(steps.worker_ns) + ", \"wire_s\": " + in_seconds(steps.wire_ns);
  json += ", \"device_s\": " + in_seconds(steps.device_ns) + ", \"order_s\": " + in_seconds(steps.order_ns);
  json += ", \"ranks_s\": " + in_seconds(steps.ranks_ns);
  return json + ", \"loader_s\": " + in_seconds(steps.loader_ns) + "}";
}

std::string trainer_json(const scheduling::Roster::TrainerStatus& trainer, uint64_t plan_change_count) {
  const wire::TrainerReport& report = trainer.report;
  const wire::QueueSignal& queue = report.queue;
  std::string json = "{\"id\": " + json_quoted(spoken_id(report.trainer_id)) + ", \"job\": " + json_quoted(report.job);
  json += ", \"user\": " + (trainer.user.empty() ? "null" : json_quoted(trainer.user));
  const wire::JobRank& place = report.job_rank;
  json += ", \"group\": " + id_or_null(place.group) + ", \"rank\": " + std::to_string(place.rank);
  json += ", \"world_size\": " + std::to_string(place.world_size);
  json += ", \"about\": " + json_quoted(report.about) + ", \"workers\": " + std::to_string(trainer.worker_count);
  json += ", \"workers_max\": " + std::to_string(report.worker_count_max);
  json += ", \"since_report_s\": " + seconds(trainer.since_report) + ", \"idle_s\": " + seconds(trainer.idle);
  json += ", \"batches_per_s\": " + number_or_null(trainer.rates.batches_per_s());
  json += ", \"waited_share\": " + number_or_null(trainer.rates.waited_share());
  json += ", \"workers_wanted\": " + std::to_string(trainer.demand);
  json += std::string(", \"limited_by\": \"") + scheduling::limit_name(trainer.limit) + "\"";
  json += ", \"reason\": " + json_quoted(trainer.reason) + ", \"changes\": " + std::to_string(trainer.change_count);
  const auto measured = [&](double scheduling::MeasuredWork::*time) {
    return trainer.measured ? fine_number(*trainer.measured.*time) : std::string("null");
  };
  json += ", \"step_s\": " + measured(&scheduling::MeasuredWork::trainer_s);
  json += ", \"starved_s\": " + measured(&scheduling::MeasuredWork::wait_s);
  json += ", \"worker_s\": " + measured(&scheduling::MeasuredWork::worker_s);
  json += ", \"worker_cpu_share\": " + number_or_null(trainer.measured ? trainer.measured->cpu_share : std::nullopt);
  json += ", \"batch_bytes\": " +
          (queue.made_batches > 0 ? std::to_string(queue.made_bytes / queue.made_batches) : std::string("null"));
  json += ", \"link_bytes_per_s\": " +
          (queue.link_bytes_per_s > 0 ? std::to_string(queue.link_bytes_per_s) : std::string("null"));
  json += std::string(", \"is_paused\": ") + yes_or_no(queue.is_paused);
  json += ", \"hedged_batches\": " + std::to_string(queue.hedged_batches);
  json += ", \"plan_changes\": " + std::to_string(plan_change_count);
  json += ", \"ledger\": " + steps_json(report.steps);
  json += ", \"queue\": {\"ready_batches\": " + std::to_string(queue.ready_batches);
  json += ", \"wanted_batches\": " + std::to_string(queue.wanted_batches);
  json += ", \"asked_batches\": " + std::to_string(queue.asked_batches);
  json += ", \"bytes_in_flight\": " + std::to_string(queue.bytes_in_flight);
  json += ", \"waited_s\": " + seconds(std::chrono::nanoseconds(queue.waited_ns));
  return json + ", \"delivered_batches\": " + std::to_string(queue.delivered_batches) + "}}";
}

// Truncated, so that an engine's strings leave room for workers however they are escaped.
std::string short_text(const std::string& text) {
  return json_quoted(std::string_view(text).substr(0, kEngineTextBytesMax));
}
std::string short_text_or_null(const std::string& text) { return text.empty() ? "null" : short_text(text); }
std::string money(uint64_t micros) { return number(static_cast<double>(micros) / 1e6); }

std::string engine_json(const std::optional<scheduling::PoolScaling::Standing>& standing) {
  if (!standing) return "null";
  const wire::ScaleReport& report = standing->report;
  const bool has_price = report.price_micros_per_hour != 0;
  std::string json = "{\"name\": " + short_text(report.engine);
  json += ", \"wanted\": " + std::to_string(standing->orders.wanted_count);
  json += ", \"reason\": " + short_text(standing->orders.reason);
  json += ", \"running\": " + std::to_string(standing->running_count);
  json += ", \"starting\": " + std::to_string(standing->starting_count);
  json += ", \"stopping\": " + std::to_string(standing->stopping_count);
  json += ", \"refusals\": " + std::to_string(report.refusal_count);
  json += ", \"refusal\": " + short_text_or_null(report.refusal);
  json += ", \"trouble\": " + short_text_or_null(report.trouble);
  json += ", \"workers_min\": " + std::to_string(report.worker_count_min);
  json += ", \"workers_max\": " + std::to_string(report.worker_count_max);
  json += ", \"idle_s\": " + number(static_cast<double>(report.idle_ms) / 1e3);
  json += ", \"price_per_hour\": " + (has_price ? money(report.price_micros_per_hour) : "null");
  json += ", \"budget\": " + (report.has_budget ? money(report.budget_micros) : "null");
  json += ", \"spent\": " + (has_price ? money(standing->spent_micros) : "null");
  json += std::string(", \"is_ending\": ") + yes_or_no(standing->orders.is_to_end);
  return json + ", \"since_report_s\": " + seconds(standing->since_report) + "}";
}

std::string offences_json(const Offences& offences, Instant now) {
  std::vector<const Offences::value_type*> latest;
  for (const auto& offence : offences) latest.push_back(&offence);
  std::sort(latest.begin(), latest.end(), [](const auto* a, const auto* b) { return a->second.at > b->second.at; });
  latest.resize(std::min(latest.size(), kShownOffencesMax));
  std::string json;
  for (const auto* offence : latest) {
    json += (json.empty() ? "" : ", ") + std::string("{\"by\": ") + json_quoted(offence->first);
    json += ", \"text\": " + json_quoted(offence->second.text);
    json += ", \"count\": " + std::to_string(offence->second.count);
    json += ", \"since_s\": " + seconds(now - offence->second.at) + "}";
  }
  return json;
}

}  // namespace

std::string status_json(const scheduling::Roster& roster, const scheduling::PoolScaling& scaling,
                        const std::map<uint64_t, KnownPlan>& plans, const ControllerStanding& standing, Instant now,
                        size_t bytes_max) {
  PENSTOCK_ASSERT(bytes_max >= kStatusBytesMin, "bytes_max is too small for a status");
  std::string json = "{\"controller\": {\"id\": " + json_quoted(spoken_id(roster.controller_id()));
  json +=
      ", \"endpoint\": " + json_quoted(standing.endpoint) + ", \"is_settled\": " + yes_or_no(roster.is_settled(now));
  json += ", \"fenced_incarnations\": " + std::to_string(roster.fenced_count());
  json += ", \"policy_trouble\": " + (roster.policy_trouble().empty() ? "null" : json_quoted(roster.policy_trouble()));
  json += ", \"offences\": [" + offences_json(standing.offences, now) + "]";
  json += ", \"key_trouble\": " + (standing.key_trouble.empty() ? "null" : short_text(standing.key_trouble)) + "}";
  json += ", \"engine\": " + engine_json(scaling.standing(now));
  // There are fewer trainers than workers. Even many trainers leave half of the room to workers.
  const size_t room = bytes_max - json.size() - kStatusFrameBytes;
  const auto with_plan = [&](const scheduling::Roster::TrainerStatus& trainer) {
    const auto plan = plans.find(trainer.report.trainer_id);
    return trainer_json(trainer, plan == plans.end() ? 0 : plan->second.change_count);
  };
  const EntryList trainers = list_of(roster.trainers(now), with_plan, room / 2);
  const EntryList workers = list_of(roster.workers(now), worker_json, room - trainers.json.size());
  json += ", \"workers\": [" + workers.json + "], \"trainers\": [" + trainers.json;
  json += "], \"workers_left_out\": " + std::to_string(workers.left_out_count);
  return json + ", \"trainers_left_out\": " + std::to_string(trainers.left_out_count) + "}";
}

namespace {

constexpr size_t kCostsBytesMin = 16 << 10;
constexpr size_t kCostsFrameBytes = 512;  // the text around the list, the factors included
constexpr double kMicros = 1e6;

std::optional<double> given(const wire::CostFactor& factor) {
  return factor.is_given ? std::optional(static_cast<double>(factor.micros) / kMicros) : std::nullopt;
}

std::string bill_json(const costs::Bill& bill) {
  std::string json = "{\"worker_hours\": " + exact_number(bill.worker_hours);
  json += ", \"cpu_hours\": " + exact_number(bill.cpu_hours);
  json += ", \"bytes\": " + exact_number(bill.bytes) + ", \"batches\": " + exact_number(bill.batches);
  json += ", \"samples\": " + exact_number(bill.samples) + ", \"energy_j\": " + exact_or_null(bill.energy_j);
  json += ", \"gpu_energy_j\": " + exact_or_null(bill.gpu_energy_j);
  return json + ", \"money\": " + exact_or_null(bill.money) + ", \"gco2\": " + exact_or_null(bill.gco2) + "}";
}

std::string job_json(const costs::CostLedger::Job& job, const costs::CostFactors& factors) {
  const costs::Bill bill = costs::bill_of(job.costs, factors, job.gpu);
  const auto per_thousand = costs::per_thousand_samples(bill);
  std::string json = "{\"job\": " + json_quoted(job.name) + ", \"about\": " + json_quoted(job.about);
  json += std::string(", \"is_running\": ") + yes_or_no(job.is_running);
  json += ", \"since_report_s\": " + seconds(job.since_report);
  json += ", \"user\": " + (job.user.empty() ? "null" : json_quoted(job.user));
  json += ", \"tenancies\": " + std::to_string(job.costs.tenancy_count);
  json += ", \"metered_tenancies\": " + std::to_string(job.costs.metered_tenancy_count);
  json += ", \"metered_energy_j\": " + exact_number(static_cast<double>(job.costs.energy_uj) / kMicros);
  json += ", \"total\": " + bill_json(bill);
  return json + ", \"per_1000_samples\": " + (per_thousand ? bill_json(*per_thousand) : "null") + "}";
}

}  // namespace

costs::CostFactors factors_of(const wire::CostsRequest& request,
                              const std::optional<scheduling::PoolScaling::Standing>& engine) {
  costs::CostFactors factors{.price_per_hour = given(request.price_per_hour),
                             .energy_price_per_kwh = given(request.energy_price_per_kwh),
                             .gco2_per_kwh = given(request.gco2_per_kwh)};
  if (!factors.price_per_hour && engine && engine->report.price_micros_per_hour != 0)
    factors.price_per_hour = static_cast<double>(engine->report.price_micros_per_hour) / kMicros;
  return factors;
}

std::string costs_json(const costs::CostLedger& ledger, const costs::CostFactors& factors, Instant now,
                       size_t bytes_max) {
  PENSTOCK_ASSERT(bytes_max >= kCostsBytesMin, "bytes_max is too small for costs");
  std::string json = "{\"factors\": {\"price_per_hour\": " + exact_or_null(factors.price_per_hour);
  json += ", \"energy_price_per_kwh\": " + exact_or_null(factors.energy_price_per_kwh);
  json += ", \"gco2_per_kwh\": " + exact_or_null(factors.gco2_per_kwh) + "}";
  const auto to_json = [&](const costs::CostLedger::Job& job) { return job_json(job, factors); };
  const EntryList jobs = list_of(ledger.jobs(now), to_json, bytes_max - kCostsFrameBytes);
  json += ", \"jobs\": [" + jobs.json + "], \"jobs_left_out\": " + std::to_string(jobs.left_out_count);
  return json + ", \"jobs_forgotten\": " + std::to_string(ledger.forgotten_count()) + "}";
}

}  // namespace penstock::controller
