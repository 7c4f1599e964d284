// Elements, made without HTML text: what comes from outside is only ever text or a number.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);

export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);

const fill = (node, props, children) => {
  for (const [name, value] of Object.entries(props)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
};

/** Sets text where it differs, so that nothing is laid out anew for nothing. */
export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const attr = (node, name, value) => {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
};

/**
 * Keeps one child of `parent` per key, in the order given: nodes stay the same while their key does.
 * `make(item)` makes {node, update(item)}.
 */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.kept = new Map();
  }

  show(items, keyOf) {
    const before = this.kept;
    this.kept = new Map();
    let place = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      if (this.kept.has(key)) continue;
      const part = before.get(key) ?? this.make(item);
      before.delete(key);
      this.kept.set(key, part);
      if (part.node === place) place = place.nextSibling;
      else this.parent.insertBefore(part.node, place);
      part.update(item);
    }
    for (const part of before.values()) part.node.remove();
  }
}

/** For `Keyed`, from [name, text]: a pair of a description list. */
export const fact = () => {
  const [name, value] = [el("dt"), el("dd", { class: "num" })];
  return {
    node: el("div", {}, name, value),
    update: ([key, text]) => {
      say(name, key);
      say(value, text);
    },
  };
};
