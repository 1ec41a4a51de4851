// SPDX-License-Identifier: Apache-2.0
#include "base/identity.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/assert.h"

namespace penstock {

Result<uint64_t> draw_identity() {
  uint64_t id = 0;
  while (id == 0) {
    if (::getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id))
      return Fault{Errc::kFailed, std::string("drawing an id from the system failed: ") + std::strerror(errno)};
  }
  return id;
}

std::string make_endpoint_name() {
  std::array<unsigned char, 16> random{};
  const ssize_t filled = ::getrandom(random.data(), random.size(), 0);
  PENSTOCK_ASSERT(filled == static_cast<ssize_t>(random.size()), "getrandom gave ", filled, " bytes");
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "penstock-";
  for (unsigned char byte : random) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

}  // namespace penstock
