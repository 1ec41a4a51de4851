// SPDX-License-Identifier: Apache-2.0
// The workers of the pool and what each does.

import { element, keepChildren, setText } from "./dom.js";
import { KeptTable } from "./kept_table.js";
import { JobChoice } from "./job_choice.js";
import { bytes, hrefOf, share, titleOf } from "./words.js";

const STATES = [
  ["serving", "--s1"],
  ["free", "--rest"],
  ["moving", "--s4"],
  ["stuck", "--s8"],
  ["draining", "--s2"],
];
const TONES = { serving: "good", moving: "warn", stuck: "bad", draining: "warn" };
const SILENT_S = 5;

export class WorkersView {
  constructor() {
    this._bar = element("div", { class: "bar", role: "img" });
    this._legend = element("ul", { class: "legend" });
    this._search = element("input", { type: "search", placeholder: "node7, serving, train.py", oninput: () => this._again() });
    this._titles = new Map();
    this._hrefs = new Map(); // to the steps of a rank's job
    this._choice = new JobChoice("workers");
    this._hosts = new KeptTable("Machines", [
      { title: "Machine", text: (one) => one.name },
      { title: "Workers", isNumber: true, text: (one) => `${one.workers}, ${one.serving} serving`, value: (one) => one.workers },
      { title: "CPUs busy", isNumber: true, text: (one) => (one.load === null ? "–" : `${share(one.load.cpu_share)} of ${one.load.cpu_count}`), value: (one) => one.load?.cpu_share },
      { title: "Memory used", isNumber: true, text: (one) => (one.load === null ? "–" : `${bytes(one.load.memory_used_bytes)} of ${bytes(one.load.memory_bytes)}`), value: memoryShareOf },
      { title: "Last lines of the log", text: (one) => one.log.join("\n") || "–", isText: true },
    ]);
    this._table = new KeptTable("Workers", [
      { title: "Worker", text: (one) => one.name },
      { title: "State", text: (one) => one.state, tone: (one) => TONES[one.state] ?? "" },
      { title: "Works for", text: (one) => this._workOf(one), href: (one) => this._hrefs.get(one.works_for) ?? null },
      { title: "Address", text: (one) => one.endpoint },
      { title: "Reported", isNumber: true, text: (one) => `${one.since_report_s.toFixed(1)} s ago`, value: (one) => one.since_report_s, tone: (one) => (one.since_report_s > SILENT_S ? "bad" : null) },
      { title: "Cannot run", text: (one) => this._unfitOf(one) },
      { title: "Software", text: (one) => one.software || "–" },
    ]);
    this.node = element(
      "div",
      {},
      element("div", { class: "panel" }, this._bar, this._legend),
      element("div", { class: "tools" }, this._choice.node, element("label", {}, "Filter workers: ", this._search)),
      this._table.node,
      this._hosts.node,
    );
  }

  choose(job) {
    this._choice.choose(job);
  }

  _again() {
    if (this._feed) this.update(this._feed);
  }

  update(feed) {
    this._feed = feed;
    const { workers, trainers, totals } = feed.status;
    this._titles = new Map(trainers.map((one) => [one.id, titleOf(one)]));
    this._hrefs = new Map(feed.status.jobs.flatMap((job) => job.ranks.map((rank) => [rank, hrefOf("steps", job.id)])));
    const isChosen = this._choice.update(feed.status);
    const states = totals.workers_by_state;
    keepChildren(
      this._bar,
      STATES.filter(([state]) => states[state] > 0),
      ([state]) => state,
      ([, colour]) => {
        const part = element("span");
        part.style.background = `var(${colour})`;
        return part;
      },
      (part, [state]) => (part.style.flexGrow = states[state]),
    );
    const told = STATES.map(([state]) => `${states[state]} ${state}`).join(", ");
    this._bar.setAttribute("aria-label", `Of ${workers.length} workers: ${told}`);
    keepChildren(
      this._legend,
      STATES,
      ([state]) => state,
      ([, colour]) => {
        const swatch = element("span", { class: "swatch" });
        swatch.style.background = `var(${colour})`;
        return element("li", {}, swatch, element("span"));
      },
      (item, [state]) => setText(item.lastChild, `${states[state]} ${state}`),
    );
    const { hosts } = feed.status;
    this._hosts.update(hosts.map((one) => ({ id: one.name, ...one })), "");
    this._hosts.node.hidden = hosts.length === 0;
    const wanted = this._search.value.trim().toLowerCase();
    const shown = workers.filter((one) => isChosen(one.works_for) && `${one.name} ${one.id} ${one.state} ${this._workOf(one)} ${one.endpoint}`.toLowerCase().includes(wanted));
    this._table.update(shown, workers.length > 0 ? "No worker matches." : "The pool has no workers: start some with penstock worker.");
  }

  _workOf(worker) {
    if (worker.works_for === null) return "no job";
    return this._titles.get(worker.works_for) ?? `trainer ${worker.works_for.slice(0, 8)}, which has left`;
  }

  _unfitOf(worker) {
    const jobs = worker.unfit_for.map((id) => this._titles.get(id)).filter((title) => title !== undefined);
    return jobs.length > 0 ? `${jobs.join(", ")}: ${worker.unfit_reason ?? "no reason given"}` : "–";
  }
}

function memoryShareOf(host) {
  return host.load === null ? null : host.load.memory_used_bytes / host.load.memory_bytes;
}
