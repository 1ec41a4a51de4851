// SPDX-License-Identifier: Apache-2.0
// DataLoader::reshard(): another number of ranks between two batches, while the workers stay. The oracles are the order
// that a loader without ranks reads, and loaders of the new size that resume from the state of the same step.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <penstock/penstock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock {
namespace {

constexpr int64_t kStepSize = 12;
constexpr int64_t kSteps = 9;
constexpr int64_t kSamples = kStepSize * kSteps - 4;

// Samples that draw, from both generators.
std::shared_ptr<Dataset> drawing_points() {
  return make_dataset(kSamples, [](int64_t index, Draws& draws) {
    return std::tuple(index, at::rand({2}, draws.sample_generator()), at::rand({1}, draws.batch_generator()));
  });
}

// The samples from the last to the first, and these once more.
class TwiceBackwards : public Sampler {
 public:
  void begin_epoch(int64_t) override {
    if (fails) throw std::runtime_error("no file of the sampler");
    given_ = 0;
  }
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
    if (given_ == 2 * kSamples) return std::nullopt;
    std::vector<int64_t> indices;
    for (; batch_size > 0 && given_ < 2 * kSamples; --batch_size) indices.push_back(kSamples - 1 - given_++ % kSamples);
    return indices;
  }
  std::optional<int64_t> size() const override { return 2 * kSamples; }

  bool fails = false;

 private:
  int64_t given_ = 0;
};

// The tensors of a step, of which each rank has some rows.
using Parts = std::vector<at::Tensor>;

Parts parts_of(const Batch& batch) { return {batch[0], batch[1], batch[2]}; }

// As one batch. The draws of the batch's generator are left out: they belong to a rank's batch.
Parts joined(const std::vector<Parts>& batches) {
  Parts whole;
  for (size_t part = 0; part < 2; ++part) {
    std::vector<at::Tensor> tensors;
    for (const Parts& batch : batches) tensors.push_back(batch[part]);
    whole.push_back(at::cat(tensors));
  }
  return whole;
}

void expect_equal(const Parts& left, const Parts& right) {
  ASSERT_EQ(left.size(), right.size());
  for (size_t part = 0; part < left.size(); ++part) EXPECT_TRUE(at::equal(left[part], right[part])) << "part " << part;
}

Options of_rank(Options options, int64_t rank, int64_t world_size) {
  options.shard_by_rank = true;
  options.rank = rank;
  options.world_size = world_size;
  if (options.sampler) options.sampler = std::make_shared<TwiceBackwards>();
  return options;
}

DataLoader make_rank(const Options& options, int64_t rank, int64_t world_size) {
  return DataLoader(drawing_points(), of_rank(options, rank, world_size));
}

Options in_steps(int64_t workers = 0) {
  return {.shuffle = true, .num_workers = workers, .global_batch_size = kStepSize, .remainder = Remainder::kUneven};
}

std::vector<Parts> rest_of(DataLoader& loader) {
  std::vector<Parts> batches;
  while (auto batch = loader.next()) batches.push_back(parts_of(*batch));
  return batches;
}

std::vector<Parts> epoch_of_rank(DataLoader& loader) {
  loader.begin_epoch();
  return rest_of(loader);
}

// The ranks of one size. Each takes its steps in a separate thread.
class Job {
 public:
  Job(Options options, int64_t world_size) : options_(std::move(options)) {
    for (int64_t rank = 0; rank < world_size; ++rank) {
      add(rank, world_size);
      loaders_.back()->begin_epoch();
    }
  }

  DataLoader& loader(size_t rank) { return *loaders_[rank]; }
  size_t size() const { return loaders_.size(); }

  // Returns the samples of the steps, in the order of the ranks; an empty step after the last one.
  std::vector<Parts> steps(int64_t count) {
    std::vector<std::vector<Parts>> of_ranks(loaders_.size());
    in_threads([&](size_t rank) {
      for (int64_t step = 0; step < count; ++step)
        if (auto batch = loaders_[rank]->next()) of_ranks[rank].push_back(parts_of(*batch));
    });
    std::vector<Parts> steps;
    for (size_t step = 0; step < of_ranks[0].size(); ++step) {
      std::vector<Parts> batches;
      for (const auto& of_rank : of_ranks) batches.push_back(of_rank.at(step));
      steps.push_back(joined(batches));
    }
    return steps;
  }

  // The ranks that stay get the numbers from `first` on, in turn; ranks that leave are destroyed, and others join.
  void reshard(int64_t world_size, int64_t first = 0, const State* state = nullptr) {
    const State of_now = state != nullptr ? *state : loaders_.back()->state();
    if (loaders_.size() > static_cast<size_t>(world_size)) loaders_.resize(static_cast<size_t>(world_size));
    in_threads([&](size_t at) {
      const int64_t rank = (first + static_cast<int64_t>(at)) % world_size;
      if (state != nullptr) return loaders_[at]->reshard(rank, world_size, *state);
      loaders_[at]->reshard(rank, world_size);
    });
    while (loaders_.size() < static_cast<size_t>(world_size)) {
      add((first + static_cast<int64_t>(loaders_.size())) % world_size, world_size);
      loaders_.back()->load_state(State::from_json(of_now.to_json()));
      loaders_.back()->begin_epoch();
    }
    std::rotate(loaders_.begin(), loaders_.begin() + (world_size - first % world_size) % world_size, loaders_.end());
  }

 private:
  void add(int64_t rank, int64_t world_size) {
    loaders_.push_back(std::make_unique<DataLoader>(make_rank(options_, rank, world_size)));
  }
  void in_threads(const std::function<void(size_t)>& work) {
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < loaders_.size(); ++rank) threads.emplace_back([&work, rank] { work(rank); });
  }

  Options options_;
  std::vector<std::unique_ptr<DataLoader>> loaders_;
};

// The indices of an epoch, as a loader without ranks reads them.
at::Tensor order_without_ranks(const Options& options) {
  Options plain{.batch_size = kStepSize, .shuffle = options.shuffle};
  plain.generator = at::detail::createCPUGenerator(0);
  if (options.sampler) plain.sampler = std::make_shared<TwiceBackwards>();
  DataLoader loader(drawing_points(), plain);
  std::vector<Parts> batches = epoch_of_rank(loader);
  return joined(batches)[0];
}

TEST(Reshard, RandomSizesDeliverTheOrderOfAnUnshardedRun) {
  constexpr int kSequences = 100;
  const auto seed = static_cast<uint64_t>(::testing::UnitTest::GetInstance()->random_seed());
  std::mt19937_64 random(seed);
  Options backwards{.global_batch_size = kStepSize, .remainder = Remainder::kUneven};
  backwards.sampler = std::make_shared<TwiceBackwards>();
  Options in_order = in_steps();
  in_order.shuffle = false;
  std::vector<Parts> expected;  // with the draws of each sample, of one rank
  const std::vector<Options> orders = {in_steps(), in_order, backwards};
  for (const Options& order : orders) {
    auto whole = make_rank(order, 0, 1);
    expected.push_back(joined(epoch_of_rank(whole)));
    EXPECT_TRUE(at::equal(expected.back()[0], order_without_ranks(order)));
  }
  for (int sequence = 0; sequence < kSequences; ++sequence) {
    const size_t order = random() % orders.size();
    Options options = orders[order];
    options.num_workers = static_cast<int64_t>(random() % 3);
    options.prefetch_factor = 1 + static_cast<int64_t>(random() % 3);
    Job job(options, 1 + static_cast<int64_t>(random() % 4));
    std::vector<Parts> given;
    for (;;) {
      const auto count = static_cast<int64_t>(random() % 4);
      std::vector<Parts> steps = job.steps(count);
      given.insert(given.end(), steps.begin(), steps.end());
      if (steps.size() < static_cast<size_t>(count)) break;
      const auto world_size = 1 + static_cast<int64_t>(random() % 4);
      job.reshard(world_size, static_cast<int64_t>(random() % 4));
    }
    expect_equal(joined(given), expected[order]);
    if (HasFailure()) FAIL() << "sequence " << sequence << " of seed " << seed;
  }
}

TEST(Reshard, RanksEqualRanksThatResume) {
  for (const Remainder remainder : {Remainder::kPad, Remainder::kDrop, Remainder::kUneven}) {
    const Options options{.batch_size = 5, .shuffle = true, .num_workers = 1, .remainder = remainder};
    Job job(options, 2);
    static_cast<void>(job.steps(3));
    const State state = job.loader(1).state();
    job.reshard(3);
    for (int64_t rank = 0; rank < 3; ++rank) {
      DataLoader& loader = job.loader(static_cast<size_t>(rank));
      auto resumed = make_rank(options, rank, 3);
      resumed.load_state(state);
      resumed.begin_epoch();
      EXPECT_EQ(loader.size(), resumed.size());
      EXPECT_EQ(loader.state().to_json(), state.to_json());
      expect_equal(parts_of(*loader.next()), parts_of(*resumed.next()));
      EXPECT_EQ(loader.state().to_json(), resumed.state().to_json());
      for (int epoch = 0; epoch < 2; ++epoch) {
        const auto mine = epoch == 0 ? rest_of(loader) : epoch_of_rank(loader);
        const auto other = epoch == 0 ? rest_of(resumed) : epoch_of_rank(resumed);
        ASSERT_EQ(mine.size(), other.size());
        for (size_t index = 0; index < mine.size(); ++index) expect_equal(mine[index], other[index]);
      }
    }
  }
}

// The ids of this process's threads that make batches.
std::set<std::string> data_threads() {
  std::set<std::string> ids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == "pk_data_worker") ids.insert(task.path().filename());
  }
  return ids;
}

TEST(Reshard, WorkerThreadsStay) {
  auto loader = make_rank(in_steps(3), 0, 2);
  loader.begin_epoch();
  static_cast<void>(loader.next());
  const auto threads = data_threads();
  EXPECT_EQ(threads.size(), 3);
  loader.reshard(0, 1);
  static_cast<void>(loader.next());
  loader.reshard(2, 4);
  EXPECT_EQ(rest_of(loader).size(), kSteps - 2);
  EXPECT_EQ(data_threads(), threads);
  loader.reshard(0, 1);
  EXPECT_EQ(epoch_of_rank(loader).size(), kSteps);
  EXPECT_EQ(data_threads(), threads);
}

TEST(Reshard, IteratorContinuesAndTheNextEpochHasTheNewSize) {
  auto whole = make_rank(in_steps(), 0, 1);
  const Parts first = joined(epoch_of_rank(whole));
  const Parts second = joined(epoch_of_rank(whole));
  auto left = make_rank(in_steps(1), 0, 2);
  auto right = make_rank(in_steps(1), 1, 2);
  right.begin_epoch();
  std::vector<Parts> given;
  for (const Batch& batch : left) {
    given.push_back(parts_of(batch));
    if (given.size() > 2) continue;
    given.push_back(parts_of(*right.next()));
    left.reshard(0, 1);
  }
  expect_equal(joined(given), first);
  EXPECT_FALSE(left.next().has_value());
  left.reshard(1, 2);  // between two epochs
  right.load_state(left.state());
  right.reshard(0, 2);
  const auto of_right = epoch_of_rank(right);
  const auto of_left = epoch_of_rank(left);
  given.clear();
  for (size_t step = 0; step < of_right.size(); ++step) given.insert(given.end(), {of_right[step], of_left.at(step)});
  expect_equal(joined(given), second);
}

TEST(Reshard, EarlierStateRepeatsSteps) {
  auto whole = make_rank(in_steps(), 0, 1);
  Job job(in_steps(1), 3);
  std::vector<Parts> given = job.steps(4);
  const State state = job.loader(0).state();
  static_cast<void>(job.steps(1));  // in which a rank dies
  job.reshard(2, 0, &state);
  for (Parts& step : job.steps(kSteps)) given.push_back(std::move(step));
  expect_equal(joined(given), joined(epoch_of_rank(whole)));
  const State between = job.loader(0).state();
  auto other = make_rank(in_steps(), 0, 2);
  other.reshard(0, 1, between);  // before its first epoch
  expect_equal(joined(epoch_of_rank(other)), joined(epoch_of_rank(whole)));
}

TEST(Reshard, NumbersChangeAfterAStateIsLoaded) {
  auto whole = make_rank(in_steps(), 0, 1);
  const std::vector<Parts> expected = epoch_of_rank(whole);
  auto loader = make_rank(in_steps(), 1, 2);
  loader.reshard(0, 1);
  loader.begin_epoch();
  expect_equal(parts_of(*loader.next()), expected[0]);
  auto other = make_rank(in_steps(), 1, 2);
  other.load_state(loader.state());
  other.reshard(0, 1);
  expect_equal(joined(epoch_of_rank(other)), joined({expected.begin() + 1, expected.end()}));
}

struct Refusal {
  Options options;
  int64_t rank;
  int64_t world_size;
  ErrorKind kind;
  std::string message;
};

ErrorKind error_of(const std::function<void()>& call, std::string& message) {
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorKind::kFailed;
}

TEST(Reshard, RefusedNumbersChangeNothing) {
  Options padded = in_steps(1);
  padded.remainder = Remainder::kPad;
  Options free = in_steps(1);
  free.in_order = false;
  Options window = in_steps(1);
  window.in_order = int64_t{4};
  const std::vector<Refusal> refusals = {
      {in_steps(), 2, 2, ErrorKind::kValue, "0 <= rank < world_size, got rank=2 and world_size=2"},
      {in_steps(), -1, 2, ErrorKind::kValue, "0 <= rank < world_size, got rank=-1 and world_size=2"},
      {in_steps(), 0, 0, ErrorKind::kValue, "0 <= rank < world_size, got rank=0 and world_size=0"},
      {in_steps(), 0, 13, ErrorKind::kValue, "global_batch_size is 12 and there are 13 ranks"},
      {padded, 0, 5, ErrorKind::kValue, "choose a multiple of 5"},
      {free, 0, 1, ErrorKind::kUnsupported, "reshard() with shard_by_rank requires in_order = true"},
      {window, 0, 1, ErrorKind::kUnsupported, "reshard() with shard_by_rank requires in_order = true"},
  };
  for (const Refusal& refusal : refusals) {
    auto loader = make_rank(refusal.options, 0, 2);
    auto twin = make_rank(refusal.options, 0, 2);
    std::vector<Parts> mine;
    loader.begin_epoch();
    mine.push_back(parts_of(*loader.next()));
    std::string message;
    EXPECT_EQ(error_of([&] { loader.reshard(refusal.rank, refusal.world_size); }, message), refusal.kind);
    EXPECT_NE(message.find(refusal.message), std::string::npos) << message;
    for (Parts& batch : rest_of(loader)) mine.push_back(std::move(batch));
    std::vector<Parts> other = epoch_of_rank(twin);
    EXPECT_EQ(mine.size(), other.size());
    const auto by_index = [](const Parts& left, const Parts& right) {
      return left[0][0].item<int64_t>() < right[0][0].item<int64_t>();
    };
    std::ranges::sort(mine, by_index);  // batches may overtake others with two of the options
    std::ranges::sort(other, by_index);
    expect_equal(joined(mine), joined(other));
  }
  std::string message;
  DataLoader alone(drawing_points(), {.batch_size = 4});
  EXPECT_EQ(error_of([&] { alone.reshard(0, 1); }, message), ErrorKind::kUnsupported);
  EXPECT_NE(message.find("reshard() requires shard_by_rank"), std::string::npos) << message;
}

TEST(Reshard, DeliveredStepsHaveToBeCommitted) {
  Options options = in_steps(1);
  options.commit = Commit::kManual;
  auto loader = make_rank(options, 0, 2);
  auto twin = make_rank(in_steps(), 0, 1);
  const std::vector<Parts> expected = epoch_of_rank(twin);
  loader.begin_epoch();
  const auto first = loader.next();
  std::string message;
  EXPECT_EQ(error_of([&] { loader.reshard(0, 1); }, message), ErrorKind::kUnsupported);
  EXPECT_NE(message.find("got 1 outstanding batches"), std::string::npos) << message;
  loader.commit(*first);
  loader.reshard(0, 1);
  const auto second = loader.next();
  expect_equal(parts_of(*second), expected[1]);
  EXPECT_EQ(loader.outstanding(), std::vector{second->id()});
  auto resumed = make_rank(options, 0, 1);
  resumed.load_state(loader.state());
  const std::vector<Parts> given = epoch_of_rank(resumed);
  ASSERT_EQ(given.size(), expected.size() - 1);
  for (size_t step = 0; step < given.size(); ++step) expect_equal(given[step], expected[step + 1]);
}

TEST(Reshard, RefusedStatesChangeNothing) {
  auto loader = make_rank(in_steps(1), 0, 1);
  auto whole = make_rank(in_steps(), 0, 1);
  const std::vector<Parts> expected = epoch_of_rank(whole);
  DataLoader other(make_dataset(7, [](int64_t index) { return index; }), of_rank(in_steps(), 0, 1));
  std::vector<Parts> given;
  for (const Batch& batch : loader) {
    given.push_back(parts_of(batch));
    std::string message;
    EXPECT_EQ(error_of([&] { loader.reshard(0, 2, other.state()); }, message), ErrorKind::kValue);
    EXPECT_NE(message.find("is of a loader with dataset length 7"), std::string::npos) << message;
    EXPECT_EQ(error_of([&] { loader.reshard(0, 2, State()); }, message), ErrorKind::kValue);
  }
  expect_equal(joined(given), joined(expected));
}

TEST(Reshard, FailingSamplerLeavesALoaderThatResumesAtTheOldSize) {
  Options options{.num_workers = 1, .global_batch_size = kStepSize, .remainder = Remainder::kUneven};
  options = of_rank(options, 0, 2);
  const auto sampler = std::make_shared<TwiceBackwards>();
  options.sampler = sampler;
  DataLoader loader(drawing_points(), options);
  options.sampler = std::make_shared<TwiceBackwards>();
  DataLoader twin(drawing_points(), options);
  loader.begin_epoch();
  std::vector<Parts> given = {parts_of(*loader.next())};
  const State state = loader.state();
  sampler->fails = true;
  EXPECT_THROW(loader.reshard(0, 1), std::runtime_error);
  sampler->fails = false;
  EXPECT_EQ(loader.state().to_json(), state.to_json());
  for (Parts& batch : epoch_of_rank(loader)) given.push_back(std::move(batch));
  expect_equal(joined(given), joined(epoch_of_rank(twin)));
}

TEST(Reshard, ForkedChildIsRefused) {
  auto loader = make_rank(in_steps(), 0, 2);
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      loader.reshard(0, 1);
    } catch (const Error& error) {
      status = error.kind() == ErrorKind::kUnsupported ? 0 : 2;
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// The children of this process.
std::set<std::string> child_processes() {
  std::set<std::string> pids;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream children(task.path() / "children");
    for (std::string pid; children >> pid;) pids.insert(pid);
  }
  return pids;
}

TEST(Reshard, WorkerProcessesStay) {
  const PluginDataset plugin{.path = std::string(PENSTOCK_TEST_BINARY_DIR) + "/libdraws_plugin.so",
                             .name = "draw",
                             .arguments = Value::dict({{"size", kSamples}})};
  auto whole = make_rank(in_steps(), 0, 1);
  DataLoader loader(plugin, of_rank(in_steps(2), 0, 2));
  loader.begin_epoch();
  std::vector<Parts> given = {parts_of(*loader.next())};
  const auto processes = child_processes();
  EXPECT_GE(processes.size(), 2);
  for (const int64_t world_size : {3, 1}) {
    loader.reshard(0, world_size);
    given.push_back(parts_of(*loader.next()));
  }
  const auto rest = rest_of(loader);
  EXPECT_EQ(child_processes(), processes);
  const std::vector<Parts> expected = epoch_of_rank(whole);
  ASSERT_EQ(rest.size(), kSteps - 3);
  expect_equal(joined(rest), joined({expected.begin() + 3, expected.end()}));
  EXPECT_TRUE(at::equal(given[1][0], expected[1][0].slice(0, 0, 4)));
}

}  // namespace
}  // namespace penstock
