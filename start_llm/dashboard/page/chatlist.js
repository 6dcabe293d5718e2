// The list of conversations: search, rename, delete with undo, files. It shows one of them and knows nothing of answers.

import { chatOf, keepChat, listed, messagesOf, search, setDeleted } from "./chats.js";
import { byId, make, setText } from "./dom.js";
import { fromFile, toJson, toMarkdown } from "./portable.js";

const MOST_IMPORT = 200e6; // bytes
let open = () => {};
let current = () => null;
let asked = 0;

// `shows` is called with the conversation that is chosen, or with null where a new one is to begin, and returns when it is
// shown; `now` tells which one that is.
export function beginList(shows, now) {
  open = shows;
  current = now;
  showList();
}

export const nameOfChat = (chat) => chat.title || "Untitled";

export async function showList() {
  const mine = asked += 1;
  const text = byId("chats-search").value;
  const found = await search(text);
  if (mine !== asked) return; // a later search is on its way
  const shown = current();
  byId("chats-list").replaceChildren(...found.map((chat) => {
    const choose = make("button", { type: "button", class: "link", "data-id": chat.id, "aria-current": chat.id === shown?.id ? "true" : null }, nameOfChat(chat));
    return make("li", {}, choose);
  }));
  const count = text.trim() ? `${found.length} found` : "";
  setText(byId("chats-told"), found.length || text.trim() ? count : "No chat is kept yet.");
  for (const id of ["chat-rename", "chat-delete", "chat-json", "chat-markdown"]) byId(id).disabled = !chatOf(shown?.id);
  byId("chats-json").disabled = !listed().length;
}

// The keys that a list of many wants: arrows walk, Enter opens.
byId("chats-list").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const buttons = [...byId("chats-list").querySelectorAll("button")];
  const next = buttons[buttons.indexOf(document.activeElement) + step];
  if (next) next.focus();
  event.preventDefault();
});
byId("chats-list").addEventListener("click", (event) => {
  const id = event.target.closest("button")?.dataset.id;
  if (id) open(chatOf(id));
});
byId("chats-search").addEventListener("input", showList);
byId("chats-search").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") byId("chats-list").querySelector("button")?.focus();
});
byId("chats-show").addEventListener("click", () => {
  const shows = byId("chats").classList.toggle("shown");
  byId("chats-show").setAttribute("aria-expanded", String(shows));
  if (shows) byId("chats-search").focus();
});

// On a narrow screen the list makes room for the chat.
export function foldList() {
  byId("chats").classList.remove("shown");
  byId("chats-show").setAttribute("aria-expanded", "false");
}

// --- rename, delete ---

byId("chat-rename").addEventListener("click", () => {
  const [chat, button] = [current(), byId("chat-rename")];
  const field = make("input", { "aria-label": "Name of this chat", maxlength: 200 });
  field.value = chat.title;
  const done = async (keeps) => {
    form.remove();
    button.hidden = false;
    if (keeps && field.value.trim()) {
      Object.assign(chat, { title: field.value.trim(), named: true });
      await keepChat(chat);
    }
    await showList();
    button.focus();
  };
  const form = make("form", { class: "rename", onsubmit: (event) => {
    event.preventDefault();
    done(true);
  } }, field, make("button", {}, "Keep"));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") done(false);
  });
  button.hidden = true;
  button.before(form);
  field.focus();
  field.select();
});

byId("chat-delete").addEventListener("click", async () => {
  const chat = current();
  await setDeleted(chat, true);
  const undo = make("button", { type: "button", onclick: async () => {
    await setDeleted(chat, false);
    byId("chats-undo").replaceChildren();
    open(chat);
  } }, "Undo");
  byId("chats-undo").replaceChildren(`“${nameOfChat(chat)}” was deleted. `, undo);
  await open(listed()[0] || null);
  undo.focus();
});

// --- files ---

function download(name, kind, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const fileName = (chat) => (nameOfChat(chat).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "chat");

byId("chat-json").addEventListener("click", async () => {
  const chat = current();
  download(`${fileName(chat)}.json`, "application/json", toJson([[chat, await messagesOf(chat)]]));
});
byId("chat-markdown").addEventListener("click", async () => {
  const chat = current();
  download(`${fileName(chat)}.md`, "text/markdown", toMarkdown(chat, await messagesOf(chat)));
});
byId("chats-json").addEventListener("click", async () => {
  const all = [];
  for (const chat of listed()) all.push([chat, await messagesOf(chat)]);
  download("start_llm-chats.json", "application/json", toJson(all));
});
byId("chats-import").addEventListener("click", () => byId("chats-file").click());
byId("chats-file").addEventListener("change", async () => {
  const files = [...byId("chats-file").files];
  byId("chats-file").value = "";
  let [last, count] = [null, 0];
  for (const file of files) {
    try {
      if (file.size > MOST_IMPORT) throw new Error("It is larger than 200 MB.");
      for (const [chat, rows] of fromFile(await file.text())) {
        await keepChat(chat, rows);
        last = chat;
        count += 1;
      }
    } catch (error) {
      setText(byId("chats-note"), `${file.name} was not imported. ${error.message}`);
      return;
    }
  }
  setText(byId("chats-note"), "");
  if (last) open(last);
  await showList();
  setText(byId("chats-told"), `${count} imported.`);
});
