// SPDX-License-Identifier: Apache-2.0
#include "transport/identity.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace penstock::transport {

Result<uint64_t> draw_identity() {
  uint64_t id = 0;
  while (id == 0) {
    if (::getrandom(&id, sizeof id, 0) != static_cast<ssize_t>(sizeof id))
      return Error{Errc::kFailed, std::string("drawing an id from the system failed: ") + std::strerror(errno)};
  }
  return id;
}

}  // namespace penstock::transport
