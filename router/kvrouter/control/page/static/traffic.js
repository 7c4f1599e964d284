// Requests by model, the queue, and what failed by its kind.
import { count, lately, NONE, time } from "./format.js";
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

  show({ models, minute }) {
    const rate = (value) => (minute.span_s ? `${count(value / minute.span_s)}/s` : NONE);
    this.kept.show(models.map((model) => ({ model, rate })), ({ model }) => model.name);
    say(byId("models-hint"), lately(minute.span_s));
    byId("models-empty").hidden = models.length > 0;
  }

  row() {
    const name = el("th", { scope: "row", class: "clip" });
    const heads = ["Engines", "Under way", "Waiting", "Answered", "Failed", "Tokens out", "TTFT, mean"];
    const cells = heads.map((head) => el("td", { class: "n num", "data-name": head }));
    return {
      node: el("tr", {}, name, ...cells),
      update: ({ model, rate }) => {
        say(name, model.name);
        attr(name, "title", model.name);
        const texts = [String(model.engines), count(model.running), count(model.waiting), rate(model.ok), count(model.failed), rate(model.output_tokens), time(model.ttft_mean_s)];
        cells.forEach((cell, i) => say(cell, texts[i]));
        attr(cells[4], "class", model.failed ? "n num problem" : "n num");
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
      ["wait, median and p95", `${time(minute.queue_p50_s)}, ${time(minute.queue_p95_s)}`],
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
