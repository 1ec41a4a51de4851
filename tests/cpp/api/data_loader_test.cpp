// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace penstock {
namespace {

using std::chrono::milliseconds;

std::shared_ptr<Dataset> numbers(int64_t size) {
  return make_dataset(size, [](int64_t index) { return std::pair(at::full({3}, index), index); });
}

// Samples that draw, from both generators.
std::shared_ptr<Dataset> noise(int64_t size) {
  return make_dataset(size, [](int64_t index, Draws& draws) {
    return std::tuple(index, at::rand({2}, draws.sample_generator()), at::rand({2}, draws.batch_generator()));
  });
}

// Counts to `size` in each epoch, shared out over the shards.
class Counting : public IterableDataset {
 public:
  explicit Counting(int64_t size, bool has_state = false) : size_(size), has_state_(has_state) {}

  std::unique_ptr<SampleStream> open(const Shard& shard, Draws& draws) override {
    return std::make_unique<Stream>(shard, size_, has_state_, at::rand({1}, draws.batch_generator()).item<double>());
  }

 private:
  class Stream : public SampleStream {
   public:
    Stream(const Shard& shard, int64_t size, bool has_state, double first_draw)
        : next_(shard.index), step_(shard.count), size_(size), has_state_(has_state), first_draw_(first_draw) {}

    std::optional<Value> next(Draws& draws) override {
      if (next_ >= size_) return std::nullopt;
      next_ += step_;
      return to_value(std::tuple(next_ - step_, first_draw_, at::rand({1}, draws.batch_generator())));
    }
    std::optional<Value> state() const override {
      if (!has_state_) return std::nullopt;
      return Value::dict({{"next", next_}, {"first_draw", first_draw_}});
    }
    void load(const Value& state) override {
      next_ = state["next"].integer();
      first_draw_ = state["first_draw"].number();
    }

   private:
    int64_t next_;
    int64_t step_;
    int64_t size_;
    bool has_state_;
    double first_draw_;
  };

  int64_t size_;
  bool has_state_;
};

std::vector<Batch> epoch_of(DataLoader& loader) {
  std::vector<Batch> batches;
  for (const Batch& batch : loader) batches.push_back(batch);
  return batches;
}

bool is_same(const Value& left, const Value& right) {
  if (left.kind() != right.kind()) return false;
  if (left.is_tensor())
    return left.tensor().dtype() == right.tensor().dtype() && at::equal(left.tensor(), right.tensor());
  if (left.kind() == Value::Kind::kText) return left.text() == right.text();
  if (left.size() != right.size()) return false;
  for (size_t index = 0; index < left.size(); ++index)
    if (!is_same(left[index], right[index])) return false;
  return true;
}

void expect_same(const std::vector<Batch>& left, const std::vector<Batch>& right) {
  ASSERT_EQ(left.size(), right.size());
  for (size_t index = 0; index < left.size(); ++index)
    EXPECT_TRUE(is_same(left[index].value(), right[index].value())) << "batch " << index;
}

ErrorKind kind_of(const std::function<void()>& call, std::string* text = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kFailed;
}

// ---- Orders

TEST(DataLoader, GivesEverySampleOnceInOrderWithoutShuffle) {
  for (const int64_t workers : {0, 1, 3}) {
    DataLoader loader(numbers(10), {.batch_size = 4, .num_workers = workers});
    EXPECT_EQ(loader.size(), 3);
    const auto batches = epoch_of(loader);
    ASSERT_EQ(batches.size(), 3);
    EXPECT_TRUE(at::equal(batches[0][1], at::arange(4)));
    EXPECT_TRUE(at::equal(batches[2][1], at::arange(8, 10)));
    EXPECT_EQ(batches[2].number(), 2);
  }
}

// As torch.utils.data: a base seed for the loader, a seed for the sampler, and the permutation of a generator of it.
TEST(DataLoader, ShufflesByTheDrawsOfPythonsLoader) {
  at::manual_seed(3);
  const auto draw = [] { return at::empty({}, at::kLong).random_().item<int64_t>(); };
  draw();
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(draw()));
  const at::Tensor expected = at::randperm(10, generator, at::kLong);
  at::manual_seed(3);
  DataLoader loader(numbers(10), {.batch_size = 10, .shuffle = true, .num_workers = 2});
  EXPECT_TRUE(at::equal(epoch_of(loader)[0][1], expected));
}

TEST(DataLoader, TheStreamIsTheSameForAnyNumberOfThreads) {
  const auto run = [](int64_t workers) {
    at::manual_seed(11);
    DataLoader loader(noise(50), {.batch_size = 8, .shuffle = true, .num_workers = workers});
    auto batches = epoch_of(loader);
    for (Batch& batch : epoch_of(loader)) batches.push_back(batch);
    return batches;
  };
  const auto alone = run(0);
  EXPECT_FALSE(is_same(alone[0].value(), alone[7].value()));
  for (const int64_t workers : {1, 2, 5}) expect_same(run(workers), alone);
}

TEST(DataLoader, LeavesTheShortBatchOut) {
  DataLoader loader(numbers(10), {.batch_size = 4, .num_workers = 2, .drop_last = true});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_EQ(epoch_of(loader).size(), 2);
}

TEST(DataLoader, WithoutABatchSizeEachSampleIsABatch) {
  const auto kept = at::full({2}, 7);
  DataLoader loader(make_dataset(3, [&](int64_t) { return kept; }), {.batch_size = std::nullopt, .num_workers = 1});
  const auto batches = epoch_of(loader);
  ASSERT_EQ(batches.size(), 3);
  EXPECT_TRUE(at::equal(batches[0].tensor(), kept));
  EXPECT_NE(batches[0].tensor().data_ptr(), kept.data_ptr());  // the program may write to a batch
}

TEST(DataLoader, ASamplerDecides) {
  class Backwards : public Sampler {
   public:
    void begin_epoch(int64_t epoch) override { epoch_ = epoch, next_ = 9; }
    std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
      std::vector<int64_t> indices;
      while (next_ >= 0 && static_cast<int64_t>(indices.size()) < batch_size) indices.push_back(next_--);
      return indices.empty() ? std::nullopt : std::optional(indices);
    }
    int64_t epoch_ = -1;
    int64_t next_ = -1;
  };
  const auto sampler = std::make_shared<Backwards>();
  DataLoader loader(numbers(10), {.batch_size = 4, .sampler = sampler, .num_workers = 2});
  EXPECT_EQ(loader.size(), std::nullopt);
  EXPECT_TRUE(at::equal(epoch_of(loader)[0][1], at::arange(9, 5, -1)));
  EXPECT_EQ(epoch_of(loader).size(), 3);
  EXPECT_EQ(sampler->epoch_, 1);
}

TEST(DataLoader, RowsOfTensorsAreGathered) {
  const TensorDataset rows({at::arange(20).view({10, 2}), at::arange(10)});
  for (const int64_t workers : {0, 2}) {
    DataLoader loader(rows, {.batch_size = 4, .num_workers = workers});
    const auto batches = epoch_of(loader);
    EXPECT_TRUE(at::equal(batches[1][0], at::arange(8, 16).view({4, 2})));
    EXPECT_TRUE(at::equal(batches[2][1], at::arange(8, 10)));
  }
}

TEST(DataLoader, ACollateFunctionMakesTheBatch) {
  const auto count = [](std::vector<Value> samples) { return Value::dict({{"count", samples.size()}}); };
  DataLoader loader(numbers(5), {.batch_size = 2, .num_workers = 2, .collate_fn = count});
  EXPECT_EQ(epoch_of(loader)[2].value()["count"].integer(), 1);
}

TEST(DataLoader, OutOfOrderBatchesAllCome) {
  DataLoader loader(numbers(40), {.batch_size = 2, .num_workers = 3, .in_order = false});
  int64_t sum = 0;
  for (const Batch& batch : loader) sum += batch[1].sum().item<int64_t>();
  EXPECT_EQ(sum, 780);
}

TEST(DataLoader, EachThreadMayHaveACopyOfTheDataset) {
  static std::atomic<int> copies{0};
  class Single : public Dataset {
   public:
    int64_t size() const override { return 64; }
    Value get(int64_t index, Draws&) override {
      EXPECT_FALSE(is_busy_.exchange(true));
      std::this_thread::sleep_for(milliseconds(1));
      is_busy_ = false;
      return index;
    }
    std::shared_ptr<Dataset> clone() const override { return ++copies, std::make_shared<Single>(); }

   private:
    std::atomic<bool> is_busy_{false};
  };
  copies = 0;
  DataLoader loader(std::make_shared<Single>(), {.batch_size = 4, .num_workers = 4});
  EXPECT_EQ(epoch_of(loader).size(), 16);
  EXPECT_EQ(copies, 4);
}

// ---- Iterable datasets

TEST(DataLoader, ShardsTakeTurnsForAnyNumberOfThreads) {
  const auto run = [](int64_t workers) {
    at::manual_seed(5);
    DataLoader loader(Counting(23), {.batch_size = 2, .num_workers = workers, .shards = 3});
    return epoch_of(loader);
  };
  const auto alone = run(0);
  ASSERT_EQ(alone.size(), 12);
  EXPECT_TRUE(at::equal(alone[1][0], at::tensor({int64_t{1}, int64_t{4}})));
  for (const int64_t workers : {1, 2, 3, 4}) expect_same(run(workers), alone);
}

TEST(DataLoader, AnIterableDatasetIsReadAnewInEachEpoch) {
  DataLoader loader(Counting(7), {.batch_size = 3, .num_workers = 1, .drop_last = true});
  EXPECT_EQ(loader.size(), std::nullopt);
  for (int epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(epoch_of(loader).size(), 2);
}

// ---- Errors

std::shared_ptr<Dataset> failing_at(int64_t bad) {
  return make_dataset(20, [bad](int64_t index) {
    if (index == bad) throw std::out_of_range("no sample here");
    return index;
  });
}

TEST(DataLoader, AnExceptionOfTheDatasetComesInItsPlaceAndTheNextBatchAfterIt) {
  for (const int64_t workers : {0, 2}) {
    DataLoader loader(failing_at(6), {.batch_size = 4, .num_workers = workers});
    loader.begin_epoch();
    EXPECT_TRUE(loader.next().has_value());
    try {
      loader.next();
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDataset);
      const std::string text = error.what();
      EXPECT_EQ(text.find("Caught std::out_of_range"), 0) << text;
      EXPECT_NE(text.find("(sample 6 of the dataset)\nno sample here"), std::string::npos) << text;
      EXPECT_EQ(text.find("in DataLoader worker thread") != std::string::npos, workers > 0) << text;
      EXPECT_THROW(std::rethrow_exception(error.cause()), std::out_of_range);
    }
    EXPECT_TRUE(at::equal(loader.next()->tensor(), at::arange(8, 12)));
    EXPECT_EQ(loader.stats().batches, 4 - 1);
  }
}

TEST(DataLoader, WhatIsNoStandardExceptionComesToo) {
  DataLoader loader(make_dataset(2, [](int64_t index) -> int64_t { throw index; }), {.num_workers = 1});
  std::string text;
  EXPECT_EQ(kind_of([&] { epoch_of(loader); }, &text), ErrorKind::kDataset);
  EXPECT_NE(text.find("Caught long"), std::string::npos) << text;
}

TEST(DataLoader, AnExceptionInTheLoopLeavesALoaderThatBeginsAgain) {
  DataLoader loader(numbers(100), {.batch_size = 2, .num_workers = 3});
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(
        {
          for (const Batch& batch : loader)
            if (batch.number() == round % 5) throw std::runtime_error("the program's own");
        },
        std::runtime_error);
  }
  EXPECT_EQ(epoch_of(loader).size(), 50);
}

TEST(DataLoader, ALoaderMayDieInTheMiddleOfAnEpoch) {
  for (int round = 0; round < 20; ++round) {
    Batch kept;
    {
      DataLoader loader(numbers(1000), {.batch_size = 7, .num_workers = 4});
      auto batch = loader.begin();
      kept = *++batch;
    }
    EXPECT_TRUE(at::equal(kept[1], at::arange(7, 14)));
  }
}

TEST(DataLoader, AnIteratorOfAnEarlierEpochIsRefused) {
  DataLoader loader(numbers(10), {.num_workers = 1});
  auto earlier = loader.begin();
  auto later = loader.begin();
  EXPECT_EQ(kind_of([&] { ++earlier; }), ErrorKind::kValue);
  EXPECT_EQ((*++later)[1].item<int64_t>(), 1);
}

TEST(DataLoader, ABatchThatIsLateIsATimeout) {
  std::atomic<bool> may_go{false};
  DataLoader loader(make_dataset(4,
                                 [&](int64_t index) {
                                   while (!may_go) std::this_thread::sleep_for(milliseconds(1));
                                   return index;
                                 }),
                    {.batch_size = 2, .num_workers = 1, .timeout = milliseconds(20)});
  loader.begin_epoch();
  std::string text;
  EXPECT_EQ(kind_of([&] { loader.next(); }, &text), ErrorKind::kTimeout);
  EXPECT_NE(text.find("timed out after 20 milliseconds"), std::string::npos);
  may_go = true;
}

TEST(DataLoader, ASamplersBadIndexIsNamed) {
  class Bad : public Sampler {
   public:
    void begin_epoch(int64_t) override {}
    std::optional<std::vector<int64_t>> next(int64_t) override { return std::vector<int64_t>{3, 10}; }
  };
  DataLoader loader(numbers(10), {.sampler = std::make_shared<Bad>(), .num_workers = 1});
  std::string text;
  kind_of([&] { epoch_of(loader); }, &text);
  EXPECT_NE(text.find("index 10 for a dataset of 10 samples, but must return indices from 0 to 9"), std::string::npos)
      << text;
}

TEST(DataLoader, OptionsWithoutMeaningAreRefused) {
  const auto refused = [](Options options) {
    EXPECT_EQ(kind_of([&] { DataLoader(numbers(4), options); }), ErrorKind::kValue);
  };
  refused({.batch_size = 0});
  refused({.shuffle = true, .sampler = std::make_shared<DistributedSampler>(4, DistributedSampler::Options{})});
  refused({.num_workers = -1});
  refused({.num_workers = 1, .prefetch_factor = 0});
  refused({.in_order = 0});
  refused({.in_order = 1});
  refused({.in_order = -1});
  refused({.shards = 2});
  refused({.prefetch_bytes = 5});
  refused({.batch_size = std::nullopt, .drop_last = true});
  refused({.timeout = milliseconds(-1)});
  EXPECT_EQ(kind_of([] { DataLoader(Counting(3), {.shuffle = true}); }), ErrorKind::kValue);
  EXPECT_EQ(kind_of([] { DataLoader(std::shared_ptr<Dataset>()); }), ErrorKind::kValue);
  EXPECT_EQ(kind_of([] { DataLoader(numbers(0), {.shuffle = true}); }), ErrorKind::kValue);
}

TEST(DataLoader, AProgramOfAnotherTorchIsRefused) {
  const TorchVersion other{.major = TORCH_VERSION_MAJOR, .minor = TORCH_VERSION_MINOR + 1};
  std::string text;
  EXPECT_EQ(kind_of([&] { DataLoader(numbers(4), {}, other); }, &text), ErrorKind::kUnsupported);
  EXPECT_NE(text.find("compiled with the headers of torch 2."), std::string::npos) << text;
}

TEST(DataLoader, AnEmptyDatasetHasNoBatches) {
  DataLoader loader(numbers(0), {.num_workers = 2});
  EXPECT_EQ(loader.size(), 0);
  EXPECT_TRUE(epoch_of(loader).empty());
}

TEST(DataLoader, AForkedChildIsToldAndEnds) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer starts no threads after a fork";
#endif
  DataLoader loader(numbers(100), {.batch_size = 4, .num_workers = 2});
  auto batch = loader.begin();
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      ++batch;
    } catch (const Error& error) {
      status = error.kind() == ErrorKind::kUnsupported ? 0 : 2;
    }
    { DataLoader dies(std::move(loader)); }
    DataLoader own(numbers(10), {.batch_size = 5, .num_workers = 1});
    if (status == 0 && epoch_of(own).size() != 2) status = 3;
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(at::equal((*++batch)[1], at::arange(4, 8)));
}

// ---- States

TEST(DataLoader, GoesOnFromAStateAtEveryBatchOfTwoEpochs) {
  constexpr size_t kBatchesOfEpoch = 6;
  const auto make = [](int64_t workers) {
    return DataLoader(noise(22), {.batch_size = 4, .shuffle = true, .num_workers = workers});
  };
  at::manual_seed(21);
  auto whole = make(2);
  std::vector<Batch> expected = epoch_of(whole);
  for (Batch& batch : epoch_of(whole)) expected.push_back(batch);
  for (size_t stop = 0; stop <= expected.size(); ++stop) {
    at::manual_seed(21);
    auto first = make(3);
    size_t count = 0;
    std::vector<Batch> batches;
    while (count < stop) {
      first.begin_epoch();
      while (count < stop) {
        auto batch = first.next();
        if (!batch) break;
        batches.push_back(*std::move(batch));
        ++count;
      }
    }
    const bool is_between = stop % kBatchesOfEpoch == 0;
    if (is_between && stop > 0) {
      EXPECT_FALSE(first.next().has_value());
    }
    const State state = State::from_json(first.state().to_json());
    at::manual_seed(99);
    auto second = make(1);
    second.load_state(state);
    while (batches.size() < expected.size())
      for (Batch& batch : epoch_of(second)) batches.push_back(batch);
    // The epoch after the one that is gone on with draws from the generator of its own process.
    const size_t same_count = stop < kBatchesOfEpoch ? kBatchesOfEpoch : expected.size();
    batches.resize(same_count);
    expect_same(batches, {expected.begin(), expected.begin() + static_cast<int64_t>(same_count)});
  }
}

TEST(DataLoader, AnIterableDatasetGoesOnWithItsStateAndWithout) {
  for (const bool has_state : {false, true}) {
    const auto make = [&](int64_t workers) {
      return DataLoader(Counting(23, has_state), {.batch_size = 2, .num_workers = workers, .shards = 3});
    };
    at::manual_seed(8);
    auto whole = make(2);
    const auto expected = epoch_of(whole);
    for (size_t stop = 1; stop < expected.size(); ++stop) {
      at::manual_seed(8);
      auto first = make(1);
      first.begin_epoch();
      std::vector<Batch> batches;
      while (batches.size() < stop) batches.push_back(*first.next());
      const std::string state = first.state().to_json();
      EXPECT_EQ(state.find("\"next\"") != std::string::npos, has_state);
      auto second = make(3);
      second.load_state(State::from_json(state));
      for (Batch& batch : epoch_of(second)) batches.push_back(batch);
      expect_same(batches, expected);
    }
  }
}

TEST(DataLoader, AGeneratorOfItsOwnIsPutBack) {
  auto generator = at::detail::createCPUGenerator(4);
  DataLoader first(numbers(20), {.batch_size = 5, .shuffle = true, .num_workers = 2, .generator = generator});
  first.begin_epoch();
  first.next();
  const State state = first.state();
  const Batch expected = *first.next();
  auto other = at::detail::createCPUGenerator(5);
  DataLoader second(numbers(20), {.batch_size = 5, .shuffle = true, .num_workers = 2, .generator = other});
  second.load_state(state);
  second.begin_epoch();
  EXPECT_TRUE(is_same(second.next()->value(), expected.value()));
}

TEST(DataLoader, ASamplerIsPulledToItsPlace) {
  const auto make = [] {
    const DistributedSampler::Options options{.num_replicas = 2, .rank = 1, .seed = 3};
    return DataLoader(numbers(20), {.batch_size = 3, .sampler = std::make_shared<DistributedSampler>(20, options)});
  };
  auto first = make();
  first.begin_epoch();
  first.next();
  auto second = make();
  second.load_state(first.state());
  second.begin_epoch();
  EXPECT_TRUE(is_same(second.next()->value(), first.next()->value()));
}

TEST(DataLoader, TwoLoadersGoOnFromOneState) {
  DataLoader first(noise(20), {.batch_size = 5, .shuffle = true});
  first.begin_epoch();
  first.next();
  const State state = first.state();
  const Batch expected = *first.next();
  for (int copy = 0; copy < 2; ++copy) {
    DataLoader later(noise(20), {.batch_size = 5, .shuffle = true, .num_workers = 2});
    later.load_state(state);
    later.begin_epoch();
    EXPECT_TRUE(is_same(later.next()->value(), expected.value()));
  }
}

TEST(DataLoader, AnOrderThatIsNotShuffledTakesNoMemory) {
  const auto dataset =
      make_dataset(std::numeric_limits<int64_t>::max(), [](int64_t index) { return at::full({}, index); });
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 1});
  loader.begin_epoch();
  EXPECT_TRUE(at::equal(loader.next()->value().tensor(), at::tensor({0, 1}, at::kLong)));
  DataLoader resumed(dataset, {.batch_size = 2, .num_workers = 1});
  resumed.load_state(loader.state());
  resumed.begin_epoch();
  EXPECT_TRUE(at::equal(resumed.next()->value().tensor(), at::tensor({2, 3}, at::kLong)));
}

TEST(DataLoader, TheStateOfAnotherStreamIsRefusedByName) {
  DataLoader first(numbers(20), {.batch_size = 5});
  first.begin_epoch();
  DataLoader second(numbers(20), {.batch_size = 4});
  std::string text;
  EXPECT_EQ(kind_of([&] { second.load_state(first.state()); }, &text), ErrorKind::kValue);
  EXPECT_EQ(text,
            "the state is of a loader with batch_size 5 and this one has batch_size 4, so its stream is another; build "
            "the loader as it was");
  for (const char* bad : {R"({"x": 1})", "[1]", "{", R"({"built": {}, "generators": {}, "version": 5})"})
    EXPECT_EQ(kind_of([&] { second.load_state(State::from_json(bad)); }), ErrorKind::kValue) << bad;
}

TEST(DataLoader, AnEmptyStateBeginsANewEpoch) {
  DataLoader loader(numbers(20), {.batch_size = 5});
  loader.begin_epoch();
  loader.next();
  loader.load_state(State());
  EXPECT_EQ(epoch_of(loader).size(), 4);
  EXPECT_EQ(State().to_json(), "{}");
}

}  // namespace
}  // namespace penstock
