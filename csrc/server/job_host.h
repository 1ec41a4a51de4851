// SPDX-License-Identifier: Apache-2.0
#pragma once
// Has the batches of a pool's worker made by processes beside the server, one for each job: such a process begins with
// the first batch that is asked for by a trainer and ends with that trainer. It has none of the server's keys, sockets
// and memory, and nothing of it meets the next job. What becomes of it is its own trainer's loss alone.
//
//   none ── work of a trainer ──▶ a process, with work or without ── another trainer, or none for kJobLinger ──▶ none
//
// A process that ends by itself, hangs up, or speaks wrongly has died: its work is answered so, and with it go the
// lanes that it was at.

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
#include "server/warm_process.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/blob_record.h"
#include "wire/job_record.h"

namespace penstock::server {

// For how long a job's process is kept for a trainer that has gone, or whose link was lost.
constexpr Duration kJobLinger = std::chrono::seconds(5);
// For a job's process to leave by itself, once it has been told that its job is over.
constexpr Duration kJobEndGrace = std::chrono::seconds(2);
// A larger blob crosses as a file.
constexpr uint64_t kInlineBlobBytesMax = uint64_t{1} << 20;
// So much of what jobs write to standard error waits for the log; what goes beyond is left out.
constexpr size_t kOutputBytesMax = size_t{1} << 20;
// So much of a blob is copied in one turn.
constexpr uint64_t kBlobStepBytes = uint64_t{32} << 20;

// Confined to the I/O thread, but for what is marked.
class JobHost final : public Maker {
 public:
  // `warm` is ready, and outlives this. `log_name` is that of the lines that processes of jobs write.
  JobHost(WarmProcess& warm, std::string log_name);
  ~JobHost() override;

  // Before the I/O thread uses it: its waker, which outlives both.
  void set_waker(Waker& waker) { waker_ = &waker; }

  // ---- For any thread

  std::vector<std::string> take_notices();
  // What processes of jobs have written to standard error since the last call.
  std::string take_output();
  Standing standing() const;
  // Waits until the server has ended, and says why. Nothing at the deadline. Blocks.
  std::optional<Fault> wait_closed(std::chrono::steady_clock::time_point deadline);
  void wake() const override;

  // ---- Maker

  Asked take_asked() override;
  void offer(std::shared_ptr<const PoolWork> work) override;
  void set_wanted(bool is_wanted) override;
  void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) override;
  void add_notice(std::string text) override;
  void set_standing(const Standing& standing) override;
  void close(Fault reason) override;
  std::span<const int> fds() const override { return fds_; }
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
    JobOutput output{};
    pid_t pid = 0;                                                 // 0 until it has begun
    std::shared_ptr<const PoolWork> work{};                        // in hand; shared with the I/O thread's requests
    bool is_wanted = true;                                         // as it was told
    std::optional<wire::BlobId> wish{};                            // of the work, not granted yet
    std::optional<OutgoingBlob> blob{};                            // that is granted
    std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas{};  // shared with the batches on them
    bool is_ending = false;                                        // it is dead, or dies: its end is waited for
    std::optional<Instant> killed_at{};                            // unless it has ended by then
    std::string fault{};                                           // for which it was ended, if that is why
    std::chrono::nanoseconds cpu_time{};                           // as it was seen last
  };
  // The process of a job that is over.
  struct Leaving {
    shm::Channel channel;  // shut down
    JobOutput output;
    Instant killed_at;
    bool is_killed = false;
  };

  void take_news(Asked& asked);
  void take_output_of(JobOutput& output);
  void take_end(uint64_t number, const WarmProcess::News& news, Asked& asked);
  void receive(Asked& asked);
  void receive_messages(Asked& asked);
  Result<void> take_message(const wire::FromJob& message, std::span<FileDescriptor> fds, Asked& asked);
  Result<PoolResult> result_of(const wire::FromJob& message, std::span<FileDescriptor> fds);
  Result<std::shared_ptr<shm::ArenaView>> arena_of(const wire::SlabPlace& place, bool is_new,
                                                   std::span<FileDescriptor> fds);
  void start(uint64_t trainer_id);
  void send_blob();
  Result<void> post(const wire::ToJob& message);
  // Ends the process at once; its work is lost.
  void kill(std::string why);
  void note_hang_up();
  // Lets it leave by itself.
  void let_go();
  void kill_late(Instant now);
  void note_fds();

  WarmProcess& warm_;
  const std::string log_name_;
  Waker* waker_ = nullptr;
  uint64_t next_number_ = 1;
  std::optional<Job> job_;
  std::map<uint64_t, Leaving> leaving_;       // by number
  std::optional<Instant> idle_since_;         // without a trainer
  std::chrono::nanoseconds past_cpu_time_{};  // of processes that have ended
  bool is_closed_ = false;
  std::optional<Fault> failure_;
  std::vector<int> fds_;

  mutable Mutex mutex_;
  Condition changed_;
  std::vector<std::string> notices_ PENSTOCK_GUARDED_BY(mutex_);
  std::string output_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t left_out_ PENSTOCK_GUARDED_BY(mutex_) = 0;  // bytes behind it
  Standing standing_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<Fault> reason_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::server
