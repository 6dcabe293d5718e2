// Colours of code: comments, texts, numbers and words of the language. One pass over the text by short rules that never go
// back, so that no text is slow; what is not known stays as it is. Knows nothing of the page.

import { make } from "./dom.js";

const MOST = 50_000; // characters; more of it is shown without colours
const C_LIKE = "break case catch class const continue default do else enum export extends false final finally for if implements import in "
  + "instanceof interface new null package private protected public return static struct super switch this throw throws true try typedef typeof "
  + "union unsigned var void volatile while with yield";
const WORDS = {
  c: `${C_LIKE} auto bool char double float include inline int long namespace nullptr short signed size_t sizeof template typename using virtual`,
  js: `${C_LIKE} as async await debugger delete from function get let of set type undefined`,
  java: `${C_LIKE} abstract boolean byte char double float int long record short synchronized var`,
  go: "break case chan const continue default defer else false fallthrough for func go goto if import interface map nil package range return "
    + "select struct switch true type var string int bool error byte",
  rust: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self "
    + "Self static struct super trait true type unsafe use where while",
  swift: `${C_LIKE} actor as async await extension func guard init inout internal is let nil protocol repeat self some where`,
  python: "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda "
    + "match None nonlocal not or pass raise return self True try while with yield",
  ruby: "alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo rescue retry return "
    + "self super then true undef unless until when while yield require",
  sh: "case do done elif else esac exit export fi for function if in local return set then until while echo cd sudo",
  sql: "add alter and as asc between by case create delete desc distinct drop else end exists from group having in index inner insert into is "
    + "join key left like limit not null on or order outer primary right select set table then union unique update values view when where with",
  data: "true false null yes no on off",
};
const SAME = {
  cpp: "c", "c++": "c", h: "c", cs: "java", csharp: "java", kotlin: "java", kt: "java", scala: "java", php: "js", javascript: "js", jsx: "js",
  ts: "js", tsx: "js", typescript: "js", py: "python", python3: "python", rb: "ruby", rs: "rust", golang: "go", bash: "sh", shell: "sh",
  zsh: "sh", console: "sh", json: "data", jsonc: "data", yaml: "data", yml: "data", toml: "data", ini: "data",
};
const SLASHES = new Set(["c", "js", "java", "go", "rust", "swift"]);
const HASHES = new Set(["python", "ruby", "sh", "data"]);
const RULES = {
  slashes: ["c", /\/\/[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/|$)/y],
  hashes: ["c", /#[^\n]*/y],
  dashes: ["c", /--[^\n]*/y],
  long: ["s", /"""(?:[^"]|"(?!""))*(?:"""|$)|'''(?:[^']|'(?!''))*(?:'''|$)/y],
  text: ["s", /"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?/y],
  quoted: ["s", /`(?:[^`\\]|\\[^])*`?/y],
  number: ["n", /\b\d[\w.]*/y],
  word: ["k", /[\p{L}_$][\p{L}\p{N}_$]*/yu],
};

function rulesOf(name) {
  const comments = SLASHES.has(name) ? ["slashes"] : HASHES.has(name) ? ["hashes"] : ["dashes"];
  const texts = name === "python" ? ["long", "text"] : name === "js" || name === "go" ? ["text", "quoted"] : ["text"];
  return [...comments, ...texts, "number", "word"].map((rule) => RULES[rule]);
}

// The code as pieces of text and coloured spans, for a language as a fence names it.
export function coloured(text, language) {
  const named = language.toLowerCase();
  const name = SAME[named] || named;
  if (!Object.hasOwn(WORDS, name) || text.length > MOST) return [text];
  const words = new Set(WORDS[name].split(" "));
  const [rules, parts] = [rulesOf(name), []];
  let plain = "";
  for (let at = 0; at < text.length;) {
    const [kind, found] = match(rules, text, at);
    if (kind === "k" ? words.has(name === "sql" ? found.toLowerCase() : found) : kind) {
      if (plain) parts.push(plain);
      plain = "";
      parts.push(make("span", { class: kind }, found));
    } else {
      plain += found;
    }
    at += found.length;
  }
  return [...parts, plain];
}

function match(rules, text, at) {
  for (const [kind, rule] of rules) {
    rule.lastIndex = at;
    const found = rule.exec(text);
    if (found) return [kind, found[0]];
  }
  return ["", text[at]];
}
