// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's reports to the controller, and the measurements in them: how fast the trainer consumes batches, how fast
// its link is, and what the workers spend on it. The trainer's thread reads the results, too.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "loader/batch_source.h"
#include "loader/inbox.h"
#include "net/keys.h"
#include "pool_client/controller_link.h"
#include "pool_client/job_meter.h"
#include "pool_client/pool_io_options.h"
#include "pool_client/worker_links.h"
#include "session/link_meter.h"
#include "session/pool_session.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::pool_client {

// Owned by PoolIo. Confined to the I/O thread, except where a comment states otherwise.
class TrainerReports {
 public:
  TrainerReports(const PoolIoOptions& options, const net::RunId& run, const session::PoolSession& session,
                 loader::Inbox& inbox);

  // The calls up to costs() are for any thread.
  void note_pace(const loader::TrainerPace& pace) { pace_.set(pace); }
  void set_plan(const std::string& json, uint64_t change_count);
  loader::LinkStanding link() const {
    return {.bytes_per_s = link_bytes_per_s_.load(), .round_trip_s = round_trip_s_.load()};
  }
  wire::JobCosts costs() const { return job_meter_.costs(); }

  // Starts to read the energy of the GPU of the options.
  void open_gpu() { job_meter_.open_gpu(options_.gpu_uuid); }

  // `batch_bytes_max`: the size of the largest batch that was received.
  wire::TrainerReport make(uint64_t batch_bytes_max);
  // Sends the plan after a report, if it is new. It is repeated from time to time: a controller may have started since.
  void send_plan(ControllerLink& controller);
  // Whether there were no requests for a while, so that workers would be idle.
  bool is_idle(Instant now) const;
  // A request was answered, or failed.
  void note_answered(Instant now) { answered_at_ = now; }

  // Records the transfer time of a message on the worker's link in force, and the resources that the message reports.
  void note_message(uint64_t worker_id, bool is_own, WorkerLink& link, const wire::PoolAnswer& answer);
  // Records the transfer time of a batch that has arrived in chunks.
  void note_crossing(uint64_t worker_id, const wire::PoolAnswer& answer, bool is_narrow, Instant now);
  // Records the resources that a worker spent on a batch. Own workers run on the trainer's machine, whose costs are not
  // the pool's.
  void note_made(bool is_own, wire::PoolAnswer answer, const session::RequestContent* content);
  // The trainer stops using the worker.
  void note_parting(uint64_t worker_id);

  // The link's rate, for requests: 0 while it is unknown.
  uint16_t link_mb_per_s() const;
  // See LinkMeter::written_at.
  std::optional<Instant> written_at(uint64_t worker_id, Duration sent_at) const {
    return link_meter_.written_at(worker_id, sent_at);
  }

 private:
  // Whether the program is not training.
  bool is_paused(const loader::TrainerPace& pace, Instant now) const;

  const PoolIoOptions& options_;
  const net::RunId& run_;
  const session::PoolSession& session_;
  loader::Inbox& inbox_;

  Board<loader::TrainerPace> pace_;
  Board<std::shared_ptr<const wire::PlanReport>> plan_;  // shared with the trainer's thread; null before the first
  std::shared_ptr<const wire::PlanReport> reported_plan_;
  uint32_t reports_since_plan_ = 0;
  Instant answered_at_ = clock_now();  // the time of the last answer

  // The resources that workers have spent on accepted batches.
  struct Made {
    uint64_t batch_count = 0;
    uint64_t bytes = 0;  // on the link
    Duration time{};
    Duration cpu_time{};
  };
  Made made_;
  JobMeter job_meter_;

  session::LinkMeter link_meter_;
  Instant link_rate_updated_at_{};
  std::atomic<double> link_bytes_per_s_{0};
  std::atomic<double> round_trip_s_{0};
};

}  // namespace penstock::pool_client
