// SPDX-License-Identifier: Apache-2.0
#pragma once
// The I/O thread of a client of local workers: it alone uses their channels once it runs. Requests come to it through a
// queue, arrivals leave it through the stages; it maps the arenas that workers pass, and takes the files of shared
// tensors.
//
// A worker is lost when its channel has ended, or its process has and the channel is empty: a process that the dataset
// has forked may keep the worker's end open. Either way all that the worker had sent arrives before the news. One whose
// channel fails, as it cannot be sent a request or sends what is no message, is lost at once. One that speaks wrongly
// is lost, too, where others make its batches, and the training goes on; else the trainer is told of each wrong
// message.

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "loader/batch_source.h"
#include "loader/local_dispatch.h"
#include "loader/passed_memory.h"
#include "net/ready_set.h"
#include "shm/channel.h"

namespace penstock::loader {

struct ClientIoOptions {
  uint32_t worker_count = 1;
  size_t arrival_count_max = 64;
  // Any worker may make a batch, and each is asked for at most this many at once; 0: the worker of its shard makes it.
  uint32_t any_worker_depth = 0;
};

class ClientIo : public BatchSource, private EventLoop::Handler {
 public:
  explicit ClientIo(const ClientIoOptions& options);
  ~ClientIo() override;

  // Before start(), once for each worker: makes its channel. The worker's end is to be had by its process
  // (worker::LocalServer::open), and is closed here by note_started() or stop(). The trainer's is closed in the process
  // of a forked worker, which would not see that the trainer has ended otherwise. kNoMemory.
  Result<ChannelFds> open_channel(uint32_t worker_id);
  // Before start(): the worker's process has its end. 0: it is in this process. kNoMemory.
  Result<void> note_started(uint32_t worker_id, pid_t pid);

  Result<void> start(Stages stages) override;
  void stop() override;

  void fetch(const std::shared_ptr<cluster::RequestContent>& content) override;
  void announce(const wire::ToJob& message) override;
  // Hangs up on one worker, whose silence is then no loss.
  void dismiss(uint32_t worker_id) override;

  uint32_t worker_of(uint32_t shard_id) const override { return shard_id % options_.worker_count; }
  uint32_t worker_count() const override { return options_.worker_count; }
  bool has_bounded_memory() const override { return true; }
  void note_pace(const TrainerPace&) override {}

  void retire_held() override { views_.retire_held(); }

 private:
  // A worker as the I/O thread sees it.
  struct Worker {
    Worker(ArenaViews& views, Counter& arenas) : memory(views, arenas) {}

    std::optional<shm::Channel> channel;  // none once the worker is gone, or was dismissed
    FileDescriptor its_end;               // until it is started
    FileDescriptor process;               // a handle (pidfd); none before Linux 5.3, or of one that has ended
    bool has_ended = false;               // its process, before there was a handle
    PassedMemory memory;
    uint64_t channel_tag = 0;  // in the set that waits; 0: not in it
    uint64_t process_tag = 0;
    bool is_output_watched = false;
    bool is_ready = false;  // it said so
  };
  using Message = std::shared_ptr<const std::vector<std::byte>>;

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { stages_.fail(0, error); }

  void send_dispatched();
  void post(uint32_t worker_id, shm::Channel::Parts parts);
  void post(uint32_t worker_id, const Message& message);
  void note_posted(uint32_t worker_id, const Result<void>& posted);
  void watch_output(uint32_t worker_id);
  void serve_channel(uint32_t worker_id);
  void serve_process(uint32_t worker_id);
  // Takes in what has come. False where nothing had, or the channel has ended.
  bool receive(uint32_t worker_id);
  // Loses a worker whose channel has failed, and says why: as news where others make what it owed, else as a failure.
  void give_up(uint32_t worker_id, const Fault& fault);
  // What is to become of a message that no worker sends.
  void refuse(uint32_t worker_id, const Fault& fault);
  void receive_message(uint32_t worker_id, const shm::Channel::Message& received);
  void receive_batch(uint32_t worker_id, const wire::FromJob& message, std::span<FileDescriptor> fds);
  Result<std::unique_ptr<Batch>> make_batch(uint32_t worker_id, const wire::FromJob& message,
                                            std::span<FileDescriptor> files);
  void leave(uint32_t worker_id);
  void lose(uint32_t worker_id);

  ClientIoOptions options_;
  ArenaViews views_;

  // Used by the I/O thread alone, once it runs.
  std::vector<Worker> workers_;
  std::unique_ptr<net::ReadySet> ready_set_;
  uint64_t wake_tag_ = 0;  // 0: the loop's descriptor is not in the set yet
  struct Watched {
    uint32_t worker_id;
    bool is_process;
  };
  std::map<uint64_t, Watched> watched_;  // by tag
  std::vector<uint64_t> ready_;          // tags, for the next turn
  std::optional<LocalDispatch> dispatch_;

  EventLoop loop_;
};

}  // namespace penstock::loader
