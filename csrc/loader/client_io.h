// SPDX-License-Identifier: Apache-2.0
#pragma once
// The I/O thread of a client of local workers: it alone uses the sockets. Requests come to it through a queue, arrivals
// leave it through the stages; it maps the arenas that workers pass, and takes the files of shared tensors.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "loader/batch_source.h"
#include "loader/local_dispatch.h"
#include "loader/passed_memory.h"
#include "net/socket.h"
#include "shm/fd_channel.h"

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

  const std::string& endpoint() const { return endpoint_; }
  Result<void> start(Stages stages) override;
  void stop() override;

  void fetch(const std::shared_ptr<cluster::RequestContent>& content) override;
  void announce(const wire::Request& request, std::span<const std::byte> body) override;
  // Hangs up on one worker, whose silence is then no loss.
  void dismiss(uint32_t worker_id) override;

  uint32_t worker_of(uint32_t shard_id) const override { return shard_id % options_.worker_count; }
  uint32_t worker_count() const override { return options_.worker_count; }
  bool has_bounded_memory() const override { return true; }
  void note_pace(const TrainerPace&) override {}

  void retire_held() override { views_.retire_held(); }

 private:
  // A worker as the I/O thread sees it.
  struct Channel {
    std::string name;
    std::unique_ptr<net::Socket> socket;
    std::optional<PassedMemory> passed;
    bool is_ready = false;      // its ZeroMQ hello has come
    bool is_dismissed = false;  // we hung up
    bool is_lost = false;
    // Lost once all that it had sent has been received.
    std::optional<std::chrono::steady_clock::time_point> hung_up_at;
    std::vector<std::vector<std::byte>> waiting;  // requests made before it was ready
  };
  // A connection of which nobody knows yet whose it is. One that stays silent keeps nobody else waiting.
  struct Newcomer {
    shm::FdConnection connection;
    std::chrono::steady_clock::time_point deadline;
  };

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { stages_.fail(0, error); }

  void accept_workers();
  void greet_newcomers();
  void welcome(uint32_t worker_id, shm::FdConnection connection);
  void send_dispatched();
  void transmit(uint32_t worker_id, std::vector<std::byte> message);
  void lose(uint32_t worker_id);
  void receive_from(uint32_t worker_id);
  void receive_descriptor(uint32_t worker_id, net::MessageParts& parts);
  Result<std::unique_ptr<Batch>> make_batch(Channel& channel, const wire::Descriptor& descriptor,
                                            net::MessageParts& parts);
  static Result<std::unique_ptr<Batch>> with_files(PassedMemory& passed, Result<std::unique_ptr<Batch>> batch);
  void check_connection(uint32_t worker_id);
  static bool is_watched(const Channel& channel);
  size_t report_losses();
  void send(uint32_t worker_id, std::vector<std::byte> message);

  ClientIoOptions options_;
  std::string endpoint_;
  std::optional<shm::FdListener> listener_;
  std::string listen_error_;
  ArenaViews views_;
  std::unique_ptr<net::SocketContext> context_;

  // Used by the I/O thread alone, once it runs.
  std::vector<Channel> channels_;
  std::vector<net::Socket*> sockets_;
  std::vector<int> fds_;
  std::unique_ptr<bool[]> is_readable_;  // readable_count_ of them
  size_t readable_count_ = 0;
  std::vector<Newcomer> newcomers_;
  size_t pending_count_ = 0;  // losses that have to be looked at again soon
  std::optional<LocalDispatch> dispatch_;

  EventLoop loop_;
};

}  // namespace penstock::loader
