// SPDX-License-Identifier: Apache-2.0
#include "worker/local_server.h"

#include <ATen/MapAllocator.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/result.h"

namespace penstock::worker {
namespace {

constexpr auto kParentCheckInterval = std::chrono::milliseconds(200);

}  // namespace

Watchdog::Watchdog(int connection_fd, pid_t trainer_pid)
    : connection_fd_(connection_fd), trainer_(trainer_pid), loop_("pk_watchdog", "which monitors the trainer", *this) {}

Result<void> Watchdog::health() const {
  if (!is_closing_.load()) return {};
  if (auto ended = loop_.health(); !ended) return ended;
  return Fault{Errc::kClosed, "the trainer closed the connection"};
}

Result<void> Watchdog::serve() {
  const bool is_orphan = trainer_.is_gone();
  if (has_hung_up_) is_closing_.store(true);
  if (is_orphan && !has_hung_up_) hang_up();
  grace_.note(is_orphan);
  return {};
}

Result<bool> Watchdog::wait(int wake_fd, bool may_sleep) {
  // Once the peer has hung up, its descriptor stays readable forever, and only the parent's life matters.
  pollfd items[] = {{.fd = wake_fd, .events = POLLIN, .revents = 0},
                    {.fd = has_hung_up_ ? -1 : connection_fd_, .events = POLLRDHUP, .revents = 0}};
  ::poll(items, std::size(items), may_sleep ? static_cast<int>(kParentCheckInterval.count()) : 0);
  has_hung_up_ = has_hung_up_ || items[1].revents != 0;
  return items[0].revents != 0;
}

void Watchdog::hang_up() {
  is_closing_.store(true);
  ::shutdown(connection_fd_, SHUT_RDWR);
  has_hung_up_ = true;
}

Result<void> send_message(shm::Channel& channel, const wire::FromJob& message) {
  const auto bytes = wire::write_from_job(message);
  const std::span<const std::byte> part(bytes);
  return channel.send({&part, 1});
}

Result<void> send_batch(shm::Channel& channel, shm::SlabPool& slabs, wire::FromJob message, const ResultBatch& batch) {
  std::array<int, shm::kMessageFdCountMax> fds{};
  size_t fd_count = 0;
  if (batch.region != nullptr) {
    const shm::Arena& arena = *batch.region->arena;
    message.place = wire::SlabPlace{.arena_id = arena.id(),
                                    .slab_index = batch.region->slab_index,
                                    .generation = arena.generation(batch.region->slab_index),
                                    .is_transient = batch.region->is_transient,
                                    .slab_bytes = arena.backed_bytes(batch.region->slab_index)};
    message.is_new_arena = slabs.take_unannounced(*batch.region);
    if (message.is_new_arena) fds[fd_count++] = arena.fd();
  }
  PENSTOCK_ASSERT(batch.files.size() <= fds.size() - fd_count, "files: ", batch.files.size());
  std::ranges::copy(batch.files, fds.begin() + static_cast<std::ptrdiff_t>(fd_count));
  fd_count += batch.files.size();
  const auto head = wire::from_job_head(message);
  std::array<std::span<const std::byte>, 1 + 3> parts{head};
  size_t part_count = 1;
  for (const auto part : {message.state, batch.payload, batch.record}) {
    if (!part.empty()) parts[part_count++] = part;
  }
  return channel.send(std::span(parts).first(part_count), std::span(fds).first(fd_count));
}

using std::chrono::steady_clock;
using wire::AnswerKind;
using wire::FromJob;
using wire::ToJob;

namespace {

LocalServer::Received received_of(const ToJob& message) {
  LocalServer::Received received{.kind = message.kind,
                                 .request = {.index_kind = message.index_kind,
                                             .sequence = message.key.sequence,
                                             .epoch = message.key.epoch,
                                             .shard_id = message.lane == wire::kNoLane ? 0 : message.lane - 1,
                                             .epoch_seed = message.epoch_seed,
                                             .first_place = message.first_place},
                                 .arrived_at = steady_clock::now()};
  const bool is_epoch = message.kind == ToJob::Kind::kEpoch || message.kind == ToJob::Kind::kEarlyEpoch;
  if (is_epoch && !message.seeds.empty()) received.request.index_kind = wire::IndexKind::kIntegers;
  const auto indices = is_epoch ? message.seeds : message.indices;
  received.indices.assign(indices.begin(), indices.end());
  return received;
}

}  // namespace

Result<std::unique_ptr<LocalServer>> LocalServer::open(const LocalServerOptions& options, FileDescriptor channel) {
  // A program that the dataset starts must not inherit the channel.
  if (::fcntl(channel.get(), F_SETFD, FD_CLOEXEC) != 0)
    return Fault{Errc::kFailed,
                 std::string("the channel to the trainer must be open in this process: ") + std::strerror(errno)};
  auto server = std::make_unique<LocalServer>(options, shm::Channel(std::move(channel)));
  if (auto watched = server->watchdog_->start(); !watched) return watched.error();
  if (auto sent = send_message(server->channel_, {.kind = FromJob::Kind::kReady}); !sent) return sent.error();
  return server;
}

LocalServer::LocalServer(const LocalServerOptions& options, shm::Channel channel)
    : channel_(std::move(channel)),
      watchdog_(std::make_unique<Watchdog>(channel_.fd(), options.trainer_pid)),
      maker_({.arena_bytes = options.arena_bytes,
              .prefetch_factor = options.prefetch_factor,
              .waits = options.waits_for_slabs},
             watchdog_->is_closing()) {
  maker_.share_leaves();
}

Result<LocalServer::Received> LocalServer::next(steady_clock::time_point deadline) {
  for (;;) {
    if (auto health = watchdog_->health(); !health) return health.error();
    std::vector<std::byte> waited;
    std::span<const std::byte> bytes;
    if (!waiting_.empty()) {
      waited = std::move(waiting_.front());
      waiting_.pop_front();
      bytes = waited;
    } else {
      const auto received = channel_.receive(deadline);
      if (!received && received.error().code == Errc::kClosed) {
        watchdog_->is_closing().store(true);
        return watchdog_->health().error();
      }
      if (!received) return received.error();
      bytes = received.value().bytes;
    }
    const auto message = wire::parse_to_job(bytes);
    if (!message) return message.error();
    switch (message.value().kind) {
      case ToJob::Kind::kPrefix: maker_.prefixes().install(message.value().body); continue;
      case ToJob::Kind::kRemovePrefixes: maker_.prefixes().clear(); continue;
      case ToJob::Kind::kWork:
      case ToJob::Kind::kEpoch:
      case ToJob::Kind::kEarlyEpoch:
      case ToJob::Kind::kStates: return received_of(message.value());
      case ToJob::Kind::kUnwanted:
      case ToJob::Kind::kWanted:
      case ToJob::Kind::kBlob:
      case ToJob::Kind::kBlobInFile:
      case ToJob::Kind::kNoBlob: break;
    }
    return Fault{Errc::kMalformed, "a trainer sent its local worker a message that only job processes receive"};
  }
}

std::vector<LocalServer::Received> LocalServer::upcoming() {
  std::vector<Received> found;
  // An error is returned by the next receive().
  while (const auto received = channel_.receive(steady_clock::now())) {
    const std::span<const std::byte> bytes = received.value().bytes;
    waiting_.emplace_back(bytes.begin(), bytes.end());
    const auto message = wire::parse_to_job(bytes);
    if (message && message.value().kind == ToJob::Kind::kWork) found.push_back(received_of(message.value()));
  }
  return found;
}

Result<void> LocalServer::answer(const Received& request, BatchContent content, uint8_t flags) {
  const BatchPlace place{.epoch_seed = request.request.epoch_seed, .sequence = request.request.sequence};
  const bool is_raised = (flags & wire::kBatchRaises) != 0;
  const auto times = maker_.writer().clock().times(request.arrived_at, clock_now());
  auto made = is_raised ? maker_.make_plain(content) : maker_.make(content, place);
  if (!made) return made.error();
  if (made.value().is_compiled) flags |= wire::kBatchCompiled;
  const SealedBatch& batch = made.value().sealed;
  const uint64_t tensor_bytes = batch.region ? batch.record_offset : batch.payload.size();
  const FromJob message{.answer = AnswerKind::kBatch,
                        .key = request.key(),
                        .flags = flags,
                        .record_bytes = batch.record_bytes,
                        .payload_bytes = tensor_bytes + batch.record_bytes,
                        .fetch_time = wire::time_units(steady_clock::now() - request.arrived_at),
                        .prefix_time = wire::time_units(made.value().on_prefix),
                        .samples = times.in_units()};
  std::array<int, wire::kSharedFileCountMax> files{};
  PENSTOCK_ASSERT(batch.shared.size() <= files.size());
  for (size_t index = 0; index < batch.shared.size(); ++index)
    files[index] = at::MapAllocator::fromDataPtr(batch.shared[index].data_ptr())->fd();
  return send_batch(channel_, maker_.pool(), message,
                    {.region = batch.region ? &*batch.region : nullptr,
                     .payload = batch.payload,
                     .record = batch.record,
                     .files = std::span(files).first(batch.shared.size())});
}

Result<void> LocalServer::answer_end(const Received& request, std::span<const std::byte> state) {
  return send_message(channel_, {.answer = AnswerKind::kEnd,
                                 .key = request.key(),
                                 .fetch_time = wire::time_units(steady_clock::now() - request.arrived_at),
                                 .state = state});
}

Result<void> LocalServer::answer_states(const Received& request, std::span<const std::byte> states) {
  return send_message(channel_, {.kind = FromJob::Kind::kStates, .key = request.key(), .state = states});
}

}  // namespace penstock::worker
