// SPDX-License-Identifier: Apache-2.0
// Workers of a pool that follow the protocol but for one field: an epoch ends right, or with an error that names the
// worker; never short, never hung. There is a case for each field of what a trainer reads of a worker, and the sizes of
// the fields add up to the records, so that a field without a case does not compile.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "../net/pool_sockets.h"
#include "hand_worker.h"
#include "loader/pool_client.h"
#include "loader/stream.h"

namespace penstock::loader {
namespace {

using Event = Client::Event;
using net::Role;
using Said = ToTrainer::Kind;

// What a field is set to, in the record at this place.
struct Field {
  const char* name;
  size_t offset;
  size_t bytes;
  uint64_t value;
  Said of = Said::kAnswer;  // of a message: the kind of it that has the value
};

std::ostream& operator<<(std::ostream& out, const Field& field) { return out << field.name; }

void write_field(std::span<std::byte> record, const Field& field) {
  ASSERT_LE(field.offset + field.bytes, record.size());
  for (size_t place = 0; place < field.bytes; place += sizeof field.value)
    std::memcpy(record.data() + field.offset + place, &field.value, std::min(sizeof field.value, field.bytes - place));
}

// Whether the fields, in the order of their places, leave out no byte of a record.
constexpr bool are_all(std::span<const Field> fields, size_t record_bytes) {
  size_t end = 0;
  for (const Field& field : fields) {
    if (field.offset > end) return false;
    end = std::max(end, field.offset + field.bytes);
  }
  return end == record_bytes;
}

constexpr uint64_t kMost = ~uint64_t{0};
constexpr uint64_t kHostile = 5, kHonest = 6;

// ---- The records

constexpr Field kMessageFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: none", 6, 1, 0},
    {"kind: another that it is not", 6, 1, static_cast<uint64_t>(Said::kHandedBack)},
    {"kind: broken", 6, 1, static_cast<uint64_t>(Said::kBroken)},
    {"kind: refused", 6, 1, static_cast<uint64_t>(Said::kRefused)},
    {"flags: unknown", 7, 1, 0x80},
    {"flags: in a slab", 7, 1, 2},
    {"worker id", 8, 8, 77},
    {"link", 16, 4, 1'000'000},
    {"incarnation", 20, 4, kMost},
    {"stamp: none", 24, 8, 0},
    {"stamp: a later one", 24, 8, 1000},
    {"sequence", 32, 8, 999},
    {"sequence: a recall", 32, 8, wire::kRecallBit | 1},
    {"epoch", 40, 4, 99},
    {"record bytes: none", 44, 4, 0},
    {"record bytes: one", 44, 4, 1},
    {"record bytes: all", 44, 4, kMost},
    {"payload bytes: fewer", 48, 8, 300},
    {"payload bytes: more", 48, 8, uint64_t{1} << 30},
    {"payload bytes: beyond the cap", 48, 8, kMost},
    {"fetch time", 56, 4, kMost},
    {"prefix time", 60, 4, kMost},
    {"state bytes", 64, 4, 1'000'000},
    {"answer kind: none", 68, 1, 0},
    {"answer kind: error", 68, 1, 3},
    {"answer kind: unknown", 68, 1, 9},
    {"answer flags: raises", 69, 1, wire::kDescriptorRaises},
    {"answer flags: has state", 69, 1, wire::kDescriptorHasState},
    {"answer flags: unknown", 69, 1, 0x80},
    {"cpu share", 70, 1, 255},
    {"reserved", 71, 1, 1},
    {"sent at: the beginning", 72, 8, 0},
    {"sent at: never", 72, 8, kMost},
    {"cpu ns", 80, 8, kMost},
    {"energy uj", 88, 8, kMost - 1},
    {"sample count", 96, 4, kMost},
    {"dataset time", 100, 4, kMost},
    {"slowest place", 104, 2, kMost},
    {"slowest share", 106, 2, kMost},
    {"zero", 108, 4, 1},
    {"dataset size", 112, 8, 3},
};
static_assert(are_all(kMessageFields, wire::kToTrainerHeadBytes), "a field of the head has no case");

// The same of the other messages that a link needs.
constexpr Field kOtherMessages[] = {
    {"sequence", 32, 8, 999, Said::kStarted},
    {"stamp", 24, 8, 0, Said::kStarted},
    {"kind: unknown", 6, 1, 77, Said::kStarted},
    {"stamp", 24, 8, 1000, Said::kPong},
};

// What a link cannot begin without: its worker is never asked for anything.
constexpr size_t kGrantAt = wire::kToTrainerHeadBytes;
constexpr Field kWelcomeFields[] = {
    {"cipher: none", kGrantAt, 1, 0, Said::kWelcome},
    {"cipher: the other", kGrantAt, 1, 2, Said::kWelcome},
    {"nonce", kGrantAt + 1, wire::kSealNonceBytes, 0, Said::kWelcome},
    {"data endpoint", kGrantAt + 1 + wire::kSealNonceBytes, 3, 0, Said::kWelcome},
    {"worker id", 8, 8, 77, Said::kWelcome},
    {"link", 16, 4, 1'000'000, Said::kWelcome},
    {"stamp", 24, 8, 1000, Said::kWelcome},
    {"kind: pong", 6, 1, static_cast<uint64_t>(Said::kPong), Said::kWelcome},
};

// Of the record behind the batch: a header, an entry for its one tensor, and a nest.
constexpr Field kRecordFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"reserved", 6, 2, 1},
    {"tensor count", 8, 4, kMost},
    {"tensor count: none", 8, 4, 0},
    {"boundary count", 12, 4, kMost},
    {"boundary count: its only tensor", 12, 4, 1},
    {"payload bytes: more", 16, 8, 1 << 20},
    {"payload bytes: all", 16, 8, kMost},
    {"nest bytes", 24, 4, kMost},
    {"table bytes", 28, 4, kMost},
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
    {"entry: bytes", 48, 8, kMost},
    {"entry: size", 56, 8, kMost},
    {"entry: size, larger", 56, 8, 1 << 30},
    {"entry: stride", 64, 8, kMost},
    {"nest: tag", 72, 1, 99},
    {"nest: tensor", 73, 4, 7},
};
constexpr size_t kRecordBytes = 77;
static_assert(are_all(kRecordFields, kRecordBytes), "a field of the batch record has no case");

// Those of a piece's head that its sealer does not set. A wrong one of the others is AlteredWire's in
// net/data_sockets_test.cpp.
struct PieceField {
  const char* name;
  void (*alter)(wire::PieceHead&);
};
std::ostream& operator<<(std::ostream& out, const PieceField& field) { return out << field.name; }
constexpr PieceField kPieceFields[] = {
    {"epoch", [](wire::PieceHead& head) { head.key.epoch = 99; }},
    {"sequence", [](wire::PieceHead& head) { head.key.sequence = 999; }},
    {"payload bytes: fewer", [](wire::PieceHead& head) { head.payload_bytes = 1; }},
    {"payload bytes: more", [](wire::PieceHead& head) { head.payload_bytes = 1 << 20; }},
    {"payload bytes: beyond the cap", [](wire::PieceHead& head) { head.payload_bytes = kMost; }},
    {"payload offset: later", [](wire::PieceHead& head) { head.payload_offset += 64; }},
    {"payload offset: none", [](wire::PieceHead& head) { head.payload_offset = 0; }},
};

constexpr Field kWishFields[] = {
    {"magic", 0, 4, 0},
    {"version", 4, 2, 99},
    {"kind: a piece", 6, 1, 2},
    {"kind: unknown", 6, 1, 3},
    {"reserved", 7, 1, 1},
    {"id", 8, 32, kMost},
    {"offset: beyond the blob", 40, 8, 1 << 20},
    {"offset: beyond the cap", 40, 8, kMost},
    {"total bytes", 48, 8, 1},
    {"zero", 56, 8, 1},
};
static_assert(are_all(kWishFields, wire::kBlobRecordBytes), "a field of a blob message has no case");

// ---- The runs

class HostileWorkers : public net::PoolSocketsTest {
 protected:
  static constexpr int kBatchCount = 3;
  static constexpr uint64_t kBatchBytes = 1000;

  ~HostileWorkers() override { stop(); }

  void stop() {
    stream_.reset();
    if (client_) client_->stop();
    client_.reset();
    for (const auto& worker : workers_) worker->end();
    workers_.clear();
    own_.clear();
  }

  void add(HandWorker::Options options) {
    auto server = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
    own_.push_back({.worker_id = options.worker_id, .endpoint = server->endpoint()});
    auto data = net::DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0},
                                      {.worker_id = options.worker_id}, [] {})
                    .value();
    workers_.push_back(std::make_unique<HandWorker>(std::move(server), std::move(data), std::move(options)));
  }

  void begin(PoolIoOptions::SaidSize said_size = {}) {
    auto source = std::make_unique<PoolSource>(PoolIoOptions{.controller = free_endpoint(),
                                                             .keys = keys_.ring(Role::kTrainer),
                                                             .job = "a test",
                                                             .about = "",
                                                             .worker_count_max = 2,
                                                             .credit_bytes = 1 << 24,
                                                             .arena_bytes = 1 << 24,
                                                             .said_size = std::move(said_size)},
                                               7, keys_.ring(Role::kTrainer), own_);
    PoolSource& pool = *source;
    client_ = std::make_shared<PoolClient>(ClientOptions{.worker_count = 1, .shard_count = 1, .keep_workers = true},
                                           pool, std::move(source));
    wire::BlobId id{};
    id[0] = std::byte{9};
    client_->put_blob(id, "the job");
    client_->use_blobs({id});
    ASSERT_TRUE(client_->start());
    stream_ = std::make_unique<Stream>(client_, StreamOptions{.is_seeded_by_batch = true});
    TorchSamplerOptions order;
    order.sample_count = kBatchCount;
    stream_->begin_epoch({}, order);
  }

  static bool is_right(Batch& batch) {
    const auto& tensors = batch.tensors();
    if (tensors.size() != 1 || static_cast<uint64_t>(tensors[0].numel()) != kBatchBytes) return false;
    const auto* data = tensors[0].const_data_ptr<uint8_t>();
    for (uint64_t place = 0; place < kBatchBytes; ++place)
      if (data[place] != static_cast<uint8_t>(batch.descriptor().sequence + place % 256)) return false;
    return true;
  }
  static bool names_worker(std::string_view text) { return text.find("0000000000000005") != std::string_view::npos; }

  // An epoch ends with its last batch, or with an error that names the worker; `is_whole`: with its last batch alone.
  void expect_sound(bool is_whole) {
    const auto deadline = Clock::now() + kPatience;
    for (int count = 0; count <= kBatchCount;) {
      Event event = stream_->next(Clock::now() + std::chrono::milliseconds(100));
      if (event.kind == Event::Kind::kNews) news_ += event.message();
      ASSERT_TRUE(event.kind != Event::Kind::kNothing || Clock::now() < deadline) << "hung after " << count << news_;
      if (event.kind == Event::Kind::kFailed) {
        EXPECT_TRUE(!is_whole && names_worker(event.message())) << event.message();
        return;
      }
      if (event.kind == Event::Kind::kEnd) {
        EXPECT_EQ(count, kBatchCount) << "short";
        EXPECT_TRUE(stream_->progress()->is_finished());
        return;
      }
      if (event.kind != Event::Kind::kBatch) continue;
      EXPECT_EQ(event.batch->descriptor().sequence, static_cast<uint64_t>(count++));
      if (const auto& error = event.batch->remote_error()) {
        EXPECT_TRUE(!is_whole && names_worker(error->worker)) << error->worker << ": " << error->text;
      } else {
        EXPECT_TRUE(is_right(*event.batch)) << "wrong data";
      }
    }
    FAIL() << "more batches than were asked for";
  }

  // A worker that alters one field of the batches after its first; by itself, and beside one that alters nothing.
  void expect_sound_with(HandWorker::Options hostile, bool can_serve = true, PoolIoOptions::SaidSize said_size = {}) {
    hostile.worker_id = kHostile;
    for (const bool is_alone : {true, false}) {
      if (is_alone && !can_serve) continue;
      SCOPED_TRACE(is_alone ? "alone" : "beside an honest one");
      news_.clear();
      add(hostile);
      if (!is_alone) add({.worker_id = kHonest});
      begin(said_size);
      expect_sound(!is_alone && said_size.size == wire::kSizeUntold);
      stop();
    }
  }

  static HandWorker::Options altering(const Field& field) {
    HandWorker::Options options;
    options.alter_message = [field](const ToTrainer& message, std::vector<std::byte>& bytes) {
      if (message.kind != field.of) return;
      if (message.kind == Said::kAnswer && message.key.sequence == 0) return;
      write_field(bytes, field);
    };
    return options;
  }

  std::string news_;
  std::vector<OwnWorker> own_;
  std::vector<std::unique_ptr<HandWorker>> workers_;
  std::shared_ptr<PoolClient> client_;
  std::unique_ptr<Stream> stream_;
};

class HostileMessages : public HostileWorkers, public testing::WithParamInterface<Field> {};
TEST_P(HostileMessages, EndTheEpochRightOrAreNamed) { expect_sound_with(altering(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Answers, HostileMessages, testing::ValuesIn(kMessageFields));
INSTANTIATE_TEST_SUITE_P(Others, HostileMessages, testing::ValuesIn(kOtherMessages));

class HostileWelcomes : public HostileWorkers, public testing::WithParamInterface<Field> {};
TEST_P(HostileWelcomes, LeaveTheirWorkerOut) { expect_sound_with(altering(GetParam()), /*can_serve=*/false); }
INSTANTIATE_TEST_SUITE_P(Fields, HostileWelcomes, testing::ValuesIn(kWelcomeFields));

class HostileRecords : public HostileWorkers, public testing::WithParamInterface<Field> {};
TEST_P(HostileRecords, EndTheEpochRightOrAreNamed) {
  HandWorker::Options options;
  options.make = [field = GetParam()](uint64_t sequence) {
    MadeBatch made = count_up(kBatchBytes, sequence);
    EXPECT_EQ(made.record_bytes, kRecordBytes);
    if (sequence > 0) write_field(std::span(made.payload).last(made.record_bytes), field);
    return made;
  };
  expect_sound_with(options);
}
INSTANTIATE_TEST_SUITE_P(Fields, HostileRecords, testing::ValuesIn(kRecordFields));

class HostilePieces : public HostileWorkers, public testing::WithParamInterface<PieceField> {};
TEST_P(HostilePieces, EndTheEpochRightOrAreNamed) {
  HandWorker::Options options;
  options.alter_piece = [field = GetParam()](wire::PieceHead& head) {
    if (head.key.sequence > 0) field.alter(head);
  };
  expect_sound_with(options);
}
INSTANTIATE_TEST_SUITE_P(Fields, HostilePieces, testing::ValuesIn(kPieceFields));

class HostileWishes : public HostileWorkers, public testing::WithParamInterface<Field> {};
TEST_P(HostileWishes, EndTheEpochRightOrAreNamed) {
  HandWorker::Options options;
  wire::BlobId id{};
  id[0] = std::byte{9};
  options.wishes = id;
  options.alter_wish = [field = GetParam()](std::vector<std::byte>& bytes) { write_field(bytes, field); };
  expect_sound_with(options);
}
INSTANTIATE_TEST_SUITE_P(Fields, HostileWishes, testing::ValuesIn(kWishFields));

TEST_F(HostileWorkers, EndOfAShardWithoutShardsIsNoAnswer) { expect_sound_with({.ends_at = 1}); }

TEST_F(HostileWorkers, AnotherLengthThanTheOneThatTheEpochIsReadByNamesBoth) {
  add({.worker_id = kHostile});
  begin({.size = 3, .by = "0000000000000006"});
  const Event event = [&] {
    for (;;) {
      Event next = stream_->next(Clock::now() + kPatience);
      if (next.kind == Event::Kind::kBatch || next.kind == Event::Kind::kNothing) return next;
    }
  }();
  ASSERT_EQ(event.kind, Event::Kind::kBatch);
  ASSERT_TRUE(event.batch->remote_error());
  EXPECT_TRUE(names_worker(event.batch->remote_error()->worker));
  EXPECT_NE(event.batch->remote_error()->text.find("that of worker 0000000000000006"), std::string::npos)
      << event.batch->remote_error()->text;
}

// 16 tensors over the same bytes, each of 63 times as many, were 1,000 times what had come.
TEST_F(HostileWorkers, TensorsThatShareNarrowBytesTakeNoMoreMemoryThanThoseThatDoNot) {
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
  const uint64_t before = resident_bytes();
  expect_sound_with(options);
  EXPECT_LT(resident_bytes() - std::min(before, resident_bytes()), uint64_t{256} << 20);
}

}  // namespace
}  // namespace penstock::loader
