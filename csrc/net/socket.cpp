// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"

#include <sys/eventfd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/file_descriptor.h"
#include "net/zmq_failure.h"
#include "wire/control_record.h"

namespace penstock::net {
namespace {

// A trainer has one client for each worker of its roster, each local worker and the controller. A client takes three
// sockets, one of which libzmq creates itself.
constexpr int kClientSocketCount = 3;
constexpr int kOtherClientCountMax = 1024;
constexpr int kSocketCountMax = kClientSocketCount * (static_cast<int>(wire::kRosterCountMax) + kOtherClientCountMax);
// Two threads with a mailbox and an epoll each, the context's end, a socket, and spare ones for concurrent opens.
constexpr size_t kContextDescriptorCount = 8;

}  // namespace

std::string zmq_version() {
  int major = 0;
  int minor = 0;
  int patch = 0;
  ::zmq_version(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

SocketContext::SocketContext() : context_(zmq_ctx_new()) {
  PENSTOCK_ASSERT(context_ != nullptr, "zmq_ctx_new: ", zmq_strerror(zmq_errno()));
  PENSTOCK_ASSERT(zmq_ctx_set(context_, ZMQ_MAX_SOCKETS, kSocketCountMax) == 0);
}

Result<std::unique_ptr<SocketContext>> SocketContext::open() {
  std::vector<FileDescriptor> room;
  while (room.size() < kContextDescriptorCount) {
    room.emplace_back(::eventfd(0, EFD_CLOEXEC));
    if (!room.back())
      return Fault{Errc::kNoMemory, "starting ZeroMQ failed: " + std::to_string(kContextDescriptorCount) +
                                        " file descriptors are needed, but only " + std::to_string(room.size() - 1) +
                                        " are left (" + std::strerror(errno) +
                                        "); raise the limit of open files (ulimit -n)"};
  }
  room.clear();
  auto context = std::make_unique<SocketContext>();
  void* first = zmq_socket(context->handle(), ZMQ_PAIR);  // starts the threads
  if (first == nullptr) return zmq_failure("starting ZeroMQ");
  zmq_close(first);
  return context;
}

SocketContext::~SocketContext() {
  while (zmq_ctx_term(context_) != 0 && zmq_errno() == EINTR) {
  }
}

}  // namespace penstock::net
