// SPDX-License-Identifier: Apache-2.0
#include "loader/batch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "../base/seeded_test.h"
#include "../wire/narrow_samples.h"
#include "../wire/record_samples.h"
#include "../worker/shared_tensor.h"
#include "loader/batch_memory.h"
#include "shm/arena.h"
#include "wire/nest.h"

namespace penstock::loader {
namespace {

using wire::make_entry;
using wire::TensorEntry;

class BatchTest : public test::SeededTest {
 protected:
  BatchTest() : arena_(shm::Arena::create({.slab_bytes = 1 << 16, .slab_count = 1}, 0).value()) {
    view_ = shm::ArenaView::map(FileDescriptor(::dup(arena_->fd()))).value();
    EXPECT_EQ(arena_->try_acquire(), 0u);
    EXPECT_TRUE(arena_->reserve(0, arena_->slab_bytes()));
  }

  // Puts a record behind `payload_bytes` bytes of payload and reads it as the trainer does.
  Result<std::unique_ptr<Batch>> read_from_slab(const std::vector<std::byte>& record, uint64_t payload_bytes = 4096) {
    for (uint64_t place = 0; place < payload_bytes; ++place) arena_->slab(0)[place] = byte_at(place);
    std::memcpy(arena_->slab(0) + payload_bytes, record.data(), record.size());
    return Batch::from_slab({.record_bytes = static_cast<uint32_t>(record.size()), .record_offset = payload_bytes},
                            c10::make_intrusive<SlabLease>(view_, 0, arena_->generation(0)), /*allow_pickle=*/true);
  }
  Result<std::unique_ptr<Batch>> read_from_parts(std::vector<std::byte> record, uint64_t payload_bytes = 4096,
                                                 bool allow_pickle = true) {
    std::vector<std::byte> payload(payload_bytes);
    for (uint64_t place = 0; place < payload_bytes; ++place) payload[place] = byte_at(place);
    return Batch::from_parts({}, std::move(record), std::move(payload), allow_pickle);
  }
  static std::byte byte_at(uint64_t place) { return static_cast<std::byte>(place % 2 == 0 ? place % 251 : 1); }

  // A record of tensors of every kind of layout.
  static std::vector<TensorEntry> some_entries() {
    return {make_entry(0, {3, 5}), make_entry(6, {4, 2}, {1, 4}), make_entry(4, {}), make_entry(7, {0, 3}),
            make_entry(2, {2, 3}, {0, 7})};
  }
  static std::vector<std::byte> some_record() { return wire::make_record(some_entries(), wire::nest_of_tensors(5)); }

  static void expect_content(Batch& batch) {
    const auto& tensors = batch.tensors().all();
    const auto& entries = batch.record().frame().tensors;
    ASSERT_EQ(tensors.size(), entries.size());
    for (size_t index = 0; index < tensors.size(); ++index) {
      const auto& entry = entries[index];
      EXPECT_EQ(static_cast<int>(tensors[index].scalar_type()), entry.dtype);
      EXPECT_EQ(tensors[index].sizes(), at::IntArrayRef(entry.shape));
      EXPECT_EQ(tensors[index].strides(), at::IntArrayRef(entry.strides));
      EXPECT_EQ(tensors[index].storage().nbytes(), entry.bytes);
      EXPECT_FALSE(tensors[index].storage().resizable());
      const auto* bytes = static_cast<const std::byte*>(tensors[index].storage().data());
      for (uint64_t place = 0; place < entry.bytes; ++place) ASSERT_EQ(bytes[place], byte_at(entry.offset + place));
    }
  }
  static std::vector<FileDescriptor> files_of(const std::vector<at::Tensor>& tensors) {
    std::vector<FileDescriptor> files;
    for (const at::Tensor& tensor : tensors) files.emplace_back(::dup(worker::file_of(tensor)));
    return files;
  }
  bool is_slab_free() {
    const bool is_free = arena_->try_acquire().has_value();
    if (is_free) arena_->cancel(0);
    return is_free;
  }

  std::shared_ptr<shm::Arena> arena_;
  std::shared_ptr<shm::ArenaView> view_;
};

TEST_F(BatchTest, TensorsOfASlabViewItWithoutACopy) {
  const auto batch = read_from_slab(some_record()).value();
  expect_content(*batch);
  EXPECT_EQ(batch->tensors().all()[0].const_data_ptr(), view_->slab(0));
}

TEST_F(BatchTest, TensorsOfPartsHaveTheSameContent) { expect_content(*read_from_parts(some_record()).value()); }

TEST_F(BatchTest, TheSlabGoesBackWhenTheLastTensorDies) {
  auto batch = read_from_slab(some_record()).value();
  auto tensors = batch->tensors().all();
  batch.reset();
  while (tensors.size() > 1) {
    tensors.pop_back();
    EXPECT_FALSE(is_slab_free());
  }
  const at::Tensor view = tensors.front().select(0, 1);
  tensors.clear();
  EXPECT_FALSE(is_slab_free()) << "a view of a tensor still lies there";
  const_cast<at::Tensor&>(view).reset();
  EXPECT_TRUE(is_slab_free());
}

TEST_F(BatchTest, ABatchThatNobodyLooksAtGivesItsSlabBack) {
  { const auto batch = read_from_slab(some_record()).value(); }
  EXPECT_TRUE(is_slab_free());
}

TEST_F(BatchTest, CopyingOutGivesTheSlabBackAtOnceAndKeepsTheContent) {
  const auto batch = read_from_slab(some_record()).value();
  batch->tensors().copy_out();
  EXPECT_TRUE(is_slab_free());
  std::memset(arena_->slab(0), 0xee, arena_->slab_bytes());
  expect_content(*batch);
  batch->tensors().copy_out();
  expect_content(*batch);
}

TEST_F(BatchTest, CopyingOutAfterTensorsWereHandedOutAsserts) {
  const auto batch = read_from_slab(some_record()).value();
  static_cast<void>(batch->tensors().all());
  EXPECT_THROW(batch->tensors().copy_out(), AssertionFailure);
}

TEST_F(BatchTest, WritingToOneTensorLeavesTheOthersAsTheyAre) {
  const auto batch = read_from_slab(some_record()).value();
  const auto before = batch->tensors().all()[1].clone();
  batch->tensors().all()[0].fill_(9);
  EXPECT_TRUE(before.equal(batch->tensors().all()[1]));
}

TEST_F(BatchTest, ABatchWithoutTensorsHasNone) {
  const auto batch = read_from_slab(wire::sample_records().front(), 0).value();
  EXPECT_TRUE(batch->tensors().all().empty());
  batch->tensors().copy_out();
  EXPECT_TRUE(is_slab_free());
}

TEST_F(BatchTest, BoundaryTensorsAreTheLastAndTheNestCannotReachThem) {
  const std::vector<TensorEntry> entries = {make_entry(6, {2}), make_entry(6, {3})};
  const auto good = wire::make_record(entries, wire::nest_of_tensors(1), {wire::kSomeKey});
  EXPECT_EQ(read_from_parts(good).value()->record().frame().leaf_count(), 1u);
  const auto bad = wire::make_record(entries, wire::nest_of_tensors(2), {wire::kSomeKey});
  EXPECT_EQ(read_from_parts(bad).error().code, Errc::kMalformed);
}

TEST_F(BatchTest, APickleIsRefusedUnlessItIsAllowed) {
  wire::NestWriter nest;
  nest.pickle("\x80\x05N.");
  const auto record = wire::make_record({}, nest.view());
  EXPECT_TRUE(read_from_parts(record, 0, /*allow_pickle=*/true));
  EXPECT_EQ(read_from_parts(record, 0, /*allow_pickle=*/false).error().code, Errc::kUnsupported);
}

TEST_F(BatchTest, APayloadShorterThanTheRecordClaimsIsMalformed) {
  EXPECT_EQ(read_from_parts(some_record(), 64).error().code, Errc::kMalformed);
  EXPECT_EQ(read_from_slab(some_record(), 64).error().code, Errc::kMalformed);
  EXPECT_TRUE(is_slab_free());
}

TEST_F(BatchTest, SharedTensorsAreOnOneMappingOfTheirFileAndTheSlabGoesBackAtOnce) {
  const at::Tensor worker_s = worker::in_shared_memory(1024);
  const auto record =
      wire::make_record({wire::shared_entry(0, 4), wire::shared_entry(0, 400)}, wire::nest_of_tensors(2));
  const auto batch = read_from_slab(record, 0).value();
  EXPECT_TRUE(is_slab_free());
  ASSERT_TRUE(batch->tensors().set_shared_files(files_of({worker_s})));
  const auto tensors = batch->tensors().all();
  EXPECT_TRUE(tensors[0].storage().is_alias_of(tensors[1].storage()));
  EXPECT_EQ(tensors[1].storage_offset(), 100);
  EXPECT_TRUE(tensors[0].equal(worker_s.slice(0, 1, 4)));
  tensors[1].fill_(-1);
  EXPECT_EQ(worker_s[101].item<float>(), -1) << "the worker sees what the trainer writes";
  EXPECT_EQ(batch->record().bytes(), 24u);
}

TEST_F(BatchTest, SharedTensorsStayWhereTheyAreWhenTheOthersAreCopiedOut) {
  const at::Tensor worker_s = worker::in_shared_memory(1024);
  const auto record = wire::make_record({wire::make_entry(6, {4}), wire::shared_entry(0, 0)}, wire::nest_of_tensors(2));
  const auto batch = read_from_slab(record, 64).value();
  ASSERT_TRUE(batch->tensors().set_shared_files(files_of({worker_s})));
  batch->tensors().copy_out();
  EXPECT_TRUE(is_slab_free());
  batch->tensors().all()[1].fill_(7);
  EXPECT_EQ(worker_s[2].item<float>(), 7);
}

TEST_F(BatchTest, ForACopySharedTensorsHaveStoragesOfJustTheirBytes) {
  const at::Tensor worker_s = worker::in_shared_memory(1024);
  const auto batch =
      read_from_slab(wire::make_record({wire::shared_entry(0, 40)}, wire::nest_of_tensors(1)), 0).value();
  ASSERT_TRUE(batch->tensors().set_shared_files(files_of({worker_s})));
  ASSERT_TRUE(batch->tensors().map_for_copy());
  EXPECT_EQ(batch->tensors().all()[0].storage().nbytes(), 12u);
  EXPECT_TRUE(batch->tensors().all()[0].equal(worker_s.slice(0, 10, 13)));
}

TEST_F(BatchTest, ASharedTensorBeyondTheEndOfItsFileIsMalformed) {
  const at::Tensor worker_s = worker::in_shared_memory(1024);
  const auto batch =
      read_from_slab(wire::make_record({wire::shared_entry(0, 4088)}, wire::nest_of_tensors(1)), 0).value();
  EXPECT_EQ(batch->tensors().set_shared_files(files_of({worker_s})).error().code, Errc::kMalformed);
}

TEST_F(BatchTest, WhoMaySendNoPickleMayReferToNoSharedMemory) {
  const auto record = wire::make_record({wire::shared_entry(0, 0)}, wire::nest_of_tensors(1));
  EXPECT_TRUE(read_from_parts(record, 0, /*allow_pickle=*/true));
  EXPECT_EQ(read_from_parts(record, 0, /*allow_pickle=*/false).error().code, Errc::kMalformed);
}

TEST_F(BatchTest, EveryBitFlipOfARecordIsRefusedOrGivesTensorsInsideTheSlab) {
  const auto whole = some_record();
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    auto record = whole;
    record[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto batch = read_from_slab(record);
    // The client refuses what is written for a link, and has no file that nobody passed.
    if (!batch || batch.value()->record().frame().shared_file_count() > 0) continue;
    if (batch.value()
            ->record()
            .is_narrow()) {  // of no batch in shared memory: see BytesThatDoNotBelongToTheirTensorAreAnError
      BatchMemory memory(1 << 20);
      static_cast<void>(batch.value()->tensors().widen(memory));
      continue;
    }
    for (const at::Tensor& tensor : batch.value()->tensors().all()) {
      if (tensor.is_meta() || tensor.storage().nbytes() == 0) continue;
      const auto* data = static_cast<const std::byte*>(tensor.storage().data());
      const auto* end = data + tensor.storage().nbytes();
      const bool is_inside = data >= view_->slab(0) && end <= view_->slab(0) + view_->slab_bytes();
      EXPECT_TRUE(is_inside) << "bit " << bit;
    }
  }
}

TensorEntry withheld_entry() {
  TensorEntry entry = make_entry(6, {1000, 1000});
  entry.encoding = wire::Encoding::kWithheld;
  entry.bytes = 0;
  return entry;
}

TEST_F(BatchTest, LeafThatWasLeftOutIsAMetaTensor) {
  wire::NestWriter nest;
  nest.tuple(2);
  nest.tensor(0);
  nest.tensor(1);
  auto batch = read_from_parts(wire::make_record({withheld_entry(), make_entry(0, {3})}, nest.view()));
  ASSERT_TRUE(batch) << batch.error().message;
  EXPECT_EQ(batch.value()->record().withheld_bytes(), 4'000'000u);
  EXPECT_TRUE(batch.value()->tensors().all()[0].is_meta());
  EXPECT_EQ(batch.value()->tensors().all()[0].sizes(), at::IntArrayRef({1000, 1000}));
  EXPECT_FALSE(batch.value()->tensors().all()[1].is_meta());
}

TEST_F(BatchTest, LeafThatIsNoTensorIsNotWithheld) {
  wire::NestWriter array;
  array.array(0, "");
  EXPECT_FALSE(read_from_parts(wire::make_record({withheld_entry()}, array.view())));
  wire::NestWriter pickle;
  pickle.pickle("anything");
  EXPECT_FALSE(read_from_parts(wire::make_record({withheld_entry()}, pickle.view())));
  wire::NestWriter object;
  object.object("torch:Tensor", 2);
  object.none();
  object.tensor(0);
  EXPECT_FALSE(read_from_parts(wire::make_record({withheld_entry()}, object.view())));
  wire::NestWriter tensor;
  tensor.tensor(0);
  EXPECT_TRUE(read_from_parts(wire::make_record({withheld_entry()}, tensor.view())));
}

TEST_F(BatchTest, TensorThatCameInFewerBytesIsWidenedIntoASlabOfItsOwn) {
  TensorEntry entry = make_entry(4, {500});
  entry.encoding = wire::Encoding::kOffset8;
  entry.bytes = 8 + 500;
  wire::NestWriter nest;
  nest.tensor(0);
  auto batch = read_from_parts(wire::make_record({entry}, nest.view()));
  ASSERT_TRUE(batch) << batch.error().message;
  EXPECT_TRUE(batch.value()->record().is_narrow());
  BatchMemory memory(1 << 24);
  ASSERT_TRUE(batch.value()->tensors().widen(memory));
  EXPECT_EQ(memory.largest_bytes(), 0u) << "what it was widened to has not come";
  const at::Tensor& tensor = batch.value()->tensors().all()[0];
  EXPECT_EQ(tensor.storage().nbytes(), 4000u);
  EXPECT_FALSE(tensor.storage().resizable());
  int64_t base = 0;
  for (uint64_t place = 0; place < 8; ++place) base |= static_cast<int64_t>(byte_at(place)) << (8 * place);
  const auto* values = static_cast<const int64_t*>(tensor.const_data_ptr());
  for (uint64_t place = 0; place < 500; ++place)
    ASSERT_EQ(values[place], base + static_cast<int64_t>(byte_at(8 + place))) << place;
}

TEST_F(BatchTest, TensorThatIsLeftAsItCameIsWidenedOnceItIsRead) {
  TensorEntry entry = make_entry(4, {500});
  entry.encoding = wire::Encoding::kOffset8;
  entry.bytes = 8 + 500;
  auto batch = read_from_parts(wire::make_record({entry, make_entry(0, {7})}, wire::nest_of_tensors(2)));
  ASSERT_TRUE(batch) << batch.error().message;
  EXPECT_EQ(batch.value()->record().wide_bytes(), 4000u);
  ASSERT_TRUE(batch.value()->tensors().check_narrow());
  EXPECT_EQ(batch.value()->tensors().widening(0), nullptr);
  ASSERT_TRUE(batch.value()->tensors().try_keep_narrow());
  ASSERT_NE(batch.value()->tensors().widening(0), nullptr);
  EXPECT_EQ(batch.value()->tensors().widening(1), nullptr);
  const auto sources = batch.value()->tensors().copy_sources();
  EXPECT_EQ(sources[0].storage().nbytes(), 508u);
  EXPECT_EQ(sources[1].storage().nbytes(), 7u);
  auto other = read_from_parts(wire::make_record({entry, make_entry(0, {7})}, wire::nest_of_tensors(2)));
  BatchMemory memory(1 << 24);
  ASSERT_TRUE(other.value()->tensors().widen(memory));
  EXPECT_EQ(std::memcmp(batch.value()->tensors().all()[0].const_data_ptr(),
                        other.value()->tensors().all()[0].const_data_ptr(), 4000),
            0);
}

// Code for bools takes each byte for 0 or 1.
TEST_F(BatchTest, BoolsOfOtherBytesAreTrue) {
  const std::vector<TensorEntry> entries = {make_entry(wire::kDTypeBool, {100}), make_entry(0, {100})};
  const auto batch = read_from_slab(wire::make_record(entries, wire::nest_of_tensors(2))).value();
  batch->tensors().find_nonstandard_bools();
  const at::Tensor bools = batch->tensors().all()[0];
  const auto* bytes = static_cast<const uint8_t*>(bools.const_data_ptr());
  for (uint64_t place = 0; place < 100; ++place) ASSERT_EQ(bytes[place], byte_at(place) == std::byte{0} ? 0 : 1);
  EXPECT_EQ(arena_->slab(0)[2], byte_at(2)) << "the slab stays as it came";
  EXPECT_EQ(batch->tensors().all()[1].const_data_ptr(), view_->slab(0) + 128) << "other tensors are where they were";
  EXPECT_FALSE(batch->tensors().is_whole_in_slab());
}

TEST_F(BatchTest, BoolsThatAreWidenedToOtherBytesAreTrue) {
  for (const wire::Encoding encoding : {wire::Encoding::kRows, wire::Encoding::kPadded}) {
    std::mt19937_64 random(3);
    auto sample = wire::narrow_of(encoding, wire::kDTypeBool, {20, 30}, random);
    for (const bool is_odd : {false, true}) {
      if (is_odd) sample.narrow.back() = std::byte{0x55};
      std::vector<std::byte> payload = sample.narrow;
      payload.resize(align_up(payload.size(), wire::kPayloadAlignment));
      const auto read = [&] {
        return Batch::from_parts({}, wire::make_record({sample.entry}, wire::nest_of_tensors(1)), payload, false)
            .value();
      };
      const auto checked = read();
      ASSERT_TRUE(checked->tensors().check_narrow());
      EXPECT_EQ(checked->tensors().try_keep_narrow(), !is_odd) << "a device widens nothing else";
      const auto batch = read();
      BatchMemory memory(1 << 24);
      ASSERT_TRUE(batch->tensors().widen(memory));
      auto expected = sample.widened();
      wire::make_bools(expected);
      EXPECT_EQ(std::memcmp(batch->tensors().all()[0].const_data_ptr(), expected.data(), expected.size()), 0);
    }
  }
}

TEST_F(BatchTest, BytesThatDoNotBelongToTheirTensorAreAnError) {
  TensorEntry entry = make_entry(4, {100, 100});
  entry.encoding = wire::Encoding::kRows;
  entry.bytes = 4096;
  wire::NestWriter nest;
  nest.tensor(0);
  auto batch = read_from_parts(wire::make_record({entry}, nest.view()));
  ASSERT_TRUE(batch) << batch.error().message;
  BatchMemory memory(1 << 24);
  const auto widened = batch.value()->tensors().widen(memory);
  ASSERT_FALSE(widened);
  EXPECT_EQ(widened.error().code, Errc::kMalformed);
  EXPECT_EQ(memory.largest_bytes(), 0u) << "a claim counts as little as a batch";
  const auto checked = batch.value()->tensors().check_narrow();
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error(), widened.error());
}

}  // namespace
}  // namespace penstock::loader
