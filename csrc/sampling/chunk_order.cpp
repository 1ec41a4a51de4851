// SPDX-License-Identifier: Apache-2.0
#include "sampling/chunk_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/result.h"

namespace penstock::sampling {

namespace {

// Open chunks are chosen at rates that differ up to twofold. At equal rates, chunks of one length that were opened
// together would also end together, and a reader would read a whole window of chunks at once.
constexpr uint64_t kWeightMin = 8;
constexpr uint64_t kWeightMax = 16;

enum class Purpose : uint32_t { kChunks, kReader, kRows };  // of random numbers

std::mt19937_64 generator(uint64_t key, Purpose purpose, uint64_t number) {
  std::seed_seq seeds{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(purpose),
                      static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32)};
  return std::mt19937_64(seeds);
}

// Returns a number below `bound`. Standard distributions give other numbers in other standard libraries.
uint64_t below(std::mt19937_64& random, uint64_t bound) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random()) * bound >> 64);
}

template <typename T>
void shuffle(std::vector<T>& values, std::mt19937_64& random) {
  for (size_t left = values.size(); left > 1; --left) std::swap(values[left - 1], values[below(random, left)]);
}

}  // namespace

ChunkOrder::ChunkOrder(std::span<const int64_t> lengths, const ChunkOrderOptions& options) : options_(options) {
  PENSTOCK_ASSERT(
      options.open_max > 0 && options.reader_count > 0 && options.run_length > 0 && options.run_length <= kRunMax,
      "a reader must have an open chunk and a run");
  starts_.push_back(0);
  for (const int64_t length : lengths) {
    PENSTOCK_ASSERT(length >= 0 && length <= kSamplesMax - starts_.back(),
                    "lengths must be at least 0, and their sum at most kSamplesMax");
    starts_.push_back(starts_.back() + length);
  }
  sample_count_ = starts_.back();
  chunks_.resize(lengths.size());
  std::iota(chunks_.begin(), chunks_.end(), size_t{0});
  if (options.shuffle) {
    std::mt19937_64 random = generator(options.key, Purpose::kChunks, 0);
    shuffle(chunks_, random);
  }
  places_.push_back(0);
  for (const size_t chunk : chunks_) places_.push_back(places_.back() + lengths[chunk]);

  // Each reader has a run of each round, and of the last one what there is.
  const auto runs_end = (sample_count_ + options.run_length - 1) / options.run_length;
  const auto reader_count = static_cast<int64_t>(options.reader_count);
  int64_t line = 0;
  for (int64_t number = 0; number < reader_count; ++number) {
    const int64_t run_count = (runs_end - number + reader_count - 1) / reader_count;
    int64_t count = std::max<int64_t>(run_count, 0) * options.run_length;
    if (runs_end > 0 && (runs_end - 1) % reader_count == number) count -= runs_end * options.run_length - sample_count_;
    Reader& reader = readers_.emplace_back();
    reader.line_first = line;
    reader.line_end = line += count;
    if (!options.shuffle) continue;
    reader.random = generator(options.key, Purpose::kReader, static_cast<uint64_t>(number));
    const auto after = std::ranges::upper_bound(places_, reader.line_first);
    reader.next_place = static_cast<size_t>(after - places_.begin()) - 1;
    open_pieces(reader);
  }
  PENSTOCK_ASSERT(line == sample_count_, "the readers' parts must be all samples");
}

size_t ChunkOrder::next(std::span<int64_t> indices) {
  const auto count = static_cast<size_t>(std::min(static_cast<int64_t>(indices.size()), left_count()));
  for (int64_t& index : indices.first(count)) {
    Reader& reader = reader_of(given_count_++);
    if (!options_.shuffle) {
      index = reader.line_first++;
      continue;
    }
    const size_t place = choose(reader);
    Piece& piece = reader.open[place];
    if (piece.rows.empty()) piece.rows = rows_of(piece);
    index = starts_[piece.chunk] + piece.rows[static_cast<size_t>(piece.end - piece.first)];
    if (piece.end > piece.first) continue;
    piece.rows = {};
    open_pieces(reader);
  }
  return count;
}

void ChunkOrder::skip(int64_t count) {
  for (const int64_t end = given_count_ + std::min(count, left_count()); given_count_ < end; ++given_count_) {
    Reader& reader = reader_of(given_count_);
    if (!options_.shuffle) {
      ++reader.line_first;
      continue;
    }
    const size_t place = choose(reader);
    if (reader.open[place].end == reader.open[place].first) open_pieces(reader);
  }
}

size_t ChunkOrder::choose(Reader& reader) {
  size_t place = 0;
  if (reader.line_first < reader.line_end) {
    // Each value stands for an open piece and a weight, and is taken with a probability proportional to the weight.
    uint64_t value = 0;
    do {
      value = below(reader.random, reader.open.size() * kWeightMax);
      place = value / kWeightMax;
    } while (value % kWeightMax >= reader.open[place].weight);
  } else {
    std::swap(reader.rest[below(reader.random, reader.rest.size())], reader.rest.back());
    place = reader.rest.back();
    reader.rest.pop_back();
  }
  --reader.open[place].end;
  return place;
}

void ChunkOrder::open_pieces(Reader& reader) {
  if (!reader.rest.empty()) return;
  std::erase_if(reader.open, [](const Piece& piece) { return piece.first == piece.end; });
  while (reader.line_first < reader.line_end && reader.open.size() < options_.open_max) {
    const size_t place = reader.next_place++;
    const int64_t end = std::min(places_[place + 1], reader.line_end);
    if (end > reader.line_first)  // else the chunk is empty
      reader.open.push_back({.chunk = chunks_[place],
                             .first = reader.line_first - places_[place],
                             .end = end - places_[place],
                             .weight = kWeightMin + below(reader.random, kWeightMax - kWeightMin + 1)});
    reader.line_first = end;
  }
  if (reader.line_first < reader.line_end) return;
  // All samples that are left are open: they are taken in an order of which all permutations are equally likely.
  for (size_t place = 0; place < reader.open.size(); ++place) {
    const Piece& piece = reader.open[place];
    reader.rest.insert(reader.rest.end(), static_cast<size_t>(piece.end - piece.first), static_cast<uint32_t>(place));
  }
}

std::vector<int64_t> ChunkOrder::rows_of(const Piece& piece) const {
  std::vector<int64_t> rows(static_cast<size_t>(starts_[piece.chunk + 1] - starts_[piece.chunk]));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  std::mt19937_64 random = generator(options_.key, Purpose::kRows, piece.chunk);
  shuffle(rows, random);
  return {rows.begin() + piece.first, rows.begin() + piece.end + 1};  // with the sample just taken
}

}  // namespace penstock::sampling
