// SPDX-License-Identifier: Apache-2.0
#include "scenario.h"

#include <sstream>

#include "scheduling/roster.h"

namespace penstock::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

Scenario Scenario::draw(uint64_t seed) {
  Random random(seed);
  const auto number = [&](uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random);
  };
  const auto chance = [&](uint32_t one_in) { return number(1, one_in) == 1; };
  const auto few = [&](uint32_t one_in, uint32_t most) { return chance(one_in) ? number(1, most) : 0; };
  const auto rate = [&](uint32_t one_in) { return chance(one_in) ? number(1, 60) / 1000.0 : 0.0; };

  Scenario s;
  s.seed = seed;
  s.worker_count = number(1, 4);
  s.trainer_count = chance(4) ? 2 : 1;
  s.shard_count = chance(3) ? number(1, 3) : 0;
  s.batch_count = s.shard_count != 0 ? number(0, 8) : number(1, 16);
  s.epoch_count = number(1, 2);
  s.depth_max = number(1, 4);
  s.credit_bytes = number(1, 5) * 100;
  s.work_time = milliseconds(number(1, 300));
  s.step_time = milliseconds(number(0, 100));
  s.loss = rate(3);
  s.duplication = rate(3);
  s.reordering = rate(3);
  s.lateness = rate(4);
  s.has_poison = s.shard_count == 0 && chance(8);
  if (!s.has_poison) {
    s.worker_crashes = few(2, 3);
    s.machine_crashes = few(5, 2);
  }
  s.worker_joins = few(3, 2);
  s.worker_drains = few(4, 2);
  s.stalls = few(2, 4);
  s.partitions = few(3, 3);
  s.controller_crashes = few(3, 2);
  s.trainer_crashes = few(5, 2);
  s.calm_at = milliseconds(number(500, 8000));
  s.end_at = s.calm_at + seconds(90);
  s.has_declining = chance(3);
  if (s.shard_count == 0 && chance(2)) s.recall = number(1, 10) / 10.0;
  s.intruders = few(4, 2);
  if (s.intruders > 0) s.end_at += scheduling::kLeaveTime;  // for which one that found a way in may stay
  if (s.has_poison) {
    s.poison_spares_workers = chance(2);
  } else {
    s.process_ends = few(2, 4);
  }
  s.drain_grace = seconds(number(5, 30));
  s.sends_goodbye = chance(3);
  if (!chance(2)) return s;
  s.hangs = number(1, 3);
  s.hang = number(2, 40) / 100.0;
  s.has_hang_poison = s.shard_count == 0 && !s.has_poison && chance(4);
  if (chance(2)) s.timeout = seconds(number(20, 60));
  s.abandoned_grace = {.first_batch = seconds(number(10, 30)), .later = seconds(number(3, 10))};
  s.end_at += seconds(150);  // for a late request to be asked of another worker, and for graces
  return s;
}

std::string Scenario::describe() const {
  std::ostringstream text;
  text << "seed " << seed << ": " << worker_count << " workers, " << trainer_count << " trainers, " << epoch_count
       << " epochs of " << batch_count << " batches";
  if (shard_count != 0) text << " in each of " << shard_count << " shards";
  text << ", depth " << depth_max << ", credit " << credit_bytes << "; loss " << loss << ", duplication " << duplication
       << ", reordering " << reordering << ", lateness " << lateness << "; crashes of workers " << worker_crashes
       << ", machines " << machine_crashes << ", the controller " << controller_crashes << ", trainers "
       << trainer_crashes << "; ends of workers' processes " << process_ends << "; joins " << worker_joins
       << ", drains " << worker_drains << ", stalls " << stalls << ", partitions " << partitions << "; recalls "
       << recall << (has_declining ? "; workers that decline" : "")
       << (intruders > 0 ? "; intruders " + std::to_string(intruders) : "") << (has_poison ? "; poison" : "")
       << (poison_spares_workers ? " that spares workers" : "") << (sends_goodbye ? "; goodbyes" : "");
  const auto in_seconds = [](Duration time) { return std::chrono::duration_cast<seconds>(time).count(); };
  text << "; " << in_seconds(drain_grace) << " s to drain";
  if (!has_hangs()) return text.str();
  text << "; hangs " << hangs << ", each with chance " << hang << (has_hang_poison ? ", and in one batch always" : "")
       << "; " << in_seconds(abandoned_grace.first_batch) << " s of grace for a first batch, "
       << in_seconds(abandoned_grace.later) << " s for others";
  if (timeout > Duration(0)) text << "; timeout after " << in_seconds(timeout) << " s";
  return text.str();
}

}  // namespace penstock::sim
