// A chat with a model of this server: what is said, edited, asked again and stopped. Chats are kept in this browser.

import { contentOf, hasFiles, hasImages, takeFiles } from "./attach.js";
import { beginList, foldList, showList } from "./chatlist.js";
import { branches, chatOf, dropMessage, endOf, isLost, keepChat, keepComing, listed, messagesOf, newChat, newId, onOthers, openChats, pathTo, tab } from "./chats.js";
import { byId, make, setText } from "./dom.js";
import { json } from "./net.js";
import { cost, editor, shown, waitingFor } from "./said.js";
import { talk } from "./talk.js";

const OPEN = "start_llm_chat"; // which chat this tab shows
const KEEP_MS = 500; // between two times that a coming answer is kept
const NEAR_END = 48; // pixels; who has scrolled up further reads, and is not taken along
const SAMPLING = { most: "max_tokens", temperature: "temperature", top_p: "top_p", seed: "seed" };
const fields = {
  system: byId("try-system"), tools: byId("try-tools"), most: byId("try-most"), temperature: byId("try-temperature"),
  top_p: byId("try-top-p"), seed: byId("try-seed"),
};
const box = byId("said");
const runs = new Map(); // conversation -> its answer that is coming
let chat = newChat();
let messages = new Map();
let models = new Map();
let editing = "";

const path = () => pathTo(messages, chat.head);
const running = () => runs.get(chat.id);

// --- which chat ---

async function open(chosen, byHand = true) {
  chat = chosen || newChat(settings());
  messages = await messagesOf(chat);
  editing = "";
  for (const [name, field] of Object.entries(fields)) field.value = chat.settings[name] ?? "";
  chooseModel();
  try {
    sessionStorage.setItem(OPEN, chat.id);
  } catch { /* forbidden */ }
  if (byHand) {
    foldList();
    setText(byId("try-told"), "");
    byId("try-text").focus();
  }
  show(true);
  await showList();
}

function settings() {
  const values = Object.entries(fields).map(([name, field]) => [name, field.value]);
  return { ...Object.fromEntries(values), model: byId("try-model").value };
}

// What could not be kept is said; the chat goes on.
async function keep(changed = [], of = chat) {
  try {
    await keepChat(of, changed);
  } catch (error) {
    setText(byId("try-told"), error.message);
  }
}

async function changed(id) {
  if (id === chat.id) {
    const other = chatOf(id);
    if (!other) return open(listed()[0] || null, false);
    const follows = pathTo(messages, other.head).some((message) => message.id === chat.head);
    if (!follows) other.head = chat.head; // another branch is looked at here
    chat = other;
    if (!running() && !editing) show();
  }
  return showList();
}

// --- the model ---

export async function openTry() {
  try {
    const { data } = await json("/v1/models");
    const writers = data.filter((model) => !model.details?.task && model.details?.kind !== "embedding");
    byId("try-model").replaceChildren(make("option", { value: "default" }, `${data[0]?.id ?? "the model"} (main model)`),
      ...writers.map((model) => make("option", { value: model.id }, model.id, model.details?.state === "ready" ? " (loaded)" : "")));
    models = new Map(writers.map((model) => [model.id, model]));
    chooseModel();
  } catch { /* the main model can be asked all the same */ }
}

function chooseModel() {
  byId("try-model").value = models.has(chat.settings.model) ? chat.settings.model : "default";
  tellOfImages();
}

// What becomes of an image where the chosen model does not see it.
function tellOfImages() {
  const model = models.get(byId("try-model").value) || models.values().next().value; // the main one is listed first
  const blind = hasImages() && model && !model.capabilities.vision;
  const what = model?.capabilities.images === "reject" ? "and refuses them" : "and is only told that there was one";
  setText(byId("try-images-note"), blind ? `${model.id} does not see images ${what}.` : "");
}

// --- showing ---

const atEnd = () => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;

function show(toEnd = atEnd()) {
  const [said, run] = [path(), running()];
  box.replaceChildren(...said.filter((message) => message !== run?.message).map(article));
  if (run) box.append(run.spot);
  box.setAttribute("aria-busy", String(Boolean(run)));
  if (!said.length) box.append(make("p", { class: "quiet" }, "Ask something. What is said stays in this browser."));
  controls(said);
  if (toEnd) box.scrollTop = box.scrollHeight;
}

function article(message) {
  if (message.id === editing) return editor(message, (text) => edited(message, text));
  if (isLost(message)) Object.assign(message, { state: "failed", told: "broke off: the page was left" });
  const others = branches(messages, message);
  if (running()) return shown(message, { branch: null });
  return shown(message, {
    branch: [others.indexOf(message), others.length],
    go: (at) => go(others[at]),
    edit: message.role === "tool" ? null : () => beginEdit(message),
    retry: ["failed", "stopped"].includes(message.state) ? () => again(message) : null,
  }, message.state === "coming");
}

function go(message) {
  chat.head = endOf(messages, message.id);
  keep();
  show(false);
  const at = path().indexOf(message);
  box.children[at]?.querySelector(".branches button:enabled")?.focus();
}

function controls(said) {
  const call = waiting(said)[0];
  setText(byId("try-label"), call ? `Result of ${call.function.name}` : "Message");
  byId("try-stop").hidden = !running();
  byId("try-send").disabled = Boolean(running());
  byId("try-again").disabled = Boolean(running()) || !said.length;
  byId("try-clear").disabled = !said.length;
}

// --- talking ---

// Calls of the last answer that have no result yet.
function waiting(said) {
  const at = said.findLastIndex((message) => message.role === "assistant");
  if (at < 0 || said.slice(at + 1).some((message) => message.role === "user")) return [];
  const done = new Set(said.slice(at + 1).map((message) => message.tool_call_id));
  return (said[at].tool_calls || []).filter((call) => !done.has(call.id));
}

function request(said) {
  const system = fields.system.value.trim();
  const told = said.filter((message) => message.role !== "assistant" || message.content || message.tool_calls?.length);
  const sent = told.map(({ role, content, files: attached, tool_calls: made, tool_call_id: of }) => ({
    role, content: contentOf(content, attached), ...(made && made.length ? { tool_calls: made } : {}), ...(of ? { tool_call_id: of } : {}),
  }));
  const body = { model: byId("try-model").value, session_id: chat.id, messages: [...(system ? [{ role: "system", content: system }] : []), ...sent] };
  if (fields.tools.value.trim()) body.tools = JSON.parse(fields.tools.value);
  for (const [name, field] of Object.entries(SAMPLING)) if (fields[name].value) body[field] = Number(fields[name].value);
  return body;
}

// Asks for the answer to the message that is last.
async function run() {
  setText(byId("try-told"), "");
  let body;
  try {
    body = request(path());
  } catch (error) {
    setText(byId("try-told"), `Tools are no JSON: ${error.message}`);
    return;
  }
  const asked = chat;
  const message = { chat: chat.id, id: newId(), parent: chat.head, time: Date.now(), role: "assistant", content: "", state: "coming", tab, alive: Date.now() };
  const now = { message, abort: new AbortController(), spot: make("div", { class: "coming" }), began: performance.now(), row: null, rate: null, due: false };
  runs.set(asked.id, now);
  asked.head = message.id;
  asked.updated = Date.now();
  await keep([message]);
  show(true);
  showList();
  draw(asked, now);
  const ticks = setInterval(() => draw(asked, now), 1000);
  try {
    const result = await talk(body, now.abort.signal, (latest, rate) => {
      Object.assign(message, latest);
      now.rate = rate;
      draw(asked, now);
      if (Date.now() - message.alive > KEEP_MS) keepComing(asked, message).catch(() => {});
    });
    Object.assign(message, result.message, { state: "", told: cost(result) });
  } catch (error) {
    const stopped = error.name === "AbortError";
    Object.assign(message, { state: stopped ? "stopped" : "failed", told: stopped ? "stopped" : `broke off: ${error.message}`, tool_calls: [] });
  }
  clearInterval(ticks);
  runs.delete(asked.id);
  await keep([message], asked);
  if (asked.id === chat.id) show();
}

// The answer that is coming, at most once a frame. What is open stays open, and the focus stays where it is.
function draw(asked, now) {
  if (now.due || asked.id !== chat.id) return;
  now.due = true;
  requestAnimationFrame(() => {
    now.due = false;
    if (running() !== now) return;
    const [follows, open] = [atEnd(), now.spot.querySelector("details[open]") !== null];
    const { message } = now;
    const begun = message.content || message.reasoning_content || message.tool_calls?.length;
    const told = begun ? (now.rate ? `${now.rate.toFixed(1)} tokens/s` : "") : waitingFor(now.row, (performance.now() - now.began) / 1000);
    now.spot.replaceChildren(shown({ ...message, told }, {}, true));
    const fold = now.spot.querySelector("details");
    if (fold) fold.open = open;
    if (follows) box.scrollTop = box.scrollHeight;
  });
}

// What the server tells of its running requests, at most four times a second.
document.addEventListener("now", ({ detail: rows }) => {
  for (const [id, now] of runs) {
    now.row = rows.findLast((row) => row.session === id) || now.row;
    draw({ id }, now);
  }
});

function add(message) {
  const row = { ...message, chat: chat.id, id: newId(), parent: message.parent ?? chat.head, time: Date.now() };
  chat.head = row.id;
  chat.updated = row.time;
  chat.settings = settings();
  return row;
}

async function say(words) {
  const [call, ...more] = waiting(path());
  await keep([add(call ? { role: "tool", tool_call_id: call.id, content: words } : { role: "user", content: words, files: takeFiles() })]);
  if (more.length) show(true);
  else await run();
}

function beginEdit(message) {
  editing = message.id;
  show(false);
  box.querySelector(".editor textarea").focus();
}

// The message as it was stays, as a branch.
async function edited(message, text) {
  editing = "";
  if (text === null || (text === message.content && message.role === "assistant") || !text.trim()) {
    show(false);
    byId("try-text").focus();
    return;
  }
  const { role, files, parent } = message;
  await keep([add({ role, content: text, files, parent, ...(role === "assistant" ? { told: "edited" } : {}) })]);
  if (role === "user") await run();
  else show();
  byId("try-text").focus();
}

// Another answer in the place of this one, which stays as a branch if there is anything in it.
async function again(message) {
  chat.head = message.parent;
  if (!message.content && !message.reasoning_content && message.state) await dropMessage(chat, message);
  await run();
}

byId("try-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = byId("try-text").value;
  if (running() || !(words.trim() || hasFiles())) return;
  byId("try-text").value = "";
  say(words);
});
byId("try-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("try-form").requestSubmit();
  }
});
byId("try-stop").addEventListener("click", () => {
  running()?.abort.abort();
  byId("try-text").focus();
});
byId("try-again").addEventListener("click", () => {
  if (running()) return;
  const last = path().at(-1);
  if (last?.role === "assistant") again(last);
  else if (last) run();
});
byId("try-clear").addEventListener("click", () => open(null));
byId("try-form").addEventListener("files", tellOfImages);
byId("try-model").addEventListener("change", tellOfImages);
for (const field of [...Object.values(fields), byId("try-model")]) {
  field.addEventListener("change", () => {
    chat.settings = settings();
    if (chatOf(chat.id)) keep();
  });
}

await openChats();
onOthers(changed);
beginList(open, () => chat);
let last = "";
try {
  last = sessionStorage.getItem(OPEN) || "";
} catch { /* forbidden */ }
await open(chatOf(last) || listed()[0] || null, false);
