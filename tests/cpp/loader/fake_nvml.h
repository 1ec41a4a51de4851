// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace penstock::loader {

// Of the one GPU of fake_nvml.cpp.
inline constexpr char kFakeGpuUuid[] = "GPU-12345678-9abc-def0-1234-56789abcdef0";

}  // namespace penstock::loader
