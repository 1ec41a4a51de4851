// SPDX-License-Identifier: Apache-2.0
#include "worker/server.h"

#include <ATen/MapAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/live_clock.h"

namespace penstock::worker {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using wire::Descriptor;
using wire::DescriptorKind;
using wire::Request;
using wire::RequestKind;

Result<std::unique_ptr<Server>> Server::connect(const ServerOptions& options, steady_clock::time_point deadline) {
  auto connection = shm::FdConnection::connect(options.endpoint);
  if (!connection) return connection.error();
  if (auto sent = connection.value().send({.kind = shm::kFdHello, .worker_id = options.worker_id}); !sent) {
    return sent.error();
  }
  auto server = std::make_unique<Server>(options, std::move(connection).value());
  if (auto watched = server->watchdog_->start(); !watched) return watched.error();
  auto start = server->connection_.receive(deadline);
  if (!start) return start.error();
  const auto& message = start.value().message;
  if (message.kind != shm::kFdStart) return Fault{Errc::kMalformed, "the trainer did not answer with a start"};
  const std::string name(message.text, strnlen(message.text, sizeof message.text));
  if (auto opened = server->open_socket(name, deadline); !opened) return opened.error();
  return server;
}

Server::Server(const ServerOptions& options, shm::FdConnection connection)
    : options_(options),
      connection_(std::move(connection)),
      watchdog_(std::make_unique<Watchdog>(connection_.fd(), options.trainer_pid)),
      maker_({.arena_bytes = options.arena_bytes,
              .prefetch_factor = options.prefetch_factor,
              .waits = options.waits_for_slabs},
             watchdog_->is_closing()),
      context_(std::make_unique<net::SocketContext>()) {
  maker_.share_leaves();
}

Result<void> Server::open_socket(const std::string& name, steady_clock::time_point deadline) {
  auto socket = net::Socket::connect(*context_, name);
  if (!socket) return socket.error();
  socket_.emplace(std::move(socket).value());
  // The socket becomes writable when the connection is up; the trainer has bound it already.
  for (;;) {
    auto sent = send_descriptor({.kind = DescriptorKind::kHello, .worker_id = options_.worker_id});
    if (sent || sent.error().code != Errc::kClosed || steady_clock::now() > deadline) return sent;
    if (auto health = watchdog_->health(); !health) return health.error();
    if (auto waited = (*socket_)->wait_writable(milliseconds(20)); !waited) return waited;
  }
}

Result<Server::Received> Server::next(steady_clock::time_point deadline) {
  for (;;) {
    if (auto health = watchdog_->health(); !health) return health.error();
    auto received = (*socket_)->try_receive(parts_);
    if (!received) return received.error();
    if (received.value()) {
      auto request = wire::parse_request(parts_.front());
      if (!request) return request.error();
      if (request.value().kind == RequestKind::kPrefix) {
        maker_.prefixes().install(std::span(parts_.front()).subspan(sizeof(Request)));
        continue;
      }
      if (request.value().kind == RequestKind::kRemovePrefixes) {
        maker_.prefixes().clear();
        continue;
      }
      const auto body = std::span(parts_.front()).subspan(sizeof(Request));
      return Received{
          .request = request.value(), .body = {body.begin(), body.end()}, .arrived_at = steady_clock::now()};
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return Fault{Errc::kTimeout, "no request came before the deadline"};
    net::Socket* const sockets[] = {&**socket_};
    const int fds[] = {connection_.fd()};
    bool is_readable[] = {false};
    if (auto waited = net::Socket::wait(sockets, fds, is_readable, left); !waited) return waited.error();
    if (is_readable[0]) watchdog_->is_closing().store(true);  // the trainer sends nothing there after the start
  }
}

Result<void> Server::answer(const Received& request, BatchContent content, uint8_t flags) {
  const BatchPlace place{.epoch_seed = request.request.epoch_seed, .sequence = request.request.sequence};
  const bool is_raised = (flags & wire::kDescriptorRaises) != 0;
  const auto times = maker_.writer().clock().times(request.arrived_at, clock_now());
  auto made = is_raised ? maker_.make_plain(content) : maker_.make(content, place);
  if (!made) return made.error();
  if (made.value().is_compiled) flags |= wire::kDescriptorCompiled;
  const SealedBatch& batch = made.value().sealed;
  if (auto passed = pass_files(batch.shared); !passed) return passed;
  Descriptor descriptor = describe(request, batch.region ? DescriptorKind::kSlab : DescriptorKind::kInline, flags);
  descriptor.record_bytes = batch.record_bytes;
  descriptor.prefix_time = wire::time_units(made.value().on_prefix);
  descriptor.samples = times.in_units();
  if (!batch.region) {
    const auto head = wire::write_message(descriptor, batch.record);
    const std::span<const std::byte> parts[] = {head, batch.payload};
    return (*socket_)->send(parts);
  }
  const shm::SlabRegion& region = *batch.region;
  if (region.is_transient) descriptor.flags |= wire::kDescriptorTransient;
  descriptor.arena_id = region.arena->id();
  descriptor.slab_index = region.slab_index;
  descriptor.slab_generation = region.arena->generation(region.slab_index);
  descriptor.record_offset = batch.record_offset;
  descriptor.slab_bytes = region.arena->backed_bytes(region.slab_index);
  if (maker_.pool().take_unannounced(region)) {
    const auto passed = connection_.send(
        {.kind = shm::kFdArena, .worker_id = options_.worker_id, .arena_id = region.arena->id()}, region.arena->fd());
    if (!passed) return passed.error();
  }
  return send_descriptor(descriptor);
}

Result<void> Server::pass_files(std::span<const c10::Storage> storages) {
  for (const c10::Storage& storage : storages) {
    const int fd = at::MapAllocator::fromDataPtr(storage.data_ptr())->fd();
    if (auto sent = connection_.send({.kind = shm::kFdFile, .worker_id = options_.worker_id}, fd); !sent) return sent;
  }
  return {};
}

Result<void> Server::answer_end(const Received& request, std::span<const std::byte> state) {
  const Descriptor descriptor = describe(request, DescriptorKind::kEnd, 0);
  if (state.empty()) return send_descriptor(descriptor);
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(&descriptor, 1)), state};
  return (*socket_)->send(parts);
}

Result<void> Server::answer_states(const Received& request, std::span<const std::byte> states) {
  const Descriptor descriptor = describe(request, DescriptorKind::kStates, 0);
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(&descriptor, 1)), states};
  return (*socket_)->send(parts);
}

Descriptor Server::describe(const Received& request, DescriptorKind kind, uint8_t flags) const {
  return {.kind = kind,
          .flags = flags,
          .sequence = request.request.sequence,
          .epoch = request.request.epoch,
          .worker_id = options_.worker_id,
          .fetch_time = wire::time_units(steady_clock::now() - request.arrived_at)};
}

Result<void> Server::send_descriptor(const Descriptor& descriptor) {
  return (*socket_)->send(std::as_bytes(std::span(&descriptor, 1)));
}

}  // namespace penstock::worker
