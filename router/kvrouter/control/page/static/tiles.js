// The figures at the top: each with a word on what goes with it, and a small line.
import { count, countParts, joined, lately, NONE, percentParts, time, timeParts } from "./format.js";
import { attr, byId, el, say } from "./dom.js";
import { tally } from "./engines.js";
import { shownSeconds, Spark } from "./chart.js";

const per = (value, seconds) => (seconds > 0 ? value / seconds : null);

const shown = (ratio, what) => (what > 0 ? ratio / what : null);

const whole = (share) => (share === null ? NONE : joined([(share * 100).toFixed(0), "%"]));

const FIGURES = [
  {
    name: "Requests under way",
    tone: "tone-decode",
    read: ({ load }) => {
      const waiting = load.waiting + load.waiting_for_engine;
      return { parts: countParts(load.running), sub: waiting ? `${count(waiting)} waiting` : "none waiting" };
    },
    line: (series) => [series.running, { least: 4 }],
  },
  {
    name: "Answered per second",
    tone: "tone-good",
    read: ({ minute }) => ({
      parts: countParts(per(minute.ok, minute.span_s)),
      sub: minute.failed ? `${count(minute.failed)} failed` : "none failed",
      bad: minute.failed > 0,
    }),
    line: (series) => [series.ok, { least: 1 }],
  },
  {
    name: "Tokens out per second",
    tone: "tone-decode",
    read: ({ minute }) => ({
      parts: countParts(per(minute.output_tokens, minute.span_s)),
      sub: `${count(per(minute.prompt_tokens, minute.span_s))}/s of prompts in`,
    }),
    line: (series) => [series.output_tokens, { least: 1 }],
  },
  {
    name: "Time to first token",
    tone: "tone-prefill",
    read: ({ minute }) => ({ parts: timeParts(minute.ttft_p50_s), sub: `median, p95 ${time(minute.ttft_p95_s)}` }),
    line: (series) => [series.ttft_mean_s, { least: 0.01 }],
  },
  {
    name: "Prompt tokens reused",
    tone: "tone-cache",
    read: ({ minute }) => ({
      parts: percentParts(shown(minute.engine_tokens + minute.store_tokens, minute.prompt_tokens)),
      sub: `cache ${whole(shown(minute.engine_tokens, minute.prompt_tokens))}, store ${whole(shown(minute.store_tokens, minute.prompt_tokens))}`,
    }),
    line: (series) => [series.reused, { most: 1 }],
  },
  {
    name: "Engines up",
    tone: "tone-idle",
    read: ({ engines }) => {
      const { up, down, others } = tally(engines);
      return { parts: [String(up), `of ${engines.length}`], sub: others || "all of them", bad: down > 0 };
    },
    line: (series) => [series.engines_up, { least: 1 }],
  },
];

export class Tiles {
  constructor() {
    this.tiles = FIGURES.map((figure) => {
      const value = el("span", {});
      const unit = el("span", { class: "unit" });
      const sub = el("p", { class: "sub num" });
      const spark = new Spark();
      const title = el("h2", {}, figure.name);
      byId("tiles").append(el("article", { class: `tile ${figure.tone}` }, title, el("p", { class: "value num" }, value, unit), sub, spark.node));
      return { figure, value, unit, sub, spark };
    });
  }

  show(snapshot) {
    const { series } = snapshot.history;
    say(byId("tiles-hint"), `Rates: ${lately(snapshot.minute.span_s)}. Lines: ${lately(shownSeconds(snapshot.history))}.`);
    const held = series.prompt_tokens.map((all, i) => (all ? (series.engine_tokens[i] + series.store_tokens[i]) / all : null));
    const given = { ...series, reused: held };
    for (const { figure, value, unit, sub, spark } of this.tiles) {
      const { parts, sub: words, bad } = figure.read(snapshot);
      say(value, parts[0]);
      say(unit, parts[1]);
      say(sub, words);
      attr(sub, "class", bad ? "sub num problem" : "sub num");
      spark.show(...figure.line(given));
    }
  }
}
