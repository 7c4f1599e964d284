// Requests by model, the queue, and what failed by its kind.
import { count, lately, time } from "./format.js";
import { attr, byId, el, fact, Keyed, say } from "./dom.js";

const STATUSES = {
  200: "answer broke off",
  400: "bad request",
  401: "no valid key",
  404: "no such model",
  413: "body too large",
  429: "too many requests",
  499: "client left",
  500: "router failed",
  502: "engine failed",
  503: "no engine, or no turn in time",
  504: "engine too slow",
};
const REASONS = {
  refused: "engine refused the connection",
  connect: "no connection to an engine",
  broken: "connection to an engine broke",
  timeout: "engine did not answer in time",
  status: "engine answered 5xx",
  answer: "engine gave no usable answer",
  full: "engine was full",
};

export class Models {
  constructor() {
    this.kept = new Keyed(byId("model-rows"), () => this.row());
  }

  show({ models }) {
    this.kept.show(models, ({ name }) => name);
    byId("models-empty").hidden = models.length > 0;
  }

  row() {
    const name = el("th", { scope: "row", class: "clip" });
    const heads = ["Engines", "Under way", "Waiting"];
    const cells = heads.map((head) => el("td", { class: "n num", "data-name": head }));
    return {
      node: el("tr", {}, name, ...cells),
      update: (model) => {
        say(name, model.name);
        attr(name, "title", model.name);
        [model.engines, model.running, model.waiting].forEach((value, i) => say(cells[i], count(value)));
      },
    };
  }
}

/** The queue, and what failed by its kind. */
export class Trouble {
  constructor() {
    this.keptFacts = new Keyed(byId("queue-facts"), fact);
    this.kept = new Keyed(byId("error-rows"), () => this.row());
  }

  show({ load, minute, requests }) {
    const facts = [
      ["waiting for a turn", `${count(load.waiting)} of ${count(load.queue_size)}`],
      ["waiting for an engine", count(load.waiting_for_engine)],
      ["longest wait now", time(requests.waiting_s)],
    ];
    this.keptFacts.show(facts, ([name]) => name);
    const kinds = [
      ...Object.entries(minute.errors).map(([code, n]) => ({ what: code, words: STATUSES[code] ?? "failed", n })),
      ...Object.entries(minute.upstream_errors).map(([reason, n]) => ({ what: "leg", words: REASONS[reason] ?? reason, n })),
    ];
    this.kept.show(kinds.sort((a, b) => b.n - a.n), ({ what, words }) => what + words);
    byId("errors-empty").hidden = kinds.length > 0;
    say(byId("errors-empty"), `No request and no leg failed in the ${lately(minute.span_s)}.`);
    say(byId("trouble-hint"), lately(minute.span_s));
  }

  row() {
    const what = el("span", { class: "chip num" });
    const words = el("td", {});
    const n = el("td", { class: "n num" });
    return {
      node: el("tr", {}, el("th", { scope: "row" }, what), words, n),
      update: (kind) => {
        say(what, kind.what);
        attr(what, "class", `chip num ${kind.what === "leg" ? "leg" : "status"}`);
        say(words, kind.words);
        say(n, count(kind.n));
      },
    };
  }
}
