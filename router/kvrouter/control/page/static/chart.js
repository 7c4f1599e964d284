// Charts: stacked bars over time, with a cursor, and small lines. Sizes never depend on the data.
import { clock, lately, NONE, rough } from "./format.js";
import { attr, el, say, svg } from "./dom.js";

const HEIGHT = 120;
const WINDOWS = [24, 60, 180];

/** As many buckets as the smallest window has that shows all there is, right-aligned. */
export const windowed = (values) => {
  const size = WINDOWS.find((each) => each >= values.length) ?? values.length;
  return [...Array(size - values.length).fill(null), ...values];
};

/** The time that every chart of a history shows. */
export const shownSeconds = ({ series, bucket_s: bucketSeconds }) => windowed(series.ok).length * bucketSeconds;

/** The next round number. */
const ceiling = (value) => {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
};

/**
 * A stack of bars per bucket.
 *
 * parts: [{key, name, paint}], the lowest first; `scale`: what a bucket's values are multiplied by;
 * `write(value)`: a value as text; `at`: the element that says which time the figures are of.
 */
export class Stack {
  constructor(box, parts, { name, write, at }) {
    this.parts = parts;
    this.write = write;
    this.at = at;
    this.cursor = null;
    this.paths = parts.map((part) => svg("path", { class: `bar ${part.paint}` }));
    this.line = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.picture = svg("svg", { viewBox: `0 0 1 ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.picture.append(...this.paths, this.line);
    this.top = el("span", { class: "axis most num" });
    this.from = el("span", { class: "axis from num" });
    this.plot = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": name }, this.picture, this.top);
    this.name = name;
    this.figures = parts.map(() => el("dd", { class: "num" }, NONE));
    const legend = el("dl", { class: "legend" });
    parts.forEach((part, i) => {
      legend.append(el("div", {}, el("dt", {}, el("i", { class: `swatch ${part.paint}` }), part.name), this.figures[i]));
    });
    box.append(this.plot, el("div", { class: "axis-row" }, this.from, el("span", { class: "axis num" }, "now")), legend);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.plot.addEventListener("blur", () => this.move(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  /** buckets: {key: [value or null]}; `whole`: of all that is shown, beside the names when nothing is pointed at. */
  show(buckets, { bucketSeconds, endSeconds, whole }) {
    this.buckets = this.parts.map((part) => windowed(buckets[part.key] ?? []));
    this.bucketSeconds = bucketSeconds;
    this.endSeconds = endSeconds;
    this.whole = whole;
    const count = this.buckets[0].length;
    this.seconds = count * bucketSeconds;
    const sums = Array.from({ length: count }, (_, i) => this.buckets.reduce((sum, part) => sum + (part[i] ?? 0), 0));
    const most = ceiling(Math.max(...sums, 0));
    const gap = count > 100 ? 0.12 : 0.2;
    const floor = new Float64Array(count);
    this.buckets.forEach((part, which) => {
      let path = "";
      for (let i = 0; i < count; i += 1) {
        if (!part[i]) continue;
        const height = (part[i] / most) * HEIGHT;
        const y = HEIGHT - floor[i] - height;
        path += `M${(i + gap / 2).toFixed(2)} ${y.toFixed(2)}h${(1 - gap).toFixed(2)}v${height.toFixed(2)}h-${(1 - gap).toFixed(2)}z`;
        floor[i] += height;
      }
      attr(this.paths[which], "d", path);
    });
    attr(this.picture, "viewBox", `0 0 ${count} ${HEIGHT}`);
    say(this.top, this.write(most));
    say(this.from, `${rough(this.seconds)} ago`);
    this.tell();
  }

  point(event) {
    if (!this.buckets) return;
    const box = this.plot.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) / box.width) * this.buckets[0].length);
    this.move(Math.min(Math.max(place, 0), this.buckets[0].length - 1));
  }

  key(event) {
    if (!this.buckets) return;
    const last = this.buckets[0].length - 1;
    const from = this.cursor ?? last + 1;
    const to = { ArrowLeft: Math.max(from - 1, 0), ArrowRight: Math.min(from + 1, last), Home: 0, End: last }[event.key];
    if (event.key === "Escape") this.move(null);
    if (to === undefined) return;
    event.preventDefault();
    this.move(to);
  }

  move(cursor) {
    this.cursor = cursor;
    this.tell();
  }

  tell() {
    if (!this.buckets) return;
    const at = this.cursor;
    this.line.setAttribute("visibility", at === null ? "hidden" : "visible");
    let words = lately(this.seconds);
    let values = this.whole;
    if (at !== null) {
      attr(this.line, "x1", at + 0.5);
      attr(this.line, "x2", at + 0.5);
      const back = (this.buckets[0].length - 1 - at) * this.bucketSeconds;
      words = `${clock(this.endSeconds - back - this.bucketSeconds)} – ${clock(this.endSeconds - back)}`;
      values = this.buckets.map((part) => (part[at] === null ? NONE : this.write(part[at])));
    }
    say(this.at, words);
    values.forEach((value, i) => say(this.figures[i], value));
    attr(this.plot, "aria-label", `${this.name}, ${words}: ${this.parts.map((part, i) => `${part.name} ${values[i]}`).join(", ")}`);
  }
}

/** A small line without axes; `values` may have null. */
export class Spark {
  constructor() {
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line" });
    this.node = svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.node.append(this.area, this.line);
  }

  show(values, { least = 0, most = null } = {}) {
    const shown = windowed(values);
    const peak = most ?? Math.max(least, ...shown.filter((value) => value !== null));
    const step = 100 / (shown.length - 1);
    let line = "";
    let area = "";
    let start = null;
    const close = (end) => {
      if (start !== null) area += `L${(end * step).toFixed(2)} 30L${(start * step).toFixed(2)} 30Z`;
      start = null;
    };
    shown.forEach((value, i) => {
      if (value === null) {
        close(i - 1);
        return;
      }
      const point = `${(i * step).toFixed(2)} ${(28 - (peak > 0 ? value / peak : 0) * 26).toFixed(2)}`;
      line += `${start === null ? "M" : "L"}${point}`;
      area += `${start === null ? "M" : "L"}${point}`;
      start ??= i;
    });
    close(shown.length - 1);
    attr(this.line, "d", line);
    attr(this.area, "d", area);
  }
}
