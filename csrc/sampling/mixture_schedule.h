// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which source of a mixture gives the next sample. After every n samples each source has given its share of n,
// at most one sample more or less: the error is at most 1 - 1/(2k - 2) for k sources. The rule is by R. Tijdeman, "The
// chairman assignment problem", Discrete Mathematics 32 (1980), pages 323 to 330: of the sources that lag enough behind
// their share, choose the one that has to give a sample soonest. All arithmetic is in integers, so the schedule is the
// same on every machine and at any length.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace penstock::sampling {

// Thread-compatible. A value type.
class MixtureSchedule {
 public:
  // The sum of the shares: a source with share s gives s of every kWhole samples.
  static constexpr int64_t kWhole = int64_t{1} << 40;
  static constexpr size_t kSourcesMax = 1 << 16;

  // Returns the shares for `weights`, which must be >= 0, finite and not all zero: integers that add up to kWhole. A
  // source of positive weight has a share of at least 1.
  static std::vector<int64_t> shares_of(std::span<const double> weights);

  explicit MixtureSchedule(const std::vector<int64_t>& shares);
  // Continues another schedule, whose lags are `lags`.
  MixtureSchedule(std::vector<int64_t> shares, std::vector<int64_t> lags);

  // Returns a new schedule advanced by `sample_count` samples. It takes as many steps as the largest 1/share, or
  // `sample_count` if that is less.
  static MixtureSchedule after(const std::vector<int64_t>& shares, int64_t sample_count);

  // Returns how many samples a new schedule gives until the next one would be from an exhausted source: `lengths` has
  // the number of samples of each source. A source of length 0 has no share. Takes as long as `after`.
  static int64_t samples_until_end(const std::vector<int64_t>& shares, std::span<const int64_t> lengths);

  // Returns the source of the next sample.
  size_t next();

  const std::vector<int64_t>& shares() const { return shares_; }
  // How far each source lags behind its share, in units of 1/kWhole samples. They add up to 0.
  const std::vector<int64_t>& lags() const { return lags_; }

  friend bool operator==(const MixtureSchedule&, const MixtureSchedule&) = default;

 private:
  // Moves close to the state after `sample_count` samples: 1/share steps of the slowest source later, the state is the
  // same as if the schedule had started at 0.
  void begin_near(int64_t sample_count);
  int64_t twice() const;  // 2k - 2 for k sources, and 1 for one

  std::vector<int64_t> shares_;
  std::vector<int64_t> lags_;
  int64_t source_count_ = 0;  // sources with a share
};

}  // namespace penstock::sampling
