// The conversations of this browser, in its own database (IndexedDB). Knows nothing of the page.
//
// A conversation is a tree: each message names its parent, and `head` of the conversation is the message that is shown
// last. Every message is a row of its own, so that two tabs that write into one conversation lose nothing: what both said
// stands side by side, as branches. Where the browser gives no database, all lasts as long as the page.

const NAME = "start_llm";
const STORES = { chats: "id", messages: ["chat", "id"], words: "id" };
const EARLIER = "start_llm_try"; // where the page kept its one conversation before
const TITLE = 60; // characters
const UNDO_MS = 60_000; // as long a conversation that was deleted can come back
const SILENT_MS = 60_000; // an answer of another tab that was silent for longer has broken off
const TAB = "start_llm_tab";

let database = null;
let reading = null; // what fills `words`: a search that comes meanwhile waits for it, and does not read again
const chats = new Map();
const words = new Map(); // conversation -> its text in small letters
const opened = new Map(); // conversation -> its messages, by id
let before = ""; // what this tab was called before it was reloaded
const others = globalThis.BroadcastChannel ? new BroadcastChannel(NAME) : null;

export const newId = () => `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;

export const tab = newId();
try {
  before = sessionStorage.getItem(TAB) || "";
  sessionStorage.setItem(TAB, tab);
} catch { /* forbidden */ }

// --- the database ---

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function connect() {
  return new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => {
      for (const [store, keyPath] of Object.entries(STORES)) request.result.createObjectStore(store, { keyPath });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null); // forbidden, as in some private windows
    request.onblocked = () => resolve(null);
  });
}

const all = async (store, range) => (database ? result(database.transaction(store).objectStore(store).getAll(range)) : []);
const ofChat = (id) => IDBKeyRange.bound([id], [id, []]);

// Rows to write and to remove, all of them or none. Raises an Error with a sentence where the browser keeps no more.
function change(rows, gone = []) {
  if (!database) return Promise.resolve();
  return new Promise((resolve, reject) => {
    const work = database.transaction(Object.keys(STORES), "readwrite");
    for (const [store, row] of rows) work.objectStore(store).put(row);
    for (const [store, key] of gone) work.objectStore(store).delete(key);
    work.oncomplete = resolve;
    const failed = () => reject(new Error(`This browser keeps no more: ${work.error?.message || "its database is closed"}. Delete or export chats.`));
    work.onabort = failed;
    work.onerror = failed;
  });
}

// --- conversations ---

// Reads the list. To be awaited before all else.
export async function openChats() {
  if (database) return;
  database = await connect();
  if (database) database.onversionchange = disconnect; // somebody clears it
  for (const chat of await all("chats")) chats.set(chat.id, chat);
  const late = Date.now() - UNDO_MS;
  for (const chat of [...chats.values()].filter((each) => each.deleted && each.deleted < late)) await forget(chat);
  await takeEarlier();
  setTimeout(readWords, 500); // the first search need not wait for it
}

// From now on all lasts as long as the page.
function disconnect() {
  database?.close();
  database = null;
}

function readWords() {
  reading ??= all("words").then((rows) => {
    for (const row of rows) if (!words.has(row.id)) words.set(row.id, row.text); // what was said meanwhile is newer
  }, () => {
    reading = null; // the database was closed meanwhile
  });
  return reading;
}

// Newest first.
export const listed = () => [...chats.values()].filter((chat) => !chat.deleted).sort((one, other) => other.updated - one.updated);

export const chatOf = (id) => (chats.get(id)?.deleted ? undefined : chats.get(id));

// One that is not kept before something is said in it.
export function newChat(settings = {}) {
  return { id: `page-${newId()}`, title: "", named: false, created: Date.now(), updated: Date.now(), head: "", settings };
}

export async function messagesOf(chat) {
  if (!opened.has(chat.id)) {
    const rows = chats.has(chat.id) ? await all("messages", database && ofChat(chat.id)) : [];
    opened.set(chat.id, new Map(rows.map((row) => [row.id, row])));
  }
  return opened.get(chat.id);
}

// Writes a conversation, with messages of it that are new or changed.
export async function keepChat(chat, changed = []) {
  const messages = await messagesOf(chat);
  for (const message of changed) messages.set(message.id, message);
  if (!chat.named) chat.title = titleOf(messages) || chat.title;
  chats.set(chat.id, chat);
  const rows = [["chats", chat], ...changed.map((message) => ["messages", message])];
  if (changed.some((message) => message.state !== "coming") || !messages.size) {
    const text = textOf(messages);
    words.set(chat.id, text);
    rows.push(["words", { id: chat.id, text }]);
  }
  await change(rows);
  tell(chat);
}

// An answer that still comes.
export async function keepComing(chat, message) {
  message.alive = Date.now();
  await change([["messages", message]]);
  tell(chat);
}

// Whether the answer came in a page that is gone: this tab before it was reloaded, or one that was silent for long.
export const isLost = (message) => message.state === "coming" && message.tab !== tab
  && (message.tab === before || Date.now() - message.alive > SILENT_MS);

export async function dropMessage(chat, message) {
  (await messagesOf(chat)).delete(message.id);
  await change([], [["messages", [chat.id, message.id]]]);
  tell(chat);
}

// It is out of the list, and can come back until the page is opened anew.
export async function setDeleted(chat, deleted) {
  chat.deleted = deleted && Date.now();
  chats.set(chat.id, chat);
  await change([["chats", chat]]);
  tell(chat); // other tabs read what is written
}

async function forget(chat) {
  chats.delete(chat.id);
  opened.delete(chat.id);
  words.delete(chat.id);
  await change([], [["chats", chat.id], ["words", chat.id], ["messages", database && ofChat(chat.id)]]);
}

function titleOf(messages) {
  const first = [...messages.values()].sort(byTime).find((message) => message.role === "user");
  const line = (first?.content || first?.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > TITLE ? `${line.slice(0, TITLE).trim()}…` : line;
}

// --- search ---

const textOf = (messages) => [...messages.values()].map((message) => message.content || "").join("\n").toLowerCase();

// Conversations in which all of the words stand, in the title or in a message of any branch; newest first.
export async function search(text) {
  const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return listed();
  await readWords();
  return listed().filter((chat) => {
    const [title, said] = [chat.title.toLowerCase(), words.get(chat.id) || ""];
    return wanted.every((word) => title.includes(word) || said.includes(word));
  });
}

// --- other tabs ---

const tell = (chat) => others?.postMessage(chat.id);

// `changed` is called with the id of a conversation that another tab has written to.
export function onOthers(changed) {
  if (!others || !database) return;
  others.onmessage = async ({ data: id }) => {
    if (!database) return;
    const [row, text] = await Promise.all(["chats", "words"].map((store) => result(database.transaction(store).objectStore(store).get(id))));
    if (row) chats.set(id, row); else chats.delete(id);
    if (text) words.set(id, text.text);
    if (opened.has(id)) {
      const rows = await all("messages", ofChat(id));
      const messages = opened.get(id);
      for (const message of rows) if (messages.get(message.id)?.tab !== tab) messages.set(message.id, message);
    }
    changed(id);
  };
}

// --- the tree ---

export const byTime = (one, other) => one.time - other.time || (one.id < other.id ? -1 : 1);

// The messages from the first one to `id`. A file that was imported may lead in a circle: each is in it once.
export function pathTo(messages, id) {
  const path = new Set();
  for (let at = messages.get(id); at && !path.has(at); at = messages.get(at.parent)) path.add(at);
  return [...path].reverse();
}

// The branches at a message: itself and those that stand in its place.
export const branches = (messages, message) => [...messages.values()].filter((other) => other.parent === message.parent).sort(byTime);

// The newest end behind a message.
export function endOf(messages, id) {
  const children = new Map();
  for (const message of [...messages.values()].sort(byTime)) children.set(message.parent, message.id);
  let end = id;
  for (let steps = 0; children.has(end) && steps < messages.size; steps += 1) end = children.get(end);
  return end;
}

// --- what was kept before there was a list ---

async function takeEarlier() {
  try {
    const kept = JSON.parse(localStorage.getItem(EARLIER));
    localStorage.removeItem(EARLIER);
    if (!Array.isArray(kept?.messages) || !kept.messages.length) return;
    const { messages, told, id, ...settings } = kept;
    const chat = newChat(settings);
    const rows = chained(chat, messages.map((message, at) => ({ ...message, told: told?.[at] || "" })));
    await keepChat(chat, rows);
  } catch { /* not ours, or forbidden */ }
}

// Messages one behind the other, as rows of a conversation.
export function chained(chat, messages) {
  let parent = "";
  return messages.map((message, at) => {
    const row = { ...message, chat: chat.id, id: newId(), parent, time: Date.now() + at };
    parent = chat.head = row.id;
    return row;
  });
}
