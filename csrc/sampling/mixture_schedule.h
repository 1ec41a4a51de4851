// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which source of a mixture gives the next sample. After every n samples each source has given its share of n, at most
// one sample more or less: the error is at most 1 - 1/(2k - 2) for k sources. The rule is that of R. Tijdeman, "The
// chairman assignment problem", Discrete Mathematics 32 (1980), pages 323 to 330: of the sources that lag enough behind
// their share, the one that has to give a sample soonest. All arithmetic is in integers, so the schedule is the same on
// every machine and at any length.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace penstock::sampling {

// Thread-compatible. A value type.
class MixtureSchedule {
 public:
  // The sum of the shares: a source with share s gives s of so many samples.
  static constexpr int64_t kWhole = int64_t{1} << 40;
  static constexpr size_t kSourcesMax = 1 << 16;

  // The shares of positive and zero weights, which are finite and not all zero: integers that add up to kWhole. A
  // source of positive weight has a share of 1 at least.
  static std::vector<int64_t> shares_of(std::span<const double> weights);

  explicit MixtureSchedule(const std::vector<int64_t>& shares);
  // A schedule that goes on where another was; `lags` are those of it.
  MixtureSchedule(std::vector<int64_t> shares, std::vector<int64_t> lags);

  // A new schedule after `sample_count` samples, in as many steps as the largest of 1/share, or sample_count of them.
  static MixtureSchedule after(const std::vector<int64_t>& shares, int64_t sample_count);

  // How many samples a new schedule gives until the source of the next one has given as many as it is long, which
  // `lengths` has. A source of length 0 has no share. The time is that of `after`.
  static int64_t samples_until_end(const std::vector<int64_t>& shares, std::span<const int64_t> lengths);

  // The source of the next sample.
  size_t next();

  const std::vector<int64_t>& shares() const { return shares_; }
  // How far each source lags behind its share, in units of 1/kWhole samples. They add up to 0.
  const std::vector<int64_t>& lags() const { return lags_; }

  friend bool operator==(const MixtureSchedule&, const MixtureSchedule&) = default;

 private:
  // Near the place after so many samples: after 1/share of the slowest source it is as if it had begun at 0.
  void begin_near(int64_t sample_count);
  int64_t twice() const;  // 2k - 2 for k sources, and 1 for one

  std::vector<int64_t> shares_;
  std::vector<int64_t> lags_;
  int64_t source_count_ = 0;  // with a share
};

}  // namespace penstock::sampling
