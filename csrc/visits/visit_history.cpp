// SPDX-License-Identifier: Apache-2.0
#include "visits/visit_history.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <limits>
#include <numeric>
#include <ranges>
#include <tuple>
#include <unordered_map>

#include "base/bytes.h"

namespace penstock::visits {
namespace {

constexpr std::string_view kFileStart = "visits.rank";
constexpr std::string_view kTreeEnd = ".tree";
// A step that two runs have in each other's place is looked for among so many later ones.
constexpr size_t kSwapDistanceMax = 1 << 16;
constexpr int64_t kTableMax = 1 << 30;  // samples that are counted in a table

// How often a sample was seen in an epoch: the number of the step that gave it first, from 1; 0 for none.
class FirstSteps {
 public:
  FirstSteps(int64_t dataset_size, bool has_keys) {
    if (!has_keys && 0 < dataset_size && dataset_size <= kTableMax) table_.resize(static_cast<size_t>(dataset_size));
  }

  uint32_t& of(int64_t sample) {
    if (sample >= 0 && static_cast<uint64_t>(sample) < table_.size()) return table_[static_cast<size_t>(sample)];
    return others_[sample];
  }
  const std::vector<uint32_t>& table() const { return table_; }

 private:
  std::vector<uint32_t> table_;
  std::unordered_map<int64_t, uint32_t> others_;
};

bool has(uint16_t flags, uint16_t flag) { return (flags & flag) != 0; }

// The elements of `a` that `b` lacks, as multisets; both are sorted.
std::vector<int64_t> difference(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  std::vector<int64_t> left;
  std::ranges::set_difference(a, b, std::back_inserter(left));
  return left;
}

std::vector<int64_t> sorted(std::vector<int64_t> samples) {
  std::ranges::sort(samples);
  return samples;
}

void note_sample(std::vector<int64_t>& samples, int64_t sample) {
  if (samples.size() < kSamplesShown) samples.push_back(sample);
}

}  // namespace

struct VisitFolder::Part {
  Session session;
  RankOfJob rank;
  std::vector<Batch> batches;
  std::vector<uint32_t> ended;                           // epochs
  std::vector<std::pair<size_t, std::string>> datasets;  // from which of `batches` on
};

Result<VisitFolder> VisitFolder::open(const std::string& folder) {
  VisitFolder opened;
  opened.folder_ = folder;
  std::error_code error;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kFileStart) && name.find(kTreeEnd) == std::string::npos)
      paths.push_back(entry.path().string());
  }
  if (error) return Fault{Errc::kFailed, folder + " cannot be read: " + error.message()};
  if (paths.empty())
    return Fault{Errc::kFailed, folder +
                                    " has no record of visits; name a folder that loader.record_visits() or "
                                    "`penstock run --record-visits` has written"};
  for (const std::string& path : paths) {
    auto file = VisitFile::open(path);
    if (!file) return file.error();
    opened.files_.push_back(std::move(file).value());
  }
  std::ranges::sort(opened.files_, {}, &VisitFile::rank);
  return opened;
}

Result<std::map<RankOfJob, VisitTree>> VisitFolder::roots() {
  std::map<RankOfJob, VisitTree> found;
  for (VisitFile& file : files_) {
    auto tree = load_tree(file, true);
    if (!tree) {
      tree = make_tree(file);
      if (!tree) return tree.error();
      static_cast<void>(!store_tree(file, tree.value()));  // a cache
    }
    found.emplace(file.rank(), std::move(tree).value());
  }
  return found;
}

Result<std::vector<VisitFolder::Part>> VisitFolder::read_parts() {
  std::vector<Part> parts;
  for (uint32_t number = 0; number < files_.size(); ++number) {
    VisitFile& file = files_[number];
    const size_t first = parts.size();
    const auto read = file.read([&](const RecordView& record, uint64_t offset) -> Result<void> {
      if (record.kind == RecordKind::kSession) {
        auto session = parse_session(record);
        if (!session) return session.error();
        if (!has(record.flags, kSameProcess) || parts.size() == first)
          parts.push_back(
              {.session = session.value(), .rank = file.rank(), .batches = {}, .ended = {}, .datasets = {}});
        parts.back().datasets.emplace_back(parts.back().batches.size(), session.value().dataset);
        return {};
      }
      if (parts.size() == first) return Fault{Errc::kMalformed, "its first record is not of a session"};
      Part& part = parts.back();
      if (record.kind == RecordKind::kBatch) {
        auto batch = parse_batch(record);
        if (!batch) return batch.error();
        const Place place{.epoch = batch.value().epoch, .step = batch.value().step};
        part.batches.push_back({.place = place, .rank = file.rank().rank, .file = number, .offset = offset});
      } else if (record.kind == RecordKind::kEpochEnd) {
        ByteReader reader(record.body);
        part.ended.push_back(reader.read<uint32_t>());
      }
      return {};
    });
    if (!read) return read.error();
  }
  std::ranges::stable_sort(parts, {}, [](const Part& part) { return part.session.time_ns; });
  return parts;
}

Result<void> VisitFolder::load() {
  if (is_loaded_) return {};
  auto read = read_parts();
  if (!read) return read.error();
  is_loaded_ = true;
  std::vector<Part> parts = std::move(read).value();
  for (size_t next = 0; next < parts.size();) {
    const size_t session = sessions_.size();
    SessionFacts facts;
    facts.session = parts[next].session;
    facts.world_size = parts[next].rank.world_size;
    ended_.emplace_back();
    const size_t first_batch = batches_.size();
    std::vector<std::pair<Place, std::string>> datasets;
    for (; next < parts.size(); ++next) {
      Part& part = parts[next];
      // The program was started again when a rank starts a second time, or as one of another number of ranks.
      if (part.rank.world_size != facts.world_size ||
          std::ranges::find(facts.ranks, part.rank.rank) != facts.ranks.end())
        break;
      facts.ranks.push_back(part.rank.rank);
      for (const auto& [place, text] : part.datasets)
        if (place < part.batches.size()) datasets.emplace_back(part.batches[place].place, text);
      std::ranges::copy(part.batches, std::back_inserter(batches_));
      std::ranges::copy(part.ended, std::back_inserter(ended_.back()));
    }
    const auto own = std::span(batches_).subspan(first_batch);
    std::ranges::stable_sort(own, {}, [](const Batch& batch) { return std::tuple(batch.place, batch.rank); });
    facts.batch_count = own.size();
    for (const Batch& batch : own) facts.sample_count += view(batch).count;
    if (!own.empty()) {
      facts.first = own.front().place;
      facts.last = own.back().place;
    }
    sessions_.push_back(std::move(facts));
    std::vector<Step> steps;
    for (size_t batch = first_batch; batch < batches_.size(); ++batch) {
      if (steps.empty() || steps.back().place != batches_[batch].place)
        steps.push_back({.place = batches_[batch].place, .session = session, .first = batch, .count = 0});
      ++steps.back().count;
    }
    place_session(session, steps);
    const SessionFacts& placed = sessions_.back();
    add_to_history(session, steps);
    std::ranges::stable_sort(datasets, {}, [](const auto& one) { return one.first; });
    for (auto& [place, text] : datasets) {
      if (place.epoch == 0) place.step += placed.step_shift;
      place.epoch += placed.epoch_shift;
      while (!datasets_.empty() && datasets_.back().first >= place) datasets_.pop_back();
      if (!datasets_.empty() && datasets_.back().second == text) continue;
      if (!datasets_.empty())
        other_datasets_.push_back({.place = place, .before = datasets_.back().second, .after = text});
      datasets_.emplace_back(place, text);
    }
  }
  return {};
}

// Numbers the epochs and steps of a session whose loader counts them from 0.
void VisitFolder::place_session(size_t session, std::span<Step> steps) {
  SessionFacts& facts = sessions_[session];
  if (!has(facts.session.flags, kHasNoPlace) || history_.empty() || steps.empty()) return;
  const Place last = history_.back().place;
  const size_t before = history_.back().session;
  facts.epoch_shift = last.epoch;
  if (std::ranges::find(ended_[before], last.epoch) != ended_[before].end()) {
    ++facts.epoch_shift;
  } else {
    facts.step_shift = last.step + 1;
    // The step of the open epoch from which on both sessions have the same samples.
    auto open = std::ranges::lower_bound(history_, Place{.epoch = last.epoch, .step = 0}, {}, &Step::place);
    for (; open != history_.end(); ++open) {
      const auto left = static_cast<size_t>(history_.end() - open);
      const size_t common = std::min(left, steps.size());
      size_t equal = 0;
      while (equal < common && steps[equal].place.epoch == 0 &&
             is_comparable(open[static_cast<ptrdiff_t>(equal)], steps[equal]) &&
             is_equal(open[static_cast<ptrdiff_t>(equal)], steps[equal]))
        ++equal;
      if (equal < common) continue;
      facts.step_shift = open->place.step;
      break;
    }
  }
  for (Step& step : steps) {
    if (step.place.epoch == 0) step.place.step += facts.step_shift;
    step.place.epoch += facts.epoch_shift;
  }
  for (uint32_t& epoch : ended_[session]) epoch += facts.epoch_shift;
}

void VisitFolder::add_to_history(size_t session, std::span<const Step> steps) {
  if (steps.empty()) return;
  const auto first = std::ranges::lower_bound(history_, steps.front().place, {}, &Step::place);
  std::vector<Step> before(first, history_.end());
  history_.erase(first, history_.end());
  if (!before.empty()) {
    const GivenAgain again = given_again(session, before, steps);
    if (again.step_count > 0) given_again_.push_back(again);
  }
  if (has(sessions_[session].session.flags, kInOrder)) {
    std::ranges::copy(steps, std::back_inserter(history_));
    return;
  }
  std::vector<Step> kept;
  std::ranges::set_difference(before, steps, std::back_inserter(kept), {}, &Step::place, &Step::place);
  std::ranges::merge(kept, steps, std::back_inserter(history_), {}, &Step::place, &Step::place);
}

GivenAgain VisitFolder::given_again(size_t session, std::span<const Step> before, std::span<const Step> steps) const {
  GivenAgain again{.session = session,
                   .earlier = before.front().session,
                   .first = {},
                   .last = {},
                   .step_count = 0,
                   .differs_from = {}};
  auto old = before.begin();
  for (const Step& step : steps) {
    while (old != before.end() && old->place < step.place) ++old;
    if (old == before.end()) break;
    if (old->place != step.place) continue;
    if (again.step_count++ == 0) again.first = step.place;
    again.last = step.place;
    if (!again.differs_from && !is_equal(*old, step)) again.differs_from = step.place;
  }
  return again;
}

BatchView VisitFolder::view(const Batch& batch) const {
  // It was parsed when the file was read.
  return parse_batch(files_[batch.file].record_at(batch.offset)).value();
}

bool VisitFolder::has_ended(const Step& last) const {
  return std::ranges::find(ended_[last.session], last.place.epoch) != ended_[last.session].end();
}

uint64_t VisitFolder::count_of(const Step& step) const {
  uint64_t count = 0;
  for (size_t number = 0; number < step.count; ++number) count += view(batches_[step.first + number]).count;
  return count;
}

std::vector<int64_t> VisitFolder::samples_of(const Step& step) const {
  std::vector<int64_t> samples;
  for (size_t number = 0; number < step.count; ++number) view(batches_[step.first + number]).append_to(samples);
  return samples;
}

bool VisitFolder::is_comparable(const Step& a, const Step& b) const {
  return (is_whole(a) && is_whole(b)) || sessions_[a.session].world_size == sessions_[b.session].world_size;
}

bool VisitFolder::is_equal(const Step& a, const Step& b) const {
  if (is_whole(a) && is_whole(b)) return samples_of(a) == samples_of(b);
  if (!is_comparable(a, b)) return true;  // some ranks had died: unknown
  for (size_t one = 0; one < a.count; ++one) {
    for (size_t other = 0; other < b.count; ++other) {
      const Batch& of_a = batches_[a.first + one];
      const Batch& of_b = batches_[b.first + other];
      if (of_a.rank != of_b.rank) continue;
      std::vector<int64_t> samples_of_a, samples_of_b;
      view(of_a).append_to(samples_of_a);
      view(of_b).append_to(samples_of_b);
      if (samples_of_a != samples_of_b) return false;
    }
  }
  return true;
}

Result<Audit> VisitFolder::audit() {
  if (auto loaded = load(); !loaded) return loaded.error();
  Audit audit{
      .sessions = sessions_, .epochs = {}, .given_again = given_again_, .other_datasets = other_datasets_, .torn = {}};
  for (auto first = history_.begin(); first != history_.end();) {
    const auto last =
        std::find_if(first, history_.end(), [&](const Step& step) { return step.place.epoch != first->place.epoch; });
    audit.epochs.push_back(audit_epoch({first, last}));
    first = last;
  }
  for (const VisitFile& file : files_) {
    if (file.torn_bytes() > 0)
      audit.torn.push_back({.path = file.path(),
                            .offset = file.end(),
                            .bytes = file.torn_bytes(),
                            .is_damaged_inside = file.is_damaged_inside()});
  }
  return audit;
}

EpochFacts VisitFolder::audit_epoch(std::span<const Step> steps) const {
  EpochFacts facts;
  const Step& last = steps.back();
  const Session& session = sessions_[last.session].session;
  facts.epoch = last.place.epoch;
  facts.step_count = steps.size();
  facts.has_ended = has_ended(last);
  facts.may_repeat = has(session.flags, kMayRepeat);
  for (const Step& step : steps) {
    for (size_t number = 0; number < step.count; ++number)
      facts.has_keys |= has(view(batches_[step.first + number]).flags, kHashedKeys);
  }
  find_gaps(steps, facts);

  FirstSteps first_steps(session.dataset_size, facts.has_keys);
  std::vector<uint32_t> firsts;  // of the step's samples
  for (uint32_t number = 0; number < steps.size(); ++number) {
    const Step& step = steps[number];
    for (size_t rank = 0; rank < step.count; ++rank) {
      const BatchView batch = view(batches_[step.first + rank]);
      facts.sample_count += batch.count;
      if (!batch.knows_indices()) facts.unknown_count += batch.count;
    }
    const std::vector<int64_t> samples = samples_of(step);
    firsts.clear();
    std::map<uint32_t, Doubled> doubled;  // by the step that gave them first
    for (const int64_t sample : samples) {
      uint32_t& first = first_steps.of(sample);
      if (first == 0) {
        first = number + 1;
        ++facts.distinct_count;
        continue;
      }
      Doubled& one = doubled[first];
      one.again = step.place;
      one.first = steps[first - 1].place;
      ++one.count;
      note_sample(one.samples, sample);
    }
    uint64_t count = 0;
    for (const auto& [first, one] : doubled) count += one.count;
    if (count == 0) continue;
    const bool is_last = facts.has_ended && number + 1 == steps.size();
    if (is_last && count < sessions_[step.session].world_size) {
      facts.padding_count = count;
      continue;
    }
    facts.doubled_count += count;
    for (auto& [first, one] : doubled) {
      one.is_whole_step = one.count == samples.size();
      if (facts.doubled.size() < kFindingsMax) facts.doubled.push_back(one);
    }
  }
  if (facts.has_ended && !first_steps.table().empty() && facts.unknown_count == 0)
    find_missing(first_steps.table(), session, facts);
  return facts;
}

void VisitFolder::find_gaps(std::span<const Step> steps, EpochFacts& facts) const {
  int64_t next = 0;
  for (const Step& step : steps) {
    for (; next < step.place.step; ++next) {
      if (facts.missing_steps.size() < kFindingsMax)
        facts.missing_steps.push_back({.epoch = facts.epoch, .step = next});
      else
        next = std::max(next, step.place.step - 1);
    }
    next = step.place.step + 1;
  }
  facts.missing_step_count = static_cast<uint64_t>(next) - steps.size();
  // A rank lacks a step if it has a later one of the same session: the ranks of a job that died end as they may.
  std::map<std::pair<size_t, uint32_t>, Place> last_of_rank;
  for (const Step& step : steps)
    for (size_t number = 0; number < step.count; ++number)
      last_of_rank[{step.session, batches_[step.first + number].rank}] = step.place;
  for (const Step& step : steps) {
    if (is_whole(step)) continue;
    for (const uint32_t rank : sessions_[step.session].ranks) {
      const auto batches = std::span(batches_).subspan(step.first, step.count);
      const auto last = last_of_rank.find({step.session, rank});
      const bool is_there = std::ranges::find(batches, rank, &Batch::rank) != batches.end();
      if (is_there || last == last_of_rank.end() || last->second < step.place) continue;
      ++facts.missing_rank_count;
      if (facts.missing_ranks.size() < kFindingsMax) facts.missing_ranks.emplace_back(step.place, rank);
    }
  }
}

void VisitFolder::find_missing(const std::vector<uint32_t>& seen, const Session& session, EpochFacts& facts) const {
  uint64_t count = 0;
  for (size_t sample = 0; sample < seen.size(); ++sample) {
    if (seen[sample] != 0) continue;
    ++count;
    const auto index = static_cast<int64_t>(sample);
    if (!facts.missing.empty() && facts.missing.back().second + 1 == index)
      facts.missing.back().second = index;
    else if (facts.missing.size() < kFindingsMax)
      facts.missing.emplace_back(index, index);
  }
  // Without its number of samples, a sampler may leave out any of them.
  const uint64_t allowed =
      session.samples_per_epoch < 0
          ? count
          : seen.size() - std::min<uint64_t>(seen.size(), static_cast<uint64_t>(session.samples_per_epoch));
  facts.left_out_count = std::min(count, allowed);
  facts.missing_count = count - facts.left_out_count;
}

const std::string* VisitFolder::dataset_at(Place place) const {
  auto next = std::ranges::upper_bound(datasets_, place, {}, [](const auto& one) { return one.first; });
  return next == datasets_.begin() ? nullptr : &std::prev(next)->second;
}

bool VisitFolder::has_one_ordered_session() const {
  return sessions_.size() == 1 && has(sessions_.front().session.flags, kInOrder);
}

Result<Comparison> VisitFolder::compare(VisitFolder& a, VisitFolder& b) {
  Comparison result;
  auto roots_of_a = a.roots();
  if (!roots_of_a) return roots_of_a.error();
  auto roots_of_b = b.roots();
  if (!roots_of_b) return roots_of_b.error();
  const auto is_same_tree = [](const auto& one, const auto& other) {
    return one.first == other.first && one.second.root == other.second.root &&
           one.second.leaf_count == other.second.leaf_count;
  };
  if (std::ranges::equal(roots_of_a.value(), roots_of_b.value(), is_same_tree)) {
    const auto datasets = [](VisitFolder& folder, const std::map<RankOfJob, VisitTree>& roots) {
      std::vector<std::string> texts;
      for (const VisitFile& file : folder.files_)
        for (const uint64_t offset : roots.at(file.rank()).session_offsets) {
          auto session = parse_session(file.record_at(offset));
          const std::string text = session ? session.value().dataset : std::string();
          if (texts.empty() || texts.back() != text) texts.push_back(text);
        }
      return texts;
    };
    if (datasets(a, roots_of_a.value()) == datasets(b, roots_of_b.value())) {
      result.is_by_roots = result.is_equal = true;
      return result;
    }
  }
  if (auto loaded = a.load(); !loaded) return loaded.error();
  if (auto loaded = b.load(); !loaded) return loaded.error();
  const std::vector<Step>& steps_of_a = a.history_;
  const std::vector<Step>& steps_of_b = b.history_;
  result.step_count_a = steps_of_a.size();
  result.step_count_b = steps_of_b.size();
  const size_t common = std::min(steps_of_a.size(), steps_of_b.size());

  for (size_t number = 0; number < common && !result.dataset; ++number) {
    const std::string* of_a = a.dataset_at(steps_of_a[number].place);
    const std::string* of_b = b.dataset_at(steps_of_b[number].place);
    if (of_a != nullptr && of_b != nullptr && *of_a != *of_b)
      result.dataset = {.place = steps_of_a[number].place, .before = *of_a, .after = *of_b};
  }

  size_t first = 0;
  if (a.has_one_ordered_session() && b.has_one_ordered_session() && a.files_.size() == b.files_.size()) {
    // Leaves are in the order of places here, so the steps before the first leaf that differs are equal.
    std::optional<Place> parted;
    for (size_t file = 0; file < a.files_.size(); ++file) {
      if (a.files_[file].rank() != b.files_[file].rank()) break;
      auto tree_of_a = load_tree(a.files_[file], false);
      auto tree_of_b = load_tree(b.files_[file], false);
      if (!tree_of_a || !tree_of_b) break;
      const auto leaf = first_difference(tree_of_a.value().tree, leaf_reader(a.files_[file], tree_of_a.value()),
                                         tree_of_b.value().tree, leaf_reader(b.files_[file], tree_of_b.value()));
      const uint64_t equal = leaf ? *leaf : std::min(tree_of_a.value().leaf_count, tree_of_b.value().leaf_count);
      if (equal == 0) break;
      const auto last = parse_batch(a.files_[file].record_at(offset_of(a.files_[file], tree_of_a.value(), equal - 1)));
      if (!last) return last.error();
      const Place place{.epoch = last.value().epoch, .step = last.value().step};
      parted = parted ? std::min(*parted, place) : place;
      if (file + 1 == a.files_.size())
        first =
            static_cast<size_t>(std::ranges::lower_bound(steps_of_a, *parted, {}, &Step::place) - steps_of_a.begin());
    }
  }
  size_t parting = common;
  for (size_t number = first; number < common; ++number) {
    const Step& one = steps_of_a[number];
    const Step& other = steps_of_b[number];
    if (one.place == other.place && a.count_of(one) == b.count_of(other) && a.samples_of(one) == b.samples_of(other))
      continue;
    if (result.differing_steps++ == 0) parting = number;
  }
  if (parting == common && steps_of_a.size() != steps_of_b.size() && common > 0) {
    // The longer run may go on; but not in an epoch that has ended in the other one.
    const bool is_a_longer = steps_of_a.size() > common;
    const Step& next = (is_a_longer ? steps_of_a : steps_of_b)[common];
    const VisitFolder& shorter = is_a_longer ? b : a;
    const Step& last = shorter.history_.back();
    if (next.place.epoch == last.place.epoch && shorter.has_ended(last)) {
      result.place_a = result.place_b = next.place;
      result.parting = is_a_longer ? Parting::kStepMissing : Parting::kStepAdded;
      result.differing_steps = 1;
      return result;
    }
  }
  result.is_equal = parting == common && !result.dataset;
  if (parting == common) return result;

  const std::vector<int64_t> of_a = a.samples_of(steps_of_a[parting]);
  const std::vector<int64_t> of_b = b.samples_of(steps_of_b[parting]);
  result.place_a = steps_of_a[parting].place;
  result.place_b = steps_of_b[parting].place;
  const auto is_a = [&](size_t number, const std::vector<int64_t>& samples) {
    return number < steps_of_a.size() && a.samples_of(steps_of_a[number]) == samples;
  };
  const auto is_b = [&](size_t number, const std::vector<int64_t>& samples) {
    return number < steps_of_b.size() && b.samples_of(steps_of_b[number]) == samples;
  };
  const std::vector<int64_t> sorted_a = sorted(of_a);
  const std::vector<int64_t> sorted_b = sorted(of_b);
  if (sorted_a == sorted_b) {
    result.parting = of_a == of_b ? Parting::kStepMissing : Parting::kOrder;  // of_a == of_b: their numbers differ
    return result;
  }
  const std::vector<int64_t> only_a = difference(sorted_a, sorted_b);
  const std::vector<int64_t> only_b = difference(sorted_b, sorted_a);
  result.only_a_count = only_a.size();
  result.only_b_count = only_b.size();
  for (const int64_t sample : only_a) note_sample(result.only_a, sample);
  for (const int64_t sample : only_b) note_sample(result.only_b, sample);
  for (size_t earlier = 0; earlier < parting; ++earlier) {
    if (!is_b(earlier, of_b)) continue;
    result.parting = Parting::kStepRepeated;
    result.other = steps_of_b[earlier].place;
    return result;
  }
  const size_t end = std::min(common, parting + kSwapDistanceMax);
  for (size_t later = parting + 1; later < end; ++later) {
    if (!is_a(later, of_b) || !is_b(later, of_a)) continue;
    result.parting = Parting::kStepsSwapped;
    result.other = steps_of_a[later].place;
    return result;
  }
  if (is_a(parting + 1, of_b))
    result.parting = Parting::kStepMissing;
  else if (is_b(parting + 1, of_a))
    result.parting = Parting::kStepAdded;
  else
    result.parting = Parting::kSamples;
  return result;
}

}  // namespace penstock::visits
