// SPDX-License-Identifier: Apache-2.0
// Workers, trainers and operators whose messages to a controller are as they should be but for one field. There is a
// case for each field of what a controller reads, and a field without a case does not compile.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "../base/field_count.h"
#include "controller_fixture.h"

namespace penstock::controller {
namespace {

using net::Role;
using test::field_count;
using wire::ControlMessage;
using wire::TrainerRoster;
using wire::WorkerOrders;

constexpr uint64_t kMost = ~uint64_t{0};
constexpr uint32_t kMostOf32 = ~uint32_t{0};
constexpr uint64_t kMostTaken = uint64_t{1} << 62;  // of a total; a report with more is refused

class HostilePeerTest : public ControllerTest {
 protected:
  HostilePeerTest() { settled(*worker_client_, *trainer_client_); }

  // Sends the messages over a connection of their own, and returns the answers. Whatever the controller makes of them,
  // it comes to the end of them, and others are served.
  std::vector<ControlMessage> expect_others_served_beside(Role role, const std::vector<ControlMessage>& messages) {
    const auto hostile = join(role);
    for (const ControlMessage& message : messages) EXPECT_TRUE(hostile->send(wire::write_control(message)));
    auto last = wire::write_control(wire::StatusRequest{});
    last[4] = std::byte{77};
    EXPECT_TRUE(hostile->send(last));
    std::vector<ControlMessage> answers;
    const auto is_last = [](const ControlMessage& answer) {
      const auto* refusal = std::get_if<wire::Refusal>(&answer);
      return refusal != nullptr && refusal->reason.find("version 77") != std::string::npos;
    };
    while (!HasFailure() && (answers.empty() || !is_last(answers.back()))) answers.push_back(next(*hostile));
    if (!answers.empty()) answers.pop_back();
    net::ClientReceipt pushed;
    for (net::ClientSocket* client : {trainer_client_.get(), worker_client_.get()}) {
      while (client->try_receive(pushed).value()) {
      }
    }
    expect_all_served(*worker_client_, *trainer_client_, *operator_client_);
    return answers;
  }
  // The same, where each answer is of this kind or a refusal.
  template <typename Answer>
  void expect_others_served_beside(Role role, const std::vector<ControlMessage>& messages) {
    for (const ControlMessage& answer : expect_others_served_beside(role, messages))
      EXPECT_TRUE(std::holds_alternative<Answer>(answer) || std::holds_alternative<wire::Refusal>(answer));
  }

  // A trainer that reports as it should, then wrongly, and then as it should once more, so that its totals fall.
  void expect_others_served_beside_trainer(const std::vector<wire::TrainerReport>& wrong) {
    std::vector<ControlMessage> messages{trainer(8)};
    for (const wire::TrainerReport& report : wrong) messages.emplace_back(report);
    messages.emplace_back(trainer(8));
    for (const wire::TrainerReport& report : wrong) messages.emplace_back(deregistration(report));
    messages.emplace_back(deregistration(trainer(8)));
    expect_others_served_beside<TrainerRoster>(Role::kTrainer, messages);
  }
  // One of its totals: as many as are taken, and more.
  template <typename Part>
  void expect_others_served_beside_totals(Part wire::TrainerReport::*part, std::span<uint64_t Part::*const> totals) {
    for (size_t index = 0; index < totals.size(); ++index) {
      SCOPED_TRACE("total " + std::to_string(index));
      std::vector<wire::TrainerReport> wrong(2, trainer(8));
      wrong[0].*part.*totals[index] = kMostTaken;
      wrong[1].*part.*totals[index] = kMost;
      expect_others_served_beside_trainer(wrong);
    }
  }

  const std::unique_ptr<net::ClientSocket> worker_client_ = join(Role::kWorker);
  const std::unique_ptr<net::ClientSocket> trainer_client_ = join(Role::kTrainer);
  const std::unique_ptr<net::ClientSocket> operator_client_ = join(Role::kOperator);
};

TEST_F(HostilePeerTest, WorkersReportWithOneWrongFieldLeavesOthersServed) {
  const auto alterations = std::to_array<void (*)(wire::WorkerReport&)>({
      [](auto& r) { r.worker_id = 0; },
      [](auto& r) { r.incarnation = kMostOf32; },
      [](auto& r) { r.endpoint = std::string(256, '\xff'); },
      [](auto& r) { r.is_draining = true; },
      [](auto& r) { r.trainer_id = 12345; },
      [](auto& r) { r.about = std::string(4096, '\0'); },
      [](auto& r) { r.declined.assign(64, 9); },
      [](auto& r) { r.decline_reason = std::string(1024, '"'); },
      [](auto& r) { r.name = std::string(128, '\\'); },
      [](auto& r) { r.job_kinds = 0xff; },
      [](auto& r) { r.torch = 0xffff; },
      [](auto& r) { r.stuck_ms = kMostOf32; },
      [](auto& r) { r.kept_bytes = kMost; },
      [](auto& r) { r.kept_answers = kMost; },
      [](auto& r) { r.host = {.cpu_permille = 1001, .memory_bytes = 1, .memory_used_bytes = 2}; },
      [](auto& r) { r.log = std::string(wire::kLogBytesMax, '\xff'); },
      [](auto& r) { r.secret[0] ^= std::byte{1}; },
  });
  static_assert(alterations.size() == field_count<wire::WorkerReport>(), "a field of a worker's report has no case");
  for (size_t index = 0; index < alterations.size(); ++index) {
    SCOPED_TRACE("field " + std::to_string(index));
    wire::WorkerReport wrong = worker(8);
    alterations[index](wrong);
    expect_others_served_beside<WorkerOrders>(
        Role::kWorker, {worker(8), wrong, worker(8), deregistration(wrong), deregistration(worker(8))});
  }
}

TEST_F(HostilePeerTest, TrainersReportWithOneWrongFieldLeavesOthersServed) {
  const auto alterations = std::to_array<void (*)(wire::TrainerReport&)>({
      [](auto& r) { r.trainer_id = 0; },
      [](auto& r) { r.job = std::string(256, '"'); },
      [](auto& r) { r.worker_count_max = kMostOf32; },
      [](auto& r) { r.about = std::string(4096, '\xff'); },
      [](auto& r) { r.job_kind = wire::JobKind::kPlugin; },
      [](auto& r) { r.torch = 0xffff; },
      [](auto& r) { r.secret[0] ^= std::byte{1}; },
  });
  const auto ranks = std::to_array<void (*)(wire::JobRank&)>({
      [](auto& r) { r.group = kMost; },
      [](auto& r) { r.rank = kMostOf32; },
      [](auto& r) { r.world_size = 0; },
  });
  static_assert(ranks.size() == field_count<wire::JobRank>(), "a field of a rank has no case");
  const auto flags = std::to_array<void (*)(wire::QueueSignal&)>({
      [](auto& q) { q.ready_batches = kMostOf32; },
      [](auto& q) { q.wanted_batches = kMostOf32; },
      [](auto& q) { q.asked_batches = kMostOf32; },
      [](auto& q) { q.is_paused = true; },
  });
  using Queue = wire::QueueSignal;
  const auto of_queue = std::to_array<uint64_t Queue::*>(
      {&Queue::bytes_in_flight, &Queue::waited_ns, &Queue::delivered_batches, &Queue::step_count, &Queue::stepping_ns,
       &Queue::starved_ns, &Queue::paused_ns, &Queue::made_batches, &Queue::made_ns, &Queue::made_cpu_ns,
       &Queue::made_bytes, &Queue::link_bytes_per_s, &Queue::hedged_batches});
  static_assert(flags.size() + of_queue.size() == field_count<Queue>(), "a field of a queue has no case");
  using Steps = wire::StepTotals;
  const auto of_steps = std::to_array<uint64_t Steps::*>(
      {&Steps::step_count, &Steps::compute_ns, &Steps::dataset_ns, &Steps::collate_ns, &Steps::prefix_ns,
       &Steps::worker_ns, &Steps::wire_ns, &Steps::device_ns, &Steps::order_ns, &Steps::ranks_ns, &Steps::loader_ns});
  static_assert(of_steps.size() == field_count<Steps>(), "a field of the steps has no case");
  using Costs = wire::JobCosts;
  const auto of_costs = std::to_array<uint64_t Costs::*>(
      {&Costs::served_ns, &Costs::cpu_ns, &Costs::energy_uj, &Costs::tenancy_count, &Costs::metered_tenancy_count,
       &Costs::batch_count, &Costs::sample_count, &Costs::batch_bytes});
  static_assert(of_costs.size() == field_count<Costs>(), "a field of the costs has no case");
  using Gpu = wire::GpuMeter;
  const auto of_gpu = std::to_array<uint64_t Gpu::*>({&Gpu::begin_uj, &Gpu::now_uj});
  static_assert(of_gpu.size() == field_count<Gpu>(), "a field of a GPU's meter has no case");
  static_assert(alterations.size() + 5 == field_count<wire::TrainerReport>(),
                "a field of a trainer's report has no case");  // the five have tables of their own
  for (size_t index = 0; index < alterations.size(); ++index) {
    SCOPED_TRACE("field " + std::to_string(index));
    wire::TrainerReport wrong = trainer(8);
    alterations[index](wrong);
    expect_others_served_beside_trainer({wrong});
  }
  for (size_t index = 0; index < ranks.size(); ++index) {
    SCOPED_TRACE("rank's field " + std::to_string(index));
    wire::TrainerReport wrong = trainer(8);
    ranks[index](wrong.job_rank);
    expect_others_served_beside_trainer({wrong});
  }
  for (size_t index = 0; index < flags.size(); ++index) {
    SCOPED_TRACE("queue's field " + std::to_string(index));
    wire::TrainerReport wrong = trainer(8);
    flags[index](wrong.queue);
    expect_others_served_beside_trainer({wrong});
  }
  expect_others_served_beside_totals(&wire::TrainerReport::queue, std::span<uint64_t Queue::*const>(of_queue));
  expect_others_served_beside_totals(&wire::TrainerReport::steps, std::span<uint64_t Steps::*const>(of_steps));
  expect_others_served_beside_totals(&wire::TrainerReport::costs, std::span<uint64_t Costs::*const>(of_costs));
  expect_others_served_beside_totals(&wire::TrainerReport::gpu, std::span<uint64_t Gpu::*const>(of_gpu));
}

TEST_F(HostilePeerTest, FarewellWithOneWrongFieldLeavesOthersServed) {
  static_assert(field_count<wire::Deregistration>() == 3, "a field of a farewell has no case");
  const auto alterations_of = [this](const wire::Deregistration& right) {
    std::vector<wire::Deregistration> wrong(2, right);
    wrong[0].is_worker = !right.is_worker;
    wrong[1].secret[0] ^= std::byte{1};
    for (const uint64_t id : {uint64_t{0}, id_of(Role::kWorker, 7), id_of(Role::kTrainer, 9), uint64_t{12345}, kMost}) {
      for (const bool is_worker : {false, true})
        wrong.push_back({.id = id, .is_worker = is_worker, .secret = right.secret});
    }
    return wrong;
  };
  const wire::Deregistration of_worker = deregistration(worker(8));
  const wire::Deregistration of_trainer = deregistration(trainer(8));
  for (const wire::Deregistration& wrong : alterations_of(of_worker)) {
    SCOPED_TRACE("a worker's, " + std::to_string(wrong.id) + (wrong.is_worker ? ", a worker" : ", a trainer"));
    expect_others_served_beside<WorkerOrders>(Role::kWorker, {worker(8), wrong, worker(8), of_worker});
  }
  for (const wire::Deregistration& wrong : alterations_of(of_trainer)) {
    SCOPED_TRACE("a trainer's, " + std::to_string(wrong.id) + (wrong.is_worker ? ", a worker" : ", a trainer"));
    expect_others_served_beside<TrainerRoster>(Role::kTrainer, {trainer(8), wrong, trainer(8), of_trainer});
  }
}

TEST_F(HostilePeerTest, PlanWithOneWrongFieldLeavesOthersServed) {
  static_assert(field_count<wire::PlanReport>() == 4, "a field of a plan has no case");
  const net::RunId& its_run = run(Role::kTrainer, 8);
  const wire::PlanReport right{
      .trainer_id = its_run.id, .change_count = 1, .json = R"({"calls": []})", .secret = its_run.secret};
  const auto alterations = std::to_array<void (*)(wire::PlanReport&, uint64_t)>({
      [](auto& p, uint64_t) { p.trainer_id = 0; },
      [](auto& p, uint64_t other_id) { p.trainer_id = other_id; },
      [](auto& p, uint64_t) { p.trainer_id = 12345; },
      [](auto& p, uint64_t) { p.change_count = kMost; },
      [](auto& p, uint64_t) { p.json = ""; },
      [](auto& p, uint64_t) { p.json = "}"; },
      [](auto& p, uint64_t) { p.json = std::string(wire::kPlanBytesMax, '\xff'); },
      [](auto& p, uint64_t) { p.secret[0] ^= std::byte{1}; },
  });
  for (size_t index = 0; index < alterations.size(); ++index) {
    SCOPED_TRACE("case " + std::to_string(index));
    wire::PlanReport wrong = right;
    alterations[index](wrong, id_of(Role::kTrainer, 9));
    // Before its trainer reports, too.
    expect_others_served_beside<TrainerRoster>(
        Role::kTrainer, {wrong, trainer(8), right, wrong, trainer(8), deregistration(trainer(8))});
    EXPECT_EQ(std::get<wire::PlanAnswer>(exchange(*operator_client_, wire::PlanRequest{.trainer_id = its_run.id})),
              (wire::PlanAnswer{.trainer_id = its_run.id, .json = ""}));
  }
}

TEST_F(HostilePeerTest, ScaleReportWithOneWrongFieldLeavesOthersServed) {
  const wire::ScaleReport right{.adapter_id = 3,
                                .engine = "local",
                                .worker_count_max = 8,
                                .idle_ms = 1000,
                                .start_allowance_ms = 20'000,
                                .price_micros_per_hour = 120'000,
                                .has_budget = true,
                                .budget_micros = 5'000'000};
  const auto alterations = std::to_array<void (*)(wire::ScaleReport&)>({
      [](auto& r) { r.adapter_id = 0; },
      [](auto& r) { r.engine = std::string(128, '"'); },
      [](auto& r) { r.worker_count_min = kMostOf32; },
      [](auto& r) { r.worker_count_max = kMostOf32; },
      [](auto& r) { r.idle_ms = kMost; },
      [](auto& r) { r.start_allowance_ms = kMost; },
      [](auto& r) { r.price_micros_per_hour = kMost; },
      [](auto& r) { r.has_budget = false; },
      [](auto& r) { r.budget_micros = kMost; },
      [](auto& r) { r.spent_worker_ms = kMost; },
      [](auto& r) { r.refusal_count = kMost; },
      [](auto& r) { r.refusal = std::string(1024, '\xff'); },
      [](auto& r) { r.trouble = std::string(1024, '\0'); },
      [](auto& r) {
        for (size_t count = 0; count < wire::kEngineWorkerCountMax; ++count)
          r.workers.push_back({.name = std::to_string(count), .state = wire::EngineWorker::State::kRunning});
      },
  });
  static_assert(alterations.size() == field_count<wire::ScaleReport>(), "a field of a scale report has no case");
  static_assert(field_count<wire::EngineWorker>() == 2, "a field of an engine's worker has no case");
  for (size_t index = 0; index < alterations.size(); ++index) {
    SCOPED_TRACE("field " + std::to_string(index));
    wire::ScaleReport wrong = right;
    alterations[index](wrong);
    expect_others_served_beside<wire::ScaleOrders>(Role::kOperator, {right, wrong, right});
  }
  using State = wire::EngineWorker::State;
  for (const State state : {State::kStarting, State::kRunning, State::kStopping}) {
    for (const std::string& name : {std::string(), std::string(128, '\xff')}) {
      SCOPED_TRACE("a worker in state " + std::to_string(static_cast<int>(state)));
      wire::ScaleReport wrong = right;
      wrong.workers.assign(wire::kEngineWorkerCountMax, {.name = name, .state = state});
      expect_others_served_beside<wire::ScaleOrders>(Role::kOperator, {right, wrong, right});
    }
  }
}

TEST_F(HostilePeerTest, OperatorsQuestionWithOneWrongFieldIsAnswered) {
  static_assert(field_count<wire::DrainRequest>() == 1 && field_count<wire::PlanRequest>() == 1,
                "a field of an operator's question has no case");
  for (const uint64_t id : {uint64_t{0}, id_of(Role::kTrainer, 9), kMost}) {
    SCOPED_TRACE(id);
    const auto answers = expect_others_served_beside(
        Role::kOperator, {wire::DrainRequest{.worker_id = id}, wire::PlanRequest{.trainer_id = id}});
    EXPECT_EQ(answers, (std::vector<ControlMessage>{wire::DrainAnswer{.worker_id = id, .is_known = false},
                                                    wire::PlanAnswer{.trainer_id = id, .json = ""}}));
  }
  // Of a job whose costs are as large as they may be.
  wire::TrainerReport dear = trainer(10);
  dear.costs = {.served_ns = kMostTaken, .energy_uj = kMostTaken, .sample_count = 1, .batch_bytes = kMostTaken};
  const auto trainer_client = join(Role::kTrainer);
  ASSERT_TRUE(std::holds_alternative<TrainerRoster>(exchange(*trainer_client, dear)));
  using Request = wire::CostsRequest;
  const auto factors = std::to_array<wire::CostFactor Request::*>(
      {&Request::price_per_hour, &Request::energy_price_per_kwh, &Request::gco2_per_kwh});
  static_assert(factors.size() == field_count<Request>() && field_count<wire::CostFactor>() == 2,
                "a field of a question for costs has no case");
  for (const auto factor : factors) {
    for (const bool is_given : {false, true}) {
      Request request;
      request.*factor = {.is_given = is_given, .micros = kMost};
      const auto answers = expect_others_served_beside(Role::kOperator, {request});
      ASSERT_EQ(answers.size(), 1u);
      const auto* costs = std::get_if<wire::Costs>(&answers[0]);
      ASSERT_NE(costs, nullptr);
      parsed(costs->json);
      for (const char* no_number : {": inf", ": nan", ": -nan"})
        EXPECT_EQ(costs->json.find(no_number), std::string::npos) << costs->json;
    }
  }
}

}  // namespace
}  // namespace penstock::controller
