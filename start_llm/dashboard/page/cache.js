// Stored KV: the icicle with its keys and its words, conversations, and bytes against budget.

import { bytes, byId, duration, make, nameOf, number, setText } from "./dom.js";
import { STATES, boxOf, draw, heightOf, hit, layout, stateOf, windowOf } from "./icicle.js";
import { json } from "./net.js";

const LEAST_MS = 2000; // between two looks at the store
const CONVERSATIONS = 12;
const HELP = "Arrow keys walk the tree, Enter looks closer, Escape steps back.";

const canvas = byId("icicle");
const marks = byId("icicle-mark");
const told = byId("cache-told");
let tree = null;
let plan = null;
let names = []; // [segment, name] of the conversations, the last used one first
let focus = -1;
let picked = -1;
let view = null;
let drawn = false;
let asked = 0;
let again = null;

// --- fetching ---

// Something has happened to the store: look at it soon, and not too often.
export function lookAgain() {
  if (again !== null) return;
  const wait = Math.max(0, asked + LEAST_MS - Date.now());
  again = setTimeout(async () => {
    again = null;
    asked = Date.now();
    if (document.hidden) return;
    try {
      take(await json("/page/stored"));
    } catch (error) {
      setText(told, `Stored KV cannot be shown: ${error.message}`);
    }
  }, wait);
}

export function take(stored) {
  tree = stored;
  plan = layout(tree);
  names = tree.conversations.map(([name, at]) => [at, nameOf(name)]);
  if (focus >= plan.count) focus = -1;
  if (picked >= plan.count) picked = -1;
  performance.mark("icicle-begin");
  show();
  performance.measure("icicle", "icicle-begin");
  showConversations();
  setText(byId("cache-empty"), plan.count ? "" : "Nothing is stored yet: the first request fills this.");
  byId("icicle-box").hidden = !plan.count;
  if (picked < 0) setText(told, summary());
}

function summary() {
  if (!plan.count) return "";
  const counts = [0, 0, 0];
  for (let at = 0; at < plan.count; at += 1) counts[stateOf(tree, at)] += tree.tokens[at];
  const parts = STATES.map((state, at) => [counts[at], state]).filter(([tokens]) => tokens).map(([tokens, state]) => `${number(tokens)} tokens ${state}`);
  const left = tree.left_out ? `, ${number(tree.left_out)} pieces not shown` : "";
  return `${number(plan.count)} ${plan.count === 1 ? "piece" : "pieces"}: ${parts.join(", ")}${left}. ${HELP}`;
}

// --- drawing ---

function show() {
  if (!plan || !plan.count) return;
  byId("icicle-box").hidden = false;
  view = windowOf(plan, focus);
  const box = canvas.parentElement.getBoundingClientRect();
  if (!box.width) return; // another part of the page is shown
  const height = heightOf(view);
  const ratio = window.devicePixelRatio || 1;
  for (const one of [canvas, marks]) {
    one.width = Math.round(box.width * ratio);
    one.height = Math.round(height * ratio);
    one.style.height = `${height}px`;
  }
  canvas.parentElement.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw(context, plan, tree, names, view, box.width, height, getComputedStyle(document.documentElement));
  drawn = true;
  byId("icicle-out").hidden = focus < 0;
  mark();
}

function mark() {
  if (!drawn) return;
  const ratio = window.devicePixelRatio || 1;
  const context = marks.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, marks.width, marks.height);
  if (picked < 0) return;
  const style = getComputedStyle(document.documentElement);
  const [width, height] = [marks.width / ratio, marks.height / ratio];
  context.strokeStyle = style.getPropertyValue("--front");
  context.fillStyle = style.getPropertyValue("--veil");
  for (let at = tree.parent[picked]; at >= 0; at = tree.parent[at]) { // the way from the beginning of the prompt
    const box = boxOf(plan, at, view, width, height);
    context.fillRect(box.x, box.y, box.width, box.height);
  }
  const box = boxOf(plan, picked, view, width, height);
  context.lineWidth = 2;
  context.strokeRect(box.x + 1, box.y + 1, Math.max(box.width - 2, 2), Math.max(box.height - 2, 2));
}

// --- what is told of a segment ---

// A segment stands on the rows of all that hangs below it, so no path has to be walked.
function namesThrough(at) {
  const [first, behind] = [plan.top[at], plan.top[at] + plan.rows[at]];
  const inside = ([end]) => plan.top[end] >= first && plan.top[end] < behind && plan.start[end] >= plan.start[at];
  return [...new Set(names.filter(inside).map(([, name]) => name))];
}

function describe(at) {
  const through = namesThrough(at);
  const shown = through.slice(0, 3).join(", ") + (through.length > 3 ? ` and ${through.length - 3} more` : "");
  const state = stateOf(tree, at);
  const where = state === 0 && tree.disk[at] ? "in memory and on disk" : STATES[state];
  const size = tree.memory[at] || (state === 1 ? tree.tokens[at] * tree.token_bytes : 0);
  const parts = [
    shown || "no conversation known",
    `${number(tree.tokens[at])} tokens from ${number(plan.start[at])} on`,
    size ? `${where}, ${state === 1 ? "about " : ""}${bytes(size)}` : where,
    tree.cost[at] ? `took ${duration(tree.cost[at])} to compute` : "",
    tree.age[at] < 0 ? "not used since the start" : `last used ${duration(tree.age[at])} ago, ${number(tree.uses[at])} times in all`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function pick(at) {
  if (at === picked || !plan) return;
  picked = at;
  setText(told, at < 0 ? summary() : describe(at));
  mark();
}

function zoom(at) {
  focus = at;
  show();
}

// --- pointer and keys ---

function at(event) {
  const box = canvas.getBoundingClientRect();
  return view ? hit(plan, view, box.width, box.height, event.clientX - box.left, event.clientY - box.top) : -1;
}

function siblings() {
  const above = tree.parent[picked];
  return above < 0 ? plan.roots : plan.children[above];
}

// The segment that a key leads to; the same one where there is none.
function led(key) {
  if (picked < 0) return focus < 0 ? plan.roots[0] : focus;
  if (key === "ArrowRight") return plan.children[picked][0] ?? picked;
  if (key === "ArrowLeft") return tree.parent[picked] < 0 ? picked : tree.parent[picked];
  const level = siblings();
  const next = level[level.indexOf(picked) + (key === "ArrowDown" ? 1 : -1)];
  return next ?? picked;
}

function onKey(event) {
  if (!plan || !plan.count) return;
  if (event.key.startsWith("Arrow")) pick(led(event.key));
  else if (event.key === "Enter" && picked >= 0) zoom(picked === focus ? -1 : picked);
  else if (event.key === "Escape" && focus >= 0) zoom(tree.parent[focus] ?? -1);
  else return;
  event.preventDefault();
}

// --- conversations ---

function conversation([name, end]) {
  const sums = [0, 0, 0];
  let held = 0;
  for (let here = end; here >= 0; here = tree.parent[here]) {
    sums[stateOf(tree, here)] += tree.tokens[here];
    held += tree.memory[here];
  }
  const all = sums[0] + sums[1] + sums[2];
  const button = make("button", { type: "button", class: "link", title: name, onclick: () => { pick(end); canvas.focus(); } }, nameOf(name));
  return make("tr", {}, make("th", { scope: "row" }, button), make("td", { "data-label": "tokens" }, number(all)),
    make("td", { "data-label": "in memory" }, all ? `${Math.round((100 * sums[0]) / all)}%` : ""), make("td", {}, bytes(held)),
    make("td", { "data-label": "used" }, tree.age[end] < 0 ? "–" : `${duration(tree.age[end])} ago`));
}

function showConversations() {
  const deepest = new Map();
  for (const [name, end, which] of tree.conversations) {
    const known = deepest.get(which);
    if (known === undefined || plan.end[end] > plan.end[known[1]]) deepest.set(which, [name, end]);
  }
  const rows = [...deepest.values()].slice(0, CONVERSATIONS);
  byId("conversations").replaceChildren(...rows.map(conversation));
  byId("conversations").parentElement.hidden = !rows.length;
  setText(byId("conversations-more"), deepest.size > rows.length ? `and ${deepest.size - rows.length} more` : "");
}

// --- bytes against budget ---

function meter(name, value, most, told) {
  const share = most ? Math.min(1, value / most) : 0;
  return make("div", { class: "meter" }, make("span", {}, name),
    make("div", { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": most || 1, "aria-valuenow": value },
      make("i", { class: "memory", share })),
    make("span", { class: "end" }, told));
}

let shown = "";

export function showBytes(figures) {
  const meters = [];
  const [held, budget] = [figures.kv_bytes || 0, figures.kv_budget_bytes];
  if (budget) meters.push(["in memory", held, budget, `${bytes(held)} of ${bytes(budget)}`]);
  if (figures.kv_held_bytes) meters.push(["with what runs now", figures.kv_held_bytes, budget, `${bytes(figures.kv_held_bytes)}, ${bytes(figures.kv_used_bytes)} of it filled`]);
  if (figures.kv_disk_bytes !== undefined) {
    const most = figures.kv_disk_budget_bytes;
    meters.push(["on disk", figures.kv_disk_bytes, most || figures.kv_disk_bytes, most ? `${bytes(figures.kv_disk_bytes)} of ${bytes(most)}` : bytes(figures.kv_disk_bytes)]);
  }
  if (figures.kv_checkpoint_bytes) meters.push(["of it places to go on from", figures.kv_checkpoint_bytes, budget, bytes(figures.kv_checkpoint_bytes)]);
  byId("bytes").replaceChildren(...meters.map((one) => meter(...one)));
  const now = [held, figures.kv_segments, figures.kv_disk_bytes, figures.kv_evicted].join();
  if (now === shown) return;
  shown = now;
  lookAgain();
}

canvas.addEventListener("pointermove", (event) => { if (plan) pick(at(event)); });
canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) pick(-1); });
canvas.addEventListener("click", (event) => { if (plan) { const found = at(event); if (found >= 0) zoom(found === focus ? -1 : found); } });
canvas.addEventListener("keydown", onKey);
canvas.addEventListener("focus", () => { if (plan && plan.count && picked < 0) pick(led("")); });
canvas.addEventListener("blur", () => pick(-1));
byId("icicle-out").addEventListener("click", () => { zoom(-1); canvas.focus(); });
new ResizeObserver(show).observe(canvas.parentElement.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) lookAgain(); });
