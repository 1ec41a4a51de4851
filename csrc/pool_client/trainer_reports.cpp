// SPDX-License-Identifier: Apache-2.0
#include "pool_client/trainer_reports.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "loader/step_ledger.h"

namespace penstock::pool_client {

using wire::AnswerKind;
using wire::ToTrainer;

namespace {

constexpr uint32_t kReportsBetweenPlans = 16;          // before an unchanged plan is repeated
constexpr auto kIdleAfter = std::chrono::seconds(2);   // without a request: others may use the workers
constexpr auto kHeldMax = std::chrono::seconds(60);    // without a request in mid-epoch, however long steps take
constexpr auto kPauseShown = std::chrono::seconds(1);  // a shorter pause is over before it is reported
constexpr auto kLinkRateInterval = std::chrono::milliseconds(20);  // interval for recomputing the link's rate

}  // namespace

TrainerReports::TrainerReports(const PoolIoOptions& options, const net::RunId& run, const session::PoolSession& session,
                               loader::Inbox& inbox)
    : options_(options), run_(run), session_(session), inbox_(inbox) {}

wire::TrainerReport TrainerReports::make(uint64_t batch_bytes_max) {
  const loader::TrainerPace pace = pace_.get();
  const auto ready = pace.stored_count + static_cast<uint32_t>(inbox_.arrival_count());
  const auto nanoseconds = [](Duration time) { return static_cast<uint64_t>(time.count()); };
  const size_t requested_count = session_.dispatch().unanswered_count();
  const Instant now = clock_now();
  return {.trainer_id = run_.id,
          .job = options_.job,
          .worker_count_max = is_idle(now) ? 0 : options_.worker_count_max,
          .queue = {.ready_batches = ready,
                    .wanted_batches = pace.wanted_count,
                    .asked_batches = static_cast<uint32_t>(requested_count),
                    .bytes_in_flight = (ready + requested_count) * batch_bytes_max,
                    .waited_ns = inbox_.counters().wait_ns.value(),
                    .delivered_batches = inbox_.counters().batches.value(),
                    .is_paused = is_paused(pace, now),
                    .step_count = pace.steps.step_count,
                    .stepping_ns = nanoseconds(pace.steps.stepping),
                    .starved_ns = nanoseconds(pace.steps.starved),
                    .paused_ns = nanoseconds(pace.steps.paused),
                    .made_batches = made_.batch_count,
                    .made_ns = nanoseconds(made_.time),
                    .made_cpu_ns = nanoseconds(made_.cpu_time),
                    .made_bytes = made_.bytes,
                    .link_bytes_per_s = static_cast<uint64_t>(std::clamp(link_bytes_per_s_.load(), 0.0, 1e18)),
                    .hedged_batches = session_.dispatch().hedge_count()},
          .steps = loader::StepLedger::totals(inbox_.counters()),
          .costs = job_meter_.totals(),
          .gpu = job_meter_.read_gpu(),
          .about = options_.about,
          .job_kind = options_.job_kind,
          .torch = options_.torch,
          .job_rank = options_.job_rank,
          .secret = run_.secret};
}

bool TrainerReports::is_paused(const loader::TrainerPace& pace, Instant now) const {
  if (session_.dispatch().unanswered_count() > 0) return false;
  return !pace.is_in_epoch || now - pace.given_at > std::max<Duration>(pace.pause_min, kPauseShown);
}

// A trainer that has all its batches and takes long steps still needs its workers.
bool TrainerReports::is_idle(Instant now) const {
  if (session_.dispatch().unanswered_count() > 0 || now - answered_at_ < kIdleAfter) return false;
  const loader::TrainerPace pace = pace_.get();
  return !pace.is_in_epoch || now - pace.given_at > std::clamp<Duration>(pace.pause_min, kIdleAfter, kHeldMax);
}

// ---- The plan

void TrainerReports::set_plan(const std::string& json, uint64_t change_count) {
  plan_.set(std::make_shared<const wire::PlanReport>(
      wire::PlanReport{.trainer_id = run_.id, .change_count = change_count, .json = json, .secret = run_.secret}));
}

void TrainerReports::send_plan(ControllerLink& controller) {
  const auto plan = plan_.get();
  if (!plan || (plan == reported_plan_ && ++reports_since_plan_ < kReportsBetweenPlans)) return;
  controller.send_plan(*plan);
  reported_plan_ = plan;
  reports_since_plan_ = 0;
}

// ---- The link

void TrainerReports::note_message(uint64_t worker_id, bool is_own, WorkerLink& link, const wire::PoolAnswer& answer) {
  const Instant now = clock_now();
  if (!is_own) job_meter_.note_message(worker_id, answer, now);
  link_meter_.note_message(worker_id, Duration(answer.sent_at), now);
  if (answer.message.kind != ToTrainer::Kind::kPong || !link.pinged_at) return;
  link_meter_.note_round_trip(now - *std::exchange(link.pinged_at, std::nullopt));
  round_trip_s_.store(std::chrono::duration<double>(*link_meter_.round_trip()).count());
}

void TrainerReports::note_crossing(uint64_t worker_id, const wire::PoolAnswer& answer, bool is_narrow, Instant now) {
  link_meter_.note_batch(worker_id, Duration(answer.sent_at), answer.payload_bytes, now, is_narrow);
  if (now - link_rate_updated_at_ < kLinkRateInterval) return;
  link_rate_updated_at_ = now;
  if (const auto rate = link_meter_.bytes_per_s(std::max<size_t>(1, session_.open_count())))
    link_bytes_per_s_.store(*rate);
}

uint16_t TrainerReports::link_mb_per_s() const {
  const double rate = link_meter_.is_outdated() ? 0 : link_bytes_per_s_.load();
  return static_cast<uint16_t>(std::clamp(std::round(rate / 1e6), 0.0, 65535.0));
}

// ---- The resources that workers spend

void TrainerReports::note_made(bool is_own, wire::PoolAnswer answer, const session::RequestContent* content) {
  if (answer.kind != AnswerKind::kBatch) return;
  if (content != nullptr && content->request.index_kind == wire::IndexKind::kIntegers)
    answer.sample_count =
        static_cast<uint32_t>(std::min<uint64_t>(answer.sample_count, content->indices.size() / sizeof(int64_t)));
  if (!is_own) job_meter_.note_batch(answer);
  const Duration time = answer.fetch_time * Duration(wire::kTimeUnit);
  ++made_.batch_count;
  made_.time += time;
  made_.cpu_time += time * answer.cpu_share / wire::kCpuShareUnit;
  if (!answer.place) made_.bytes += answer.payload_bytes;
}

void TrainerReports::note_parting(uint64_t worker_id) {
  link_meter_.forget(worker_id);
  job_meter_.note_parting(worker_id, clock_now());
}

}  // namespace penstock::pool_client
