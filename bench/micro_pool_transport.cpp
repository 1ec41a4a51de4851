// SPDX-License-Identifier: Apache-2.0
// What crossing from a worker to its trainer costs, on loopback, by who carries the bytes: a raw TCP socket, ZeroMQ
// without keys, ZeroMQ with CURVE, and the data connection of a pool, whose pieces are sealed. A batch is cut into
// pieces of 1 MiB, and each way ends with the batch in memory of its own. The sender is a process apart; one batch is
// always asked for ahead. BM_PoolSeal is the seal alone on the same pieces: sealing at one end, opening at the other.
//
// bench/pool_transport.py runs these in turns and takes the ratios.

#include <arpa/inet.h>
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "net/authenticator.h"
#include "net/client_socket.h"
#include "net/server_socket.h"
#include "net/socket.h"
#include "wire/pool_record.h"

namespace penstock {
namespace {

constexpr size_t kSlabCount = 4;      // used in turn, as a worker's and a trainer's are
constexpr int kPoolWarmUpCount = 16;  // until the heap that ZeroMQ receives into has grown
constexpr int kRequestedAhead = 2;
constexpr auto kReceiveTimeout = std::chrono::milliseconds(10'000);

using Slabs = std::vector<std::vector<std::byte>>;

Slabs make_slabs(size_t bytes) { return Slabs(kSlabCount, std::vector<std::byte>(bytes, std::byte{7})); }

std::span<const std::byte> piece_of(std::span<const std::byte> batch, uint64_t offset) {
  return batch.subspan(offset, std::min<uint64_t>(wire::kPieceBytesMax, batch.size() - offset));
}

double cpu_seconds(clockid_t clock) {
  timespec time{};
  return ::clock_gettime(clock, &time) == 0
             ? static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec)
             : 0.0;
}

// The worker's end, in a process of its own that dies with this one: sends a batch whenever it is asked. `serve` gets
// the end of a pipe through which it tells the port that it listens at, and does not return.
class Sender {
 public:
  explicit Sender(const std::function<void(int port_fd)>& serve) {
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return;
    pid_ = ::fork();  // before this process has threads of ZeroMQ
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(ends[0]);
      serve(ends[1]);
      ::_exit(EXIT_FAILURE);
    }
    ::close(ends[1]);
    if (::read(ends[0], &port_, sizeof port_) != static_cast<ssize_t>(sizeof port_)) port_ = 0;
    ::close(ends[0]);
    ::clock_getcpuclockid(pid_, &clock_);
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;
  ~Sender() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  uint16_t port() const { return port_; }  // 0: it did not come to listen
  double cpu_s() const { return cpu_seconds(clock_); }

 private:
  pid_t pid_ = -1;
  uint16_t port_ = 0;
  clockid_t clock_{};
};

void send_port(int port_fd, uint16_t port) {
  if (::write(port_fd, &port, sizeof port) != static_cast<ssize_t>(sizeof port)) ::_exit(EXIT_FAILURE);
  ::close(port_fd);
}

// Runs `receive`, which returns when one more batch is there, or false when none comes, and counts what both ends use.
void measure(benchmark::State& state, const Sender& sender, const std::function<bool()>& receive) {
  for (int count = 0; count < kPoolWarmUpCount; ++count) {
    if (!receive()) return state.SkipWithError("no batch was received");
  }
  rusage before{};
  ::getrusage(RUSAGE_SELF, &before);
  const double sender_before = sender.cpu_s();
  const double own_before = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (auto _ : state) {
    if (!receive()) state.SkipWithError("no batch was received");
  }
  const double own_s = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - own_before;
  const double sender_s = sender.cpu_s() - sender_before;
  rusage after{};
  ::getrusage(RUSAGE_SELF, &after);
  const auto batches = static_cast<double>(state.iterations());
  const double gigabytes = batches * static_cast<double>(state.range(0)) / 1e9;
  state.SetBytesProcessed(state.range(0) * state.iterations());
  state.counters["cpu_s_per_gb"] = (own_s + sender_s) / gigabytes;
  state.counters["receiver_cpu_s_per_gb"] = own_s / gigabytes;
  state.counters["receiver_faults"] = static_cast<double>(after.ru_minflt - before.ru_minflt) / batches;
}

// ---- A raw socket

bool receive_all(int fd, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::recv(fd, bytes.data(), bytes.size(), 0);
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return true;
}

bool send_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return true;
}

void set_no_delay(int fd) {
  const int one = 1;
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
}

void serve_raw(int port_fd, size_t batch_bytes) {
  const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), any, size) != 0 || ::listen(listener.get(), 1) != 0) return;
  if (::getsockname(listener.get(), any, &size) != 0) return;
  send_port(port_fd, ntohs(address.sin_port));
  const FileDescriptor peer(::accept(listener.get(), nullptr, nullptr));
  set_no_delay(peer.get());
  const Slabs slabs = make_slabs(batch_bytes);
  std::byte ask{};
  for (size_t number = 0; receive_all(peer.get(), {&ask, 1}); ++number) {
    if (!send_all(peer.get(), slabs[number % kSlabCount])) return;
  }
}

// With `is_copied` a piece goes through a buffer on its way, as it does where ZeroMQ receives it.
void run_raw(benchmark::State& state, bool is_copied) {
  const auto batch_bytes = static_cast<size_t>(state.range(0));
  const Sender sender([&](int port_fd) { serve_raw(port_fd, batch_bytes); });
  const FileDescriptor peer(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(sender.port());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return state.SkipWithError("the sender cannot be reached");
  set_no_delay(peer.get());
  Slabs slabs = make_slabs(batch_bytes);
  std::vector<std::byte> buffer(std::min<size_t>(wire::kPieceBytesMax, batch_bytes));
  const std::array<std::byte, kRequestedAhead> asks{};
  if (!send_all(peer.get(), std::span(asks).first(kRequestedAhead - 1))) return state.SkipWithError("asking failed");
  size_t number = 0;
  measure(state, sender, [&] {
    if (!send_all(peer.get(), std::span(asks).first(1))) return false;
    const std::span<std::byte> slab = slabs[number++ % kSlabCount];
    if (!is_copied) return receive_all(peer.get(), slab);
    for (uint64_t offset = 0; offset < slab.size(); offset += wire::kPieceBytesMax) {
      const auto piece = std::span(buffer).first(piece_of(slab, offset).size());
      if (!receive_all(peer.get(), piece)) return false;
      std::memcpy(slab.data() + offset, piece.data(), piece.size());
    }
    return true;
  });
}

void BM_PoolRaw(benchmark::State& state) { run_raw(state, /*is_copied=*/false); }
void BM_PoolRawCopied(benchmark::State& state) { run_raw(state, /*is_copied=*/true); }

// ---- The sockets of a pool, and ZeroMQ's own

// A batch on its way: the number of pieces follows from its size. Lays a piece in its place and returns whether the
// batch is whole.
class Assembly {
 public:
  explicit Assembly(size_t batch_bytes) : slabs_(make_slabs(batch_bytes)) {}

  bool add(std::span<const std::byte> piece) {
    auto& slab = slabs_[number_ % kSlabCount];
    std::memcpy(slab.data() + offset_, piece.data(), std::min(piece.size(), slab.size() - offset_));
    offset_ += piece.size();
    if (offset_ < slab.size()) return false;
    offset_ = 0;
    ++number_;
    return true;
  }

 private:
  Slabs slabs_;
  size_t number_ = 0;
  size_t offset_ = 0;
};

constexpr std::array<std::byte, wire::kToTrainerHeadBytes> kHead{};

void serve_zmq(int port_fd, size_t batch_bytes) {
  net::SocketContext context;
  zmq::socket_t socket(context.zmq(), zmq::socket_type::router);
  socket.bind("tcp://127.0.0.1:*");
  send_port(port_fd, static_cast<uint16_t>(std::stoi(socket.get(zmq::sockopt::last_endpoint).substr(16))));
  const Slabs slabs = make_slabs(batch_bytes);
  zmq::message_t peer;
  zmq::message_t request;
  for (size_t number = 0; socket.recv(peer) && socket.recv(request); ++number) {
    const std::span<const std::byte> batch = slabs[number % kSlabCount];
    for (uint64_t offset = 0; offset < batch.size(); offset += wire::kPieceBytesMax) {
      const auto piece = piece_of(batch, offset);
      void* data = const_cast<std::byte*>(piece.data());  // libzmq only reads the bytes that it sends
      socket.send(zmq::buffer(peer.data(), peer.size()), zmq::send_flags::sndmore);
      socket.send(zmq::buffer(kHead), zmq::send_flags::sndmore);
      socket.send(zmq::message_t(data, piece.size(), [](void*, void*) {}), zmq::send_flags::none);
    }
  }
}

void BM_PoolZmq(benchmark::State& state) {
  const auto batch_bytes = static_cast<size_t>(state.range(0));
  const Sender sender([&](int port_fd) { serve_zmq(port_fd, batch_bytes); });
  net::SocketContext context;
  zmq::socket_t socket(context.zmq(), zmq::socket_type::dealer);
  socket.set(zmq::sockopt::rcvtimeo, static_cast<int>(kReceiveTimeout.count()));
  socket.set(zmq::sockopt::linger, 0);
  socket.connect("tcp://127.0.0.1:" + std::to_string(sender.port()));
  Assembly assembly(batch_bytes);
  const auto request = [&] { socket.send(zmq::str_buffer("r"), zmq::send_flags::none); };
  for (int count = 1; count < kRequestedAhead; ++count) request();
  measure(state, sender, [&] {
    request();
    for (bool is_whole = false; !is_whole;) {
      zmq::message_t head;
      zmq::message_t piece;
      if (!socket.recv(head) || !socket.recv(piece)) return false;  // the timeout has passed
      is_whole = assembly.add({piece.data<std::byte>(), piece.size()});
    }
    return true;
  });
}

// The keys of a pool, alike in both processes.
struct PoolKeys {
  PoolKeys() {
    for (const net::Role role : net::kRoles) {
      pairs.push_back(net::KeyPair::generate());
      keys[static_cast<size_t>(role)] = pairs.back().public_key();
    }
  }
  net::KeyRing ring_of(net::Role role) {
    return {role, std::move(pairs[static_cast<size_t>(role)]), {.roles = keys}, net::KeyOrigin::kShared};
  }

  std::vector<net::KeyPair> pairs;
  net::RoleKeys keys{};
};

bool await(std::span<const net::Waitable> sockets) {
  return static_cast<bool>(net::wait_readable(sockets, {}, {}, kReceiveTimeout));
}

bool await_connection(net::ClientSocket& socket) {
  while (!socket.is_connected()) {
    if (!await(socket.waitables())) return false;
    while (socket.try_event()) {
    }
  }
  return true;
}

void serve_curve(int port_fd, size_t batch_bytes, const net::KeyRing& keys) {
  net::SocketContext context;
  const auto authenticator = net::Authenticator::start(context).value();
  const auto socket = net::ServerSocket::bind(context, *authenticator, {.host = "127.0.0.1", .port = 0}, keys,
                                              {.allowed_roles = {net::Role::kTrainer}})
                          .value();
  send_port(port_fd, socket->endpoint().port);
  const Slabs slabs = make_slabs(batch_bytes);
  const std::array<net::Waitable, 1> waitables{socket->waitable()};
  net::ServerReceipt receipt;
  for (size_t number = 0; await(waitables);) {
    while (socket->try_receive(receipt).value()) {
      const std::span<const std::byte> batch = slabs[number++ % kSlabCount];
      for (uint64_t offset = 0; offset < batch.size(); offset += wire::kPieceBytesMax) {
        std::array<net::OutgoingPart, 2> parts{net::OutgoingPart{.bytes = kHead, .release = nullptr},
                                               net::OutgoingPart{.bytes = piece_of(batch, offset), .release = [] {}}};
        if (!socket->send(receipt.peer.routing_id, parts)) return;
      }
    }
  }
}

void BM_PoolCurve(benchmark::State& state) {
  const auto batch_bytes = static_cast<size_t>(state.range(0));
  PoolKeys keys;
  const net::KeyRing worker = keys.ring_of(net::Role::kWorker);
  const net::KeyRing trainer = keys.ring_of(net::Role::kTrainer);
  const Sender sender([&](int port_fd) { serve_curve(port_fd, batch_bytes, worker); });
  const auto resolver = net::Resolver::open().value();
  net::SocketContext context;
  const auto connected = net::ClientSocket::connect(context, *resolver, {.host = "127.0.0.1", .port = sender.port()},
                                                    trainer.own(), trainer.public_key(net::Role::kWorker));
  if (!connected) return state.SkipWithError("the sender cannot be reached");
  net::ClientSocket& socket = *connected.value();
  if (!await_connection(socket)) return state.SkipWithError("the sender cannot be reached");
  const auto waitables = socket.waitables();
  Assembly assembly(batch_bytes);
  const std::array<std::byte, 1> ask{};
  for (int count = 1; count < kRequestedAhead; ++count) static_cast<void>(socket.send(ask));
  net::ClientReceipt receipt;
  measure(state, sender, [&] {
    if (!socket.send(ask)) return false;
    for (;;) {
      const auto received = socket.try_receive(receipt);
      if (!received) return false;
      if (received.value()) {
        if (assembly.add(receipt.parts.back().bytes())) return true;
      } else if (!await(waitables)) {
        return false;
      }
    }
  });
}

// ---- The data connection

constexpr net::LinkName kLink{.trainer_id = 7, .worker_id = 5, .link = 1};

// A trainer's first message is its offer, and each one after that asks for a batch.
void serve_sealed(int port_fd, size_t batch_bytes, const net::KeyRing& keys) {
  net::SocketContext context;
  const auto authenticator = net::Authenticator::start(context).value();
  const net::Endpoint any{.host = "127.0.0.1", .port = 0};
  const auto socket =
      net::ServerSocket::bind(context, *authenticator, any, keys, {.allowed_roles = {net::Role::kTrainer}}).value();
  const FileDescriptor room_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  const auto data = net::DataServer::bind(context, *authenticator, any, {.worker_id = kLink.worker_id}, [&] {
                      const uint64_t one = 1;
                      static_cast<void>(::write(room_fd.get(), &one, sizeof one));
                    }).value();
  send_port(port_fd, socket->endpoint().port);
  const Slabs slabs = make_slabs(batch_bytes);
  const std::array<net::Waitable, 2> waitables{socket->waitable(), data->waitable()};
  const std::array<int, 1> fds{room_fd.get()};
  std::array<bool, 1> is_readable{};
  net::ServerReceipt receipt;
  size_t requested_count = 0;
  uint64_t offset = 0;
  for (size_t number = 0;;) {
    uint64_t told = 0;
    static_cast<void>(::read(room_fd.get(), &told, sizeof told));
    while (socket->try_receive(receipt).value()) {
      const auto request = wire::parse_to_worker(receipt.parts.front().bytes());
      if (!request || !request.value().offer) {
        ++requested_count;
        continue;
      }
      auto grant = data->begin(kLink.trainer_id, kLink.link, *request.value().offer).value();
      grant.data_endpoint = data->endpoint().text();
      const auto welcome = wire::write_to_trainer(
          {.message = {.kind = wire::ToTrainer::Kind::kWelcome}, .worker_id = kLink.worker_id, .grant = grant});
      if (!socket->send(receipt.peer.routing_id, welcome)) return;
    }
    if (!data->receive()) return;
    while (requested_count > 0 && data->has_room()) {
      const std::span<const std::byte> batch = slabs[number % kSlabCount];
      const auto piece = piece_of(batch, offset);
      const wire::PieceHead head{
          .key = {.epoch = 1, .sequence = number}, .payload_bytes = batch.size(), .payload_offset = offset};
      if (!data->send(head, piece)) return;
      offset += piece.size();
      if (offset < batch.size()) continue;
      offset = 0;
      ++number;
      --requested_count;
    }
    if (!net::wait_readable(waitables, fds, is_readable, kReceiveTimeout)) return;
  }
}

void BM_PoolSockets(benchmark::State& state) {
  const auto batch_bytes = static_cast<size_t>(state.range(0));
  PoolKeys keys;
  const net::KeyRing worker = keys.ring_of(net::Role::kWorker);
  const net::KeyRing trainer = keys.ring_of(net::Role::kTrainer);
  const Sender sender([&](int port_fd) { serve_sealed(port_fd, batch_bytes, worker); });
  const auto resolver = net::Resolver::open().value();
  net::SocketContext context;
  const auto connected = net::ClientSocket::connect(context, *resolver, {.host = "127.0.0.1", .port = sender.port()},
                                                    trainer.own(), trainer.public_key(net::Role::kWorker));
  if (!connected) return state.SkipWithError("the sender cannot be reached");
  net::ClientSocket& socket = *connected.value();
  if (!await_connection(socket)) return state.SkipWithError("the sender cannot be reached");
  const wire::SealOffer offer{.ciphers = net::fast_ciphers(), .nonce = net::draw_seal_nonce().value()};
  const auto hello = wire::write_to_worker(
      {.message = {.kind = wire::ToWorker::Kind::kHello, .trainer_id = kLink.trainer_id}, .offer = offer});
  if (!socket.send(hello)) return state.SkipWithError("the sender cannot be reached");
  net::ClientReceipt receipt;
  while (!socket.try_receive(receipt).value()) {
    if (!await(socket.waitables())) return state.SkipWithError("the sender does not answer");
  }
  const auto welcome = wire::parse_to_trainer(receipt.parts.front().bytes()).value();
  const auto data = net::DataClient::connect(context, *resolver, kLink, offer, *welcome.grant).value();
  const auto waitables = data->waitables();
  Slabs slabs = make_slabs(batch_bytes);
  size_t number = 0;
  const std::array<std::byte, 1> ask{};
  for (int count = 1; count < kRequestedAhead; ++count) static_cast<void>(socket.send(ask));
  measure(state, sender, [&] {
    if (!socket.send(ask)) return false;
    std::span<std::byte> rest = slabs[number++ % kSlabCount];
    while (!rest.empty()) {
      while (data->try_event()) {
      }
      const auto outcome = data->try_receive();
      if (outcome == net::DataClient::Outcome::kNothing) {
        if (!await(waitables)) return false;
        continue;
      }
      if (outcome != net::DataClient::Outcome::kPiece) return false;
      const size_t size = data->piece().size();
      if (!data->open(rest.first(size))) return false;
      rest = rest.subspan(size);
    }
    return true;
  });
}

// ---- The seal alone

void BM_PoolSeal(benchmark::State& state) {
  const auto batch_bytes = static_cast<size_t>(state.range(0));
  const net::SealKey key;
  const auto cipher = net::choose_cipher(net::fast_ciphers(), net::fast_ciphers());
  net::Sealer sealer = net::Sealer::make(cipher, key).value();
  net::Opener opener = net::Opener::make(cipher, key).value();
  const Slabs slabs = make_slabs(batch_bytes);
  std::vector<std::byte> opened(batch_bytes);
  std::vector<std::byte> sealed(wire::kPieceBytesMax + wire::kSealTagBytes);
  const std::array<std::byte, wire::kPieceHeadBytes> head{};
  uint64_t counter = 0;
  const double before = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (auto _ : state) {
    const std::span<const std::byte> batch = slabs[counter % kSlabCount];
    for (uint64_t offset = 0; offset < batch_bytes; offset += wire::kPieceBytesMax) {
      const auto piece = piece_of(batch, offset);
      const auto room = std::span(sealed).first(piece.size() + wire::kSealTagBytes);
      if (!sealer.seal(++counter, head, piece, room) ||
          !opener.open(counter, head, room, std::span(opened).subspan(offset, piece.size())))
        state.SkipWithError("the encrypted message cannot be decrypted");
    }
  }
  const double used_s = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - before;
  state.SetBytesProcessed(state.range(0) * state.iterations());
  state.counters["cpu_s_per_gb"] =
      used_s / (static_cast<double>(state.iterations()) * static_cast<double>(batch_bytes) / 1e9);
}

constexpr int64_t kSmall = 4 << 20;
constexpr int64_t kLarge = 64 * 3 * 224 * 224 * 4;

BENCHMARK(BM_PoolRaw)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();
BENCHMARK(BM_PoolRawCopied)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();
BENCHMARK(BM_PoolZmq)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();
BENCHMARK(BM_PoolCurve)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();
BENCHMARK(BM_PoolSockets)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();
BENCHMARK(BM_PoolSeal)->ArgName("bytes")->Arg(kSmall)->Arg(kLarge)->UseRealTime();

}  // namespace
}  // namespace penstock
