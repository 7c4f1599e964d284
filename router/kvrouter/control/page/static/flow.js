// The flow between the pools: prefill engines on the left, decode engines on the right.
import { count, lately, plural } from "./format.js";
import { attr, byId, el, Keyed, say, svg } from "./dom.js";
import { ALONE, picture } from "./pools.js";

const NODE_H = 48;
const NARROW_W = 170; // below that, a box has its words under its name
const NARROW_H = 62;
const GAP = 14;
const TOP = 26;
const WIDEST = 34;
const CHAR_W = 7.23;

/** As much of a name as there is room for; addresses differ at their ends, names in both. */
const fitted = (name, room) => {
  if (name.length <= room) return name;
  const most = Math.max(room, 6) - 1;
  return /:\d+$/.test(name) ? `…${name.slice(-most)}` : `${name.slice(0, most)}…`;
};

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

  show(snapshot, names) {
    this.stored = snapshot.stores.length > 0;
    this.shown = picture(snapshot, names);
    this.names = new Map([...this.shown.left, ...this.shown.right].map((box) => [box.id, box.name]));
    this.draw();
    this.keptRows.show([...this.shown.flows].sort((a, b) => b.tokens - a.tokens), (flow) => flow.key);
    say(byId("flow-hint"), `answers ended in the ${lately(snapshot.minute.span_s)}, by prompt tokens; bars: busy time`);
  }

  draw() {
    const { left, right, flows } = this.shown;
    if (!this.stored) this.through.remove();
    else if (!this.through.isConnected) this.colours.lastChild.before(this.through);
    const width = Math.max(280, this.box.clientWidth);
    const node = Math.min(230, Math.max(122, width * 0.3));
    const rows = Math.max(left.length, right.length, 1);
    this.nodeH = node < NARROW_W ? NARROW_H : NODE_H;
    const height = TOP + rows * (this.nodeH + GAP);
    attr(this.picture, "viewBox", `0 0 ${width} ${height}`);
    attr(this.picture, "height", height);
    attr(this.picture, "width", width);
    attr(this.right, "x", width);
    attr(this.colours, "x1", node);
    attr(this.colours, "x2", width - node);
    const placed = new Map();
    const place = (column, side) => {
      const step = column.length ? (height - TOP) / column.length : 0;
      column.forEach((box, i) => {
        const y = TOP + step * (i + 0.5) - this.nodeH / 2;
        placed.set(side + box.id, { box, side, x: side === "l" ? 0 : width - node, y, width: node, used: 0 });
      });
    };
    place(left, "l");
    place(right, "r");
    this.keptNodes.show([...placed.values()], ({ side, box }) => side + box.id);
    this.keptRibbons.show(this.bands(flows, placed, width, node), (band) => band.key);
  }

  /** Where each flow leaves and arrives: side by side, in the order of the other end. */
  bands(flows, placed, width, node) {
    const ends = flows
      .map((flow) => ({ flow, from: placed.get(`l${flow.prefill}`), to: placed.get(`r${flow.decode}`) }))
      .filter((band) => band.from && band.to);
    const sums = new Map();
    for (const { flow, from, to } of ends) {
      for (const end of [from, to]) sums.set(end, (sums.get(end) ?? 0) + flow.tokens);
    }
    const scale = Math.min(WIDEST, NODE_H - 10) / Math.max(1, ...sums.values());
    const bands = ends.map((band) => ({ ...band, key: band.flow.key, size: Math.max(1.5, band.flow.tokens * scale) }));
    const heights = new Map();
    for (const band of bands) {
      for (const end of [band.from, band.to]) heights.set(end, (heights.get(end) ?? 0) + band.size);
    }
    const take = (end, size) => {
      const y = end.y + this.nodeH / 2 - heights.get(end) / 2 + end.used + size / 2;
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
        attr(path, "class", flow.prefill === ALONE ? "ribbon alone" : "ribbon");
        say(title, `${this.names.get(flow.prefill)} → ${this.names.get(flow.decode)}: ${plural(flow.requests, "request")}, ${count(flow.tokens)} prompt tokens`);
      },
    };
  }

  engine() {
    const title = svg("title");
    const box = svg("rect", { class: "node-box", rx: 8 });
    const track = svg("rect", { class: "node-track", height: 4, rx: 2, x: 10 });
    const fill = svg("rect", { class: "node-fill", height: 4, rx: 2, x: 10 });
    const name = svg("text", { class: "node-name", x: 10, y: 20 });
    const load = svg("text", { class: "node-load num" });
    const node = svg("g", {}, title, box, name, load, track, fill);
    return {
      node,
      update: ({ box: { name: full, state, words, busy, title: text }, side, x, y, width }) => {
        attr(node, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
        attr(node, "class", `node ${side === "l" ? "prefill" : "decode"} ${state}`);
        for (const part of [box, track]) attr(part, "width", (width - (part === track ? 20 : 0)).toFixed(1));
        attr(fill, "width", ((width - 20) * busy).toFixed(1));
        const narrow = this.nodeH === NARROW_H;
        attr(box, "height", this.nodeH);
        for (const part of [track, fill]) attr(part, "y", this.nodeH - 12);
        attr(load, "x", narrow ? 10 : (width - 10).toFixed(1));
        attr(load, "y", narrow ? 38 : 20);
        attr(load, "text-anchor", narrow ? "start" : "end");
        const room = Math.floor((width - 20) / CHAR_W) - (narrow ? 0 : words.length + 1);
        say(name, fitted(full, room));
        say(load, words);
        say(title, text);
      },
    };
  }

  row() {
    const cells = [el("td", { class: "mono" }), el("td", { class: "mono" }), el("td", { class: "n num" }), el("td", { class: "n num" })];
    return {
      node: el("tr", {}, ...cells),
      update: (flow) => {
        const texts = [this.names.get(flow.prefill), this.names.get(flow.decode), count(flow.requests), count(flow.tokens)];
        cells.forEach((cell, i) => say(cell, texts[i]));
      },
    };
  }
}
