// SPDX-License-Identifier: Apache-2.0
#include "base/identity.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/assert.h"
#include "base/hex.h"

namespace penstock {

Result<uint64_t> draw_identity() {
  uint64_t id = 0;
  while (id == 0) {
    if (::getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id))
      return Fault{Errc::kFailed, std::string("generating a random id failed: ") + std::strerror(errno)};
  }
  return id;
}

std::string spoken_id(uint64_t id) {
  std::string text;
  for (int shift = 56; shift >= 0; shift -= 8) append_hex(text, static_cast<uint8_t>(id >> shift));
  return text;
}

std::string make_endpoint_name() {
  std::array<unsigned char, 16> random{};
  const ssize_t filled = ::getrandom(random.data(), random.size(), 0);
  PENSTOCK_ASSERT(filled == static_cast<ssize_t>(random.size()), "getrandom gave ", filled, " bytes");
  std::string name = "penstock-";
  for (const unsigned char byte : random) append_hex(name, byte);
  return name;
}

}  // namespace penstock
