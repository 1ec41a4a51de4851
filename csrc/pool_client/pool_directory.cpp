// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_directory.h"

#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/process.h"

namespace penstock::pool_client {
namespace {

bool is_loopback(std::string_view address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

}  // namespace

std::string identity_of_launched_job() {
  const auto address = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (!address || !port) return "";
  std::string identity = *address + ":" + *port;
  if (is_loopback(*address)) identity += " on " + host_name();
  // The trainers of a failed run remain known for one more lease.
  identity += ", run " + environment("TORCHELASTIC_RUN_ID").value_or("") + ", restart " +
              environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return identity;
}

wire::JobRank job_rank(const std::string& identity, const std::string& job_name, uint32_t rank, uint32_t world_size) {
  if (identity.empty() || world_size < 2) return {};
  ContentDigest digest;
  digest.add(std::as_bytes(std::span(identity)));
  digest.add(std::as_bytes(std::span(job_name)));
  uint64_t group = 0;
  for (const uint64_t word : digest.value()) group ^= word;
  return {.group = group | 1, .rank = rank, .world_size = world_size};
}

}  // namespace penstock::pool_client
