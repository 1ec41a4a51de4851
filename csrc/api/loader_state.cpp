// SPDX-License-Identifier: Apache-2.0
#include "api/loader_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <cxxabi.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "api/exceptions.h"
#include "api/index_order.h"
#include "base/bytes.h"
#include "dataset/nest_value.h"
#include "penstock/state.h"

namespace penstock::api {
namespace {

at::Generator default_generator() { return at::detail::getDefaultCPUGenerator(); }

std::string to_text(const at::Tensor& state) {
  return to_base64({static_cast<const std::byte*>(state.const_data_ptr()), state.nbytes()});
}

// Validated with a scratch generator, since the state may be from an untrusted source.
at::Tensor to_tensor(const Value& text, const std::string& place) {
  const auto bytes = text.kind() == Value::Kind::kText ? from_base64(text.text()) : std::nullopt;
  if (!bytes) refuse(place + " must be text in base64, got " + text.describe() + "; load the state as it was saved");
  at::Tensor state = at::empty({static_cast<int64_t>(bytes->size())}, at::TensorOptions().dtype(at::kByte));
  std::copy(bytes->begin(), bytes->end(), static_cast<std::byte*>(state.mutable_data_ptr()));
  try {
    at::detail::createCPUGenerator().set_state(state);
  } catch (const c10::Error& error) {
    refuse(place + " must be the state of a generator of torch, and torch refuses it: " +
           error.what_without_backtrace() + "; load the state as it was saved");
  }
  return state;
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor get_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

GeneratorSnapshot GeneratorSnapshot::take(const std::optional<at::Generator>& own) {
  GeneratorSnapshot snapshot = take_own(own);
  snapshot.of_default_ = get_state(default_generator());
  return snapshot;
}

GeneratorSnapshot GeneratorSnapshot::take_own(const std::optional<at::Generator>& own) {
  GeneratorSnapshot snapshot;
  if (own) snapshot.of_own_ = get_state(*own);
  return snapshot;
}

GeneratorSnapshot GeneratorSnapshot::from_value(const Value& value) {
  GeneratorSnapshot snapshot;
  for (const char* part : {"globals", "own"}) {
    const Value* found = value.kind() == Value::Kind::kDict ? value.find(part) : nullptr;
    if (found == nullptr || found->kind() != Value::Kind::kDict)
      refuse(std::string("state['generators']['") + part + "'] must be a dict; load the state as it was saved");
  }
  // None in the state of a job with several ranks: each rank has its own.
  const Value& of_default = value["globals"]["torch"];
  if (!of_default.is_none()) snapshot.of_default_ = to_tensor(of_default, "state['generators']['globals']['torch']");
  if (const Value* own = value["own"].find("loader"))
    snapshot.of_own_ = to_tensor(*own, "state['generators']['own']['loader']");
  snapshot.of_random_ = value["globals"]["random"];
  snapshot.of_numpy_ = value["globals"]["numpy"];
  return snapshot;
}

Value GeneratorSnapshot::to_value() const {
  // Once, as Python's loader does, although the sampler draws from it, too.
  Value::Entries own;
  if (of_own_.defined()) own.push_back({"loader", to_text(of_own_)});
  return Value::dict({{"globals", Value::dict({{"torch", of_default_.defined() ? to_text(of_default_) : Value()},
                                               {"random", of_random_},
                                               {"numpy", of_numpy_}})},
                      {"own", Value::dict(std::move(own))}});
}

void GeneratorSnapshot::restore_default() const {
  if (of_default_.defined()) set_state(default_generator(), of_default_);
}

void GeneratorSnapshot::restore_own(const std::optional<at::Generator>& own) const {
  if (own && of_own_.defined()) set_state(*own, of_own_);
}

bool GeneratorSnapshot::is_current() const {
  return !of_default_.defined() || at::equal(of_default_, get_state(default_generator()));
}

GeneratorsReplayed::GeneratorsReplayed(const GeneratorSnapshot& snapshot)
    : before_(GeneratorSnapshot::take(std::nullopt)) {
  snapshot.restore_default();
}

GeneratorsReplayed::~GeneratorsReplayed() { before_.restore_default(); }

namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kVersionWithSkips = 2;      // batches were delivered or committed in any order
constexpr int64_t kVersionWithEarlier = 4;    // batches of earlier epochs are to be delivered first; 3: parts may be
                                              // older than the position
constexpr int64_t kVersionWithBits = 5;       // many places that are left are written as bits
constexpr int64_t kVersionOfRankCommits = 6;  // ranks that share one order commit steps

std::string demangled(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(type.name(), nullptr, nullptr, &status),
                                                    &std::free);
  return status == 0 ? name.get() : type.name();
}

// The name of a sampler's class without its namespace, as Python shows it.
std::string class_name(const Sampler& sampler) {
  const std::string name = demangled(typeid(sampler));
  const size_t end = name.find('<');
  const size_t colon = name.rfind(':', end);
  return colon == std::string::npos || end != std::string::npos ? name : name.substr(colon + 1);
}

// The last part of a class's name, without template arguments: of "a::make<b::C>(int)::D<e::F>", "D".
std::string short_class_name(const std::string& name) {
  size_t first = 0;
  size_t end = name.size();
  int depth = 0;
  for (size_t index = 0; index < name.size(); ++index) {
    if (depth == 0 && name[index] == ':') {
      first = index + 1;
      end = name.size();
    }
    if (depth == 0 && (name[index] == '<' || name[index] == '(')) end = std::min(end, index);
    if (name[index] == '<' || name[index] == '(') ++depth;
    if (name[index] == '>' || name[index] == ')') --depth;
  }
  return name.substr(first, end - first);
}

Value sampler_name(const BuiltLoader& built) {
  const Options& options = *built.options;
  if (options.sampler) return class_name(*options.sampler);
  if (!options.shuffle) return "SequentialSampler";
  return "RandomSampler of " + std::to_string(built.sample_count.value_or(0)) + " samples with " +
         (options.generator ? "a generator" : "no generator");
}

std::string as_python(const Value* value) { return value == nullptr || value->is_none() ? "None" : value->describe(); }

void set(Value::Entries& entries, const char* name, Value value) {
  const auto found = std::ranges::find_if(entries, [&](const auto& entry) { return entry.key.text() == name; });
  if (found != entries.end())
    found->value = std::move(value);
  else
    entries.push_back({name, std::move(value)});
}

Value decoded(const std::vector<std::byte>& state) {
  return state.empty() ? Value() : value_or_raise(dataset::unpack_value(state));
}

// Epoch and batch numbers below this limit can be added without overflow.
constexpr int64_t kCountMax = int64_t{1} << 53;

// A part of a state. If the part is not valid, its functions throw an Error that names it.
struct Part {
  const Value* value;  // null if it is missing
  std::string place;

  bool is(Value::Kind kind) const { return value != nullptr && value->kind() == kind; }
  Part operator[](std::string_view name) const {
    if (!is(Value::Kind::kDict)) expect("a dict");
    return {value->find(name), place + "['" + std::string(name) + "']"};
  }
  bool is_none() const { return value == nullptr || value->is_none(); }

  [[noreturn]] void expect(const std::string& wanted) const {
    refuse(place + " must be " + wanted + ", got " + (value == nullptr ? "nothing" : value->describe()) +
           "; load the state as it was saved");
  }
  int64_t integer(int64_t least, int64_t most) const {
    const bool fits = is(Value::Kind::kInteger) && value->integer() >= least && value->integer() <= most;
    if (!fits) expect("an integer from " + std::to_string(least) + " to " + std::to_string(most));
    return value->integer();
  }
  int64_t count(int64_t most = kCountMax) const { return integer(0, most); }
  bool boolean() const {
    if (!is(Value::Kind::kBoolean)) expect("true or false");
    return value->boolean();
  }
  const Value::Items& items() const {
    if (!is(Value::Kind::kList)) expect("a list");
    return value->items();
  }
  Part operator[](size_t index) const {
    return {.value = &value->items()[index], .place = place + "[" + std::to_string(index) + "]"};
  }
  const Value::Items& items(size_t count) const {
    if (!is(Value::Kind::kList) || value->size() != count) expect("a list of " + std::to_string(count));
    return value->items();
  }
};

}  // namespace

std::string title_of(const AnyDataset& dataset) {
  if (const auto* plugin = std::get_if<PluginDataset>(&dataset.kind())) return plugin->name;
  if (const auto* python = std::get_if<PythonDataset>(&dataset.kind())) return python->factory;
  if (const auto by_index = dataset.by_index()) {
    const Dataset& object = *by_index;
    return short_class_name(demangled(typeid(object)));
  }
  const auto as_streams = dataset.as_streams();
  const IterableDataset& object = *as_streams;
  return short_class_name(demangled(typeid(object)));
}

int64_t batch_count_of(const Options& options, int64_t sample_count) {
  const int64_t size = std::max<int64_t>(1, options.batch_size.value_or(1));
  return sample_count / size + (sample_count % size > 0 && !options.drop_last ? 1 : 0);
}

GeneratorSnapshot BuiltLoader::take_generators() const {
  return options->shard_by_rank ? GeneratorSnapshot::take_own(options->generator)
                                : GeneratorSnapshot::take(options->generator);
}

Value BuiltLoader::to_value() const {
  const auto batch_size = options->batch_size ? Value(*options->batch_size) : Value();
  Value batch_sampler;
  if (options->shard_by_rank) {
    batch_sampler = "RankBatchSampler over " + sampler_name(*this).text();
  } else if (!is_iterable && options->batch_size) {
    batch_sampler = "BatchSampler of " + std::to_string(*options->batch_size) + " over " + sampler_name(*this).text() +
                    (options->drop_last ? ", last one left out" : "");
  }
  Value::Entries built = {{"kind", is_iterable ? "iterable" : "map"},
                          {"batch_size", options->shard_by_rank ? Value() : batch_size},
                          {"drop_last", options->shard_by_rank ? Value() : Value(options->drop_last)},
                          {"dataset length", sample_count ? Value(*sample_count) : Value()},
                          {"seeding", options->shard_by_rank ? "sample" : "batch"},
                          {"shards", is_iterable ? Value(shard_count) : Value()},
                          {"sampler", is_iterable ? Value() : sampler_name(*this)},
                          {"batch_sampler", batch_sampler}};
  if (selection) built.push_back({"selection", *selection});
  return Value::dict(std::move(built));
}

sampling::RankShareOptions share_at(sampling::RankShareOptions share, const ResumePoint& point) {
  share.first_step = point.left.through;
  share.first_sample = point.sample_count;
  share.earlier = point.runs;
  return share;
}

PlacesLeft left_of(const EpochAccount& account, const CommitLedger* ledger) {
  if (account.commits && ledger != nullptr) return ledger->left(*account.commits);
  if (account.delivered) return account.delivered->left();
  return account.resumed_left.after(account.progress->answered_count() - account.resumed_left.delivered_count());
}

namespace {

// More missing places are written as bits, which take less than a list from here on.
constexpr size_t kListedPlacesMax = 256;

Value places_to_value(const std::vector<uint64_t>& places) {
  if (places.size() <= kListedPlacesMax) return Value::list({places.begin(), places.end()});
  std::vector<std::byte> bits((places.back() - places.front()) / 8 + 1);
  for (const uint64_t place : places) {
    const uint64_t offset = place - places.front();
    bits[offset / 8] |= std::byte{1} << (offset % 8);
  }
  return Value::dict({{"first", places.front()}, {"bits", to_base64(bits)}});
}

Value runs_to_value(const std::vector<sampling::StepRun>& runs) {
  Value::Items items;
  for (const auto& [first_step, first_sample, step_size] : runs)
    items.push_back(Value::list({first_step, first_sample, step_size}));
  return Value::list(std::move(items));
}

}  // namespace

Value make_state(const BuiltLoader& built, const EpochAccount* account, int64_t epoch_count,
                 const CommitLedger* ledger) {
  const bool is_finished = account != nullptr && account->progress->is_finished();
  const bool is_in_progress = account != nullptr && account->base_seed && !is_finished;
  const PlacesLeft left = account != nullptr ? left_of(*account, ledger) : PlacesLeft();
  const uint64_t answered_count = left.delivered_count();
  uint64_t yielded_count = account != nullptr ? account->progress->yielded_count() : 0;
  if (ledger != nullptr) yielded_count = answered_count;
  Value generators;
  Value shards;
  if (is_in_progress) {
    generators = account->start.to_value();
    const loader::EpochProgress& progress = *account->progress;
    Value::Items counts;
    Value::Items states;
    bool has_states = false;
    for (uint32_t shard_id = 0; shard_id < progress.shard_count(); ++shard_id) {
      counts.emplace_back(progress.shard_counts()[shard_id]);
      Value state = decoded(progress.shard_state(shard_id));
      const auto resumed = account->resumed_states.find(shard_id);
      if (state.is_none() && resumed != account->resumed_states.end()) state = resumed->second;
      has_states = has_states || !state.is_none();
      states.push_back(std::move(state));
    }
    auto last = progress.last_shard_id();
    if (built.options->shard_by_rank) {  // the same on all ranks, for any number of workers
      counts = {Value(answered_count)};
      last.reset();
    }
    shards = Value::dict({{"counts", Value::list(std::move(counts))},
                          {"last", last ? Value(*last) : Value()},
                          {"states", has_states ? Value::list(std::move(states)) : Value()},
                          {"before", Value()}});
  } else {
    generators = built.take_generators().to_value();
  }
  Value::Entries state = {{"_sampler_iter_yielded", answered_count},
                          {"_num_yielded", yielded_count},
                          {"_index_sampler_state", Value()},
                          {"_iterator_finished", is_finished},
                          {"version", kVersion},
                          {"built", built.to_value()},
                          {"epoch", is_in_progress ? account->epoch : epoch_count},
                          {"base_seed", is_in_progress ? Value(*account->base_seed) : Value()},
                          {"draws_seed", true},
                          {"generators", std::move(generators)},
                          {"shards", std::move(shards)},
                          {"dataset", Value()}};
  if (is_in_progress && account->share) state.push_back({"samples", account->share->samples_before(left.through)});
  if (is_in_progress && !left.missing.empty()) {
    Value missing = places_to_value(left.missing);
    set(state, "version", missing.kind() == Value::Kind::kDict ? kVersionWithBits : kVersionWithSkips);
    Value::Entries places = {{"through", left.through}, {"missing", std::move(missing)}};
    if (account->share) {
      places.push_back({"runs", runs_to_value(account->share->runs_of(left.missing))});
      set(state, "version", kVersionOfRankCommits);
    }
    state.push_back({"left", Value::dict(std::move(places))});
  }
  return Value::dict(std::move(state));
}

Value with_commits(const Value& state, CommitLedger& ledger) {
  Value::Entries entries = state.entries();
  const Part seed = Part{.value = &state, .place = "state"}["base_seed"];
  const bool is_between = seed.is_none() || state["_iterator_finished"].boolean();
  Value commits = ledger.to_state(is_between);
  if (commits["earlier"].size() > 0) set(entries, "version", std::max(state["version"].integer(), kVersionWithEarlier));
  set(entries, "commits", std::move(commits));
  return Value::dict(std::move(entries));
}

namespace {

constexpr const char* kOfCommits[] = {"left", "commits"};

// The commits in the part "sampler" of a job's state; null if there are none.
const Value* sealed_commits(const Value& state) {
  const Value* sampler = state.kind() == Value::Kind::kDict ? state.find("sampler") : nullptr;
  const bool has_some = sampler != nullptr && sampler->kind() == Value::Kind::kList && sampler->size() == 2;
  const Value* commits = has_some ? &(*sampler)[size_t{1}] : nullptr;
  return commits != nullptr && commits->kind() == Value::Kind::kDict ? commits : nullptr;
}

}  // namespace

Value sealed(const Value& state) {
  Value::Entries entries;
  Value::Entries commits;
  for (const Value::Entry& entry : state.entries()) {
    const bool is_of_commits = std::ranges::find(kOfCommits, entry.key.text()) != std::end(kOfCommits);
    (is_of_commits ? commits : entries).push_back(entry);
  }
  if (commits.empty()) return state;
  const Value* sampler = state.find("sampler");
  set(entries, "sampler", Value::list({sampler != nullptr ? *sampler : Value(), Value::dict(std::move(commits))}));
  set(entries, "version", kVersionOfRankCommits);
  return Value::dict(std::move(entries));
}

Value opened(const Value& state) {
  const Value* commits = sealed_commits(state);
  if (commits == nullptr) return state;
  Value::Entries entries = state.entries();
  set(entries, "sampler", (*state.find("sampler"))[size_t{0}]);
  for (const char* name : kOfCommits) {
    const Value* part = commits->find(name);
    if (part != nullptr) set(entries, name, *part);
  }
  return Value::dict(std::move(entries));
}

namespace {

[[noreturn]] void refuse_other(const std::string& name, const std::string& theirs, const std::string& mine) {
  refuse("the state is of a loader with " + name + " " + theirs + " and this one has " + name + " " + mine +
         ", so its stream is another; build the loader as it was");
}

void check_state(const BuiltLoader& built, const Value& state) {
  if (state.kind() != Value::Kind::kDict || state.find("built") == nullptr || state.find("generators") == nullptr) {
    refuse("the state is " + state.describe() +
           ", but must be the result of state() of penstock's DataLoader, or of Python's state_dict()");
  }
  const Value* version = state.find("version");
  const bool is_known = version != nullptr && version->kind() == Value::Kind::kInteger &&
                        version->integer() >= kVersion && version->integer() <= kVersionOfRankCommits;
  if (!is_known) {
    refuse("the state has version " + as_python(version) + ", but this penstock supports versions " +
           std::to_string(kVersion) + " to " + std::to_string(kVersionOfRankCommits) +
           "; resume with the version of penstock that saved it");
  }
  const Value now = built.to_value();
  const Part theirs{.value = state.find("built"), .place = "state['built']"};
  if (!theirs.is(Value::Kind::kDict)) theirs.expect("a dict");
  for (const Value::Entry& entry : theirs.value->entries()) {
    const std::string& name = entry.key.text();
    const Value* here = now.find(name);
    if (here != nullptr && here->to_json() == entry.value.to_json()) continue;
    refuse_other(name, as_python(&entry.value), as_python(here));
  }
  for (const Value::Entry& entry : now.entries()) {
    const std::string& name = entry.key.text();
    if (theirs.value->find(name) == nullptr && !entry.value.is_none())
      refuse_other(name, as_python(nullptr), as_python(&entry.value));
  }
  const Value* dataset = state.find("dataset");
  // In a state of Python's ranks, the second of two items is the version of the data.
  const bool has_version = dataset != nullptr && dataset->kind() == Value::Kind::kList && dataset->size() == 2;
  if (has_version) dataset = &(*dataset)[size_t{0}];
  if (dataset != nullptr && !dataset->is_none()) {
    throw Error(ErrorKind::kUnsupported,
                "the state contains the state of a Python dataset in the trainer process, which only Python can "
                "restore; save it from a loader with workers");
  }
  const Value* samplers = state.find("samplers");
  if (samplers != nullptr && !samplers->is_none()) {
    throw Error(ErrorKind::kUnsupported,
                "the state contains the state of a Python sampler, which only Python can restore; use a sampler "
                "without state_dict(), or a sampler of torch");
  }
}

// The maximum number of batches in an epoch, if the loader's construction determines it.
int64_t batch_count_max(const BuiltLoader& built) {
  const Options& options = *built.options;
  if (built.is_iterable || options.sampler || !built.sample_count) return kCountMax;
  if (!options.shard_by_rank) return batch_count_of(options, *built.sample_count);
  return *built.sample_count / std::max<int64_t>(1, options.batch_size.value_or(1)) + 1;
}

// Reads places that are written as bits: all are before `through`, and the first bit is set.
std::vector<uint64_t> read_bits(const Part& missing, int64_t through) {
  const auto first = static_cast<uint64_t>(missing["first"].integer(0, through));
  const Part bits = missing["bits"];
  const auto bytes = bits.is(Value::Kind::kText) ? from_base64(bits.value->text()) : std::nullopt;
  if (!bytes) bits.expect("base64 of bits");
  std::vector<uint64_t> places;
  for (size_t index = 0; index < 8 * bytes->size(); ++index) {
    if (((*bytes)[index / 8] >> (index % 8) & std::byte{1}) == std::byte{0}) continue;
    places.push_back(first + index);
    if (places.back() >= static_cast<uint64_t>(through))
      bits.expect("base64 of bits of places before state['left']['through']");
  }
  if (places.empty() || places.front() != first) bits.expect("base64 of bits of which the first is set");
  return places;
}

// Reads the places that others have overtaken, if there are any.
PlacesLeft read_left(const BuiltLoader& built, const Part& state, int64_t batches_max) {
  PlacesLeft left{.through = static_cast<uint64_t>(state["_sampler_iter_yielded"].count(batches_max))};
  const Part overtaken = state["left"];
  if (overtaken.is_none()) return left;
  if (built.is_iterable) overtaken.expect("left out, since the batches of this loader are delivered in order");
  const uint64_t delivered_count = left.through;
  const int64_t through = overtaken["through"].count(batches_max);
  left.through = static_cast<uint64_t>(through);
  const Part missing = overtaken["missing"];
  if (missing.is(Value::Kind::kDict)) {
    left.missing = read_bits(missing, through);
  } else {
    int64_t first = 0;
    for (size_t index = 0; index < missing.items().size(); ++index) {
      const int64_t place = missing[index].integer(first, through - 1);
      left.missing.push_back(static_cast<uint64_t>(place));
      first = place + 1;
    }
  }
  if (left.delivered_count() != delivered_count) {
    refuse("_sampler_iter_yielded is " + std::to_string(delivered_count) + " but " +
           std::to_string(left.delivered_count()) +
           " batches were delivered, out of order, so the batches to repeat are unknown; load the state as it was "
           "saved, or save it from a loader with in_order = true");
  }
  return left;
}

// Reads the indices of a batch of an earlier epoch: an integer, or a list of them if samples are collated.
std::vector<int64_t> read_indices(const BuiltLoader& built, const Part& part) {
  const int64_t most = std::max<int64_t>(1, built.sample_count.value_or(kCountMax)) - 1;
  if (!built.options->batch_size) return {part.integer(0, most)};
  if (part.items().empty()) part.expect("a list of at least one integer");
  std::vector<int64_t> indices;
  for (size_t index = 0; index < part.value->size(); ++index) indices.push_back(part[index].integer(0, most));
  return indices;
}

CommitsState read_commits(const BuiltLoader& built, const Part& commits) {
  CommitsState state;
  if (commits.is_none()) return state;
  state.next_number = commits["epoch"].count();
  const Part earlier = commits["earlier"];
  int64_t next_number = 0;
  for (size_t index = 0; index < earlier.items().size(); ++index) {
    const Part part = earlier[index];
    EarlierEpoch epoch{.number = part["epoch"].integer(next_number, state.next_number - 1),
                       .seed_epoch = part["seed_epoch"].count(),
                       .base_seed = part["base_seed"].integer(std::numeric_limits<int64_t>::min(),
                                                              std::numeric_limits<int64_t>::max())};
    next_number = epoch.number + 1;
    const Part batches = part["batches"];
    if (batches.items().empty()) batches.expect("a list of at least one batch");
    int64_t next_place = 0;
    for (size_t number = 0; number < batches.value->size(); ++number) {
      const Part batch = batches[number];
      batch.items(3);
      const int64_t place = batch[size_t{0}].integer(next_place, kCountMax);
      next_place = place + 1;
      epoch.batches.emplace(static_cast<uint64_t>(place),
                            PulledBatch{.indices = read_indices(built, batch[size_t{2}]),
                                        .first_place = static_cast<uint64_t>(batch[size_t{1}].count())});
    }
    state.earlier.push_back(std::move(epoch));
  }
  if (!state.earlier.empty() && built.options->commit == Commit::kNone) {
    refuse("the state has batches of " + std::to_string(state.earlier.size()) +
           " earlier epochs that were delivered and not committed, which a loader without commit cannot repeat; set "
           "Options::commit to Commit::kManual");
  }
  return state;
}

// Reads the state of a shard's iterator after its last batch. An older state is ignored: the shard is then read again
// up to its position.
void read_shard(const Part& shard, uint32_t shard_id, dataset::BatchReader::ShardStart& start, ResumePoint& point) {
  if (shard.is_none()) return;
  const Part batches = shard["batches"];
  if (!batches.is_none() && static_cast<uint64_t>(batches.count()) != start.batch_count) return;
  const Part iterator = shard["iterator"];
  if (iterator.value != nullptr) {
    start.state = *iterator.value;
    const Part ended = shard["ended"];
    start.is_at_end = ended.value != nullptr && ended.boolean();
  }
  point.shard_states.emplace(shard_id, *shard.value);
}

// The number of samples in the order of an epoch.
uint64_t order_size(const BuiltLoader& built) { return static_cast<uint64_t>(built.order_size().value_or(0)); }

// Reads which samples of the order the missing steps have: ascending, and before point.sample_count.
std::vector<sampling::StepRun> read_runs(const Part& part, const ResumePoint& point, uint64_t order_size) {
  std::vector<sampling::StepRun> runs;
  const auto most = static_cast<int64_t>(order_size);
  int64_t next_step = 0;
  for (size_t index = 0; index < part.items().size(); ++index) {
    const Part run = part[index];
    run.items(3);
    const int64_t first_step = run[size_t{0}].integer(next_step, kCountMax);
    next_step = first_step + 1;
    runs.push_back({.first_step = static_cast<uint64_t>(first_step),
                    .first_sample = static_cast<uint64_t>(run[size_t{1}].count(most)),
                    .step_size = static_cast<uint64_t>(run[size_t{2}].integer(1, std::max<int64_t>(1, most)))});
  }
  uint64_t next_sample = 0;
  for (const uint64_t step : point.left.missing) {
    const auto after = std::ranges::upper_bound(runs, step, {}, &sampling::StepRun::first_step);
    if (after == runs.begin()) part.expect("a list with the run of step " + std::to_string(step));
    const sampling::StepRun& run = *(after - 1);
    const uint64_t steps_max = (order_size - run.first_sample) / run.step_size;  // to the end of the order
    const uint64_t first = run.first_sample + std::min(step - run.first_step, steps_max + 1) * run.step_size;
    const uint64_t end = std::min(first + run.step_size, order_size);
    if (first < next_sample || first >= order_size || end > point.sample_count)
      part.expect("a list whose step " + std::to_string(step) + " has samples from " + std::to_string(next_sample) +
                  " to " + std::to_string(point.sample_count));
    next_sample = end;
  }
  return runs;
}

// Throws if the ranks cannot divide a step that they are to be given again.
void check_steps(const BuiltLoader& built, const LoadedState& loaded) {
  auto options = share_of(*built.options);
  if (!options) return;
  std::vector<sampling::RankShare::Part> steps;
  for (const EarlierEpoch& epoch : loaded.commits.earlier)
    for (const auto& [place, batch] : epoch.batches)
      steps.push_back({.first = batch.first_place, .count = batch.indices.size()});
  if (loaded.point) *options = share_at(*options, *loaded.point);
  const sampling::RankShare share(order_size(built), *options);
  if (loaded.point)
    for (const uint64_t step : loaded.point->left.missing) steps.push_back(share.order_part(step));
  for (const auto& step : steps) {
    if (share.can_divide(step)) continue;
    refuse("the state has an uncommitted step of " + std::to_string(step.count) + " samples, which " +
           std::to_string(options->rank_count) +
           " ranks cannot divide without losing or repeating samples; resume with a number of ranks that divides " +
           std::to_string(step.count) + ", or with remainder = kUneven and at most " + std::to_string(step.count) +
           " ranks, or commit the step before the state is taken");
  }
}

ResumePoint read_point(const BuiltLoader& built, const Part& state) {
  const Part shards = state["shards"];
  const int64_t batches_max = batch_count_max(built);
  ResumePoint point{
      .base_seed = state["base_seed"].integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()),
      .answered_count = static_cast<uint64_t>(state["_sampler_iter_yielded"].count(batches_max)),
      .yielded_count = static_cast<uint64_t>(state["_num_yielded"].count(batches_max)),
      .left = read_left(built, state, batches_max)};
  if (!state["_index_sampler_state"].is_none() || !state["sampler"].is_none()) {
    throw Error(ErrorKind::kUnsupported,
                "the state contains the state of a Python sampler, which only Python can restore; use a sampler "
                "without state_dict(), or a sampler of torch");
  }
  if (built.options->shard_by_rank) {
    point.sample_count = static_cast<uint64_t>(state["samples"].count(static_cast<int64_t>(order_size(built))));
    if (!point.left.missing.empty()) point.runs = read_runs(state["left"]["runs"], point, order_size(built));
  }
  if (!built.is_iterable) {
    if (point.answered_count > 0)
      point.last_shard_id = static_cast<uint32_t>((point.answered_count - 1) % built.shard_count);
    return point;
  }
  const Part counts = shards["counts"];
  const Part states = shards["states"];
  counts.items(built.shard_count);
  if (!states.is_none()) states.items(built.shard_count);
  uint64_t sum = 0;
  for (uint32_t shard_id = 0; shard_id < built.shard_count; ++shard_id) {
    const std::string place = "[" + std::to_string(shard_id) + "]";
    // Programs that adjust a state adjust the total over all shards.
    const bool is_alone = built.shard_count == 1;
    const Part count{.value = &counts.value->items()[shard_id], .place = counts.place + place};
    dataset::BatchReader::ShardStart start{.batch_count =
                                               is_alone ? point.answered_count : static_cast<uint64_t>(count.count())};
    sum += start.batch_count;
    if (!states.is_none())
      read_shard({.value = &states.value->items()[shard_id], .place = states.place + place}, shard_id, start, point);
    if (start.batch_count > 0 || start.state) point.starts.emplace(shard_id, std::move(start));
  }
  if (sum != point.answered_count) {
    refuse("_sampler_iter_yielded is " + std::to_string(point.answered_count) + " but the shards returned " +
           std::to_string(sum) + " batches; load the state as it was saved");
  }
  const Part last = shards["last"];
  if (!last.is_none()) point.last_shard_id = static_cast<uint32_t>(last.integer(0, int64_t{built.shard_count} - 1));
  return point;
}

}  // namespace

LoadedState read_state(const BuiltLoader& built, const Value& given) {
  const Value state = built.options->shard_by_rank ? opened(given) : given;
  check_state(built, state);
  const Part whole{.value = &state, .place = "state"};
  const bool has_seed = !whole["base_seed"].is_none();
  const bool is_finished = whole["_iterator_finished"].boolean();
  LoadedState loaded{.epoch = whole["epoch"].count(),
                     .generators = GeneratorSnapshot::from_value(state["generators"]),
                     .is_finished_in_epoch = is_finished && has_seed,
                     .commits = read_commits(built, whole["commits"])};
  if (has_seed && !is_finished) loaded.point = read_point(built, whole);
  check_steps(built, loaded);
  return loaded;
}

}  // namespace penstock::api

namespace penstock {
namespace {

constexpr const char* kArchiveKey = "penstock.loader";

}  // namespace

struct State::Content {
  Value value;
};

State::State() : content_(std::make_unique<Content>()) {}
State::~State() = default;
State::State(const State& other) : content_(std::make_unique<Content>(*other.content_)) {}
State& State::operator=(const State& other) {
  if (this != &other) *content_ = *other.content_;
  return *this;
}
// A moved-from state is a state without a position.
State::State(State&& other) noexcept : State() { content_.swap(other.content_); }
State& State::operator=(State&& other) noexcept {
  content_.swap(other.content_);
  return *this;
}

State StateAccess::make(Value value) {
  State state;
  state.content_->value = std::move(value);
  return state;
}

const Value& StateAccess::value_of(const State& state) { return state.content_->value; }

State State::from_json(std::string_view text) {
  Value value = Value::from_json(text);
  if (value.kind() != Value::Kind::kDict && !value.is_none())
    api::refuse("the text is the JSON of " + value.describe() + ", but must be the JSON of a loader's state");
  if (value.kind() == Value::Kind::kDict && value.size() == 0) value = Value();
  return StateAccess::make(std::move(value));
}

std::string State::to_json() const { return content_->value.is_none() ? "{}" : content_->value.to_json(); }

void State::save(torch::serialize::OutputArchive& archive) const { archive.write(kArchiveKey, c10::IValue(to_json())); }

void State::load(torch::serialize::InputArchive& archive) {
  c10::IValue text;
  if (!archive.try_read(kArchiveKey, text) || !text.isString()) {
    api::refuse(std::string("the archive has no \"") + kArchiveKey + "\"; pass an archive written by State::save()");
  }
  *this = from_json(text.toStringRef());
}

}  // namespace penstock
