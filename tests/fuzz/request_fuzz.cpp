// SPDX-License-Identifier: Apache-2.0
// Requests with their bodies, as a worker reads them of a trainer.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/message.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

Bytes make_request(wire::RequestKind kind, wire::IndexKind index_kind, size_t body_bytes) {
  wire::Request request;
  request.kind = kind;
  request.index_kind = index_kind;
  request.sequence = 3;
  request.epoch = 1;
  request.body_bytes = body_bytes;
  return wire::write_message(request, Bytes(body_bytes, std::byte{1}));
}

}  // namespace

std::vector<Bytes> make_seeds() {
  return {
      make_request(wire::RequestKind::kFetch, wire::IndexKind::kNone, 0),
      make_request(wire::RequestKind::kFetch, wire::IndexKind::kInteger, 8),
      make_request(wire::RequestKind::kFetch, wire::IndexKind::kIntegers, 24),
      make_request(wire::RequestKind::kEpoch, wire::IndexKind::kPickle, 5),
      make_request(wire::RequestKind::kPrefix, wire::IndexKind::kNone, 70),
      make_request(wire::RequestKind::kRemovePrefixes, wire::IndexKind::kNone, 0),
      make_request(wire::RequestKind::kEarlyEpoch, wire::IndexKind::kPickle, 0),
  };
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < sizeof(wire::Request)) bytes.resize(sizeof(wire::Request));
  wire::Request request;
  std::memcpy(&request, bytes.data(), sizeof request);
  if (choices.mostly()) request.magic = wire::kRequestMagic;
  if (choices.mostly()) request.version = wire::kMessageVersion;
  if (choices.mostly()) request.kind = static_cast<wire::RequestKind>(static_cast<uint8_t>(request.kind) % 5 + 1);
  if (choices.mostly()) request.index_kind = static_cast<wire::IndexKind>(static_cast<uint8_t>(request.index_kind) % 4);
  if (choices.mostly()) std::ranges::fill(request.reserved, 0);
  size_t body_bytes = bytes.size() - sizeof request;
  if (request.index_kind == wire::IndexKind::kInteger && choices.mostly()) body_bytes = 8;
  if (request.index_kind == wire::IndexKind::kIntegers && choices.mostly()) body_bytes -= body_bytes % 8;
  bytes.resize(sizeof request + body_bytes);
  if (choices.mostly()) request.body_bytes = body_bytes;
  std::memcpy(bytes.data(), &request, sizeof request);
}

void check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_request(bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const wire::Request& request = parsed.value();
  expect(request.body_bytes <= wire::kRequestBodyBytesMax, "the body is capped");
  const std::span body(bytes.data() + sizeof request, request.body_bytes);
  touch(body);
  if (request.index_kind == wire::IndexKind::kInteger) expect(body.size() == 8, "one index is 8 bytes");
  if (request.index_kind == wire::IndexKind::kIntegers) expect(body.size() % 8 == 0, "each index is 8 bytes");
  expect(std::ranges::equal(wire::write_message(request, body), bytes),
         "a request that is written again is the same bytes");
}

}  // namespace penstock::fuzz
