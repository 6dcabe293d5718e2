"use strict";
// Everything that comes from a request goes into the page as text, never as markup.

const SHOWN = 100;
const ended = [];
const open = new Set();
const byId = (id) => document.getElementById(id);
const number = (value) => Math.round(value).toLocaleString("en");

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") element.className = value;
    else if (name === "share") element.style.width = `${(100 * value).toFixed(2)}%`;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
}

function bar(parts, total, label) {
  const inner = parts.filter(([, tokens]) => tokens > 0).map(([kind, tokens]) =>
    make("i", { class: kind, share: tokens / Math.max(total, 1) }));
  return make("div", { class: "bar", role: "img", "aria-label": label }, ...inner);
}

function tile(value, what) {
  return make("div", { class: "tile" }, make("b", {}, value), make("span", {}, what));
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
  return `${step ? value.toFixed(1) : value} ${units[step]}`;
}

// --- now ---

function running(run) {
  let end = `${run.seconds.toFixed(1)} s`;
  let strip = bar([], 1, "waiting");
  if (run.state === "queued") end = `waiting, ${end}`;
  if (run.state === "prefill") {
    const left = run.left === null ? "" : `, ${run.left.toFixed(0)} s left`;
    end = `reading ${number(run.done)} of ${number(run.total)}, ${number(run.rate)} token/s${left}`;
    strip = bar([["reused", run.reused], ["fresh", run.done - run.reused]], run.total, end);
  }
  if (run.state === "answer") {
    end = `answering, ${number(run.pieces)} pieces, ${run.rate.toFixed(1)}/s`;
    strip = bar([["reused", run.reused], ["fresh", run.total - run.reused]], run.total, end);
  }
  return make("div", { class: "run" },
    make("div", { class: "names" }, make("span", {}, run.dialect), make("span", {}, run.session || run.id),
      make("span", {}, `${run.messages} messages`), make("span", { class: "end" }, end)),
    strip);
}

function showNow(rows) {
  byId("now").replaceChildren(...(rows.length ? rows.map(running) : [make("p", { class: "quiet" }, "No request runs.")]));
}

// --- requests and why ---

function again(entry) {
  return Math.max(0, (entry.computed || 0) - (entry.new || 0));
}

function why(entry) {
  const list = make("dl");
  const tell = (name, value) => { if (value !== undefined && value !== null && value !== "") list.append(make("dt", {}, name), make("dd", {}, value)); };
  const miss = entry.miss;
  if (miss) {
    tell("why", miss.detail || miss.reason);
    tell("reason", miss.reason);
    tell("message", miss.message);
    tell("field", miss.field);
    tell("rule", miss.rule);
    if (miss.expected || miss.found) {
      tell("before", make("pre", { class: "was" }, miss.expected || ""));
      tell("now", make("pre", { class: "is" }, miss.found || ""));
    }
  } else if (entry.prompt !== undefined) tell("why", "Nothing was computed again.");
  tell("error", entry.error);
  tell("prompt", entry.prompt === undefined ? "" : `${number(entry.prompt)} tokens: ${number(entry.reused)} reused, ${number(entry.computed)} computed, ${number(entry.new)} new`);
  if (entry.computed_idle) tell("in idle time", `${number(entry.computed_idle)} tokens`);
  if (entry.drafted) tell("drafts", `${number(entry.accepted)} of ${number(entry.drafted)} right`);
  tell("model", entry.model);
  tell("session", entry.session);
  tell("id", entry.id);
  tell("time", entry.time);
  return list;
}

function line(entry) {
  const told = entry.prompt !== undefined;
  const first = entry.seconds_first === null || entry.seconds_first === undefined ? "" : `first ${entry.seconds_first.toFixed(2)} s, `;
  const text = told ? `${number(entry.prompt)} tokens, ${number(entry.computed)} computed, ${number(entry.new)} new` : "";
  const summary = make("summary", {},
    make("div", { class: "names" }, make("span", { class: entry.status < 400 ? "" : "bad" }, entry.status),
      make("span", {}, entry.dialect), make("span", {}, `${entry.messages} messages`), make("span", {}, text),
      make("span", { class: "end" }, `${first}${entry.seconds.toFixed(2)} s`)),
    told ? bar([["reused", entry.reused], ["fresh", Math.min(entry.computed, entry.new)], ["again", again(entry)]], entry.prompt,
      `${number(entry.reused)} reused, ${number(entry.computed)} computed, ${number(again(entry))} of them again`) : null);
  const box = make("details", {}, summary);
  const fill = () => { if (box.open && box.children.length === 1) box.append(why(entry)); };
  box.addEventListener("toggle", () => { fill(); box.open ? open.add(entry.id) : open.delete(entry.id); });
  box.open = open.has(entry.id);
  return box;
}

function showEnded(fresh) {
  if (!fresh.length) return;
  const list = byId("ended");
  if (!ended.length) list.replaceChildren();
  for (const entry of fresh) {
    ended.push(entry);
    list.prepend(line(entry));
  }
  while (ended.length > SHOWN) ended.shift();
  while (list.children.length > SHOWN) list.lastChild.remove();
}

function showReuse() {
  const told = ended.filter((entry) => entry.prompt !== undefined);
  const sum = (name) => told.reduce((total, entry) => total + (entry[name] || 0), 0);
  const firsts = told.map((entry) => entry.seconds_first).filter((value) => typeof value === "number").sort((a, b) => a - b);
  const [prompt, reused, computed, fresh] = ["prompt", "reused", "computed", "new"].map(sum);
  byId("reuse").replaceChildren(
    tile(prompt ? `${(100 * reused / prompt).toFixed(1)}%` : "-", "of all prompt tokens were reused"),
    tile(fresh ? (computed / fresh).toFixed(2) : "-", "computed for each new token"),
    tile(number(computed), "tokens computed"),
    tile(firsts.length ? `${firsts[Math.floor(firsts.length / 2)].toFixed(2)} s` : "-", "to the first token, median"),
    tile(number(told.length), "requests, the last ones"));
}

// --- server ---

function showServer(server) {
  const health = server.health;
  const state = byId("state");
  const counts = health.running || health.queued ? `, ${health.running} running, ${health.queued} waiting` : "";
  state.textContent = health.detail ? `${health.state}: ${health.detail}` : `${health.state}${counts}`;
  state.className = health.ok ? "" : "bad";
  const models = server.models.map((model) => `${model.id}, ${number(model.context)} tokens of context` + (model.vision ? ", sees images" : ""));
  byId("model").textContent = models.join("; ") || "no model yet";
  const tiles = Object.entries(server.figures).filter(([name, value]) => name.endsWith("bytes") && value > 0)
    .map(([name, value]) => tile(bytes(value), name.replace(/_bytes$/, "").replace(/_/g, " ")));
  byId("memory").replaceChildren(...(tiles.length ? tiles : [make("p", { class: "quiet" }, "Nothing is held yet.")]));
}

// --- feed ---

function take(message) {
  showServer(message.server);
  showNow(message.now);
  showEnded(message.ended);
  if (message.ended.length || !byId("reuse").children.length) showReuse();
}

async function read() {
  const key = sessionStorage.getItem("start_llm_key");
  const answer = await fetch("/page/feed", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (answer.status === 401) {
    byId("key").hidden = false;
    byId("key-wrong").textContent = key ? "The server does not know this key." : "";
    sessionStorage.removeItem("start_llm_key");
    return false;
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.detail || `the server answers ${answer.status}`);
  }
  byId("key").hidden = true;
  ended.length = 0; // a feed begins with all that is known
  byId("ended").replaceChildren(make("p", { class: "quiet" }, "None yet."));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server has gone");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

async function follow() {
  for (let pause = 1; ; pause = Math.min(pause * 2, 15)) {
    const began = Date.now();
    try {
      if (!await read()) return; // waits for a key
    } catch (error) {
      byId("state").textContent = `not connected: ${error.message}`;
      byId("state").className = "bad";
    }
    if (Date.now() - began > 5000) pause = 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("start_llm_key", byId("key-text").value);
  byId("key-text").value = "";
  follow();
});
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
byId("openai-url").textContent = `${location.origin}/v1`;
byId("anthropic-url").textContent = location.origin;
follow();
