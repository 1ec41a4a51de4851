// SPDX-License-Identifier: Apache-2.0
// The server process of pool workers, which holds their keys and sockets; `penstock worker` and penstock-worker start
// it.

#include "server/server_program.h"

int main(int argument_count, char** arguments) { return penstock::server::server_program(argument_count, arguments); }
