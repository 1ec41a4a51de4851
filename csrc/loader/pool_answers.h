// SPDX-License-Identifier: Apache-2.0
#pragma once
// The result of a request to a pool: the batch, the error that a worker sent in its place, or an error found by the
// trainer.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "loader/batch.h"
#include "loader/incoming_batch.h"
#include "session/request_content.h"
#include "wire/batch_key.h"
#include "wire/pool_record.h"

namespace penstock::loader {

std::string_view text_of(std::span<const std::byte> bytes);

// The reader of a pool's batches.
struct BatchReader {
  bool allow_pickle = false;
  bool is_python = false;
};

// The batch of an answer whose bytes have all arrived, or of an error answer. `worker` is the sender's name in
// messages. kMalformed and kTooLarge if it does not answer its request, kNoMemory if the trainer has no memory.
Result<std::unique_ptr<Batch>> batch_of(const wire::PoolAnswer& answer, std::optional<IncomingBatch> whole,
                                        const std::string& worker, BatchReader reader);

// The error in place of a batch from `place` that cannot be read here, usually for lack of memory.
std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error);

// Formats a dataset's size as reported by a worker: "40 samples".
std::string spoken_size(uint64_t dataset_size);

// The error in place of a batch from `place`.
std::unique_ptr<Batch> error_in_batch(wire::BatchKey key, const std::string& place, std::string text);

// The error in place of a batch after `count` wrong answers, the last one from `place`.
std::unique_ptr<Batch> error_of_wrong_answers(wire::BatchKey key, const std::string& place, const std::string& reason,
                                              uint32_t count);

// A worker's description of how one of its processes ended, sanitised for a terminal.
std::string spoken_end(std::span<const std::byte> reason);

// The known facts about workers that died while they made a batch.
struct DeathTraces {
  std::string lost_at{};   // the endpoint of one of them, or empty
  std::string last_end{};  // how the process ended, from spoken_end(), of the last worker that reported it; or empty
};

// Describes that one worker after another died while making a batch.
std::string spoken_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                          const DeathTraces& traces);
// The error in the batch's place.
std::unique_ptr<Batch> error_of_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                                       const DeathTraces& traces);

// The error in place of a batch whose indices exceed the size limit of a request.
std::unique_ptr<Batch> error_of_indices(wire::BatchKey key, size_t index_bytes);

}  // namespace penstock::loader
