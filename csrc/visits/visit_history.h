// SPDX-License-Identifier: Apache-2.0
#pragma once
// The findings in a folder of visits: whether each epoch gave each sample once, the repetitions of a resumed program,
// where two runs part.
//
// A *session* is the record of the ranks of a job from one start of the program to its end. A session that starts at a
// place which an earlier one has passed takes back all batches from there on: a training that resumes from a
// checkpoint has forgotten it. (If batches may be given in any order, it takes back the steps that it gives again.) The
// rest, in the order of places, is the *history*; a step of it has the samples of all ranks, in the order of ranks.
//
// Sessions of a loader without places (kHasNoPlace) count from 0 again. Each continues after the one before, in the
// same epoch if that had not ended; if its first steps are the last ones of the session before, it starts there.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "visits/visit_file.h"

namespace penstock::visits {

constexpr size_t kSamplesShown = 8;   // of a list of samples
constexpr size_t kFindingsMax = 100;  // of one kind; more are counted

struct Place {
  uint32_t epoch = 0;
  int64_t step = 0;

  friend auto operator<=>(const Place&, const Place&) = default;
};

// One start of the program, over all ranks.
struct SessionFacts {
  Session session;
  uint32_t world_size = 1;
  std::vector<uint32_t> ranks;  // that have a record
  uint64_t batch_count = 0;
  uint64_t sample_count = 0;
  std::optional<Place> first;  // as the loader counts
  std::optional<Place> last;
  uint32_t epoch_shift = 0;  // added to the places of a loader without places
  int64_t step_shift = 0;    // of its first epoch
};

// Steps that a session gives again after an earlier one.
struct GivenAgain {
  size_t session = 0;  // the later one
  size_t earlier = 0;
  Place first;
  Place last;
  uint64_t step_count = 0;
  std::optional<Place> differs_from;  // the first step with other samples, or in another order
};

// Samples that a step gives although an earlier step of the epoch gave them.
struct Doubled {
  Place again;
  Place first;
  uint64_t count = 0;  // of samples that the two steps have in common
  bool is_whole_step = false;
  std::vector<int64_t> samples;  // at most kSamplesShown
};

struct EpochFacts {
  uint32_t epoch = 0;
  uint64_t step_count = 0;
  uint64_t sample_count = 0;
  uint64_t distinct_count = 0;
  uint64_t unknown_count = 0;  // samples that have no index
  bool has_ended = false;
  bool may_repeat = false;
  bool has_keys = false;         // the samples are digests of keys
  std::vector<Doubled> doubled;  // at most kFindingsMax
  uint64_t doubled_count = 0;    // samples
  uint64_t padding_count = 0;    // samples that the last step repeats to give each rank as many
  uint64_t missing_count = 0;    // beyond the ones left out by the sampler; only of an epoch that has ended
  uint64_t left_out_count = 0;   // samples that the sampler leaves out
  std::vector<std::pair<int64_t, int64_t>> missing;  // first and last of runs, at most kFindingsMax
  std::vector<Place> missing_steps;                  // at most kFindingsMax
  uint64_t missing_step_count = 0;
  std::vector<std::pair<Place, uint32_t>> missing_ranks;  // a rank that lacks a step which others have
  uint64_t missing_rank_count = 0;
};

// A data set that is not the one of the session before.
struct OtherDataset {
  Place place;
  std::string before;
  std::string after;
};

// A file's end that is no record.
struct TornRecord {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool is_damaged_inside = false;
};

struct Audit {
  std::vector<SessionFacts> sessions;
  std::vector<EpochFacts> epochs;
  std::vector<GivenAgain> given_again;
  std::vector<OtherDataset> other_datasets;
  std::vector<TornRecord> torn;
};

// How two runs differ at the step where they part.
enum class Parting : uint8_t {
  kNone,
  kOrder,         // the same samples in another order
  kSamples,       // other samples
  kStepMissing,   // the second run lacks this step
  kStepAdded,     // the second run has a step more
  kStepRepeated,  // the second run gives an earlier step again
  kStepsSwapped,  // the second run has this step and a later one in each other's place
};

struct Comparison {
  bool is_by_roots = false;   // the roots are equal, and the records were not read
  bool is_equal = false;      // so far as both runs go
  uint64_t step_count_a = 0;  // 0 if only roots were read
  uint64_t step_count_b = 0;
  Parting parting = Parting::kNone;
  Place place_a;
  Place place_b;
  std::optional<Place> other;   // the step that is repeated, or swapped with
  std::vector<int64_t> only_a;  // samples of the step that the other run lacks, at most kSamplesShown
  std::vector<int64_t> only_b;
  uint64_t only_a_count = 0;
  uint64_t only_b_count = 0;
  uint64_t differing_steps = 0;  // with the steps of both runs matched by number
  // The first session of each run whose data set differs from the other run's, at the place where it is
  // read.
  std::optional<OtherDataset> dataset;
};

// A folder of visits. Thread-compatible.
class VisitFolder {
 public:
  VisitFolder(VisitFolder&&) = default;

  // Opens the files of a folder, and reads none of their records. kFailed if there are none.
  static Result<VisitFolder> open(const std::string& folder);

  // The root of each rank's file, from the stored tree where that is current. Other trees are made and stored; in a
  // folder that cannot be written they are made each time.
  Result<std::map<RankOfJob, VisitTree>> roots();

  Result<Audit> audit();

  // Compares the histories of two runs, by their roots first.
  static Result<Comparison> compare(VisitFolder& a, VisitFolder& b);

 private:
  VisitFolder() = default;

  // A batch of the folder. `place` is the history's.
  struct Batch {
    Place place;
    uint32_t rank = 0;
    uint32_t file = 0;
    uint64_t offset = 0;
  };
  // A step of one session: the batches of its ranks.
  struct Step {
    Place place;
    size_t session = 0;
    size_t first = 0;  // in batches_
    size_t count = 0;
  };
  struct Part;  // the part of a session in one file

  Result<void> load();
  Result<std::vector<Part>> read_parts();
  void place_session(size_t session, std::span<Step> steps);
  void add_to_history(size_t session, std::span<const Step> steps);
  GivenAgain given_again(size_t session, std::span<const Step> before, std::span<const Step> steps) const;
  EpochFacts audit_epoch(std::span<const Step> steps) const;
  void find_gaps(std::span<const Step> steps, EpochFacts& facts) const;
  void find_missing(const std::vector<uint32_t>& seen, const Session& session, EpochFacts& facts) const;
  BatchView view(const Batch& batch) const;
  std::vector<int64_t> samples_of(const Step& step) const;
  uint64_t count_of(const Step& step) const;
  // Whether the epoch of the last step of a session has ended there.
  bool has_ended(const Step& last) const;
  bool is_comparable(const Step& a, const Step& b) const;
  bool is_equal(const Step& a, const Step& b) const;
  bool is_whole(const Step& step) const { return step.count == sessions_[step.session].world_size; }
  const std::string* dataset_at(Place place) const;
  bool has_one_ordered_session() const;

  std::string folder_;
  std::vector<VisitFile> files_;
  bool is_loaded_ = false;
  std::vector<SessionFacts> sessions_;
  std::vector<Batch> batches_;                // by session, place and rank
  std::vector<Step> history_;                 // by place
  std::vector<std::vector<uint32_t>> ended_;  // epochs of each session
  std::vector<GivenAgain> given_again_;
  std::vector<std::pair<Place, std::string>> datasets_;  // from which place on, by place
  std::vector<OtherDataset> other_datasets_;
};

}  // namespace penstock::visits
