// SPDX-License-Identifier: Apache-2.0
#include "controller/pool_status.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string_view>
#include <vector>

#include "base/assert.h"
#include "base/identity.h"
#include "controller/json_text.h"

namespace penstock::controller {
namespace {

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

}  // namespace penstock::controller
