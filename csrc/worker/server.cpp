// SPDX-License-Identifier: Apache-2.0
#include "worker/server.h"

#include <ATen/MapAllocator.h>
#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/live_clock.h"

namespace penstock::worker {

using std::chrono::steady_clock;
using wire::Descriptor;
using wire::DescriptorKind;
using wire::Request;
using wire::RequestKind;

Result<std::unique_ptr<Server>> Server::open(const ServerOptions& options, FileDescriptor channel) {
  // A program that the dataset starts has no part in it.
  if (::fcntl(channel.get(), F_SETFD, FD_CLOEXEC) != 0)
    return Fault{Errc::kFailed,
                 std::string("the channel to the trainer must be open in this process: ") + std::strerror(errno)};
  auto server = std::make_unique<Server>(options, shm::Channel(std::move(channel)));
  if (auto watched = server->watchdog_->start(); !watched) return watched.error();
  if (auto sent = server->send({.kind = DescriptorKind::kHello, .worker_id = options.worker_id}); !sent)
    return sent.error();
  return server;
}

Server::Server(const ServerOptions& options, shm::Channel channel)
    : options_(options),
      channel_(std::move(channel)),
      watchdog_(std::make_unique<Watchdog>(channel_.fd(), options.trainer_pid)),
      maker_({.arena_bytes = options.arena_bytes,
              .prefetch_factor = options.prefetch_factor,
              .waits = options.waits_for_slabs},
             watchdog_->is_closing()) {
  maker_.share_leaves();
}

Result<Server::Received> Server::next(steady_clock::time_point deadline) {
  for (;;) {
    if (auto health = watchdog_->health(); !health) return health.error();
    const auto message = channel_.receive(deadline);
    if (!message && message.error().code == Errc::kClosed) {
      watchdog_->is_closing().store(true);
      return watchdog_->health().error();
    }
    if (!message) return message.error();
    const auto request = wire::parse_request(message.value().bytes);
    if (!request) return request.error();
    const auto body = message.value().bytes.subspan(sizeof(Request));
    switch (request.value().kind) {
      case RequestKind::kPrefix: maker_.prefixes().install(body); continue;
      case RequestKind::kRemovePrefixes: maker_.prefixes().clear(); continue;
      default: break;
    }
    return Received{.request = request.value(), .body = {body.begin(), body.end()}, .arrived_at = steady_clock::now()};
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
  Descriptor descriptor = describe(request, batch.region ? DescriptorKind::kSlab : DescriptorKind::kInline, flags);
  descriptor.record_bytes = batch.record_bytes;
  descriptor.prefix_time = wire::time_units(made.value().on_prefix);
  descriptor.samples = times.in_units();
  std::array<int, shm::kMessageFdCountMax> fds{};
  size_t fd_count = 0;
  if (batch.region) {
    const shm::SlabRegion& region = *batch.region;
    if (region.is_transient) descriptor.flags |= wire::kDescriptorTransient;
    descriptor.arena_id = region.arena->id();
    descriptor.slab_index = region.slab_index;
    descriptor.slab_generation = region.arena->generation(region.slab_index);
    descriptor.record_offset = batch.record_offset;
    descriptor.slab_bytes = region.arena->backed_bytes(region.slab_index);
    if (maker_.pool().take_unannounced(region)) {
      descriptor.flags |= wire::kDescriptorNewArena;
      fds[fd_count++] = region.arena->fd();
    }
  }
  PENSTOCK_ASSERT(batch.shared.size() <= wire::kSharedFileCountMax);
  for (const c10::Storage& storage : batch.shared)
    fds[fd_count++] = at::MapAllocator::fromDataPtr(storage.data_ptr())->fd();
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(&descriptor, 1)), batch.record, batch.payload};
  return channel_.send(parts, std::span(fds).first(fd_count));
}

Result<void> Server::answer_end(const Received& request, std::span<const std::byte> state) {
  return send(describe(request, DescriptorKind::kEnd, 0), state);
}

Result<void> Server::answer_states(const Received& request, std::span<const std::byte> states) {
  return send(describe(request, DescriptorKind::kStates, 0), states);
}

Descriptor Server::describe(const Received& request, DescriptorKind kind, uint8_t flags) const {
  return {.kind = kind,
          .flags = flags,
          .sequence = request.request.sequence,
          .epoch = request.request.epoch,
          .worker_id = options_.worker_id,
          .fetch_time = wire::time_units(steady_clock::now() - request.arrived_at)};
}

Result<void> Server::send(const Descriptor& descriptor, std::span<const std::byte> body) {
  const std::span<const std::byte> parts[] = {std::as_bytes(std::span(&descriptor, 1)), body};
  return channel_.send(parts);
}

}  // namespace penstock::worker
