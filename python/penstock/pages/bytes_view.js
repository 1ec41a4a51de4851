// SPDX-License-Identifier: Apache-2.0
// The bytes of batches from machines with workers to machines with trainers.

import { drawn, element } from "./dom.js";
import { KeptTable } from "./kept_table.js";
import { COLOURS, LineChart } from "./line_chart.js";
import { bytes, count } from "./words.js";

const WIDTH_MIN = 260;
const ROW = 44;
const MACHINES_MAX = 24; // of one side of the drawing

export class BytesView {
  constructor() {
    this._chart = new LineChart("Bytes per second", "of all batches delivered by the pool's workers", bytes, { atLeast: 1000 });
    this._svg = drawn("svg", { class: "drawing", role: "img" });
    this._table = new KeptTable("Between machines", [
      { title: "From", text: (one) => one.from },
      { title: "To", text: (one) => one.to },
      { title: "Bytes/s", isNumber: true, text: (one) => `${bytes(one.bytesPerS)}/s` },
      { title: "Workers", isNumber: true, text: (one) => count(one.workers) },
      { title: "Link", text: (one) => (one.from === one.to ? "within one machine" : "network") },
    ]);
    this._flows = [];
    new ResizeObserver(() => this._draw(this._flows)).observe(this._svg);
    this.node = element(
      "div",
      {},
      element("p", { class: "hint" }, "The bytes per second of a rank are its batches per second times their size, divided evenly among its workers."),
      element("figure", {}, element("figcaption", {}, "From workers to trainers"), this._svg),
      this._table.node,
      element("div", { class: "charts" }, this._chart.node),
    );
  }

  update(feed) {
    const flows = (this._flows = flowsOf(feed.status));
    this._draw(flows);
    this._table.update(flows, "No bytes are in transit.");
    const to = feed.status.at;
    const points = feed.points.filter((point) => point.at >= to - 300);
    this._chart.update(points, [{ name: "all", colour: COLOURS[0], values: points.map((point) => point.bytes_per_s) }], to - 300, to);
  }

  _draw(flows) {
    const width = Math.max(WIDTH_MIN, this._svg.clientWidth);
    const box = width * 0.3;
    const letters = Math.floor((box - 20) / 7.5);
    const sources = [...new Set(flows.map((flow) => flow.from))].slice(0, MACHINES_MAX);
    const targets = [...new Set(flows.map((flow) => flow.to))].slice(0, MACHINES_MAX);
    const height = Math.max(1, sources.length, targets.length) * ROW + 10;
    const middle = (list, name) => (height * (list.indexOf(name) + 0.5)) / list.length;
    const most = Math.max(1, ...flows.map((flow) => flow.bytesPerS));
    const parts = flows
      .filter((flow) => sources.includes(flow.from) && targets.includes(flow.to))
      .map((flow) => {
        const [y1, y2] = [middle(sources, flow.from), middle(targets, flow.to)];
        const path = `M${box} ${y1}C${width / 2} ${y1} ${width / 2} ${y2} ${width - box} ${y2}`;
        const thick = 1.5 + 16 * (flow.bytesPerS / most);
        return drawn("path", { class: flow.from === flow.to ? "flow within" : "flow", d: path, "stroke-width": thick }, drawn("title", {}, toldOf(flow)));
      });
    for (const [list, x] of [[sources, 0], [targets, width - box]])
      for (const name of list) {
        const y = middle(list, name);
        parts.push(drawn("rect", { x, y: y - 15, width: box, height: 30, rx: 6, fill: "var(--surface)", stroke: "var(--line)" }));
        parts.push(drawn("text", { class: "strong", x: x + 10, y: y + 4 }, name.length > letters ? `${name.slice(0, letters - 1)}…` : name));
      }
    if (flows.length === 0) parts.push(drawn("text", { x: 10, y: 30 }, "No bytes are in transit."));
    this._svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this._svg.setAttribute("aria-label", flows.length > 0 ? flows.map(toldOf).join("; ") : "No bytes are in transit.");
    this._svg.replaceChildren(...parts);
  }
}

function toldOf(flow) {
  return `${flow.from} to ${flow.to}: ${bytes(flow.bytesPerS)} per second from ${flow.workers} workers`;
}

// By pairs of machines, those with most bytes first.
function flowsOf(status) {
  const flows = new Map();
  for (const trainer of status.trainers) {
    const own = status.workers.filter((worker) => worker.works_for === trainer.id);
    for (const worker of own) {
      const id = `${worker.host} → ${trainer.host}`;
      const flow = flows.get(id) ?? { id, from: worker.host, to: trainer.host, bytesPerS: 0, workers: 0 };
      flow.bytesPerS += (trainer.bytes_per_s ?? 0) / own.length;
      flow.workers += 1;
      flows.set(id, flow);
    }
  }
  return [...flows.values()].sort((a, b) => b.bytesPerS - a.bytesPerS);
}
