// SPDX-License-Identifier: Apache-2.0
#include "wire/shipment.h"

#include <string>
#include <string_view>

#include "base/bytes.h"
#include "wire/frame.h"
#include "wire/malformed.h"

namespace penstock::wire {
namespace {

Fault malformed_shipment(std::string_view reason) { return malformed("the list of lazy tensors", reason); }

}  // namespace

bool is_shipment(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  return reader.read<uint32_t>() == kShipmentMagic && reader.ok();
}

std::vector<std::byte> write_shipment(const Shipment& shipment) {
  PENSTOCK_ASSERT(shipment.boundary_keys.size() <= kShipmentListMax);
  ByteWriter writer;
  writer.write(kShipmentMagic);
  writer.write(static_cast<uint32_t>(shipment.boundary_keys.size()));
  writer.write(shipment.whole_every);
  for (const auto& keys : shipment.boundary_keys) {
    writer.write(static_cast<uint32_t>(keys.size()));
    for (const std::string& key : keys) {
      PENSTOCK_ASSERT(key.size() == kBoundaryKeyBytes, "a boundary key of ", key.size(), " characters");
      writer.write_text(key);
    }
  }
  writer.write(static_cast<uint32_t>(shipment.withheld.size()));
  for (const uint32_t leaf : shipment.withheld) writer.write(leaf);
  return writer.take();
}

Result<Shipment> parse_shipment(std::span<const std::byte> bytes) {
  if (bytes.size() > kShipmentBytesMax) {
    return Fault{Errc::kTooLarge, "the list of lazy tensors has " + std::to_string(bytes.size()) +
                                      " bytes, above the cap of " + std::to_string(kShipmentBytesMax)};
  }
  ByteReader reader(bytes);
  if (reader.read<uint32_t>() != kShipmentMagic) return malformed_shipment("it does not start with PNS1");
  const auto list_count = reader.read<uint32_t>();
  Shipment shipment;
  shipment.whole_every = reader.read<uint64_t>();
  if (!reader.ok() || list_count > kShipmentListMax) return malformed_shipment("its head");
  for (uint32_t list = 0; list < list_count; ++list) {
    const auto key_count = reader.read<uint32_t>();
    if (!reader.ok() || key_count == 0 || reader.remaining() / kBoundaryKeyBytes < key_count)
      return malformed_shipment("a list of boundary keys");
    auto& keys = shipment.boundary_keys.emplace_back();
    for (uint32_t key = 0; key < key_count; ++key) keys.emplace_back(reader.take_text(kBoundaryKeyBytes));
  }
  const auto leaf_count = reader.read<uint32_t>();
  if (!reader.ok() || leaf_count > kTensorCountMax || reader.remaining() != leaf_count * sizeof(uint32_t))
    return malformed_shipment("its leaves");
  for (uint32_t leaf = 0; leaf < leaf_count; ++leaf) shipment.withheld.push_back(reader.read<uint32_t>());
  return shipment;
}

}  // namespace penstock::wire
