// The tree of stored prefixes as an icicle: left to right, width is tokens, a conversation is a row.
// Pure layout and drawing; cache.js decides what is shown. Nothing here is per segment but numbers.

const MEMORY = 0;
const DISK = 1;
const GONE = 2;
const GAP = 1;
export const STATES = ["in memory", "on disk", "removed"];
const COLOURS = ["--memory", "--disk", "--gone"];
const ROW = 18;
const AXIS = 18;
const LEAST = 90;
const MOST = 420;

export function stateOf(tree, at) {
  if (tree.memory[at] > 0) return MEMORY;
  return tree.disk[at] ? DISK : GONE;
}

// Where each segment is: x in tokens, y in rows. Iterative: a conversation is hundreds of segments deep.
export function layout(tree) {
  const count = tree.parent.length;
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  const reach = new Float64Array(count); // the furthest end below
  const rows = new Float64Array(count);
  const top = new Float64Array(count);
  const fresh = new Float64Array(count).fill(Infinity); // the youngest use below
  const children = Array.from({ length: count }, () => []);
  const roots = [];
  for (let at = 0; at < count; at += 1) {
    const parent = tree.parent[at];
    start[at] = parent < 0 ? 0 : end[parent];
    end[at] = start[at] + tree.tokens[at];
    (parent < 0 ? roots : children[parent]).push(at);
  }
  for (let at = count - 1; at >= 0; at -= 1) {
    rows[at] = rows[at] || 1;
    reach[at] = Math.max(reach[at], end[at]);
    fresh[at] = Math.min(fresh[at], tree.age[at] < 0 ? Infinity : tree.age[at]);
    const parent = tree.parent[at];
    if (parent < 0) continue;
    rows[parent] += rows[at];
    reach[parent] = Math.max(reach[parent], reach[at]);
    fresh[parent] = Math.min(fresh[parent], fresh[at]);
  }
  const order = (a, b) => fresh[a] - fresh[b] || reach[b] - reach[a] || a - b;
  let row = 0;
  for (const at of roots.sort(order)) { top[at] = row; row += rows[at]; }
  for (let at = 0; at < count; at += 1) { // parents come first
    let next = top[at];
    for (const child of children[at].sort(order)) { top[child] = next; next += rows[child]; }
  }
  const longest = roots.reduce((most, at) => Math.max(most, reach[at]), 1);
  return { count, start, end, reach, rows, top, children, roots, total: Math.max(row, 1), longest };
}

// What of the tree is to be seen: all of it, or what hangs below one segment.
export function windowOf(plan, focus) {
  if (focus < 0) return { x: 0, width: plan.longest, y: 0, height: plan.total };
  const x = plan.start[focus];
  return { x, width: Math.max(plan.reach[focus] - x, 1), y: plan.top[focus], height: plan.rows[focus] };
}

export function heightOf(view) {
  return Math.max(LEAST, Math.min(MOST, view.height * ROW)) + AXIS;
}

export function boxOf(plan, at, view, width, height) {
  const across = width / view.width;
  const down = Math.min((height - AXIS) / view.height, 2 * ROW);
  return {
    x: (plan.start[at] - view.x) * across,
    y: (plan.top[at] - view.y) * down,
    width: (plan.end[at] - plan.start[at]) * across,
    height: plan.rows[at] * down,
  };
}

export function draw(context, plan, tree, names, view, width, height, style) {
  context.clearRect(0, 0, width, height);
  const buckets = COLOURS.map(() => []);
  for (let at = 0; at < plan.count; at += 1) {
    const box = boxOf(plan, at, view, width, height);
    if (box.x + box.width <= 0 || box.x >= width || box.y + box.height <= 0 || box.y >= height) continue;
    buckets[stateOf(tree, at)].push(box);
  }
  COLOURS.forEach((colour, state) => {
    context.fillStyle = style.getPropertyValue(colour);
    for (const box of buckets[state]) {
      const thin = box.height < 3 ? 0 : GAP;
      context.fillRect(box.x, box.y, Math.max(box.width - (box.width < 4 ? 0 : GAP), 0.7), Math.max(box.height - thin, 0.7));
    }
  });
  axis(context, view, width, height, style);
  label(context, plan, names, view, width, height, style);
}

function axis(context, view, width, height, style) {
  const wanted = view.width / Math.max(2, width / 90);
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
  const step = Math.max(1, [1, 2, 5, 10].find((factor) => factor * power >= wanted) * power);
  context.fillStyle = style.getPropertyValue("--quiet");
  context.font = "11px system-ui, sans-serif";
  for (let tokens = Math.ceil(view.x / step) * step; tokens <= view.x + view.width; tokens += step) {
    const x = ((tokens - view.x) / view.width) * width;
    context.fillRect(x, height - AXIS + 2, 1, 4);
    const text = tokens >= 1000 ? `${tokens / 1000}k` : String(tokens);
    if (x + 40 < width) context.fillText(text, x + 4, height - 4);
  }
}

// Names stand behind the last segment, or in it where there is no room behind.
function label(context, plan, names, view, width, height, style) {
  context.font = "11px system-ui, sans-serif";
  for (const [at, name] of names) {
    const box = boxOf(plan, at, view, width, height);
    const row = box.height / plan.rows[at];
    if (row < 11 || box.x + box.width < 0 || box.y < 0 || box.y > height) continue;
    const text = name.length > 40 ? `${name.slice(0, 39)}…` : name;
    const size = context.measureText(text).width + 10;
    const y = box.y + Math.min(box.height, 2 * row) / 2 + 4;
    const inside = box.x + box.width + size > width || plan.children[at].length > 0;
    context.fillStyle = style.getPropertyValue(inside ? "--on-fill" : "--front");
    if (!inside) context.fillText(text, box.x + box.width + 5, y);
    else if (box.x + box.width > size) context.fillText(text, Math.min(box.x + box.width, width) - size + 4, y);
  }
}

// The segment at a point, -1: none. Goes down the tree, so it does not look at all of it.
export function hit(plan, view, width, height, x, y) {
  const row = view.y + y / Math.min((height - AXIS) / view.height, 2 * ROW);
  const tokens = view.x + (x / width) * view.width;
  let level = plan.roots;
  for (;;) {
    const at = level.find((one) => row >= plan.top[one] && row < plan.top[one] + plan.rows[one]);
    if (at === undefined || tokens < plan.start[at]) return -1;
    if (tokens < plan.end[at]) return at;
    level = plan.children[at];
  }
}
