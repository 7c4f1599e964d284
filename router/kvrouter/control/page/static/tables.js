// The store's tiers, requests under way.
import { bytes, count, NONE, percent, plural, span } from "./format.js";
import { attr, byId, el, fact, Keyed, say } from "./dom.js";

const SLOTS = 10;

class Store {
  constructor() {
    this.kept = new Keyed(byId("store"), () => this.tier());
    this.facts = el("dl", { class: "facts" });
    byId("store").after(this.facts);
    this.keptFacts = new Keyed(this.facts, fact);
  }

  show({ stores, store_sizes: sizes }) {
    if (!stores.length) {
      say(byId("store-hint"), "none: engines hand KV over by themselves");
      this.kept.show([], () => null);
      this.keptFacts.show([], () => null);
      return;
    }
    const several = stores.length > 1;
    const ill = stores.find(({ connected, problem }) => !connected || problem);
    const well = several ? `${stores.length} nodes` : stores[0].url;
    const sick = ill && `${ill.url} is not connected`;
    say(byId("store-hint"), ill ? (several ? sick : ill.problem ?? sick) : well);
    attr(byId("store-hint"), "class", ill ? "hint problem" : "hint");
    const tiers = stores.flatMap(({ url, tiers: held }) => held.map((tier) => ({ tier, place: several ? ` · ${url}` : "" })));
    this.kept.show(tiers, ({ tier, place }) => tier.name + place);
    const sum = (of) => stores.reduce((all, store) => all + of(store), 0);
    const kinds = [...new Set(stores.flatMap(({ connections }) => Object.keys(connections)))];
    const clients = kinds.map((name) => [name, sum(({ connections }) => connections[name] ?? 0)]).filter(([, n]) => n > 0).map(([name, n]) => `${n} ${name}`);
    const facts = [
      ["leases", count(sum(({ leases }) => leases))],
      ["clients", clients.join(", ") || "none"],
      ["prompt tokens found, by size", Object.entries(sizes).map(([size, found]) => `${bytes(Number(size))}: ${percent(found)}`).join(", ") || NONE],
    ];
    this.keptFacts.show(stores.every(({ age_s }) => age_s === null) ? [] : facts, ([name]) => name);
  }

  tier() {
    const name = el("strong");
    const used = el("span", { class: "num" });
    const fill = el("span", { class: "fill" });
    const words = el("p", { class: "muted num" });
    const node = el("div", { class: "tier" }, el("p", { class: "tier-head" }, name, used), el("span", { class: "track tall", "aria-hidden": "true" }, fill), words);
    return {
      node,
      update: ({ tier, place }) => {
        const share = tier.size_bytes ? tier.used_bytes / tier.size_bytes : 0;
        const sized = tier.size_bytes > 0;
        say(name, ({ disk: "Disk", remote: "Tiers below" }[tier.name] ?? "Memory") + place);
        say(used, sized ? `${bytes(tier.used_bytes)} of ${bytes(tier.size_bytes)} · ${percent(share)}` : "");
        fill.style.width = `${Math.min(100, share * 100).toFixed(1)}%`;
        attr(fill, "class", tier.note ? "fill tripped" : "fill store");
        say(words, tier.note ?? (sized ? `${count(tier.blocks)} blocks` : "all answer"));
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

  show({ total, shown }, names) {
    const here = new Map(shown.map((request) => [request.key, request]));
    for (const slot of this.slots) {
      if (slot.key !== null && !here.has(slot.key)) slot.show(null);
      else if (slot.key !== null) {
        slot.show(here.get(slot.key), names);
        here.delete(slot.key);
      }
    }
    for (const request of here.values()) {
      let free = this.slots.find((slot) => slot.key === null);
      if (!free) this.slots.push((free = this.slot()));
      free.show(request, names);
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
    slot.show = (request, names) => {
      slot.key = request?.key ?? null;
      attr(node, "class", request ? null : "free");
      attr(node, "aria-hidden", request ? null : "true");
      say(id, request?.id ?? "\u00a0");
      attr(id, "title", request?.id ?? null);
      say(model, request?.model ?? "");
      attr(model, "title", request?.model || null);
      say(chip, request?.phase ?? "");
      attr(chip, "class", request ? `phase ${request.phase}` : "phase");
      const where = request && (request.prefill || request.decode) ? [request.prefill, request.decode].map((id) => (id ? names.of(id) : "·")).join(" → ") : "";
      say(path, where);
      attr(path, "title", where || null);
      say(age, request ? span(request.age_s) : "");
      say(tokens, request ? count(request.tokens) : "");
    };
    return slot;
  }
}

export { Requests, Store };
