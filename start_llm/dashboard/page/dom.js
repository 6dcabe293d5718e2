// Small tools of all parts. What comes from a client goes into the page as text, never as markup.

export const byId = (id) => document.getElementById(id);
export const number = (value) => Math.round(value).toLocaleString("en");

export function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "share") element.style.width = `${(100 * value).toFixed(2)}%`;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // a reader of live regions hears changes only
}

export function bar(parts, total, label) {
  const inner = parts.filter(([, tokens]) => tokens > 0).map(([kind, tokens]) =>
    make("i", { class: kind, share: Math.min(1, tokens / Math.max(total, 1)) }));
  return make("div", { class: "bar", role: "img", "aria-label": label }, ...inner);
}

export function tile(value, what, more) {
  return make("div", { class: "tile" }, make("b", {}, value), make("span", {}, what), more);
}

// In thousands, as disks, hubs and the command line count; the same everywhere on this page.
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 999.95 && step < units.length - 1) { value /= 1000; step += 1; }
  return `${step ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}

export function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 1e4 ? `${Math.round(value / 1e3)}k` : number(value);
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export function nameOf(session) {
  return session && /^auto-[0-9a-f]{24}$/.test(session) ? `auto-${session.slice(5, 11)}` : session || "";
}

export function copier(text, what, label = "Copy") {
  const button = make("button", { type: "button", class: "copy", "aria-label": `${label}: ${what || text}` }, label);
  button.addEventListener("click", () => copy(button, text));
  return button;
}

export async function copy(button, text) {
  const label = (button.dataset.label ??= button.textContent); // also while it says "Copied"
  const name = (button.dataset.name ??= button.getAttribute("aria-label") ?? "");
  const say = (words) => {
    button.textContent = words;
    if (name) button.setAttribute("aria-label", words === label ? name : words); // a name holds what is seen
  };
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch {
    say("Not allowed"); // a page that is not on this machine, without TLS
  }
  setTimeout(say, 1500, label);
}
