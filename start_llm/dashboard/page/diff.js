// What is different between two short texts, word by word.

const MOST_WORDS = 300;

// [kind, text] with kind "same", "was" or "is"
export function diff(was, is) {
  const before = words(was);
  const after = words(is);
  if (before.length > MOST_WORDS || after.length > MOST_WORDS) return [["was", was], ["is", is]];
  const longest = table(before, after);
  const parts = [];
  const tell = (kind, text) => {
    const last = parts[parts.length - 1];
    if (last && last[0] === kind) last[1] += text;
    else parts.push([kind, text]);
  };
  let [i, j] = [0, 0];
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && before[i] === after[j]) {
      tell("same", before[i]);
      i += 1; j += 1;
    } else if (j >= after.length || (i < before.length && longest[i + 1][j] >= longest[i][j + 1])) {
      tell("was", before[i]);
      i += 1;
    } else {
      tell("is", after[j]);
      j += 1;
    }
  }
  return parts;
}

function words(text) {
  return text.match(/\s+|\w+|[^\s\w]/g) || [];
}

// table[i][j]: words in common of what is left from i and j on
function table(before, after) {
  const rows = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let i = before.length - 1; i >= 0; i -= 1) {
    for (let j = after.length - 1; j >= 0; j -= 1) {
      rows[i][j] = before[i] === after[j] ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
    }
  }
  return rows;
}
