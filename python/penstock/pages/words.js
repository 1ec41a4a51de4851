// SPDX-License-Identifier: Apache-2.0
// Numbers and names for people.

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? count(value) : value.toFixed(1);
}

export function share(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.1 ? `${(100 * value).toFixed(1)}\u00a0%` : `${Math.round(100 * value)}\u00a0%`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (Math.abs(value) >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${place === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)}\u00a0${units[place]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1) return `${value.toFixed(2)}\u00a0s`;
  return value >= 1e-3 ? `${(value * 1e3).toFixed(1)}\u00a0ms` : `${(value * 1e6).toFixed(0)}\u00a0µs`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function jobOf(trainer) {
  const rank = trainer.world_size > 1 ? `, rank ${trainer.rank} of ${trainer.world_size}` : "";
  return trainer.job + rank;
}

// Two jobs of one name run in different processes.
export function titleOf(trainer) {
  return `${jobOf(trainer)} on ${trainer.name}`;
}

export function toneOfWaiting(value) {
  if (value === null || value === undefined) return null;
  return value >= 0.3 ? "bad" : value >= 0.1 ? "warn" : "good";
}

// The address of a view, of one job if `job` is not empty.
export function hrefOf(view, job) {
  return job === "" ? `#${view}` : `#${view}?job=${encodeURIComponent(job)}`;
}

export function duration(value) {
  if (value < 60) return `${Math.round(value)}\u00a0s`;
  if (value < 3600) return `${Math.round(value / 60)}\u00a0min`;
  return `${(value / 3600).toFixed(1)}\u00a0h`;
}
