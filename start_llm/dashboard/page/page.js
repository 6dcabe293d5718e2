// The page's entry: its parts, its views, and the feed that fills them.

import { byId, copy, number, setText } from "./dom.js";
import { complaint, events, ask, key } from "./net.js";
import { showHistory } from "./charts.js";
import { openConnect } from "./connect.js";
import { forgetEnded, showEnded, showNow, showPressure, showReuse } from "./requests.js";
import { showBytes } from "./cache.js";
import { showDay } from "./day.js";
import { openModels, showModels, showPull, showServed } from "./models.js";
import { openNodes } from "./nodes.js";
import { forgetLog, openServer, showLog } from "./server.js";

const VIEWS = ["overview", "try", "models", "connect", "server"];
const STATES = { wedged: "stuck" }; // where the server's own word needs another one
let seesAll = false;
let feed = null; // the AbortController of the open feed
let gone = false; // the page was left, and the browser keeps it for the way back
let comesBack = () => {};

// --- views ---

function view() {
  const wanted = location.hash.slice(1);
  const shown = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== shown;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === shown) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (shown === "try") openTry();
  if (shown === "connect") openConnect(seesAll);
  if (shown === "models" && seesAll) openModels();
  if (shown === "server" && seesAll) {
    openServer();
    openNodes();
  }
}

// With the Markdown reader, which the other views need not wait for.
async function openTry() {
  try {
    (await import("./try.js")).openTry();
  } catch {
    setText(byId("try-told"), "This view could not be loaded. Reload the page once the server answers.");
  }
}

// Parts about everybody's requests and about the machine, for who may see them.
function showAll(all) {
  for (const element of document.querySelectorAll("[data-all]")) element.hidden = element.dataset.all === "yes" ? !all : all;
  if (all && !seesAll) {
    seesAll = true;
    view();
  }
  seesAll = all;
}

// --- server ---

function showServer(server, all) {
  const health = server.health;
  const state = byId("state");
  const counts = health.running || health.queued ? `, ${health.running} running, ${health.queued} waiting` : "";
  const name = STATES[health.state] || health.state;
  setText(state, health.detail ? `${name}: ${health.detail}` : `${name}${counts}`);
  state.className = health.ok ? "good" : "bad";
  const models = server.models.map((model) => `${model.id} · ${number(model.context)} tokens${model.vision ? " · sees images" : ""}`);
  setText(byId("model"), models.join("; ") || "no model yet");
  showServed(server.models, health, all);
}

// --- feed ---

function take(message) {
  showAll(message.all);
  showServer(message.server, message.all);
  showEnded(message.ended);
  showNow(message.now, message.all, message.server.figures);
  showReuse(message.server.figures);
  document.dispatchEvent(new CustomEvent("now", { detail: message.now })); // the chat looks for its own requests
  if (!message.all) return;
  showBytes(message.server.figures);
  showPressure(message.server.figures);
  showLog(message.log);
  showPull(message.pull);
  if (message.daily) showDay(message.daily);
  if (message.history) showHistory(message.history);
}

async function read() {
  feed = new AbortController();
  const answer = await ask("/page/feed", { signal: feed.signal });
  if (answer.status === 401) {
    byId("key").hidden = false;
    byId("main").hidden = true; // nothing is known yet, not even that nothing runs
    setText(byId("model"), "");
    setText(byId("key-wrong"), key.get() ? "The server does not know this key." : "");
    setText(byId("state"), "waits for the key");
    byId("state").className = "";
    key.forget();
    return false;
  }
  if (!answer.ok) throw new Error(await complaint(answer));
  byId("key").hidden = true;
  byId("main").hidden = false;
  forgetEnded();
  forgetLog();
  for await (const data of events(answer)) take(JSON.parse(data));
  throw new Error("the server has gone");
}

async function follow() {
  for (let pause = 1; ; pause = Math.min(pause * 2, 15)) {
    const began = Date.now();
    await seen();
    try {
      if (!await read()) return; // waits for a key
    } catch (error) {
      if (error.name === "AbortError") continue;
      setText(byId("state"), `not connected: ${error instanceof TypeError ? "the server has gone" : error.message}`);
      byId("state").className = "bad";
    }
    if (Date.now() - began > 5000) pause = 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
  }
}

// A browser has six connections to a server. A page that nobody sees must not hold one: the seventh would wait for ever.
function seen() {
  if (!document.hidden && !gone) return Promise.resolve();
  return new Promise((resolve) => { comesBack = resolve; });
}

function look() {
  if (document.hidden || gone) {
    if (feed) feed.abort();
  } else {
    comesBack();
  }
}

document.addEventListener("visibilitychange", look);
window.addEventListener("pagehide", () => { gone = true; look(); });
window.addEventListener("pageshow", () => { gone = false; look(); });

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key-text").value);
  byId("key-text").value = "";
  follow();
});
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", () => copy(button, button.dataset.copy));
}
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
byId("models-again").addEventListener("click", showModels);
byId("openai-url").textContent = `${location.origin}/v1`;
byId("anthropic-url").textContent = location.origin;
window.addEventListener("hashchange", () => { view(); window.scrollTo(0, 0); });
view();
follow();
