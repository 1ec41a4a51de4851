// SPDX-License-Identifier: Apache-2.0
// The picture of a plan: which calls run in the workers, which in the trainer, the tensors that cross, and the
// reasons. Calls are below each other in their order, on the side where they run; calls on both sides are on the
// trainer's side, in grey. In a large plan several calls share a box (graph/plan_picture.py).

import { drawn, element, setText } from "./dom.js";
import { bytes, seconds } from "./words.js";

const WIDTH_MIN = 300;
const ROW = 46;
const TOP = 34;
const WHERE = { worker: "the workers", trainer: "the trainer", both: "the workers and the trainer" };

export class PlanPicture {
  constructor() {
    this._verdict = element("p", { class: "panel" });
    this._facts = element("ul", { class: "panel facts" });
    this._svg = drawn("svg", { class: "drawing", role: "group" });
    this._detail = element("dl", { class: "detail panel", "aria-live": "polite" });
    const hint = element("small", {}, "select a box to see why its call runs there; arrow keys move between boxes");
    this._drawing = element("div", { class: "plan" }, element("figure", {}, element("figcaption", {}, "Calls ", hint), this._svg), this._detail);
    this.node = element("div", {}, this._verdict, this._facts, this._drawing);
    this._plan = null;
    this._drawn = "";
    this._width = 0;
    // The drawing has the pixels that there are, so that letters are as large on a phone as anywhere.
    new ResizeObserver(() => {
      if (this._drawn !== "" && this._svg.clientWidth !== this._width && this._svg.clientWidth > 0) this._draw();
    }).observe(this._svg);
    this._svg.addEventListener("keydown", (event) => this._press(event));
  }

  // Shows a plan, or the sentence `why` if it is null.
  show(plan, why = "") {
    const facts = plan === null ? [] : [...plan.facts];
    if (plan?.calls_left_out > 0) facts.push(`${plan.calls_left_out} calls are omitted from the drawing`);
    setText(this._verdict, plan === null ? why : plan.verdict);
    this._facts.replaceChildren(...facts.map((fact) => element("li", {}, fact)));
    this._facts.hidden = facts.length === 0;
    this._drawing.hidden = plan === null || plan.calls.length === 0;
    this._plan = plan;
    const drawing = this._drawing.hidden ? "" : JSON.stringify([plan.calls, plan.edges]);
    if (drawing !== "" && drawing !== this._drawn) this._draw();
    this._drawn = drawing; // prices change often, and a node that has the focus should keep it
  }

  _draw() {
    const { calls, edges } = this._plan;
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
    const { calls, edges } = this._plan;
    const call = calls[place];
    for (const node of this._svg.querySelectorAll(".node")) {
      const isChosen = Number(node.dataset.index) === place;
      node.classList.toggle("is-chosen", isChosen);
      node.setAttribute("tabindex", isChosen ? "0" : "-1");
    }
    const inputs = edges.filter((edge) => edge.target === place).map((edge) => (edge.source === null ? batchTensors(edge.leaves) : calls[edge.source].name));
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

function batchTensors(leaves) {
  return leaves.length === 1 ? `tensor ${leaves[0]} of the batch` : `tensors ${leaves.join(", ")} of the batch`;
}

function shortened(name, letters) {
  return name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
}
