// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which leaves of a pool's batches stay with the workers.
//
// A leaf that the offloaded models do not need beside the boundary tensors, and that the program does not read either,
// need not cross. The program is watched first: for some calls it is noted which of the leaves in question are read.
// Those that nobody read stay with the workers from then on. If one is read after all, the batch is recalled and the
// value is right; a leaf for which that happens more than once in a while is sent again.
//
// Workers on the trainer's own machine send every leaf. They collate in memory that the trainer reads, so a leaf that
// is left out would save no copy. Nothing is withheld while a plan is new: until its boundary tensors were compared and
// its calls timed, whole batches are needed.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "wire/shipment.h"

namespace penstock::loader {

// Of one loader, whatever models are offloaded to it. Thread-compatible: for the trainer's thread.
class LeafWithholding {
 public:
  // A smaller leaf costs less on its way than a recall would.
  static constexpr uint64_t kLeafBytesMin = 16 << 10;
  // For how many calls the program is watched.
  static constexpr int kWatchedCalls = 8;
  // A leaf that is recalled for more of the newest batches is sent again.
  static constexpr std::ptrdiff_t kRecallsMax = 1;
  static constexpr uint64_t kRecallsWindow = 64;

  // The cut of one graph that ran.
  struct UsedCut {
    std::set<uint32_t> raw_leaves;  // that the trainer reads
    std::set<std::string> keys;     // of the boundary tensors that stand for the others; empty where nothing moves
    bool is_settled = false;        // it was compared, and is not being timed
  };
  // The batch that a model was called with.
  struct SeenBatch {
    std::vector<uint64_t> leaf_bytes;
    std::set<uint32_t> read_leaves;  // by the program, of those that are watched
    bool is_watched = false;         // with the leaves of watched_leaves()
  };
  // What the workers are to be told: what to leave out, or, without a shipment, to send whole batches. Batches that are
  // asked for from then on have other leaves than before.
  struct Order {
    std::optional<wire::Shipment> shipment;
  };

  // A model is offloaded, whose results are compared for one batch in `verify_every`.
  void take(uint64_t model, uint64_t verify_every);
  // It is offloaded no more.
  [[nodiscard]] std::optional<Order> forget(uint64_t model);
  // To be called after each call of a model, whose graphs ran with these cuts. Without a batch where the call had none,
  // or nothing can be withheld.
  [[nodiscard]] std::optional<Order> note_call(uint64_t model, const std::optional<SeenBatch>& batch,
                                               std::vector<UsedCut> cuts);
  // A plan has changed: the program is watched anew.
  [[nodiscard]] std::optional<Order> send_whole();
  // A leaf that had stayed with its worker was read. The order says that it is sent again.
  [[nodiscard]] std::optional<Order> note_recall(uint32_t leaf);

  // Leaves whose reads are to be noticed in the batches that come next.
  const std::set<uint32_t>& watched_leaves() const { return watched_leaves_; }
  bool is_withholding() const { return is_withholding_; }

 private:
  std::set<uint32_t> unread(const SeenBatch& batch) const;
  Order withhold();

  std::map<uint64_t, uint64_t> verify_every_;        // by model
  std::map<uint64_t, std::vector<UsedCut>> cuts_{};  // of each model's newest call
  std::set<uint32_t> read_;                          // leaves that the program reads
  std::set<uint32_t> watched_leaves_;
  int watched_calls_ = 0;
  bool is_withholding_ = false;
  std::deque<std::pair<uint64_t, uint32_t>> recalls_;  // how many calls there were then, and the leaf
  uint64_t call_count_ = 0;
};

}  // namespace penstock::loader
