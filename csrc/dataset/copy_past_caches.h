// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace penstock::dataset {

// memcpy for large data that is not read again here. Its stores bypass the caches, so no line is read from memory only
// to be overwritten, which is a third of the traffic of a plain copy, and the caches keep their content. A thread that
// sees a later store of this thread sees the bytes too. Plain memcpy if the processor has no such stores.
void copy_past_caches(void* target, const void* source, size_t bytes);

}  // namespace penstock::dataset
