// SPDX-License-Identifier: Apache-2.0
// Control messages, as controller, workers, trainers and operators read them of each other.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/control_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kHeadBytes = 8;
constexpr size_t kEmptyEntryBytes = 49;    // of a roster, without an endpoint
constexpr size_t kEmptyDeclineBytes = 12;  // without a reason
constexpr size_t kEmptyEngineWorkerBytes = 5;

void check_text(const std::string& text, size_t bytes_max) {
  expect(text.size() <= bytes_max, "texts are within their caps");
  touch(std::as_bytes(std::span(text)));
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const wire::RosterEntry worker{.worker_id = 7, .incarnation = 2, .is_withdrawn = true};
  return {
      wire::write_control(wire::WorkerReport{.worker_id = 1,
                                             .incarnation = 2,
                                             .endpoint = "tcp://a:1",
                                             .about = "x",
                                             .declined = {3, 4},
                                             .decline_reason = "z",
                                             .name = "pool-1",
                                             .stuck_ms = 2500,
                                             .host = {.cpu_permille = 875, .cpu_count = 64},
                                             .log = "serves train.py",
                                             .secret = {std::byte{1}, std::byte{2}}}),
      wire::write_control(wire::WorkerOrders{.incarnation = 1, .is_fenced = true}),
      wire::write_control(wire::TrainerReport{.trainer_id = 3, .job = "train.py", .worker_count_max = 4, .about = "y"}),
      wire::write_control(
          wire::TrainerRoster{.controller_id = 1,
                              .view = 2,
                              .is_settled = true,
                              .entries = {{worker, "tcp://b:2", {std::byte{5}}}, {worker, "tcp://c:3", {std::byte{6}}}},
                              .declines = {{9, "z"}}}),
      wire::write_control(wire::Deregistration{.id = 5, .is_worker = true, .secret = {std::byte{3}}}),
      wire::write_control(wire::StatusRequest{}),
      wire::write_control(wire::Status{.json = "{}"}),
      wire::write_control(wire::DrainRequest{.worker_id = 5}),
      wire::write_control(wire::DrainAnswer{.worker_id = 5, .is_known = true}),
      wire::write_control(wire::Refusal{.reason = "another version"}),
      wire::write_control(wire::ScaleReport{
          .adapter_id = 1,
          .engine = "slurm",
          .worker_count_max = 64,
          .has_budget = true,
          .refusal = "full",
          .trouble = "hangs",
          .workers = {{"a", wire::EngineWorker::State::kRunning}, {"b", wire::EngineWorker::State::kStopping}}}),
      wire::write_control(
          wire::ScaleOrders{.adapter_id = 1, .wanted_count = 2, .reason = "y", .is_to_end = true, .stops = {"a", "b"}}),
      wire::write_control(wire::EndRequest{}),
      wire::write_control(wire::EndAnswer{.has_engine = true}),
      wire::write_control(wire::CostsRequest{.price_per_hour = {.is_given = true, .micros = 5}}),
      wire::write_control(wire::Costs{.json = "{}"}),
      wire::write_control(wire::PlanReport{.trainer_id = 5, .change_count = 1, .json = "{}", .secret = {std::byte{4}}}),
  };
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kHeadBytes) bytes.resize(kHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kControlMagic, sizeof wire::kControlMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kControlVersion, sizeof wire::kControlVersion);
  const auto kind = static_cast<uint8_t>(bytes[6]);
  if (choices.mostly()) bytes[6] = static_cast<std::byte>(kind % std::variant_size_v<wire::ControlMessage> + 1);
  if (choices.mostly()) bytes[7] = std::byte{0};
  // A length somewhere, or a list of as many entries as it says: random lengths are far above any cap.
  const auto length = static_cast<uint32_t>(choices.below(2 * wire::kRosterCountMax + 2));
  switch (choices.below(5)) {
    case 0:
      if (bytes.size() >= kHeadBytes + sizeof length)
        std::memcpy(bytes.data() + kHeadBytes + choices.below(bytes.size() - kHeadBytes - 3), &length, sizeof length);
      break;
    case 1:
      // Its two lists are last: the workers, and those that have declined.
      bytes = wire::write_control(wire::TrainerRoster{});
      std::memcpy(bytes.data() + bytes.size() - 2 * sizeof length, &length, sizeof length);
      bytes.resize(bytes.size() + length * kEmptyEntryBytes);
      break;
    case 2:
      bytes = wire::write_control(wire::TrainerRoster{});
      std::memcpy(bytes.data() + bytes.size() - sizeof length, &length, sizeof length);
      bytes.resize(bytes.size() + length * kEmptyDeclineBytes);
      break;
    case 3:
      bytes = wire::write_control(wire::ScaleReport{});
      std::memcpy(bytes.data() + bytes.size() - sizeof length, &length, sizeof length);
      bytes.resize(bytes.size() + length * kEmptyEngineWorkerBytes);
      break;
    default: break;
  }
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_control(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::ControlMessage& message = parsed.value();
  if (const auto* worker = std::get_if<wire::WorkerReport>(&message)) {
    check_text(worker->endpoint, wire::kControlNameBytesMax);
    check_text(worker->about, wire::kControlAboutBytesMax);
    check_text(worker->decline_reason, wire::kControlReasonBytesMax);
    check_text(worker->name, wire::kWorkerNameBytesMax);
    expect(worker->declined.size() <= wire::kDeclinedCountMax, "lists are within their caps");
  } else if (const auto* trainer = std::get_if<wire::TrainerReport>(&message)) {
    check_text(trainer->job, wire::kControlNameBytesMax);
    check_text(trainer->about, wire::kControlAboutBytesMax);
  } else if (const auto* roster = std::get_if<wire::TrainerRoster>(&message)) {
    expect(roster->entries.size() <= wire::kRosterCountMax, "lists are within their caps");
    for (const auto& entry : roster->entries) check_text(entry.endpoint, wire::kControlNameBytesMax);
    expect(roster->declines.size() <= wire::kRosterDeclineCountMax, "lists are within their caps");
    for (const auto& decline : roster->declines) check_text(decline.reason, wire::kControlReasonBytesMax);
  } else if (const auto* status = std::get_if<wire::Status>(&message)) {
    check_text(status->json, wire::kControlTextBytesMax);
  } else if (const auto* costs = std::get_if<wire::Costs>(&message)) {
    check_text(costs->json, wire::kControlTextBytesMax);
  } else if (const auto* refusal = std::get_if<wire::Refusal>(&message)) {
    check_text(refusal->reason, wire::kControlAboutBytesMax);
  } else if (const auto* scale = std::get_if<wire::ScaleReport>(&message)) {
    check_text(scale->engine, wire::kWorkerNameBytesMax);
    check_text(scale->refusal, wire::kControlReasonBytesMax);
    check_text(scale->trouble, wire::kControlReasonBytesMax);
    expect(scale->workers.size() <= wire::kEngineWorkerCountMax, "lists are within their caps");
    for (const auto& one : scale->workers) check_text(one.name, wire::kWorkerNameBytesMax);
  } else if (const auto* orders = std::get_if<wire::ScaleOrders>(&message)) {
    check_text(orders->reason, wire::kControlReasonBytesMax);
    expect(orders->stops.size() <= wire::kEngineWorkerCountMax, "lists are within their caps");
    for (const auto& name : orders->stops) check_text(name, wire::kWorkerNameBytesMax);
  }
  expect(std::ranges::equal(wire::write_control(message), bytes), "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
