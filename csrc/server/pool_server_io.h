// SPDX-License-Identifier: Apache-2.0
#pragma once
// The I/O thread of a pool worker: a socket for trainers, a socket to the controller, and a clock around
// session/worker_session.h. It answers pings while the dataset is busy, regardless of which thread holds the
// interpreter's lock.

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "base/child_process.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/numerics.h"
#include "base/result.h"
#include "net/authenticator.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/server_socket.h"
#include "server/answer_outbox.h"
#include "server/batch_store.h"
#include "server/blob_fetch.h"
#include "server/energy_meter.h"
#include "server/machine_store.h"
#include "server/maker.h"
#include "server/registration.h"
#include "server/watched_process.h"
#include "session/worker_session.h"
#include "wire/blob_record.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::server {

// How long a draining worker may take for the work that it has started, unless its supervisor sets another time.
constexpr Duration kDrainGrace = std::chrono::seconds(30);

struct PoolServerOptions {
  net::Endpoint bind;
  net::KeyRing keys;
  std::optional<net::Endpoint> controller = {};
  // The address for trainers, if not the bound address; port 0: the bound port.
  std::optional<net::Endpoint> advertised = {};
  // The address to listen on for the connections that carry chunks of batches, if not any free port of the bound
  // address; and their address for trainers, if not the same port of the host at which trainers reach the worker.
  std::optional<net::Endpoint> data_bind = {};
  std::optional<net::Endpoint> data_advertised = {};
  uint8_t ciphers = net::fast_ciphers();  // for the chunks of batches
  std::string about = {};                 // describes this process to the user
  Numerics numerics = {};                 // of its kernels; trainers compare them with theirs
  std::string name = {};                  // by which its engine identifies it; empty without an engine
  uint8_t job_kinds = wire::kind_bit(wire::JobKind::kPython);  // that its process can run
  uint16_t torch = 0;                                          // as wire::torch_number()
  std::shared_ptr<const LogTail> log = {};                     // its last lines; null: operators do not see them
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes_max = wire::kBlobBytesMax;
  // Without a trainer, and with a controller that has been silent for this long, the worker ends. For a worker with a
  // name the time counts from its start.
  Duration patience = std::chrono::seconds(60);
  // The process whose end also ends this one, as for WatchedProcess.
  pid_t parent_pid = 0;
  // Whether it ends together with that process. False for a server in a process that it does not own.
  bool watches_parent = true;
  // The name at which it listens for a trainer on this machine, to hand batches over as slabs; empty: it does not
  // listen.
  std::string handover = {};
  // The powercap tree of this machine, which must be readable. Empty: Linux's default location, if it can be read.
  std::string powercap = {};
  // Receives the exit words of this worker, the word for its end just before the maker is closed. Empty without a
  // supervisor. With a supervisor, a worker that makes no more batches ends, since another replaces it.
  ExitListener supervisor = {};
  // Whether it then ends this process, which runs the dataset. Otherwise batches are made by separate processes, and
  // other workers may be in this one: only the worker closes, as jobs have left no resources open in this process.
  bool ends_process = true;
  size_t sharer_count = 1;                   // number of sharers of this process's ports, as net::ServerSocketOptions
  AbandonedGrace abandoned_grace = {};       // for MakerWatch::is_lost()
  std::shared_ptr<MachineStore> store = {};  // shared by the workers of a server; null: no batch is kept
  Duration drain_grace = kDrainGrace;
};

// Confined to its loop's thread, except where a comment states otherwise. After the loop has ended it only watches its
// parent.
class PoolServerIo final : public EventLoop::Handler {
 public:
  // The maker, and the slabs that contain its batches, must outlive this object. `slabs` may be null if batches are not
  // handed over.
  PoolServerIo(const PoolServerOptions& options, const net::RunId& run, Maker& maker, shm::SlabPool* slabs);
  ~PoolServerIo() override;

  // The addresses that it listens on, and the addresses advertised to trainers. For any thread, once it is open; also
  // after it has ended.
  const net::Endpoint& endpoint() const { return endpoint_; }
  const net::Endpoint& data_endpoint() const { return data_endpoint_; }
  const std::string& advertised() const { return advertised_; }
  const std::string& data_advertised() const { return data_advertised_; }
  // Takes a byte with the number of each signal, like Python's wakeup descriptor: the first SIGTERM or SIGINT drains,
  // the second ends the process. For any thread.
  int signal_fd() const { return signal_write_fd_.get(); }

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { maker_.close(std::move(error)); }

 private:
  // The connection of a trainer's last hello. Other messages of the trainer count only on this connection.
  struct Route {
    uint32_t link = 0;
    std::string routing_id;
    net::PublicKey key{};
    wire::SealOffer offer;  // of the hello that started it
  };

  Result<void> open_data_port();
  Result<void> open_energy_meter();
  wire::WorkerMeter meter() const;
  Result<void> receive(Instant now);
  void take_request(const wire::PoolRequest& request, const net::Peer& peer, Instant now);
  // Whether the trainer named in the message sent it. A hello from another sender is refused and reported.
  bool is_of_its_trainer(const wire::PoolRequest& request, const net::Peer& peer);
  void refuse_impostor(const wire::ToWorker& hello, const net::Peer& peer);
  void take_blob(const wire::BlobMessage& message, std::span<const std::byte> bytes, const net::Peer& peer,
                 Instant now);
  void serve_maker(Instant now);
  void take_result(PoolResult result, Instant now);
  void finish_given_up();
  // The process that made this trainer's batches has ended, and all its started work is lost.
  void lose_process(uint64_t trainer_id);
  void begin_work();
  void offer(PoolWork work);
  // The request to start, and its batch if that is kept; empty if there is none, or if each is being made by another
  // worker.
  struct Choice {
    wire::BatchKey key{};
    std::shared_ptr<const PoolResult> kept{};
  };
  std::optional<Choice> choose();
  void send_ahead();
  // Whether begin_work() would start this work if the current work were done.
  bool is_next(const PoolWork& work) const;
  // The name of a request's batch; null if nothing is kept, or if the batch is not a function of a name.
  std::shared_ptr<const session::BatchName> name_of(const PoolWork& work, const net::PublicKey& owner) const;
  // The result will not be kept, so others may make it.
  void release(const PoolWork& work);
  void keep(const PoolWork& work, const std::shared_ptr<const PoolResult>& result);
  void copy_kept();
  void serve_store();
  void fetch_blob(const std::optional<wire::BlobId>& id, Instant now);
  void carry_out();
  std::string reason_of(const session::WorkerSession::Command& command) const;
  void take_signals(Instant now);
  void drain(Instant now);
  bool is_idle() const { return session_.trainer_id() == 0 && session_.is_empty(); }
  // Passes a standing that has changed to the maker, for the log.
  void note_standing();
  // The reason for ending now, if any, and the word for its supervisor, if there is one.
  struct End {
    Fault reason;
    std::optional<ExitWord> word{};
    std::string text{};  // sent after the word
  };
  std::optional<End> end_of(Instant now) const;
  // Releases all resources; next() returns the reason.
  void end_because(End end);
  // Ends the process, the separate process that makes batches, or only the worker, if waiting for them is useless.
  void end_lost_process(Instant now);
  bool is_orphan() const;

  const PoolServerOptions& options_;
  const net::RunId run_;
  const WatchedProcess parent_;
  Maker& maker_;
  shm::SlabPool* const slabs_;
  net::Endpoint endpoint_;
  net::Endpoint data_endpoint_;
  std::string advertised_;
  std::string advertised_host_;
  std::string data_advertised_;
  FileDescriptor signal_read_fd_;
  FileDescriptor signal_write_fd_;

  session::WorkerSession session_;
  uint64_t tenancy_ = 0;
  std::map<uint64_t, Route> routes_;                // by trainer
  std::set<net::PublicKey> impostors_;              // reported to the operator; at most one per trainer key
  std::multimap<wire::BatchKey, PoolWork> queued_;  // the requests in the session's queue
  std::shared_ptr<const PoolWork> running_;         // shared with the thread that makes it
  std::chrono::steady_clock::time_point running_since_{};
  std::shared_ptr<const PoolWork> ahead_;                             // a queued request; shared with its process
  bool is_given_up_ = false;                                          // by that thread
  std::map<wire::BatchKey, std::shared_ptr<const PoolResult>> held_;  // shared with messages in transit
  // A batch that is being copied for the store.
  struct Copy {
    MachineStore::Id id{};
    std::shared_ptr<const PoolResult> source;
    std::unique_ptr<KeptBatch> batch;
  };
  std::deque<Copy> copies_;
  uint64_t kept_answers_ = 0;  // batches that were kept
  wire::HostLoad noted_load_;
  std::map<uint64_t, std::string> declined_;  // reasons, by trainer
  std::optional<BlobFetch> fetch_;
  BlobCache blobs_;
  MakerWatch maker_watch_;
  std::string death_description_;  // how the last process that made a batch died
  bool has_maker_ = false;         // it has requested work
  uint64_t work_tenancy_ = 0;      // of the work started last
  uint32_t signal_count_ = 0;
  int first_signal_ = 0;
  std::optional<Instant> drained_at_;  // when draining started
  std::string shortage_;               // the reason for leaving, if it is a shortage
  Standing standing_;
  std::optional<Fault> failure_;  // of the system: a key could not be made
  bool has_ended_ = false;
  OrphanGrace grace_;
  std::optional<EnergyMeter> energy_;  // if this machine reports its energy

  // In order of construction; they are destroyed in reverse order.
  AnswerOutbox outbox_;
  std::unique_ptr<net::Resolver> resolver_;
  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::Authenticator> authenticator_;
  std::unique_ptr<net::ServerSocket> server_;
  std::unique_ptr<net::DataServer> data_;
  std::unique_ptr<SlabHandover> handover_;  // null if batches are not handed over
  std::unique_ptr<Registration> registration_;
};

}  // namespace penstock::server
