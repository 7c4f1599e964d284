// Engines, the store's tiers, requests under way.
import { bytes, count, NONE, percent, plural, span } from "./format.js";
import { attr, byId, el, Keyed, say } from "./dom.js";

const SLOTS = 10;

const engineState = (engine) => {
  if (engine.state === "up" && engine.breaker === "open") return ["tripped", "breaker open"];
  if (engine.state === "up" && engine.breaker === "half_open") return ["tripped", "breaker half open"];
  return [engine.state, engine.state];
};

class Engines {
  constructor() {
    this.kept = new Keyed(byId("engine-rows"), () => this.row());
  }

  show(engines) {
    const most = Math.max(1, ...engines.map((engine) => engine.tokens));
    this.kept.show(engines.map((engine) => ({ engine, most })), ({ engine }) => engine.id);
    const up = engines.filter((engine) => engine.state === "up").length;
    say(byId("engines-hint"), engines.length ? `${up} of ${engines.length} up` : "");
    byId("engines-empty").hidden = engines.length > 0;
  }

  row() {
    const id = el("span", { class: "mono id" });
    const more = el("span", { class: "more" });
    const role = el("span", { class: "chip" });
    const state = el("span", { class: "state" });
    const load = el("span", { class: "num load-words" });
    const fill = el("span", { class: "fill" });
    const ranks = el("span", { class: "ranks" });
    const index = el("span", { class: "muted" });
    const node = el(
      "tr",
      {},
      el("th", { scope: "row" }, id, more),
      el("td", {}, role),
      el("td", {}, state),
      el("td", { class: "load" }, load, el("span", { class: "track", "aria-hidden": "true" }, fill), ranks),
      el("td", { "data-name": "KV index" }, index),
    );
    const keptRanks = new Keyed(ranks, () => this.rank());
    return {
      node,
      update: ({ engine, most }) => {
        const [kind, words] = engineState(engine);
        attr(node, "class", kind);
        say(id, engine.id);
        const block = engine.block_tokens ? `blocks of ${engine.block_tokens}` : null;
        const said = [engine.family && `family ${engine.family}`, engine.version && `version ${engine.version}`];
        const facts = [...said, block, engine.models.join(", ")].filter(Boolean).join(" · ");
        say(more, engine.problem ?? (facts || "has not said yet who it is"));
        attr(more, "title", engine.problem ?? facts);
        attr(more, "class", engine.problem ? "more problem" : "more");
        say(role, engine.role);
        attr(role, "class", `chip ${engine.role}`);
        say(state, words);
        attr(state, "class", `state ${kind}`);
        say(load, `${plural(engine.requests, "leg")} · ${count(engine.tokens)} tokens`);
        fill.style.width = `${((engine.tokens / most) * 100).toFixed(1)}%`;
        attr(fill, "class", `fill ${engine.role}`);
        say(index, engine.index ?? NONE);
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
        attr(node, "class", rank.breaker && rank.breaker !== "closed" ? "rank tripped" : "rank");
        const words = `${rank.id}: ${plural(rank.requests, "leg")}, ${count(rank.tokens)} tokens${rank.breaker === "closed" ? "" : `, breaker ${rank.breaker ?? "unknown"}`}`;
        attr(node, "title", words);
        attr(node, "role", "img");
        attr(node, "aria-label", words);
      },
    };
  }
}

class Store {
  constructor() {
    this.kept = new Keyed(byId("store"), () => this.tier());
    this.facts = el("dl", { class: "facts" });
    byId("store").after(this.facts);
    this.keptFacts = new Keyed(this.facts, () => this.fact());
  }

  show(store, minute) {
    if (!store) {
      say(byId("store-hint"), "none: engines hand KV over by themselves");
      this.kept.show([], (tier) => tier.name);
      this.keptFacts.show([], ([name]) => name);
      return;
    }
    const state = store.connected ? store.url : `${store.url} is not connected`;
    say(byId("store-hint"), store.problem ?? state);
    attr(byId("store-hint"), "class", store.connected && !store.problem ? "hint" : "hint problem");
    this.kept.show(store.tiers, (tier) => tier.name);
    const clients = Object.entries(store.connections).filter(([, n]) => n > 0).map(([name, n]) => `${n} ${name}`);
    const rate = (value) => `${bytes(value / Math.max(minute.span_s, 1))}/s`;
    const facts = [
      ["put", rate(store.in_bytes)],
      ["given", rate(store.out_bytes)],
      ["leases", count(store.leases)],
      ["clients", clients.join(", ") || "none"],
    ];
    this.keptFacts.show(store.age_s === null ? [] : facts, ([name]) => name);
  }

  fact() {
    const [name, value] = [el("dt"), el("dd", { class: "num" })];
    return {
      node: el("div", {}, name, value),
      update: ([key, text]) => {
        say(name, key);
        say(value, text);
      },
    };
  }

  tier() {
    const name = el("strong");
    const used = el("span", { class: "num" });
    const fill = el("span", { class: "fill" });
    const words = el("p", { class: "muted num" });
    const node = el("div", { class: "tier" }, el("p", { class: "tier-head" }, name, used), el("span", { class: "track tall", "aria-hidden": "true" }, fill), words);
    return {
      node,
      update: (tier) => {
        const share = tier.size_bytes ? tier.used_bytes / tier.size_bytes : 0;
        say(name, tier.name === "disk" ? "Disk" : "Memory");
        say(used, `${bytes(tier.used_bytes)} of ${bytes(tier.size_bytes)} · ${percent(share)}`);
        fill.style.width = `${Math.min(100, share * 100).toFixed(1)}%`;
        attr(fill, "class", tier.note ? "fill tripped" : "fill store");
        const asked = tier.hits + tier.misses;
        const hits = asked ? `${percent(tier.hits / asked)} of ${count(asked)} blocks found` : "not asked in the last minute";
        say(words, tier.note ?? `${count(tier.blocks)} blocks · ${hits} · ${count(tier.evictions)} evicted`);
      },
    };
  }
}

/** Each request keeps its row while it lives, so that nothing moves under the eye. */
class Requests {
  constructor() {
    this.body = byId("request-rows");
    this.slots = [];
    for (let i = 0; i < SLOTS; i += 1) this.slots.push(this.slot());
  }

  show({ total, shown }) {
    const here = new Map(shown.map((request) => [request.key, request]));
    for (const slot of this.slots) {
      if (slot.key !== null && !here.has(slot.key)) slot.show(null);
      else if (slot.key !== null) {
        slot.show(here.get(slot.key));
        here.delete(slot.key);
      }
    }
    for (const request of here.values()) {
      let free = this.slots.find((slot) => slot.key === null);
      if (!free) this.slots.push((free = this.slot()));
      free.show(request);
    }
    while (this.slots.length > SLOTS && this.slots.at(-1).key === null) this.slots.pop().node.remove();
    const words = total > shown.length ? `the ${shown.length} oldest of ${total.toLocaleString("en")}` : total ? plural(total, "request") : "none";
    say(byId("requests-hint"), words);
  }

  slot() {
    const [id, model, phase, path, age, tokens] = ["mono clip", "clip", "", "mono clip", "n num", "n num"].map((kind) => el("td", { class: kind }));
    const chip = el("span", { class: "phase" });
    phase.append(chip);
    const node = el("tr", { class: "free" }, id, model, phase, path, age, tokens);
    this.body.append(node);
    const slot = { key: null, node };
    slot.show = (request) => {
      slot.key = request?.key ?? null;
      attr(node, "class", request ? null : "free");
      attr(node, "aria-hidden", request ? null : "true");
      say(id, request?.id ?? "\u00a0");
      attr(id, "title", request?.id ?? null);
      say(model, request?.model ?? "");
      attr(model, "title", request?.model || null);
      say(chip, request?.phase ?? "");
      attr(chip, "class", request ? `phase ${request.phase}` : "phase");
      const where = request && (request.prefill || request.decode) ? `${request.prefill ?? "·"} → ${request.decode ?? "·"}` : "";
      say(path, where);
      attr(path, "title", where || null);
      say(age, request ? span(request.age_s) : "");
      say(tokens, request ? count(request.tokens) : "");
    };
    return slot;
  }
}

export { Engines, Requests, Store };
