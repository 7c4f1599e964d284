// Asks the router once a second and shows what it says; says so when it says nothing.
import { Stack } from "./chart.js";
import { byId, attr, say } from "./dom.js";
import { Flow } from "./flow.js";
import { clock, count, NONE, percent, plural, span, time } from "./format.js";
import { Engines, Requests, Store } from "./tables.js";
import { Tiles } from "./tiles.js";

const EVERY_MS = 1000;
const DEADLINE_MS = 3000;
const LOST_AFTER = 2;
const LIVE_SECONDS = 3;
const STATES = { ok: "serving", degraded: "degraded", unavailable: "no decode engine", starting: "starting", draining: "draining" };
const PARTS = [
  { key: "queue", name: "queue", paint: "paint-queue" },
  { key: "tokenise", name: "tokenise", paint: "paint-tokenise" },
  { key: "plan", name: "plan", paint: "paint-plan" },
  { key: "prefill", name: "prefill", paint: "paint-prefill" },
  { key: "landing", name: "landing", paint: "paint-store" },
  { key: "decode", name: "decode", paint: "paint-decode" },
];
const SOURCES = [
  { key: "engine_tokens", name: "engine cache", paint: "paint-cache" },
  { key: "store_tokens", name: "store", paint: "paint-store" },
  { key: "missing_tokens", name: "computed", paint: "paint-missing" },
];

const tiles = new Tiles();
const flow = new Flow(byId("flow"));
const engines = new Engines();
const store = new Store();
const requests = new Requests();
const hits = new Stack(byId("hits"), SOURCES, { name: "Where prompt tokens came from", write: (value) => `${count(value)}/s`, at: byId("hits-at") });
const ttft = new Stack(byId("ttft"), PARTS, { name: "Time to first token by its parts", write: time, at: byId("ttft-at") });

let token = null;
let failures = 0;
let answeredAt = 0;
let locked = false;

const lastMinute = (values, history) => values.slice(-Math.max(1, Math.round(60 / history.bucket_s)));

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

const showHits = ({ history, minute }) => {
  const { series, bucket_s: bucketSeconds } = history;
  const rates = {};
  for (const { key } of SOURCES) rates[key] = series[key].map((value) => (value === null ? null : value / bucketSeconds));
  const missing = Math.max(0, minute.prompt_tokens - minute.engine_tokens - minute.store_tokens);
  const shares = [minute.engine_tokens, minute.store_tokens, missing];
  const now = shares.map((value) => (minute.prompt_tokens ? percent(value / minute.prompt_tokens) : NONE));
  hits.show(rates, { bucketSeconds, endSeconds: history.end_s, now, nowWords: "last minute" });
};

const showTtft = ({ history }) => {
  const { series, bucket_s: bucketSeconds } = history;
  const begun = lastMinute(series.begun, history);
  const means = PARTS.map(({ key }) => {
    const values = lastMinute(series[`ttft_${key}_s`], history);
    const total = sum(begun);
    return total ? time(sum(values.map((value, i) => (value ?? 0) * (begun[i] ?? 0))) / total) : NONE;
  });
  const buckets = Object.fromEntries(PARTS.map(({ key }) => [key, series[`ttft_${key}_s`]]));
  ttft.show(buckets, { bucketSeconds, endSeconds: history.end_s, now: means, nowWords: "mean of the last minute" });
};

const showHead = ({ router }) => {
  say(byId("state"), STATES[router.state] ?? router.state);
  attr(byId("state"), "class", `pill ${router.state}`);
  say(byId("about"), [router.models.join(", ") || "no model yet", `policy ${router.policy}`, `version ${router.version}`, `up ${span(router.uptime_s)}`].join(" · "));
  say(byId("lacking"), router.lacking.join("; "));
};

const show = (snapshot) => {
  showHead(snapshot);
  tiles.show(snapshot);
  flow.show(snapshot);
  showHits(snapshot);
  showTtft(snapshot);
  engines.show(snapshot.engines);
  store.show(snapshot.store, snapshot.minute);
  requests.show(snapshot.requests);
  document.title = `${plural(snapshot.load.running, "request")} · kvrouter`;
};

const lose = (why) => {
  failures += 1;
  if (failures < LOST_AFTER) return;
  document.documentElement.classList.add("stale");
  byId("lost").hidden = false;
  say(byId("lost-what"), why);
  say(byId("lost-since"), answeredAt ? `What you see is of ${clock(answeredAt / 1000)}; asking again each second.` : "Asking again each second.");
  say(byId("state"), "no answer");
  attr(byId("state"), "class", "pill lost-now");
};

const find = () => {
  failures = 0;
  answeredAt = Date.now();
  document.documentElement.classList.remove("stale");
  byId("lost").hidden = true;
  byId("pulse").classList.remove("beat");
  requestAnimationFrame(() => byId("pulse").classList.add("beat"));
};

const lock = () => {
  locked = true;
  byId("main").hidden = true;
  byId("unlock").hidden = false;
  say(byId("unlock-wrong"), token === null ? "" : "That is not its token.");
  byId("token").focus();
};

const ask = async () => {
  const headers = token === null ? {} : { authorization: `Bearer ${token}` };
  const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
  if (answer.status === 401) return lock();
  if (!answer.ok) return lose(`The router answers ${answer.status}.`);
  const snapshot = await answer.json();
  find();
  show(snapshot);
};

const tick = async () => {
  const begun = performance.now();
  if (!document.hidden && !locked) {
    try {
      await ask();
    } catch (error) {
      if (error instanceof TypeError || error.name === "TimeoutError" || error.name === "AbortError") lose("The router does not answer.");
      else throw error;
    }
  }
  setTimeout(tick, Math.max(100, EVERY_MS - (performance.now() - begun)));
};

const showAge = () => {
  const seconds = (Date.now() - answeredAt) / 1000;
  say(byId("age"), !answeredAt ? NONE : seconds < LIVE_SECONDS ? "live" : span(seconds));
};

const THEMES = ["auto", "light", "dark"];
const WORDS = { auto: "as the system says", light: "light", dark: "dark" };
const nameTheme = () => {
  const theme = document.documentElement.dataset.theme ?? "auto";
  say(byId("theme-name"), theme);
  attr(byId("theme"), "aria-label", `Colours: ${WORDS[theme]}`);
};

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete root.dataset.theme;
  else root.dataset.theme = next;
  try {
    localStorage.setItem("kvrouter-theme", next);
  } catch {
    // no storage here: it lasts as long as the page
  }
  nameTheme();
});

byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value;
  byId("unlock").hidden = true;
  byId("main").hidden = false;
  locked = false;
});

nameTheme();
setInterval(showAge, 250);
tick();
