// Engines: what they are called, how they are, and their table.
import { count, lately, NONE, percent, plural } from "./format.js";
import { attr, byId, el, Keyed, say } from "./dom.js";

const MANY = 12;
const WORST_FIRST = ["away", "tripped", "draining", "up"];

/** What people call engines: their labels, or else their addresses. */
export class Names {
  constructor(engines) {
    this.labels = new Map(engines.filter((engine) => engine.label).map((engine) => [engine.id, engine.label]));
  }

  /** Of an engine or of one of its ranks. */
  of(id) {
    const [server, rank] = id.split("@");
    const label = this.labels.get(server);
    if (!label) return id;
    return rank === undefined ? label : `${label}@${rank}`;
  }
}

/** The state of its breaker: of several ranks the worst. */
const circuitOf = ({ circuit, ranks }) => ["open", "half_open"].find((state) => ranks.some((rank) => rank.circuit === state)) ?? circuit ?? "closed";

/** [kind, words] of its state: the kind is one of WORST_FIRST. */
export const stateOf = (engine) => {
  const circuit = circuitOf(engine);
  if (engine.status === "away") return ["away", "down"];
  if (engine.status !== "up" || circuit === "closed") return [engine.status, engine.status];
  const breaker = `breaker ${circuit.replace("_", " ")}`;
  return ["tripped", engine.down ? `down, ${breaker}` : breaker];
};

export const worst = (engines) => WORST_FIRST.find((kind) => engines.some((engine) => stateOf(engine)[0] === kind)) ?? "up";

/** How many engines are up and down, and words on those that are not up. */
export const tally = (engines) => {
  const down = engines.filter((engine) => engine.down).length;
  const draining = engines.filter((engine) => engine.status === "draining").length;
  const others = [down && `${down} down`, draining && `${draining} draining`].filter(Boolean).join(", ");
  return { up: engines.length - down - draining, down, others };
};

const order = (engine) => WORST_FIRST.indexOf(stateOf(engine)[0]);

export class Engines {
  constructor() {
    this.kept = new Keyed(byId("engine-rows"), () => this.row());
  }

  show({ engines, minute }, names) {
    const many = engines.length > MANY;
    const rows = many ? [...engines].sort((a, b) => order(a) - order(b)) : engines;
    this.kept.show(rows.map((engine) => ({ engine, name: names.of(engine.id) })), ({ engine }) => engine.id);
    say(byId("busy-head"), `Busy, ${lately(minute.span_s)}`);
    const { up, down, others } = tally(engines);
    say(byId("engines-hint"), engines.length ? [`${up} of ${engines.length} up`, others].filter(Boolean).join(", ") : "");
    attr(byId("engines-hint"), "class", down ? "hint problem" : "hint");
    attr(byId("engines-box"), "class", many ? "scroll long" : "");
    attr(byId("engines-box"), "tabindex", many ? 0 : null);
    attr(byId("engines-box"), "role", many ? "region" : null);
    attr(byId("engines-box"), "aria-labelledby", many ? "engines-title" : null);
    byId("engines-empty").hidden = engines.length > 0;
  }

  row() {
    const id = el("span", { class: "id" });
    const more = el("span", { class: "more" });
    const role = el("span", { class: "chip" });
    const state = el("span", { class: "state" });
    const load = el("span", { class: "num load-words" });
    const ranks = el("span", { class: "ranks" });
    const busy = el("span", { class: "num busy-words" });
    const fill = el("span", { class: "fill" });
    const index = el("span", { class: "muted" });
    const node = el(
      "tr",
      {},
      el("th", { scope: "row" }, id, more),
      el("td", {}, role),
      el("td", {}, state),
      el("td", { class: "load" }, load, ranks),
      el("td", { class: "busy" }, busy, el("span", { class: "track", "aria-hidden": "true" }, fill)),
      el("td", { "data-name": "KV index" }, index),
    );
    const keptRanks = new Keyed(ranks, () => this.rank());
    return {
      node,
      update: ({ engine, name }) => {
        const [kind, words] = stateOf(engine);
        attr(node, "class", kind);
        say(id, name);
        const block = engine.block_tokens ? `blocks of ${engine.block_tokens}` : null;
        const address = name === engine.id ? null : engine.id;
        const server = [engine.family, engine.version].filter(Boolean).join(" ");
        const facts = [address, server, block, engine.models.join(", ")].filter(Boolean).join(" · ");
        const told = engine.problem ? [address, engine.problem].filter(Boolean).join(": ") : facts || "has not said yet who it is";
        say(more, told);
        attr(more, "title", told);
        attr(more, "class", engine.problem ? "more problem" : "more");
        say(role, engine.worker_type);
        attr(role, "class", `chip ${engine.worker_type}`);
        say(state, words);
        attr(state, "class", `state ${kind}`);
        say(load, `${plural(engine.load, "leg")} · ${count(engine.tokens)} tokens`);
        say(busy, engine.busy === null ? NONE : percent(engine.busy));
        fill.style.width = `${((engine.busy ?? 0) * 100).toFixed(1)}%`;
        attr(fill, "class", `fill ${engine.worker_type}`);
        say(index, engine.index ?? engine.ranks[0]?.index ?? NONE);
        const top = Math.max(1, ...engine.ranks.map((rank) => rank.tokens));
        keptRanks.show(engine.ranks.map((rank) => ({ rank, top })), ({ rank }) => rank.id);
      },
    };
  }

  rank() {
    const bar = el("i");
    const node = el("span", { class: "rank" }, bar);
    return {
      node,
      update: ({ rank, top }) => {
        bar.style.height = `${Math.max(8, (rank.tokens / top) * 100).toFixed(0)}%`;
        attr(node, "class", rank.circuit && rank.circuit !== "closed" ? "rank tripped" : "rank");
        const words = `${rank.id}: ${plural(rank.load, "leg")}, ${count(rank.tokens)} tokens${rank.circuit === "closed" ? "" : `, breaker ${rank.circuit ?? "unknown"}`}`;
        attr(node, "title", words);
        attr(node, "role", "img");
        attr(node, "aria-label", words);
      },
    };
  }
}
