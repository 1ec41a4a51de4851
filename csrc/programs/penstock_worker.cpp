// SPDX-License-Identifier: Apache-2.0
// penstock-worker: pool worker processes that make batches of plug-ins, without Python.

#include <penstock/worker_main.h>

int main(int argument_count, char** arguments) { return penstock::worker_main(argument_count, arguments); }
