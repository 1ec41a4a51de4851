// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the batches of a pool worker in processes separate from the server, one per job: such a process starts with the
// first batch that a trainer requests and ends with that trainer. It has no access to the server's keys, sockets and
// memory, and leaves no state behind for the next job. Its failures affect only its own trainer.
//
//   none ── work of a trainer ──▶ in use ── another trainer ──▶ parked ── kJobParked, or another is parked ──▶ none
//                                    ▲                             │
//                                    └──── work of its trainer ────┘
//
// One process is in use, and at most one is parked: trainers that alternate at a worker, such as the trainers of two
// loaders of one program, keep their processes. A process ends when its trainer has sent its final goodbye, or has been
// away for kJobLinger while no other trainer is there.
//
// The process in use receives the next work before it has answered the first, so it makes batches while the server is
// busy. It handles both in order, so each of its messages is about the first work that it has not answered. An answer
// to the next work is not read before that work is offered, and a death during that work is also reported only after
// that.
//
// A process that ends by itself, hangs up, or violates the protocol counts as dead: its work is answered accordingly,
// and the lanes that it was reading are lost. The death is not attributed to work that was handed ahead and not
// started. A process that is killed and does not end, as in an uninterruptible wait of the kernel, is given up: it
// counts as dead, and the worker continues without it.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "server/job_output.h"
#include "server/maker.h"
#include "server/warm_process.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/blob_record.h"
#include "wire/job_record.h"

namespace penstock::server {

// How long a job's process is kept for a trainer whose link was lost, or whose worker was reassigned.
constexpr Duration kJobLinger = std::chrono::seconds(5);
// How long a job's process may take to exit by itself once it was notified that its job is over, and to end once it was
// killed.
constexpr Duration kJobEndGrace = std::chrono::seconds(2);
// How long it is kept parked next to the one in use.
constexpr Duration kJobParked = std::chrono::seconds(300);
// How long the warm process may take to answer that it has forked.
constexpr Duration kForkMax = std::chrono::seconds(60);
// A larger blob is passed as a file.
constexpr uint64_t kInlineBlobBytesMax = uint64_t{1} << 20;
// The amount of job output that may wait for the log; further output is left out.
constexpr size_t kOutputBytesMax = size_t{1} << 20;
// The number of bytes of a blob that are copied in one turn.
constexpr uint64_t kBlobStepBytes = uint64_t{32} << 20;

struct JobHostOptions {
  Duration linger = kJobLinger;
  Duration end_grace = kJobEndGrace;
  Duration parked = kJobParked;
  Duration fork_max = kForkMax;
};

// Confined to the I/O thread, except where marked.
class JobHost final : public Maker {
 public:
  // `warm` must outlive this object. `log_name` is the prefix of the log lines that job processes write.
  JobHost(WarmSeat& warm, std::string log_name, const JobHostOptions& options = {});
  ~JobHost() override;

  // Call before the I/O thread uses this object; its waker must outlive both.
  void set_waker(Waker& waker) {
    waker_ = &waker;
    warm_.set_waker(waker);
  }

  // ---- For any thread

  std::vector<std::string> take_notices();
  // The output of job processes since the last call, as far as it may be logged.
  std::string take_output();
  Standing standing() const;
  // Waits until the server has ended, and returns the reason; empty at the deadline. Blocks.
  std::optional<Fault> wait_closed(std::chrono::steady_clock::time_point deadline);
  void wake() const override;

  // ---- Maker

  Needs take_needs() override;
  void offer(std::shared_ptr<const PoolWork> work) override;
  bool wants_ahead() const override;
  void send_ahead(std::shared_ptr<const PoolWork> work) override;
  void drop_ahead() override;
  void set_wanted(bool is_wanted) override;
  void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) override;
  void add_notice(std::string text) override;
  void set_standing(const Standing& standing) override;
  void close(Fault reason) override;
  void end_trainer(uint64_t trainer_id) override;
  bool has_process_of(uint64_t trainer_id) const override;
  std::span<const int> fds() const override { return fds_; }
  void note_readable(std::span<const int> fds) override;
  std::optional<Instant> due_at() const override;
  bool end_work(const std::string& why) override;
  std::chrono::nanoseconds cpu_time() const override;

 private:
  // A blob that is being passed to a job's process.
  struct OutgoingBlob {
    std::vector<std::byte> bytes;
    FileDescriptor file{};
    uint64_t written = 0;
  };
  struct Job {
    uint64_t number = 0;
    uint64_t trainer_id = 0;
    shm::Channel channel;
    Instant forked_at{};
    bool is_readable = false;  // its channel was reported readable
    JobOutput output{};
    pid_t pid = 0;                            // 0 until it has started
    std::shared_ptr<const PoolWork> work{};   // current; shared with the I/O thread's requests
    bool is_wanted = true;                    // as last sent to it
    std::shared_ptr<const PoolWork> ahead{};  // handed ahead, or still with the process after being dropped
    bool is_ahead_dropped = false;            // its result will be discarded
    bool has_answered = false;                // it has received all parts of its job
    std::optional<wire::BlobId> wish{};       // requested for the work, not granted yet
    std::optional<OutgoingBlob> blob{};       // granted
    std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas{};  // shared with the batches on them
    std::optional<WarmProcess::News> end{};                        // it has ended, with messages left to read
    bool is_ending = false;                                        // dead or dying: its end is awaited
    std::optional<Instant> killed_at{};                            // unless it has ended by then
    std::optional<Instant> given_up_at{};                          // the same, after it was killed
    std::string fault{};                                           // the reason for ending it, if it was a fault
    mutable std::chrono::nanoseconds cpu_time{};                   // as last seen
  };
  struct Parked {
    Job job;
    Instant until{};
  };
  // The process of a finished job.
  struct Leaving {
    shm::Channel channel;  // shut down
    JobOutput output;
    Instant due_at;  // when it is killed, and after that given up
    bool is_killed = false;
  };

  void take_news(Needs& needs);
  void take_outputs();
  void take_output_of(JobOutput& output);
  void take_end(uint64_t number, const WarmProcess::News& news, Needs& needs);
  // Whether the next message of the process is about work that was handed ahead and may still be offered.
  bool is_held_back() const { return job_ && !job_->work && job_->ahead && !job_->is_ahead_dropped; }
  std::string format_end(const WarmProcess::News& news) const;
  // The process in use is dead, or treated as dead; `how` follows its name.
  void bury(std::string how, Needs& needs);
  void receive(Needs& needs);
  void receive_messages(Needs& needs);
  Result<void> take_message(const wire::FromJob& message, std::span<FileDescriptor> fds, Needs& needs);
  Result<PoolResult> result_of(const wire::FromJob& message, std::span<FileDescriptor> fds);
  Result<std::shared_ptr<shm::ArenaView>> arena_of(const wire::SlabPlace& place, bool is_new,
                                                   std::span<FileDescriptor> fds);
  void start(uint64_t trainer_id);
  void send_blob();
  Result<void> post(const wire::ToJob& message);
  void post_work(const PoolWork& work);
  // Ends the process immediately; its work is lost.
  void kill(std::string why);
  void note_hang_up();
  // Lets a process exit by itself: the process in use, the parked one, or `job`.
  void let_go();
  void release_parked();
  void let_go(Job job);
  // Parks the process in use, replacing the parked one.
  void park();
  void note_idle(Instant now);
  void end_late(Instant now, Needs& needs);
  bool is_forking() const { return !failure_ && job_ && job_->pid == 0 && !job_->is_ending; }
  static void note_cpu_time(const Job& job);
  void note_fds();

  WarmSeat& warm_;
  const std::string log_name_;
  const JobHostOptions options_;
  Waker* waker_ = nullptr;
  std::optional<Job> job_;                    // in use
  std::optional<Parked> parked_;              // without work, and healthy
  std::map<uint64_t, Leaving> leaving_;       // by number
  std::optional<Instant> idle_since_;         // since when its trainer has been away
  uint64_t trainer_id_ = 0;                   // of the standing
  bool is_given_up_ = false;                  // the work of a process that was ended because its trainer has ended
  bool is_warm_readable_ = true;              // as far as known
  std::chrono::nanoseconds past_cpu_time_{};  // of ended processes
  bool is_closed_ = false;
  std::optional<Fault> failure_;
  std::vector<int> fds_;
  OutputBudget output_budget_;

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<std::string> notices_ PENSTOCK_GUARDED_BY(mutex_);
  std::string output_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t left_out_ PENSTOCK_GUARDED_BY(mutex_) = 0;  // bytes left out after it
  Standing standing_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<Fault> reason_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::server
