// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who may connect to the servers of one process. CURVE alone proves that a client has the secret of the key that it
// shows; this decides whether that key is let in, by ZAP, libzmq's protocol for the question (RFC 27). Everything that
// is not a known CURVE key of an allowed role, for a server that is known, is answered 400.
//
// The answers come from a thread of its own: a worker that makes a batch for seconds would otherwise let every
// handshake run into its timeout. It does nothing but look keys up.

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/keys.h"
#include "net/socket.h"

namespace penstock::net {

// Who a peer is, as its key says. It travels as ZAP's User-Id, which libzmq attaches to every message of the connection
// and which a peer cannot set itself.
struct PeerIdentity {
  Role role = Role::kOperator;
  PublicKey key;

  std::string user_id() const;
  static std::optional<PeerIdentity> parse(std::string_view user_id);

  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};

using AllowedKeys = std::map<PublicKey, Role>;

// Made before the servers of its context and destroyed after them. Thread-safe.
class Authenticator {
 public:
  // One for each context.
  static Result<std::unique_ptr<Authenticator>> start(SocketContext& context);

  // For `start`, which gives it its thread.
  explicit Authenticator(FileDescriptor wake_fd) : wake_fd_(std::move(wake_fd)) {}
  Authenticator(const Authenticator&) = delete;
  Authenticator& operator=(const Authenticator&) = delete;
  ~Authenticator();

  // The allow-list of one server, until this is destroyed. Thread-compatible.
  class Domain {
   public:
    // For `make_domain`.
    Domain(Authenticator& authenticator, std::string name) : authenticator_(authenticator), name_(std::move(name)) {}
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;
    ~Domain();

    const std::string& name() const { return name_; }

   private:
    Authenticator& authenticator_;
    const std::string name_;
  };
  std::unique_ptr<Domain> make_domain(AllowedKeys allowed);

  // How often a client was turned away because of its key.
  uint64_t refused_count() const;

 private:
  // Answers until it is told to stop. Says through `started` whether it could begin.
  void run(const std::stop_token& stop, void* context, std::promise<Result<void>>& started);
  void serve(const std::stop_token& stop, void* socket);
  void answer(void* socket);
  // The role of `key` for the server of `domain`; none if it is turned away.
  std::optional<Role> look_up(const std::string& domain, const PublicKey& key) const;

  FileDescriptor wake_fd_;
  mutable Mutex mutex_;
  std::map<std::string, AllowedKeys, std::less<>> domains_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t domain_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  uint64_t refused_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;
};

}  // namespace penstock::net
