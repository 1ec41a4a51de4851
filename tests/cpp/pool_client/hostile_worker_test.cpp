// SPDX-License-Identifier: Apache-2.0
// Workers of a pool that follow the protocol but for one field: an epoch ends right, or with an error that names the
// worker; never short, never hung. There is a case for each field of what a trainer reads of a worker, and the sizes of
// the fields add up to the records, so that a field without a case does not compile.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../wire/wrong_field.h"
#include "base/process.h"
#include "hostile_pool.h"

namespace penstock::pool_client {
namespace {

using wire::are_all;
using wire::kAllBits;
using wire::run_fields;
using wire::WrongField;
using Said = ToTrainer::Kind;

constexpr uint64_t kHostile = 5, kHonest = 6;
constexpr std::string_view kHostileName = "0000000000000005";

// ---- The records

// Of the head of every message.
constexpr WrongField kMessageFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: none", 6, 1, 0},
    {"kind: another that it is not", 6, 1, static_cast<uint64_t>(Said::kHandedBack)},
    {"kind: broken", 6, 1, static_cast<uint64_t>(Said::kBroken)},
    {"kind: refused", 6, 1, static_cast<uint64_t>(Said::kRefused)},
    {"kind: unknown", 6, 1, 11},
    {"flags: unknown", 7, 1, 0x80},
    {"flags: in a slab", 7, 1, 2},
    {"worker id", 8, 8, 77},
    {"link", 16, 4, 1'000'000},
    {"incarnation", 20, 4, kAllBits},
    {"stamp: none", 24, 8, 0},
    {"stamp: a later one", 24, 8, 1000},
    {"sequence", 32, 8, 999},
    {"sequence: a recall", 32, 8, wire::kRecallBit | 1},
    {"epoch", 40, 4, 99},
    {"record bytes: none", 44, 4, 0},
    {"record bytes: one", 44, 4, 1},
    {"record bytes: all", 44, 4, kAllBits},
    {"payload bytes: fewer", 48, 8, 300},
    {"payload bytes: more", 48, 8, uint64_t{1} << 30},
    {"payload bytes: beyond the cap", 48, 8, kAllBits},
    {"fetch time", 56, 4, kAllBits},
    {"prefix time", 60, 4, kAllBits},
    {"state bytes", 64, 4, 1'000'000},
    {"answer kind: none", 68, 1, 0},
    {"answer kind: error", 68, 1, 3},
    {"answer kind: unknown", 68, 1, 9},
    {"answer flags: raises", 69, 1, wire::kBatchRaises},
    {"answer flags: has state", 69, 1, wire::kBatchHasState},
    {"answer flags: unknown", 69, 1, 0x80},
    {"cpu share", 70, 1, 255},
    {"reserved", 71, 1, 1},
    {"sent at: the beginning", 72, 8, 0},
    {"sent at: never", 72, 8, kAllBits},
    {"cpu ns", 80, 8, kAllBits},
    {"energy uj", 88, 8, kAllBits - 1},
    {"sample count", 96, 4, kAllBits},
    {"dataset time", 100, 4, kAllBits},
    {"slowest place", 104, 2, kAllBits},
    {"slowest share", 106, 2, kAllBits},
    {"zero", 108, 4, 1},
    {"dataset size", 112, 8, 3},
};
static_assert(are_all(kMessageFields, wire::kToTrainerHeadBytes), "a field of the head has no case");

// Of a welcome behind its head. A link cannot begin without the rest; numerics only tell of a worker.
constexpr size_t kNumericsAt = 1 + wire::kSealNonceBytes;
constexpr WrongField kGrantFields[] = {
    {"cipher: none", 0, 1, 0},
    {"cipher: the other", 0, 1, 2},
    {"nonce", 1, wire::kSealNonceBytes, 0},
    {"numerics", kNumericsAt, sizeof(Numerics), kAllBits},
    {"data endpoint", kNumericsAt + sizeof(Numerics), 3, 0},
};
static_assert(are_all(kGrantFields, kNumericsAt + sizeof(Numerics) + 3), "a field of a grant has no case");

// Of an answer behind its head, where its batch lies in a slab.
constexpr WrongField kPlaceFields[] = {
    {"arena id", 0, 4, 99},
    {"slab index: another", 4, 4, 5},
    {"slab index: none of the arena", 4, 4, kAllBits},
    {"generation", 8, 4, kAllBits},
    {"transient", 12, 4, 1},
    {"transient: unknown", 12, 4, 2},
    {"slab bytes: none", 16, 8, 0},
    {"slab bytes: all", 16, 8, kAllBits},
};
static_assert(are_all(kPlaceFields, 24), "a field of a slab's place has no case");

// Of the record behind the batch: a header, an entry for its one tensor, and a nest.
constexpr WrongField kRecordFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"reserved", 6, 2, 1},
    {"tensor count", 8, 4, kAllBits},
    {"tensor count: none", 8, 4, 0},
    {"boundary count", 12, 4, kAllBits},
    {"boundary count: its only tensor", 12, 4, 1},
    {"payload bytes: more", 16, 8, 1 << 20},
    {"payload bytes: all", 16, 8, kAllBits},
    {"nest bytes", 24, 4, kAllBits},
    {"table bytes", 28, 4, kAllBits},
    {"entry: dtype", 32, 1, 200},
    {"entry: dimensions", 33, 1, 255},
    {"entry: encoding, withheld", 34, 1, 1},
    {"entry: encoding, narrow", 34, 1, 2},
    {"entry: encoding, shared", 34, 1, 8},
    {"entry: encoding, unknown", 34, 1, 99},
    {"entry: reserved", 35, 1, 1},
    {"entry: file", 36, 4, 1},
    {"entry: offset", 40, 8, 1 << 20},
    {"entry: offset, uneven", 40, 8, 1},
    {"entry: bytes", 48, 8, kAllBits},
    {"entry: size", 56, 8, kAllBits},
    {"entry: size, larger", 56, 8, 1 << 30},
    {"entry: stride", 64, 8, kAllBits},
    {"nest: tag", 72, 1, 99},
    {"nest: tensor", 73, 4, 7},
};
constexpr size_t kRecordBytes = 77;
static_assert(are_all(kRecordFields, kRecordBytes), "a field of the batch record has no case");

// Of a piece's head, under a seal that fits.
constexpr WrongField kPieceFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: a join", 6, 1, 1},
    {"kind: unknown", 6, 1, 9},
    {"reserved", 7, 1, 1},
    {"sender", 8, 8, 77},
    {"sender: nobody", 8, 8, 0},
    {"link", 16, 4, 99},
    {"epoch", 20, 4, 99},
    {"counter: none", 24, 8, 0},
    {"counter: a later one", 24, 8, 1000},
    {"sequence", 32, 8, 999},
    {"payload bytes: fewer", 40, 8, 1},
    {"payload bytes: more", 40, 8, 1 << 20},
    {"payload bytes: beyond the cap", 40, 8, kAllBits},
    {"payload offset: none", 48, 8, 0},
    {"payload offset: later", 48, 8, 364},
    {"payload offset: beyond the batch", 48, 8, kAllBits},
    {"reserved at the end", 56, 8, 1},
};
static_assert(are_all(kPieceFields, wire::kPieceHeadBytes), "a field of a piece's head has no case");

constexpr WrongField kBlobRequestFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: a piece", 6, 1, 2},
    {"kind: unknown", 6, 1, 3},
    {"reserved", 7, 1, 1},
    {"id", 8, 32, kAllBits},
    {"offset: beyond the blob", 40, 8, 1 << 20},
    {"offset: beyond the cap", 40, 8, kAllBits},
    {"total bytes", 48, 8, 1},
    {"zero", 56, 8, 1},
};
static_assert(are_all(kBlobRequestFields, wire::kBlobRecordBytes), "a field of a blob message has no case");

// ---- The runs

// Writes a field, and counts that.
struct Alteration {
  WrongField field;
  std::shared_ptr<std::atomic<int>> count = std::make_shared<std::atomic<int>>(0);  // shared by its copies

  void operator()(std::span<std::byte> bytes) const {
    write_field(bytes, field);
    count->fetch_add(1);
  }
};

// An epoch with the hostile worker alone, and one in which it has an honest one beside it, which is whole.
void expect_sound_with(HandWorker::Options hostile, const net::HandDataServer::Alteration& alter_head = {},
                       bool can_serve = true) {
  hostile.worker_id = kHostile;
  for (const bool is_alone : {true, false}) {
    if (is_alone && !can_serve) continue;
    SCOPED_TRACE(is_alone ? "alone" : "beside an honest one");
    if (!hostile.handover.empty()) hostile.handover = make_endpoint_name();
    HostilePool pool;
    pool.add(hostile, alter_head);
    if (!is_alone) pool.add({.worker_id = kHonest});
    pool.begin();
    pool.expect_sound(is_alone ? kHostileName : "");
  }
}

// Every message of this kind is wrong; of answers, that of the second batch.
void expect_sound_altering(Said of, const WrongField& field, size_t begin = 0, bool can_serve = true) {
  const Alteration alter{field};
  HandWorker::Options options;
  options.works_after_ping = of == Said::kPong;
  options.alter_message = [=](const ToTrainer& message, std::span<std::byte> bytes) {
    if (message.kind == of && (of != Said::kAnswer || message.key.sequence == 1)) alter(bytes.subspan(begin));
  };
  expect_sound_with(options, {}, can_serve);
  EXPECT_GT(alter.count->load(), 0);
}

TEST(HostileWorkers, WrongFieldOfAnAnswerIsMadeGoodOrNamed) {
  run_fields(kMessageFields, [](const WrongField& field) { expect_sound_altering(Said::kAnswer, field); });
}

TEST(HostileWorkers, WrongFieldOfAWelcomeLeavesItsWorkerOut) {
  run_fields(kMessageFields, [](const WrongField& field) { expect_sound_altering(Said::kWelcome, field, 0, false); });
}

TEST(HostileWorkers, WrongFieldOfAGrantLeavesItsWorkerOut) {
  run_fields(kGrantFields, [](const WrongField& field) {
    expect_sound_altering(Said::kWelcome, field, wire::kToTrainerHeadBytes, field.offset == kNumericsAt);
  });
}

TEST(HostileWorkers, WrongFieldOfTheNewsThatABatchWasBegunIsMadeGoodOrNamed) {
  run_fields(kMessageFields, [](const WrongField& field) { expect_sound_altering(Said::kStarted, field); });
}

TEST(HostileWorkers, WrongFieldOfAPongIsMadeGoodOrNamed) {
  run_fields(kMessageFields, [](const WrongField& field) { expect_sound_altering(Said::kPong, field); });
}

TEST(HostileWorkers, WrongFieldOfASlabsPlaceIsMadeGoodOrNamed) {
  run_fields(kPlaceFields, [](const WrongField& field) {
    const Alteration alter{field};
    HandWorker::Options options;
    options.handover = "a name, which each run has anew";
    options.alter_message = [=](const ToTrainer& message, std::span<std::byte> bytes) {
      const bool is_in_slab = message.kind == Said::kAnswer && wire::parse_to_trainer(bytes).value().place.has_value();
      if (is_in_slab && message.key.sequence == 1) alter(bytes.subspan(wire::kToTrainerHeadBytes));
    };
    expect_sound_with(options);
    EXPECT_GT(alter.count->load(), 0);
  });
}

TEST(HostileWorkers, WrongFieldOfABatchRecordIsMadeGoodOrNamed) {
  run_fields(kRecordFields, [](const WrongField& field) {
    const Alteration alter{field};
    HandWorker::Options options;
    options.make = [=](uint64_t sequence) {
      MadeBatch made = count_up(HostilePool::kBatchBytes, sequence);
      EXPECT_EQ(made.record_bytes, kRecordBytes);
      if (sequence == 1) alter(std::span(made.payload).last(made.record_bytes));
      return made;
    };
    expect_sound_with(options);
    EXPECT_GT(alter.count->load(), 0);
  });
}

TEST(HostileWorkers, WrongFieldOfAPieceIsMadeGoodOrNamed) {
  run_fields(kPieceFields, [](const WrongField& field) {
    const Alteration alter{field};
    expect_sound_with({}, [=](const wire::PieceHead& head, std::span<std::byte> bytes) {
      if (head.key.sequence == 1) alter(bytes);
    });
    EXPECT_GT(alter.count->load(), 0);
  });
}

TEST(HostileWorkers, WrongFieldOfAWishForABlobIsMadeGoodOrNamed) {
  run_fields(kBlobRequestFields, [](const WrongField& field) {
    const Alteration alter{field};
    HandWorker::Options options;
    options.wishes = HostilePool::job_id();
    options.alter_blob_request = alter;
    expect_sound_with(options);
    EXPECT_GT(alter.count->load(), 0);
  });
}

TEST(HostileWorkers, HonestWorkersGiveWholeEpochs) {
  HandWorker::Options in_slabs;
  in_slabs.handover = make_endpoint_name();
  for (const auto& options : {HandWorker::Options{}, in_slabs}) {
    HostilePool pool;
    pool.add(options);
    pool.begin();
    pool.expect_sound("");
  }
}

// The honest one came to nothing else than to the error that ended the epoch.
TEST(HostileWorkers, WorkerOfWhichAllIsWrongIsAskedForNothingAnyMoreOnceAnotherIsThere) {
  std::atomic<bool> may_work{false};
  HostilePool pool;
  pool.add({.worker_id = kHostile, .make = [](uint64_t sequence) {
              MadeBatch made = count_up(HostilePool::kBatchBytes, sequence);
              made.payload[made.payload.size() - made.record_bytes] = std::byte{0};  // the record's magic number
              return made;
            }});
  pool.add({.worker_id = kHonest, .may_work = [&] { return may_work.load(); }});
  pool.begin();
  EXPECT_TRUE(pool.is_told("receives no more requests, because a batch record is malformed"));
  may_work.store(true);
  pool.expect_sound("");
}

TEST(HostileWorkers, WorkerThatSaysThatItsProcessDiedOfEachBatchHoldsNoneUp) {
  HandWorker::Options options{.worker_id = kHostile};
  options.alter_message = [](const ToTrainer& message, std::span<std::byte> bytes) {
    if (message.kind == Said::kStarted) bytes[6] = static_cast<std::byte>(Said::kDied);
  };
  HostilePool pool;
  pool.add(options);
  pool.begin();
  pool.expect_sound("3 workers in a row died");
}

// It was raised when the batch was read, though nothing that the trainer asked for lets leaves stay behind.
TEST(HostileWorkers, LeafThatIsLeftOutThoughNoneMayIsMadeGoodOrNamed) {
  HandWorker::Options options;
  options.make = [](uint64_t sequence) {
    MadeBatch made = count_up(HostilePool::kBatchBytes, sequence);
    if (sequence != 1) return made;
    wire::NestWriter nest;
    nest.tensor(0);
    const auto record = wire::write_frame(
        {.tensors = {{.dtype = 0, .encoding = wire::Encoding::kWithheld, .shape = {1000}, .strides = {1}}},
         .boundary_keys = {},
         .nest = nest.view()});
    made.payload.assign(record.begin(), record.end());
    made.record_bytes = static_cast<uint32_t>(record.size());
    return made;
  };
  expect_sound_with(options);
}

// It was raised when the batch was read, in its place, though an honest worker was there.
TEST(HostileWorkers, ValueThatPythonCannotMakeIsMadeGoodOrNamed) {
  HandWorker::Options options;
  options.make = [](uint64_t sequence) {
    MadeBatch made = count_up(HostilePool::kBatchBytes, sequence);
    if (sequence != 1) return made;
    wire::Frame frame = wire::parse_frame(std::span(made.payload).last(made.record_bytes)).value();
    wire::NestWriter nest;
    nest.list(2), nest.tensor(0), nest.text("\xff");
    frame.nest = nest.view();
    const auto record = wire::write_frame(frame);
    made.payload.resize(frame.payload_bytes);
    made.payload.insert(made.payload.end(), record.begin(), record.end());
    made.record_bytes = static_cast<uint32_t>(record.size());
    return made;
  };
  expect_sound_with(options);
}

TEST(HostileWorkers, EndOfAShardWithoutShardsIsNoAnswer) { expect_sound_with({.ends_at = 1}); }

TEST(HostileWorkers, AnotherLengthThanTheOneThatTheEpochIsReadByNamesBoth) {
  HostilePool pool;
  pool.add({.worker_id = kHostile});
  pool.begin({.size = 3, .by = "0000000000000006"});
  const auto batch = pool.first_batch();
  ASSERT_TRUE(batch);
  ASSERT_TRUE(batch->record().remote_error());
  EXPECT_NE(batch->record().remote_error()->worker.find(kHostileName), std::string::npos);
  EXPECT_NE(batch->record().remote_error()->text.find("the dataset of worker 0000000000000006"), std::string::npos)
      << batch->record().remote_error()->text;
}

TEST(HostileWorkers, AnotherKindOfDatasetThanTheOneThatTheEpochIsReadByNamesBoth) {
  struct Kinds {
    uint64_t own, others;
    const char* text;
  };
  for (const Kinds& kinds : {Kinds{wire::kNoSize, 3,
                                   "its dataset has no length, because it is iterable, but the dataset of worker "
                                   "0000000000000006, which determines this epoch, has 3 samples"},
                             Kinds{3, wire::kNoSize,
                                   "its dataset has 3 samples, but the dataset of worker 0000000000000006, which "
                                   "determines this epoch, has no length, because it is iterable"}}) {
    HostilePool pool;
    pool.add({.worker_id = kHostile, .dataset_size = kinds.own});
    pool.begin({.size = kinds.others, .by = "0000000000000006"});
    const auto batch = pool.first_batch();
    ASSERT_TRUE(batch);
    ASSERT_TRUE(batch->record().remote_error());
    EXPECT_NE(batch->record().remote_error()->worker.find(kHostileName), std::string::npos);
    EXPECT_NE(batch->record().remote_error()->text.find(kinds.text), std::string::npos)
        << batch->record().remote_error()->text;
  }
}

TEST(HostileWorkers, WorkersOfOneKindOfDatasetGiveWholeEpochs) {
  for (const uint64_t size : {uint64_t{3}, wire::kNoSize}) {
    HostilePool pool;
    pool.add({.worker_id = kHonest, .dataset_size = size});
    pool.begin({.size = size, .by = "0000000000000005"});
    pool.expect_sound("");
  }
}

// The bytes of an answer counted as a batch's before it was known to be one, and raised what is thought likely of all
// workers. The trainer's report tells: the bytes in flight are as many of the largest batch as were asked for.
TEST(HostileWorkers, AnswerThatIsNoBatchIsNotTheLargestThatHasCome) {
  std::atomic<int> made_count{0};
  std::atomic<bool> is_refused{false};
  std::promise<uint64_t> bytes_in_flight;
  HandWorker::Options options{.worker_id = kHostile, .piece_bytes = 1 << 20};
  options.may_work = [&] { return made_count.load() == 0; };
  options.make = [&](uint64_t) {
    made_count.fetch_add(1);
    MadeBatch made = count_up(8 << 20, 0);
    made.payload[made.payload.size() - made.record_bytes] = std::byte{0};  // of the record's magic
    return made;
  };
  HostilePool pool;
  pool.start_controller([&, count = 0](const wire::TrainerReport& report, int) mutable {
    // The second report that comes after the refusal was made after it, too.
    if (is_refused.load() && report.queue.asked_batches > 0 && ++count == 2)
      bytes_in_flight.set_value(report.queue.bytes_in_flight);
    return wire::write_control(wire::TrainerRoster{.controller_id = 11, .view = 5, .is_settled = true});
  });
  pool.add(options);
  pool.begin();
  ASSERT_TRUE(pool.is_told("is being reconnected"));
  is_refused.store(true);
  auto told = bytes_in_flight.get_future();
  ASSERT_EQ(told.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_EQ(told.get(), 0u);
}

// 16 tensors over the same bytes, each of 63 times as many, were 1,000 times what had come.
TEST(HostileWorkers, TensorsThatShareNarrowBytesTakeNoMoreMemoryThanThoseThatDoNot) {
  HandWorker::Options options;
  options.piece_bytes = 1 << 20;
  options.make = [](uint64_t) {
    constexpr uint64_t kRows = 16'128, kDistinct = 240, kNarrow = 4 + 4 * kRows + kDistinct * 4096;
    wire::Frame frame;
    wire::NestWriter nest;
    nest.list(16);
    MadeBatch made;
    made.payload.resize(align_up(kNarrow, wire::kPayloadAlignment));
    for (uint32_t index = 0; index < 16; ++index) {
      frame.tensors.push_back({.dtype = 0,
                               .encoding = wire::Encoding::kRows,
                               .bytes = kNarrow,
                               .shape = {static_cast<int64_t>(kRows), 4096},
                               .strides = {4096, 1}});
      nest.tensor(index);
    }
    const uint32_t distinct_count = kDistinct;
    std::memcpy(made.payload.data(), &distinct_count, sizeof distinct_count);
    frame.nest = nest.view();
    frame.payload_bytes = made.payload.size();
    const auto record = wire::write_frame(frame);
    made.record_bytes = static_cast<uint32_t>(record.size());
    made.payload.insert(made.payload.end(), record.begin(), record.end());
    return made;
  };
  const uint64_t before = HostilePool::resident_bytes();
  expect_sound_with(options);
  const uint64_t after = HostilePool::resident_bytes();
  EXPECT_LT(after - std::min(before, after), uint64_t{256} << 20);
}

}  // namespace
}  // namespace penstock::pool_client
