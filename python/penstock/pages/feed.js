// SPDX-License-Identifier: Apache-2.0
// What the dashboard knows of the pool: asks the controller each second, and keeps the minutes before.

const INTERVAL_MS = 1000;
const HIDDEN_INTERVAL_MS = 10000; // while nobody sees the page
const TIMEOUT_MS = 5000;
const PLAN_MS = 5000; // for which a plan is not asked for again
const EVENTS_MAX = 200;
const LEDGER_S = 15; // over which shares of a step are taken

export class Feed {
  constructor(tell) {
    this.status = null;
    this.points = [];
    this.events = [];
    this.trouble = "";
    this.newEvents = []; // of the last answer
    this.newsAt = null;
    this._tell = tell;
    this._plans = new Map(); // by trainer: {at, plan, trouble}
    this._ledgers = new Map(); // by trainer: [time, ledger] of the last seconds
    this._controller = null;
    this._pointsMax = 900;
  }

  start() {
    const turn = async () => {
      const began = performance.now();
      await this._ask();
      this._tell(this);
      const interval = document.hidden ? HIDDEN_INTERVAL_MS : INTERVAL_MS;
      this._timer = setTimeout(turn, Math.max(50, interval - (performance.now() - began)));
    };
    document.addEventListener("visibilitychange", () => {
      if (document.hidden || this._timer === undefined) return;
      clearTimeout(this._timer);
      this._timer = undefined;
      turn();
    });
    turn();
  }

  async _ask() {
    const since = (list) => (list.length > 0 ? list[list.length - 1].sequence : 0);
    try {
      const status = await read("api/status");
      if (status.controller !== this._controller) this._forget(status.controller);
      const [history, events] = await Promise.all([
        read(`api/history?since=${since(this.points)}`),
        read(`api/events?since=${since(this.events)}`),
      ]);
      this.status = status;
      this._pointsMax = history.points_max;
      this.points = [...this.points, ...history.points].slice(-this._pointsMax);
      this.newEvents = events.controller === this._controller ? events.events : [];
      this.events = [...this.events, ...this.newEvents].slice(-EVENTS_MAX);
      this._keepLedgers(status);
      this.trouble = "";
      this.newsAt = Date.now();
    } catch (error) {
      this.newEvents = [];
      this.trouble = error.message;
    }
  }

  // A controller that was started again counts anew.
  _forget(controller) {
    this._controller = controller;
    this.points = [];
    this.events = [];
    this._ledgers.clear();
    this._plans.clear();
  }

  _keepLedgers(status) {
    const there = new Set();
    for (const trainer of status.trainers) {
      if (!trainer.ledger) continue;
      there.add(trainer.id);
      const kept = this._ledgers.get(trainer.id) ?? [];
      kept.push([status.at, trainer.ledger]);
      while (kept.length > 2 && kept[1][0] < status.at - LEDGER_S) kept.shift();
      this._ledgers.set(trainer.id, kept);
    }
    for (const id of this._ledgers.keys()) if (!there.has(id)) this._ledgers.delete(id);
  }

  // {plan, hasLeft} or {trouble} of a trainer; undefined until it is known. Asks anew, now and then, who calls it.
  planOf(trainer) {
    const kept = this._plans.get(trainer) ?? { at: -Infinity };
    if (performance.now() - kept.at > PLAN_MS) {
      this._plans.set(trainer, { ...kept, at: performance.now() });
      read(`api/plan?trainer=${trainer}`).then(
        (answer) => this._keepPlan(trainer, { plan: answer.plan, hasLeft: answer.has_left }),
        (error) => this._keepPlan(trainer, { trouble: error.message }),
      );
    }
    return "plan" in kept || "trouble" in kept ? kept : undefined;
  }

  _keepPlan(trainer, found) {
    this._plans.set(trainer, { at: performance.now(), ...found });
    this._tell(this);
  }

  // Seconds by part and the number of steps, of the last seconds; of all time before there are two looks.
  ledgerLately(trainer) {
    const kept = this._ledgers.get(trainer.id);
    if (!kept) return null;
    const [first, last] = [kept[0][1], kept[kept.length - 1][1]];
    if (last.steps <= first.steps) return last;
    const parts = Object.entries(last.seconds).map(([name, s]) => [name, Math.max(0, s - (first.seconds[name] ?? 0))]);
    return { steps: last.steps - first.steps, seconds: Object.fromEntries(parts) };
  }
}

async function read(path) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new Error("the controller does not answer; it has ended, or its network connection is down. Training continues without it");
  }
  if (answer.ok) return answer.json();
  const text = await answer.text();
  try {
    throw new Error(JSON.parse(text).error);
  } catch (error) {
    throw error instanceof SyntaxError ? new Error(text.trim()) : error;
  }
}
