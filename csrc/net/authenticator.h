// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who may connect to the servers of one process. CURVE alone proves that a client has the secret of the key that it
// shows; this decides whether that key is let in, by ZAP, libzmq's protocol for the question (RFC 27). The sockets for
// the pieces of batches let in whoever shows the ticket that is expected there, once. Everything that is neither a
// known CURVE key of an allowed role nor that ticket, for a server that is known, is answered 400.
//
// The answers come from a thread of its own: a worker that makes a batch for seconds would otherwise let every
// handshake run into its timeout. It does nothing but look keys up, and see every kKeyLookInterval whether they are
// others now: messages of a key that is let in no more are dropped, also over connections that are there.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/event_loop.h"
#include "base/instant.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/key_ring.h"
#include "net/socket.h"
#include "net/ticket.h"

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

constexpr Duration kKeyLookInterval = std::chrono::seconds(1);

// Made before the servers of its context and destroyed after them. Thread-safe.
class Authenticator final : private EventLoop::Handler {
 public:
  // One for each context.
  static Result<std::unique_ptr<Authenticator>> start(SocketContext& context);

  // For `start`.
  explicit Authenticator(SocketContext& context);
  ~Authenticator() override { loop_.stop(); }

  // The allow-list of one server, until this is destroyed. Thread-compatible.
  class Domain {
   public:
    // For `make_domain`.
    Domain(Authenticator& authenticator, std::string name) : authenticator_(authenticator), name_(std::move(name)) {}
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;
    ~Domain();

    const std::string& name() const { return name_; }
    const Authenticator& authenticator() const { return authenticator_; }

    // The next one to show this ticket is let in, and nobody by an earlier one. Nothing: nobody is.
    void expect(std::optional<Ticket> ticket);

    // The name of the user or the machine whose key it is, empty for that of a role; nothing where the key is not let
    // in any more.
    std::optional<std::string> holder_of(const PeerIdentity& identity) const;
    // News of the keys, for operators, once each.
    std::vector<std::string> take_notices();
    // Why the keys cannot be read again, so that those from before stay; empty where they can.
    std::string trouble() const;

   private:
    Authenticator& authenticator_;
    const std::string name_;
  };
  // What is let in from now on, and what to tell operators.
  struct Change {
    AllowedKeys keys{};
    KeyNames names{};  // of those of users and machines
    std::string notice{};
  };
  // Called on the thread that answers. Nothing while all is as it was.
  using Look = std::function<Result<std::optional<Change>>()>;
  std::unique_ptr<Domain> make_domain(AllowedKeys allowed, KeyNames names = {}, Look look = {});

  // How often a client was turned away because of its key or its ticket.
  uint64_t refused_count() const;
  // The reason why no connection is let in any more, if the thread that answers has failed. A server asks before it
  // receives.
  Result<void> health() const { return loop_.health(); }

 private:
  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override { socket_.reset(); }

  struct Allowed {
    AllowedKeys keys;
    KeyNames names;
    std::optional<Ticket> ticket;
    Look look;
    std::vector<std::string> notices;
    std::string trouble;
  };
  // Has each domain that looks its keys up again do so, if it is time.
  void look_at_keys();
  void take_look(const std::string& domain, Result<std::optional<Change>> look);
  // For how long the thread may sleep, in milliseconds; -1: for ever.
  long sleep_ms() const;
  // The user id of whoever asks so; none if it is turned away.
  std::optional<std::string> admit(const std::vector<std::string>& request);

  SocketContext& context_;
  std::unique_ptr<void, int (*)(void*)> socket_;  // ZeroMQ's, used by the loop's thread alone
  mutable Mutex mutex_;
  std::map<std::string, Allowed, std::less<>> domains_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t domain_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  uint64_t refused_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  Instant looked_at_{};  // of the loop's thread
  EventLoop loop_;
};

}  // namespace penstock::net
