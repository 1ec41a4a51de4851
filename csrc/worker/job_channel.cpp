// SPDX-License-Identifier: Apache-2.0
#include "worker/job_channel.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include "base/child_process.h"
#include "server/maker.h"
#include "worker/local_server.h"

namespace penstock::worker {

using server::HeldBatch;
using server::PoolResult;
using server::PoolWork;
using wire::FromJob;
using wire::ToJob;

namespace {

constexpr std::chrono::seconds kChildrenCheckInterval{
    10};  // interval between checks for ended children, between batches

Fault job_is_over() { return {Errc::kClosed, "the job has ended"}; }

std::vector<std::byte> owned(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

PoolWork work_of(const ToJob& message) {
  return {.trainer_id = message.trainer_id,
          .tenancy = message.tenancy,
          .key = message.key,
          .lane = message.lane,
          .is_lane_start = message.is_lane_start,
          .index_kind = message.index_kind,
          .epoch_seed = message.epoch_seed,
          .first_place = message.first_place,
          .link_bytes_per_s = message.link_bytes_per_s,
          .indices = owned(message.indices),
          .seeds = owned(message.seeds),
          .state = owned(message.state),
          .blobs = {message.blobs.begin(), message.blobs.end()},
          .is_named = message.is_named};
}

// Reads the whole of a file that the server created for this channel.
Result<std::vector<std::byte>> read_file(int fd, uint64_t size) {
  std::vector<std::byte> bytes;
  try {
    bytes.resize(size);
  } catch (const std::bad_alloc&) {
    return Fault{Errc::kNoMemory, "insufficient memory for a part of the job, of " + std::to_string(size) + " bytes"};
  }
  for (uint64_t done = 0; done < size;) {
    const ssize_t count = ::pread(fd, bytes.data() + done, size - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      return Fault{Errc::kFailed, std::string("a part of the job cannot be read: ") +
                                      (count < 0 ? std::strerror(errno) : "it is shorter than the server announced")};
    done += static_cast<uint64_t>(count);
  }
  return bytes;
}

}  // namespace

Result<std::shared_ptr<const PoolWork>> JobChannel::next(Deadline deadline) {
  if (const auto now = std::chrono::steady_clock::now(); now >= children_check_at_) {
    forget_ended_children();
    children_check_at_ = now + kChildrenCheckInterval;
  }
  // Work received ahead may be unwanted by now, or the job may be over.
  if (!ahead_.empty()) {
    if (auto taken = take_all(); !taken) return taken.error().code == Errc::kClosed ? job_is_over() : taken.error();
  }
  while (!ahead_.empty()) {
    Ahead next = std::move(ahead_.front());
    ahead_.pop_front();
    if (next.is_wanted) return begin(std::move(next.work));
    const FromJob given_up{.kind = FromJob::Kind::kGivenUp, .key = next.work.key};
    if (auto sent = send_message(channel_, given_up); !sent) return job_is_over();
  }
  for (;;) {
    const auto received = channel_.receive(deadline);
    if (!received && received.error().code == Errc::kClosed) return job_is_over();
    if (!received) return received.error();
    const auto message = wire::parse_to_job(received.value().bytes);
    if (!message) return message.error();
    // Other messages are about finished work.
    if (message.value().kind == ToJob::Kind::kWork) return begin(work_of(message.value()));
  }
}

std::shared_ptr<const PoolWork> JobChannel::begin(PoolWork work) {
  is_in_hand_ = is_wanted_ = true;
  requested_blob_.reset();
  arrived_.reset();
  trainer_id_ = work.trainer_id;
  key_ = work.key;
  work.begun_at = std::chrono::steady_clock::now();
  work.cpu_begun_at = server::process_cpu_time();
  return std::make_shared<const PoolWork>(std::move(work));
}

Result<std::vector<std::byte>> JobChannel::blob(const wire::BlobId& id, Deadline deadline) {
  if (!is_wanted()) return Fault{Errc::kClosed, "this batch is no longer needed"};
  if (requested_blob_ != id) {
    requested_blob_ = id;
    arrived_.reset();
    const FromJob wish{.kind = FromJob::Kind::kBlobRequest, .key = key_, .blob = id};
    if (auto sent = send_message(channel_, wish); !sent) return job_is_over();
  }
  while (!arrived_) {
    const auto received = channel_.receive(deadline);
    if (!received && received.error().code == Errc::kClosed) return job_is_over();
    if (!received) return received.error();
    if (auto taken = take(received.value()); !taken) return taken.error();
    if (!is_wanted_) {
      requested_blob_.reset();
      return Fault{Errc::kClosed, "this batch is no longer needed"};
    }
  }
  requested_blob_.reset();
  return *std::exchange(arrived_, std::nullopt);
}

bool JobChannel::is_wanted() const { return take_all() && is_wanted_; }

Result<void> JobChannel::take_all() const {
  for (;;) {
    const auto message = channel_.next();
    if (!message) return message.error();
    if (message.value()) {
      if (auto taken = take(*message.value()); !taken) return taken;
      continue;
    }
    const auto filled = channel_.fill();
    if (!filled) return filled.error();
    if (!filled.value()) return {};
  }
}

// Handles a message that arrives during other work.
Result<void> JobChannel::take(const shm::Channel::Message& message) const {
  const auto parsed = wire::parse_to_job(message.bytes);
  if (!parsed) return parsed.error();
  const ToJob& told = parsed.value();
  if (told.kind == ToJob::Kind::kWork) ahead_.push_back({.work = work_of(told)});
  if (told.kind == ToJob::Kind::kUnwanted || told.kind == ToJob::Kind::kWanted) {
    const bool is_wanted = told.kind == ToJob::Kind::kWanted;
    if (told.key == key_) is_wanted_ = is_wanted;
    for (Ahead& ahead : ahead_)
      if (told.key == ahead.work.key) ahead.is_wanted = is_wanted;
    return {};
  }
  if (told.blobs.size() != 1 || requested_blob_ != told.blobs.front()) return {};  // of earlier work
  if (told.kind == ToJob::Kind::kBlob) arrived_ = owned(told.body);
  if (told.kind == ToJob::Kind::kNoBlob) {
    arrived_ = Fault{static_cast<Errc>(told.error),
                     std::string(reinterpret_cast<const char*>(told.body.data()), told.body.size())};
  }
  if (told.kind == ToJob::Kind::kBlobInFile) {
    if (message.fds.size() != 1) return Fault{Errc::kMalformed, "a part of the job was announced but not received"};
    arrived_ = read_file(message.fds.front().get(), told.blob_bytes);
  }
  return {};
}

void JobChannel::finish(PoolResult result) {
  if (!std::exchange(is_in_hand_, false)) return;
  if (result.kind == PoolResult::Kind::kHandedBack) {
    std::fprintf(stderr, "penstock: the job process exits: %s\n", result.text.c_str());
    std::_Exit(EXIT_FAILURE);
  }
  // If the server has hung up, next() reports it.
  static_cast<void>(send(result));
}

Result<void> JobChannel::send(PoolResult& result) {
  FromJob message{.answer = result.answer,
                  .key = key_,
                  .flags = static_cast<uint8_t>(result.flags | (result.may_be_kept ? wire::kBatchMayBeKept : 0) |
                                                (result.draws_nothing ? wire::kBatchDrawsNothing : 0)),
                  .cpu_share = result.cpu_share,
                  .fetch_time = result.fetch_time,
                  .prefix_time = result.prefix_time,
                  .samples = result.samples,
                  .sample_count = result.sample_count,
                  .dataset_size = result.dataset_size,
                  .text = std::as_bytes(std::span(result.text)),
                  .state = result.state};
  if (result.kind == PoolResult::Kind::kGivenUp) message.kind = FromJob::Kind::kGivenUp;
  if (result.kind == PoolResult::Kind::kDeclined) message.kind = FromJob::Kind::kDeclined;
  if (!result.batch) return send_message(channel_, message);
  HeldBatch& batch = *result.batch;
  message.record_bytes = batch.record_bytes();
  message.payload_bytes = batch.payload().size();
  const bool is_placed = batch.region() != nullptr;
  if (!is_placed && message.payload_bytes > wire::kJobBatchBytesMax) {
    PoolResult refusal{.answer = wire::AnswerKind::kError};
    refusal.text = std::string("MemoryError") + '\0' + "insufficient shared memory for a batch of " +
                   std::to_string(message.payload_bytes) +
                   " bytes; give the worker more (/dev/shm, its memory limit), or use smaller batches";
    return send(refusal);
  }
  auto sent =
      send_batch(channel_, *slabs_, message,
                 {.region = batch.region(), .payload = is_placed ? std::span<const std::byte>() : batch.payload()});
  // From now on the server owns it, and releases it once the trainer has the batch.
  if (sent && is_placed) batch.note_handed_over();
  return sent;
}

}  // namespace penstock::worker
