// SPDX-License-Identifier: Apache-2.0
#pragma once
// The evaluation of a filter: each sample once, and some of them twice. A filter is of use only if its answers do not
// depend on the time, the worker or the rank that evaluates a sample, so a few answers are compared.

#include <cstdint>
#include <vector>

namespace penstock::sampling {

// Returns the samples to evaluate a second time, ascending and evenly spaced from the first to the last one: 1 % of
// `sample_count`, at least 64 and at most 4096, or all.
std::vector<int64_t> samples_evaluated_twice(int64_t sample_count);

// The number of samples of one request to a worker, in a pass over `sample_count`.
int64_t samples_per_request(int64_t sample_count);

}  // namespace penstock::sampling
