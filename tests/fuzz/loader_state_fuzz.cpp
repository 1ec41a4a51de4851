// SPDX-License-Identifier: Apache-2.0
// The state of a loader, as JSON, which a program may have from anywhere. The loader that reads it stands in front: the
// first byte is its place among the loaders below.
#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "api/commit_ledger.h"
#include "api/loader_state.h"
#include "fuzz_target.h"
#include "penstock/state.h"

namespace penstock::fuzz {
namespace {

// What a state says beside numbers.
constexpr std::array<std::string_view, 10> kWords = {"map",  "iterable", "batch", "sample", "SequentialSampler",
                                                     "AAAA", "=",        "\xff",  "",       "BatchSampler of 4"};
constexpr std::array<std::string_view, 19> kNames = {"version",
                                                     "built",
                                                     "epoch",
                                                     "generators",
                                                     "shards",
                                                     "counts",
                                                     "states",
                                                     "base_seed",
                                                     "last",
                                                     "samples",
                                                     "left",
                                                     "through",
                                                     "missing",
                                                     "commits",
                                                     "seed_epoch",
                                                     "batches",
                                                     "earlier",
                                                     "samplers",
                                                     "_sampler_iter_yielded"};

struct Loaders {
  Options of_batches{.batch_size = 4, .num_workers = 2};
  Options of_shards{.batch_size = 4, .shards = 3};
  Options of_ranks = [] {
    Options options{.batch_size = 4};
    options.shard_by_rank = true;
    options.rank = 0;
    options.world_size = 2;
    options.remainder = Remainder::kPad;
    options.commit = Commit::kManual;
    return options;
  }();
  Options of_commits{.batch_size = 4, .num_workers = 2, .commit = Commit::kManual};
  std::array<api::BuiltLoader, 4> built = {
      api::BuiltLoader{.sample_count = 23, .shard_count = 2, .options = &of_batches},
      api::BuiltLoader{.is_iterable = true, .shard_count = 3, .options = &of_shards},
      api::BuiltLoader{.sample_count = 23, .options = &of_ranks},
      api::BuiltLoader{.sample_count = 23, .shard_count = 2, .options = &of_commits}};
};
const Loaders& loaders() {
  static const Loaders made;
  return made;
}

// A state's generators are longer than all the rest, and may be missing.
Value without_generators(const Value& state) {
  Value::Entries entries = state.entries();
  for (Value::Entry& entry : entries)
    if (entry.key.text() == "generators")
      entry.value =
          Value::dict({{"globals", Value::dict({{"torch", Value()}, {"random", Value()}, {"numpy", Value()}})},
                       {"own", Value::dict({})}});
  return Value::dict(std::move(entries));
}

Bytes to_bytes(size_t loader, const std::string& json) {
  Bytes bytes = {static_cast<std::byte>(loader)};
  const auto text = std::as_bytes(std::span(json));
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}
std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

size_t count_of(const Value& value) {
  size_t count = 1;
  if (value.kind() == Value::Kind::kList)
    for (const Value& item : value.items()) count += count_of(item);
  if (value.kind() == Value::Kind::kDict)
    for (const Value::Entry& entry : value.entries()) count += count_of(entry.value);
  return count;
}

Value any_value(Choices& choices) {
  switch (choices.below(16)) {
    case 0: return {};
    case 1: return choices.below(2) == 0;
    case 2: return std::string(kWords[choices.below(kWords.size())]);
    case 3: return 0.5 * static_cast<double>(choices.below(100));
    case 4: return Value::list(Value::Items(choices.below(5), Value(choices.below(4))));
    case 5: return Value::dict({{"batches", choices.below(4)}, {"iterator", Value()}, {"ended", true}});
    case 6: return choices.one_of<int64_t>({INT64_MIN, -1, int64_t{1} << 53, INT64_MAX, int64_t{1} << 32});
    case 7: return choices.below(30);
    default: return choices.below(6);
  }
}

// `value` with its part at `place`, counted from the outside, changed.
Value altered(const Value& value, size_t& place, Choices& choices) {
  const bool is_dict = value.kind() == Value::Kind::kDict;
  if (place-- == 0) {
    if (!is_dict || choices.below(2) == 0) return any_value(choices);
    Value::Entries entries = value.entries();
    if (!entries.empty()) entries.erase(entries.begin() + static_cast<ptrdiff_t>(choices.below(entries.size())));
    if (choices.below(2) == 0)
      entries.push_back({std::string(kNames[choices.below(kNames.size())]), any_value(choices)});
    return Value::dict(std::move(entries));
  }
  if (value.kind() == Value::Kind::kList) {
    Value::Items items;
    for (const Value& item : value.items()) items.push_back(altered(item, place, choices));
    return Value::list(std::move(items));
  }
  if (!is_dict) return value;
  Value::Entries entries;
  for (const Value::Entry& entry : value.entries())
    entries.push_back({entry.key, altered(entry.value, place, choices)});
  return Value::dict(std::move(entries));
}

void check_places(const api::PlacesLeft& left) {
  expect(std::ranges::adjacent_find(left.missing, std::greater_equal<>()) == left.missing.end(), "places ascend");
  expect(left.missing.empty() || left.missing.back() < left.through, "missing places were passed");
}

void check_commits(const api::BuiltLoader& built, const api::CommitsState& commits) {
  expect(built.options->commit != Commit::kNone || commits.earlier.empty(), "a loader without commits repeats nothing");
  for (const api::EarlierEpoch& epoch : commits.earlier) {
    expect(epoch.number < commits.next_number, "earlier epochs are earlier");
    check_places(epoch.left());
    for (const auto& [place, batch] : epoch.batches)
      for (const int64_t index : batch.indices) expect(index >= 0 && index < 23, "indices are those of samples");
  }
}

void check_point(const api::BuiltLoader& built, const api::ResumePoint& point) {
  expect(point.answered_count <= uint64_t{1} << 53, "counts can be added");
  expect(point.yielded_count <= uint64_t{1} << 53, "counts can be added");
  expect(!point.last_shard_id || *point.last_shard_id < built.shard_count, "the last shard is one of the loader's");
  expect(built.is_iterable || point.answered_count <= 7, "no more batches were answered than the epoch has");
  expect(point.left.delivered_count() == point.answered_count, "the batches that are not left were answered");
  check_places(point.left);
  uint64_t sum = 0;
  for (const auto& [shard_id, start] : point.starts) {
    expect(shard_id < built.shard_count, "shards are those of the loader");
    sum += start.batch_count;
  }
  for (const auto& [shard_id, state] : point.shard_states)
    expect(shard_id < built.shard_count, "states are those of the loader's shards");
  expect(!built.is_iterable || sum == point.answered_count, "the shards gave as many batches as were answered");
}

}  // namespace

std::vector<Bytes> make_seeds() {
  std::vector<Bytes> seeds;
  for (size_t index = 0; index < loaders().built.size(); ++index) {
    const api::BuiltLoader& built = loaders().built[index];
    seeds.push_back(to_bytes(index, without_generators(make_state(built, nullptr, 2, nullptr)).to_json()));
    api::EpochAccount account{
        .epoch = 1, .base_seed = -5, .progress = std::make_shared<loader::EpochProgress>(built.shard_count)};
    for (uint32_t count = 0; count < 4; ++count) account.progress->answer(count % built.shard_count, false);
    if (built.options->shard_by_rank)
      account.share.emplace(23, sampling::RankShareOptions{.rank_count = 2, .step_size = 8});
    for (uint32_t shard_id = 0; built.is_iterable && shard_id < built.shard_count; ++shard_id)
      account.resumed_states.emplace(shard_id, Value::dict({{"iterator", 3}, {"batches", 1}, {"ended", false}}));
    Value state = make_state(built, &account, 2, nullptr);
    if (built.options->commit != Commit::kNone) {
      const auto ledger = std::make_shared<api::CommitLedger>("numbers", false);
      const auto pull = [](uint64_t place) { return api::PulledBatch{.indices = {3, 22}, .first_place = 4 * place}; };
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        account.commits = ledger->begin_epoch({}, epoch, -5, pull);
        for (const uint64_t place : {0, 1, 2, 3}) ledger->deliver(*account.commits, place);
        ledger->commit(BatchId{epoch, 2});
      }
      state = with_commits(make_state(built, &account, 2, ledger.get()), *ledger);
    }
    seeds.push_back(to_bytes(index, without_generators(state).to_json()));
  }
  return seeds;
}

void mutate(Bytes& bytes, Choices& choices) {
  // Most inputs that show something new are refused early. Whole states are changed as well, so that each part is.
  static const std::vector<Bytes> whole = make_seeds();
  if (choices.below(4) == 0) bytes = whole[choices.below(whole.size())];
  if (!bytes.empty() && choices.below(4) != 0) {
    try {
      const Value state = Value::from_json(text_of(bytes).substr(1));
      size_t place = choices.below(count_of(state));
      size_t loader = static_cast<size_t>(bytes.front());
      if (!choices.mostly()) loader = choices.below(loaders().built.size());
      bytes = to_bytes(loader, altered(state, place, choices).to_json());
      return;
    } catch (const Error&) {  // it is no JSON, or has none: its bytes are changed
    }
  }
  edit_at_random(bytes);
}

bool check(std::span<const std::byte> bytes) {
  if (bytes.empty()) return false;
  const auto& built = loaders().built[static_cast<size_t>(bytes[0]) % loaders().built.size()];
  try {
    const State state = State::from_json(text_of(bytes.subspan(1)));
    const std::string written = state.to_json();
    expect(State::from_json(written).to_json() == written, "a state that is written again is the same text");
    const api::LoadedState loaded = api::read_state(built, StateAccess::value_of(state));
    expect(loaded.epoch >= 0, "epochs are counted from 0");
    if (loaded.point) check_point(built, *loaded.point);
    check_commits(built, loaded.commits);
    return true;
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kValue || error.kind() == ErrorKind::kUnsupported,
           "a state is refused as a value, or as what only Python can read");
    return is_refused(error.what());
  }
}

}  // namespace penstock::fuzz
