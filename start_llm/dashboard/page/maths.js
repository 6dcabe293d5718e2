// Formulas of answers, as MathML that the browser draws. Temml reads the TeX; its tree is made into elements here, of known
// names with known attributes only, so no markup of an answer is ever parsed. It is loaded with the first formula.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST = 4000; // characters of a formula
const MOST_MACROS = 200; // each may stand for many more
const NAMES = new Set(["math", "menclose", "merror", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom", "mprescripts",
  "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "none"]);
const ATTRIBUTES = new Set(["accent", "accentunder", "columnalign", "columnlines", "columnspacing", "columnspan", "depth", "display",
  "displaystyle", "fence", "height", "linethickness", "lspace", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "rowlines",
  "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset", "width"]);
let loading = null;

function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/page/temml.min.js";
    script.onload = () => resolve(globalThis.temml);
    script.onerror = () => {
      loading = null;
      reject(new Error("formulas cannot be shown"));
    };
    document.head.append(script);
  });
  return loading;
}

// Puts a formula in the place of each `element`, large ones where it is `display`; what cannot be read stays as its text.
export async function showMaths(formulas) {
  const temml = await load().catch(() => null);
  if (!temml) return;
  for (const { element, display } of formulas) {
    const tex = element.textContent;
    if (tex.length > MOST) continue;
    try {
      const tree = temml.__renderToMathMLTree(tex, { displayMode: display, maxExpand: MOST_MACROS, trust: false, throwOnError: true, strict: false });
      const drawn = built(tree);
      drawn.setAttribute("aria-label", tex);
      element.replaceWith(drawn);
    } catch { /* no formula: it stands there as it was written */ }
  }
}

function built(node) {
  if (typeof node.text === "string") return document.createTextNode(node.text);
  const children = (node.children || []).map(built);
  if (!NAMES.has(node.type)) {
    const all = document.createDocumentFragment();
    all.append(...children);
    return all;
  }
  const element = document.createElementNS(MATHML, node.type);
  for (const [name, value] of Object.entries(node.attributes || {})) if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
