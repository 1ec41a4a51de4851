// SPDX-License-Identifier: Apache-2.0
#pragma once
// The result of a request to a pool: the batch, the error that a worker sent in its place, or an error
// of the trainer's own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cluster/request_content.h"
#include "loader/batch.h"
#include "loader/incoming_batch.h"
#include "wire/batch_key.h"
#include "wire/pool_record.h"

namespace penstock::loader {

std::string_view text_of(std::span<const std::byte> bytes);

// Who reads a pool's batches.
struct BatchReader {
  bool allow_pickle = false;
  bool is_python = false;
};

// The batch of an answer whose bytes have all come, or of one that is an error. `worker` is the sender's name in
// messages. kMalformed and kTooLarge where it is no answer to its request, kNoMemory where the trainer has no room.
Result<std::unique_ptr<Batch>> batch_of(const wire::PoolAnswer& answer, std::optional<IncomingBatch> whole,
                                        const std::string& worker, BatchReader reader);

// The error in place of a batch of `place`'s that cannot be had here, for want of memory as a rule.
std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error);

// "40 samples": as a worker tells it.
std::string spoken_size(uint64_t dataset_size);

// The error in place of a batch of `place`'s.
std::unique_ptr<Batch> error_in_batch(wire::BatchKey key, const std::string& place, std::string text);

// The error in place of a batch that workers, the last of them at `place`, were asked for and answered wrongly.
std::unique_ptr<Batch> error_of_wrong_answers(wire::BatchKey key, const std::string& place, const std::string& reason,
                                              uint32_t count);

// How a process of a worker's ended, in the worker's own words, for a user's terminal.
std::string spoken_end(std::span<const std::byte> reason);

// What is known of workers that died of a batch.
struct DeathTraces {
  std::string lost_at{};   // where one of them listened, or empty
  std::string last_end{};  // how the process of the last one ended that told, as spoken_end() says it; or empty
};

// That one worker after the other died of a batch.
std::string spoken_deaths(wire::BatchKey key, const cluster::RequestContent& content, uint32_t death_count,
                          const DeathTraces& traces);
// The error in its place.
std::unique_ptr<Batch> error_of_deaths(wire::BatchKey key, const cluster::RequestContent& content, uint32_t death_count,
                                       const DeathTraces& traces);

// The error in place of a batch whose indices are more than a request may carry.
std::unique_ptr<Batch> error_of_indices(wire::BatchKey key, size_t index_bytes);

}  // namespace penstock::loader
