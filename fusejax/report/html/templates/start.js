// Puts the parts together.

const graphs = [...document.querySelectorAll("article.program")]
  .filter((article) => article.querySelector(".graph"))
  .map((article) => new Graph(article));

const large = Object.entries({ boundaries: ["b", boundaries], resources: ["r", kernels] }).flatMap(
  ([name, [prefix, rows]]) => {
    const table = document.querySelector(`table[data-table="${name}"]`);
    if (!table) return [];
    return [new Table(table, rows.map((row) => dataRecord(prefix, data.columns[name], row)))];
  },
);
for (const cell of document.querySelectorAll("table.scopes tbody th")) {
  const scope = cell.textContent;
  const button = element("button", { type: "button", class: "scope" }, scope);
  button.addEventListener("click", () => {
    setFilter({ scope });
    show();
    document.getElementById("launches").scrollIntoView();
  });
  cell.replaceChildren(button);
  form.elements.scope.append(element("option", {value: scope}, scope));
}
const small = [...document.querySelectorAll("table.sortable")].map((table) => new Table(
  table, [...table.tBodies[0].rows].map(pageRecord),
));

function show() {
  for (const graph of graphs) graph.filterChanged();
  for (const table of [...large, ...small]) table.render();
  const counted = [kernels, boundaries].map((rows) => rows.filter((row) => matchesRow(row, filter)).length);
  document.getElementById("found").value = isFiltered()
    ? `${formats.count(counted[0])} of ${formats.count(kernels.length)} kernels, ${formats.count(counted[1])} of ${formats.count(boundaries.length)} boundaries`
    : "";
}

// Kernels and boundaries are linked to; what is linked to may be filtered away or collapsed.
function reveal(id) {
  if (!/^[kbr]\d+-\d+$/.test(id)) return;
  const holders = [...graphs.filter((graph) => id.startsWith(`k${graph.number}-`)), ...large];
  const found = () => holders.reduce((known, holder) => known ?? holder.reveal(id), null);
  let row = found();
  if (!row && isFiltered()) {
    setFilter({});
    show();
    row = found();
  }
  if (!row) return;
  document.querySelector(".target")?.classList.remove("target");
  row.classList.add("target");
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
  row.scrollIntoView({ block: "center" });
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  if (link && link.getAttribute("href") === location.hash) reveal(location.hash.slice(1));
});
addEventListener("hashchange", () => reveal(location.hash.slice(1)));
form.addEventListener("input", () => { readFilter(); show(); });
form.addEventListener("reset", () => setTimeout(() => { readFilter(); show(); }));
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName);
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    form.elements.text.focus();
  }
});
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const table of [...large, ...small]) table.printed();
  for (const graph of graphs) graph.draw();
});

const kinds = new Set(boundaries.map((row) => row.kind));
const legend = document.querySelector(".legend.kinds");
if (kinds.size) {
  legend.replaceChildren(
    ...[...kinds].map((kind) => element("span", {}, element("span", { class: `kind ${kind}` }, kind.replaceAll("_", " ")))),
    element("span", {}, `widest: ${formats.bytes(LARGEST_TENSOR)}`),
  );
  legend.hidden = false;
}
form.hidden = false;
show();
reveal(location.hash.slice(1));
