// The flow between the pools: prefill engines on the left, decode engines on the right.
import { count, plural } from "./format.js";
import { attr, byId, el, Keyed, say, svg } from "./dom.js";

const NODE_H = 48;
const GAP = 14;
const TOP = 26;
const ALONE = "";
const WIDEST = 34;

const key = (flow) => `${flow.prefill ?? ALONE}>${flow.decode}`;

export class Flow {
  constructor(box) {
    this.box = box;
    this.ribbons = svg("g");
    this.nodes = svg("g");
    this.left = svg("text", { class: "column", x: 0, y: 14 }, "Prefill");
    this.right = svg("text", { class: "column", y: 14, "text-anchor": "end" }, "Decode");
    const colours = svg(
      "linearGradient",
      { id: "ribbon", gradientUnits: "userSpaceOnUse", x1: 0, x2: 1, y1: 0, y2: 0 },
      svg("stop", { offset: 0, class: "stop-prefill" }),
      svg("stop", { offset: 1, class: "stop-decode" }),
    );
    this.through = svg("stop", { offset: 0.5, class: "stop-store" });
    this.colours = colours;
    this.picture = svg("svg", { role: "img", "aria-labelledby": "flow-title flow-hint" });
    this.picture.append(svg("defs", {}, colours), this.left, this.right, this.ribbons, this.nodes);
    box.append(this.picture);
    this.keptRibbons = new Keyed(this.ribbons, () => this.ribbon());
    this.keptNodes = new Keyed(this.nodes, () => this.engine());
    this.keptRows = new Keyed(byId("flow-rows"), () => this.row());
    this.shown = null;
    new ResizeObserver(() => this.shown && this.draw()).observe(box);
  }

  show(snapshot) {
    this.shown = snapshot;
    this.draw();
    this.keptRows.show([...snapshot.flows].sort((a, b) => b.tokens - a.tokens), key);
  }

  draw() {
    const { engines, flows, store } = this.shown;
    if (store === null) this.through.remove();
    else if (!this.through.isConnected) this.colours.lastChild.before(this.through);
    const width = Math.max(280, this.box.clientWidth);
    const node = Math.min(230, Math.max(116, width * 0.3));
    const known = new Set(engines.map((engine) => engine.id));
    const gone = (id) => ({ id, role: "", state: "gone", requests: 0, tokens: 0, breaker: null });
    const lost = (end) => [...new Set(flows.map((flow) => flow[end]))].filter((id) => id && !known.has(id)).map(gone);
    const left = [...engines.filter((engine) => engine.role !== "decode"), ...lost("prefill")];
    const right = [...engines.filter((engine) => engine.role !== "prefill"), ...lost("decode")];
    if (flows.some((flow) => flow.prefill === null) || left.length === 0) left.push({ id: ALONE, state: "alone" });
    const rows = Math.max(left.length, right.length, 1);
    const height = TOP + rows * (NODE_H + GAP);
    attr(this.picture, "viewBox", `0 0 ${width} ${height}`);
    attr(this.picture, "height", height);
    attr(this.picture, "width", width);
    attr(this.right, "x", width);
    attr(this.colours, "x1", node);
    attr(this.colours, "x2", width - node);
    const most = Math.max(1, ...engines.map((engine) => engine.tokens));
    const placed = new Map();
    const place = (column, side) => {
      const step = column.length ? (height - TOP) / column.length : 0;
      column.forEach((engine, i) => {
        const y = TOP + step * (i + 0.5) - NODE_H / 2;
        placed.set(side + engine.id, { engine, side, x: side === "l" ? 0 : width - node, y, width: node, most, used: 0 });
      });
    };
    place(left, "l");
    place(right, "r");
    this.keptNodes.show([...placed.values()], (one) => one.side + one.engine.id);
    this.keptRibbons.show(this.bands(flows, placed, width, node), (band) => band.key);
  }

  /** Where each flow leaves and arrives: side by side, in the order of the other end. */
  bands(flows, placed, width, node) {
    const ends = flows
      .map((flow) => ({ flow, from: placed.get(`l${flow.prefill ?? ALONE}`), to: placed.get(`r${flow.decode}`) }))
      .filter((band) => band.from && band.to);
    const sums = new Map();
    for (const { flow, from, to } of ends) {
      for (const end of [from, to]) sums.set(end, (sums.get(end) ?? 0) + flow.tokens);
    }
    const scale = Math.min(WIDEST, NODE_H - 10) / Math.max(1, ...sums.values());
    const bands = ends.map((band) => ({ ...band, key: key(band.flow), size: Math.max(1.5, band.flow.tokens * scale) }));
    const heights = new Map();
    for (const band of bands) {
      for (const end of [band.from, band.to]) heights.set(end, (heights.get(end) ?? 0) + band.size);
    }
    const take = (end, size) => {
      const y = end.y + NODE_H / 2 - heights.get(end) / 2 + end.used + size / 2;
      end.used += size;
      return y;
    };
    for (const band of [...bands].sort((a, b) => a.to.y - b.to.y)) band.y1 = take(band.from, band.size);
    for (const band of [...bands].sort((a, b) => a.from.y - b.from.y)) band.y2 = take(band.to, band.size);
    for (const band of bands) {
      band.x1 = node;
      band.x2 = width - node;
    }
    return bands;
  }

  ribbon() {
    const title = svg("title");
    const path = svg("path", { class: "ribbon" }, title);
    return {
      node: path,
      update: ({ flow, x1, y1, x2, y2, size }) => {
        const middle = (x1 + x2) / 2;
        // a level gradient needs a path that is not exactly flat
        attr(path, "d", `M${x1} ${y1.toFixed(1)}C${middle} ${y1.toFixed(1)} ${middle} ${y2.toFixed(1)} ${x2} ${(y2 + 0.01).toFixed(2)}`);
        attr(path, "stroke-width", size.toFixed(1));
        attr(path, "class", flow.prefill === null ? "ribbon alone" : "ribbon");
        say(title, `${flow.prefill ?? "no prefill leg"} → ${flow.decode}: ${plural(flow.requests, "request")}, ${count(flow.tokens)} prompt tokens`);
      },
    };
  }

  engine() {
    const title = svg("title");
    const box = svg("rect", { class: "node-box", height: NODE_H, rx: 8 });
    const track = svg("rect", { class: "node-track", height: 4, rx: 2, y: NODE_H - 12, x: 10 });
    const fill = svg("rect", { class: "node-fill", height: 4, rx: 2, y: NODE_H - 12, x: 10 });
    const name = svg("text", { class: "node-name", x: 10, y: 20 });
    const load = svg("text", { class: "node-load num", y: 20, "text-anchor": "end" });
    const node = svg("g", {}, title, box, name, load, track, fill);
    return {
      node,
      update: ({ engine, side, x, y, width, most }) => {
        attr(node, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
        const state = engine.breaker && engine.breaker !== "closed" ? "tripped" : engine.state;
        attr(node, "class", `node ${side === "l" ? "prefill" : "decode"} ${state}`);
        for (const part of [box, track]) attr(part, "width", (width - (part === track ? 20 : 0)).toFixed(1));
        const alone = engine.state === "alone";
        attr(fill, "width", (alone ? 0 : (width - 20) * Math.min(1, engine.tokens / most)).toFixed(1));
        attr(load, "x", (width - 10).toFixed(1));
        const down = { away: "away", gone: "removed", draining: "draining", tripped: "breaker open" }[state];
        const words = alone ? "" : down ?? String(engine.requests);
        const room = Math.floor((width - 20) / 7.1) - words.length - 1;
        const full = alone ? (room < 14 ? "no prefill" : "no prefill leg") : engine.id;
        say(name, full.length <= room || alone ? full : `…${full.slice(-(Math.max(room, 6) - 1))}`);
        say(load, words);
        say(title, alone ? "Prompts that were held, loaded from the store, or computed where they are decoded" : `${engine.id}: ${plural(engine.requests, "request")} under way, ${count(engine.tokens)} tokens${down ? `; ${down}` : ""}`);
      },
    };
  }

  row() {
    const cells = [el("td", { class: "mono" }), el("td", { class: "mono" }), el("td", { class: "n num" }), el("td", { class: "n num" })];
    return {
      node: el("tr", {}, ...cells),
      update: (flow) => {
        const texts = [flow.prefill ?? "no prefill leg", flow.decode, count(flow.requests), count(flow.tokens)];
        cells.forEach((cell, i) => say(cell, texts[i]));
      },
    };
  }
}
