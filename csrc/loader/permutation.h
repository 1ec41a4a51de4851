// SPDX-License-Identifier: Apache-2.0
#pragma once
// torch.randperm on the CPU, in half of its time for millions of indices.
//
// Torch shuffles in place (R. A. Fisher and F. Yates; R. Durstenfeld, "Algorithm 235: Random permutation",
// Communications of the ACM 7 (1964), page 420): index i changes places with one that is drawn from those behind it.
// Nearly all of its time are misses of the caches, one after the other. Here the numbers of the next exchanges are
// drawn first, and the places that they name are fetched meanwhile; and the indices are of 32 bits while they are
// shuffled. The permutation is torch's to the bit, and the generator is left where torch leaves it.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace penstock::loader {

// Writes the permutation of 0 to `count` - 1 that torch would draw from the generator, of the CPU, to `indices`, a
// tensor of int64 that is resized. Where this process's torch does not shuffle as above, torch itself draws it.
void draw_permutation(at::Tensor& indices, int64_t count, at::Generator& generator);

// Leaves the generator where that would.
void skip_permutation(int64_t count, at::Generator& generator);

}  // namespace penstock::loader
