// SPDX-License-Identifier: Apache-2.0
// The choice of one job, whose ranks and workers alone a view then shows. It is part of the page's address.

import { element } from "./dom.js";
import { hrefOf } from "./words.js";

export class JobChoice {
  constructor(view) {
    this._chosen = "";
    this._select = element("select", { onchange: () => (location.hash = hrefOf(view, this._select.value)) });
    this.node = element("label", {}, "Job: ", this._select);
  }

  // `job` is an id of /api/status, or "" for all jobs.
  choose(job) {
    this._chosen = job;
    this._select.value = job;
  }

  // Returns whether a rank's id is of the chosen job. A job that has ended is offered while it is chosen.
  update(status) {
    const all = [...status.jobs, ...status.ended_jobs.map((one) => ({ ...one, title: `${one.title} (ended)` }))];
    const chosen = all.find((one) => one.id === this._chosen);
    const offered = [{ id: "", title: "all" }, ...all.filter((one) => one === chosen || status.jobs.includes(one))];
    if (chosen === undefined && this._chosen !== "") offered.push({ id: this._chosen, title: "a job that has left" });
    const wanted = JSON.stringify(offered.map((one) => [one.id, one.title]));
    if (this._select.dataset.offered !== wanted) {
      this._select.replaceChildren(...offered.map((one) => element("option", { value: one.id }, one.title)));
      this._select.dataset.offered = wanted;
    }
    this._select.value = this._chosen;
    if (this._chosen === "") return () => true;
    const ranks = new Set(chosen?.ranks ?? []);
    return (rank) => ranks.has(rank);
  }
}
