// SPDX-License-Identifier: Apache-2.0
// penstock::filtered(): batches of the samples that a predicate accepts. The oracle is a loader over the whole dataset
// with a sampler of the accepted samples.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock {
namespace {

constexpr int64_t kLength = 200;

bool is_wanted(int64_t index) { return index % 3 != 0 && index != 100; }

std::vector<int64_t> wanted_indices() {
  std::vector<int64_t> indices;
  for (int64_t index = 0; index < kLength; ++index)
    if (is_wanted(index)) indices.push_back(index);
  return indices;
}

// Samples that draw, from both generators. Counts the samples that were read.
class Counted : public Dataset {
 public:
  int64_t size() const override { return kLength; }
  Value get(int64_t index, Draws& draws) override {
    read_count.fetch_add(1);
    return to_value(std::tuple(index, at::rand({2}, draws.sample_generator()), at::rand({1}, draws.batch_generator())));
  }

  std::atomic<int64_t> read_count{0};
};

bool accepts(const Value& sample) { return is_wanted(sample[0].integer()); }

// A list of indices, in its order.
class Listed : public Sampler {
 public:
  explicit Listed(std::vector<int64_t> indices) : indices_(std::move(indices)) {}
  void begin_epoch(int64_t) override { next_ = 0; }
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
    std::vector<int64_t> batch;
    for (; batch_size > 0 && next_ < indices_.size(); --batch_size) batch.push_back(indices_[next_++]);
    return batch.empty() ? std::nullopt : std::optional(batch);
  }

 private:
  std::vector<int64_t> indices_;
  size_t next_ = 0;
};

std::vector<Value> values_of(DataLoader& loader) {
  std::vector<Value> values;
  for (const Batch& batch : loader) values.push_back(batch.value());
  return values;
}

void expect_same_values(const std::vector<Value>& left, const std::vector<Value>& right) {
  ASSERT_EQ(left.size(), right.size());
  for (size_t batch = 0; batch < left.size(); ++batch)
    for (size_t part = 0; part < 3; ++part)
      EXPECT_TRUE(at::equal(left[batch][part].tensor(), right[batch][part].tensor())) << batch << ", " << part;
}

std::string refusal_of(const std::function<void()>& call, ErrorKind kind = ErrorKind::kValue) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

class Filtered : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string file(const std::string& name) const { return folder_ / name; }
  static std::string contents_of(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("penstock_filtered_" + std::to_string(::getpid()));
};

TEST_F(Filtered, BatchesAreFullBatchesOfTheAcceptedSamples) {
  const Options options{.batch_size = 8, .generator = at::detail::createCPUGenerator(5)};
  Options listed = options;
  listed.sampler = std::make_shared<Listed>(wanted_indices());
  listed.generator = at::detail::createCPUGenerator(5);
  DataLoader oracle(std::make_shared<Counted>(), listed);
  const std::vector<Value> expected = values_of(oracle);
  for (const int64_t workers : {0, 1, 3}) {
    at::manual_seed(3);
    const auto kept = filtered(std::make_shared<Counted>(), accepts, {.num_workers = workers});
    const at::Tensor drawn = at::rand({2});
    at::manual_seed(3);
    EXPECT_TRUE(at::equal(drawn, at::rand({2})));  // torch's default generator was left alone
    EXPECT_EQ(kept->indices(), wanted_indices());
    Options own = options;
    own.num_workers = workers;
    own.generator = at::detail::createCPUGenerator(5);
    DataLoader loader(kept, own);
    EXPECT_EQ(*loader.size(), static_cast<int64_t>(expected.size()));
    expect_same_values(values_of(loader), expected);
  }
}

TEST_F(Filtered, RanksHaveEqualStepsAndReshard) {
  const auto kept = filtered(std::make_shared<Counted>(), accepts);
  const auto rank = [&](int64_t number, int64_t count) {
    return DataLoader(kept, {.shuffle = true,
                             .num_workers = 1,
                             .shard_by_rank = true,
                             .rank = number,
                             .world_size = count,
                             .global_batch_size = 6});
  };
  std::multiset<int64_t> given;
  const auto take = [&](DataLoader& loader) {
    const auto batch = loader.next();
    for (int64_t at = 0; batch && at < (*batch)[0].numel(); ++at) given.insert((*batch)[0][at].item<int64_t>());
    return batch.has_value();
  };
  auto first = rank(0, 2);
  auto second = rank(1, 2);
  first.begin_epoch();
  second.begin_epoch();
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(take(first) && take(second));
  auto third = rank(2, 3);
  third.load_state(first.state());
  first.reshard(0, 3);
  second.reshard(1, 3);
  third.begin_epoch();
  for (bool is_over = false; !is_over;) {
    is_over = !take(first);
    EXPECT_EQ(take(second), !is_over);
    EXPECT_EQ(take(third), !is_over);
  }
  const auto expected = wanted_indices();  // 132 samples: 22 steps of 6
  EXPECT_EQ(given, std::multiset<int64_t>(expected.begin(), expected.end()));
}

TEST_F(Filtered, InputsTakeThePlaceOfSamples) {
  const auto dataset = std::make_shared<Counted>();
  const auto inputs = make_dataset(kLength, [](int64_t index) { return is_wanted(index) ? 1.5 : 0.5; });
  const auto kept = filtered(dataset, [](const Value& input) { return input.number() > 1; }, {.inputs = inputs});
  EXPECT_EQ(kept->indices(), wanted_indices());
  EXPECT_EQ(dataset->read_count.load(), 0);
  const auto short_inputs = make_dataset(7, [](int64_t index) { return index; });
  expect_part(refusal_of([&] { filtered(dataset, accepts, {.inputs = short_inputs}); }),
              "inputs must have one item for each of the 200 samples, got 7");
}

TEST_F(Filtered, ProgressCountsAllEvaluations) {
  std::vector<std::pair<int64_t, int64_t>> seen;
  const auto note = [&](int64_t done, int64_t total) { seen.emplace_back(done, total); };
  filtered(std::make_shared<Counted>(), accepts, {.num_workers = 2, .progress = note});
  EXPECT_EQ(seen.back(), (std::pair<int64_t, int64_t>(kLength + 64, kLength + 64)));
  EXPECT_TRUE(std::ranges::is_sorted(seen));
}

// Each thread has a copy, which may make whole batches.
class Cloned : public Dataset {
 public:
  int64_t size() const override { return kLength; }
  Value get(int64_t index, Draws&) override {
    EXPECT_FALSE(is_busy_.exchange(true));
    std::this_thread::yield();
    is_busy_ = false;
    return index;
  }
  std::optional<Value> get_batch(std::span<const int64_t> indices, Draws&) override {
    std::vector<int64_t> twice;
    for (const int64_t index : indices) twice.push_back(2 * index);
    return to_value(twice);
  }
  std::shared_ptr<Dataset> clone() const override { return std::make_shared<Cloned>(); }

 private:
  std::atomic<bool> is_busy_{false};
};

TEST_F(Filtered, ClonesAndWholeBatchesAreTheDatasets) {
  const auto kept = filtered(std::make_shared<Cloned>(), [](const Value& index) { return is_wanted(index.integer()); },
                             {.num_workers = 3});
  EXPECT_EQ(kept->indices(), wanted_indices());
  DataLoader loader(kept, {.batch_size = 3, .num_workers = 3});
  EXPECT_EQ(loader.begin()->as<std::vector<int64_t>>(), (std::vector<int64_t>{2, 4, 8}));
}

TEST_F(Filtered, CacheIsReadAndCompared) {
  const std::string path = file("kept.idx");
  const auto dataset = std::make_shared<Counted>();
  const auto kept = filtered(dataset, accepts, {.num_workers = 2, .cache = path});
  EXPECT_EQ(dataset->read_count.exchange(0), kLength + 64);
  const std::string contents = contents_of(path);
  const auto again = filtered(dataset, accepts, {.cache = path});
  EXPECT_EQ(dataset->read_count.load(), 64);
  EXPECT_EQ(again->indices(), kept->indices());
  EXPECT_EQ(again->selection(), kept->selection());
  EXPECT_EQ(contents_of(path), contents);
  expect_part(refusal_of([&] { filtered(dataset, [](const Value& one) { return !accepts(one); }, {.cache = path}); }),
              "cache must be of the same dataset and predicate, but " + path + " has false for sample 0");
  const auto other = make_dataset(kLength + 1, [](int64_t index) { return std::tuple(index); });
  expect_part(refusal_of([&] { filtered(other, accepts, {.cache = path}); }),
              "cache must be of the same dataset, with 201 samples, got " + path + " of 200 samples");
  for (const size_t length : {size_t{0}, size_t{20}, contents.size() - 1}) {
    std::ofstream(path, std::ios::binary) << contents.substr(0, length);
    expect_part(refusal_of([&] { filtered(dataset, accepts, {.cache = path}); }), "got another or a damaged one in");
  }
  expect_part(refusal_of([&] { filtered(dataset, accepts, {.cache = file("missing/kept.idx")}); }, ErrorKind::kFailed),
              "writing the cache");
  expect_part(refusal_of([&] { filtered(dataset, accepts, {.cache = folder_.string()}); }),
              "got another or a damaged one in " + folder_.string());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(Filtered, PredicatesWithChangingAnswersAreReported) {
  for (const int64_t workers : {0, 2}) {
    std::mutex mutex;
    std::set<int64_t> seen;
    const auto is_new = [&](const Value& sample) {
      const std::lock_guard lock(mutex);
      return seen.insert(sample[0].integer()).second;
    };
    const std::string text =
        refusal_of([&] { filtered(std::make_shared<Counted>(), is_new, {.num_workers = workers}); });
    expect_part(text, "must give the same answer for the same sample, got true and then false for sample 0 (64 of 64");
  }
}

TEST_F(Filtered, FailuresAreNamed) {
  const auto throwing = [](const Value& sample) -> bool {
    if (sample[0].integer() == 17) throw std::runtime_error("no label");
    return true;
  };
  const auto failing = make_dataset(kLength, [](int64_t index) {
    if (index == 5) throw std::out_of_range("no file");
    return std::tuple(index);
  });
  for (const int64_t workers : {0, 2}) {
    const auto of_predicate =
        refusal_of([&] { filtered(std::make_shared<Counted>(), throwing, {.num_workers = workers}); });
    EXPECT_EQ(of_predicate,
              "predicate must return true or false for every sample, but threw std::runtime_error: no label for sample "
              "17; handle this sample in the predicate");
    expect_part(refusal_of([&] { filtered(failing, accepts, {.num_workers = workers}); }, ErrorKind::kDataset),
                "no file");
  }
  const auto dataset = std::make_shared<Counted>();
  expect_part(refusal_of([&] { filtered(dataset, [](const Value&) { return false; }); }),
              "predicate must accept at least one sample, got none of 200");
  expect_part(refusal_of([&] { filtered(nullptr, accepts); }), "dataset must be a Dataset, got null");
  expect_part(refusal_of([&] { filtered(dataset, nullptr); }), "predicate must be callable, got an empty function");
  expect_part(refusal_of([&] { filtered(make_dataset(0, [](int64_t index) { return index; }), accepts); }),
              "dataset must have at least one sample, got an empty FunctionDataset");
  expect_part(refusal_of([&] { filtered(dataset, accepts, {.num_workers = -1}); }), "num_workers is -1");
  expect_part(refusal_of([&] { FilteredDataset(dataset, {3, kLength}); }), "indices must be from 0 to 199");
}

TEST_F(Filtered, StatesNameTheSelection) {
  const auto dataset = std::make_shared<Counted>();
  const auto other_of = [](const Value& sample) { return (sample[0].integer() + 1) % 3 != 0 || !accepts(sample); };
  DataLoader loader(filtered(dataset, accepts), {.batch_size = 4});
  loader.begin_epoch();
  const auto first = loader.next();
  const State state = State::from_json(loader.state().to_json());
  DataLoader same(filtered(dataset, accepts, {.num_workers = 2}), {.batch_size = 4, .num_workers = 1});
  same.load_state(state);
  auto rest = values_of(same);
  rest.insert(rest.begin(), first->value());
  ASSERT_EQ(rest.size(), static_cast<size_t>(*loader.size()));
  EXPECT_EQ(rest.back()[0].tensor()[-1].item<int64_t>(), wanted_indices().back());
  DataLoader other(filtered(dataset, other_of), {.batch_size = 4});
  EXPECT_NE(other.size(), std::nullopt);
  static_cast<void>(refusal_of([&] { other.load_state(state); }));
  std::vector<int64_t> shifted = wanted_indices();
  shifted[0] = 0;
  DataLoader shifted_loader(FilteredDataset(dataset, shifted), {.batch_size = 4});
  expect_part(refusal_of([&] { shifted_loader.load_state(state); }), "is of a loader with selection '");
  DataLoader plain(make_dataset(static_cast<int64_t>(shifted.size()), [](int64_t index) { return index; }),
                   {.batch_size = 4});
  expect_part(refusal_of([&] { plain.load_state(state); }), "and this one has selection None");
  expect_part(refusal_of([&] { shifted_loader.load_state(plain.state()); }), "is of a loader with selection None");
}

}  // namespace
}  // namespace penstock
