// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "penstock/export.h"

namespace penstock::api {

// The torch version that is loaded in this process; `otherwise` if it does not report its version (before 2.9).
TorchVersion loaded_torch(TorchVersion otherwise);

// Throws Error kUnsupported if `who` ("this program", "the plug-in PATH") was compiled with headers of a different
// torch version than this library, or if a different version is loaded.
void check_torch(TorchVersion compiled_with, const std::string& who);

}  // namespace penstock::api
