// How the columns of the two large tables are written: as cells.html.j2 does.

const SIGNS = { "+": ["appeared", "new"], "-": ["went", "gone"], "~": ["changed", "changed"] };
const LARGEST_COST = Math.max(0, ...boundaries.map((row) => row.cost));

function sign(row) {
  if (!row.change) return [];
  const [style, word] = SIGNS[row.change];
  return [element("span", { class: `sign ${style}` }, word), " "];
}

function kernelLink(program, number, name) {
  return isKnown(number) ? element("a", { href: `#k${program}-${number}` }, name) : name;
}

function where(row) {
  const scopes = row.scopes.slice(0, 3).join(", ");
  const more = row.scopes.length > 3 ? `, ${row.scopes.length - 3} more` : "";
  const parts = [scopes + more];
  if (row.source) {
    if (row.scopes.length) parts.push(" · ");
    parts.push(element("span", { title: row.source }, shortSource(row.source)));
  }
  return parts.filter((part) => part !== "");
}

function flow(row) {
  const parts = [kernelLink(row.program, row.from, row.producer), " → "];
  row.consumers.slice(0, 4).forEach((name, place) => {
    if (place) parts.push(", ");
    parts.push(kernelLink(row.program, row.to[place], name));
  });
  if (row.consumers.length > 4) parts.push(`, ${row.consumers.length - 4} more`);
  return parts;
}

const cells = {
  launch(row) {
    const times = row.count !== 1 ? [" ", element("span", { class: "times" }, `× ${formats.count(row.count)}`)] : [];
    return element(
      "th", { scope: "row", class: "launch" }, ...sign(row),
      element("a", { href: `#r${row.id}`, title: row.name }, row.name), ...times,
      element("span", { class: "sub" }, row.emitter + (row.scopes.length || row.source ? " · " : ""), ...where(row)),
    );
  },
  kernel: (row) => element("th", { scope: "row" }, ...sign(row), element("a", { href: `#k${row.id}` }, row.name)),
  tensor: (row) => element("th", { scope: "row" }, ...sign(row), element("code", {}, row.tensor)),
  program: (row) => element("td", {}, data.programs[row.program].label),
  written(row) {
    const told = row.written ? formats.bytes(row.written) : "output";
    const elsewhere = row.memory === "device" ? null : row.memory.replaceAll("_", " ");
    return element("td", { class: "number" }, elsewhere ?? told);
  },
  flow: (row) => element("td", { class: "flow" }, ...flow(row)),
  where: (row) => element("td", { class: "where" }, ...where(row)),
  why: (row) => element(
    "td", { class: "why" },
    element("span", { class: `kind ${row.kind}` }, row.kind.replaceAll("_", " ")), ` ${row.why}`,
  ),
  cost(row) {
    const share = LARGEST_COST ? (100 * row.cost) / LARGEST_COST : 0;
    return element("td", { class: "number cost" }, element("i", { style: `width:${share.toFixed(1)}%` }), formats.bytes(row.cost));
  },
};

function cell(column, row) {
  if (cells[column.kind]) return cells[column.kind](row);
  const bound = column.kind === "bytes" && row.is_bound && column.key !== "written" ? "≤ " : "";
  return element("td", { class: column.number ? "number" : null }, bound + formats[column.kind](row[column.key]));
}

function tableRow(prefix, columns, row) {
  return element("tr", { id: prefix + row.id }, ...columns.map((column) => cell(column, row)));
}
