// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides in which order the samples of chunks are read, such as row groups, chunks of an array, or tar shards, so that
// each chunk is read once. The chunks are laid on a line in random order, and the line is cut into one part for each
// reader. A reader has a window of open chunks: its next sample is from a random open chunk, and once all samples of a
// chunk are taken, the next chunk of its part is opened. The order consists of runs: run j is of reader j modulo the
// number of readers. So, of batches that are runs, a process that gets every n-th batch reads the chunks of its readers
// only, if n divides the number of readers. The order follows from the options alone.

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace penstock::sampling {

struct ChunkOrderOptions {
  size_t open_max = 16;     // open chunks of a reader, at least 1
  size_t reader_count = 1;  // at least 1
  int64_t run_length = 1;   // consecutive samples of a reader, from 1 to kRunMax
  bool shuffle = true;      // false: the samples of each reader in sequence
  uint64_t key = 0;         // determines the random order
};

// The order of one epoch. Thread-compatible.
class ChunkOrder {
 public:
  static constexpr int64_t kSamplesMax = int64_t{1} << 60;
  static constexpr int64_t kRunMax = int64_t{1} << 60;

  // `lengths` has the number of samples of each chunk: at least 0, and at most kSamplesMax of all chunks.
  ChunkOrder(std::span<const int64_t> lengths, const ChunkOrderOptions& options);

  // Writes the indices of the next samples and returns how many: fewer than asked for at the end only. Sample 0 is the
  // first one of chunk 0, and samples are numbered through all chunks.
  size_t next(std::span<int64_t> indices);

  // Leaves out the next `count` samples, at most those that are left, in some nanoseconds each.
  void skip(int64_t count);

  int64_t left_count() const { return sample_count_ - given_count_; }

 private:
  // Some samples of a chunk, which one reader takes: places first to end in the chunk's random order, the last first.
  struct Piece {
    size_t chunk = 0;
    int64_t first = 0;
    int64_t end = 0;              // past the samples that are left
    uint64_t weight = 0;          // how often the piece is chosen, relative to other open ones
    std::vector<int64_t> rows{};  // of places first to end; drawn when the first one is needed
  };
  struct Reader {
    std::mt19937_64 random{};
    int64_t line_first = 0;  // its part of the line that is not open yet
    int64_t line_end = 0;
    size_t next_place = 0;  // of the next chunk, in chunks_
    std::vector<Piece> open{};
    std::vector<uint32_t> rest{};  // once its part is open to the end: an open piece for each sample that is left
  };

  Reader& reader_of(int64_t number) {
    return readers_[static_cast<size_t>(number / options_.run_length) % readers_.size()];
  }
  // Returns the place among the open pieces of the next sample's piece, which loses that sample.
  size_t choose(Reader& reader);
  void open_pieces(Reader& reader);
  std::vector<int64_t> rows_of(const Piece& piece) const;

  ChunkOrderOptions options_;
  std::vector<int64_t> starts_{};  // index of the first sample of each chunk, and the end
  std::vector<size_t> chunks_{};   // in the sequence of the line
  std::vector<int64_t> places_{};  // where each of them begins on the line, and the end
  std::vector<Reader> readers_{};
  int64_t sample_count_ = 0;
  int64_t given_count_ = 0;
};

}  // namespace penstock::sampling
