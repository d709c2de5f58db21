// Kernels in launch order as a tree: neighbours with the same scope are one node.

const MOST_LEAVES = 100;
// Where one level has more nodes than this, neighbours that hold little are put together.
const MANY_NODES = 24;
const LITTLE = 4;

// The scope that a kernel stands under: that of its last operation. One without any belongs to what
// the kernels around it share.
function withPaths(rows) {
  const paths = rows.map((row) => (row.scopes.length ? row.scopes.at(-1).split("/") : null));
  let before = [];
  const after = new Array(rows.length);
  let next = [];
  for (let place = rows.length - 1; place >= 0; place -= 1) {
    if (paths[place]) next = paths[place];
    after[place] = next;
  }
  return rows.map((row, place) => {
    if (paths[place]) before = paths[place];
    return { row, path: paths[place] ?? shared(before, after[place]) };
  });
}

function shared(a, b) {
  const end = a.findIndex((part, place) => part !== b[place]);
  return end < 0 ? a : a.slice(0, end);
}

function treeOf(rows) {
  return nodes(withPaths(rows), 0, "");
}

function nodes(items, depth, outer) {
  const runs = [];
  for (const item of items) {
    const part = item.path[depth] ?? "";
    const last = runs.at(-1);
    if (last && last.part === part) last.items.push(item);
    else runs.push({ part, items: [item] });
  }
  if (items.every((item) => item.path.length <= depth)) return leaves(items, outer);
  if (runs.length === 1) return nodes(items, depth + 1, joined(outer, runs[0].part));
  return gathered(runs.flatMap(({ part, items: inside }) => {
    const label = joined(outer, part);
    if (inside.length === 1) return [leaf(inside[0])];
    if (part === "") return leaves(inside, outer);
    return [node(label, inside.map(({ row }) => row), nodes(inside, depth + 1, label))];
  }), outer);
}

function gathered(found, outer) {
  if (found.length <= MANY_NODES) return found;
  const result = [];
  let small = [];
  const end = () => {
    if (small.length > 2) {
      const [first, last] = [small[0], small.at(-1)].map((one) => (one.label ?? one.row.name).split("/").at(-1));
      const label = joined(outer, `${first} … ${last}`);
      result.push(node(label, small.flatMap(({ rows }) => rows), small));
    } else {
      result.push(...small);
    }
    small = [];
  };
  for (const one of found) {
    if (one.rows.length <= LITTLE) {
      small.push(one);
    } else {
      end();
      result.push(one);
    }
  }
  end();
  return result;
}

function leaves(items, outer) {
  if (items.length <= MOST_LEAVES) return items.map(leaf);
  const found = [];
  for (let start = 0; start < items.length; start += MOST_LEAVES) {
    const part = items.slice(start, start + MOST_LEAVES);
    const label = joined(outer, `launches ${part[0].row.number}–${part.at(-1).row.number}`);
    found.push(node(label, part.map(({ row }) => row), part.map(leaf)));
  }
  return found;
}

const joined = (outer, part) => [outer, part].filter(Boolean).join("/");
const leaf = ({ row }) => ({ row, rows: [row] });

function node(label, rows, children) {
  const directions = new Set(rows.map((row) => row.direction));
  const direction = directions.size === 1 ? [...directions][0] : null;
  return { label, rows, children, direction, isOpen: false };
}
