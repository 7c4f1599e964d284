// What the picture of the flow shows: engines, or above a dozen of a pool groups of them by model.
import { stateOf, tally, worst } from "./engines.js";
import { count, percent, plural } from "./format.js";

export const MOST = 12;
export const ALONE = "";
const WORDS = { tripped: "on trial", draining: "draining" };

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length : 0);

const one = (engine, names) => {
  const [state, words] = stateOf(engine);
  const name = names.of(engine.id);
  const said = state === "up" ? "" : `; ${words}`;
  return {
    id: engine.id,
    name,
    state,
    words: state === "up" ? plural(engine.load, "leg") : words,
    busy: engine.busy ?? 0,
    title: `${name}: ${plural(engine.load, "leg")} under way, ${count(engine.tokens)} tokens, busy ${percent(engine.busy)}${said}`,
  };
};

const group = (name, engines) => {
  const state = worst(engines);
  const { down } = tally(engines);
  const same = engines.filter((engine) => stateOf(engine)[0] === state).length;
  const bad = down ? `${down} of ${engines.length} down` : `${same} of ${engines.length} ${WORDS[state]}`;
  const words = state === "up" ? plural(engines.length, "engine") : bad;
  const legs = engines.reduce((sum, engine) => sum + engine.load, 0);
  const busy = mean(engines.map((engine) => engine.busy));
  const said = state === "up" ? "" : `; ${bad}`;
  return { id: name, name, state, words, busy, title: `${name}: ${plural(engines.length, "engine")}, ${plural(legs, "leg")} under way, busy ${percent(busy)}${said}` };
};

/** The boxes of one pool, and the id of the box that each engine is in. */
const pool = (engines, names, only) => {
  if (engines.length <= MOST) return { boxes: engines.map((engine) => one(engine, names)), boxOf: new Map(engines.map(({ id }) => [id, id])) };
  const groups = new Map();
  for (const engine of engines) {
    const model = engine.models[0] ?? only ?? "model not known";
    groups.set(model, [...(groups.get(model) ?? []), engine]);
  }
  const largest = [...groups].sort((a, b) => b[1].length - a[1].length);
  const rest = largest.splice(largest.length > MOST ? MOST - 1 : MOST).flatMap(([, members]) => members);
  if (rest.length) largest.push(["other models", rest]);
  return {
    boxes: largest.map(([name, members]) => group(name, members)),
    boxOf: new Map(largest.flatMap(([name, members]) => members.map(({ id }) => [id, name]))),
  };
};

const gone = (id) => ({ id, name: id, state: "gone", words: "removed", busy: 0, title: `${id}: removed` });

const alone = { id: ALONE, name: "no prefill leg", state: "alone", words: "", busy: 0, title: "Prompts that were held, loaded from the store, or computed where they are decoded" };

/** {left, right, flows}: boxes of both pools, and the flows between them. */
export const picture = ({ engines, flows, router }, names) => {
  const only = router.models.length === 1 ? router.models[0] : undefined;
  const side = (role, end) => {
    const { boxes, boxOf } = pool(engines.filter((engine) => engine.worker_type !== role), names, only);
    const lost = [...new Set(flows.map((flow) => flow[end]))].filter((id) => id && !boxOf.has(id));
    for (const id of lost) boxOf.set(id, lost.length > MOST ? "removed engines" : id);
    const others = lost.length > MOST ? [gone("removed engines")] : lost.map(gone);
    return { boxes: [...boxes, ...others], boxOf };
  };
  const [left, right] = [side("decode", "prefill"), side("prefill", "decode")];
  const sums = new Map();
  for (const flow of flows) {
    const prefill = flow.prefill === null ? ALONE : left.boxOf.get(flow.prefill);
    const decode = right.boxOf.get(flow.decode);
    const key = `${prefill}>${decode}`;
    const sum = sums.get(key) ?? { key, prefill, decode, requests: 0, tokens: 0 };
    sums.set(key, { ...sum, requests: sum.requests + flow.requests, tokens: sum.tokens + flow.tokens });
  }
  const without = flows.some((flow) => flow.prefill === null) || left.boxes.length === 0;
  return { left: [...left.boxes, ...(without ? [alone] : [])], right: right.boxes, flows: [...sums.values()] };
};
