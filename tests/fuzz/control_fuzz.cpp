// SPDX-License-Identifier: Apache-2.0
// Control messages, as controller, workers, trainers and operators read them of each other.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "transport/control_record.h"

namespace penstock::fuzz {

using namespace penstock::transport;

namespace {

constexpr size_t kHeadBytes = 8;
constexpr size_t kEmptyEntryBytes = 17;  // of a roster, without an endpoint

void check_text(const std::string& text, size_t bytes_max) {
  expect(text.size() <= bytes_max, "texts are within their caps");
  touch(std::as_bytes(std::span(text)));
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const cluster::RosterEntry worker{.worker_id = 7, .incarnation = 2, .is_withdrawn = true};
  return {
      write_control(cluster::WorkerReport{.worker_id = 1,
                                          .incarnation = 2,
                                          .endpoint = "tcp://a:1",
                                          .about = "x",
                                          .declined = {3, 4},
                                          .decline_reason = "z"}),
      write_control(cluster::WorkerOrders{.incarnation = 1, .is_fenced = true}),
      write_control(cluster::TrainerReport{.trainer_id = 3, .job = "train.py", .worker_count_max = 4, .about = "y"}),
      write_control(cluster::TrainerRoster{.controller_id = 1,
                                           .view = 2,
                                           .is_settled = true,
                                           .entries = {{worker, "tcp://b:2"}, {worker, "tcp://c:3"}}}),
      write_control(Farewell{.id = 5, .is_worker = true}),
      write_control(StatusRequest{}),
      write_control(Status{.json = "{}"}),
      write_control(DrainRequest{.worker_id = 5}),
      write_control(DrainAnswer{.worker_id = 5, .is_known = true}),
      write_control(Refusal{.reason = "another version"}),
  };
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kHeadBytes) bytes.resize(kHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &kControlMagic, sizeof kControlMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &kControlVersion, sizeof kControlVersion);
  const auto kind = static_cast<uint8_t>(bytes[6]);
  if (choices.mostly()) bytes[6] = static_cast<std::byte>(kind % std::variant_size_v<ControlMessage> + 1);
  if (choices.mostly()) bytes[7] = std::byte{0};
  // A length somewhere, or a list of as many entries as it says: random lengths are far above any cap.
  const auto length = static_cast<uint32_t>(choices.below(2 * kRosterCountMax + 2));
  switch (choices.below(4)) {
    case 0:
      if (bytes.size() >= kHeadBytes + sizeof length)
        std::memcpy(bytes.data() + kHeadBytes + choices.below(bytes.size() - kHeadBytes - 3), &length, sizeof length);
      break;
    case 1:
      bytes = write_control(cluster::TrainerRoster{});
      std::memcpy(bytes.data() + bytes.size() - sizeof length, &length, sizeof length);
      bytes.resize(bytes.size() + length * kEmptyEntryBytes);
      break;
    default: break;
  }
}

void check(std::span<const std::byte> bytes) {
  const auto parsed = parse_control(bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const ControlMessage& message = parsed.value();
  if (const auto* worker = std::get_if<cluster::WorkerReport>(&message)) {
    check_text(worker->endpoint, kControlNameBytesMax);
    check_text(worker->about, kControlAboutBytesMax);
    check_text(worker->decline_reason, kControlReasonBytesMax);
    expect(worker->declined.size() <= cluster::kDeclinedCountMax, "lists are within their caps");
  } else if (const auto* trainer = std::get_if<cluster::TrainerReport>(&message)) {
    check_text(trainer->job, kControlNameBytesMax);
    check_text(trainer->about, kControlAboutBytesMax);
  } else if (const auto* roster = std::get_if<cluster::TrainerRoster>(&message)) {
    expect(roster->entries.size() <= kRosterCountMax, "lists are within their caps");
    for (const auto& entry : roster->entries) check_text(entry.endpoint, kControlNameBytesMax);
  } else if (const auto* status = std::get_if<Status>(&message)) {
    check_text(status->json, kControlTextBytesMax);
  } else if (const auto* refusal = std::get_if<Refusal>(&message)) {
    check_text(refusal->reason, kControlAboutBytesMax);
  }
  expect(std::ranges::equal(write_control(message), bytes), "a message that is written again is the same bytes");
}

}  // namespace penstock::fuzz
