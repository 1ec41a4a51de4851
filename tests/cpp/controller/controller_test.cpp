// SPDX-License-Identifier: Apache-2.0
#include "controller/controller.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/process.h"
#include "controller/pool_status.h"
#include "controller_fixture.h"
#include "net/tcp_socket.h"
#include "session/worker_session.h"
#include "wire/control_record.h"

namespace penstock::controller {
namespace {

using net::Role;
using wire::ControlMessage;
using wire::TrainerRoster;
using wire::WorkerOrders;

// A flood kept leases from ending, and SIGTERM from being heard.
TEST_F(ControllerTest, FloodOfMessagesDoesNotMakeATurnLonger) {
  const auto flooded = Controller::start({.host = "127.0.0.1", .port = 0}, keys_.ring(Role::kController)).value();
  const std::jthread flood([&](const std::stop_token& stop) {
    net::SocketContext context;
    const auto resolver = net::Resolver::open().value();
    const auto client =
        net::ClientSocket::connect(context, *resolver, flooded->endpoint(), keys_.pair(Role::kOperator),
                                   keys_.public_key(Role::kController), {.limits = net::control_limits()})
            .value();
    const auto question = wire::write_control(wire::StatusRequest{});
    while (!stop.stop_requested()) {
      while (client->try_event()) {
      }
      static_cast<void>(client->send(question));
    }
  });
  uint64_t most = 0;
  const auto deadline = Clock::now() + kPatience;
  while (most < kMessagesPerTurn && Clock::now() < deadline) {
    const uint64_t before = flooded->counters().messages;
    const auto has_more = flooded->serve();
    ASSERT_TRUE(has_more) << has_more.error().message;
    const uint64_t count = flooded->counters().messages - before;
    ASSERT_LE(count, static_cast<uint64_t>(kMessagesPerTurn));
    EXPECT_EQ(has_more.value(), count == kMessagesPerTurn);
    most = std::max(most, count);
  }
  EXPECT_EQ(most, static_cast<uint64_t>(kMessagesPerTurn)) << "the flood was too small to show anything";
}

TEST_F(ControllerTest, TellsATrainerOfItsWorkersAndAnOperatorOfAll) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  const TrainerRoster roster = settled(*worker_client, *trainer_client);
  ASSERT_EQ(roster.entries.size(), 1u);
  EXPECT_TRUE(roster.is_settled);
  EXPECT_EQ(roster.entries[0].worker.worker_id, id_of(Role::kWorker, 7));
  EXPECT_EQ(roster.entries[0].endpoint, "tcp://127.0.0.1:5");

  const auto operator_client = join(Role::kOperator);
  const auto status = parsed(std::get<wire::Status>(exchange(*operator_client, wire::StatusRequest{})).json);
  ASSERT_EQ(status["workers"].size(), 1u) << status;
  const auto& listed = status["workers"][0];
  EXPECT_EQ(listed["id"], format_id(id_of(Role::kWorker, 7)));
  EXPECT_EQ(listed["about"], "a \"worker\"\n\uFFFD");  // its last byte is not UTF-8
  EXPECT_EQ(listed["assigned_to"], format_id(id_of(Role::kTrainer, 9)));
  EXPECT_TRUE(listed["stuck_s"].is_null());
  EXPECT_EQ(listed["unfit_for"], nlohmann::json::array());
  EXPECT_TRUE(listed["unfit_reason"].is_null());
  EXPECT_EQ(listed["kept_bytes"], 0);
  ASSERT_EQ(status["trainers"].size(), 1u) << status;
  EXPECT_EQ(status["trainers"][0]["queue"]["ready_batches"], 3);
  EXPECT_EQ(status["trainers"][0]["idle_s"], 0.0);
  EXPECT_TRUE(status["trainers"][0].contains("batches_per_s"));
  EXPECT_EQ(std::get<wire::DrainAnswer>(exchange(*operator_client, wire::DrainRequest{.worker_id = 8})),
            (wire::DrainAnswer{.worker_id = 8, .is_known = false}));
  const uint64_t worker_id = id_of(Role::kWorker, 7);
  EXPECT_EQ(std::get<wire::DrainAnswer>(exchange(*operator_client, wire::DrainRequest{.worker_id = worker_id})),
            (wire::DrainAnswer{.worker_id = worker_id, .is_known = true}));
  wire::WorkerReport at_work = worker(7);
  at_work.trainer_id =
      id_of(Role::kTrainer, 9);  // it has not left the trainer, which would take it off the roster at once
  EXPECT_TRUE(orders_when(*worker_client, at_work, [](const auto& o) { return o.is_to_drain; }).is_to_drain);
  // It is told so without asking, after the earlier messages.
  TrainerRoster pushed = roster;
  while (!pushed.entries.empty() && !pushed.entries[0].worker.is_withdrawn)
    pushed = std::get<TrainerRoster>(next(*trainer_client));
  ASSERT_EQ(pushed.entries.size(), 1u);
  EXPECT_GT(pushed.view, roster.view);
}

TEST_F(ControllerTest, TellsAnOperatorWhatAJobHasCostAlsoAfterItsEnd) {
  const auto trainer_client = join(Role::kTrainer);
  const auto operator_client = join(Role::kOperator);
  wire::TrainerReport report = trainer(9);
  report.about = "node7, process 3";
  report.costs = {
      .served_ns = 7'200'000'000'000, .tenancy_count = 2, .sample_count = 500, .batch_bytes = 12'345'678'901};
  exchange(*trainer_client, report);
  const wire::CostsRequest request{.price_per_hour = {.is_given = true, .micros = 250'000},
                                   .gco2_per_kwh = {.is_given = true, .micros = 400'000'000}};
  const auto running = parsed(std::get<wire::Costs>(exchange(*operator_client, request)).json);
  EXPECT_EQ(running["factors"],
            nlohmann::json({{"price_per_hour", 0.25}, {"energy_price_per_kwh", nullptr}, {"gco2_per_kwh", 400}}));
  ASSERT_EQ(running["jobs"].size(), 1u) << running;
  const auto& job = running["jobs"][0];
  EXPECT_EQ(job["job"], "train.py");
  EXPECT_EQ(job["about"], "node7, process 3");
  EXPECT_EQ(job["is_running"], true);
  EXPECT_EQ(job["tenancies"], 2);
  EXPECT_EQ(job["metered_tenancies"], 0);
  EXPECT_EQ(job["total"], nlohmann::json({{"worker_hours", 2},
                                          {"cpu_hours", 0},
                                          {"bytes", 12345678901},
                                          {"batches", 0},
                                          {"samples", 500},
                                          {"energy_j", nullptr},
                                          {"gpu_energy_j", nullptr},
                                          {"money", 0.5},
                                          {"gco2", nullptr}}));
  EXPECT_EQ(job["per_1000_samples"]["worker_hours"], 4);

  // The farewell is not answered, and comes before what is said on the same connection after it.
  ASSERT_TRUE(trainer_client->send(
      wire::write_control(wire::Deregistration{.id = report.trainer_id, .is_worker = false, .secret = report.secret})));
  ASSERT_TRUE(trainer_client->send(wire::write_control(wire::StatusRequest{})));
  while (!std::holds_alternative<wire::Refusal>(next(*trainer_client))) {
  }
  const auto ended = parsed(std::get<wire::Costs>(exchange(*operator_client, wire::CostsRequest{})).json);
  ASSERT_EQ(ended["jobs"].size(), 1u) << ended;
  EXPECT_EQ(ended["jobs"][0]["is_running"], false);
  EXPECT_EQ(ended["jobs"][0]["total"]["samples"], 500);
  EXPECT_TRUE(ended["jobs"][0]["total"]["energy_j"].is_null());
  EXPECT_TRUE(ended["jobs"][0]["total"]["money"].is_null());
}

TEST_F(ControllerTest, OnlyAnOperatorMayAskForCosts) {
  const auto trainer_client = join(Role::kTrainer);
  EXPECT_TRUE(std::holds_alternative<wire::Refusal>(exchange(*trainer_client, wire::CostsRequest{})));
}

TEST_F(ControllerTest, SilentWorkerIsTakenOffTheRosterAndFenced) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  settled(*worker_client, *trainer_client);
  const auto deadline = Clock::now() + kPatience;
  TrainerRoster roster;
  do {
    const auto answer = exchange(*trainer_client, trainer(9));
    roster = std::get<TrainerRoster>(answer);
    const net::Waitable waitables[] = {trainer_client->waitables()[0]};
    ASSERT_TRUE(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(200)));
  } while (!roster.entries.empty() && Clock::now() < deadline);
  EXPECT_TRUE(roster.entries.empty());
  EXPECT_TRUE(orders_when(*worker_client, worker(7), [](const auto& o) { return o.is_fenced; }).is_fenced);
}

TEST_F(ControllerTest, ControllerThatStartsAgainAdoptsWhoWorksForWhom) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  const auto before = settled(*worker_client, *trainer_client);
  const net::Endpoint endpoint = endpoint_;
  stop();
  start(endpoint);
  for (const auto* client : {worker_client.get(), trainer_client.get()}) {
    auto& socket = const_cast<net::ClientSocket&>(*client);
    const auto deadline = Clock::now() + kPatience;
    do {
      next_event(socket);
    } while (!socket.is_connected() && Clock::now() < deadline);
    ASSERT_TRUE(socket.is_connected());
  }
  auto serving = worker(7);
  serving.trainer_id = id_of(Role::kTrainer, 9);
  EXPECT_FALSE(std::get<WorkerOrders>(exchange(*worker_client, serving)).is_fenced);
  const auto first = std::get<TrainerRoster>(exchange(*trainer_client, trainer(9)));
  EXPECT_FALSE(first.is_settled);
  EXPECT_NE(first.controller_id, before.controller_id);
  const auto after = settled(*worker_client, *trainer_client);
  ASSERT_EQ(after.entries.size(), 1u);
  EXPECT_EQ(after.entries[0].worker, before.entries[0].worker);
}

TEST_F(ControllerTest, RolesMayDoNoMoreThanTheirs) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  const auto operator_client = join(Role::kOperator);
  const auto expect_refusal = [](const ControlMessage& answer, const std::string& word) {
    const auto* refusal = std::get_if<wire::Refusal>(&answer);
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find(word), std::string::npos) << refusal->reason;
  };
  expect_refusal(exchange(*worker_client, trainer(1)), "worker");
  expect_refusal(exchange(*worker_client, wire::StatusRequest{}), "worker");
  expect_refusal(exchange(*trainer_client, worker(1)), "trainer");
  expect_refusal(exchange(*trainer_client, wire::DrainRequest{.worker_id = 1}), "trainer");
  expect_refusal(exchange(*trainer_client, wire::Deregistration{.id = 1, .is_worker = true}), "trainer");
  expect_refusal(exchange(*operator_client, worker(1)), "operator");
  stop();
}

TEST_F(ControllerTest, GarbageAndOtherVersionsAreAnsweredWithASentence) {
  const auto client = join(Role::kTrainer);
  ASSERT_TRUE(client->send(filled(100, 7)));
  EXPECT_NE(std::get<wire::Refusal>(next(*client)).reason.find("PNC1"), std::string::npos);
  auto newer = wire::write_control(trainer(1));
  constexpr uint16_t kOther = wire::kControlVersion + 1;
  newer[4] = std::byte{kOther};
  ASSERT_TRUE(client->send(newer));
  EXPECT_NE(std::get<wire::Refusal>(next(*client)).reason.find("version " + std::to_string(kOther)), std::string::npos);
  EXPECT_TRUE(std::holds_alternative<TrainerRoster>(exchange(*client, trainer(1))));
}

// `penstock status --json` printed text that no JSON reader took: it ended in the middle of a worker.
TEST(PoolStatus, StatusOfMoreThanFitsIsWholeJsonThatCountsWhatIsLeftOut) {
  const Instant now{};
  scheduling::Roster roster(1, now);
  for (uint64_t id = 1; id <= 300; ++id) {
    roster.worker_reported({.worker_id = id,
                            .incarnation = 1,
                            .endpoint = "tcp://127.0.0.1:5",
                            .about = std::string(wire::kControlAboutBytesMax, '\xff')},
                           now);
    roster.trainer_reported({.trainer_id = id,
                             .job = "train.py",
                             .worker_count_max = 8,
                             .queue = {},
                             .about = std::string(wire::kControlAboutBytesMax, '\xff')},
                            now);
  }
  const std::string json =
      status_json(roster, {}, {}, {.endpoint = "tcp://127.0.0.1:7000"}, now, wire::kControlTextBytesMax);
  EXPECT_LE(json.size(), wire::kControlTextBytesMax);
  const auto status = parsed(json);
  EXPECT_GT(status["workers"].size(), 50u);
  EXPECT_GT(status["trainers"].size(), 50u);
  EXPECT_EQ(status["workers_left_out"], 300 - status["workers"].size());
  EXPECT_EQ(status["trainers_left_out"], 300 - status["trainers"].size());
  // A message carries all of it.
  const auto sent = wire::parse_control(wire::write_control(wire::Status{json}));
  ASSERT_TRUE(sent) << sent.error().message;
  EXPECT_EQ(std::get<wire::Status>(sent.value()).json, json);
}

TEST(PoolStatus, LargeWorkerDoesNotHideThoseBehindIt) {
  const Instant now{};
  scheduling::Roster roster(1, now);
  roster.worker_reported({.worker_id = 1, .incarnation = 1, .endpoint = "tcp://a:1", .about = std::string(4096, '\1')},
                         now);
  roster.worker_reported({.worker_id = 2, .incarnation = 1, .endpoint = "tcp://b:1", .about = "small"}, now);
  const std::string json = status_json(roster, {}, {}, {.endpoint = "tcp://127.0.0.1:7000"}, now, 16 << 10);
  const auto status = parsed(json);
  ASSERT_EQ(status["workers"].size(), 1u) << json;
  EXPECT_EQ(status["workers"][0]["endpoint"], "tcp://b:1");
  EXPECT_EQ(status["workers_left_out"], 1);
}

TEST(PoolStatus, IdsAreSixteenDigits) {
  EXPECT_EQ(format_id(0xabc), "0000000000000abc");
  EXPECT_EQ(format_id(~uint64_t{0}), "ffffffffffffffff");
}

wire::PublicKeyBytes bytes_of(const net::PublicKey& key) {
  wire::PublicKeyBytes bytes{};
  std::ranges::copy(key.bytes(), bytes.begin());
  return bytes;
}

// Whoever had the worker's key could listen in the place of another worker.
TEST_F(ControllerTest, TellsATrainerTheKeyOfEachWorkersConnectionAndAnOperatorItsMachine) {
  const auto role_client = join(Role::kWorker);
  const auto betas_client = join(betas_);
  const auto trainer_client = join(Role::kTrainer);
  const auto operator_client = join(Role::kOperator);
  const net::RunId betas_run = net::draw_run_id(betas_.public_key());
  wire::WorkerReport betas = worker(8);
  betas.worker_id = betas_run.id;
  betas.secret = betas_run.secret;
  const auto deadline = Clock::now() + kPatience;
  TrainerRoster roster;
  while (roster.entries.size() < 2 && Clock::now() < deadline) {
    const auto answer = exchange(*betas_client, betas);
    const auto* orders = std::get_if<WorkerOrders>(&answer);
    ASSERT_NE(orders, nullptr);
    if (orders->is_fenced) ++betas.incarnation;  // its lease ran out while the controller settled
    roster = settled(*role_client, *trainer_client);
  }
  ASSERT_EQ(roster.entries.size(), 2u);
  for (const TrainerRoster::Entry& entry : roster.entries) {
    const bool is_betas = entry.worker.worker_id == betas_run.id;
    EXPECT_EQ(entry.key, bytes_of(is_betas ? betas_.public_key() : keys_.public_key(Role::kWorker)));
  }
  const auto status = parsed(std::get<wire::Status>(exchange(*operator_client, wire::StatusRequest{})).json);
  ASSERT_EQ(status["workers"].size(), 2u) << status;
  const bool is_first = status["workers"][0]["machine"] == "beta";
  EXPECT_EQ(status["workers"][is_first ? 0 : 1]["machine"], "beta") << status;
  EXPECT_TRUE(status["workers"][is_first ? 1 : 0]["machine"].is_null()) << status;

  ControlMessage answer = exchange(*betas_client, worker(7));                         // with its secret, too
  while (std::holds_alternative<WorkerOrders>(answer)) answer = next(*betas_client);  // that were pushed before
  ASSERT_TRUE(std::holds_alternative<wire::Refusal>(answer));
  const auto after = parsed(std::get<wire::Status>(exchange(*operator_client, wire::StatusRequest{})).json);
  ASSERT_EQ(after["controller"]["offences"].size(), 1u) << after;
  EXPECT_EQ(after["controller"]["offences"][0]["by"], "the machine beta");
  EXPECT_TRUE(after["controller"]["offences"][0]["text"].get<std::string>().starts_with(
      "a process with the key of the machine beta "));
}

TEST_F(ControllerTest, KeyOfAMachineIsThatOfAWorkerAndOfNoOtherRole) {
  const auto client = join(betas_);
  for (const ControlMessage& message : {ControlMessage(trainer(1)), ControlMessage(wire::StatusRequest{}),
                                        ControlMessage(wire::DrainRequest{.worker_id = 1})}) {
    const auto answer = exchange(*client, message);
    const auto* refusal = std::get_if<wire::Refusal>(&answer);
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find("the key belongs to a worker"), std::string::npos) << refusal->reason;
  }
}

// One connection filled every trainer's roster with thousands of workers that were not there.
TEST_F(ControllerTest, ConnectionReportsOneWorkerOrOneTrainer) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  settled(*worker_client, *trainer_client);
  for (int number = 100; number < 110; ++number) {
    ControlMessage answer = exchange(*worker_client, worker(number));
    while (std::holds_alternative<WorkerOrders>(answer)) answer = next(*worker_client);  // that were pushed before
    const auto* refusal = std::get_if<wire::Refusal>(&answer);
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find("a connection must report one worker, got reports of " +
                                   format_id(id_of(Role::kWorker, 7)) + " and"),
              std::string::npos)
        << refusal->reason;
  }
  ControlMessage answer = exchange(*trainer_client, trainer(100));
  while (std::holds_alternative<TrainerRoster>(answer)) answer = next(*trainer_client);  // that were pushed before
  ASSERT_TRUE(std::holds_alternative<wire::Refusal>(answer));
  EXPECT_TRUE(std::holds_alternative<WorkerOrders>(exchange(*worker_client, worker(7)))) << "it is heard as before";
  const auto roster = exchange(*trainer_client, trainer(9));
  ASSERT_TRUE(std::holds_alternative<TrainerRoster>(roster));
  EXPECT_EQ(std::get<TrainerRoster>(roster).pool_count, 1u);
}

// Who had read an id in the status took a trainer off the roster, and fenced a worker.
TEST_F(ControllerTest, RunsOfOthersAreNeitherReportedNorEndedNorPlanned) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  const auto operator_client = join(Role::kOperator);
  settled(*worker_client, *trainer_client);
  const auto expect_refused = [](const ControlMessage& answer) {
    const auto* refusal = std::get_if<wire::Refusal>(&answer);
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find(" belongs to another key or process"), std::string::npos) << refusal->reason;
  };
  wire::TrainerReport with_id_alone = trainer(9);
  with_id_alone.secret = {};
  with_id_alone.worker_count_max = 0;
  const std::pair<const net::KeyPair*, wire::TrainerReport> impostors[] = {
      {&keys_.pair(Role::kTrainer), with_id_alone}, {&anns_, trainer(9)},  // who even has the secret
  };
  for (const auto& [pair, report] : impostors) {
    const auto impostor = join(*pair);
    expect_refused(exchange(*impostor, report));
    expect_refused(
        exchange(*impostor, wire::PlanReport{.trainer_id = report.trainer_id, .json = {}, .secret = report.secret}));
    expect_refused(exchange(*impostor, wire::Deregistration{.id = report.trainer_id, .secret = report.secret}));
    settled(*worker_client, *trainer_client);  // on a slow machine a lease would end
  }
  const auto impostor = join(Role::kWorker);
  wire::WorkerReport fencing = worker(7);
  fencing.secret = {};
  fencing.incarnation = ~uint32_t{0};
  expect_refused(exchange(*impostor, fencing));
  expect_refused(exchange(*impostor, wire::Deregistration{.id = fencing.worker_id, .is_worker = true}));

  for (int report = 0; report < 3; ++report)
    EXPECT_FALSE(std::get<WorkerOrders>(exchange(*worker_client, worker(7))).is_fenced);
  EXPECT_EQ(settled(*worker_client, *trainer_client).entries.size(), 1u);
  const std::string status = std::get<wire::Status>(exchange(*operator_client, wire::StatusRequest{})).json;
  std::map<std::string, int> counts;
  const auto offences = parsed(status)["controller"]["offences"];
  for (const auto& offence : offences) counts[offence["by"]] = offence["count"];
  EXPECT_EQ(counts, (std::map<std::string, int>{{"the user ann", 3}, {"the role trainer", 3}, {"the role worker", 2}}));
  EXPECT_NE(status.find("claimed to be trainer " + format_id(id_of(Role::kTrainer, 9))), std::string::npos) << status;
}

// 100 made-up trainers a second, each of which asked for one worker, left the only worker of a pool to nobody.
TEST_F(ControllerTest, MadeUpTrainersOfAnotherUserLeaveAnHonestOneItsWorker) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  settled(*worker_client, *trainer_client);
  std::vector<std::unique_ptr<net::ClientSocket>> made_up;
  for (int count = 0; count < 60; ++count) {
    made_up.push_back(join(anns_));
    wire::TrainerReport report = trainer(9);
    const net::RunId run = net::draw_run_id(anns_.public_key());
    report.trainer_id = run.id;
    report.secret = run.secret;
    report.worker_count_max = 1;
    EXPECT_TRUE(std::holds_alternative<TrainerRoster>(exchange(*made_up.back(), report)));
    if (count % 5 != 0) continue;
    const auto roster = settled(*worker_client, *trainer_client);
    ASSERT_EQ(roster.entries.size(), 1u);
    EXPECT_FALSE(roster.entries[0].worker.is_withdrawn);
  }
  wire::WorkerReport at_work = worker(7);
  at_work.trainer_id = id_of(Role::kTrainer, 9);
  const auto orders = orders_when(*worker_client, at_work, [](const auto& o) { return o.trainer_id != 0; });
  EXPECT_EQ(orders.trainer_id, at_work.trainer_id);
}

// A worker that waited for its next report to be answered would have refused a trainer that came sooner.
TEST_F(ControllerTest, WorkerIsToldAtOnceWhomItIsGivenTo) {
  const auto worker_client = join(Role::kWorker);
  const auto trainer_client = join(Role::kTrainer);
  const auto deadline = Clock::now() + kPatience;
  WorkerOrders orders;
  while (!orders.is_settled && Clock::now() < deadline) {
    orders = std::get<WorkerOrders>(exchange(*worker_client, worker(7)));
    const net::Waitable waitables[] = {worker_client->waitables()[0]};
    ASSERT_TRUE(net::wait_readable(waitables, {}, {}, std::chrono::milliseconds(200)));
  }
  ASSERT_TRUE(orders.is_settled);
  exchange(*trainer_client, trainer(9));
  while (orders.trainer_id == 0) orders = std::get<WorkerOrders>(next(*worker_client));  // without another report
  EXPECT_EQ(orders.trainer_id, id_of(Role::kTrainer, 9));
}

TEST_F(ControllerTest, WorkerThatConnectsAgainIsHeardOverItsNewConnection) {
  auto client = join(Role::kWorker);
  ASSERT_TRUE(std::holds_alternative<WorkerOrders>(exchange(*client, worker(7))));
  const auto again = join(Role::kWorker);
  EXPECT_TRUE(std::holds_alternative<WorkerOrders>(exchange(*again, worker(7))));
}

}  // namespace
}  // namespace penstock::controller
