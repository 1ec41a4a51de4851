// SPDX-License-Identifier: Apache-2.0
#pragma once
// The leaves that pool workers leave out of a trainer's batches: leaves that the trainer does not read once it has the
// boundary tensors. A shipment is sent as a blob, like a prefix, and requests name it, so that a batch is sent in the
// same way by every worker. PROTOCOL.md has the bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::wire {

constexpr uint32_t kShipmentMagic = 0x31534e50;  // "PNS1"
constexpr size_t kShipmentListMax = 256;         // number of key lists
constexpr size_t kShipmentBytesMax = size_t{16} << 20;

struct Shipment {
  // Leaves are left out of a batch that has all boundary keys of one of these lists. There is one list for each plan in
  // use.
  std::vector<std::vector<std::string>> boundary_keys;
  std::vector<uint32_t> withheld;  // leaves, by their index in the batch's table
  // Batches whose number in their epoch is a multiple of this are sent whole: the trainer compares them. 0: none.
  uint64_t whole_every = 0;

  friend bool operator==(const Shipment&, const Shipment&) = default;
};

// Whether bytes are a shipment, not a prefix.
bool is_shipment(std::span<const std::byte> bytes);

std::vector<std::byte> write_shipment(const Shipment& shipment);

// kMalformed or kTooLarge.
Result<Shipment> parse_shipment(std::span<const std::byte> bytes);

}  // namespace penstock::wire
