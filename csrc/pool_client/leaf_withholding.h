// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which leaves of a pool's batches the workers withhold.
//
// A leaf need not be transferred if the offloaded models do not need it in addition to the boundary tensors, and the
// program does not read it. The program is watched first: for some calls, the reads of the candidate leaves are
// recorded. Leaves without reads are withheld from then on. If one is read nevertheless, the batch is recalled and the
// value is correct; a leaf for which this happens more often than kRecallsMax is sent again.
//
// Workers on the trainer's machine send every leaf. They collate in memory that the trainer reads, so withholding a
// leaf would save no copy. All leaves are sent while a plan is new: whole batches are needed until its boundary tensors
// were compared and its calls timed.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "wire/blob_record.h"

namespace penstock::pool_client {

// For one loader and all models that are offloaded to it. Thread-compatible: for the trainer's thread.
class LeafWithholding {
 public:
  // The transfer of a smaller leaf costs less than a recall.
  static constexpr uint64_t kLeafBytesMin = 16 << 10;
  // The number of calls for which the program is watched.
  static constexpr int kWatchedCalls = 8;
  // A leaf is sent again if it was recalled for more than this many of the last kRecallsWindow calls.
  static constexpr std::ptrdiff_t kRecallsMax = 1;
  static constexpr uint64_t kRecallsWindow = 64;

  // The cut of a graph in a model's call.
  struct UsedCut {
    std::set<uint32_t> raw_leaves;  // the leaves that the trainer reads
    std::set<std::string> keys;     // of the boundary tensors that replace the other leaves; empty if no operators move
    bool is_settled = false;        // it was compared, and is not being timed
  };
  // The batch of a model's call.
  struct SeenBatch {
    std::vector<uint64_t> leaf_bytes;
    std::set<uint32_t> read_leaves;  // by the program, among the watched leaves
    bool is_watched = false;         // whether the leaves of watched_leaves() were watched
  };
  // A change to send to the workers: the leaves to withhold, or, without a shipment, to send whole batches. Batches
  // that are requested afterwards have different leaves.
  struct Order {
    std::optional<wire::Shipment> shipment;
  };

  // Adds an offloaded model; its results are compared for one batch in `verify_every`.
  void take(uint64_t model, uint64_t verify_every);
  // Removes a model.
  [[nodiscard]] std::optional<Order> forget(uint64_t model);
  // Call after each call of a model, whose graphs ran with these cuts. `batch` is nullopt if the call had none, or
  // withholding is impossible.
  [[nodiscard]] std::optional<Order> note_call(uint64_t model, const std::optional<SeenBatch>& batch,
                                               std::vector<UsedCut> cuts);
  // Call when a plan has changed: the program is watched again from the start.
  [[nodiscard]] std::optional<Order> send_whole();
  // Call when a withheld leaf was read. The order, if any, makes the workers send it again.
  [[nodiscard]] std::optional<Order> note_recall(uint32_t leaf);

  // Leaves whose reads must be recorded in the next batches.
  const std::set<uint32_t>& watched_leaves() const { return watched_leaves_; }
  bool is_withholding() const { return is_withholding_; }

 private:
  std::set<uint32_t> unread(const SeenBatch& batch) const;
  Order withhold();

  std::map<uint64_t, uint64_t> verify_every_;        // by model
  std::map<uint64_t, std::vector<UsedCut>> cuts_{};  // of each model's latest call
  std::set<uint32_t> read_;                          // leaves that the program has read
  std::set<uint32_t> watched_leaves_;
  int watched_calls_ = 0;
  bool is_withholding_ = false;
  std::deque<std::pair<uint64_t, uint32_t>> recalls_;  // the call count at that time, and the leaf
  uint64_t call_count_ = 0;
};

}  // namespace penstock::pool_client
