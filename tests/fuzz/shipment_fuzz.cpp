// SPDX-License-Identifier: Apache-2.0
// Which leaves stay with a worker, as the worker reads it.
#include <algorithm>
#include <cstring>
#include <string>

#include "fuzz_target.h"
#include "wire/blob_record.h"
#include "wire/frame.h"

namespace penstock::fuzz {

using namespace penstock::wire;

std::vector<Bytes> make_seeds() {
  const std::string a(kBoundaryKeyBytes, 'a'), b(kBoundaryKeyBytes, 'b');
  return {write_shipment({.boundary_keys = {{a}}, .withheld = {0, 2}, .whole_every = 1000}),
          write_shipment({.boundary_keys = {{a, b}, {b}}, .withheld = {1}, .whole_every = 0}), write_shipment({})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  constexpr size_t kHeadBytes = 16;
  if (bytes.size() < kHeadBytes) bytes.resize(kHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &kShipmentMagic, sizeof kShipmentMagic);
  // The lists that there is room for, and the leaves behind them.
  uint32_t list_count = 0;
  std::memcpy(&list_count, bytes.data() + 4, sizeof list_count);
  if (choices.mostly()) list_count %= kShipmentListMax + 2;
  std::memcpy(bytes.data() + 4, &list_count, sizeof list_count);
  size_t at = kHeadBytes;
  for (uint32_t list = 0; list < list_count && at + 4 <= bytes.size() && choices.mostly(); ++list) {
    const auto room = static_cast<uint32_t>((bytes.size() - at - 4) / kBoundaryKeyBytes);
    const auto key_count = static_cast<uint32_t>(1 + choices.below(room + 1));
    std::memcpy(bytes.data() + at, &key_count, sizeof key_count);
    at += 4 + size_t{key_count} * kBoundaryKeyBytes;
  }
  if (at + 4 > bytes.size() || !choices.mostly()) return;
  const auto leaf_count = static_cast<uint32_t>((bytes.size() - at - 4) / 4);
  std::memcpy(bytes.data() + at, &leaf_count, sizeof leaf_count);
  if (choices.mostly()) bytes.resize(at + 4 + size_t{leaf_count} * 4);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = parse_shipment(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const Shipment& shipment = parsed.value();
  expect(shipment.boundary_keys.size() <= kShipmentListMax && shipment.withheld.size() <= kTensorCountMax, "caps hold");
  for (const auto& keys : shipment.boundary_keys) expect(!keys.empty(), "a list has a key at least");
  expect(std::ranges::equal(write_shipment(shipment), bytes), "a shipment that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
