// SPDX-License-Identifier: Apache-2.0
// Where the time of a step goes, by rank.

import { element, keepChildren, setText } from "./dom.js";
import { JobChoice } from "./job_choice.js";
import { seconds, share, titleOf } from "./words.js";

const COLOURS = {
  compute: "--rest",
  dataset: "--s1",
  collate: "--s3",
  prefix: "--s7",
  worker: "--s8",
  wire: "--s2",
  device: "--s4",
  order: "--s5",
  ranks: "--ranks",
  loader: "--s6",
  waiting: "--soft",
};

export class StepsView {
  constructor() {
    this._hint = element("p", { class: "hint" }, "Each second of a step belongs to one part: working, or waiting in one stage. The last 15 seconds are shown.");
    this._choice = new JobChoice("steps");
    this._legend = element("ul", { class: "legend" });
    this._ranks = element("div");
    this.node = element("div", {}, this._hint, element("div", { class: "tools" }, this._choice.node), element("div", { class: "panel" }, this._legend), this._ranks);
  }

  choose(job) {
    this._choice.choose(job);
  }

  update(feed) {
    const { step_parts } = feed.status;
    const isChosen = this._choice.update(feed.status);
    const trainers = feed.status.trainers.filter((one) => isChosen(one.id));
    const parts = [...step_parts, { name: "waiting", title: "waiting", meaning: "waiting for a batch, without a reported cause" }];
    const rows = trainers.map((trainer) => ({ trainer, ...timesOf(trainer, feed.ledgerLately(trainer)) }));
    const used = parts.filter((part) => part.name !== "waiting" || rows.some((row) => "waiting" in row.times));
    keepChildren(
      this._legend,
      used,
      (part) => part.name,
      (part) => element("li", { title: part.meaning }, swatchOf(part.name), element("span", {}, `${part.title}: ${part.meaning}`)),
      () => {},
    );
    keepChildren(
      this._ranks,
      rows,
      (row) => row.trainer.id,
      () => element("section", { class: "panel rank" }, element("h3"), element("p", { class: "hint" }), element("div", { class: "bar", role: "img" }), element("ul", { class: "legend" })),
      (section, row) => showRank(section, row, parts),
    );
    if (trainers.length === 0) this._ranks.replaceChildren(element("p", { class: "hint" }, "No job uses this pool now."));
    if (trainers.length === 0) this._ranks.keptChildren = undefined;
  }
}

// Seconds of a step by part. A trainer without a ledger is known to work and to wait.
function timesOf(trainer, ledger) {
  if (ledger !== null && ledger.steps > 0) {
    const times = Object.entries(ledger.seconds).map(([name, s]) => [name, s / ledger.steps]);
    return { times: Object.fromEntries(times), note: `${ledger.steps} steps` };
  }
  if (trainer.step_s !== null && trainer.starved_s !== null)
    return { times: { compute: trainer.step_s, waiting: trainer.starved_s }, note: "no time breakdown reported: the cause of waiting is unknown" };
  return { times: {}, note: "no measurements yet" };
}

function showRank(section, { trainer, times, note }, parts) {
  const [title, hint, bar, legend] = section.children;
  const total = Object.values(times).reduce((sum, s) => sum + s, 0);
  setText(title, titleOf(trainer));
  setText(hint, total > 0 ? `${seconds(total)} per step; ${note}` : note);
  const there = parts.filter((part) => times[part.name] > 0);
  keepChildren(bar, there, (part) => part.name, (part) => barOf(part.name), (span, part) => (span.style.flexGrow = times[part.name] / total));
  const told = there.map((part) => `${part.title} ${share(times[part.name] / total)}`).join(", ");
  bar.setAttribute("aria-label", `Step of ${titleOf(trainer)}: ${told || note}`);
  keepChildren(
    legend,
    there,
    (part) => part.name,
    (part) => element("li", {}, swatchOf(part.name), element("span")),
    (item, part) => setText(item.lastChild, `${part.title} ${share(times[part.name] / total)} (${seconds(times[part.name])})`),
  );
}

function barOf(name) {
  const span = element("span");
  span.style.background = `var(${COLOURS[name] ?? "--rest"})`;
  span.style.flexBasis = "0";
  return span;
}

function swatchOf(name) {
  const swatch = element("span", { class: "swatch" });
  swatch.style.background = `var(${COLOURS[name] ?? "--rest"})`;
  return swatch;
}
