// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which leaves of a batch stay with this worker, by the trainer's lazy-fetch list (wire/shipment.h).

#include <cstdint>
#include <vector>

#include "wire/shipment.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// The indices of the leaves that stay, in ascending order. Empty for a batch that lacks boundary tensors, will be
// compared, or is a single pickle. A leaf stays only if the trainer can provide a substitute: a NumPy array cannot wait
// for its values, and a tensor that shares memory with another has to be sent with it.
//
// `number` is the batch's number in its epoch.
std::vector<uint32_t> leaves_to_withhold(const wire::Shipment& shipment, const BatchContent& content, uint64_t number);

}  // namespace penstock::worker
