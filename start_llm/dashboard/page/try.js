// A chat with the served model. It is kept in this browser only.

import { chip, contentOf, hasFiles, hasImages, takeFiles } from "./attach.js";
import { byId, copier, duration, make, number, setText } from "./dom.js";
import { markdown } from "./markdown.js";
import { json } from "./net.js";
import { talk } from "./talk.js";

const STORE = "start_llm_try";
const LONG_ANSWER = 20_000; // characters; a longer one is shown as plain text until it is whole
const SAMPLING = { most: "max_tokens", temperature: "temperature", top_p: "top_p", seed: "seed" };
const fields = {
  system: byId("try-system"), tools: byId("try-tools"), most: byId("try-most"), temperature: byId("try-temperature"),
  top_p: byId("try-top-p"), seed: byId("try-seed"),
};
let chat = { id: "", messages: [], told: {} };
let running = null; // the AbortController of the answer that is coming
let models = new Map();

// --- keeping ---

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE));
    if (kept && Array.isArray(kept.messages)) chat = { id: "", told: {}, ...kept };
  } catch { /* not ours, or forbidden: a new chat */ }
  chat.id ||= `page-${Date.now().toString(36)}`;
  for (const [name, field] of Object.entries(fields)) field.value = chat[name] ?? field.value;
}

function keep() {
  for (const [name, field] of Object.entries(fields)) chat[name] = field.value;
  try {
    localStorage.setItem(STORE, JSON.stringify(chat));
  } catch { keepWithoutImages(); }
}

// A browser keeps about 5 MB: images are the first to go.
function keepWithoutImages() {
  const messages = chat.messages.map((message) =>
    message.files ? { ...message, files: message.files.filter((file) => !file.image) } : message);
  try {
    localStorage.setItem(STORE, JSON.stringify({ ...chat, messages }));
  } catch { /* full or forbidden: it lasts as long as the page */ }
}

// --- the model ---

export async function openTry() {
  try {
    const { data } = await json("/v1/models");
    const writers = data.filter((model) => !model.details?.task && model.details?.kind !== "embedding");
    byId("try-model").replaceChildren(make("option", { value: "default" }, "main model"),
      ...writers.map((model) => make("option", { value: model.id }, model.id, model.details?.state === "ready" ? " (loaded)" : "")));
    models = new Map(writers.map((model) => [model.id, model]));
    byId("try-model").value = models.has(chat.model) ? chat.model : "default";
    tellOfImages();
  } catch { /* the main model can be asked all the same */ }
}

// What becomes of an image where the chosen model does not see it.
function tellOfImages() {
  const model = models.get(byId("try-model").value) || models.values().next().value; // the main one is listed first
  const blind = hasImages() && model && !model.capabilities.vision;
  const what = model?.capabilities.images === "reject" ? "and refuses them" : "and is only told that there was one";
  setText(byId("try-images-note"), blind ? `${model.id} does not see images ${what}.` : "");
}

// --- showing ---

function folded(message, live) {
  if (!message.reasoning_content) return null;
  const box = make("details", { class: "reasoning" }, make("summary", {}, live && !message.content ? "thinking" : "reasoning"),
    make("div", { class: "text" }, message.reasoning_content));
  return box;
}

function calls(message) {
  return (message.tool_calls || []).map((call) =>
    make("div", { class: "call" }, make("b", {}, call.function.name), make("pre", {}, pretty(call.function.arguments))));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

function shown(message, told, live = false) {
  const who = { user: "You", assistant: "Model", tool: "Result" }[message.role];
  const copy = message.role === "assistant" && message.content && !live ? copier(message.content, "this answer") : null;
  return make("article", { class: `said ${message.role}`, "aria-label": who },
    make("h3", {}, who), folded(message, live), text(message, live), ...calls(message),
    ...(message.files || []).map(chip),
    told || copy ? make("p", { class: "small quiet" }, told || "", " ", copy) : null);
}

function text(message, live) {
  if (!message.content) return null;
  if (message.role !== "assistant" || (live && message.content.length > LONG_ANSWER)) return make("div", { class: "text" }, message.content);
  return make("div", { class: "text rich" }, markdown(message.content));
}

function show() {
  byId("said").replaceChildren(...chat.messages.map((message, index) => shown(message, chat.told[index])));
  if (!chat.messages.length) byId("said").append(make("p", { class: "quiet" }, "Ask something. What is said stays in this browser."));
  controls();
}

function controls() {
  const call = waiting()[0];
  setText(byId("try-label"), call ? `Result of ${call.function.name}` : "Message");
  byId("try-stop").hidden = !running;
  byId("try-send").disabled = Boolean(running);
  byId("try-again").disabled = Boolean(running) || !chat.messages.length;
  byId("try-clear").disabled = Boolean(running);
}

// --- talking ---

// Calls of the last answer that have no result yet.
function waiting() {
  const at = chat.messages.findLastIndex((message) => message.role === "assistant");
  if (at < 0 || chat.messages.slice(at + 1).some((message) => message.role === "user")) return [];
  const done = new Set(chat.messages.slice(at + 1).map((message) => message.tool_call_id));
  return (chat.messages[at].tool_calls || []).filter((call) => !done.has(call.id));
}

function request() {
  const system = fields.system.value.trim();
  const sent = chat.messages.map(({ role, content, files: attached, tool_calls: made, tool_call_id: of }) => ({
    role, content: contentOf(content, attached), ...(made && made.length ? { tool_calls: made } : {}), ...(of ? { tool_call_id: of } : {}),
  }));
  const body = { model: byId("try-model").value, session_id: chat.id, messages: [...(system ? [{ role: "system", content: system }] : []), ...sent] };
  if (fields.tools.value.trim()) body.tools = JSON.parse(fields.tools.value);
  for (const [name, field] of Object.entries(SAMPLING)) if (fields[name].value) body[field] = Number(fields[name].value);
  return body;
}

function cost(result) {
  const report = (result.usage && result.usage.start_llm) || {};
  return [
    result.usage && `${number(result.usage.completion_tokens)} tokens`,
    result.rate && `${result.rate.toFixed(1)} tokens/s`,
    result.first !== null && `first after ${duration(result.first)}`,
    report.prompt && `${number(report.reused)} of ${number(report.prompt)} prompt tokens reused`,
  ].filter(Boolean).join(" · ");
}

async function run() {
  setText(byId("try-told"), "");
  let latest = null;
  const box = byId("said");
  running = new AbortController();
  show();
  try {
    const body = request();
    const spot = make("div", {});
    box.append(spot);
    let due = false;
    const result = await talk(body, running.signal, (message, rate) => {
      latest = message;
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        const open = spot.querySelector("details[open]") !== null;
        const now = shown(latest, rate ? `${rate.toFixed(1)} tokens/s` : "", true);
        spot.replaceChildren(now);
        const fold = now.querySelector("details");
        if (fold) fold.open = open;
        box.scrollTop = box.scrollHeight;
      });
    });
    chat.told[chat.messages.length] = cost(result);
    chat.messages.push(result.message);
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (latest && (latest.content || latest.reasoning_content)) {
      chat.told[chat.messages.length] = stopped ? "stopped" : `broke off: ${error.message}`;
      chat.messages.push({ ...latest, tool_calls: [] });
    } else if (!stopped) {
      setText(byId("try-told"), error instanceof SyntaxError ? `Tools are no JSON: ${error.message}` : error.message);
    }
  }
  running = null;
  keep();
  show();
  box.scrollTop = box.scrollHeight;
}

function say(words) {
  const [call, ...more] = waiting();
  if (call) chat.messages.push({ role: "tool", tool_call_id: call.id, content: words });
  else chat.messages.push({ role: "user", content: words, files: takeFiles() });
  keep();
  show();
  if (!more.length) run();
}

byId("try-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = byId("try-text").value;
  if (running || !(words.trim() || hasFiles())) return;
  byId("try-text").value = "";
  say(words);
});
byId("try-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("try-form").requestSubmit();
  }
});
byId("try-stop").addEventListener("click", () => running && running.abort());
byId("try-again").addEventListener("click", () => {
  if (running) return;
  while (chat.messages.length && chat.messages[chat.messages.length - 1].role === "assistant") {
    chat.messages.pop();
    delete chat.told[chat.messages.length];
  }
  if (chat.messages.length) run();
});
byId("try-clear").addEventListener("click", () => {
  if (running) return;
  chat = { ...chat, id: `page-${Date.now().toString(36)}`, messages: [], told: {} };
  keep();
  show();
  byId("try-text").focus();
});
byId("try-form").addEventListener("files", tellOfImages);
byId("try-model").addEventListener("change", () => {
  tellOfImages();
  chat.model = byId("try-model").value;
  keep();
});
for (const field of Object.values(fields)) field.addEventListener("change", keep);
load();
show();
