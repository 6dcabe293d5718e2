// Markdown of answers as elements of the page. What a model says is not trusted: there are two walls.
// First, HTML in an answer is shown as the text that it is. Second, DOMPurify lets only the tags below pass.

import "./purify.min.js";
import { copier, make } from "./dom.js";
import { coloured } from "./highlight.js";
import { html, TooSlow } from "./marks.js";
import { showMaths } from "./maths.js";

const MOST_MS = 400; // for one text; some texts cost the square of their length, and the page stands still meanwhile
const MOST_IDLE_MS = 15_000; // for one that is read by the worker, where nothing stands still
const MOST_HTML = 2_000_000; // characters that the worker may bring
const LONG_GAP = /[ \t]{2000}/; // one rule of marked alone takes the square of such a run

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ATTRIBUTES = ["href", "align", "start", "class"];
const ADDRESSES = /^(?:https?|mailto):/i;
let queue = Promise.resolve();

// A DocumentFragment; an element with the text as it is, where reading it takes too long or marked gives up.
export function markdown(text) {
  try {
    if (LONG_GAP.test(text)) throw new TooSlow();
    return sanitised(html(text, MOST_MS));
  } catch (error) {
    if (!(error instanceof TooSlow)) console.warn("this answer is shown as plain text:", error.message);
    return make("div", { class: "unread" }, text);
  }
}

// Fills the box with the Markdown of a text that was too slow, once a worker has read it; one text at a time.
export function whenIdle(text, box) {
  queue = queue.then(async () => {
    const found = box.isConnected ? await readByWorker(text) : null;
    if (found && found.length <= MOST_HTML && box.isConnected) box.replaceChildren(sanitised(found));
  }).catch((error) => console.warn("this answer stays plain text:", error.message));
}

function readByWorker(text) {
  return new Promise((resolve) => {
    const worker = new Worker("/page/reader.js", { type: "module" });
    const end = (found) => {
      clearTimeout(limit);
      worker.terminate();
      resolve(found);
    };
    const limit = setTimeout(end, MOST_IDLE_MS + 2000, null); // one rule alone may take longer than all should
    worker.onmessage = ({ data }) => end(data);
    worker.onerror = () => end(null);
    worker.postMessage({ text, ms: MOST_IDLE_MS });
  });
}

export function sanitised(text) {
  const fragment = globalThis.DOMPurify.sanitize(text, {
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
  const formulas = [...fragment.querySelectorAll("code.maths")].map((element) => ({ element, display: element.classList.contains("display") }));
  for (const element of fragment.querySelectorAll("[class]")) if (!element.closest(".code, .scroll")) element.removeAttribute("class");
  if (formulas.length) showMaths(formulas);
  return fragment;
}

// A fenced block with its language and a button that copies it.
function codeBlock(code) {
  const language = /^language-([\w+#.-]{1,20})$/.exec(code.className)?.[1] || "";
  const text = code.textContent;
  return make("div", { class: "code" },
    make("p", { class: "small quiet" }, language, copier(text.replace(/\n$/, ""), `the ${language || "code"} block`)),
    make("pre", { tabindex: 0, "aria-label": `${language || "Code"} block`, role: "region" }, make("code", {}, ...coloured(text, language))));
}
