// SPDX-License-Identifier: Apache-2.0
// A table whose rows stay the same elements while their contents change, and which its heads sort. On a phone each row
// becomes a list of its cells.

import { element, keepChildren, setText } from "./dom.js";

export class KeptTable {
  // `columns`: {title, text(item), value(item), href(item), isNumber, isText, tone(item)}; `value` is what the column is sorted
  // by, its text if it is missing; a cell whose tone is not null is a badge, and one whose href is not null a link. The
  // first column is the head of its row. The text of one with `isText` has several lines.
  constructor(caption, columns) {
    this._columns = columns;
    this._sorted = null; // {index, isDescending}
    this._body = element("tbody");
    this._nothing = element("p", { class: "hint", hidden: true });
    this._heads = columns.map((one, index) =>
      element(
        "th",
        { scope: "col", class: one.isNumber ? "number" : null },
        element("button", { type: "button", class: "sort", onclick: () => this._sortBy(index) }, one.title),
      ),
    );
    this.node = element(
      "div",
      {},
      element(
        "div",
        { class: "scroll" },
        element("table", { class: "stacked" }, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...this._heads)), this._body),
      ),
      this._nothing,
    );
  }

  update(items, nothing) {
    this._shown = [items, nothing];
    keepChildren(
      this._body,
      this._inOrder(items),
      (item) => item.id,
      (item) => this._row(item),
      (row, item) => this._change(row, item),
    );
    this._nothing.hidden = items.length > 0;
    setText(this._nothing, nothing);
  }

  // Numbers are shown from the largest first, texts from A; a second click turns the order, and a third ends it.
  _sortBy(index) {
    const first = Boolean(this._columns[index].isNumber);
    if (this._sorted?.index !== index) this._sorted = { index, isDescending: first };
    else if (this._sorted.isDescending === first) this._sorted = { index, isDescending: !first };
    else this._sorted = null;
    this._heads.forEach((head, place) => {
      if (this._sorted?.index !== place) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this._sorted.isDescending ? "descending" : "ascending");
    });
    if (this._shown) this.update(...this._shown);
  }

  _inOrder(items) {
    if (this._sorted === null) return items;
    const column = this._columns[this._sorted.index];
    const sign = this._sorted.isDescending ? -1 : 1;
    const keyed = items.map((item) => [(column.value ?? column.text)(item), item]);
    const isKnown = ([key]) => key !== null && key !== undefined;
    const compare = ([a], [b]) => sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return [...keyed.filter(isKnown).sort(compare), ...keyed.filter((one) => !isKnown(one))].map(([, item]) => item);
  }

  _row() {
    const cells = this._columns.map((one, index) => {
      const name = index === 0 ? "th" : "td";
      const content = element(one.href ? "a" : "span");
      return element(name, { scope: index === 0 ? "row" : null, class: one.isNumber ? "number" : one.isText ? "lines" : null, "data-head": one.title }, content);
    });
    return element("tr", {}, ...cells);
  }

  _change(row, item) {
    this._columns.forEach((one, index) => {
      const content = row.children[index].firstChild;
      setText(content, one.text(item));
      const tone = one.tone ? one.tone(item) : null;
      const style = tone === null ? "" : `badge ${tone}`.trim();
      if (content.className !== style) content.className = style;
      if (!one.href) return;
      const href = one.href(item);
      if (href === null) content.removeAttribute("href");
      else if (content.getAttribute("href") !== href) content.setAttribute("href", href);
    });
  }
}
