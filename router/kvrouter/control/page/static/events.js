// What happened to engines and settings, the newest first.
import { clock } from "./format.js";
import { attr, byId, el, Keyed, say } from "./dom.js";

const KINDS = {
  joined: "up",
  "breaker closed": "up",
  left: "away",
  removed: "gone",
  "breaker open": "tripped",
  "reload refused": "tripped",
  draining: "draining",
  reload: "gone",
};

export class Events {
  constructor() {
    this.kept = new Keyed(byId("event-rows"), () => this.row());
  }

  show(events, names) {
    this.kept.show(events.map((event) => ({ event, name: event.label ?? (event.engine && names.of(event.engine)) })), ({ event }) => event.key);
    byId("events-empty").hidden = events.length > 0;
  }

  row() {
    const at = el("time", { class: "num muted" });
    const kind = el("span", { class: "state" });
    const name = el("span", { class: "id" });
    const text = el("span", { class: "more" });
    return {
      node: el("li", {}, at, kind, name, text),
      update: ({ event, name: words }) => {
        say(at, clock(event.at_s));
        attr(at, "datetime", new Date(event.at_s * 1000).toISOString());
        say(kind, event.kind);
        attr(kind, "class", `state ${KINDS[event.kind] ?? "gone"}`);
        say(name, words ?? "");
        attr(name, "title", event.engine);
        say(text, event.text ?? "");
        attr(text, "title", event.text);
      },
    };
  }
}
