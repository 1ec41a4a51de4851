// SPDX-License-Identifier: Apache-2.0
// Messages between a server and its warm process, as either reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/job_record.h"
#include "wire/reports.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kReservedAt = 7, kJobKindsAt = 26, kReservedEndAt = 27;

using Kind = wire::WarmMessage::Kind;

bool has_text(Kind kind) { return kind == Kind::kReady || kind == Kind::kFork; }

size_t fixed_bytes(Kind kind) { return wire::kWarmHeadBytes + (kind == Kind::kReady ? sizeof(Numerics) : 0); }

size_t text_bytes_max(Kind kind) {
  if (!has_text(kind)) return 0;
  return kind == Kind::kReady ? wire::kAboutBytesMax : wire::kLogNameBytesMax;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  return {wire::write_warm_message(
              {.kind = Kind::kReady, .torch = 0x020f, .job_kinds = 1, .numerics = {1, 2}, .text = "Python"}),
          wire::write_warm_message({.kind = Kind::kReady, .job_kinds = wire::kJobKinds}),
          wire::write_warm_message({.kind = Kind::kFork, .job = 7, .text = "worker"}),
          wire::write_warm_message({.kind = Kind::kStarted, .job = 7, .pid = 1234}),
          wire::write_warm_message({.kind = Kind::kEnded, .job = 7, .pid = 1234, .status = 0x0300}),
          wire::write_warm_message({.kind = Kind::kEnd, .job = 7})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < wire::kWarmHeadBytes) bytes.resize(wire::kWarmHeadBytes);
  const auto kind = static_cast<Kind>(1 + choices.below(static_cast<size_t>(Kind::kEnd)));
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kWarmMagic, sizeof wire::kWarmMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kJobVersion, sizeof wire::kJobVersion);
  if (choices.mostly()) bytes[kKindAt] = static_cast<std::byte>(kind);
  if (choices.mostly()) bytes[kReservedAt] = std::byte{0};
  const size_t job_kinds = kind == Kind::kReady ? 1 + choices.below(wire::kJobKinds) : 0;
  if (choices.mostly()) bytes[kJobKindsAt] = static_cast<std::byte>(job_kinds);
  if (choices.mostly())
    std::fill_n(bytes.begin() + kReservedEndAt, wire::kWarmHeadBytes - kReservedEndAt, std::byte{0});
  // Some texts are above their cap.
  const size_t text_bytes = has_text(kind) ? choices.below(text_bytes_max(kind) + 5) : 0;
  if (choices.mostly()) bytes.resize(fixed_bytes(kind) + text_bytes, std::byte{'x'});
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_warm_message(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::WarmMessage& message = parsed.value();
  touch(std::as_bytes(std::span(message.text)));
  expect(message.kind >= Kind::kReady && message.kind <= Kind::kEnd, "kinds are known");
  expect((message.job_kinds & ~wire::kJobKinds) == 0 && (message.job_kinds != 0) == (message.kind == Kind::kReady),
         "kinds of jobs are known, and those of a ready process");
  expect(message.text.size() <= text_bytes_max(message.kind), "texts are those of their kind, and capped");
  expect(fixed_bytes(message.kind) + message.text.size() == bytes.size(), "nothing is left over");
  expect(std::ranges::equal(wire::write_warm_message(message), bytes),
         "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
