// SPDX-License-Identifier: Apache-2.0
#include "worker/local_server.h"

#include <ATen/MapAllocator.h>
#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/live_clock.h"
#include "worker/send_result.h"

namespace penstock::worker {

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
    const auto received = channel_.receive(deadline);
    if (!received && received.error().code == Errc::kClosed) {
      watchdog_->is_closing().store(true);
      return watchdog_->health().error();
    }
    if (!received) return received.error();
    const auto message = wire::parse_to_job(received.value().bytes);
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
