// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batches that the workers of one machine keep, whichever `penstock worker` has started them. Each server has a
// MachineStore. The first one of a StorePlace becomes the *host*: it keeps the batches of all, in its BatchStore, and
// the others ask it over a channel. Small batches follow the messages, larger ones are files in memory. If the host
// ends, the next server becomes the host, and the batches are made again; a server without a host keeps its own.
//
// The address of the host can be read by any process of the machine. Each side therefore proves to the other that it
// has the workers' secret key, which the processes of jobs do not have.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/keys.h"
#include "server/batch_store.h"
#include "server/maker.h"
#include "session/named_batches.h"
#include "shm/channel.h"
#include "wire/reports.h"
#include "wire/store_record.h"

namespace penstock::server {

// How long a worker's thread waits for the host, which answers within a millisecond unless it was stopped.
constexpr Duration kStoreAnswerMax = std::chrono::seconds(1);
// Between attempts to become the host, or to find it.
constexpr Duration kStoreRetry = std::chrono::milliseconds(500);
// For the proof of a new connection, and connections without one at a time.
constexpr Duration kStoreProofMax = std::chrono::seconds(5);
constexpr size_t kStoreUnprovenMax = 64;
constexpr size_t kStorePeerCountMax = 1024;

// Where the servers meet that may share: workers of one pool, with one key, whose jobs see the same files through the
// same installation, so that any of them would make the same batch.
struct StorePlace {
  std::string name;       // of the socket
  net::SecretKey secret;  // that the servers prove to have

  // `installation` describes everything else that has to be equal. Empty if this process's view of the file system is
  // unknown.
  static std::optional<StorePlace> of(const net::KeyRing& keys, const std::string& controller,
                                      std::span<const std::string> installation);
};

// Thread-safe, except start() and the destructor.
class MachineStore final : private EventLoop::Handler {
 public:
  // Empty: it shares with no other server.
  explicit MachineStore(std::optional<StorePlace> place = std::nullopt);
  ~MachineStore() override;

  // Starts the thread that shares; without a place there is none. kNoMemory.
  Result<void> start();
  // The error that ended the thread, if there is one: this server keeps its batches alone from then on.
  Result<void> health() const { return loop_.health(); }

  // As for BatchStore. A call may block for up to kStoreAnswerMax; if the host does not answer in time, this server
  // keeps its batches alone until it does.
  void join(uint64_t worker_id, std::function<void()> wake);
  void leave(uint64_t worker_id);
  void set_share(uint64_t worker_id, uint64_t bytes);
  void note_memory(const wire::HostLoad& load) { local_.note_memory(load); }
  bool is_on() const { return is_on_; }
  BatchStore::Answer ask(const session::BatchName& name, const session::Claimant& by, bool may_wait);
  bool ask_ahead(const session::BatchName& name, const session::Claimant& by);
  // Whether the batch is made as if it had no name.
  bool is_passed_over(const session::BatchName& name);
  void stop_waiting(uint64_t worker_id);

  // An admitted batch. It is void once the batches are kept elsewhere.
  struct Id {
    uint64_t era = 0;
    BatchStore::Id number = 0;
  };
  std::optional<Id> admit(const session::BatchName& name, const session::Claimant& by, const PoolResult& result);
  // The memory for a batch that was admitted.
  Result<std::unique_ptr<KeptBatch>> new_batch(uint64_t payload_bytes, uint32_t record_bytes);
  void settle(Id id, std::shared_ptr<const PoolResult> result);
  void drop(Id id);
  void release(const session::BatchName& name, const session::Claimant& by);
  void refuse(const session::BatchName& name, const session::Claimant& by);
  uint64_t bytes_made_by(uint64_t worker_id);

  // Its part among the servers of its place, for tests.
  enum class Role : uint8_t { kAlone, kHost, kGuest };
  Role role() const { return role_; }

 private:
  struct Member {
    std::function<void()> wake;
    uint64_t share = 0;
    bool waits = false;       // the host remembers a wait of it
    uint64_t made_bytes = 0;  // as last read from the host
    Instant made_bytes_read_at{};
  };
  // A guest, as the host sees it.
  struct Peer {
    explicit Peer(shm::Channel opened) : channel(std::move(opened)) {}

    shm::Channel channel;
    wire::StoreNonce nonce{};
    Instant accepted_at{};
    bool is_proven = false;
    bool is_for_wakes = false;
    uint64_t guest_id = 0;
    std::set<uint64_t> workers{};
    std::shared_ptr<std::atomic<bool>> is_woken{};  // shared by both connections of a guest and its members' wakes
  };
  struct Reply {
    wire::FromStore message{};
    FileDescriptor file{};
  };

  // EventLoop::Handler
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;

  // ---- The host, on the loop's thread
  void serve_guests(Instant now);
  void accept_guests(Instant now);
  bool serve_guest(Peer& peer);
  bool welcome(Peer& peer, const wire::ToStore& hello);
  bool answer(Peer& peer, const wire::ToStore& question, std::span<FileDescriptor> files);
  void settle_of(const wire::ToStore& question, std::span<FileDescriptor> files);
  void part_from(Peer& peer);

  // ---- A guest
  void open(Instant now);
  Result<shm::Channel> connect(uint64_t guest_id, bool is_for_wakes) const;
  void begin_as_guest(shm::Channel calls, shm::Channel wakes);
  void serve_wakes();
  std::optional<Reply> call(const wire::ToStore& question, int file = -1) PENSTOCK_REQUIRES(mutex_);
  void note_sparse(const std::string& group, bool is_sparse) PENSTOCK_REQUIRES(mutex_);
  void lose_host() PENSTOCK_REQUIRES(mutex_);
  static std::shared_ptr<const PoolResult> result_of(Reply reply);

  const std::optional<StorePlace> place_;
  BatchStore local_;  // empty in a guest, whose batches the host keeps
  std::atomic<bool> is_on_{false};
  std::atomic<Role> role_{Role::kAlone};
  std::atomic<bool> has_guests_{false};

  Mutex mutex_;  // held while a guest waits for an answer
  std::map<uint64_t, Member> members_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<shm::Channel> calls_ PENSTOCK_GUARDED_BY(mutex_);  // of a guest
  uint64_t era_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  std::unordered_set<std::string> sparse_ PENSTOCK_GUARDED_BY(mutex_);  // of a guest: groups, as the host said last

  // Confined to the loop's thread.
  std::optional<shm::ChannelListener> listener_;  // of a host
  std::vector<std::unique_ptr<Peer>> peers_;
  std::optional<shm::Channel> wakes_;  // of a guest
  Instant retry_at_{};
  Instant accept_at_{};  // of a host: not before, as its descriptors were exhausted

  EventLoop loop_;
};

}  // namespace penstock::server
