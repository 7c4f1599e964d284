// The figures at the top, each with a word on what goes with it.
import { count, countParts, joined, lately, NONE, percentParts, timeParts } from "./format.js";
import { attr, byId, el, say } from "./dom.js";
import { tally } from "./engines.js";

const per = (value, seconds) => (seconds > 0 ? value / seconds : null);

const shown = (ratio, what) => (what > 0 ? ratio / what : null);

const whole = (share) => (share === null ? NONE : joined([(share * 100).toFixed(0), "%"]));

const FIGURES = [
  {
    name: "Requests under way",
    read: ({ load }) => {
      const waiting = load.waiting + load.waiting_for_engine;
      return { parts: countParts(load.running), sub: waiting ? `${count(waiting)} waiting` : "none waiting" };
    },
  },
  {
    name: "Answered per second",
    read: ({ minute }) => ({
      parts: countParts(per(minute.ok, minute.span_s)),
      sub: minute.failed ? `${count(minute.failed)} failed` : "none failed",
      bad: minute.failed > 0,
    }),
  },
  {
    name: "Tokens out per second",
    read: ({ minute }) => ({
      parts: countParts(per(minute.output_tokens, minute.span_s)),
      sub: `${count(per(minute.prompt_tokens, minute.span_s))}/s of prompts in`,
    }),
  },
  {
    name: "Time to first token",
    read: ({ minute }) => ({ parts: timeParts(minute.ttft_mean_s), sub: "mean" }),
  },
  {
    name: "Prompt tokens reused",
    read: ({ minute }) => ({
      parts: percentParts(shown(minute.engine_tokens + minute.store_tokens, minute.prompt_tokens)),
      sub: `cache ${whole(shown(minute.engine_tokens, minute.prompt_tokens))}, store ${whole(shown(minute.store_tokens, minute.prompt_tokens))}`,
    }),
  },
  {
    name: "Engines up",
    read: ({ engines }) => {
      const { up, down, others } = tally(engines);
      return { parts: [String(up), `of ${engines.length}`], sub: others || "all of them", bad: down > 0 };
    },
  },
];

export class Tiles {
  constructor() {
    this.tiles = FIGURES.map((figure) => {
      const value = el("span", {});
      const unit = el("span", { class: "unit" });
      const sub = el("p", { class: "sub num" });
      const title = el("h2", {}, figure.name);
      byId("tiles").append(el("article", { class: "tile" }, title, el("p", { class: "value num" }, value, unit), sub));
      return { figure, value, unit, sub };
    });
  }

  show(snapshot) {
    say(byId("tiles-hint"), `Rates: ${lately(snapshot.minute.span_s)}.`);
    for (const { figure, value, unit, sub } of this.tiles) {
      const { parts, sub: words, bad } = figure.read(snapshot);
      say(value, parts[0]);
      say(unit, parts[1]);
      say(sub, words);
      attr(sub, "class", bad ? "sub num problem" : "sub num");
    }
  }
}
