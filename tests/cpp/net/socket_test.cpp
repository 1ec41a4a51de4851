// SPDX-License-Identifier: Apache-2.0
#include "net/socket.h"

#include <gtest/gtest.h>

#include <string>

#include "../base/child_process.h"

namespace penstock::net {
namespace {

// libzmq ends a process that has no descriptors for its threads.
TEST(SocketContexts, WithoutRoomForDescriptorsThereIsAReasonAndNoAbort) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              int opened_count = 0;
              for (int room = 0; room <= 12; ++room) {
                test::leave_descriptors(room);
                const auto context = SocketContext::open();
                if (context) {
                  ++opened_count;
                } else if (context.error().code != Errc::kNoMemory ||
                           context.error().message.find("ulimit -n") == std::string::npos) {
                  return context.error().message;
                }
              }
              return opened_count > 0 && opened_count < 12 ? "" : std::to_string(opened_count) + " were opened";
            }),
            "");
}

}  // namespace
}  // namespace penstock::net
