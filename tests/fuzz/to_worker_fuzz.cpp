// SPDX-License-Identifier: Apache-2.0
// Messages of a pool's trainers, as a worker reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "transport/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::transport;

namespace {

constexpr size_t kKindAt = 6, kIndexBytesAt = 56, kStateBytesAt = 64, kIndexKindAt = 72;

Bytes make(cluster::ToWorker::Kind kind, IndexKind index_kind, size_t index_bytes, size_t state_bytes) {
  const Bytes indices(index_bytes, std::byte{1});
  const Bytes state(state_bytes, std::byte{2});
  return write_to_worker({.message = {.kind = kind, .trainer_id = 5, .link = 1, .stamp = 2, .key = {1, 3}, .lane = 1},
                          .index_kind = index_kind,
                          .epoch_seed = 4,
                          .indices = indices,
                          .state = state});
}

}  // namespace

std::vector<Bytes> make_seeds() {
  using Kind = cluster::ToWorker::Kind;
  return {make(Kind::kHello, IndexKind::kNone, 0, 0),        make(Kind::kRequest, IndexKind::kInteger, 8, 0),
          make(Kind::kRequest, IndexKind::kIntegers, 24, 5), make(Kind::kRequest, IndexKind::kPickle, 7, 9),
          make(Kind::kAck, IndexKind::kNone, 0, 0),          make(Kind::kBye, IndexKind::kNone, 0, 0)};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kPoolHeadBytes) bytes.resize(kPoolHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &kToWorkerMagic, sizeof kToWorkerMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &kPoolVersion, sizeof kPoolVersion);
  if (choices.mostly()) bytes[kKindAt] = std::byte(choices.below(8) == 0 ? 1 + choices.below(6) : 2);
  if (choices.mostly()) bytes[kKindAt + 1] &= std::byte{3};
  if (choices.mostly()) bytes[8] |= std::byte{1};
  if (choices.mostly()) bytes[kIndexKindAt] = std::byte(choices.below(4));
  if (choices.mostly()) std::fill_n(bytes.begin() + kIndexKindAt + 1, 7, std::byte{0});
  const uint64_t body_bytes = bytes.size() - kPoolHeadBytes;
  uint64_t index_bytes = choices.below(body_bytes + 1);
  if (choices.mostly()) index_bytes -= index_bytes % 8;
  const uint64_t state_bytes = body_bytes - index_bytes;
  if (choices.mostly()) std::memcpy(bytes.data() + kIndexBytesAt, &index_bytes, sizeof index_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kStateBytesAt, &state_bytes, sizeof state_bytes);
}

void check(std::span<const std::byte> bytes) {
  const auto parsed = parse_to_worker(bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const PoolRequest& request = parsed.value();
  touch(request.indices);
  touch(request.state);
  expect(request.indices.size() + request.state.size() + kPoolHeadBytes == bytes.size(), "nothing is left over");
  if (request.message.kind != cluster::ToWorker::Kind::kRequest)
    expect(request.index_kind == IndexKind::kNone, "only requests have indices");
  if (request.index_kind == IndexKind::kInteger) expect(request.indices.size() == 8, "one index is 8 bytes");
  if (request.index_kind == IndexKind::kIntegers) expect(request.indices.size() % 8 == 0, "each index is 8 bytes");
  expect(std::ranges::equal(write_to_worker(request), bytes), "a message that is written again is the same bytes");
}

}  // namespace penstock::fuzz
