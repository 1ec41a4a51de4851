// SPDX-License-Identifier: Apache-2.0
#include "worker/send_result.h"

#include <algorithm>
#include <array>

#include "base/assert.h"

namespace penstock::worker {

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

}  // namespace penstock::worker
