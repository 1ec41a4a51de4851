// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides who may connect to the servers of one process. CURVE alone proves that a client has the secret of the key
// that it shows; the authenticator decides whether that key is admitted, by ZAP, libzmq's protocol for this question
// (RFC 27). The sockets for the pieces of batches admit the first client that shows the expected ticket. Any client
// that shows neither a known CURVE key of an allowed role nor that ticket, or connects to an unknown server, is
// answered 400.
//
// A separate thread answers: a worker that makes a batch for seconds would otherwise let every handshake time out. The
// thread only looks up keys, and checks every kKeyCheckInterval whether they have changed: messages from a key that is
// no longer admitted are dropped, also on existing connections.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/keys.h"
#include "net/seal.h"
#include "net/socket.h"

namespace penstock::net {

// The identity of a peer, according to its key. It is passed as ZAP's User-Id, which libzmq attaches to every message
// of the connection and which a peer cannot set itself.
struct PeerIdentity {
  Role role = Role::kOperator;
  PublicKey key;

  std::string user_id() const;
  static std::optional<PeerIdentity> parse(std::string_view user_id);

  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};

using AllowedKeys = std::map<PublicKey, Role>;

constexpr Duration kKeyCheckInterval = std::chrono::seconds(1);

// Created before the servers of its context and destroyed after them. Thread-safe.
class Authenticator final : private EventLoop::Handler {
 public:
  // At most one per context.
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

    // Admits the next client that shows this ticket, and no client with an earlier one. Without a ticket, admits none.
    void expect(std::optional<Ticket> ticket);

    // The name of the user or the machine that holds the key, empty for a role's key; none if the key is no longer
    // admitted.
    std::optional<std::string> holder_of(const PeerIdentity& identity) const;
    // Key changes to report to operators, once each.
    std::vector<std::string> take_notices();
    // Why the keys cannot be read again, so that the earlier ones stay in force; empty if they can.
    std::string trouble() const;

   private:
    Authenticator& authenticator_;
    const std::string name_;
  };
  // The keys that are admitted from now on, and a report for operators.
  struct Change {
    AllowedKeys keys{};
    KeyNames names{};  // of users and machines
    std::string notice{};
  };
  // Called on the authenticator's thread. Returns none if the keys are unchanged.
  using Look = std::function<Result<std::optional<Change>>()>;
  std::unique_ptr<Domain> make_domain(AllowedKeys allowed, KeyNames names = {}, Look look = {});

  // The number of clients rejected because of their key or ticket.
  uint64_t refused_count() const;
  // The reason why no connection is admitted any more, if the authenticator's thread has failed. A server checks it
  // before it receives.
  Result<void> health() const { return loop_.health(); }

 private:
  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override { socket_.close(); }

  struct Allowed {
    AllowedKeys keys;
    KeyNames names;
    std::optional<Ticket> ticket;
    Look look;
    std::vector<std::string> notices;
    std::string trouble;
  };
  // Makes each domain with a `look` check its keys again, if it is time.
  void check_keys();
  void apply_check(const std::string& domain, Result<std::optional<Change>> look);
  // How long the thread may sleep, in milliseconds; -1: forever.
  long sleep_ms() const;
  // The user id for a request; none if the client is rejected.
  std::optional<std::string> admit(const std::vector<std::string>& request);

  SocketContext& context_;
  zmq::socket_t socket_;  // used only by the loop's thread
  mutable Mutex mutex_;
  std::map<std::string, Allowed, std::less<>> domains_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t domain_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  uint64_t refused_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  Instant checked_at_{};  // confined to the loop's thread
  EventLoop loop_;
};

}  // namespace penstock::net
