// SPDX-License-Identifier: Apache-2.0
#pragma once
// The I/O thread of a pool's worker: a socket for trainers, one to the controller, and a clock around
// cluster/worker_session.h. It answers pings while the dataset is busy, whichever thread has the interpreter's lock.

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "base/event_loop.h"
#include "base/exit_pipe.h"
#include "base/file_descriptor.h"
#include "base/instant.h"
#include "base/numerics.h"
#include "base/result.h"
#include "cluster/worker_session.h"
#include "net/authenticator.h"
#include "net/data_server.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/resolver.h"
#include "net/server_socket.h"
#include "server/answer_outbox.h"
#include "server/blob_cache.h"
#include "server/blob_fetch.h"
#include "server/energy_meter.h"
#include "server/maker.h"
#include "server/maker_watch.h"
#include "server/orphan_grace.h"
#include "server/pool_work.h"
#include "server/registration.h"
#include "server/slab_handover.h"
#include "server/watched_process.h"
#include "wire/blob_record.h"
#include "wire/pool_record.h"
#include "wire/reports.h"

namespace penstock::server {

// How long a worker that is to leave may take for what it has begun, if its supervisor gives it no other time.
constexpr Duration kDrainGrace = std::chrono::seconds(30);

struct PoolServerOptions {
  net::Endpoint bind;
  net::KeyRing keys;
  std::optional<net::Endpoint> controller = {};
  // Where trainers reach it, if not at the bound address; port 0 is the port that is bound.
  std::optional<net::Endpoint> advertised = {};
  // Where it listens for the connections that pieces of batches cross on, if not at any free port of the bound address;
  // and where trainers reach that, if not at the same port of the host at which they reach the worker.
  std::optional<net::Endpoint> data_bind = {};
  std::optional<net::Endpoint> data_advertised = {};
  uint8_t ciphers = net::fast_ciphers();                       // for the pieces of batches
  std::string about = {};                                      // this process, for people
  Numerics numerics = {};                                      // of its kernels, which trainers compare with theirs
  std::string name = {};                                       // that its engine knows it by; empty without one
  uint8_t job_kinds = wire::kind_bit(wire::JobKind::kPython);  // that its process can run
  uint16_t torch = 0;                                          // as wire::torch_number()
  uint64_t arena_bytes = 0;
  uint64_t blob_bytes_max = wire::kBlobBytesMax;
  // Without a trainer, and with a controller that has been silent for so long, the worker ends. One that has a name
  // counts from its start.
  Duration patience = std::chrono::seconds(60);
  // The process that this one ends with, as for WatchedProcess.
  pid_t parent_pid = 0;
  // Whether it ends with that process. False for a server in a process of somebody else's.
  bool watches_parent = true;
  // The name at which it listens for a trainer of this machine, to hand batches over as slabs; empty: it does not.
  std::string handover = {};
  // The powercap tree of this machine, which must tell its energy. Empty: where Linux has it, if it can be read.
  std::string powercap = {};
  // Hears the words of this worker, that for its end just before the maker hears of it. Empty where no supervisor looks
  // after it. With one, a worker that makes nothing any more ends, since another takes its place.
  ExitListener supervisor = {};
  // Whether it then ends this process, in which the dataset runs. Otherwise batches are made by processes beside this
  // one, which may have other workers in it: the worker closes, and nothing that jobs have left open is here.
  bool ends_process = true;
  size_t sharer_count = 1;              // of this process's ports, as net::ServerSocketOptions
  AbandonedGrace abandoned_grace = {};  // of MakerWatch::is_lost()
  Duration drain_grace = kDrainGrace;
};

// Confined to its loop's thread, except where a comment says otherwise. Once the loop has ended it only looks after its
// parent.
class PoolServerIo final : public EventLoop::Handler {
 public:
  // The maker, and the slabs that its batches lie in, outlive this. `slabs` may be null where none are handed over.
  PoolServerIo(const PoolServerOptions& options, const net::RunId& run, Maker& maker, shm::SlabPool* slabs);

  // Where it listens, and where trainers are told to connect. For any thread, once it is open; also after it has ended.
  const net::Endpoint& endpoint() const { return endpoint_; }
  const net::Endpoint& data_endpoint() const { return data_endpoint_; }
  const std::string& advertised() const { return advertised_; }
  const std::string& data_advertised() const { return data_advertised_; }
  // Takes a byte with the number of each signal, as Python's wakeup descriptor does: the first SIGTERM or SIGINT
  // drains, the second ends the process. For any thread.
  int signal_fd() const { return signal_write_fd_.get(); }

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;
  void failed(Fault error) override { maker_.close(std::move(error)); }

 private:
  // The connection of a trainer's last hello. What else it says counts over this one alone.
  struct Route {
    uint32_t link = 0;
    std::string routing_id;
    net::PublicKey key{};
    wire::SealOffer offer;  // of the hello that began it
  };

  Result<void> open_data_port();
  Result<void> open_energy_meter();
  wire::WorkerMeter meter() const;
  Result<void> receive(Instant now);
  void take_request(const wire::PoolRequest& request, const net::Peer& peer, Instant now);
  // Whether the message is its trainer's. A hello that is not is refused, and the operator is told.
  bool is_of_its_trainer(const wire::PoolRequest& request, const net::Peer& peer);
  void refuse_impostor(const wire::ToWorker& hello, const net::Peer& peer);
  void take_blob(const wire::BlobMessage& message, std::span<const std::byte> bytes, const net::Peer& peer,
                 Instant now);
  void serve_maker(Instant now);
  void take_result(PoolResult result, Instant now);
  void finish_given_up();
  // The process that made this trainer's batches has ended, and with it all that it had begun.
  void lose_process(uint64_t trainer_id);
  void begin_work();
  void hand_ahead();
  // Whether this is what begin_work() would begin if the work in hand were done.
  bool is_next(const PoolWork& work) const;
  void fetch_blob(const std::optional<wire::BlobId>& id, Instant now);
  void carry_out();
  std::string reason_of(const cluster::WorkerSession::Command& command) const;
  void take_signals(Instant now);
  void drain(Instant now);
  bool is_idle() const { return session_.trainer_id() == 0 && session_.is_empty(); }
  // Has a worker leave that jobs have left short of descriptors: looks once it is idle, and every now and then after.
  // Has the log know when it changes.
  void note_standing();
  // Why this worker ends now, if it does, and the word for its supervisor, if there is one.
  struct End {
    Fault reason;
    std::optional<ExitWord> word{};
    std::string text{};  // behind the word
  };
  std::optional<End> end_of(Instant now) const;
  // Lets everything go; next() says why.
  void end_because(End end);
  // Ends the process, the one beside it that makes batches, or the worker alone, where waiting for these is of no use.
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

  cluster::WorkerSession session_;
  uint64_t tenancy_ = 0;
  std::map<uint64_t, Route> routes_;    // by trainer
  std::set<net::PublicKey> impostors_;  // of whom the operator was told; no more than there are keys of trainers
  std::multimap<wire::BatchKey, PoolWork> queued_;  // the requests in the session's queue
  std::shared_ptr<const PoolWork> running_;         // shared with the thread that makes it
  std::chrono::steady_clock::time_point running_since_{};
  std::shared_ptr<const PoolWork> ahead_;                             // a queued request; shared with its process
  bool is_given_up_ = false;                                          // by that thread
  std::map<wire::BatchKey, std::shared_ptr<const PoolResult>> held_;  // shared with messages on their way
  std::map<uint64_t, std::string> declined_;                          // why, by trainer
  std::optional<BlobFetch> fetch_;
  BlobCache blobs_;
  MakerWatch maker_watch_;
  std::string how_it_died_;    // the process that made a batch last
  bool has_maker_ = false;     // it has asked for work
  uint64_t work_tenancy_ = 0;  // of the work that was begun last
  uint32_t signal_count_ = 0;
  int first_signal_ = 0;
  std::optional<Instant> drained_at_;  // since when it is to leave
  std::string shortage_;               // for which it leaves, if that is why
  Standing standing_;
  std::optional<Fault> failure_;  // of the system: no key could be made
  bool has_ended_ = false;
  OrphanGrace grace_;
  std::optional<EnergyMeter> energy_;  // where this machine tells its energy

  // In the order in which they are made; they die the other way round.
  AnswerOutbox outbox_;
  std::unique_ptr<net::Resolver> resolver_;
  std::unique_ptr<net::SocketContext> context_;
  std::unique_ptr<net::Authenticator> authenticator_;
  std::unique_ptr<net::ServerSocket> server_;
  std::unique_ptr<net::DataServer> data_;
  std::unique_ptr<SlabHandover> handover_;  // null where batches are not handed over
  std::unique_ptr<Registration> registration_;
};

}  // namespace penstock::server
