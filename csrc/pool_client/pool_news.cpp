// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_news.h"

#include <chrono>
#include <utility>

#include "base/process.h"

namespace penstock::pool_client {

using session::PoolSession;
using wire::BatchKey;
using wire::ToTrainer;

namespace {

std::string describe_missing_data(WorkerLink& link) {
  const std::string where = link.data() && link.data()->is_granted() ? link.data()->endpoint().text() : "its data port";
  return "answers at " + link.endpoint().text() + ", but no data arrives from " + where +
         ", from which its batches are sent; check that this machine can reach it there (firewalls, penstock worker "
         "--data-bind, --data-advertise)";
}

std::string describe_unresponsive(WorkerLink& link) {
  const std::string& failure = link.socket().lookup_failure();
  if (!failure.empty())
    return "cannot be resolved: no address is known for " + link.endpoint().host + " (" + failure +
           "); have it advertise an address (penstock worker --advertise)";
  return "has not answered at " + link.endpoint().text() +
         "; check that this machine can reach it there (firewalls, penstock worker --advertise)";
}

}  // namespace

PoolNews::PoolNews(const PoolIoOptions& options, const PoolSession& session, PoolConnections& connections,
                   loader::StageChain& stages)
    : options_(options), session_(session), connections_(connections), stages_(stages), standing_(options_.job_kind) {}

void PoolNews::tell(std::string news) {
  stages_.arrive({.kind = loader::Arrival::Kind::kNews, .batch = {}, .error = Fault{Errc::kFailed, std::move(news)}});
}

std::string PoolNews::format_place(uint64_t worker_id) const {
  const WorkerLink* link = connections_.links().find(worker_id);
  return format_id(worker_id) + (link == nullptr ? "" : " at " + link->endpoint().text());
}

std::string PoolNews::format_hint(uint64_t worker_id) const {
  if (connections_.directory().is_own(worker_id)) return "";
  return "; remove it from the pool (penstock drain " + format_id(worker_id) +
         "), and check that it has the same version of penstock as the trainer";
}

// ---- The controller and the workers

void PoolNews::note_workers(size_t open_count, bool had_workers, Instant now) {
  if (open_count == 0 || !had_workers) standing_.note_deaths(open_count == 0 ? deaths_of_last_workers() : "");
  note_controller(now, open_count);
}

void PoolNews::note_silent_workers(Instant now) {
  WorkerLinks& links = connections_.links();
  for (const uint64_t worker_id : links.silent_since(now - kUnresponsiveAfter)) {
    const std::string reason = describe_unresponsive(*links.find(worker_id));
    if (standing_.note_refusal(worker_id, reason)) tell("worker " + format_id(worker_id) + " " + reason);
  }
  for (const uint64_t worker_id : links.without_data_since(now - kUnresponsiveAfter)) {
    const std::string reason = describe_missing_data(*links.find(worker_id));
    if (standing_.note_refusal(worker_id, reason)) tell("worker " + format_id(worker_id) + " " + reason);
  }
}

void PoolNews::note_controller(Instant now, size_t open_count) {
  ControllerLink* controller = connections_.controller();
  if (controller == nullptr) {
    standing_.note({}, session_.known_count(), open_count);
    const bool is_hopeless = session_.known_count() > 0 && session_.declined_count() == session_.known_count();
    if (!std::exchange(is_hopeless_, is_hopeless) && is_hopeless)
      stages_.fail(0, {Errc::kFailed, "no worker can run this job: " + standing_.describe("")});
    return;
  }
  const auto time_since_answer = controller->time_since_answer(now);
  if (controller->has_answered() && time_since_answer >= kUnresponsiveAfter) {
    if (!std::exchange(is_unresponsive_logged_, true))
      tell("the controller at " + connections_.controller_text() + " has not answered for " +
           std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time_since_answer).count()) +
           " s; training continues with its current workers, and new ones join when a controller is available again");
  } else {
    is_unresponsive_logged_ = false;
  }
  standing_.note({.has_answered = controller->has_answered(),
                  .trouble = controller->trouble(),
                  .lookup_failure = controller->socket().lookup_failure(),
                  .time_since_answer = time_since_answer},
                 session_.known_count(), open_count);
}

// If every worker has declined, no batch can arrive unless others join. That is an error for a job that no worker has
// run yet. A job that was run waits, since its worker may return.
void PoolNews::note_declines(const wire::TrainerRoster& roster) {
  standing_.note_pool(roster.pool_count, roster.declined_count);
  for (const auto& [worker_id, reason] : roster.declines) {
    if (standing_.note_reported_refusal(worker_id, reason)) warn_of_decline(format_id(worker_id), reason);
  }
  const bool is_hopeless = roster.declined_count > 0 && roster.declined_count == roster.pool_count &&
                           session_.declined_count() == session_.known_count();
  if (!std::exchange(is_hopeless_, is_hopeless) && is_hopeless) {
    const std::string news =
        "no worker of the pool can run this job: " + standing_.describe_declined(connections_.controller_text());
    if (was_served_) return tell(news + "; training continues when a worker joins that can");
    stages_.fail(0, {Errc::kFailed, news});
  }
}

void PoolNews::note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer) {
  const std::string reason(loader::text_of(answer.body));
  if (reason.empty()) return;
  if (standing_.note_refusal(worker_id, reason) && answer.message.kind == ToTrainer::Kind::kDeclined)
    warn_of_decline(format_place(worker_id), reason);
}

void PoolNews::warn_of_decline(const std::string& worker, const std::string& reason) {
  tell("worker " + worker + " does not work for this trainer: " + reason);
}

void PoolNews::note_numerics(uint64_t worker_id, const Numerics& numerics) {
  const FamilySet differing = differing_families(options_.numerics, numerics);
  const std::string place = format_place(worker_id);
  if (!standing_.note_numerics(worker_id, place, differing)) return;
  tell("the pool has workers with different hardware or libraries than this process: the kernels of worker " + place +
       " return different last bits for " + spoken_families(differing) +
       ". It runs no part of an offloaded model that needs them, but batches whose dataset computes with them depend "
       "on the worker. Use workers with the same kind of CPU and the same libraries if that matters");
}

void PoolNews::complain(uint64_t worker_id, WorkerLink& link, const std::string& what) {
  if (std::exchange(link.is_problem_reported, true)) return;
  tell("worker " + format_id(worker_id) + " at " + link.endpoint().text() + " cannot be used: " + what);
}

void PoolNews::note_distrust(const PoolSession::Command& command, WorkerLink& link) {
  const std::string place = format_place(command.worker_id);
  if (command.is_dismissed) {
    const std::string news = "receives no more requests, because " + command.reason;
    standing_.note_refusal(command.worker_id, news);
    return tell("worker " + place + " " + news + "; other workers make its batches" + format_hint(command.worker_id));
  }
  if (link.is_problem_reported || std::exchange(link.is_fault_reported, true)) return;
  tell("worker " + place + " is being reconnected, because " + command.reason);
}

// ---- Requests

void PoolNews::note_wrong_answer(const PoolSession::Command& command) {
  if (!command.asked) return;
  wrong_answers_[*command.asked] = {format_place(command.worker_id), command.reason + format_hint(command.worker_id)};
}

void PoolNews::note_answered(BatchKey key) {
  was_served_ = true;
  forget(key);
}

void PoolNews::forget(BatchKey key) {
  wrong_answers_.erase(key);
  reported_ends_.erase(key);
}

void PoolNews::forget_epoch() {
  std::erase_if(wrong_answers_, [](const auto& item) { return !wire::is_recall(item.first); });
  std::erase_if(reported_ends_, [](const auto& item) { return !wire::is_recall(item.first); });
}

std::unique_ptr<loader::Batch> PoolNews::error_in_place(const PoolSession::Command& command) {
  const loader::DeathTraces traces = traces_of(command.key);
  reported_ends_.erase(command.key);
  const auto wrong = wrong_answers_.extract(command.key);
  if (wrong.empty()) return loader::error_of_deaths(command.key, *command.content, command.death_count, traces);
  return loader::error_of_wrong_answers(command.key, wrong.mapped().place, wrong.mapped().reason, command.death_count);
}

loader::DeathTraces PoolNews::traces_of(BatchKey key) const {
  const auto reported = reported_ends_.find(key);
  return {.lost_at = lost_at_, .last_end = reported == reported_ends_.end() ? "" : reported->second};
}

std::string PoolNews::deaths_of_last_workers() const {
  const auto deadliest = session_.dispatch().deadliest();
  if (!deadliest || wrong_answers_.contains(deadliest->first)) return "";
  const session::SharedContent content = session_.dispatch().content_of(deadliest->first);
  return content ? loader::format_deaths(deadliest->first, *content, deadliest->second, traces_of(deadliest->first))
                 : "";
}

}  // namespace penstock::pool_client
