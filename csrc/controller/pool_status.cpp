// SPDX-License-Identifier: Apache-2.0
#include "controller/pool_status.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process.h"
#include "base/result.h"

namespace penstock::controller {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kAnswerBytesMin = 16 << 10;
constexpr size_t kAnswerFrameBytes = 512;  // the text around the lists: their names and counts
constexpr size_t kEngineTextBytesMax = 400;
constexpr double kMicros = 1e6;

// ASCII, whatever bytes the strings of peers have: those that are not UTF-8 are replaced.
std::string text_of(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

Json rounded(double value, double steps_per_unit) { return std::round(value * steps_per_unit) / steps_per_unit; }
Json number(double value) { return rounded(value, 1e3); }
// For a batch or a sample, which may take microseconds.
Json fine_number(double value) { return rounded(value, 1e7); }
Json seconds(std::chrono::nanoseconds time) { return number(std::chrono::duration<double>(time).count()); }
Json money(uint64_t micros) { return number(static_cast<double>(micros) / kMicros); }

Json or_null(std::optional<double> value) { return value ? Json(*value) : Json(); }
Json number_or_null(std::optional<double> value) { return value ? number(*value) : Json(); }
Json text_or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }
Json id_or_null(uint64_t id) { return id == 0 ? Json() : Json(format_id(id)); }

// Truncated, so that an engine's strings leave room for workers however they are escaped.
std::string short_text(const std::string& text) { return text.substr(0, kEngineTextBytesMax); }
Json short_text_or_null(const std::string& text) { return text_or_null(short_text(text)); }

// Entries whose text has at most `bytes_max` bytes in total, and the number of the others.
struct EntryList {
  Json entries = Json::array();
  size_t bytes = 0;
  size_t left_out_count = 0;
};

// Omits each entry that does not fit, and only these: a large entry must not hide the following ones.
template <typename Entry, typename ToJson>
EntryList list_of(const std::vector<Entry>& entries, const ToJson& to_json, size_t bytes_max) {
  EntryList list;
  for (const Entry& entry : entries) {
    Json json = to_json(entry);
    const size_t bytes = text_of(json).size() + 1;
    if (list.bytes + bytes > bytes_max) {
      ++list.left_out_count;
    } else {
      list.bytes += bytes;
      list.entries.push_back(std::move(json));
    }
  }
  return list;
}

Json host_json(const wire::HostLoad& host) {
  if (host.cpu_count == 0) return {};
  return {{"cpu_share", host.cpu_permille / 1000.0},
          {"cpu_count", host.cpu_count},
          {"memory_bytes", host.memory_bytes},
          {"memory_used_bytes", host.memory_used_bytes}};
}

Json worker_json(const scheduling::Roster::WorkerStatus& worker) {
  const wire::WorkerReport& report = worker.report;
  Json unfit_for = Json::array();
  for (const uint64_t job_id : report.declined) unfit_for.push_back(format_id(job_id));
  return {{"id", format_id(report.worker_id)},
          {"incarnation", report.incarnation},
          {"endpoint", report.endpoint},
          {"about", report.about},
          {"machine", text_or_null(worker.machine)},
          {"trainer", id_or_null(report.trainer_id)},
          {"assigned_to", id_or_null(worker.assigned_to)},
          {"is_withdrawn", worker.is_withdrawn},
          {"is_draining", report.is_draining},
          {"stuck_s", report.is_stuck() ? seconds(std::chrono::milliseconds(report.stuck_ms)) : Json()},
          {"unfit_for", std::move(unfit_for)},
          {"unfit_reason", report.declined.empty() ? Json() : Json(report.decline_reason)},
          {"host_load", host_json(report.host)},
          {"kept_bytes", report.kept_bytes},
          {"kept_answers", report.kept_answers},
          {"log", report.log},
          {"since_report_s", seconds(worker.since_report)}};
}

Json steps_json(const wire::StepTotals& steps) {
  const auto in_seconds = [](uint64_t time_ns) { return fine_number(static_cast<double>(time_ns) / 1e9); };
  return {{"steps", steps.step_count},
          {"compute_s", in_seconds(steps.compute_ns)},
          {"dataset_s", in_seconds(steps.dataset_ns)},
          {"collate_s", in_seconds(steps.collate_ns)},
          {"prefix_s", in_seconds(steps.prefix_ns)},
          {"worker_s", in_seconds(steps.worker_ns)},
          {"wire_s", in_seconds(steps.wire_ns)},
          {"device_s", in_seconds(steps.device_ns)},
          {"order_s", in_seconds(steps.order_ns)},
          {"ranks_s", in_seconds(steps.ranks_ns)},
          {"loader_s", in_seconds(steps.loader_ns)}};
}

Json trainer_json(const scheduling::Roster::TrainerStatus& trainer, uint64_t plan_change_count) {
  const wire::TrainerReport& report = trainer.report;
  const wire::QueueSignal& queue = report.queue;
  const wire::JobRank& place = report.job_rank;
  const auto measured = [&](double scheduling::MeasuredWork::*time) {
    return trainer.measured ? fine_number(*trainer.measured.*time) : Json();
  };
  return {{"id", format_id(report.trainer_id)},
          {"job", report.job},
          {"user", text_or_null(trainer.user)},
          {"group", id_or_null(place.group)},
          {"rank", place.rank},
          {"world_size", place.world_size},
          {"about", report.about},
          {"workers", trainer.worker_count},
          {"workers_max", report.worker_count_max},
          {"since_report_s", seconds(trainer.since_report)},
          {"idle_s", seconds(trainer.idle)},
          {"batches_per_s", number_or_null(trainer.rates.batches_per_s())},
          {"waited_share", number_or_null(trainer.rates.waited_share())},
          {"workers_wanted", trainer.demand},
          {"limited_by", scheduling::limit_name(trainer.limit)},
          {"reason", trainer.reason},
          {"changes", trainer.change_count},
          {"step_s", measured(&scheduling::MeasuredWork::trainer_s)},
          {"starved_s", measured(&scheduling::MeasuredWork::wait_s)},
          {"worker_s", measured(&scheduling::MeasuredWork::worker_s)},
          {"worker_cpu_share", number_or_null(trainer.measured ? trainer.measured->cpu_share : std::nullopt)},
          {"batch_bytes", queue.made_batches > 0 ? Json(queue.made_bytes / queue.made_batches) : Json()},
          {"link_bytes_per_s", queue.link_bytes_per_s > 0 ? Json(queue.link_bytes_per_s) : Json()},
          {"is_paused", queue.is_paused},
          {"hedged_batches", queue.hedged_batches},
          {"plan_changes", plan_change_count},
          {"ledger", steps_json(report.steps)},
          {"queue",
           {{"ready_batches", queue.ready_batches},
            {"wanted_batches", queue.wanted_batches},
            {"asked_batches", queue.asked_batches},
            {"bytes_in_flight", queue.bytes_in_flight},
            {"waited_s", seconds(std::chrono::nanoseconds(queue.waited_ns))},
            {"delivered_batches", queue.delivered_batches}}}};
}

Json engine_json(const std::optional<scheduling::PoolScaling::Standing>& standing) {
  if (!standing) return {};
  const wire::ScaleReport& report = standing->report;
  const bool has_price = report.price_micros_per_hour != 0;
  return {{"name", short_text(report.engine)},
          {"wanted", standing->orders.wanted_count},
          {"reason", short_text(standing->orders.reason)},
          {"running", standing->running_count},
          {"starting", standing->starting_count},
          {"stopping", standing->stopping_count},
          {"refusals", report.refusal_count},
          {"refusal", short_text_or_null(report.refusal)},
          {"trouble", short_text_or_null(report.trouble)},
          {"workers_min", report.worker_count_min},
          {"workers_max", report.worker_count_max},
          {"idle_s", number(static_cast<double>(report.idle_ms) / 1e3)},
          {"price_per_hour", has_price ? money(report.price_micros_per_hour) : Json()},
          {"budget", report.has_budget ? money(report.budget_micros) : Json()},
          {"spent", has_price ? money(standing->spent_micros) : Json()},
          {"is_ending", standing->orders.is_to_end},
          {"since_report_s", seconds(standing->since_report)}};
}

Json offences_json(const Offences& offences, Instant now) {
  std::vector<const Offences::value_type*> latest;
  for (const auto& offence : offences) latest.push_back(&offence);
  std::sort(latest.begin(), latest.end(), [](const auto* a, const auto* b) { return a->second.at > b->second.at; });
  latest.resize(std::min(latest.size(), kShownOffencesMax));
  Json json = Json::array();
  for (const auto* offence : latest) {
    json.push_back(Json{{"by", offence->first},
                        {"text", offence->second.text},
                        {"count", offence->second.count},
                        {"since_s", seconds(now - offence->second.at)}});
  }
  return json;
}

std::optional<double> given(const wire::CostFactor& factor) {
  return factor.is_given ? std::optional(static_cast<double>(factor.micros) / kMicros) : std::nullopt;
}

Json bill_json(const costs::Bill& bill) {
  return {{"worker_hours", bill.worker_hours},
          {"cpu_hours", bill.cpu_hours},
          {"bytes", bill.bytes},
          {"batches", bill.batches},
          {"samples", bill.samples},
          {"energy_j", or_null(bill.energy_j)},
          {"gpu_energy_j", or_null(bill.gpu_energy_j)},
          {"money", or_null(bill.money)},
          {"gco2", or_null(bill.gco2)}};
}

Json job_json(const costs::CostLedger::Job& job, const costs::CostFactors& factors) {
  const costs::Bill bill = costs::bill_of(job.costs, factors, job.gpu);
  const auto per_thousand = costs::per_thousand_samples(bill);
  return {{"job", job.name},
          {"about", job.about},
          {"is_running", job.is_running},
          {"since_report_s", seconds(job.since_report)},
          {"user", text_or_null(job.user)},
          {"tenancies", job.costs.tenancy_count},
          {"metered_tenancies", job.costs.metered_tenancy_count},
          {"metered_energy_j", static_cast<double>(job.costs.energy_uj) / kMicros},
          {"total", bill_json(bill)},
          {"per_1000_samples", per_thousand ? bill_json(*per_thousand) : Json()}};
}

}  // namespace

std::string status_json(const scheduling::Roster& roster, const scheduling::PoolScaling& scaling,
                        const std::map<uint64_t, KnownPlan>& plans, const ControllerStanding& standing, Instant now,
                        size_t bytes_max) {
  PENSTOCK_ASSERT(bytes_max >= kAnswerBytesMin, "bytes_max is too small for a status");
  Json json = {{"controller",
                {{"id", format_id(roster.controller_id())},
                 {"endpoint", standing.endpoint},
                 {"is_settled", roster.is_settled(now)},
                 {"fenced_incarnations", roster.fenced_count()},
                 {"policy_trouble", text_or_null(roster.policy_trouble())},
                 {"offences", offences_json(standing.offences, now)},
                 {"key_trouble", short_text_or_null(standing.key_trouble)}}},
               {"engine", engine_json(scaling.standing(now))}};
  // There are fewer trainers than workers. Even many trainers leave half of the room to workers.
  const size_t room = bytes_max - text_of(json).size() - kAnswerFrameBytes;
  const auto with_plan = [&](const scheduling::Roster::TrainerStatus& trainer) {
    const auto plan = plans.find(trainer.report.trainer_id);
    return trainer_json(trainer, plan == plans.end() ? 0 : plan->second.change_count);
  };
  EntryList trainers = list_of(roster.trainers(now), with_plan, room / 2);
  EntryList workers = list_of(roster.workers(now), worker_json, room - trainers.bytes);
  json["workers"] = std::move(workers.entries);
  json["trainers"] = std::move(trainers.entries);
  json["workers_left_out"] = workers.left_out_count;
  json["trainers_left_out"] = trainers.left_out_count;
  return text_of(json);
}

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
  PENSTOCK_ASSERT(bytes_max >= kAnswerBytesMin, "bytes_max is too small for costs");
  Json json = {{"factors",
                {{"price_per_hour", or_null(factors.price_per_hour)},
                 {"energy_price_per_kwh", or_null(factors.energy_price_per_kwh)},
                 {"gco2_per_kwh", or_null(factors.gco2_per_kwh)}}}};
  const auto to_json = [&](const costs::CostLedger::Job& job) { return job_json(job, factors); };
  EntryList jobs = list_of(ledger.jobs(now), to_json, bytes_max - kAnswerFrameBytes);
  json["jobs"] = std::move(jobs.entries);
  json["jobs_left_out"] = jobs.left_out_count;
  json["jobs_forgotten"] = ledger.forgotten_count();
  return text_of(json);
}

}  // namespace penstock::controller
