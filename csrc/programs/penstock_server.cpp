// SPDX-License-Identifier: Apache-2.0
// The process of a pool's worker that holds its keys and sockets, which `penstock worker` starts.

#include "server/server_program.h"

int main(int argument_count, char** arguments) { return penstock::server::server_program(argument_count, arguments); }
