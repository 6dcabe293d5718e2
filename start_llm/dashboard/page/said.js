// How the messages of a conversation look. Knows nothing of how they are kept or made.

import { chip } from "./attach.js";
import { copier, duration, make, number } from "./dom.js";
import { markdown, whenIdle } from "./markdown.js";

const LONG_ANSWER = 20_000; // characters; a longer one is shown as plain text until it is whole
const WHO = { user: "You", assistant: "Model", tool: "Result" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

function reasoning(message, live) {
  if (!message.reasoning_content) return null;
  return make("details", { class: "reasoning" }, make("summary", {}, live && !message.content ? "thinking" : "reasoning"),
    make("div", { class: "text" }, message.reasoning_content));
}

const calls = (message) => (message.tool_calls || []).map((call) =>
  make("div", { class: "call" }, make("b", {}, call.function.name), make("pre", {}, pretty(call.function.arguments))));

function words(message, live) {
  if (!message.content) return null;
  if (message.role !== "assistant" || (live && message.content.length > LONG_ANSWER)) return make("div", { class: "text" }, message.content);
  const box = make("div", { class: "text rich" }, markdown(message.content));
  if (!live && box.querySelector(":scope > .unread")) whenIdle(message.content, box);
  return box;
}

function button(text, label, act, more = {}) {
  return make("button", { type: "button", class: "copy", "aria-label": label, onclick: act, ...more }, text);
}

// "2 of 3" between two arrows, where a message has been said in several ways.
function switcher(at, count, go) {
  if (count < 2) return [];
  return [make("span", { class: "branches", role: "group", "aria-label": "Versions of this message" },
    button("‹", "Earlier version", () => go(at - 1), { disabled: at === 0 }), ` ${at + 1} of ${count} `,
    button("›", "Later version", () => go(at + 1), { disabled: at === count - 1 }))];
}

function ending(message) {
  if (message.state === "failed") return make("span", { class: "bad" }, message.told);
  return message.told || "";
}

// One message. `can`: {branch: [index, count], go, edit, retry}, each where it is possible now.
export function shown(message, can = {}, live = false) {
  const copy = message.role === "assistant" && message.content && !live ? copier(message.content, "this answer") : null;
  const parts = [ending(message), copy,
    can.edit ? button("Edit", message.role === "user" ? "Edit this message" : "Edit this answer", can.edit) : null,
    can.retry ? button("Retry", "Retry this answer", can.retry, { class: "copy retry" }) : null,
    ...(can.branch ? switcher(...can.branch, can.go) : [])].filter(Boolean);
  return make("article", { class: `said ${message.role}`, "aria-label": WHO[message.role] },
    make("h3", {}, WHO[message.role]), reasoning(message, live), words(message, live), ...calls(message),
    ...(message.files || []).map(chip),
    parts.length ? make("p", { class: "small quiet acts" }, ...parts.flatMap((part) => [part, " "])) : null);
}

// A form in the place of a message's words; `done` is called with the new words, or with null.
export function editor(message, done) {
  const field = make("textarea", { rows: Math.min(16, message.content.split("\n").length + 1), "aria-label": "Edited message" });
  field.value = message.content;
  const form = make("form", { class: "editor", onsubmit: (event) => {
    event.preventDefault();
    done(field.value);
  } }, field, make("p", { class: "buttons" }, make("button", { class: "main" }, message.role === "user" ? "Send" : "Save"),
    make("button", { type: "button", onclick: () => done(null) }, "Cancel")));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") done(null);
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}

// What happens before the first word, by the server's own counts; `row` is null until the server tells of the request.
export function waitingFor(row, seconds) {
  if (!row) return seconds < 1 ? "sent" : `sent ${Math.round(seconds)} s ago`;
  if (row.state === "queued") return `waits for its turn since ${Math.round(row.seconds)} s`;
  if (row.state !== "prefill") return "answering";
  const left = row.left === null ? "" : `, about ${row.left < 100 ? `${Math.max(1, Math.round(row.left))} s` : duration(row.left)}`;
  return `reading ${number(row.done)} of ${number(row.total)} tokens${left}${row.reused ? `; ${number(row.reused)} reused` : ""}`;
}

// What an answer has cost, in a line.
export function cost(result) {
  const report = (result.usage && result.usage.start_llm) || {};
  return [
    result.usage && `${number(result.usage.completion_tokens)} tokens`,
    result.rate && `${result.rate.toFixed(1)} tokens/s`,
    result.first !== null && `first after ${duration(result.first)}`,
    report.prompt && `${number(report.reused)} of ${number(report.prompt)} tokens reused`,
    result.finish === "length" && "cut at the most tokens",
  ].filter(Boolean).join(" · ");
}
