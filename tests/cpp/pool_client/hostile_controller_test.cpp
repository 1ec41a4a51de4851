// SPDX-License-Identifier: Apache-2.0
// A controller that follows the protocol but for one field: the epoch of its trainer, which has a worker of its own,
// ends right, or with an error that names the controller.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "../base/field_count.h"
#include "../wire/wrong_field.h"
#include "hostile_pool.h"

namespace penstock::pool_client {
namespace {

using test::field_count;
using wire::TrainerRoster;

constexpr uint64_t kOwn = 6, kOfPool = 7;
constexpr uint64_t kMost = ~uint64_t{0};

struct WrongRoster {
  const char* name;
  void (*alter)(TrainerRoster&);
};
constexpr WrongRoster kRosters[] = {
    {"controller id: nobody", [](TrainerRoster& r) { r.controller_id = 0; }},
    {"controller id: another", [](TrainerRoster& r) { r.controller_id += 1; }},
    {"view: the first", [](TrainerRoster& r) { r.view = 0; }},
    {"view: the last", [](TrainerRoster& r) { r.view = kMost; }},
    {"is settled", [](TrainerRoster& r) { r.is_settled = false; }},
    {"pool count: none", [](TrainerRoster& r) { r.pool_count = 0; }},
    {"pool count: all", [](TrainerRoster& r) { r.pool_count = ~0u; }},
    {"declined count: all", [](TrainerRoster& r) { r.declined_count = r.pool_count; }},
    {"declined count: more than there are", [](TrainerRoster& r) { r.declined_count = ~0u; }},
    {"entries: none", [](TrainerRoster& r) { r.entries.clear(); }},
    {"entries: one twice", [](TrainerRoster& r) { r.entries.push_back(r.entries[0]); }},
    {"entries: 4,096 that are not there",
     [](TrainerRoster& r) {
       while (r.entries.size() < wire::kRosterCountMax)
         r.entries.push_back({.worker = {.worker_id = 1000 + r.entries.size(), .incarnation = 1},
                              .endpoint = "tcp://127.0.0.1:9",
                              .key = r.entries[0].key});
     }},
    {"declines: unknown workers",
     [](TrainerRoster& r) {
       for (uint64_t id = 1; id <= wire::kRosterDeclineCountMax; ++id)
         r.declines.push_back({.worker_id = id, .reason = std::string(wire::kControlReasonBytesMax, '\xff')});
     }},
    {"declines: a worker that serves",
     [](TrainerRoster& r) { r.declines.push_back({.worker_id = kOfPool, .reason = ""}); }},
    {"worker id: nobody", [](TrainerRoster& r) { r.entries[0].worker.worker_id = 0; }},
    {"worker id: the trainer's own worker", [](TrainerRoster& r) { r.entries[0].worker.worker_id = kOwn; }},
    {"worker id: another", [](TrainerRoster& r) { r.entries[0].worker.worker_id = 99; }},
    {"incarnation", [](TrainerRoster& r) { r.entries[0].worker.incarnation = ~0u; }},
    {"own worker of another incarnation",
     [](TrainerRoster& r) { r.entries[0].worker = {.worker_id = kOwn, .incarnation = 9}; }},
    {"is withdrawn", [](TrainerRoster& r) { r.entries[0].worker.is_withdrawn = true; }},
    {"own worker withdrawn",
     [](TrainerRoster& r) { r.entries[0].worker = {.worker_id = kOwn, .incarnation = 1, .is_withdrawn = true}; }},
    {"endpoint: none", [](TrainerRoster& r) { r.entries[0].endpoint.clear(); }},
    {"endpoint: no address", [](TrainerRoster& r) { r.entries[0].endpoint = "\xff"; }},
    {"endpoint: nobody listens", [](TrainerRoster& r) { r.entries[0].endpoint = "tcp://127.0.0.1:9"; }},
    {"key: nobody's", [](TrainerRoster& r) { r.entries[0].key = {}; }},
    {"key: another", [](TrainerRoster& r) { r.entries[0].key[0] ^= std::byte{1}; }},
};
static_assert(field_count<TrainerRoster>() == 7 && field_count<TrainerRoster::Entry>() == 3 &&
                  field_count<wire::RosterEntry>() == 3 && field_count<TrainerRoster::Decline>() == 2,
              "a field of a roster has no case");

// Answers with what `alter` makes of a right roster's message, from the roster of this number on.
void expect_sound_with(const std::function<std::vector<std::byte>(TrainerRoster)>& alter) {
  for (const int first_wrong : {0, 1}) {
    SCOPED_TRACE(first_wrong == 0 ? "from the beginning" : "after a right one");
    // Both outlive the pool, whose threads read them to their end.
    HandController* controller = nullptr;
    TrainerRoster right{.controller_id = 11, .view = 5, .is_settled = true, .pool_count = 1};
    HostilePool pool;
    // The workers make nothing before the trainer was sent a wrong roster.
    const std::function<bool()> may_work = [&] { return controller->answered_count() > 1; };
    auto& answer = pool.start_controller([&, first_wrong](const wire::TrainerReport&, int answered_count) {
      return answered_count < first_wrong ? wire::write_control(right) : alter(right);
    });
    controller = &answer;
    pool.add({.worker_id = kOwn, .may_work = may_work});
    const auto endpoint = pool.add_to_pool({.worker_id = kOfPool, .may_work = may_work});
    right.entries = {{.worker = {.worker_id = kOfPool, .incarnation = 1},
                      .endpoint = endpoint.text(),
                      .key = pool.key_of(net::Role::kWorker)}};
    pool.begin();
    pool.expect_sound(answer.endpoint().text());
  }
}

TEST(HostileControllers, WrongFieldOfARosterIsMadeGoodOrNamed) {
  wire::run_cases<WrongRoster>(kRosters, [](const WrongRoster& wrong) {
    expect_sound_with([&wrong](TrainerRoster roster) {
      wrong.alter(roster);
      return wire::write_control(roster);
    });
  });
}

struct WrongMessage {
  const char* name;
  void (*alter)(std::vector<std::byte>&);
};
constexpr WrongMessage kMessages[] = {
    {"magic", [](std::vector<std::byte>& bytes) { bytes[0] ^= std::byte{1}; }},
    {"version", [](std::vector<std::byte>& bytes) { bytes[4] = std::byte{99}; }},
    {"kind: none", [](std::vector<std::byte>& bytes) { bytes[6] = std::byte{0}; }},
    {"kind: unknown", [](std::vector<std::byte>& bytes) { bytes[6] = std::byte{200}; }},
    {"empty", [](std::vector<std::byte>& bytes) { bytes.clear(); }},
    {"cut off", [](std::vector<std::byte>& bytes) { bytes.pop_back(); }},
    {"longer", [](std::vector<std::byte>& bytes) { bytes.resize(bytes.size() + 8); }},
    {"a refusal", [](auto& bytes) { bytes = wire::write_control(wire::Refusal{.reason = "no"}); }},
    {"a refusal for now",
     [](auto& bytes) {
       bytes = wire::write_control(wire::Refusal{"later", true});
     }},
    {"orders for a worker", [](auto& bytes) { bytes = wire::write_control(wire::WorkerOrders{.is_fenced = true}); }},
    {"orders for an engine", [](auto& bytes) { bytes = wire::write_control(wire::ScaleOrders{.is_to_end = true}); }},
    {"a status", [](auto& bytes) { bytes = wire::write_control(wire::Status{.json = std::string(1 << 20, '{')}); }},
    {"a trainer's own report",
     [](auto& bytes) { bytes = wire::write_control(wire::TrainerReport{.trainer_id = 7, .job = "a test"}); }},
};

TEST(HostileControllers, MessageThatIsNoRosterIsMadeGoodOrNamed) {
  wire::run_cases<WrongMessage>(kMessages, [](const WrongMessage& wrong) {
    expect_sound_with([&wrong](const TrainerRoster& roster) {
      auto bytes = wire::write_control(roster);
      wrong.alter(bytes);
      return bytes;
    });
  });
}

// Each worker was taken for one of the pool by the key of the role, which all workers had.
TEST(RosterKeys, WorkerIsReachedByTheKeyThatTheRosterNamesAndByNoOther) {
  constexpr uint64_t kOfMachine = 7, kInItsName = 8;
  TrainerRoster roster{.controller_id = 11, .view = 5, .is_settled = true, .pool_count = 2};
  HostilePool pool;
  pool.start_controller([&](const wire::TrainerReport&, int) { return wire::write_control(roster); });
  // The key of any other role stands for that of a machine, which the trainer does not know beforehand.
  const auto machine = pool.add_to_pool({.worker_id = kOfMachine}, {}, net::Role::kOperator);
  const auto other = pool.add_to_pool({.worker_id = kInItsName});
  for (const auto& [worker_id, endpoint] : {std::pair(kOfMachine, machine), std::pair(kInItsName, other)})
    roster.entries.push_back({.worker = {.worker_id = worker_id, .incarnation = 1},
                              .endpoint = endpoint.text(),
                              .key = pool.key_of(net::Role::kOperator)});
  pool.begin();
  pool.expect_sound("");
  EXPECT_GT(pool.hello_count(0), 0);
  EXPECT_EQ(pool.hello_count(1), 0) << "it has the key of the role, and not the machine's";
}

}  // namespace
}  // namespace penstock::pool_client
