// SPDX-License-Identifier: Apache-2.0
#pragma once
// Has the batches of a pool's worker made by processes beside the server, one for each job: such a process begins with
// the first batch that is asked for by a trainer and ends with that trainer. It has none of the server's keys, sockets
// and memory, and nothing of it meets the next job. What becomes of it is its own trainer's loss alone.
//
//   none ── work of a trainer ──▶ in use ── another trainer ──▶ parked ── kJobParked, or another is parked ──▶ none
//                                    ▲                             │
//                                    └──── work of its trainer ────┘
//
// One process is in use, and at most one is parked: trainers that take turns at a worker, as those of two loaders of
// one program do, keep theirs. A process ends when its trainer has said goodbye for good, or has been away from it for
// kJobLinger while nobody else is there.
//
// The process in use has the next work before it has answered the first: it makes batches while the server is busy. It
// takes both in order, so whatever it says is about the first that it has not answered. An answer to the next work is
// not read before that is offered, and its death in that work is told after that, too.
//
// A process that ends by itself, hangs up, or speaks wrongly has died: its work is answered so, and with it go the
// lanes that it was at. Work that was handed ahead and has not begun is nobody's death. One that is killed and does not
// end, as in a wait of the kernel's that nothing interrupts, is given up: it counts as dead, and the worker goes on
// without it.

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

#include "base/file_descriptor.h"
#include "base/instant.h"
#include "base/mutex.h"
#include "base/result.h"
#include "base/waker.h"
#include "server/job_output.h"
#include "server/maker.h"
#include "server/pool_work.h"
#include "server/warm_hub.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/blob_record.h"
#include "wire/job_record.h"

namespace penstock::server {

// For how long a job's process is kept for a trainer whose link was lost, or that the worker was taken from.
constexpr Duration kJobLinger = std::chrono::seconds(5);
// For a job's process to leave by itself, once it has been told that its job is over, and to end once it was killed.
constexpr Duration kJobEndGrace = std::chrono::seconds(2);
// For how long it is kept beside the one in use.
constexpr Duration kJobParked = std::chrono::seconds(300);
// For the warm process to answer that it has forked.
constexpr Duration kForkMax = std::chrono::seconds(60);
// A larger blob crosses as a file.
constexpr uint64_t kInlineBlobBytesMax = uint64_t{1} << 20;
// So much of what jobs write waits for the log; what goes beyond is left out.
constexpr size_t kOutputBytesMax = size_t{1} << 20;
// So much of a blob is copied in one turn.
constexpr uint64_t kBlobStepBytes = uint64_t{32} << 20;

struct JobHostOptions {
  Duration linger = kJobLinger;
  Duration end_grace = kJobEndGrace;
  Duration parked = kJobParked;
  Duration fork_max = kForkMax;
};

// Confined to the I/O thread, but for what is marked.
class JobHost final : public Maker {
 public:
  // `warm` outlives this. `log_name` is that of the lines that processes of jobs write.
  JobHost(WarmSeat& warm, std::string log_name, const JobHostOptions& options = {});
  ~JobHost() override;

  // Before the I/O thread uses it: its waker, which outlives both.
  void set_waker(Waker& waker) {
    waker_ = &waker;
    warm_.set_waker(waker);
  }

  // ---- For any thread

  std::vector<std::string> take_notices();
  // What processes of jobs have written since the last call, as far as it is for the log.
  std::string take_output();
  Standing standing() const;
  // Waits until the server has ended, and says why. Nothing at the deadline. Blocks.
  std::optional<Fault> wait_closed(std::chrono::steady_clock::time_point deadline);
  void wake() const override;

  // ---- Maker

  Asked take_asked() override;
  void offer(std::shared_ptr<const PoolWork> work) override;
  bool wants_ahead() const override;
  void hand_ahead(std::shared_ptr<const PoolWork> work) override;
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
  // A blob that is on its way to a job's process.
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
    bool is_readable = false;  // its channel was found to be
    JobOutput output{};
    pid_t pid = 0;                                                 // 0 until it has begun
    std::shared_ptr<const PoolWork> work{};                        // in hand; shared with the I/O thread's requests
    bool is_wanted = true;                                         // as it was told
    std::shared_ptr<const PoolWork> ahead{};                       // handed ahead, or still at the process once dropped
    bool is_ahead_dropped = false;                                 // its result is of no use
    bool has_answered = false;                                     // it has what its job is made with
    std::optional<wire::BlobId> wish{};                            // of the work, not granted yet
    std::optional<OutgoingBlob> blob{};                            // that is granted
    std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas{};  // shared with the batches on them
    std::optional<WarmProcess::News> end{};                        // it has ended, and not all that it said was read
    bool is_ending = false;                                        // it is dead, or dies: its end is waited for
    std::optional<Instant> killed_at{};                            // unless it has ended by then
    std::optional<Instant> given_up_at{};                          // the same, once it was killed
    std::string fault{};                                           // for which it was ended, if that is why
    mutable std::chrono::nanoseconds cpu_time{};                   // as it was seen last
  };
  struct Parked {
    Job job;
    Instant until{};
  };
  // The process of a job that is over.
  struct Leaving {
    shm::Channel channel;  // shut down
    JobOutput output;
    Instant due_at;  // when it is killed, and after that given up
    bool is_killed = false;
  };

  void take_news(Asked& asked);
  void take_outputs();
  void take_output_of(JobOutput& output);
  void take_end(uint64_t number, const WarmProcess::News& news, Asked& asked);
  // Whether what the process says next is about work that was handed ahead and may be offered yet.
  bool is_held_back() const { return job_ && !job_->work && job_->ahead && !job_->is_ahead_dropped; }
  std::string spoken_end(const WarmProcess::News& news) const;
  // The process in use is dead, or as good as that; `how` follows its name.
  void bury(std::string how, Asked& asked);
  void receive(Asked& asked);
  void receive_messages(Asked& asked);
  Result<void> take_message(const wire::FromJob& message, std::span<FileDescriptor> fds, Asked& asked);
  Result<PoolResult> result_of(const wire::FromJob& message, std::span<FileDescriptor> fds);
  Result<std::shared_ptr<shm::ArenaView>> arena_of(const wire::SlabPlace& place, bool is_new,
                                                   std::span<FileDescriptor> fds);
  void start(uint64_t trainer_id);
  void send_blob();
  Result<void> post(const wire::ToJob& message);
  void post_work(const PoolWork& work);
  // Ends the process at once; its work is lost.
  void kill(std::string why);
  void note_hang_up();
  // Lets the process leave by itself: the one in use, the parked one, or whichever.
  void let_go();
  void let_parked_go();
  void let_go(Job job);
  // Keeps the process in use, in the place of the one that was kept.
  void park();
  void note_idle(Instant now);
  void end_late(Instant now, Asked& asked);
  bool is_forking() const { return !failure_ && job_ && job_->pid == 0 && !job_->is_ending; }
  static void note_cpu_time(const Job& job);
  void note_fds();

  WarmSeat& warm_;
  const std::string log_name_;
  const JobHostOptions options_;
  Waker* waker_ = nullptr;
  std::optional<Job> job_;                    // in use
  std::optional<Parked> parked_;              // without work, and well
  std::map<uint64_t, Leaving> leaving_;       // by number
  std::optional<Instant> idle_since_;         // without its trainer
  uint64_t trainer_id_ = 0;                   // of the standing
  bool is_given_up_ = false;                  // the work of a process that its trainer's end has ended
  bool is_warm_readable_ = true;              // as far as is known
  std::chrono::nanoseconds past_cpu_time_{};  // of processes that have ended
  bool is_closed_ = false;
  std::optional<Fault> failure_;
  std::vector<int> fds_;
  OutputBudget output_budget_;

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<std::string> notices_ PENSTOCK_GUARDED_BY(mutex_);
  std::string output_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t left_out_ PENSTOCK_GUARDED_BY(mutex_) = 0;  // bytes behind it
  Standing standing_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<Fault> reason_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::server
