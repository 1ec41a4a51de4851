// SPDX-License-Identifier: Apache-2.0
// Batches delivered or committed in any order: a resumed loader delivers exactly the batches that are left, once each.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <penstock/penstock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

namespace penstock {
namespace {

constexpr int64_t kSize = 47;
constexpr int64_t kBatchSize = 3;

// Samples that draw, from both generators; every seventh takes long.
std::shared_ptr<Dataset> uneven(int64_t size = kSize) {
  return make_dataset(size, [](int64_t index, Draws& draws) {
    if (index % 7 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return std::tuple(index, at::rand({2}, draws.sample_generator()), at::rand({2}, draws.batch_generator()));
  });
}

std::string key_of(const Batch& batch) {
  std::string key;
  for (size_t part = 0; part < 3; ++part) {
    const at::Tensor values = batch[part].contiguous();
    key.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return key;
}

std::vector<std::string> sorted(std::vector<std::string> keys) {
  std::ranges::sort(keys);
  return keys;
}

// Every tenth index, round and round: an order that only the program knows.
class Zigzag : public Sampler {
 public:
  void begin_epoch(int64_t epoch) override { first_ = epoch, next_ = 0; }
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
    std::vector<int64_t> indices;
    for (; next_ < kSize && static_cast<int64_t>(indices.size()) < batch_size; ++next_)
      indices.push_back((first_ + next_ * 10) % kSize);
    return indices.empty() ? std::nullopt : std::optional(indices);
  }

 private:
  int64_t first_ = 0;
  int64_t next_ = 0;
};

struct Way {
  int64_t num_workers = 0;
  std::variant<bool, int64_t> in_order = true;
  bool has_sampler = false;
};
const std::vector<Way> kWays = {{},
                                {.num_workers = 2},
                                {.num_workers = 3, .in_order = false},
                                {.num_workers = 3, .in_order = 4},
                                {.num_workers = 2, .in_order = false, .has_sampler = true},
                                {.has_sampler = true}};

DataLoader make(const Way& way, Commit commit, std::shared_ptr<Dataset> dataset = uneven()) {
  return DataLoader(std::move(dataset), {.batch_size = kBatchSize,
                                         .shuffle = !way.has_sampler,
                                         .sampler = way.has_sampler ? std::make_shared<Zigzag>() : nullptr,
                                         .num_workers = way.num_workers,
                                         .generator = at::detail::createCPUGenerator(11),
                                         .in_order = way.in_order,
                                         .commit = commit});
}

std::vector<std::string> uninterrupted(const Way& way, int epochs) {
  auto loader = make({.has_sampler = way.has_sampler}, Commit::kNone);
  std::vector<std::string> keys;
  for (int epoch = 0; epoch < epochs; ++epoch)
    for (const Batch& batch : loader) keys.push_back(key_of(batch));
  return sorted(keys);
}

State through_json(const State& state) { return State::from_json(state.to_json()); }

std::string refusal(const std::function<void()>& call, ErrorKind kind = ErrorKind::kValue) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// ---- The window

TEST(Window, EachBatchComesOnceOverResumesInAnyOrderOfDelivery) {
  for (const Way& way : kWays) {
    const auto expected = uninterrupted(way, 1);
    std::mt19937_64 random(7);
    std::vector<std::string> keys;
    std::optional<State> state;
    for (bool is_over = false; !is_over;) {
      auto loader = make(way, Commit::kNone);
      if (state) loader.load_state(*state);
      loader.begin_epoch();
      for (uint64_t left = 1 + random() % 6; left > 0 && !is_over; --left) {
        const auto batch = loader.next();
        is_over = !batch;
        if (batch) keys.push_back(key_of(*batch));
      }
      state = through_json(loader.state());
    }
    EXPECT_EQ(sorted(keys), expected);
  }
}

TEST(Window, AtMostSoManyBatchesOvertakeTheOldest) {
  constexpr int64_t kWindow = 4;
  const auto dataset = make_dataset(64, [](int64_t index) {
    if (index % 16 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return index;
  });
  DataLoader loader(dataset, {.batch_size = 1, .num_workers = 4, .prefetch_factor = 4, .in_order = kWindow});
  int64_t next = 0;
  int64_t most = 0;
  std::set<int64_t> later;
  for (const Batch& batch : loader) {
    later.insert(batch.number());
    for (; later.contains(next); ++next) later.erase(next);
    most = std::max<int64_t>(most, static_cast<int64_t>(later.size()));
  }
  EXPECT_LE(most, kWindow);
  EXPECT_GT(most, 0) << "nothing overtook a batch of 60 ms";
  EXPECT_EQ(next, 64);
}

TEST(Window, ABatchHasTheNumberOfItsPlaceAfterAResume) {
  auto first = make({.num_workers = 1}, Commit::kManual);
  first.begin_epoch();
  std::vector<Batch> batches;
  for (int count = 0; count < 5; ++count) batches.push_back(*first.next());
  for (const int place : {1, 2, 4}) first.commit(batches[static_cast<size_t>(place)]);
  auto second = make({.num_workers = 3}, Commit::kNone);
  second.load_state(first.state());
  std::vector<int64_t> numbers;
  for (const Batch& batch : second) numbers.push_back(batch.number());
  ASSERT_GE(numbers.size(), 4);
  EXPECT_EQ(std::vector(numbers.begin(), numbers.begin() + 4), (std::vector<int64_t>{0, 3, 5, 6}));
}

TEST(Window, ABatchThatRaisedAnErrorIsMadeAgain) {
  auto may_fail = std::make_shared<std::atomic<bool>>(true);
  const auto dataset = make_dataset(12, [may_fail](int64_t index) {
    if (index == 3 && *may_fail) throw std::runtime_error("not now");
    return index;
  });
  const Options options{.batch_size = 2, .num_workers = 2, .in_order = false};
  DataLoader first(dataset, options);
  first.begin_epoch();
  std::vector<int64_t> numbers;
  int error_count = 0;
  for (int count = 0; count < 4; ++count) {
    try {
      numbers.push_back(first.next()->number());
    } catch (const Error&) {
      ++error_count;
    }
  }
  *may_fail = false;
  DataLoader second(dataset, options);
  second.load_state(through_json(first.state()));
  for (const Batch& batch : second) numbers.push_back(batch.number());
  std::ranges::sort(numbers);
  EXPECT_EQ(numbers, (std::vector<int64_t>{0, 1, 2, 3, 4, 5})) << error_count;
}

TEST(Window, RanksThatShareAnOrderRequireIt) {
  DataLoader loader(
      uneven(),
      {.batch_size = 2, .num_workers = 2, .in_order = false, .shard_by_rank = true, .rank = 0, .world_size = 2});
  EXPECT_NE(refusal([&] { loader.state(); }, ErrorKind::kUnsupported).find("set in_order = true"), std::string::npos);
}

// ---- Commits

// A program that finishes batches in random order, with some in flight.
class Loop {
 public:
  Loop(DataLoader& loader, uint64_t seed) : loader_(loader), random_(seed) {}

  // Runs `steps` steps of the epoch in progress. Returns whether the epoch is over.
  bool run(uint64_t steps) {
    for (; steps > 0; --steps) {
      auto batch = loader_.next();
      if (!batch) return true;
      flying_.push_back(*std::move(batch));
      finish(random_() % 6);
    }
    return false;
  }
  void finish(size_t most_left) {
    while (flying_.size() > most_left) {
      const auto one = flying_.begin() + static_cast<ptrdiff_t>(random_() % flying_.size());
      trained_.push_back(key_of(*one));
      if (random_() % 2 == 0)
        loader_.commit(*one);
      else
        loader_.commit(one->id());
      flying_.erase(one);
    }
  }
  const std::vector<std::string>& trained() const { return trained_; }
  const std::vector<Batch>& flying() const { return flying_; }

 private:
  DataLoader& loader_;
  std::mt19937_64 random_;
  std::vector<Batch> flying_;
  std::vector<std::string> trained_;
};

TEST(Commits, EachBatchIsCommittedOnceOverRandomInterruptions) {
  constexpr int kEpochs = 3;
  for (size_t number = 0; number < kWays.size(); ++number) {
    const Way& way = kWays[number];
    const auto expected = uninterrupted(way, kEpochs);
    std::mt19937_64 random(number);
    std::vector<std::string> trained;
    std::optional<State> state;
    int epoch = 0;
    while (epoch < kEpochs) {
      auto loader = make(way, Commit::kManual);
      if (state) loader.load_state(*state);
      Loop loop(loader, random());
      uint64_t steps = 1 + random() % 25;
      loader.begin_epoch();
      while (epoch < kEpochs && steps > 0) {
        const uint64_t now = std::min<uint64_t>(steps, 9);
        steps -= now;
        if (!loop.run(now)) continue;
        if (++epoch < kEpochs) loader.begin_epoch();
      }
      if (epoch == kEpochs) loop.finish(0);
      EXPECT_EQ(loader.outstanding().size(), loop.flying().size());
      trained.insert(trained.end(), loop.trained().begin(), loop.trained().end());
      state = through_json(loader.state());
    }
    EXPECT_EQ(sorted(trained), expected) << "way " << number;
  }
}

TEST(Commits, BatchesOfEarlierEpochsComeFirstAndInOrder) {
  for (const bool has_sampler : {false, true}) {
    auto loader = make({.num_workers = 2, .has_sampler = has_sampler}, Commit::kManual);
    std::vector<std::string> left;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (const Batch& batch : loader) {
        if (batch.number() % 5 == epoch)
          left.push_back(key_of(batch));
        else
          loader.commit(batch);
      }
    }
    loader.begin_epoch();
    for (int count = 0; count < 3; ++count) {
      const auto batch = loader.next();
      if (batch->number() != 1) {
        left.push_back(key_of(*batch));
      } else {
        loader.commit(*batch);
      }
    }
    const State state = through_json(loader.state());
    EXPECT_NE(state.to_json().find("\"version\":4"), std::string::npos) << state.to_json();
    std::vector<std::string> rest;
    while (const auto batch = loader.next()) rest.push_back(key_of(*batch));
    for (const Way& way : kWays) {
      if (way.has_sampler != has_sampler || way.in_order != Way().in_order) continue;
      auto resumed = make(way, Commit::kManual);
      resumed.load_state(state);
      std::vector<std::string> seen;
      std::vector<int64_t> epochs;
      for (const Batch& batch : resumed) {
        seen.push_back(key_of(batch));
        epochs.push_back(batch.id().epoch);
        resumed.commit(batch);
      }
      EXPECT_TRUE(std::ranges::is_sorted(epochs));
      std::vector<std::string> expected = left;
      expected.insert(expected.end(), rest.begin(), rest.end());
      EXPECT_EQ(seen, expected);
      EXPECT_TRUE(resumed.outstanding().empty());
    }
  }
}

TEST(Commits, AnEndedProgramRedeliversWhatIsLeft) {
  auto loader = make({}, Commit::kManual);
  std::vector<std::string> left;
  for (const Batch& batch : loader) {
    if (batch.number() < 3)
      left.push_back(key_of(batch));
    else
      loader.commit(batch);
  }
  auto resumed = make({.num_workers = 2}, Commit::kManual);
  resumed.load_state(through_json(loader.state()));
  std::vector<std::string> seen;
  for (const Batch& batch : resumed.redeliver()) {
    seen.push_back(key_of(batch));
    if (seen.size() < 3) resumed.commit(batch);
  }
  EXPECT_EQ(seen, left);
  EXPECT_EQ(resumed.outstanding(), (std::vector<BatchId>{{0, 2}}));
  for (const Batch& batch : resumed.redeliver()) ADD_FAILURE() << batch.number();

  auto last = make({}, Commit::kManual);
  last.load_state(through_json(resumed.state()));
  std::vector<int64_t> numbers;
  for (const Batch& batch : last.redeliver()) numbers.push_back(batch.id().batch);
  EXPECT_EQ(numbers, std::vector<int64_t>{2});
  int64_t count = 0;
  for (const Batch& batch : last) count += batch.id().epoch;
  EXPECT_EQ(count, 16) << "the next epoch has the number 1, and 16 batches";
}

TEST(Commits, OtherThreadsMayCommit) {
  auto loader = make({.num_workers = 3, .in_order = false}, Commit::kManual);
  std::vector<std::jthread> threads;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const Batch& batch : loader) {
      threads.emplace_back([&loader, batch] { loader.commit(batch); });
      static_cast<void>(loader.state());
    }
  }
  threads.clear();
  EXPECT_TRUE(loader.outstanding().empty());
}

TEST(Commits, AStateOfManyOutstandingBatchesIsSmall) {
  DataLoader loader(make_dataset(4096, [](int64_t index) { return index; }),
                    {.batch_size = 1, .num_workers = 2, .commit = Commit::kManual});
  loader.begin_epoch();
  std::vector<Batch> batches;
  for (int count = 0; count < 2048; ++count) batches.push_back(*loader.next());
  const size_t before = loader.state().to_json().size();
  for (size_t place = 1; place < batches.size(); place += 2) loader.commit(batches[place]);
  EXPECT_EQ(loader.outstanding().size(), 1024);
  EXPECT_LT(loader.state().to_json().size(), before + 10'000);
}

TEST(Commits, MisuseIsRefused) {
  auto loader = make({}, Commit::kManual);
  loader.begin_epoch();
  const Batch first = *loader.next();
  const Batch second = *loader.next();
  EXPECT_EQ(first.id(), (BatchId{0, 0}));
  loader.commit(first);
  EXPECT_EQ(refusal([&] { loader.commit(first); }),
            "BatchId(epoch=0, batch=0) is committed already; commit each batch once");
  EXPECT_EQ(refusal([&] {
              loader.commit(BatchId{0, 7});
            }),
            "BatchId(epoch=0, batch=7) must be a batch that was delivered, and not since this loader or its state was "
            "made; commit it after next() has returned it");
  EXPECT_NE(refusal([&] {
              loader.commit(BatchId{3, 0});
            }).find("must be a batch that was delivered"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              loader.commit(BatchId{0, -1});
            }).find("must be a batch that was delivered"),
            std::string::npos);
  EXPECT_EQ(refusal([&] { loader.commit(Batch(Value(3), 0)); }),
            "the batch must be one that FunctionDataset delivered, got a Batch that it did not deliver; pass the batch "
            "as next() returned it, or its id()");

  DataLoader other(TensorDataset({at::full({4, 2}, 1)}), {.commit = Commit::kManual});
  other.begin_epoch();
  const Batch foreign = *other.next();
  EXPECT_EQ(refusal([&] { loader.commit(foreign); }),
            "the batch was delivered by the loader TensorDataset, not by FunctionDataset; commit it to the loader that "
            "delivered it");

  loader.load_state(loader.state());
  EXPECT_EQ(refusal([&] { loader.commit(second); }),
            "batch BatchId(epoch=0, batch=1) was delivered before load_state(), which began another stream; commit the "
            "batches that were delivered since");

  auto plain = make({}, Commit::kNone);
  plain.begin_epoch();
  const Batch unnamed = *plain.next();
  EXPECT_NE(refusal([&] { plain.commit(unnamed); }, ErrorKind::kUnsupported).find("commit() requires commit=manual"),
            std::string::npos);
  EXPECT_NE(refusal([&] { plain.redeliver(); }, ErrorKind::kUnsupported).find("redeliver() requires"),
            std::string::npos);
  refusal([&] { static_cast<void>(unnamed.id()); }, ErrorKind::kUnsupported);
  EXPECT_TRUE(plain.outstanding().empty());
}

TEST(Commits, LoadersThatCannotRepeatBatchesAreRefused) {
  class Nothing : public IterableDataset {
   public:
    std::unique_ptr<SampleStream> open(const Shard&, Draws&) override { return nullptr; }
  };
  EXPECT_NE(refusal([] { DataLoader(Nothing(), {.commit = Commit::kManual}); }, ErrorKind::kUnsupported)
                .find("requires a map-style dataset"),
            std::string::npos);
}

// ---- Commits of ranks

// As Zigzag, with a size, which ranks need.
class SizedZigzag final : public Zigzag {
 public:
  std::optional<int64_t> size() const override { return kSize; }
};

struct RankWay {
  bool has_sampler = false;
  int64_t num_workers = 0;
  std::variant<bool, int64_t> in_order = true;
  Remainder remainder = Remainder::kUneven;
};

// A sample with its draws.
using Row = std::pair<int64_t, float>;

DataLoader make_rank(const RankWay& way, int64_t rank, int64_t world_size, Commit commit = Commit::kManual) {
  auto dataset = make_dataset(
      kSize, [](int64_t index, Draws& draws) { return std::pair(index, at::rand({1}, draws.sample_generator())); });
  return DataLoader(std::move(dataset), {.shuffle = !way.has_sampler,
                                         .sampler = way.has_sampler ? std::make_shared<SizedZigzag>() : nullptr,
                                         .num_workers = way.num_workers,
                                         .in_order = way.in_order,
                                         .commit = commit,
                                         .shard_by_rank = true,
                                         .rank = rank,
                                         .world_size = world_size,
                                         .global_batch_size = 6,
                                         .remainder = way.remainder});
}

std::vector<Row> rows_of(const Batch& batch) {
  std::vector<Row> rows;
  for (int64_t at = 0; at < batch[0].numel(); ++at)
    rows.emplace_back(batch[0][at].item<int64_t>(), batch[1][at].item<float>());
  return rows;
}

// The steps by their ids, each with its rows in ascending order.
using Steps = std::map<std::pair<int64_t, int64_t>, std::vector<Row>>;

Steps steps_of_one_rank(const RankWay& way, int epochs) {
  auto loader = make_rank({.has_sampler = way.has_sampler, .remainder = way.remainder}, 0, 1, Commit::kNone);
  Steps steps;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    int64_t step = 0;
    for (const Batch& batch : loader) {
      auto& rows = steps[{epoch, step++}] = rows_of(batch);
      std::ranges::sort(rows);
    }
  }
  return steps;
}

TEST(Commits, JobsOfAnyNumberOfRanksAreGivenUncommittedStepsOnce) {
  const RankWay ways[] = {{},
                          {.has_sampler = true},
                          {.num_workers = 2},
                          {.has_sampler = true, .num_workers = 2},
                          {.num_workers = 3, .in_order = false}};
  constexpr int kEpochs = 3;
  for (const RankWay& way : ways) {
    const Steps expected = steps_of_one_rank(way, kEpochs);
    std::mt19937_64 random(4);
    Steps trained;
    std::optional<State> state;
    for (int epoch = 0; epoch < kEpochs;) {
      const auto world_size = static_cast<int64_t>(1 + random() % 4);
      std::vector<DataLoader> loaders;
      for (int64_t rank = 0; rank < world_size; ++rank) loaders.push_back(make_rank(way, rank, world_size));
      std::map<std::pair<int64_t, int64_t>, std::vector<Batch>> flying;
      for (DataLoader& loader : loaders) {
        if (state) loader.load_state(through_json(*state));
        loader.begin_epoch();
      }
      const auto is_whole = [&](const auto& one) { return one.second.size() == loaders.size(); };
      const auto finish = [&](uint64_t percent) {
        for (auto one = flying.begin(); one != flying.end();) {
          if (!is_whole(*one) || random() % 100 >= percent) {
            ++one;
            continue;
          }
          auto& rows = trained[one->first];
          ASSERT_TRUE(rows.empty()) << "the step was committed before";
          for (const Batch& batch : one->second) {  // in another order than the ranks
            const auto part = rows_of(batch);
            rows.insert(rows.end(), part.begin(), part.end());
          }
          for (DataLoader& loader : loaders) loader.commit(one->second[0].id());
          std::ranges::sort(rows);
          one = flying.erase(one);
        }
      };
      for (uint64_t left = 1 + random() % 14; left > 0 && epoch < kEpochs; --left) {
        bool is_over = false;
        for (DataLoader& loader : loaders) {
          auto batch = loader.next();
          is_over = !batch;
          if (batch) flying[{batch->id().epoch, batch->id().batch}].push_back(*std::move(batch));
        }
        if (is_over && ++epoch < kEpochs)
          for (DataLoader& loader : loaders) loader.begin_epoch();
        finish(30);
      }
      if (epoch == kEpochs) finish(100);
      const std::string text = loaders[0].state().to_json();
      for (const DataLoader& loader : loaders) ASSERT_EQ(loader.state().to_json(), text) << "the state is the job's";
      state = State::from_json(text);
    }
    EXPECT_EQ(trained, expected);
  }
}

TEST(Commits, StepThatRanksCannotDivideIsRefused) {
  const RankWay way{.remainder = Remainder::kPad};
  for (const bool is_between : {false, true}) {
    auto loader = make_rank(way, 0, 2);
    loader.begin_epoch();
    while (auto batch = loader.next()) {
      if (batch->id().batch != 1) loader.commit(*batch);
      if (!is_between && batch->id().batch == 3) break;
    }
    const State state = loader.state();
    auto other = make_rank(way, 1, 3);
    other.load_state(state);
    const auto options = [](int64_t world_size, int64_t batch_size) {
      return Options{.batch_size = batch_size,
                     .shuffle = true,
                     .commit = Commit::kManual,
                     .shard_by_rank = true,
                     .rank = 0,
                     .world_size = world_size};
    };
    const auto dataset = make_dataset(kSize, [](int64_t index) { return index; });
    DataLoader four(dataset, options(4, 2));
    EXPECT_NE(refusal([&] { four.load_state(state); }).find("an uncommitted step of 6 samples, which 4 ranks"),
              std::string::npos);
    DataLoader two(dataset, options(2, 5));
    two.load_state(state);
    two.begin_epoch();
    const auto first = two.next();
    EXPECT_EQ(first->tensor().numel(), 3) << "a half of the step, and not a batch of 5";
    EXPECT_EQ(first->id().batch, 1);
  }
}

TEST(Commits, DamagedStatesOfRanksAreRefusedByName) {
  auto loader = make_rank({}, 0, 2);
  loader.begin_epoch();
  for (int count = 0; count < 4; ++count) {
    const auto batch = loader.next();
    if (count != 1) loader.commit(*batch);
  }
  const std::string whole = loader.state().to_json();
  const std::map<std::string, std::string> damages = {
      {"\"runs\":[]", "['runs'] must be a list with the run of step 1"},
      {"\"runs\":[[2,12,6]]", "must be a list with the run of step 1"},
      {"\"runs\":[[1,6,0]]", "['runs'][0][2] must be an integer from 1 to"},
      {"\"runs\":[[1,30,6]]", "must be a list whose step 1 has samples from 0 to 24"},
      {"\"runs\":[[0,47,9007199254740991]]", "['runs'][0][2] must be an integer from 1 to 47"},
  };
  const std::string part = "\"runs\":[[1,6,6]]";
  const size_t at = whole.find(part);
  ASSERT_NE(at, std::string::npos) << whole;
  for (const auto& [damage, message] : damages) {
    std::string text = whole;
    text.replace(at, part.size(), damage);
    auto resumed = make_rank({}, 1, 2);
    const std::string seen = refusal([&] { resumed.load_state(State::from_json(text)); });
    EXPECT_NE(seen.find(message), std::string::npos) << seen;
  }
}

TEST(Commits, DamagedStatesAreRefusedByName) {
  auto loader = make({}, Commit::kManual);
  for (const Batch& batch : loader)
    if (batch.number() > 1) loader.commit(batch);
  loader.begin_epoch();
  for (int count = 0; count < 4; ++count) {
    const auto batch = loader.next();
    if (count > 0) loader.commit(*batch);
  }
  const std::string whole = loader.state().to_json();
  EXPECT_NE(refusal([&] {
              auto plain = make({}, Commit::kNone);
              plain.load_state(State::from_json(whole));
            }).find("the state has batches of 1 earlier epochs that were delivered and not committed"),
            std::string::npos);
  const std::map<std::string, std::pair<std::string, std::string>> damages = {
      {"\"missing\":[0]", {"\"missing\":[4]", "state['left']['missing'][0] must be an integer from 0 to 3"}},
      {"\"through\":4", {"\"through\":400", "state['left']['through'] must be an integer from 0 to 16"}},
      {"\"missing\":[0", {"\"missing\":[0,1", "_sampler_iter_yielded is 3 but 2 batches were delivered"}},
      {"\"missing\"", {"\"absent\"", "state['left']['missing'] must be a list, got nothing"}},
      {"\"missing\":[0]}", {"\"missing\":{\"first\":0}}", "state['left']['missing']['bits'] must be base64 of bits"}},
      {"\"batches\":[[0", {"\"batches\":[[1", "must be an integer from 2 to"}},
      {"\"seed_epoch\":0", {"\"seed_epoch\":-1", "['seed_epoch'] must be an integer from 0"}},
      {"\"commits\":{\"epoch\":1", {"\"commits\":{\"epoch\":0", "['earlier'][0]['epoch'] must be an integer"}},
  };
  for (const auto& [part, damage] : damages) {
    std::string text = whole;
    const size_t at = text.find(part);
    ASSERT_NE(at, std::string::npos) << part << " in " << text;
    text.replace(at, part.size(), damage.first);
    auto resumed = make({}, Commit::kManual);
    const std::string seen = refusal([&] { resumed.load_state(State::from_json(text)); });
    EXPECT_NE(seen.find(damage.second), std::string::npos) << seen;
  }
}

}  // namespace
}  // namespace penstock
