// SPDX-License-Identifier: Apache-2.0
// The page: its views, the line of trouble, the theme, and news for who does not see the page.

import { element, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { BytesView } from "./bytes_view.js";
import { EventsView } from "./events_view.js";
import { OverviewView } from "./overview_view.js";
import { PlanView } from "./plan_view.js";
import { StepsView } from "./steps_view.js";
import { WorkersView } from "./workers_view.js";

const VIEWS = [
  ["overview", "Overview", OverviewView],
  ["workers", "Workers", WorkersView],
  ["steps", "Steps", StepsView],
  ["plan", "Plan", PlanView],
  ["bytes", "Bytes", BytesView],
  ["events", "Events", EventsView],
];
const TOLD = new Set(["worker_died", "trainer_left", "replanned"]);
const THEMES = ["system", "light", "dark"];
const THEME_KEY = "penstock-theme";

const at = (id) => document.getElementById(id);
const made = new Map(); // views that were looked at, by name
let current = "";
let lastNewsAt = null;

const feed = new Feed(() => refresh());

function viewOf(name) {
  if (!made.has(name)) {
    const View = VIEWS.find(([one]) => one === name)[2];
    made.set(name, new View());
  }
  return made.get(name);
}

function show() {
  const [wanted, words] = location.hash.slice(1).split("?");
  const name = VIEWS.some(([one]) => one === wanted) ? wanted : "overview";
  const isChange = current !== "" && current !== name;
  current = name;
  const title = VIEWS.find(([one]) => one === name)[1];
  setText(at("title"), title);
  document.title = `${title} – penstock`;
  for (const link of at("views").querySelectorAll("a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  viewOf(name).choose?.(new URLSearchParams(words ?? "").get("job") ?? "");
  at("view").replaceChildren(viewOf(name).node);
  refresh();
  if (isChange) at("main").focus({ preventScroll: true });
}

function refresh() {
  const { status, trouble } = feed;
  if (trouble === "") lastNewsAt = feed.newsAt;
  document.body.classList.toggle("is-old", trouble !== "");
  at("trouble").hidden = trouble === "";
  const age = lastNewsAt === null ? "" : `No update for ${Math.round((Date.now() - lastNewsAt) / 1000)} s: `;
  if (trouble !== "") setText(at("trouble"), `${age}${trouble}.`);
  if (status === null) return;
  const state = status.is_settled ? "" : "; starting, no workers are assigned yet";
  setText(at("controller"), `controller ${status.controller.slice(0, 8)} at ${status.endpoint}${state}`);
  const told = feed.newEvents.filter((event) => TOLD.has(event.kind));
  if (told.length > 0) setText(at("news"), told.map((event) => event.text).join("; "));
  viewOf(current).update(feed);
}

function setTheme(theme) {
  if (theme === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = theme;
  setText(at("theme"), `Theme: ${theme}`);
}

function keptTheme() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    return THEMES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // a browser that keeps nothing
  }
}

function turnTheme() {
  const next = THEMES[(THEMES.indexOf(keptTheme()) + 1) % THEMES.length];
  try {
    localStorage.setItem(THEME_KEY, next);
  } catch {
    // It holds until the page is left.
  }
  setTheme(next);
}

for (const [name, title] of VIEWS) at("views").append(element("li", {}, element("a", { href: `#${name}` }, title)));
at("theme").addEventListener("click", turnTheme);
window.addEventListener("hashchange", show);
setTheme(keptTheme());
show();
feed.start();
