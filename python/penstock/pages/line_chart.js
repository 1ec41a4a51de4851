// SPDX-License-Identifier: Apache-2.0
// Lines over time. The chart can be focused: arrows move through time, and what stands there is read out.

import { drawn, element, keepChildren, setText } from "./dom.js";
import { clock } from "./words.js";

const WIDTH_MIN = 200;
const HEIGHT = 190;
const LEFT = 58;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 24;

export const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"].map((name) => `var(${name})`);

export class LineChart {
  // `shown` makes a text of a value. `atLeast` is the least top of the scale, `most` its greatest; with `isWhole`
  // the scale has whole numbers alone.
  constructor(title, hint, shown, { atLeast = 0, most = Infinity, isWhole = false } = {}) {
    this._title = title;
    this._shown = shown;
    this._bounds = { atLeast, most };
    this._isWhole = isWhole;
    this._width = WIDTH_MIN;
    this._points = [];
    this._series = [];
    this._chosen = null; // a time, or null for now
    this._svg = drawn("svg", { class: "chart", role: "img", tabindex: "0" });
    this._legend = element("ul", { class: "legend" });
    this._readout = element("p", { class: "readout", "aria-live": "off" });
    this.node = element(
      "figure",
      {},
      element("figcaption", {}, title, " ", element("small", {}, hint)),
      this._svg,
      this._legend,
      this._readout,
    );
    // Drawn in the pixels that there are, so that letters are as large on a phone as anywhere.
    new ResizeObserver(() => this._draw()).observe(this._svg);
    this._svg.addEventListener("pointermove", (event) => this._choose(this._timeAt(event)));
    this._svg.addEventListener("pointerleave", () => this._choose(null));
    this._svg.addEventListener("blur", () => this._choose(null));
    this._svg.addEventListener("keydown", (event) => this._press(event));
  }

  // `series`: {name, colour, values}, a value of each point or null.
  update(points, series, from, to) {
    this._points = points;
    this._series = series;
    this._from = from;
    this._to = to;
    this._draw();
  }

  _press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key === "Escape") return this._choose(null);
    if (!(event.key in steps) || this._points.length === 0) return;
    event.preventDefault();
    const last = this._points.length - 1;
    const here = this._chosen === null ? last : this._nearest(this._chosen);
    this._readout.setAttribute("aria-live", "polite");
    this._choose(this._points[Math.max(0, Math.min(last, here + steps[event.key]))].at);
  }

  _timeAt(event) {
    const box = this._svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this._width;
    const part = Math.max(0, Math.min(1, (x - LEFT) / (this._width - LEFT - RIGHT)));
    return this._from + part * (this._to - this._from);
  }

  _choose(time) {
    this._chosen = time;
    this._draw();
  }

  _nearest(time) {
    let best = 0;
    this._points.forEach((point, index) => {
      if (Math.abs(point.at - time) < Math.abs(this._points[best].at - time)) best = index;
    });
    return best;
  }

  _draw() {
    if (this._from === undefined) return;
    const width = (this._width = Math.max(WIDTH_MIN, this._svg.clientWidth));
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = this._series.flatMap((one) => one.values).filter((value) => value !== null);
    const top = niceTop(Math.max(this._bounds.atLeast, ...values), this._bounds.most);
    const x = (at) => LEFT + ((at - this._from) / (this._to - this._from || 1)) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      if (this._isWhole && !Number.isInteger(top * part)) continue;
      const height = y(top * part);
      parts.push(drawn("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }));
      parts.push(drawn("text", { x: LEFT - 6, y: height + 4, "text-anchor": "end" }, this._shown(top * part)));
    }
    for (const [at, anchor] of [[this._from, "start"], [(this._from + this._to) / 2, "middle"], [this._to, "end"]])
      parts.push(drawn("text", { x: x(at), y: HEIGHT - 6, "text-anchor": anchor }, clock(at)));
    this._series.forEach((one) => {
      const path = pathOf(this._points, one.values, x, y);
      parts.push(drawn("path", { class: "series", d: path, stroke: one.colour }));
    });
    const index = this._points.length === 0 ? -1 : this._chosen === null ? this._points.length - 1 : this._nearest(this._chosen);
    if (this._chosen !== null && index >= 0) {
      const at = x(this._points[index].at);
      parts.push(drawn("line", { class: "cross", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this._svg.replaceChildren(...parts);
    this._tell(index, values);
  }

  _tell(index, values) {
    const at = (one) => (index < 0 ? null : one.values[index]);
    keepChildren(
      this._legend,
      this._series.map((one, place) => ({ ...one, place })),
      (one) => one.place,
      () => element("li", {}, element("span", { class: "swatch" }), element("span")),
      (item, one) => {
        item.firstChild.style.background = one.colour;
        setText(item.lastChild, `${one.name}: ${this._shown(at(one))}`);
      },
    );
    const when = index < 0 ? "" : this._chosen === null ? "now" : `at ${clock(this._points[index].at)}`;
    const told = this._series.map((one) => `${one.name} ${this._shown(at(one))}`).join(", ");
    setText(this._readout, index < 0 ? "no measurement yet" : this._chosen === null ? "" : `${when}: ${told}`);
    const range = values.length > 0 ? `; from ${this._shown(Math.min(...values))} to ${this._shown(Math.max(...values))}` : "";
    this._svg.setAttribute("aria-label", `${this._title}, ${when || "no measurement yet"}: ${told}${range}. Arrow keys move through time.`);
  }
}

function niceTop(value, most) {
  if (!(value > 0)) return Math.min(1, most);
  const power = 10 ** Math.floor(Math.log10(value));
  const top = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
  return Math.min(top, most);
}

// A line that breaks off where a value is missing.
function pathOf(points, values, x, y) {
  let path = "";
  let isDown = false;
  points.forEach((point, index) => {
    const value = values[index];
    if (value === null || value === undefined) isDown = false;
    else {
      path += `${isDown ? "L" : "M"}${x(point.at).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
    }
  });
  return path;
}
