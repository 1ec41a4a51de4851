// SPDX-License-Identifier: Apache-2.0
// Descriptors, with the record of an inline batch, as a trainer reads them of a worker.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "record_samples.h"
#include "wire/message.h"

namespace penstock::fuzz {

using namespace penstock::wire;

std::vector<Bytes> make_seeds() {
  std::vector<Bytes> seeds;
  for (const auto kind : {wire::DescriptorKind::kHello, wire::DescriptorKind::kSlab, wire::DescriptorKind::kEnd}) {
    wire::Descriptor descriptor;
    descriptor.kind = kind;
    descriptor.flags = wire::kDescriptorTransient;
    descriptor.record_bytes = 104;
    seeds.push_back(wire::write_message(descriptor));
  }
  for (const Bytes& record : wire::sample_records()) {
    wire::Descriptor descriptor;
    descriptor.kind = wire::DescriptorKind::kInline;
    descriptor.record_bytes = static_cast<uint32_t>(record.size());
    seeds.push_back(wire::write_message(descriptor, record));
  }
  return seeds;
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < sizeof(wire::Descriptor)) bytes.resize(sizeof(wire::Descriptor));
  wire::Descriptor descriptor;
  std::memcpy(&descriptor, bytes.data(), sizeof descriptor);
  if (choices.mostly()) descriptor.magic = wire::kDescriptorMagic;
  if (choices.mostly()) descriptor.version = wire::kMessageVersion;
  if (choices.mostly()) {
    descriptor.kind = static_cast<wire::DescriptorKind>(static_cast<uint8_t>(descriptor.kind) % 4 + 1);
  }
  if (choices.mostly()) descriptor.flags &= wire::kDescriptorFlags;
  if (descriptor.kind != wire::DescriptorKind::kInline && choices.mostly()) bytes.resize(sizeof descriptor);
  if (descriptor.kind == wire::DescriptorKind::kInline && choices.mostly()) {
    descriptor.record_bytes = static_cast<uint32_t>(bytes.size() - sizeof descriptor);
  }
  std::memcpy(bytes.data(), &descriptor, sizeof descriptor);
}

void check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_descriptor(bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const wire::Descriptor& descriptor = parsed.value();
  std::span<const std::byte> record;
  if (descriptor.kind == wire::DescriptorKind::kInline) {
    record = {bytes.data() + sizeof descriptor, descriptor.record_bytes};
    touch(record);
    static_cast<void>(parse_frame(record));  // batch_record_fuzz looks at the result
  }
  expect(std::ranges::equal(wire::write_message(descriptor, record), bytes),
         "a descriptor that is written again is the same bytes");
}

}  // namespace penstock::fuzz
