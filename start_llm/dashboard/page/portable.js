// Conversations as files: JSON with all branches, Markdown with the one that is shown; and back. Files are not trusted:
// what is taken from one is text of known fields, and images that are data. Knows nothing of the page.

import { chained, newChat, newId, pathTo } from "./chats.js";

const FORMAT = "start_llm chats";
const ROLES = ["user", "assistant", "tool"];
const TEXTS = ["content", "reasoning_content", "tool_call_id", "told"];
const SETTINGS = ["model", "system", "tools", "most", "temperature", "top_p", "seed"];
const PDF = /^data:application\/pdf;base64,[A-Za-z0-9+/=]+$/;
const IMAGE = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;
const MARK = /^<!-- (user|assistant|tool|reasoning) -->$/;
const HEADINGS = { user: "You", assistant: "Model", tool: "Result", reasoning: "Reasoning" };

// `all`: [conversation, its messages] pairs.
export function toJson(all) {
  const chats = all.map(([chat, messages]) => ({
    title: chat.title, named: chat.named, created: chat.created, updated: chat.updated, head: chat.head, settings: chat.settings,
    messages: [...messages.values()].map(({ chat: _, tab, alive, ...message }) => message),
  }));
  return JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);
}

// A line of an answer that looks like one of our marks is told from them by a backslash.
const quoted = (text) => text.replace(/^(\\*<!-- (?:user|assistant|tool|reasoning) -->)$/gm, "\\$1");
const unquoted = (text) => text.replace(/^\\(\\*<!-- (?:user|assistant|tool|reasoning) -->)$/gm, "$1");

export function toMarkdown(chat, messages) {
  const part = (role, text) => `<!-- ${role} -->\n**${HEADINGS[role]}**\n\n${quoted(text)}\n`;
  const parts = pathTo(messages, chat.head).flatMap((message) => {
    const calls = (message.tool_calls || []).map((call) => `\n\n\`\`\`json\n${call.function.name}(${call.function.arguments})\n\`\`\``);
    const files = (message.files || []).map((file) => `\n\n[file: ${file.name}]`);
    const text = (message.content || "") + [...files, ...calls].join("");
    return [message.reasoning_content ? part("reasoning", message.reasoning_content) : "", part(message.role, text)].filter(Boolean);
  });
  return `# ${chat.title.replace(/\n/g, " ")}\n\n${parts.join("\n")}`;
}

// [conversation, its messages as rows] pairs, with names of their own. Raises an Error with a sentence.
export function fromFile(text) {
  const found = text.trimStart().startsWith("{") || text.trimStart().startsWith("[") ? fromJson(text) : fromMarkdown(text);
  if (!found.length) throw new Error("There is no conversation in it.");
  return found;
}

function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`It is no JSON: ${error.message}`);
  }
  if (data?.format === FORMAT && Array.isArray(data.chats)) return data.chats.map(chatFrom).filter(([, rows]) => rows.length);
  const messages = Array.isArray(data) ? data : data.messages; // a list as the chat API takes it
  if (Array.isArray(messages)) return [plainChat("", messages.map((message) => message && messageFrom(message)).filter(Boolean))].filter(([, rows]) => rows.length);
  throw new Error("It is neither an export of this page nor a list of messages.");
}

function fromMarkdown(text) {
  const [lines, messages] = [text.split("\n"), []];
  const title = /^# (.*)$/.exec(lines[0])?.[1] || "";
  let [role, part, reasoning] = ["", [], ""];
  const close = () => {
    const said = unquoted(part.join("\n")).trim();
    if (role === "reasoning") reasoning = said;
    else if (role) messages.push(messageFrom({ role, content: said, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
    if (role !== "reasoning") reasoning = "";
    part = [];
  };
  for (const line of lines) {
    const mark = MARK.exec(line);
    if (mark) {
      close();
      role = mark[1];
    } else if (part.length || line !== `**${HEADINGS[role]}**`) {
      part.push(line);
    }
  }
  close();
  if (!messages.length) throw new Error("It has none of the marks of an export, such as <!-- user -->.");
  return [plainChat(title, messages)];
}

function plainChat(title, messages) {
  const chat = { ...newChat(), title, named: Boolean(title) };
  return [chat, chained(chat, messages)];
}

function chatFrom(data) {
  const chat = { ...newChat(), title: String(data?.title || ""), named: data?.named === true };
  for (const name of ["created", "updated"]) if (Number.isFinite(data?.[name])) chat[name] = data[name];
  for (const name of SETTINGS) if (typeof data?.settings?.[name] === "string") chat.settings = { ...chat.settings, [name]: data.settings[name] };
  const names = new Map();
  const rows = [];
  for (const item of Array.isArray(data?.messages) ? data.messages : []) {
    const message = item && messageFrom(item);
    if (!message) continue;
    const id = newId();
    names.set(String(item.id), id);
    rows.push({ ...message, chat: chat.id, id, parent: String(item.parent || ""), time: Number.isFinite(item.time) ? item.time : 0 });
  }
  for (const row of rows) row.parent = names.get(row.parent) || "";
  chat.head = names.get(String(data?.head)) || rows.at(-1)?.id || "";
  return [chat, rows];
}

function messageFrom(item) {
  if (!ROLES.includes(item.role)) return null;
  const message = { role: item.role, content: "" };
  const content = Array.isArray(item.content) ? item.content.map((part) => part?.text).filter((part) => typeof part === "string").join("\n\n") : item.content;
  for (const name of TEXTS) {
    const value = name === "content" ? content : item[name];
    if (typeof value === "string") message[name] = value;
  }
  if (["stopped", "failed"].includes(item.state)) message.state = item.state;
  message.tool_calls = (Array.isArray(item.tool_calls) ? item.tool_calls : []).map((call) => ({
    id: String(call?.id), type: "function", function: { name: String(call?.function?.name), arguments: String(call?.function?.arguments) },
  }));
  const files = (Array.isArray(item.files) ? item.files : []).map(fileFrom).filter(Boolean);
  if (files.length) message.files = files;
  return message;
}

function fileFrom(file) {
  const known = { name: String(file?.name), size: Number(file?.size) || 0 };
  if (typeof file?.image === "string") return IMAGE.test(file.image) ? { ...known, image: file.image } : null;
  if (typeof file?.pdf === "string") return PDF.test(file.pdf) ? { ...known, pdf: file.pdf } : null;
  return typeof file?.text === "string" ? { ...known, text: file.text } : null;
}
