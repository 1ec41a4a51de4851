// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which leaves of a batch stay with this worker, by the trainer's wish (wire/shipment.h).

#include <cstdint>
#include <vector>

#include "wire/shipment.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// The places of the leaves that stay, in ascending order. Empty for a batch that lacks boundary tensors, that is to be
// compared, or that is one pickle. A leaf stays behind only where the trainer can give out something in its place: an
// array of NumPy's cannot wait for its values, and a tensor that shares memory with another has to arrive with it.
//
// `number` is that of the batch in its epoch.
std::vector<uint32_t> leaves_to_withhold(const wire::Shipment& shipment, const BatchContent& content, uint64_t number);

}  // namespace penstock::worker
