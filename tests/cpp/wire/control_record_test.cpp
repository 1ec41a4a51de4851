// SPDX-License-Identifier: Apache-2.0
#include "wire/control_record.h"

#include <gtest/gtest.h>

#include <cstring>

#include "with.h"

namespace penstock::wire {
namespace {

std::vector<ControlMessage> one_of_each() {
  return {WorkerReport{.worker_id = 0x1122334455667788,
                       .incarnation = 3,
                       .endpoint = "tcp://10.0.0.7:41999",
                       .is_draining = true,
                       .trainer_id = 9,
                       .about = "host a, process 17",
                       .declined = {5, 0x1122334455667788},
                       .decline_reason = "no module named 'images'",
                       .name = "pool-3f2a-17",
                       .job_kinds = kJobKinds,
                       .torch = torch_number(2, 11),
                       .stuck_ms = 4321,
                       .host = {.cpu_permille = 875, .cpu_count = 64, .memory_bytes = 9, .memory_used_bytes = 8},
                       .kept_bytes = 77,
                       .kept_answers = 78,
                       .log = "12:00:01 listens at tcp://10.0.0.7:41999\n12:00:02 serves train.py",
                       .secret = {std::byte{1}, std::byte{2}}},
          WorkerOrders{.incarnation = 3,
                       .is_fenced = true,
                       .is_to_drain = false,
                       .controller_id = 4,
                       .view = 5,
                       .is_settled = true,
                       .trainer_id = 0x1122334455667788,
                       .is_to_part = true,
                       .keep_bytes = 79},
          TrainerReport{.trainer_id = 5,
                        .job = "train.py",
                        .worker_count_max = 64,
                        .queue = {.ready_batches = 1,
                                  .wanted_batches = 6,
                                  .asked_batches = 2,
                                  .bytes_in_flight = 3,
                                  .waited_ns = 4,
                                  .delivered_batches = 5,
                                  .is_paused = true,
                                  .step_count = 7,
                                  .stepping_ns = 8,
                                  .starved_ns = 9,
                                  .paused_ns = 10,
                                  .made_batches = 11,
                                  .made_ns = 12,
                                  .made_cpu_ns = 13,
                                  .made_bytes = 14,
                                  .link_bytes_per_s = 15,
                                  .hedged_batches = 26},
                        .steps = {.step_count = 27,
                                  .compute_ns = 28,
                                  .dataset_ns = 29,
                                  .collate_ns = 30,
                                  .prefix_ns = 31,
                                  .worker_ns = 32,
                                  .wire_ns = 33,
                                  .device_ns = 34,
                                  .order_ns = 35,
                                  .ranks_ns = 36,
                                  .loader_ns = 37},
                        .costs = {.served_ns = 16,
                                  .cpu_ns = 17,
                                  .energy_uj = 18,
                                  .tenancy_count = 19,
                                  .metered_tenancy_count = 20,
                                  .batch_count = 21,
                                  .sample_count = 22,
                                  .batch_bytes = 23},
                        .gpu = {.begin_uj = 24, .now_uj = 25},
                        .about = "",
                        .job_kind = JobKind::kPlugin,
                        .torch = torch_number(2, 15),
                        .job_rank = {.group = 0x1122334455667788, .rank = 3, .world_size = 8},
                        .secret = {std::byte{3}}},
          TrainerRoster{.controller_id = 1,
                        .view = 2,
                        .is_settled = true,
                        .pool_count = 3,
                        .declined_count = 1,
                        .entries = {{{.worker_id = 7, .incarnation = 1, .is_withdrawn = false},
                                     "tcp://[::1]:1",
                                     {std::byte{6}, std::byte{7}}},
                                    {{.worker_id = 8, .incarnation = 2, .is_withdrawn = true}, "tcp://b:2", {}}},
                        .declines = {{.worker_id = 9, .reason = "no module named 'images'"}}},
          Deregistration{.id = 6, .is_worker = true, .secret = {std::byte{4}}},
          StatusRequest{},
          Status{.json = R"({"workers": []})"},
          DrainRequest{.worker_id = 7},
          DrainAnswer{.worker_id = 7, .is_known = true},
          Refusal{.reason = "another version", .is_for_now = true},
          ScaleReport{.adapter_id = 3,
                      .engine = "slurm",
                      .worker_count_min = 1,
                      .worker_count_max = 64,
                      .idle_ms = 60'000,
                      .start_allowance_ms = 30'000,
                      .price_micros_per_hour = 120'000,
                      .has_budget = true,
                      .budget_micros = 5'000'000,
                      .spent_worker_ms = 77,
                      .refusal_count = 2,
                      .refusal = "the partition is full",
                      .trouble = "squeue did not answer within 10 s",
                      .workers = {{"pool-3f2a-16", EngineWorker::State::kRunning},
                                  {"pool-3f2a-17", EngineWorker::State::kStopping}}},
          ScaleOrders{.adapter_id = 3,
                      .wanted_count = 5,
                      .reason = "jobs can use 5",
                      .is_to_end = true,
                      .stops = {"pool-3f2a-16", "pool-3f2a-17"}},
          EndRequest{},
          EndAnswer{.has_engine = true},
          CostsRequest{.price_per_hour = {.is_given = true, .micros = 120'000},
                       .energy_price_per_kwh = {},
                       .gco2_per_kwh = {.is_given = true, .micros = 350'000'000}},
          Costs{.json = R"({"jobs": []})"},
          PlanReport{.trainer_id = 5, .change_count = 2, .json = R"({"calls": []})", .secret = {std::byte{5}}},
          PlanRequest{.trainer_id = 5},
          PlanAnswer{.trainer_id = 5, .json = R"({"calls": []})"}};
}

TEST(ControlRecord, EveryMessageComesBack) {
  const auto messages = one_of_each();
  ASSERT_EQ(messages.size(), std::variant_size_v<ControlMessage>);
  for (const auto& message : messages) {
    const auto parsed = parse_control(write_control(message));
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed.value(), message);
  }
}

TEST(ControlRecord, HasTheBytesOfTheSpecification) {
  const std::vector<uint8_t> expected{0x50, 0x4e, 0x43, 0x31, 9, 0, 9, 0,  // PNC1, version 9, drain answer
                                      7,    0,    0,    0,    0, 0, 0, 0,  // worker 7
                                      1};                                  // which is known
  const auto bytes = write_control(DrainAnswer{.worker_id = 7, .is_known = true});
  ASSERT_EQ(bytes.size(), expected.size());
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), expected.size()), 0);
}

TEST(ControlRecord, EveryTruncationAndEveryAppendedByteIsRefused) {
  for (const auto& message : one_of_each()) {
    auto bytes = write_control(message);
    for (size_t size = 0; size < bytes.size(); ++size) {
      const auto parsed = parse_control(std::span(bytes).first(size));
      ASSERT_FALSE(parsed);
      EXPECT_EQ(parsed.error().code, Errc::kMalformed) << parsed.error().message;
    }
    bytes.push_back(std::byte{0});
    EXPECT_FALSE(parse_control(bytes));
  }
}

TEST(ControlRecord, NoFlippedBitCrashesOrAddsUnseenBytes) {
  for (const auto& message : one_of_each()) {
    const auto bytes = write_control(message);
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      auto flipped = bytes;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      const auto parsed = parse_control(flipped);
      if (!parsed) continue;
      EXPECT_EQ(write_control(parsed.value()), flipped);
    }
  }
}

TEST(ControlRecord, AnotherVersionIsAMismatchThatNamesBoth) {
  const auto parsed = parse_control(with<uint16_t>(write_control(StatusRequest{}), 4, kControlVersion + 1));
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code, Errc::kMismatch);
  for (const int version : {kControlVersion + 0, kControlVersion + 1})
    EXPECT_NE(parsed.error().message.find("version " + std::to_string(version)), std::string::npos);
}

TEST(ControlRecord, LengthsAboveTheirCapsAreRefusedBeforeTheyAreBelieved) {
  const auto text = with<uint32_t>(write_control(Refusal{.reason = "x"}), 8, 0xffffffff);
  EXPECT_EQ(parse_control(text).error().code, Errc::kTooLarge);
  const auto list = with<uint32_t>(write_control(TrainerRoster{}), 8 + 25, 0xffffffff);
  EXPECT_EQ(parse_control(list).error().code, Errc::kTooLarge);
  EXPECT_EQ(parse_control(std::vector<std::byte>(kControlBytesMax + 1)).error().code, Errc::kTooLarge);
}

TEST(ControlRecord, WhatIsAboveACapIsCutOffByTheWriter) {
  const auto parsed = parse_control(write_control(Refusal{.reason = std::string(kControlAboutBytesMax + 1, 'x')}));
  ASSERT_TRUE(parsed);
  EXPECT_EQ(std::get<Refusal>(parsed.value()).reason.size(), kControlAboutBytesMax);
  TrainerRoster roster;
  roster.entries.resize(kRosterCountMax + 1);
  roster.declines.resize(kRosterDeclineCountMax + 1);
  const auto cut = parse_control(write_control(roster));
  ASSERT_TRUE(cut) << cut.error().message;
  EXPECT_EQ(std::get<TrainerRoster>(cut.value()).entries.size(), kRosterCountMax);
  EXPECT_EQ(std::get<TrainerRoster>(cut.value()).declines.size(), kRosterDeclineCountMax);
  ScaleReport scale;
  scale.workers.resize(kEngineWorkerCountMax + 1);
  scale.refusal.resize(kControlReasonBytesMax + 1);
  const auto cut_scale = parse_control(write_control(scale));
  ASSERT_TRUE(cut_scale) << cut_scale.error().message;
  EXPECT_EQ(std::get<ScaleReport>(cut_scale.value()).workers.size(), kEngineWorkerCountMax);
  EXPECT_EQ(std::get<ScaleReport>(cut_scale.value()).refusal.size(), kControlReasonBytesMax);
  WorkerReport report{.worker_id = 1};
  report.declined.resize(kDeclinedCountMax + 1);
  report.decline_reason.resize(kControlReasonBytesMax + 1);
  const auto shorter = parse_control(write_control(report));
  ASSERT_TRUE(shorter) << shorter.error().message;
  EXPECT_EQ(std::get<WorkerReport>(shorter.value()).declined.size(), kDeclinedCountMax);
  EXPECT_EQ(std::get<WorkerReport>(shorter.value()).decline_reason.size(), kControlReasonBytesMax);
}

TEST(ControlRecord, StateThatNoWorkerHasIsMalformed) {
  auto bytes = write_control(ScaleReport{.workers = {{"a", EngineWorker::State::kRunning}}});
  bytes.back() = std::byte{3};
  EXPECT_EQ(parse_control(bytes).error().code, Errc::kMalformed);
}

}  // namespace
}  // namespace penstock::wire
