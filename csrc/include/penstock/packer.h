// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rows of a fixed length, packed from documents of different lengths. Python's Packer makes the same rows, and each can
// continue from the other's states; docs/how-to/packing.md describes the rows and their order.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/data_loader.h"
#include "penstock/export.h"
#include "penstock/state.h"
#include "penstock/value.h"

namespace penstock {

struct PackerOptions {
  enum class Policy : uint8_t {
    kBestFit,  // a document is placed in the open bin that has the least room for it
    kNextFit,  // one bin is open, and rows keep the order of the documents
  };
  // Handling of a document with more than row_length tokens.
  enum class TooLong : uint8_t {
    kError,  // next() throws kValue
    kSplit,  // full rows are made of its beginning, and the rest is placed like a document
    kDrop,   // it is left out
  };
  // Handling of the last rows if they do not fill a step.
  enum class LastRows : uint8_t {
    kPad,   // rows of padding alone are added
    kDrop,  // they are left out
  };
  using PaddingByName = std::vector<std::pair<std::string, double>>;

  // Tokens in a row, 1 or more.
  int64_t row_length = 0;
  // The value of padding; or for documents that are dicts, the value for each stream to pack, by name: other entries
  // are left out. With a number, the streams are the entries of the first document, or "tokens" if documents are
  // sequences.
  std::variant<double, PaddingByName> padding = 0.0;
  Policy policy = Policy::kBestFit;
  // The maximum number of open bins with kBestFit, 1 or more. More bins mean less padding and a larger state.
  int64_t open_bins = 64;
  TooLong too_long = TooLong::kError;
  // Rows in a batch of one rank. std::nullopt: a batch is a single row, without the first dimension.
  std::optional<int64_t> batch_size = {};
  LastRows remainder = LastRows::kPad;
  // This process's rank and the number of ranks. std::nullopt: the environment's RANK and WORLD_SIZE, else 0 of 1.
  // Every rank reads all documents; the rows are dealt out in turn, so that all ranks have the same number of steps.
  std::optional<int64_t> rank = {};
  std::optional<int64_t> world_size = {};
};

// Counts of one pass over the documents, over all ranks.
struct PackerStats {
  int64_t documents = 0;        // read and placed, including empty, split and dropped ones
  int64_t empty_documents = 0;  // without tokens; they are in no row
  int64_t split_documents = 0;
  int64_t dropped_documents = 0;
  int64_t dropped_tokens = 0;
  int64_t rows = 0;            // complete, delivered or not
  int64_t tokens = 0;          // of documents in these rows
  int64_t padding_tokens = 0;  // in these rows
  int64_t steps = 0;           // batches delivered to each rank
  int64_t padding_rows = 0;    // of padding alone, which completed the last step
  int64_t dropped_rows = 0;    // left out because they did not fill the last step

  // The share of padding in the complete rows, from 0 to 1; 0 without rows.
  double padding_fraction() const {
    const int64_t whole = tokens + padding_tokens;
    return whole > 0 ? static_cast<double>(padding_tokens) / static_cast<double>(whole) : 0.0;
  }
  friend bool operator==(const PackerStats&, const PackerStats&) = default;
};

// A batch of rows. N is batch_size and L row_length; without a batch_size, tensors have the shape (L) instead of (N,
// L).
struct PENSTOCK_API PackedBatch {
  std::vector<std::pair<std::string, at::Tensor>> streams;  // (N, L), of the documents' types
  at::Tensor positions;    // int64 (N, L): positions in the document, from 0; padding counts from 0, too
  at::Tensor segment_ids;  // int32 (N, L): number of the document in its row, from 1; 0 for padding
  at::Tensor cu_seqlens;  // int32 (segments + 1): starts of the segments in the N * L tokens, and N * L. The padding of
                          // a row is one segment.
  int64_t max_seqlen = 0;  // tokens of the longest segment

  // The stream of that name. Throws kValue if there is none.
  const at::Tensor& operator[](std::string_view name) const;
};

// Packs the documents of a loader, or of another source. A document is a tensor of one dimension or a list of numbers;
// or a dict of such sequences of the same length, its streams, which are packed alike. The source returns documents one
// by one (batch_size = std::nullopt), or in lists (a collate_fn that returns Value::list(samples)). The rows are a
// function of the documents and their order alone. Thread-compatible.
//
//   penstock::DataLoader loader(documents, {.batch_size = std::nullopt, .shuffle = true, .num_workers = 4});
//   penstock::Packer packer(loader, {.row_length = 4096, .too_long = penstock::PackerOptions::TooLong::kSplit});
//   for (const penstock::PackedBatch& batch : packer) train(batch["tokens"], batch.positions, batch.cu_seqlens);
class PENSTOCK_API Packer {
 public:
  // The next document or list of documents; none at the end of the pass.
  using Stream = std::function<std::optional<Value>()>;

  // Throws Error kValue for invalid options. `loader` must outlive the packer; state() and load_state() include its
  // position.
  Packer(DataLoader& loader, const PackerOptions& options);
  // `open` starts a pass from the first document. To resume, the documents before the state are read again.
  Packer(std::function<Stream()> open, const PackerOptions& options);
  ~Packer();
  Packer(Packer&&) noexcept;
  Packer& operator=(Packer&&) noexcept;

  // An input iterator over the batches of the pass that begin() started.
  class PENSTOCK_API Iterator {
   public:
    using value_type = PackedBatch;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;

    const PackedBatch& operator*() const { return *batch_; }
    const PackedBatch* operator->() const { return &*batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return !iterator.batch_; }

   private:
    friend class Packer;
    explicit Iterator(Packer& packer) : packer_(&packer) {}

    Packer* packer_;
    std::optional<PackedBatch> batch_;
  };

  // Starts a pass over the documents, or continues the pass of a loaded state.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  // The same without an iterator: call begin_pass(), then next() until it returns no batch. next() throws kValue for an
  // invalid document, for one that is too long with kError, and if no document fits a row.
  void begin_pass();
  std::optional<PackedBatch> next();

  // The counts of the current pass, or of the last one if it is over.
  PackerStats stats() const;
  // The counts at the end of a pass over documents with these numbers of tokens. Packs without tokens, in less than a
  // second for millions of documents. Throws kValue for a negative length, and for one that is too long with kError.
  PackerStats plan(std::span<const int64_t> lengths) const;

  // The position in the pass after the last batch that was delivered: the loader's state, and the tokens of open bins
  // and of complete rows that were not delivered. The same on all ranks. Its JSON is the text that Python's
  // Packer.state_json() returns.
  State state() const;
  // The next begin() continues where the state was taken, with the same rows bit for bit. Ranks, batch_size and
  // remainder may have changed. Throws kValue for the state of a packer with other options.
  void load_state(const State& state);

 private:
  class Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
