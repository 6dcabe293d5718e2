// Markdown as HTML text, within a time. It needs no page: the page uses it, and its worker for what takes longer.

import { marked } from "./marked.esm.js";

const RULES = [
  "space", "code", "fences", "heading", "hr", "blockquote", "list", "html", "def", "table", "lheading", "paragraph", "text",
  "escape", "tag", "link", "reflink", "emStrong", "codespan", "br", "del", "autolink", "url", "inlineText",
];
const BLOCK = /^(?:\$\$([^]{1,4000}?)\$\$|\\\[([^]{1,4000}?)\\\])[ \t]*(?:\n|$)/;
const INLINE = /^(?:\$\$([^$]{1,4000})\$\$|\\\[([^]{1,4000}?)\\\]|\\\(([^]{1,1000}?)\\\)|\$(?![\s$])((?:\\.|[^$\\\n]){1,500})(?<!\s)\$(?!\d))/;
let deadline = 0;

export class TooSlow extends Error {}

// Before each rule that marked tries: is there time left? `false` lets marked go on with its own rule.
function inTime() {
  if (performance.now() > deadline) throw new TooSlow();
  return false;
}

export function escaped(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

// Formulas between dollars, \( and \), \[ and \], as code of a class that the page knows.
function maths(level, rule, opening) {
  return {
    name: `${level}Maths`,
    level,
    start(src) {
      inTime();
      const at = src.search(opening);
      return at < 0 ? undefined : at;
    },
    tokenizer(src) {
      const found = rule.exec(src);
      if (!found) return undefined;
      const text = found.slice(1).find((part) => part !== undefined);
      return { type: `${level}Maths`, raw: found[0], text: text.trim(), display: found[1] !== undefined || found[2] !== undefined };
    },
    renderer: ({ text, display }) => {
      const code = `<code class="maths${display ? " display" : ""}">${escaped(text)}</code>`;
      return level === "block" ? `<p>${code}</p>` : code;
    },
  };
}

marked.use({
  gfm: true,
  breaks: true,
  tokenizer: Object.fromEntries(RULES.map((rule) => [rule, inTime])),
  extensions: [maths("block", BLOCK, /\n(?:\$\$|\\\[)/), maths("inline", INLINE, /\$|\\[([]/)],
  renderer: {
    html: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    image: ({ href, text }) => escaped(`[image: ${text || href}] ${href}`), // the page fetches nothing from elsewhere
  },
});

// Raises TooSlow after `ms` milliseconds, and whatever marked raises.
export function html(text, ms) {
  deadline = performance.now() + ms;
  return marked.parse(text);
}
