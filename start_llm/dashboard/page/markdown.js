// Markdown of answers as elements of the page. What a model says is not trusted: there are two walls.
// First, HTML in an answer is shown as the text that it is. Second, DOMPurify lets only the tags below pass.

import { marked } from "./marked.esm.js";
import "./purify.min.js";
import { copier, make } from "./dom.js";

const MOST_MS = 400; // for one text; some texts cost the square of their length, and the page stands still meanwhile
const RULES = [
  "space", "code", "fences", "heading", "hr", "blockquote", "list", "html", "def", "table", "lheading", "paragraph", "text",
  "escape", "tag", "link", "reflink", "emStrong", "codespan", "br", "del", "autolink", "url", "inlineText",
];
const LONG_GAP = /[ \t]{2000}/; // one rule of marked alone takes the square of such a run
let deadline = 0;

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ATTRIBUTES = ["href", "align", "start", "class"];
const ADDRESSES = /^(?:https?|mailto):/i;

class TooSlow extends Error {}

// Before each rule that marked tries: is there time left? `false` lets marked go on with its own rule.
function inTime() {
  if (performance.now() > deadline) throw new TooSlow();
  return false;
}

marked.use({
  gfm: true,
  breaks: true,
  tokenizer: Object.fromEntries(RULES.map((rule) => [rule, inTime])),
  renderer: {
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image: ({ href, text }) => escaped(`[image: ${text || href}] ${href}`), // the page fetches nothing from elsewhere
  },
});

function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

// A DocumentFragment; an element with the text as it is, where reading it takes too long or marked gives up.
export function markdown(text) {
  deadline = performance.now() + MOST_MS;
  try {
    if (LONG_GAP.test(text)) throw new TooSlow();
    return sanitised(marked.parse(text));
  } catch (error) {
    if (!(error instanceof TooSlow)) console.warn("this answer is shown as plain text:", error.message);
    return make("div", { class: "unread" }, text);
  }
}

export function sanitised(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOWED_URI_REGEXP: ADDRESSES, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) code.parentElement.replaceWith(codeBlock(code));
  for (const element of fragment.querySelectorAll("[class]")) if (!element.closest(".code, .scroll")) element.removeAttribute("class");
  return fragment;
}

// A fenced block with its language and a button that copies it.
function codeBlock(code) {
  const language = /^language-([\w+#.-]{1,20})$/.exec(code.className)?.[1] || "";
  const text = code.textContent;
  return make("div", { class: "code" },
    make("p", { class: "small quiet" }, language, copier(text.replace(/\n$/, ""), `the ${language || "code"} block`)),
    make("pre", { tabindex: 0, "aria-label": `${language || "Code"} block`, role: "region" }, make("code", {}, text)));
}
