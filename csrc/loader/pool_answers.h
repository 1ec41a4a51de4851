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

// The batch of an answer whose bytes have all come, or of one that is an error. `worker` is the sender's name in
// messages, and `place` the name with its address.
std::unique_ptr<Batch> batch_of(const wire::PoolAnswer& answer, std::optional<IncomingBatch> whole,
                                const std::string& worker, const std::string& place, bool allow_pickle);

// The error in place of a batch that `place` sent and that cannot be read.
std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error);

// The error in place of a batch that one worker after the other died of. `lost_at` is where one of them listened, or
// empty.
std::unique_ptr<Batch> error_of_deaths(wire::BatchKey key, const cluster::RequestContent& content, uint32_t death_count,
                                       const std::string& lost_at);

// The error in place of a batch whose indices are more than a request may carry.
std::unique_ptr<Batch> error_of_indices(wire::BatchKey key, size_t index_bytes);

}  // namespace penstock::loader
