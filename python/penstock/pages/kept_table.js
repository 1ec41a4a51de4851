// SPDX-License-Identifier: Apache-2.0
// A table whose rows stay the same elements while what they show changes. On a phone each row becomes a
// list of its cells.

import { element, keepChildren, setText } from "./dom.js";

export class KeptTable {
  // `columns`: {title, text(item), isNumber, tone(item)}; a cell whose tone is not null is a badge. The first column
  // is the head of its row.
  constructor(caption, columns) {
    this._columns = columns;
    this._body = element("tbody");
    this._nothing = element("p", { class: "hint", hidden: true });
    const heads = columns.map((one) => element("th", { scope: "col", class: one.isNumber ? "number" : null }, one.title));
    this.node = element(
      "div",
      {},
      element(
        "div",
        { class: "scroll" },
        element("table", { class: "stacked" }, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...heads)), this._body),
      ),
      this._nothing,
    );
  }

  update(items, nothing) {
    keepChildren(
      this._body,
      items,
      (item) => item.id,
      (item) => this._row(item),
      (row, item) => this._change(row, item),
    );
    this._nothing.hidden = items.length > 0;
    setText(this._nothing, nothing);
  }

  _row() {
    const cells = this._columns.map((one, index) => {
      const name = index === 0 ? "th" : "td";
      return element(name, { scope: index === 0 ? "row" : null, class: one.isNumber ? "number" : null, "data-head": one.title }, element("span"));
    });
    return element("tr", {}, ...cells);
  }

  _change(row, item) {
    this._columns.forEach((one, index) => {
      const span = row.children[index].firstChild;
      setText(span, one.text(item));
      const tone = one.tone ? one.tone(item) : null;
      const style = tone === null ? "" : `badge ${tone}`.trim();
      if (span.className !== style) span.className = style;
    });
  }
}
