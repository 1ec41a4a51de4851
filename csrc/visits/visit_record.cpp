// SPDX-License-Identifier: Apache-2.0
#include "visits/visit_record.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <string_view>

#include "base/bytes.h"

namespace penstock::visits {
namespace {

constexpr std::string_view kMagic = "PNSTKVIS";
constexpr size_t kHeaderDigestOffset = 32;
constexpr uint32_t kWorldSizeMax = 1 << 20;

uint64_t folded(const ContentDigest& digest) {
  const auto& lanes = digest.value();
  return lanes[0] ^ std::rotl(lanes[1], 16) ^ std::rotl(lanes[2], 32) ^ std::rotl(lanes[3], 48);
}

}  // namespace

int64_t BatchView::index(uint32_t place) const {
  if (width == 0) return base + place;
  uint64_t offset = 0;
  std::memcpy(&offset, packed.data() + size_t{place} * width, width);
  return static_cast<int64_t>(static_cast<uint64_t>(base) + offset);
}

void BatchView::append_to(std::vector<int64_t>& indices) const {
  if (!knows_indices()) return;
  for (uint32_t place = 0; place < count; ++place) indices.push_back(index(place));
}

Packing Packing::of(std::span<const int64_t> indices) {
  if (indices.empty()) return {};
  const auto first = static_cast<uint64_t>(indices.front());
  size_t run_count = 1;
  while (run_count < indices.size() && static_cast<uint64_t>(indices[run_count]) == first + run_count) ++run_count;
  if (run_count == indices.size()) return {.base = indices.front(), .width = 0};
  int64_t low = indices.front();
  int64_t high = low;
  for (const int64_t index : indices) {
    low = std::min(low, index);
    high = std::max(high, index);
  }
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  const int bytes = (64 - std::countl_zero(range | 1) + 7) / 8;
  return {.base = low, .width = static_cast<uint8_t>(bytes)};
}

void Packing::write(std::span<const int64_t> indices, std::byte* place) const {
  if (width == 0) return;
  for (const int64_t index : indices) {
    const uint64_t offset = static_cast<uint64_t>(index) - static_cast<uint64_t>(base);
    std::memcpy(place, &offset, sizeof offset);
    place += width;
  }
}

std::array<std::byte, kHeaderBytes> header_of(RankOfJob rank) {
  std::array<std::byte, kHeaderBytes> header = {};
  std::memcpy(header.data(), kMagic.data(), kMagic.size());
  std::memcpy(header.data() + 8, &kFormatVersion, sizeof kFormatVersion);
  std::memcpy(header.data() + 12, &rank.rank, sizeof rank.rank);
  std::memcpy(header.data() + 16, &rank.world_size, sizeof rank.world_size);
  ContentDigest digest;
  digest.add(std::span(header).first(kHeaderDigestOffset));
  const uint64_t value = folded(digest);
  std::memcpy(header.data() + kHeaderDigestOffset, &value, sizeof value);
  return header;
}

Result<RankOfJob> parse_header(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const bool is_ours = reader.take_text(kMagic.size()) == kMagic;
  const auto version = reader.read<uint32_t>();
  if (!is_ours) return Fault{Errc::kMalformed, "it is not a record of visits"};
  if (version != kFormatVersion)
    return Fault{Errc::kMismatch, "its format has version " + std::to_string(version) + ", this penstock reads " +
                                      std::to_string(kFormatVersion)};
  RankOfJob rank;
  rank.rank = reader.read<uint32_t>();
  rank.world_size = reader.read<uint32_t>();
  reader.take(kHeaderDigestOffset - reader.position());
  const auto stated = reader.read<uint64_t>();
  ContentDigest digest;
  if (reader.ok()) digest.add(bytes.first(kHeaderDigestOffset));
  if (!reader.ok() || stated != folded(digest) || rank.rank >= rank.world_size || rank.world_size > kWorldSizeMax)
    return Fault{Errc::kMalformed, "its header is damaged"};
  return rank;
}

uint64_t chain_after(uint64_t before, std::span<const std::byte> bytes) {
  ContentDigest digest;
  digest.add(before);
  digest.add(bytes);
  const uint64_t chain = folded(digest);
  return chain == 0 ? 1 : chain;
}

std::vector<std::byte> body_of(const Session& session) {
  ByteWriter writer;
  writer.write(session.time_ns);
  writer.write(session.dataset_size);
  writer.write(session.samples_per_epoch);
  for (const std::string* text : {&session.loader, &session.dataset, &session.sampler, &session.job}) {
    writer.write(static_cast<uint32_t>(text->size()));
    writer.write_text(*text);
  }
  return writer.take();
}

Result<Session> parse_session(const RecordView& record) {
  ByteReader reader(record.body);
  Session session;
  session.flags = record.flags;
  session.time_ns = reader.read<int64_t>();
  session.dataset_size = reader.read<int64_t>();
  session.samples_per_epoch = reader.read<int64_t>();
  for (std::string* text : {&session.loader, &session.dataset, &session.sampler, &session.job})
    *text = reader.take_text(reader.read<uint32_t>());
  if (!reader.ok()) return Fault{Errc::kMalformed, "a record of a session is damaged"};
  return session;
}

Result<BatchView> parse_batch(const RecordView& record) {
  ByteReader reader(record.body);
  BatchView batch;
  batch.flags = record.flags;
  batch.width = record.width;
  batch.epoch = reader.read<uint32_t>();
  batch.count = reader.read<uint32_t>();
  batch.step = reader.read<int64_t>();
  batch.base = reader.read<int64_t>();
  const bool has_indices = reader.ok() && batch.knows_indices();
  if (has_indices && batch.width <= 8) batch.packed = reader.take(uint64_t{batch.count} * batch.width);
  if (!reader.ok() || batch.width > 8 || reader.remaining() > 0)
    return Fault{Errc::kMalformed, "a record of a batch is damaged"};
  return batch;
}

}  // namespace penstock::visits
