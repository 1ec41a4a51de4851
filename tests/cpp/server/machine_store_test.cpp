// SPDX-License-Identifier: Apache-2.0
#include "server/machine_store.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/keys.h"
#include "server/batch_store.h"
#include "shm/channel.h"
#include "wire/frame.h"
#include "wire/store_record.h"

namespace penstock::server {
namespace {

using FoundKind = BatchStore::Found::Kind;
using Role = MachineStore::Role;
using std::chrono::steady_clock;

constexpr size_t kSmall = 100;
constexpr size_t kLarge = 3 * wire::kStoreInlineBytesMax;
constexpr uint64_t kBudget = 64 << 20;

// A batch of one tensor.
class TensorBatch final : public HeldBatch {
 public:
  TensorBatch(size_t size, char value) {
    wire::Frame frame;
    frame.tensors.push_back(
        {.encoding = wire::Encoding::kPlain, .bytes = size, .shape = {static_cast<int64_t>(size)}, .strides = {1}});
    const std::vector<std::byte> nest{std::byte{1}};
    frame.nest = nest;
    frame.payload_bytes = size;
    bytes_.assign(size, static_cast<std::byte>(value));
    const auto record = wire::write_frame(frame);
    bytes_.insert(bytes_.end(), record.begin(), record.end());
    hold(bytes_, static_cast<uint32_t>(record.size()));
  }

 private:
  std::vector<std::byte> bytes_;
};

// The keys of a pool's worker, the same for each server of a test.
net::KeyRing worker_keys(char secret_byte) {
  net::SecretKey secret;
  std::ranges::fill(secret.bytes(), static_cast<std::byte>(secret_byte));
  auto own = net::KeyPair::from_secret(std::move(secret));
  net::PublicKeys keys;
  keys.roles[static_cast<size_t>(net::Role::kWorker)] = own.public_key();
  return {net::Role::kWorker, std::move(own), keys, net::KeyOrigin::kGiven};
}

std::optional<StorePlace> place_of(const std::string& installation, char secret = 'k') {
  const std::vector<std::string> parts{installation, std::to_string(::getpid())};
  return StorePlace::of(worker_keys(secret), "tcp://127.0.0.1:7000", parts);
}

// A server with one worker, whose number is also its trainer's.
class Server {
 public:
  explicit Server(uint64_t worker_id, std::optional<StorePlace> place)
      : worker_id_(worker_id), store_(std::move(place)) {
    EXPECT_TRUE(store_.start());
    store_.join(worker_id, [this] { ++wake_count_; });
    store_.set_share(worker_id, kBudget);
  }

  Server& wait_for(Role role) {
    for (const auto deadline = steady_clock::now() + std::chrono::seconds(30);
         store_.role() != role && steady_clock::now() < deadline;)
      std::this_thread::yield();
    EXPECT_EQ(store_.role(), role);
    return *this;
  }
  void wait_for_wake() const {
    for (const auto deadline = steady_clock::now() + std::chrono::seconds(30);
         wake_count_ == 0 && steady_clock::now() < deadline;)
      std::this_thread::yield();
    EXPECT_GT(wake_count_, 0);
  }
  void forget_wakes() { wake_count_ = 0; }

  BatchStore::Answer ask(const session::BatchName& name) { return store_.ask(name, by(), /*may_wait=*/true); }
  bool ask_ahead(const session::BatchName& name) { return store_.ask_ahead(name, by()); }
  void release(const session::BatchName& name) { store_.release(name, by()); }
  std::optional<MachineStore::Id> admit(const session::BatchName& name, const PoolResult& made) {
    return store_.admit(name, by(), made);
  }
  // Makes the batch after it was asked for. Returns whether it is kept.
  bool make(const session::BatchName& name, size_t size, char value = 'v') {
    const auto made = result_of(size, value);
    const auto id = admit(name, *made);
    if (id) copy(*id, *made);
    return id.has_value();
  }
  void copy(MachineStore::Id id, const PoolResult& made) {
    auto batch = store_.new_batch(made.batch->payload().size(), made.batch->record_bytes());
    ASSERT_TRUE(batch);
    const auto copied = batch.value()->copy_step(made.batch->payload());
    ASSERT_TRUE(copied && copied.value());
    auto kept = std::make_shared<PoolResult>();
    kept->answer = wire::AnswerKind::kBatch;
    kept->sample_count = made.sample_count;
    kept->batch = std::move(batch).value();
    store_.settle(id, std::move(kept));
  }
  // Expects that the batch is kept, and that its values are `value`.
  void expect_kept(const session::BatchName& name, size_t size, char value = 'v') {
    const auto answer = ask(name);
    ASSERT_EQ(answer.kind, FoundKind::kKept);
    const auto made = result_of(size, value);
    EXPECT_EQ(compare_batches(*answer.result->batch, *made->batch), session::NamedBatches::Comparison::kEqual);
    EXPECT_EQ(answer.result->answer, wire::AnswerKind::kBatch);
    EXPECT_EQ(answer.result->sample_count, made->sample_count);
  }

  static std::shared_ptr<PoolResult> result_of(size_t size, char value) {
    auto result = std::make_shared<PoolResult>();
    result->answer = wire::AnswerKind::kBatch;
    result->batch = std::make_unique<TensorBatch>(size, value);
    result->sample_count = 7;
    result->may_be_kept = true;
    result->draws_nothing = true;
    return result;
  }

  MachineStore& store() { return store_; }

 private:
  session::Claimant by() const { return {.worker_id = worker_id_, .trainer_id = worker_id_}; }

  const uint64_t worker_id_;
  std::atomic<int> wake_count_ = 0;
  MachineStore store_;
};

session::BatchName named(int samples, int epoch = 0) {
  return {.group = "job", .samples = std::to_string(samples), .epoch = std::to_string(epoch), .place = "p"};
}

class MachineStoreTest : public testing::TestWithParam<size_t> {
 protected:
  MachineStoreTest() { guest_.wait_for(Role::kGuest); }

  const std::string place_ = testing::UnitTest::GetInstance()->current_test_info()->name();
  std::optional<Server> host_ = std::optional<Server>(std::in_place, 1, place_of(place_));
  Server guest_{2, (host_->wait_for(Role::kHost), place_of(place_))};
};

TEST_P(MachineStoreTest, EachFindsWhatTheOtherHasMade) {
  const size_t size = GetParam();
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.make(named(1), size, 'a'));
  host_->expect_kept(named(1), size, 'a');
  guest_.expect_kept(named(1), size, 'a');
  EXPECT_EQ(host_->ask(named(2)).kind, FoundKind::kMake);
  EXPECT_TRUE(host_->make(named(2), size, 'b'));
  guest_.expect_kept(named(2), size, 'b');
}

TEST_P(MachineStoreTest, BatchThatWasKeptBeforeThereWasAGuestIsFound) {
  const size_t size = GetParam();
  Server host(1, place_of("alone at first"));
  host.wait_for(Role::kHost);
  EXPECT_EQ(host.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_TRUE(host.make(named(1), size));
  Server guest(2, place_of("alone at first"));
  guest.wait_for(Role::kGuest).expect_kept(named(1), size);
}

TEST_P(MachineStoreTest, GuestsWaitForEachOtherAndAreWoken) {
  Server third(3, place_of(place_));
  third.wait_for(Role::kGuest);
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_EQ(third.ask(named(1)).kind, FoundKind::kWait);
  EXPECT_FALSE(guest_.ask_ahead(named(2))) << "another one waits";
  third.forget_wakes();
  EXPECT_TRUE(guest_.make(named(1), GetParam()));
  third.wait_for_wake();
  third.expect_kept(named(1), GetParam());
}

TEST_P(MachineStoreTest, GuestTriesWhetherTheSeedsMatter) {
  const size_t size = GetParam();
  for (const int samples : {1, 2}) {
    EXPECT_EQ(host_->ask(named(samples)).kind, FoundKind::kMake);
    EXPECT_TRUE(host_->make(named(samples), size));
  }
  EXPECT_EQ(guest_.ask(named(1, 1)).kind, FoundKind::kMake) << "the trial";
  guest_.make(named(1, 1), size);
  guest_.expect_kept(named(2, 1), size);
  host_->expect_kept(named(1, 2), size);
}

TEST_P(MachineStoreTest, DifferentValuesOfTheTrialAreSeen) {
  const size_t size = GetParam();
  for (const int samples : {1, 2}) {
    EXPECT_EQ(host_->ask(named(samples)).kind, FoundKind::kMake);
    EXPECT_TRUE(host_->make(named(samples), size));
  }
  EXPECT_EQ(guest_.ask(named(1, 1)).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.make(named(1, 1), size, 'w'));
  EXPECT_EQ(guest_.ask(named(2, 1)).kind, FoundKind::kMake);
}

TEST_P(MachineStoreTest, NextServerBecomesTheHostAndBatchesAreMadeAgain) {
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  const auto made = Server::result_of(GetParam(), 'v');
  const auto id = guest_.admit(named(1), *made);
  ASSERT_TRUE(id);
  host_.reset();
  guest_.wait_for(Role::kHost);
  guest_.copy(*id, *made);
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake) << "what was admitted elsewhere is void";
  EXPECT_TRUE(guest_.make(named(1), GetParam()));
  Server next(4, place_of(place_));
  next.wait_for(Role::kGuest).expect_kept(named(1), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Sizes, MachineStoreTest, testing::Values(kSmall, kLarge),
                         [](const auto& info) { return info.param == kSmall ? "Small" : "Large"; });

class MachineStorePair : public MachineStoreTest {};

TEST_P(MachineStorePair, ClaimsOfAGuestThatEndsAreFree) {
  {
    Server third(3, place_of(place_));
    third.wait_for(Role::kGuest);
    EXPECT_EQ(third.ask(named(1)).kind, FoundKind::kMake);
    EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kWait);
    guest_.forget_wakes();
  }
  guest_.wait_for_wake();
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
}

TEST_P(MachineStorePair, ReleasedBatchIsMadeByTheNext) {
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_EQ(host_->ask(named(1)).kind, FoundKind::kWait);
  guest_.release(named(1));
  EXPECT_EQ(host_->ask(named(1)).kind, FoundKind::kMake);
}

TEST_P(MachineStorePair, BudgetIsTheSumOfAllShares) {
  host_->store().set_share(1, 0);
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.make(named(1), kLarge));
  EXPECT_GE(guest_.store().bytes_made_by(2), kLarge);
  guest_.store().set_share(2, 0);
  EXPECT_EQ(host_->ask(named(1)).kind, FoundKind::kMake);
}

TEST_P(MachineStorePair, MostBatchesOfAJobWithoutReuseArePassedOver) {
  int samples = 0;
  const auto make_next = [&] {
    const auto name = named(samples, samples / 8);
    ++samples;
    EXPECT_EQ(guest_.ask(name).kind, FoundKind::kMake);
    return guest_.make(name, kLarge);
  };
  const int fitting = static_cast<int>(2 * kBudget / kLarge);
  while (samples < fitting / 2) make_next();
  EXPECT_FALSE(guest_.store().is_passed_over(named(0)));
  while (samples < 2 * fitting) make_next();
  const auto next_chosen = [&](bool is_chosen) {
    for (;; ++samples)
      if (session::is_chosen(named(samples, samples / 8)) == is_chosen) return named(samples, samples / 8);
  };
  for (Server* const server : {&guest_, &*host_}) {
    EXPECT_TRUE(server->store().is_passed_over(next_chosen(false)));
    EXPECT_FALSE(server->store().is_passed_over(next_chosen(true)));
  }
  const auto chosen = next_chosen(true);
  EXPECT_EQ(guest_.ask(chosen).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.make(chosen, kLarge));
  host_->expect_kept(chosen, kLarge);
  ++samples;
  EXPECT_FALSE(host_->store().is_passed_over(next_chosen(false)));
  EXPECT_TRUE(guest_.store().is_passed_over(next_chosen(false))) << "it has not asked since";
  EXPECT_EQ(guest_.ask(next_chosen(true)).kind, FoundKind::kMake);
  EXPECT_FALSE(guest_.store().is_passed_over(next_chosen(false)));
}

TEST_P(MachineStorePair, BatchWithAnEndlessNameIsNotKept) {
  session::BatchName name = named(1);
  name.samples.assign(wire::kStoreNameBytesMax, 's');
  EXPECT_EQ(guest_.ask(name).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.ask_ahead(name));
  EXPECT_FALSE(guest_.make(name, kSmall));
  EXPECT_EQ(guest_.store().role(), Role::kGuest);
}

TEST_P(MachineStorePair, OtherKeysAndInstallationsMeetElsewhere) {
  EXPECT_NE(place_of("one")->name, place_of("other")->name);
  EXPECT_NE(place_of("one", 'k')->name, place_of("one", 'l')->name);
  EXPECT_EQ(place_of("one")->name, place_of("one")->name);
}

TEST_P(MachineStorePair, ProcessWithoutTheKeyLearnsNothing) {
  const auto deadline = [] { return steady_clock::now() + std::chrono::seconds(30); };
  const auto question = [](const wire::ToStore& message) { return wire::write_to_store(message); };
  const std::vector<std::vector<std::byte>> openings = {
      question({.kind = wire::ToStore::Kind::kHello}),
      question({.kind = wire::ToStore::Kind::kHello, .is_for_wakes = true}),
      question({.kind = wire::ToStore::Kind::kAsk, .worker_id = 2}),
      question({.kind = wire::ToStore::Kind::kJoin, .worker_id = 9, .number = kBudget}),
      {std::byte{1}},
      std::vector<std::byte>(wire::kStoreMessageBytesMax + 1),
  };
  for (const auto& opening : openings) {
    auto channel = shm::Channel::connect(place_of(place_)->name);
    ASSERT_TRUE(channel);
    const auto challenge = channel.value().receive(deadline());
    ASSERT_TRUE(challenge);
    const std::span<const std::byte> parts[] = {opening};
    static_cast<void>(channel.value().send(parts));  // it may be cut off
    const auto answer = channel.value().receive(deadline());
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::kClosed);
  }
  EXPECT_EQ(guest_.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_TRUE(guest_.make(named(1), kSmall));
}

TEST_P(MachineStorePair, ProcessThatTakesTheAddressWithoutTheKeyIsNotAsked) {
  auto place = place_of("taken");
  auto listener = shm::ChannelListener::bind(place->name);
  ASSERT_TRUE(listener);
  Server server(1, std::move(place));
  std::optional<shm::Channel> channel;
  for (const auto deadline = steady_clock::now() + std::chrono::seconds(30);
       !channel && steady_clock::now() < deadline;) {
    if (auto accepted = listener.value().accept()) channel.emplace(std::move(accepted).value());
  }
  ASSERT_TRUE(channel);
  const auto challenge = wire::write_from_store({.kind = wire::FromStore::Kind::kChallenge});
  const auto accepted = wire::write_from_store({.kind = wire::FromStore::Kind::kAccepted});
  for (const auto& message : {challenge, accepted}) {
    const std::span<const std::byte> parts[] = {message};
    ASSERT_TRUE(channel->send(parts));
  }
  const auto wait = [&] { return channel->receive(steady_clock::now() + std::chrono::seconds(30)); };
  ASSERT_TRUE(wait()) << "its hello";
  EXPECT_FALSE(wait()) << "it hangs up";
  EXPECT_EQ(server.ask(named(1)).kind, FoundKind::kMake);
  EXPECT_TRUE(server.make(named(1), kSmall));
  server.expect_kept(named(1), kSmall);
  EXPECT_EQ(server.store().role(), Role::kAlone);
}

INSTANTIATE_TEST_SUITE_P(Once, MachineStorePair, testing::Values(kSmall));

TEST(KeptBatchFile, FileThatCouldChangeIsRefused) {
  const std::vector<std::byte> bytes(5000, std::byte{3});
  auto file = file_of(bytes);
  ASSERT_TRUE(file);
  EXPECT_FALSE(KeptBatch::of_file(FileDescriptor(::dup(file.value().get())), bytes.size() + 1, 8));
  auto batch = KeptBatch::of_file(std::move(file).value(), bytes.size(), 8);
  ASSERT_TRUE(batch);
  EXPECT_TRUE(std::ranges::equal(batch.value()->payload(), bytes));
  EXPECT_LT(::pwrite(batch.value()->file(), bytes.data(), 1, 0), 0) << "it is sealed";
  FileDescriptor open(::memfd_create("penstock-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), 5000), 0);
  EXPECT_FALSE(KeptBatch::of_file(std::move(open), bytes.size(), 8));
}

TEST(KeptBatchFile, SharedCopyHasTheBytesOfItsSource) {
  std::vector<std::byte> source(kKeepStepBytes + 5);
  for (size_t place = 0; place < source.size(); place += 997) source[place] = static_cast<std::byte>(place);
  auto batch = KeptBatch::of_size(source.size(), 9, KeptBatch::Form::kShared);
  ASSERT_TRUE(batch);
  EXPECT_FALSE(batch.value()->copy_step(source).value());
  EXPECT_TRUE(batch.value()->copy_step(source).value());
  EXPECT_TRUE(std::ranges::equal(batch.value()->payload(), source));
}

}  // namespace
}  // namespace penstock::server
