// SPDX-License-Identifier: Apache-2.0
#include "server/blob_fetch.h"

#include <algorithm>
#include <new>
#include <string>

namespace penstock::server {

std::vector<wire::BlobRequest> BlobFetch::take_requests(Instant now) {
  if (requested_at_ && now - *requested_at_ >= kBlobPatience) requested_offsets_.clear();
  std::vector<wire::BlobRequest> requests;
  while (requested_offsets_.size() < kBlobRequestCountMax) {
    const uint64_t offset =
        requested_offsets_.empty() ? bytes_.size() : requested_offsets_.back() + wire::kBlobPieceBytesMax;
    // Until the size is known, there may be no second chunk.
    if (offset > 0 && offset >= total_bytes_) break;
    requested_offsets_.push_back(offset);
    requests.push_back({.id = id_, .offset = offset});
  }
  if (!requests.empty()) requested_at_ = now;
  return requests;
}

Result<void> BlobFetch::receive(const wire::BlobPiece& piece, std::span<const std::byte> bytes, Instant now) {
  if (piece.total_bytes > bytes_max_) {
    return Fault{
        Errc::kTooLarge,
        "a blob of the job has " + std::to_string(piece.total_bytes) + " bytes, but this worker accepts at most " +
            std::to_string(bytes_max_) +
            "; let the dataset read its data instead of containing it, or raise PENSTOCK_JOB_BYTES on the workers"};
  }
  if (total_bytes_ != 0 && piece.total_bytes != total_bytes_) {
    return Fault{Errc::kMismatch, "a blob had " + std::to_string(total_bytes_) + " bytes and then " +
                                      std::to_string(piece.total_bytes) +
                                      "; trainer and workers must run the same version of penstock"};
  }
  std::erase(requested_offsets_, piece.offset);
  if (piece.offset != bytes_.size()) return {};  // a duplicate, or a chunk after a lost one
  try {
    if (total_bytes_ == 0) bytes_.reserve(piece.total_bytes);
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  } catch (const std::bad_alloc&) {
    return Fault{Errc::kNoMemory, "insufficient memory for the " + std::to_string(piece.total_bytes) +
                                      " bytes of a blob of the job; give the worker more memory, or let the dataset "
                                      "read its data instead of containing it"};
  }
  total_bytes_ = piece.total_bytes;
  requested_at_ = now;
  return {};
}

}  // namespace penstock::server
