// SPDX-License-Identifier: Apache-2.0
// The pool as a whole: what it gives now, throughput and waiting over time, and its jobs.

import { element, keepChildren, setText } from "./dom.js";
import { KeptTable } from "./kept_table.js";
import { COLOURS, LineChart } from "./line_chart.js";
import { bytes, clock, count, duration, hrefOf, jobOf, rate, share, titleOf, toneOfWaiting } from "./words.js";

const WINDOWS = [["1 min", 60], ["5 min", 300], ["15 min", 900]];
const LINES_MAX = 6; // of trainers in one chart

export class OverviewView {
  constructor() {
    this._tiles = element("dl", { class: "tiles" });
    this._batches = new LineChart("Batches per second", "of the pool, and of its busiest ranks", rate, { atLeast: 1 });
    this._waiting = new LineChart("Waiting", "share of the time that a rank waits for a batch", share, { atLeast: 0.05, most: 1 });
    this._workers = new LineChart("Workers", "all workers, and serving workers", count, { atLeast: 2, isWhole: true });
    this._window = WINDOWS[1][1];
    this._colours = new Map();
    this._buttons = WINDOWS.map(([name, seconds]) =>
      element("button", { type: "button", onclick: () => this._choose(seconds) }, name),
    );
    this._jobs = new KeptTable("Jobs", [
      { title: "Job", text: (one) => one.title },
      { title: "User", text: (one) => one.user ?? "–" },
      { title: "Verdict", text: (one) => one.verdict },
      { title: "Waits", isNumber: true, text: (one) => share(one.waited_share_max), value: (one) => one.waited_share_max, tone: (one) => one.tone || null },
      { title: "Batches/s", isNumber: true, text: (one) => (one.is_idle ? "idle" : rate(one.batches_per_s)), value: (one) => one.batches_per_s },
      { title: "Delivered", isNumber: true, text: (one) => count(one.delivered_batches), value: (one) => one.delivered_batches },
      { title: "Workers", isNumber: true, text: (one) => `${count(one.workers)} workers`, value: (one) => one.workers, href: (one) => hrefOf("workers", one.id) },
      { title: "Steps", text: () => "steps", href: (one) => hrefOf("steps", one.id) },
      { title: "Plan", text: () => "plan", href: (one) => hrefOf("plan", one.id) },
      { title: "Events", text: () => "events", href: (one) => hrefOf("events", one.id) },
    ]);
    this._ranks = new KeptTable("Ranks", [
      { title: "Rank", text: jobOf },
      { title: "Trainer", text: (one) => one.name },
      { title: "Workers", isNumber: true, text: workersOf, value: (one) => one.workers },
      { title: "Batches/s", isNumber: true, text: (one) => (one.is_idle ? "idle" : rate(one.batches_per_s)), value: (one) => one.batches_per_s },
      { title: "Waits", isNumber: true, text: (one) => (one.is_idle ? "–" : share(one.waited_share)), value: (one) => one.waited_share, tone: (one) => (one.is_idle ? null : toneOfWaiting(one.waited_share)) },
      { title: "Delivered", isNumber: true, text: (one) => count(one.delivered_batches), value: (one) => one.delivered_batches },
      { title: "Ready", isNumber: true, text: (one) => count(one.ready_batches), value: (one) => one.ready_batches },
      { title: "Limited by", text: (one) => this._limits[one.limited_by] ?? one.limited_by },
      { title: "Reason for worker count", text: (one) => (one.is_idle ? `idle for ${Math.round(one.idle_s)} s` : one.reason) },
    ]);
    this._limits = {};
    this._ended = new KeptTable("Ended jobs", [
      { title: "Job", text: (one) => one.title },
      { title: "User", text: (one) => one.user ?? "–" },
      { title: "Ended", text: (one) => clock(one.ended_at), value: (one) => one.ended_at },
      { title: "Seen for", isNumber: true, text: (one) => duration(one.seen_s), value: (one) => one.seen_s },
      { title: "Delivered", isNumber: true, text: (one) => count(one.delivered_batches), value: (one) => one.delivered_batches },
      { title: "Last verdict", text: (one) => one.verdict },
      { title: "Events", text: () => "events", href: (one) => hrefOf("events", one.id) },
    ]);
    this._engine = element("p", { class: "panel", hidden: true });
    this.node = element(
      "div",
      {},
      this._tiles,
      this._engine,
      element("div", { class: "tools", role: "group", "aria-label": "Time shown" }, ...this._buttons),
      element("div", { class: "charts" }, this._batches.node, this._waiting.node, this._workers.node),
      this._jobs.node,
      this._ranks.node,
      this._ended.node,
    );
    this._mark();
  }

  _choose(seconds) {
    this._window = seconds;
    this._mark();
    if (this._feed) this.update(this._feed);
  }

  _mark() {
    this._buttons.forEach((button, index) => button.setAttribute("aria-pressed", WINDOWS[index][1] === this._window));
  }

  update(feed) {
    this._feed = feed;
    const { totals, trainers, engine } = feed.status;
    this._showTiles(totals);
    this._showEngine(engine);
    const to = feed.status.at;
    const points = feed.points.filter((point) => point.at >= to - this._window);
    const shown = trainers.filter((one) => points.some((point) => one.id in point.trainers)).slice(0, LINES_MAX);
    const of = (trainer, place) => points.map((point) => point.trainers[trainer.id]?.[place] ?? null);
    const all = { name: "all", colour: "var(--ink)", values: points.map((point) => point.batches_per_s) };
    const single = shown.length > 1 ? shown.map((one) => ({ name: titleOf(one), colour: this._colourOf(one.id), values: of(one, 0) })) : [];
    this._batches.update(points, [all, ...single], to - this._window, to);
    this._waiting.update(points, shown.map((one) => ({ name: titleOf(one), colour: this._colourOf(one.id), values: of(one, 1) })), to - this._window, to);
    const workers = [["all", "var(--rest)", "workers"], ["serving", COLOURS[0], "workers_serving"]];
    this._workers.update(points, workers.map(([name, colour, key]) => ({ name, colour, values: points.map((point) => point[key]) })), to - this._window, to);
    this._limits = feed.status.limits;
    this._jobs.update(feed.status.jobs, "No job uses this pool now.");
    this._ranks.update(trainers, "");
    this._ranks.node.hidden = trainers.length === 0;
    this._ended.update([...feed.status.ended_jobs].reverse(), "");
    this._ended.node.hidden = feed.status.ended_jobs.length === 0;
  }

  // A rank keeps its colour in all charts, and when others come and go.
  _colourOf(id) {
    if (!this._colours.has(id)) this._colours.set(id, COLOURS[this._colours.size % COLOURS.length]);
    return this._colours.get(id);
  }

  _showTiles(totals) {
    const states = totals.workers_by_state;
    const tiles = [
      ["Batches per second", rate(totals.batches_per_s), "of all jobs"],
      ["Bytes per second", bytes(totals.bytes_per_s), "batches times their size"],
      ["Waiting", share(totals.waited_share), "mean of the active ranks"],
      ["Workers", count(totals.workers), `${states.serving} serving, ${states.free} free`],
      ["Ranks", count(totals.trainers), totals.trainers_idle > 0 ? `${totals.trainers_idle} idle` : "none idle"],
    ];
    keepChildren(
      this._tiles,
      tiles,
      ([name]) => name,
      ([name]) => element("div", { class: "tile" }, element("dt", {}, name), element("dd", {}, element("span"), element("small"))),
      (tile, [, value, more]) => {
        setText(tile.lastChild.firstChild, value);
        setText(tile.lastChild.lastChild, more);
      },
    );
  }

  _showEngine(engine) {
    this._engine.hidden = engine === null;
    if (engine === null) return;
    const trouble = engine.trouble ?? engine.refusal;
    const spent = engine.spent === null ? "" : `; ${engine.spent.toFixed(2)}${engine.budget === null ? "" : ` of ${engine.budget}`} spent`;
    setText(
      this._engine,
      `Engine ${engine.name}: ${engine.running} running, ${engine.starting} starting, ${engine.stopping} stopping, ` +
        `${engine.wanted} wanted (${engine.workers_min} to ${engine.workers_max})${spent}; ${engine.reason}${trouble ? `; ${trouble}` : ""}`,
    );
  }
}

function workersOf(trainer) {
  if (trainer.is_idle) return count(trainer.workers);
  const wanted = trainer.limited_by === "unknown" ? "" : ` of ${count(trainer.workers_wanted)} wanted`;
  return `${count(trainer.workers)}${wanted}`;
}
