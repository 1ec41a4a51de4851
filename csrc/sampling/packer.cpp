// SPDX-License-Identifier: Apache-2.0
#include "sampling/packer.h"

#include <algorithm>
#include <utility>

#include "base/result.h"

namespace penstock::sampling {

namespace {

int64_t token_count(const PackedRow& row) {
  int64_t count = 0;
  for (const PackedPart& part : row) count += part.length;
  return count;
}

}  // namespace

Packer::Packer(const PackerOptions& options, std::vector<PackedRow> bins, const PackerCounts& counts)
    : options_(options), counts_(counts) {
  PENSTOCK_ASSERT(options_.row_length >= 1 && options_.bins_max >= 1, "a packer must have a bin of at least one token");
  PENSTOCK_ASSERT(can_continue(options_, bins), "open bins must have room, and be at most bins_max");
  for (PackedRow& bin : bins) {
    const int64_t room = options_.row_length - token_count(bin);
    bins_.emplace(Bin{room, opened_count_++}, std::move(bin));
  }
}

bool Packer::can_continue(const PackerOptions& options, std::span<const PackedRow> bins) {
  return bins.size() <= options.bins_max && std::ranges::all_of(bins, [&](const PackedRow& bin) {
           int64_t room = options.row_length;
           for (const PackedPart& part : bin) {
             if (part.document < 0 || part.first < 0 || part.length < 1 || part.length >= room) return false;
             room -= part.length;
           }
           return !bin.empty();
         });
}

std::vector<PackedRow> Packer::add(int64_t length) {
  PENSTOCK_ASSERT(length >= 0, "a document must have a length of 0 or more");
  std::vector<PackedRow> closed;
  const int64_t document = counts_.documents++;
  if (length == 0) {
    ++counts_.empty_documents;
    return closed;
  }
  int64_t first = 0;
  if (length > options_.row_length) {
    if (!options_.splits) {
      ++counts_.dropped_documents;
      counts_.dropped_tokens += length;
      return closed;
    }
    ++counts_.split_documents;
    for (; length - first > options_.row_length; first += options_.row_length)
      close({{document, first, options_.row_length}}, 0, closed);
  }
  place({document, first, length - first}, closed);
  return closed;
}

void Packer::add_all(std::span<const int64_t> lengths) {
  for (const int64_t length : lengths) add(length);
}

void Packer::place(PackedPart part, std::vector<PackedRow>& closed) {
  auto found = bins_.lower_bound(Bin{part.length, 0});
  if (found == bins_.end()) {
    // A bin that is full at once is never open.
    if (part.length < options_.row_length && bins_.size() == options_.bins_max) {
      auto fullest = bins_.extract(bins_.begin());
      close(std::move(fullest.mapped()), fullest.key().room, closed);
    }
    found = bins_.emplace(Bin{options_.row_length, opened_count_++}, PackedRow{}).first;
  }
  auto bin = bins_.extract(found);
  bin.key().room -= part.length;
  bin.mapped().push_back(part);
  if (bin.key().room == 0)
    close(std::move(bin.mapped()), 0, closed);
  else
    bins_.insert(std::move(bin));
}

void Packer::close(PackedRow row, int64_t room, std::vector<PackedRow>& closed) {
  ++counts_.rows;
  counts_.row_tokens += options_.row_length - room;
  closed.push_back(std::move(row));
}

std::vector<PackedRow> Packer::flush() {
  std::vector<PackedRow> closed;
  for (auto& [bin, row] : bins_) close(std::move(row), bin.room, closed);
  bins_.clear();
  return closed;
}

std::vector<PackedRow> Packer::bins() const {
  std::map<uint64_t, const PackedRow*> by_age;
  for (const auto& [bin, row] : bins_) by_age.emplace(bin.number, &row);
  std::vector<PackedRow> rows;
  rows.reserve(by_age.size());
  for (const auto& [number, row] : by_age) rows.push_back(*row);
  return rows;
}

}  // namespace penstock::sampling
