// SPDX-License-Identifier: Apache-2.0
// Elements, without text that a browser would read as markup: what peers say of themselves is data.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Functions are called when an event of that name comes: {onclick: f}.
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Keeps an element for each key between two calls, so that focus and selection stay: `make(item)` makes
// one, `update(element, item)` changes what it shows.
export function keepChildren(parent, items, keyOf, make, update) {
  const known = parent.keptChildren ?? (parent.keptChildren = new Map());
  const wanted = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    if (!known.has(key)) known.set(key, make(item));
    const child = known.get(key);
    update(child, item);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
  }
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}
