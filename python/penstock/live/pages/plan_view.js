// SPDX-License-Identifier: Apache-2.0
// The plan of a model as a graph: which calls run in the workers, which in the trainer, what crosses, and
// why. Calls stand below each other in their order, at the side where they run.

import { drawn, element, setText } from "./dom.js";
import { bytes, seconds, titleOf } from "./words.js";

const WIDTH_MIN = 300;
const ROW = 46;
const TOP = 34;
const CALLS_MAX = 400; // of one drawing

export class PlanView {
  constructor() {
    this._choice = element("select", { id: "plan-of", onchange: () => this._again() });
    this._verdict = element("p", { class: "panel" });
    this._svg = drawn("svg", { class: "drawing", role: "group" });
    this._detail = element("dl", { class: "detail panel", "aria-live": "polite" });
    this._figure = element("figure", {}, element("figcaption", {}, "Calls ", element("small", {}, "choose one to see why it is where it is; arrow keys go through them")), this._svg);
    this._moved = element("ul");
    this.node = element("div", {}, element("div", { class: "tools" }, element("label", { for: "plan-of" }, "Plan of ", this._choice)), this._verdict, this._moved, this._figure, this._detail);
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
    const trainer = trainers.find((one) => one.id === this._choice.value);
    const plan = trainer?.plan ?? null;
    const text = JSON.stringify([this._choice.value, plan]);
    if (text === this._shown) return;
    this._shown = text;
    this._show(plan, trainer !== undefined);
  }

  _offer(trainers) {
    const wanted = trainers.map((one) => one.id).join();
    if (this._choice.dataset.ids === wanted) return;
    const kept = this._choice.value;
    // Those with a plan first: most pools have some without.
    const sorted = [...trainers].sort((a, b) => Number(b.plan !== null) - Number(a.plan !== null));
    this._choice.replaceChildren(...sorted.map((one) => element("option", { value: one.id }, titleOf(one))));
    if (trainers.some((one) => one.id === kept)) this._choice.value = kept;
    this._choice.dataset.ids = wanted;
  }

  _show(plan, hasTrainer) {
    const calls = Array.isArray(plan?.calls) ? plan.calls.slice(0, CALLS_MAX) : [];
    const moved = Array.isArray(plan?.moved) && calls.length === 0 ? plan.moved : [];
    this._figure.hidden = calls.length === 0;
    this._detail.hidden = calls.length === 0;
    this._moved.replaceChildren(...moved.map((one) => element("li", {}, typeof one === "string" ? one : (one.name ?? JSON.stringify(one)))));
    if (plan === null)
      setText(this._verdict, hasTrainer ? "No plan is reported: this program has not called penstock.offload, or its plan is not made yet. penstock explain shows what could move." : "No job trains with this pool now.");
    else setText(this._verdict, plan.verdict ?? "This plan comes without a verdict.");
    if (calls.length > 0) this._draw(calls, plan.calls.length);
  }

  _draw(calls, total) {
    this._width = this._svg.clientWidth;
    const width = Math.max(WIDTH_MIN, this._width);
    const box = Math.min(250, width * 0.4);
    const letters = Math.floor((box - 16) / 7.5);
    const isWorker = (call) => call.where === "worker";
    const x = (call) => (isWorker(call) ? 4 : width - box - 4);
    const y = (index) => TOP + index * ROW;
    const edges = [];
    calls.forEach((call, index) => {
      for (const input of call.inputs ?? []) {
        const from = calls[input];
        if (from === undefined || input >= index) continue;
        const isCrossing = isWorker(from) !== isWorker(call);
        const [x1, y1, x2, y2] = isCrossing
          ? [x(from) + (isWorker(from) ? box : 0), y(input) + 16, x(call) + (isWorker(call) ? box : 0), y(index) + 16]
          : [x(from) + box / 2, y(input) + 32, x(call) + box / 2, y(index)];
        // An edge past other calls goes round them, at the inner side.
        const bend = isCrossing ? width / 2 : index - input > 1 ? (isWorker(call) ? box + 40 : width - box - 40) : x1;
        const path = isCrossing || index - input > 1 ? `M${x1} ${y1}C${bend} ${y1 + 10} ${bend} ${y2 - 10} ${x2} ${y2}` : `M${x1} ${y1}L${x2} ${y2}`;
        edges.push(drawn("path", { class: isCrossing ? "edge crossing" : "edge", d: path }));
        if (isCrossing && from.bytes)
          edges.push(drawn("text", { class: "strong", x: width / 2, y: (y1 + y2) / 2 - 4, "text-anchor": "middle" }, bytes(from.bytes)));
      }
    });
    const nodes = calls.map((call, index) =>
      drawn(
        "g",
        { class: `node ${isWorker(call) ? "worker" : "trainer"}`, tabindex: index === 0 ? "0" : "-1", role: "button", "data-index": index, "aria-label": `${call.name}, in the ${isWorker(call) ? "workers" : "trainer"}: ${call.reason ?? ""}`, onfocus: () => this._choose(calls, index), onclick: (event) => event.currentTarget.focus() },
        drawn("rect", { x: x(call), y: y(index), width: box, height: 32, rx: 6 }),
        drawn("text", { x: x(call) + 8, y: y(index) + 21 }, shortened(call.name, letters)),
      ),
    );
    const heads = [["in the workers", 4, "start"], ["in the trainer", width - 4, "end"]].map(([name, at, anchor]) => drawn("text", { class: "strong", x: at, y: 18, "text-anchor": anchor }, name));
    this._svg.setAttribute("viewBox", `0 0 ${width} ${TOP + calls.length * ROW}`);
    this._svg.setAttribute("aria-label", `The plan: ${calls.filter(isWorker).length} of ${total} calls are in the workers`);
    this._svg.replaceChildren(...heads, ...edges, ...nodes);
    this._choose(calls, 0);
  }

  _choose(calls, index) {
    const call = calls[index];
    for (const node of this._svg.querySelectorAll(".node")) {
      const isChosen = Number(node.dataset.index) === index;
      node.classList.toggle("is-chosen", isChosen);
      node.setAttribute("tabindex", isChosen ? "0" : "-1");
    }
    const inputs = (call.inputs ?? []).map((input) => calls[input]?.name ?? `call ${input}`);
    const rows = [
      ["Call", call.name],
      ["Runs in", call.where === "worker" ? "the workers" : "the trainer"],
      ["Why", call.reason ?? "–"],
      ["Time", seconds(call.seconds)],
      ["Result", bytes(call.bytes)],
      ["Takes", inputs.length > 0 ? inputs.join(", ") : "the batch"],
    ];
    this._detail.replaceChildren(...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  _press(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, Home: -CALLS_MAX, End: CALLS_MAX };
    if (!(event.key in steps)) return;
    const nodes = [...this._svg.querySelectorAll(".node")];
    const here = nodes.indexOf(document.activeElement);
    if (here < 0) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(nodes.length - 1, here + steps[event.key]))].focus();
  }
}

function shortened(name, letters) {
  return name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
}
