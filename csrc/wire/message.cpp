// SPDX-License-Identifier: Apache-2.0
#include "wire/message.h"

#include <algorithm>
#include <limits>

#include "wire/malformed.h"

namespace penstock::wire {

uint32_t time_units(std::chrono::nanoseconds time) {
  const auto units = std::max<int64_t>(0, time / kTimeUnit);
  return static_cast<uint32_t>(std::min<int64_t>(units, std::numeric_limits<uint32_t>::max()));
}

uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole) {
  if (part.count() <= 0 || whole.count() <= 0) return 0;
  const double share = static_cast<double>(part.count()) / static_cast<double>(whole.count());
  return static_cast<uint16_t>(std::clamp(share * kShareUnit, 1.0, static_cast<double>(kShareUnit)));
}

Result<Request> parse_request(std::span<const std::byte> bytes) {
  Request request;
  if (bytes.size() < sizeof request) return malformed("a request", std::to_string(bytes.size()) + " bytes long");
  std::memcpy(&request, bytes.data(), sizeof request);
  if (request.magic != kRequestMagic) return malformed("a request", "it does not begin with PNR1");
  if (request.version != kMessageVersion) {
    return malformed("a request", "its version is " + std::to_string(request.version));
  }
  if (request.kind < RequestKind::kFetch || request.kind > RequestKind::kStates) {
    return malformed("a request", "unknown kind " + std::to_string(static_cast<int>(request.kind)));
  }
  if (request.index_kind > IndexKind::kPickle) return malformed("a request", "unknown kind of indices");
  for (uint64_t reserved : request.reserved) {
    if (reserved != 0) return malformed("a request", "reserved bytes are not zero");
  }
  if (request.body_bytes > kRequestBodyBytesMax) {
    return Fault{Errc::kTooLarge, "a request's body of " + std::to_string(request.body_bytes) +
                                      " bytes is above the cap of " + std::to_string(kRequestBodyBytesMax)};
  }
  if (bytes.size() - sizeof request != request.body_bytes) {
    return malformed("a request", "its body does not have the length it claims");
  }
  if (request.index_kind == IndexKind::kInteger && request.body_bytes != 8) {
    return malformed("a request", "a single index is not 8 bytes long");
  }
  if (request.index_kind == IndexKind::kIntegers && request.body_bytes % 8 != 0) {
    return malformed("a request", "its indices are not 8 bytes each");
  }
  return request;
}

Result<Descriptor> parse_descriptor(std::span<const std::byte> bytes) {
  Descriptor descriptor;
  if (bytes.size() < sizeof descriptor) return malformed("a descriptor", std::to_string(bytes.size()) + " bytes long");
  std::memcpy(&descriptor, bytes.data(), sizeof descriptor);
  if (descriptor.magic != kDescriptorMagic) return malformed("a descriptor", "it does not begin with PND1");
  if (descriptor.version != kMessageVersion) {
    return malformed("a descriptor", "its version is " + std::to_string(descriptor.version));
  }
  if (descriptor.kind < DescriptorKind::kHello || descriptor.kind > DescriptorKind::kStates) {
    return malformed("a descriptor", "unknown kind " + std::to_string(static_cast<int>(descriptor.kind)));
  }
  if ((descriptor.flags & ~kDescriptorFlags) != 0) return malformed("a descriptor", "unknown flags");
  const size_t body = bytes.size() - sizeof descriptor;
  const size_t record = descriptor.kind == DescriptorKind::kInline ? descriptor.record_bytes : 0;
  const bool is_alone = descriptor.kind == DescriptorKind::kHello || descriptor.kind == DescriptorKind::kSlab;
  if (body < record || (is_alone && body > 0)) {
    return malformed("a descriptor", "its body does not have the length it claims");
  }
  return descriptor;
}

}  // namespace penstock::wire
