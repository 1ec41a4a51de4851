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
  using enum wire::DescriptorKind;
  for (const auto kind : {kHello, kSlab, kEnd, kStates}) {
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
    seeds.back().resize(seeds.back().size() + 16);  // its payload
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
    descriptor.kind = static_cast<wire::DescriptorKind>(static_cast<uint8_t>(descriptor.kind) % 5 + 1);
  }
  if (choices.mostly()) descriptor.flags &= wire::kDescriptorFlags;
  const bool is_alone =
      descriptor.kind == wire::DescriptorKind::kHello || descriptor.kind == wire::DescriptorKind::kSlab;
  if (is_alone && choices.mostly()) bytes.resize(sizeof descriptor);
  if (descriptor.kind == wire::DescriptorKind::kInline && choices.mostly()) {
    const auto body = static_cast<uint32_t>(bytes.size() - sizeof descriptor);
    if (descriptor.record_bytes > body) descriptor.record_bytes = body;
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
  const auto body = bytes.subspan(sizeof descriptor);
  if (descriptor.kind == wire::DescriptorKind::kInline) {
    const std::span<const std::byte> record(body.data(), descriptor.record_bytes);
    touch(record);
    static_cast<void>(parse_frame(record));  // batch_record_fuzz looks at the result
  }
  const bool has_body =
      descriptor.kind != wire::DescriptorKind::kHello && descriptor.kind != wire::DescriptorKind::kSlab;
  expect(has_body || body.empty(), "what stands alone has no body");
  expect(std::ranges::equal(wire::write_message(descriptor, body), bytes),
         "a descriptor that is written again is the same bytes");
}

}  // namespace penstock::fuzz
