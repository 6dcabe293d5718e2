// Requests that run, those that have ended, and why they cost what they cost.

import { bar, byId, bytes, duration, make, nameOf, number, setText, short, tile } from "./dom.js";
import { diff } from "./diff.js";
import { json } from "./net.js";
import { mark, sentence } from "./reasons.js";

const SHOWN = 100;
const ended = [];
const open = new Set();
const cancelled = new Set(); // ids of running requests whose end was asked for

// --- now ---

// About its part of the KV that all running requests hold: by tokens.
function memoryOf(run, rows, figures) {
  const tokens = (one) => (one.state === "answer" ? one.total : one.done) + one.pieces;
  const all = rows.reduce((sum, one) => sum + tokens(one), 0);
  return all && figures.kv_running_bytes ? `, about ${bytes((figures.kv_running_bytes * tokens(run)) / all)} of memory` : "";
}

function running(run, all, memory) {
  let end = duration(run.seconds);
  let strip = bar([], 1, "waiting");
  if (run.state === "queued") end = `waiting, ${end}`;
  if (run.state === "prefill") {
    const left = run.left === null ? "" : `, ${duration(run.left)} left`;
    end = `reading ${number(run.done)} of ${number(run.total)}, ${number(run.rate)} tokens/s${left}`;
    strip = bar([["reused", run.reused], ["fresh", run.done - run.reused]], run.total, end);
  }
  if (run.state === "answer") {
    // An answer that is sent as a whole shows no tokens before its end.
    end = run.pieces ? `answering, ${number(run.pieces)} tokens, ${run.rate.toFixed(1)} tokens/s` : `answering, ${end}`;
    strip = bar([["reused", run.reused], ["fresh", run.total - run.reused]], run.total, end);
  }
  const reused = run.state === "queued" ? "" : `${number(run.reused)} reused, ${number(run.total - run.reused)} to compute${memory}`;
  return make("li", { class: `run ${run.state}` },
    make("div", { class: "names" },
      make("b", {}, run.client || run.dialect),
      make("span", { class: "name", title: run.session || run.id }, nameOf(run.session) || run.id),
      make("span", { class: "quiet" }, `${run.messages} messages`),
      make("span", { class: "quiet" }, run.model),
      make("span", { class: "end" }, end)),
    strip,
    make("div", { class: "names" }, make("span", { class: "small quiet" }, reused), all ? canceller(run) : null));
}

function canceller(run) {
  const name = `Cancel the request of ${run.client || run.dialect}${run.session ? `, ${nameOf(run.session)}` : ""}`;
  const button = make("button", { type: "button", class: "small end", "data-id": run.id, "aria-label": name }, cancelled.has(run.id) ? "Ending" : "Cancel");
  button.disabled = cancelled.has(run.id);
  button.addEventListener("click", async () => {
    cancelled.add(run.id);
    button.disabled = true;
    try {
      await json(`/page/requests/${encodeURIComponent(run.id)}/cancel`, {});
      setText(byId("now-note"), "");
    } catch (error) {
      cancelled.delete(run.id);
      setText(byId("now-note"), error.message);
    }
  });
  return button;
}

// The rows are made anew at each message: the button that has the focus keeps it.
export function showNow(rows, all, figures) {
  const focused = document.activeElement?.dataset?.id;
  for (const id of cancelled) if (!rows.some((run) => run.id === id)) cancelled.delete(id);
  byId("now").replaceChildren(...(rows.length ? rows.map((run) => running(run, all, memoryOf(run, rows, figures))) : [make("li", { class: "quiet" }, "No request runs.")]));
  showFirstRun(rows);
  if (focused) byId("now").querySelector(`button[data-id="${CSS.escape(focused)}"]`)?.focus();
  setText(byId("now-count"), rows.length ? String(rows.length) : "");
}

// What weights and running requests leave. Stored KV gives way to both.
export function showPressure(figures) {
  const [memory, weights, runs, stored] = ["models_memory_bytes", "models_weight_bytes", "kv_running_bytes", "kv_bytes"].map((name) => figures[name] || 0);
  if (!weights) return;
  const used = memory ? (weights + runs) / memory : 0;
  const state = used > 0.95 ? "full: requests wait for each other" : used > 0.8 ? "getting full" : "room for more";
  const parts = `weights ${bytes(weights)}, running requests ${bytes(runs)}, stored conversations ${bytes(stored)} (these make room for the others)`;
  const words = memory ? `Memory: ${state}. Of ${bytes(memory)}: ${parts}` : `Memory: ${parts}`;
  byId("pressure").replaceChildren(
    memory ? bar([["fresh", weights], ["again", runs], ["memory", stored]], memory, words) : "",
    make("p", { class: used > 0.8 ? "small bad" : "small quiet" }, words));
}

function showFirstRun(rows) {
  byId("first-run").hidden = rows.length > 0 || ended.length > 0;
}

// --- why ---

function again(entry) {
  return Math.max(0, (entry.computed || 0) - (entry.new || 0));
}

// Both texts end somewhere: what differs there behind something equal says nothing.
function whole(parts) {
  const last = parts.findLastIndex(([kind, text]) => kind === "same" && text.trim());
  const first = parts.findIndex(([kind]) => kind !== "same");
  return last > first && first >= 0 ? [...parts.slice(0, last + 1), ["same", " …"]] : parts;
}

function changed(miss) {
  const parts = whole(diff(miss.expected || "", miss.found || "")).map(([kind, text]) =>
    kind === "same" ? text : make(kind === "was" ? "del" : "ins", {}, text));
  return make("pre", { class: "diff" }, ...parts);
}

function place(miss) {
  const message = miss.message === null || miss.message === undefined ? "" : `message ${miss.message + 1}`;
  return [message, miss.field, miss.rule && `rule ${miss.rule}`, `token ${number(miss.token)}`].filter(Boolean).join(", ");
}

function why(entry) {
  const list = make("dl");
  const tell = (name, value) => {
    if (value !== undefined && value !== null && value !== "") list.append(make("dt", {}, name), make("dd", {}, value));
  };
  const miss = entry.miss;
  if (miss) {
    tell("why", [sentence(miss.reason), miss.detail && `${miss.detail[0].toUpperCase()}${miss.detail.slice(1)}.`].filter(Boolean).join(" "));
    tell("where", place(miss));
    tell("what would help", miss.remedy);
  } else if (entry.prompt !== undefined) {
    tell("why", "Nothing was computed again.");
  }
  tell("error", entry.error);
  if (entry.prompt !== undefined) {
    tell("prompt", `${number(entry.prompt)} tokens: ${number(entry.reused)} reused, ${number(entry.computed)} computed, ${number(entry.new)} new`);
  }
  if (entry.computed_idle) tell("in idle time", `${number(entry.computed_idle)} tokens`);
  if (entry.completion) tell("answer", `${number(entry.completion)} tokens, ${number(entry.reasoning || 0)} of them reasoning`);
  if (entry.drafted) {
    const sources = ["copied", "headed", "forced"].filter((name) => entry[name]);
    const parts = sources.map((name) => `${number(entry[name])} ${name}`).join(", ");
    tell("drafts", `${number(entry.accepted)} of ${number(entry.drafted)} right${parts && `: ${parts}`}`);
  }
  tell("asked as", `${entry.dialect}, model ${entry.model}, ${entry.tools} tools`);
  tell("conversation", entry.session);
  tell("id", entry.id);
  tell("time", entry.time);
  json(`/page/requests/${encodeURIComponent(entry.id)}`).then(({ note, parted }) => {
    const here = miss && parted && miss.token === parted.token;
    const rows = parted && !miss ? [["differs from", `${place(parted)}: something else is stored there, so all behind it was new`]] : [];
    const shown = here || !miss ? parted : miss; // what is stored there is told to who may see everything
    if (shown && (shown.expected || shown.found)) rows.push(["what", changed(shown)]);
    list.children[!miss ? 1 : miss.remedy ? 5 : 3].after(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    tell("told", note.length ? make("pre", {}, note.join("\n")) : "The model read no update note.");
  }, () => {}); // it is gone: the server has begun anew
  return list;
}

// --- those that have ended ---

function line(entry) {
  const told = entry.prompt !== undefined;
  const first = entry.seconds_first === null || entry.seconds_first === undefined ? "" : `first ${duration(entry.seconds_first)}`;
  const cost = told ? `${short(entry.prompt)} tokens, ${short(entry.computed)} computed` : entry.error || "";
  const more = again(entry) > 16 && entry.miss ? make("span", { class: "tag", title: sentence(entry.miss.reason) }, mark(entry.miss.reason)) : null;
  const summary = make("summary", {},
    make("div", { class: "names" },
      make("span", { class: entry.status < 400 ? "status" : "status bad" }, entry.status),
      make("b", {}, entry.client || entry.dialect),
      make("span", { class: "name quiet", title: entry.session || "" }, nameOf(entry.session)),
      make("span", { class: "cost" }, cost), more,
      make("span", { class: "end" }, [first, duration(entry.seconds)].filter(Boolean).join(" · "))),
    told ? bar([["reused", entry.reused], ["fresh", entry.computed - again(entry)], ["again", again(entry)]], entry.prompt,
      `${number(entry.reused)} reused, ${number(entry.computed)} computed, ${number(again(entry))} of them again`) : null);
  const box = make("details", { "data-id": entry.id }, summary);
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(why(entry));
    if (box.open) open.add(entry.id); else open.delete(entry.id);
  });
  box.open = open.has(entry.id);
  return box;
}

export function showEnded(fresh) {
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

// A feed begins with all that is known.
export function forgetEnded() {
  ended.length = 0;
  byId("ended").replaceChildren(make("p", { class: "quiet" }, "None yet."));
}

export function showReuse(figures) {
  const told = ended.filter((entry) => entry.prompt !== undefined);
  const sum = (name) => told.reduce((total, entry) => total + (entry[name] || 0), 0);
  const firsts = told.map((entry) => entry.seconds_first).filter((value) => typeof value === "number").sort((a, b) => a - b);
  const [prompt, reused, computed, fresh] = ["prompt", "reused", "computed", "new"].map(sum);
  const held = figures.kv_bytes || 0;
  byId("reuse").replaceChildren(
    tile(prompt ? `${(100 * reused / prompt).toFixed(1)}%` : "–", "of prompt tokens reused"),
    tile(fresh ? (computed / fresh).toFixed(2) : "–", "computed for each new token; 1.00: only what is new"),
    tile(firsts.length ? duration(firsts[Math.floor(firsts.length / 2)]) : "–", "to the first token, median"),
    tile(told.length ? number(told.length) : "–", `requests, ${short(prompt)} tokens`),
    tile(figures.kv_budget_bytes ? bytes(held) : "–", `of ${bytes(figures.kv_budget_bytes || 0)} for stored conversations in memory`));
}
