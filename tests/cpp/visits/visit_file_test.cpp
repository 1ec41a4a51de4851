// SPDX-License-Identifier: Apache-2.0
#include "visits/visit_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>

namespace penstock::visits {
namespace {

using Indices = std::vector<int64_t>;

class VisitFileTest : public ::testing::Test {
 protected:
  VisitFileTest() {
    std::string name = (std::filesystem::temp_directory_path() / "visitsXXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    path_ = folder_ + "/visits.rank0of1";
  }
  ~VisitFileTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<VisitRecorder> open() {
    auto recorder = VisitRecorder::open(path_, {}, session_);
    EXPECT_TRUE(recorder) << recorder.error().message;
    return std::move(recorder).value();
  }

  // The indices of the batches in the file.
  std::vector<Indices> batches() {
    auto file = VisitFile::open(path_);
    EXPECT_TRUE(file);
    std::vector<Indices> found;
    const auto read = file.value().read([&](const RecordView& record, uint64_t) -> Result<void> {
      if (record.kind != RecordKind::kBatch) return {};
      auto batch = parse_batch(record);
      if (!batch) return batch.error();
      batch.value().append_to(found.emplace_back());
      return {};
    });
    EXPECT_TRUE(read);
    torn_bytes_ = file.value().torn_bytes();
    is_damaged_inside_ = file.value().is_damaged_inside();
    return found;
  }

  std::string bytes() {
    std::ifstream stream(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  void write(const std::string& bytes) { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }

  Hash root() {
    auto file = VisitFile::open(path_);
    return make_tree(file.value()).value().root;
  }

  std::string folder_;
  std::string path_;
  Session session_{.time_ns = 1, .dataset_size = 100, .loader = "penstock", .dataset = "d", .sampler = "s", .job = ""};
  uint64_t torn_bytes_ = 0;
  bool is_damaged_inside_ = false;
};

TEST_F(VisitFileTest, GivesBackTheIndices) {
  constexpr auto kMin = std::numeric_limits<int64_t>::min();
  constexpr auto kMax = std::numeric_limits<int64_t>::max();
  const std::vector<Indices> given = {
      {},         {5},         {3, 4, 5}, {5, 4, 3},       {kMin, kMax},   {kMax - 1, kMax},
      {-1, 0, 1}, {0, 255, 1}, {0, 256},  {7, 1 << 20, 9}, {kMax, kMin, 0}};
  auto recorder = open();
  for (size_t step = 0; step < given.size(); ++step)
    ASSERT_TRUE(recorder->append(0, static_cast<int64_t>(step), given[step], 0));
  EXPECT_EQ(batches(), given);  // while it is open
  recorder->close();
  EXPECT_EQ(batches(), given);
  EXPECT_EQ(torn_bytes_, 0u);
}

TEST_F(VisitFileTest, TakesFortyBytesAndTheIndicesWidth) {
  auto recorder = open();
  const uint64_t before = recorder->bytes();
  Indices run(1000);
  std::iota(run.begin(), run.end(), 77);
  ASSERT_TRUE(recorder->append(0, 0, run, 0));
  EXPECT_EQ(recorder->bytes() - before, 40u);
  Indices drawn(64);
  for (size_t place = 0; place < drawn.size(); ++place) drawn[place] = static_cast<int64_t>(place * 15'000);
  ASSERT_TRUE(recorder->append(0, 1, drawn, 0));
  EXPECT_EQ(recorder->bytes() - before, 40u + 40 + 3 * 64);
}

TEST_F(VisitFileTest, GrowsPastItsWindow) {
  auto recorder = open();
  std::mt19937_64 random(1);
  std::vector<Indices> given;
  for (int64_t step = 0; step < 400; ++step) {
    Indices& indices = given.emplace_back(step == 200 ? 700'000 : random() % 8000);
    for (int64_t& index : indices) index = static_cast<int64_t>(random());
    ASSERT_TRUE(recorder->append(0, step, indices, 0));
  }
  EXPECT_GT(recorder->bytes(), uint64_t{3} << 22);
  recorder->close();
  EXPECT_EQ(batches(), given);
  EXPECT_EQ(bytes().size(), recorder->bytes());
}

TEST_F(VisitFileTest, ContinuesAfterAnotherSession) {
  auto first = open();
  ASSERT_TRUE(first->append(2, 0, Indices{1}, 0));
  first->close();
  auto second = open();
  EXPECT_EQ(second->last_epoch(), 2);
  EXPECT_FALSE(second->has_last_ended());
  EXPECT_EQ(second->repair(), "");
  ASSERT_TRUE(second->append(2, 1, Indices{2}, 0));
  ASSERT_TRUE(second->end_epoch(2, 2));
  second->close();
  EXPECT_TRUE(open()->has_last_ended());
  EXPECT_EQ(batches(), (std::vector<Indices>{{1}, {2}}));
}

TEST_F(VisitFileTest, SessionsDoNotChangeTheRoot) {
  auto whole = open();
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(whole->append(0, step, Indices{step, 9}, 0));
  whole->close();
  const Hash expected = root();
  std::filesystem::remove(path_);
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(open()->append(0, step, Indices{step, 9}, 0));
  EXPECT_EQ(root(), expected);
}

TEST_F(VisitFileTest, EveryTruncationKeepsTheRecordsBefore) {
  {
    auto recorder = open();
    for (int64_t step = 0; step < 4; ++step) ASSERT_TRUE(recorder->append(0, step, Indices{step, 700, 3}, 0));
  }
  const std::string whole = bytes();
  const auto given = batches();
  for (size_t size = kHeaderBytes; size < whole.size(); ++size) {
    write(whole.substr(0, size));
    const auto left = batches();
    ASSERT_LT(left.size(), given.size() + 1);
    EXPECT_TRUE(std::equal(left.begin(), left.end(), given.begin())) << size;
    auto recorder = open();
    EXPECT_EQ(recorder->repair().empty(), torn_bytes_ == 0) << size;
    ASSERT_TRUE(recorder->append(1, 0, Indices{8}, 0));
    recorder->close();
    auto again = batches();
    EXPECT_EQ(again.size(), left.size() + 1) << size;
    EXPECT_EQ(torn_bytes_, 0u) << size;
  }
}

TEST_F(VisitFileTest, AChangedBitIsFoundAndNothingIsCutOff) {
  {
    auto recorder = open();
    for (int64_t step = 0; step < 5; ++step) ASSERT_TRUE(recorder->append(0, step, Indices{step, 700, 3}, 0));
  }
  const std::string whole = bytes();
  const size_t last_record = whole.size() - record_bytes(kBatchBytes + 3 * 2);
  for (size_t place = kHeaderBytes; place < last_record; ++place) {
    std::string changed = whole;
    changed[place] = static_cast<char>(changed[place] ^ 4);
    write(changed);
    batches();
    // The padding of a record is not covered, and does not matter.
    if (torn_bytes_ == 0) continue;
    EXPECT_TRUE(is_damaged_inside_) << place;
    const auto refused = VisitRecorder::open(path_, {}, session_);
    ASSERT_FALSE(refused) << place;
    EXPECT_NE(refused.error().message.find("it is damaged at byte"), std::string::npos);
    EXPECT_EQ(bytes(), changed);
  }
}

TEST_F(VisitFileTest, KilledProcessLeavesAllThatItHadRecorded) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto recorder = VisitRecorder::open(path_, {}, session_);
    for (int64_t step = 0;; ++step) {
      if (!recorder.value()->append(0, step, Indices{step, step * 3, 1}, 0)) ::_exit(1);
      if (::write(ends[1], &step, sizeof step) != sizeof step) ::_exit(1);
    }
  }
  ::close(ends[1]);
  int64_t last = 0;
  while (last < 5000 && ::read(ends[0], &last, sizeof last) == sizeof last) {
  }
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  while (::read(ends[0], &last, sizeof last) == sizeof last) {
  }
  ::close(ends[0]);
  const auto found = batches();
  ASSERT_GE(found.size(), static_cast<size_t>(last) + 1);
  EXPECT_LE(found.size(), static_cast<size_t>(last) + 2);  // the one that it was about to report
  for (size_t step = 0; step < found.size(); ++step) EXPECT_EQ(found[step][0], static_cast<int64_t>(step));
}

TEST_F(VisitFileTest, OneProcessRecordsAtATimeAndAForkedChildDoesNot) {
  open()->close();
  auto recorder = open();  // an existing file
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_refused = !VisitRecorder::open(path_, {}, session_) && !recorder->append(0, 0, Indices{1}, 0);
    ::_exit(is_refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_TRUE(recorder->append(0, 0, Indices{1}, 0));
}

TEST_F(VisitFileTest, OtherFilesAreRefusedAndStayAsTheyAre) {
  write("these are other bytes, longer than the header of a record of visits");
  EXPECT_EQ(VisitRecorder::open(path_, {}, session_).error().code, Errc::kMalformed);
  EXPECT_EQ(bytes().substr(0, 5), "these");
  auto header = header_of({});
  header[8] = std::byte{2};
  write({reinterpret_cast<const char*>(header.data()), header.size()});
  const auto newer = VisitFile::open(path_);
  ASSERT_FALSE(newer);
  EXPECT_NE(newer.error().message.find("version 2, this penstock reads 1"), std::string::npos);
  std::filesystem::remove(path_);
  open()->close();
  EXPECT_FALSE(VisitRecorder::open(path_, {.rank = 1, .world_size = 2}, session_));
}

TEST_F(VisitFileTest, StoredTreeIsUsedUntilTheFileGrows) {
  {
    auto recorder = open();
    for (int64_t step = 0; step < 100; ++step) ASSERT_TRUE(recorder->append(0, step, Indices{step, 2}, 0));
  }
  auto file = VisitFile::open(path_);
  EXPECT_FALSE(load_tree(file.value(), true));
  const auto made = make_tree(file.value());
  ASSERT_TRUE(store_tree(file.value(), made.value()));
  auto fresh = VisitFile::open(path_);
  const auto loaded = load_tree(fresh.value(), false);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded.value().root, made.value().root);
  EXPECT_EQ(loaded.value().tree.root(), made.value().root);
  EXPECT_EQ(loaded.value().session_offsets, made.value().session_offsets);
  EXPECT_EQ(load_tree(fresh.value(), true).value().leaf_count, 100u);
  const auto leaf = leaf_reader(fresh.value(), loaded.value());
  EXPECT_TRUE(proves_inclusion(leaf(57), 57, 100, loaded.value().tree.inclusion(57, 100, leaf), made.value().root));
  ASSERT_TRUE(open()->append(1, 0, Indices{1}, 0));
  auto grown = VisitFile::open(path_);
  EXPECT_FALSE(load_tree(grown.value(), true));
  std::ofstream(path_ + ".tree", std::ios::in | std::ios::binary).seekp(200) << "damage";
  EXPECT_FALSE(load_tree(fresh.value(), false));
}

TEST_F(VisitFileTest, FullDiskIsAnErrorOfTheBatch) {
  auto recorder = open();
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {.rlim_cur = 5 << 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  Indices indices(100'000);
  for (size_t place = 0; place < indices.size(); ++place) indices[place] = static_cast<int64_t>(place * place);
  size_t count = 0;
  Result<void> last;
  for (; count < 100 && last; ++count) last = recorder->append(0, static_cast<int64_t>(count), indices, 0);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FALSE(last);
  EXPECT_NE(last.error().message.find("it cannot grow: File too large"), std::string::npos) << last.error().message;
  recorder->close();
  EXPECT_EQ(batches().size(), count - 1);
}

}  // namespace
}  // namespace penstock::visits
