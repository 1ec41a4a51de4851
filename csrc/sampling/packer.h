// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packs documents of different lengths into rows of a fixed length. A document is placed in the open bin that has the
// least room for it, and if it fits none, a new bin is opened; a full bin is closed, and so is the fullest one if too
// many would be open. A closed bin is a row. This is BBF-k of J. Csirik and D. S. Johnson, "Bounded Space On-Line Bin
// Packing: Best is Better than First", Algorithmica 31 (2001), pages 115 to 138; with one open bin it is next-fit. Of
// bins with the same room the oldest one is chosen, so the rows are a function of the lengths alone.
//
// Only decisions are made here: which part of which document is in which row. The caller has the tokens.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace penstock::sampling {

struct PackerOptions {
  int64_t row_length = 1;  // tokens, 1 or more
  size_t bins_max = 1;     // open bins, 1 or more
  bool splits = false;     // a document longer than a row is split; otherwise it is dropped
};

struct PackedPart {
  int64_t document = 0;  // its number in the stream, from 0
  int64_t first = 0;     // index of the first token in the document
  int64_t length = 0;    // tokens

  friend bool operator==(const PackedPart&, const PackedPart&) = default;
};

using PackedRow = std::vector<PackedPart>;

struct PackerCounts {
  int64_t documents = 0;        // all that were added
  int64_t empty_documents = 0;  // of no token; they are in no row
  int64_t split_documents = 0;
  int64_t dropped_documents = 0;
  int64_t dropped_tokens = 0;  // of the dropped documents
  int64_t rows = 0;            // closed
  int64_t row_tokens = 0;      // in closed rows, without padding

  friend bool operator==(const PackerCounts&, const PackerCounts&) = default;
};

// Thread-compatible. A value type.
class Packer {
 public:
  explicit Packer(const PackerOptions& options) : Packer(options, {}, {}) {}
  // Continues another packer, whose open bins and counts are `bins` and `counts`.
  Packer(const PackerOptions& options, std::vector<PackedRow> bins, const PackerCounts& counts);

  // Returns whether each of `bins` holds 1 to row_length - 1 tokens in parts of positive length, and there are at most
  // bins_max bins: whether a packer can continue from them.
  static bool can_continue(const PackerOptions& options, std::span<const PackedRow> bins);

  // Places the next document, of `length` >= 0 tokens, and returns the rows that this closes, in sequence. A document
  // that is split has its full rows first; the rest of it is placed like a document.
  std::vector<PackedRow> add(int64_t length);

  // Places documents of these lengths for the counts alone: their rows are not returned.
  void add_all(std::span<const int64_t> lengths);

  // Closes all open bins, the fullest one first, and returns their rows.
  std::vector<PackedRow> flush();

  // The open bins, the oldest one first.
  std::vector<PackedRow> bins() const;
  const PackerCounts& counts() const { return counts_; }

 private:
  struct Bin {
    int64_t room = 0;
    uint64_t number = 0;  // of all bins opened, from 0

    friend auto operator<=>(const Bin&, const Bin&) = default;
  };

  void place(PackedPart part, std::vector<PackedRow>& closed);
  void close(PackedRow row, int64_t room, std::vector<PackedRow>& closed);

  PackerOptions options_;
  std::map<Bin, PackedRow> bins_;  // the fullest one first
  uint64_t opened_count_ = 0;
  PackerCounts counts_;
};

}  // namespace penstock::sampling
