// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "penstock/export.h"

namespace penstock::api {

// The torch that is loaded in this process, if it tells: those from 2.9 on do.
TorchVersion loaded_torch(TorchVersion otherwise);

// Throws Error kUnsupported where `who` ("this program", "the plug-in PATH") was compiled with the headers of another
// torch than this library, or another torch is loaded.
void check_torch(TorchVersion compiled_with, const std::string& who);

}  // namespace penstock::api
