// Asks the router once a second and shows what it says; says so when it says nothing.
import { byId, attr, say } from "./dom.js";
import { Engines, Names } from "./engines.js";
import { Events } from "./events.js";
import { Flow } from "./flow.js";
import { Ladder } from "./ladder.js";
import { clock, NONE, plural, span } from "./format.js";
import { Requests, Store } from "./tables.js";
import { Tiles } from "./tiles.js";
import { Queue } from "./queue.js";

const EVERY_MS = 1000;
const DEADLINE_MS = 3000;
const LOST_AFTER = 2;
const LIVE_SECONDS = 3;
const NAMED = 3;
const STATES = { ok: "serving", degraded: "degraded", unavailable: "down: nobody can serve", starting: "starting", draining: "draining" };

const tiles = new Tiles();
const flow = new Flow(byId("flow"));
const ladder = new Ladder();
const queue = new Queue();
const engines = new Engines();
const events = new Events();
const store = new Store();
const requests = new Requests();

let token = null;
let failures = 0;
let answeredAt = 0;
let locked = false;

const stateWords = ({ router, engines }) => {
  const down = engines.filter((engine) => engine.down).length;
  if (router.state === "degraded" && down) return `degraded: ${plural(down, "engine")} down`;
  return STATES[router.state] ?? router.state;
};

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

/** Which engines are down and since when, the first few. */
const whoIsDown = ({ engines, events }, names) => {
  const down = engines.filter((engine) => engine.down);
  const told = down.slice(0, NAMED).map(({ id }) => {
    const event = events.find(({ kind, engine }) => engine === id && (kind === "left" || kind === "breaker open"));
    return event ? `${names.of(id)} since ${clock(event.at_s)}` : names.of(id);
  });
  return `${told.join(", ")}${down.length > NAMED ? ` and ${down.length - NAMED} more` : ""}`;
};

const showHead = (snapshot, names) => {
  const { router } = snapshot;
  const words = stateWords(snapshot);
  say(byId("state"), words);
  attr(byId("state"), "class", `pill ${router.state}`);
  say(byId("about"), [router.models.join(", ") || "no model yet", `policy ${router.policy}`, `version ${router.version}`, `up ${span(router.uptime_s)}`].join(" · "));
  say(byId("lacking"), router.lacking.map((text) => sentence(text.replace(/ down: .*/, () => ` down: ${whoIsDown(snapshot, names)}`))).join(" "));
  attr(byId("lacking"), "class", `lacking ${router.state}`);
  document.title = router.state === "ok" ? `${plural(snapshot.load.running, "request")} · kvrouter` : `${words} · kvrouter`;
};

const show = (snapshot) => {
  const names = new Names(snapshot.engines);
  showHead(snapshot, names);
  tiles.show(snapshot);
  flow.show(snapshot, names);
  ladder.show(snapshot.fates);
  queue.show(snapshot);
  engines.show(snapshot, names);
  store.show(snapshot);
  events.show(snapshot.events, names);
  requests.show(snapshot.requests, names);
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
