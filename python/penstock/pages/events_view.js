// SPDX-License-Identifier: Apache-2.0
// What happened in the pool, newest first.

import { element, keepChildren } from "./dom.js";
import { JobChoice } from "./job_choice.js";
import { clock } from "./words.js";

const KINDS = {
  worker_joined: ["worker joined", "good"],
  worker_died: ["worker died", "bad"],
  worker_left: ["worker left", "warn"],
  trainer_joined: ["trainer joined", "good"],
  trainer_left: ["trainer left", ""],
  assigned: ["assigned", ""],
  hedged: ["hedged", "warn"],
  replanned: ["replanned", ""],
  scaled: ["scaled", ""],
};

export class EventsView {
  constructor() {
    this._list = element("ol", { class: "events", "aria-label": "Events, newest first" });
    this._nothing = element("p", { class: "hint" }, "No events since the controller started.");
    this._hidden = new Set();
    this._choice = new JobChoice("events");
    const boxes = Object.entries(KINDS).map(([kind, [name]]) =>
      element("label", {}, element("input", { type: "checkbox", checked: true, onchange: (event) => this._turn(kind, event.target.checked) }), name),
    );
    this.node = element("div", {}, element("div", { class: "tools", role: "group", "aria-label": "Kinds of events" }, this._choice.node, ...boxes), this._list, this._nothing);
  }

  choose(job) {
    this._choice.choose(job);
  }

  _turn(kind, isShown) {
    if (isShown) this._hidden.delete(kind);
    else this._hidden.add(kind);
    if (this._feed) this.update(this._feed);
  }

  update(feed) {
    this._feed = feed;
    const isChosen = this._choice.update(feed.status);
    const shown = feed.events.filter((event) => isChosen(event.trainer) && !this._hidden.has(event.kind)).reverse();
    keepChildren(this._list, shown, (event) => `${feed.status.controller} ${event.sequence}`, itemOf, () => {});
    this._list.hidden = shown.length === 0;
    this._nothing.hidden = shown.length > 0;
  }
}

function itemOf(event) {
  const [name, tone] = KINDS[event.kind] ?? [event.kind.replaceAll("_", " "), ""];
  const when = new Date(event.at * 1000);
  return element(
    "li",
    { "data-kind": event.kind },
    element("time", { datetime: when.toISOString() }, clock(event.at)),
    element("span", {}, element("span", { class: `badge ${tone}`.trim() }, name)),
    element("p", {}, event.text),
  );
}
