// SPDX-License-Identifier: Apache-2.0
// The plan of a model as a graph: which calls run in the workers, which in the trainer, what crosses, and
// why. Calls stand below each other in their order, at the side where they run; what both sides compute stands
// at the trainer's, in grey. Of a large plan several calls share a box, as the server has folded them.

import { drawn, element, setText } from "./dom.js";
import { bytes, seconds, titleOf } from "./words.js";

const WIDTH_MIN = 300;
const ROW = 46;
const TOP = 34;
const WHERE = { worker: "the workers", trainer: "the trainer", both: "the workers and the trainer" };

export class PlanView {
  constructor() {
    this._choice = element("select", { id: "plan-of", onchange: () => this._again() });
    this._verdict = element("p", { class: "panel" });
    this._svg = drawn("svg", { class: "drawing", role: "group" });
    this._detail = element("dl", { class: "detail panel", "aria-live": "polite" });
    this._figure = element("figure", {}, element("figcaption", {}, "Calls ", element("small", {}, "select a box to see why its call runs there; arrow keys move between boxes")), this._svg);
    this._facts = element("ul", { class: "panel facts" });
    this.node = element("div", {}, element("div", { class: "tools" }, element("label", { for: "plan-of" }, "Plan of ", this._choice)), this._verdict, this._facts, element("div", { class: "plan" }, this._figure, this._detail));
    this._shown = "";
    this._width = 0;
    new ResizeObserver(() => this._fit()).observe(this._svg);
    this._svg.addEventListener("keydown", (event) => this._press(event));
  }

  // The drawing has the pixels that there are, so that letters are as large on a phone as anywhere.
  _fit() {
    if (this._svg.clientWidth === this._width || this._svg.clientWidth === 0) return;
    this._shown = "";
    this._again();
  }

  _again() {
    if (this._feed) this.update(this._feed);
  }

  update(feed) {
    this._feed = feed;
    const { trainers } = feed.status;
    this._offer(trainers);
    const known = this._choice.value === "" ? undefined : feed.planOf(this._choice.value);
    const text = JSON.stringify([this._choice.value, known === undefined, known?.plan, known?.trouble, known?.hasLeft]);
    if (text === this._shown) return;
    this._shown = text;
    this._show(known, trainers.length > 0);
  }

  _offer(trainers) {
    const wanted = trainers.map((one) => one.id).join();
    if (this._choice.dataset.ids === wanted) return;
    const kept = this._choice.value;
    this._choice.replaceChildren(...trainers.map((one) => element("option", { value: one.id }, titleOf(one))));
    if (trainers.some((one) => one.id === kept)) this._choice.value = kept;
    this._choice.dataset.ids = wanted;
  }

  _show(known, hasTrainer) {
    const plan = known?.plan ?? null;
    const calls = plan === null ? [] : plan.calls;
    this._figure.hidden = calls.length === 0;
    this._detail.hidden = calls.length === 0;
    const facts = plan === null ? [] : [...plan.facts];
    if (plan?.calls_left_out > 0) facts.push(`${plan.calls_left_out} calls are omitted from the drawing`);
    this._facts.replaceChildren(...facts.map((fact) => element("li", {}, fact)));
    this._facts.hidden = facts.length === 0;
    setText(this._verdict, plan === null ? whyNone(known, hasTrainer) : plan.verdict);
    const drawn = JSON.stringify([calls, plan?.edges, this._svg.clientWidth]);
    if (calls.length > 0 && drawn !== this._drawn) this._draw(calls, plan.edges);
    this._drawn = drawn; // prices change often, and a node that has the focus should keep it
  }

  _draw(calls, edges) {
    this._calls = calls;
    this._edges = edges;
    this._width = this._svg.clientWidth;
    const width = Math.max(WIDTH_MIN, this._width);
    const box = Math.min(250, width * 0.4);
    const letters = Math.floor((box - 16) / 6.8);
    const middle = (width - box) / 2;
    const x = (place) => (place === null ? middle : calls[place].where === "worker" ? 4 : width - box - 4);
    const y = (place) => TOP + (place === null ? 0 : place + 1) * ROW;
    const lines = edges.filter((edge) => edge.target !== null && (edge.source === null || edge.source < edge.target));
    const labels = []; // on top of all
    const paths = lines.map((edge) => {
      const [x1, x2] = [x(edge.source) + box / 2, x(edge.target) + box / 2];
      const [y1, y2] = [y(edge.source) + 32, y(edge.target)];
      // What reaches the trainer from the workers, or with the batch, is read there.
      const isCrossing = calls[edge.target].where === "trainer" && (edge.source === null || calls[edge.source].where === "worker");
      const isLong = y2 - y1 > ROW && x1 === x2;
      // A curve comes three quarters of the way to where it is bent to, which is to be past the boxes.
      const bend = isLong ? x1 + (x1 > width / 2 ? -1 : 1) * ((box / 2 + 12) / 0.75) : null;
      const half = (y1 + y2) / 2;
      const path = isLong ? `M${x1} ${y1}C${bend} ${y1 + 14} ${bend} ${y2 - 14} ${x2} ${y2}` : `M${x1} ${y1}C${x1} ${half} ${x2} ${half} ${x2} ${y2}`;
      if (isCrossing) labels.push(drawn("text", { class: "strong", x: (x1 + x2) / 2, y: half + 4, "text-anchor": "middle" }, bytes(edge.bytes)));
      return drawn("path", { class: isCrossing ? "edge crossing" : "edge", d: path });
    });
    const nodes = calls.map((call, place) =>
      drawn(
        "g",
        { class: `node ${call.where}`, tabindex: place === 0 ? "0" : "-1", role: "button", "data-index": place, "aria-label": `${call.name}, in ${WHERE[call.where]}: ${call.reason}`, onfocus: () => this._choose(place), onclick: (event) => event.currentTarget.focus() },
        drawn("rect", { x: x(place), y: y(place), width: box, height: 32, rx: 6 }),
        drawn("text", { x: x(place) + 8, y: y(place) + 21 }, shortened(call.name, letters)),
      ),
    );
    const batch = [drawn("rect", { class: "batch", x: middle, y: y(null), width: box, height: 32, rx: 16 }), drawn("text", { class: "strong", x: width / 2, y: y(null) + 21, "text-anchor": "middle" }, "the batch")];
    const heads = [["in the workers", 4, "start"], ["in the trainer", width - 4, "end"]].map(([name, at, anchor]) => drawn("text", { class: "strong", x: at, y: 18, "text-anchor": anchor }, name));
    this._svg.setAttribute("viewBox", `0 0 ${width} ${TOP + (calls.length + 1) * ROW}`);
    const count = (some) => some.reduce((sum, call) => sum + call.count, 0);
    this._svg.setAttribute("aria-label", `Plan: ${count(calls.filter((call) => call.where === "worker"))} of ${count(calls)} calls run in the workers`);
    this._svg.replaceChildren(...heads, ...batch, ...paths, ...nodes, ...labels);
    this._choose(0);
  }

  _choose(place) {
    const call = this._calls[place];
    for (const node of this._svg.querySelectorAll(".node")) {
      const isChosen = Number(node.dataset.index) === place;
      node.classList.toggle("is-chosen", isChosen);
      node.setAttribute("tabindex", isChosen ? "0" : "-1");
    }
    const inputs = this._edges.filter((edge) => edge.target === place).map((edge) => (edge.source === null ? batchTensors(edge.leaves) : this._calls[edge.source].name));
    const rows = [
      [call.count > 1 ? "Calls" : "Call", call.count > 1 ? call.members.join(", ") : call.name],
      ["Runs in", WHERE[call.where] ?? call.where],
      ["Reason", call.reason],
      ["Time", `${seconds(call.seconds)} per batch`],
      ["Output", bytes(call.bytes)],
      ["Inputs", inputs.length > 0 ? [...new Set(inputs)].join(", ") : "no tensor of a batch"],
    ];
    this._detail.replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  _press(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    const nodes = [...this._svg.querySelectorAll(".node")];
    const here = nodes.indexOf(document.activeElement);
    if (here < 0) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(nodes.length - 1, here + steps[event.key]))].focus();
  }
}

function whyNone(known, hasTrainer) {
  if (!hasTrainer) return "No job uses this pool now.";
  if (known === undefined) return "Requesting the plan.";
  if (known.trouble !== undefined) return known.trouble;
  if (known.hasLeft) return "This job has ended.";
  return "No plan reported: this program has not called penstock.offload, or its plan is not ready yet. penstock explain shows which calls could move.";
}

function batchTensors(leaves) {
  return leaves.length === 1 ? `tensor ${leaves[0]} of the batch` : `tensors ${leaves.join(", ")} of the batch`;
}

function shortened(name, letters) {
  return name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
}
