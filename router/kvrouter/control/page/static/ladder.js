// What became of the prompt tokens of the last minute: a bar for each fate, which add up to all.
import { count, percent } from "./format.js";
import { attr, byId, el, Keyed, say, svg } from "./dom.js";

export class Ladder {
  constructor() {
    this.kept = new Keyed(byId("ladder-rows"), () => this.row());
  }

  show(fates) {
    const all = fates.reduce((sum, { tokens }) => sum + tokens, 0);
    this.kept.show(fates.map((one) => ({ ...one, share: one.tokens / all })), ({ fate }) => fate);
    byId("ladder-empty").hidden = fates.length > 0;
  }

  row() {
    const words = el("span", { class: "words" });
    const tokens = el("span", { class: "num muted" });
    const share = el("span", { class: "num share" });
    const fill = svg("rect", { height: "100%" });
    const bar = svg("svg", { class: "rung", "aria-hidden": "true" }, fill);
    return {
      node: el("li", {}, words, bar, tokens, share),
      update: (one) => {
        say(words, one.words);
        say(tokens, count(one.tokens));
        say(share, percent(one.share));
        attr(fill, "width", `${(one.share * 100).toFixed(2)}%`);
        attr(fill, "class", one.kind);
      },
    };
  }
}
