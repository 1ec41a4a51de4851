// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace penstock::worker {

// memcpy for what is large and not read again here. Its stores go past the caches, so no line is read from memory only
// to be overwritten, a third of the traffic of a plain copy; and what the caches hold stays. The bytes are visible to
// whoever sees a later store of this thread. Plain memcpy where the processor has no such stores.
void copy_past_caches(void* target, const void* source, size_t bytes);

}  // namespace penstock::worker
