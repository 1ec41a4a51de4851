// SPDX-License-Identifier: Apache-2.0
#pragma once
// The I/O thread of a client of local workers: it alone uses the sockets. Requests come to it through a queue, arrivals
// leave it through another; it maps the arenas that workers pass and runs the batch stage as batches come in.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "loader/batch_source.h"
#include "loader/local_dispatch.h"
#include "net/socket.h"
#include "shm/fd_channel.h"

namespace penstock::loader {

struct ClientIoOptions {
  uint32_t worker_count = 1;
  size_t arrival_count_max = 64;
  // A batch may be made by any worker, of which each is asked for so many at once; 0: the worker of its shard makes it.
  uint32_t any_worker_depth = 0;
};

class ClientIo : public BatchSource {
 public:
  explicit ClientIo(const ClientIoOptions& options);
  ~ClientIo() override;

  const std::string& endpoint() const { return endpoint_; }
  Result<void> start(std::unique_ptr<BatchStage> stage) override;
  void stop() override;

  void fetch(const wire::Request& request, std::span<const std::byte> body) override;
  void announce(const wire::Request& request, std::span<const std::byte> body) override;
  // Hangs up on one worker, whose silence is then no loss.
  void dismiss(uint32_t worker_id) override;

  uint32_t worker_of(uint32_t shard_id) const override { return shard_id % options_.worker_count; }
  uint32_t worker_count() const override { return options_.worker_count; }
  bool has_bounded_memory() const override { return true; }
  void note_ready(uint32_t) override {}

  void finish(Batch& batch) override;
  void retire_held() override;

 private:
  struct Outgoing {
    enum class Kind : uint8_t { kMessage, kDismissal, kToAny, kEpoch };
    Kind kind = Kind::kMessage;
    uint32_t worker_id = 0;   // of the first two
    wire::Request request{};  // of the others
    std::vector<std::byte> message{};
  };
  // A worker as the I/O thread sees it.
  struct Channel {
    std::string name;
    std::unique_ptr<net::Socket> socket;
    std::optional<shm::FdConnection> connection;
    bool is_ready = false;      // its ZeroMQ hello has come
    bool is_dismissed = false;  // we hung up
    bool is_lost = false;
    std::optional<std::chrono::steady_clock::time_point> hung_up_at;  // lost once what it had sent has come
    std::vector<std::vector<std::byte>> waiting;                      // requests made before it was ready
    std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas;       // shared with the leases on their slabs
  };

  void run_to_the_end(const std::stop_token& stop);
  void run(const std::stop_token& stop);
  void accept_workers();
  void send_outgoing();
  void send_dispatched();
  void transmit(uint32_t worker_id, std::vector<std::byte> message);
  void lose(uint32_t worker_id);
  void receive_from(uint32_t worker_id);
  void receive_descriptor(uint32_t worker_id, net::MessageParts& parts);
  Result<std::unique_ptr<Batch>> make_batch(Channel& channel, const wire::Descriptor& descriptor,
                                            net::MessageParts& parts);
  Result<std::shared_ptr<shm::ArenaView>> find_arena(Channel& channel, const wire::Descriptor& descriptor);
  Result<void> receive_arena(Channel& channel, std::chrono::steady_clock::time_point deadline);
  void check_connection(uint32_t worker_id);
  static bool is_watched(const Channel& channel);
  size_t settle_losses();
  void send(uint32_t worker_id, std::vector<std::byte> message);
  void wake();

  ClientIoOptions options_;
  std::string endpoint_;
  std::optional<shm::FdListener> listener_;
  std::string listen_error_;
  FileDescriptor wake_fd_;
  std::atomic<bool> is_awake_{true};
  std::unique_ptr<BatchStage> stage_;
  BoundedQueue<Outgoing> outgoing_;
  Mutex views_mutex_;
  std::vector<std::weak_ptr<shm::ArenaView>> views_ PENSTOCK_GUARDED_BY(views_mutex_);
  std::unique_ptr<net::SocketContext> context_;
  std::vector<Channel> channels_;          // used by the I/O thread alone once it runs
  std::optional<LocalDispatch> dispatch_;  // the same
  std::jthread thread_;                    // named pk_client_io
};

}  // namespace penstock::loader
