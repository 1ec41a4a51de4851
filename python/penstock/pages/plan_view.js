// SPDX-License-Identifier: Apache-2.0
// The plan of one trainer's model, with the choice of the trainer.

import { element } from "./dom.js";
import { PlanPicture } from "./plan_picture.js";
import { titleOf } from "./words.js";

export class PlanView {
  constructor() {
    this._choice = element("select", { id: "plan-of", onchange: () => this.update(this._feed) });
    this._picture = new PlanPicture();
    this.node = element("div", {}, element("div", { class: "tools" }, element("label", { for: "plan-of" }, "Plan of ", this._choice)), this._picture.node);
    this._shown = "";
    this._wanted = "";
  }

  // Shows the plan of the job's first rank, once the job is known.
  choose(job) {
    this._wanted = job;
  }

  update(feed) {
    this._feed = feed;
    const { trainers } = feed.status;
    this._offer(trainers);
    const rank = feed.status.jobs.find((one) => one.id === this._wanted)?.ranks[0];
    if (rank !== undefined) {
      this._choice.value = rank;
      this._wanted = "";
    }
    const known = this._choice.value === "" ? undefined : feed.planOf(this._choice.value);
    const text = JSON.stringify([this._choice.value, trainers.length > 0, known === undefined, known?.plan, known?.trouble, known?.hasLeft]);
    if (text === this._shown) return;
    this._shown = text;
    this._picture.show(known?.plan ?? null, whyNone(known, trainers.length > 0));
  }

  _offer(trainers) {
    const wanted = trainers.map((one) => one.id).join();
    if (this._choice.dataset.ids === wanted) return;
    const kept = this._choice.value;
    this._choice.replaceChildren(...trainers.map((one) => element("option", { value: one.id }, titleOf(one))));
    if (trainers.some((one) => one.id === kept)) this._choice.value = kept;
    this._choice.dataset.ids = wanted;
  }
}

function whyNone(known, hasTrainer) {
  if (!hasTrainer) return "No job uses this pool now.";
  if (known === undefined) return "Requesting the plan.";
  if (known.trouble !== undefined) return known.trouble;
  if (known.hasLeft) return "This job has ended.";
  return "No plan reported: this program has not called penstock.offload, or its plan is not ready yet. penstock explain shows which calls could move.";
}
