// SPDX-License-Identifier: Apache-2.0
#pragma once
// The client's side of its local workers. ClientIo is the I/O thread that sends requests to them and receives their
// batches. LocalDispatch chooses the worker for each batch, if a batch does not depend on its worker.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/result.h"
#include "loader/batch_memory.h"
#include "loader/batch_source.h"
#include "net/socket.h"
#include "session/dispatch.h"
#include "shm/channel.h"
#include "wire/job_record.h"
#include "wire/message.h"

namespace penstock::loader {

// The message that requests a batch from a local worker. It refers to the indices in `content`.
wire::ToJob work_of(const session::RequestContent& content);

// Chooses the local worker for each batch, if a batch does not depend on its worker: the worker expected to answer
// soonest, by the same dispatch as in pools. The outstanding batches of a dead worker are made by the others; a batch
// that kills one worker after another fails alone. This class makes decisions and sends no messages: its caller owns
// the sockets.
//
// A late batch is also requested from a second worker, if every worker that has answered reports that its dataset stays
// unchanged: then fetching a sample twice has no visible effect. If the second worker's batch arrives first, the late
// worker receives no requests until it answers or an epoch starts, since a request to a local worker cannot be
// cancelled.
//
// A worker does not report which request it has started. So each of a dead worker's outstanding batches is made alone
// from then on, so that the next death can be attributed to its batch.
//
// Confined to the I/O thread.
class LocalDispatch {
 public:
  using Message = std::vector<std::byte>;

  // A worker has at most `depth` requests at once, and only one if batches take long.
  LocalDispatch(uint32_t worker_count, uint32_t depth);

  struct Send {
    uint32_t worker_id;
    Message message;
  };
  // Returns the messages to send because of the events since the last call, in order.
  std::vector<Send> take_sends();

  struct Failure {
    wire::BatchKey key;
    uint32_t death_count;
  };
  // Returns the batches that killed too many workers.
  std::vector<Failure> take_failures();

  // An epoch starts, or starts early. Requests of finished epochs are forgotten.
  void announce(wire::ToJob::Kind kind, uint32_t epoch, Message message, Instant now);
  void ask(wire::BatchKey key, session::SharedContent content, Instant now);

  void worker_joined(uint32_t worker_id, Instant now);
  void worker_died(uint32_t worker_id, Instant now);
  // Whether any worker can make a batch, now or after its start.
  bool has_workers() const { return lost_count_ < workers_.size(); }
  // has_workers() after the loss of one more worker.
  bool has_others() const { return lost_count_ + 1 < workers_.size(); }

  // Returns true if this is the first answer for its batch. `dataset_stays`: the flag in the answer.
  bool answered(uint32_t worker_id, wire::BatchKey key, bool dataset_stays, Instant now);

  // Looks for late batches; next_tick() returns when it may next find one.
  void tick(Instant now);
  std::optional<Instant> next_tick() const { return dispatch_.next_tick(); }
  uint64_t hedge_count() const { return dispatch_.hedge_count(); }

 private:
  struct Worker {
    std::optional<bool> dataset_stays{};  // in its last answer
    bool knows_early = false;             // the early epoch was announced to it
    bool is_late = false;                 // it is still making a batch that another worker has answered
    bool is_dead = false;
  };

  void carry_out(Instant now);
  // The worker may receive requests again.
  void end_lateness(uint32_t worker_id, Instant now);
  void send_request(uint32_t worker_id, wire::BatchKey key);

  uint32_t lost_count_ = 0;
  session::Dispatch dispatch_;
  std::optional<uint32_t> early_epoch_;
  Message early_message_;
  std::vector<Worker> workers_;
  std::vector<Send> sends_;
  std::vector<Failure> failures_;
};

struct ClientIoOptions {
  uint32_t worker_count = 1;
  size_t arrival_count_max = 64;
  // Any worker may make a batch, with at most this many outstanding requests per worker; 0: a shard's worker makes it.
  uint32_t any_worker_depth = 0;
};

// The I/O thread of a client of local workers: once it runs, only this thread uses their channels. Requests reach it
// through a queue, arrivals leave it through the stages; it maps the arenas that workers pass, and receives the files
// of shared tensors.
//
// A worker is lost when its channel has ended, or when its process has ended and the channel is empty: a process that
// the dataset forked may keep the worker's end open. In either case all messages from the worker arrive before the
// report of its loss. If the channel fails, because a request cannot be sent or the received bytes are not a message,
// the worker is lost immediately. A worker that sends an invalid message is lost, too, if others can make its batches,
// and the training continues; otherwise the trainer receives an error for each invalid message.
class ClientIo : public BatchSource, private EventLoop::Handler {
 public:
  explicit ClientIo(const ClientIoOptions& options);
  ~ClientIo() override;

  // Call before start(), once per worker: creates its channel. The worker's process obtains the worker's end
  // (worker::LocalServer::open); note_started() or stop() closes it here. A forked worker process must close the
  // trainer's end, or it would not notice that the trainer has exited. kNoMemory.
  Result<ChannelFds> open_channel(uint32_t worker_id);
  // Call before start(), once the worker's process has its end. 0: the worker is in this process. kNoMemory.
  Result<void> note_started(uint32_t worker_id, pid_t pid);

  Result<void> start(Stages stages) override;
  void stop() override;

  void fetch(const std::shared_ptr<session::RequestContent>& content) override;
  void announce(const wire::ToJob& message) override;
  // Closes the connection to one worker, whose silence then does not count as a loss.
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

    std::optional<shm::Channel> channel;  // none once the worker is gone or dismissed
    FileDescriptor worker_end;            // the worker's end, until the worker is started
    FileDescriptor process;               // a handle (pidfd); none before Linux 5.3, or if the process has ended
    bool has_ended = false;               // the process had ended before a handle was opened
    PassedMemory memory;
    uint64_t channel_tag = 0;  // in the ready set; 0: not in it
    uint64_t process_tag = 0;
    bool is_output_watched = false;
    bool is_ready = false;  // the worker has reported ready
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
  // Receives the pending messages. Returns false if there were none, or the channel has ended.
  bool receive(uint32_t worker_id);
  // Drops a worker whose channel has failed, and reports why: as news if others take over its work, otherwise as a
  // failure.
  void give_up(uint32_t worker_id, const Fault& fault);
  // Handles a message that no correct worker sends.
  void refuse(uint32_t worker_id, const Fault& fault);
  void receive_message(uint32_t worker_id, const shm::Channel::Message& received);
  void receive_batch(uint32_t worker_id, const wire::FromJob& message, std::span<FileDescriptor> fds);
  Result<std::unique_ptr<Batch>> make_batch(uint32_t worker_id, const wire::FromJob& message,
                                            std::span<FileDescriptor> files);
  void leave(uint32_t worker_id);
  void lose(uint32_t worker_id);

  ClientIoOptions options_;
  ArenaViews views_;

  // Confined to the I/O thread, once it runs.
  std::vector<Worker> workers_;
  std::unique_ptr<net::ReadySet> ready_set_;
  uint64_t wake_tag_ = 0;  // 0: the loop's descriptor is not in the set yet
  struct Watched {
    uint32_t worker_id;
    bool is_process;
  };
  std::map<uint64_t, Watched> watched_;  // by tag
  std::vector<uint64_t> ready_;          // tags for the next turn
  std::optional<LocalDispatch> dispatch_;

  EventLoop loop_;
};

}  // namespace penstock::loader
