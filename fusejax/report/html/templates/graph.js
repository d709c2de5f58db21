// Kernels in launch order, and the tensors between them as arcs beside the list.

const FEW_KERNELS = 40;
const WIDEST = 12;
const LARGEST_TENSOR = Math.max(1, ...boundaries.flatMap((row) => edgeBytes(row)));

// What crosses to one consumer: the reads of all, shared out.
function edgeBytes(row) {
  return row.consumers.length ? row.read / row.consumers.length : 0;
}

class Graph {
  constructor(article) {
    this.number = Number(article.dataset.program);
    this.program = data.programs[this.number];
    this.article = article;
    this.place = article.querySelector(".graph");
    this.body = this.place.querySelector("tbody");
    this.picture = drawn("svg", { class: "arcs", "aria-hidden": "true" });
    this.place.prepend(this.picture);
    this.place.classList.add("with-arcs");
    this.place.classList.toggle("short", this.program.kernels.length < 9);
    this.made = new Map();
    this.isCollapsed = this.program.kernels.length > FEW_KERNELS;
    this.button = article.querySelector(".collapse");
    this.button.addEventListener("click", () => { this.isCollapsed = !this.isCollapsed; this.render(); });
    this.body.addEventListener("mouseover", (event) => this.light(event));
    this.body.addEventListener("focusin", (event) => this.light(event));
    this.body.addEventListener("mouseleave", () => this.light(null));
    new ResizeObserver(() => this.draw()).observe(this.place);
    this.filterChanged();
  }

  filterChanged() {
    this.matching = this.program.kernels.filter((row) => matchesRow(row, filter));
    const isShown = filter.program === "" || Number(filter.program) === this.number;
    this.article.hidden = !isShown || (isFiltered() && !this.matching.length);
    this.tree = treeOf(this.matching);
    this.render();
  }

  render() {
    this.visible = this.isCollapsed ? open(this.tree) : this.matching.map((row) => ({ row, rows: [row] }));
    const elements = this.visible.map((one) => (one.row ? this.launch(one.row) : this.group(one)));
    this.body.replaceChildren(...elements);
    this.visible.forEach((one, place) => {
      one.element = elements[place];
      if (one.depth || one.element.style.length) one.element.style.setProperty("--depth", one.depth ?? 0);
    });
    this.button.hidden = this.program.kernels.length <= 12 || !this.tree.some((one) => one.children);
    this.button.textContent = this.isCollapsed ? "Show every kernel" : "Collapse by scope";
    this.draw();
  }

  launch(row) {
    if (!this.made.has(row)) {
      const there = document.getElementById(`k${row.id}`);
      this.made.set(row, there ?? tableRow("k", this.program.columns, row));
    }
    return this.made.get(row);
  }

  group(one) {
    const button = element(
      "button", { type: "button", class: "group", "aria-expanded": String(one.isOpen) }, one.label,
    );
    button.addEventListener("click", () => {
      one.isOpen = !one.isOpen;
      this.render();
      one.element.querySelector("button").focus();
    });
    const direction = one.direction ? `, ${one.direction}` : "";
    const changed = one.rows.filter((row) => row.change).length;
    const told = `${formats.count(one.rows.length)} kernels${direction}${changed ? `, ${changed} changed` : ""} · ${emitters(one.rows)}`;
    const sub = element("span", { class: "sub" }, told);
    const made = element("tr", { class: "group" });
    for (const column of this.program.columns) {
      if (column.kind === "launch") made.append(element("th", { scope: "row", class: "launch" }, button, sub));
      else made.append(element("td", { class: "number" }, one.isOpen ? "" : formats[column.kind](sum(one.rows, column.key))));
    }
    return made;
  }

  // Arcs between what is visible now; several tensors between the same two are one arc.
  draw() {
    const rowOf = new Map();
    this.visible.forEach((one, place) => {
      if (one.row || !one.isOpen) for (const row of one.rows) rowOf.set(row, place);
    });
    const found = new Map();
    for (const boundary of this.program.boundaries) {
      const from = rowOf.get(this.program.kernels[boundary.from]);
      if (from === undefined) continue;
      for (const consumer of boundary.to) {
        const to = rowOf.get(this.program.kernels[consumer]);
        if (to === undefined || to === from) continue;
        const key = `${from} ${to}`;
        const edge = found.get(key) ?? { from, to, bytes: 0, boundaries: [] };
        edge.bytes += edgeBytes(boundary);
        edge.boundaries.push(boundary);
        found.set(key, edge);
      }
    }
    const width = parseFloat(getComputedStyle(this.place).getPropertyValue("--gutter")) - 5;
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", this.place.scrollHeight);
    const edges = [...found.values()].sort((a, b) => b.bytes - a.bytes);
    this.picture.classList.remove("some-on");
    this.picture.replaceChildren(...edges.map((one) => this.arc(one, width)));
  }

  arc({ from, to, bytes, boundaries: held }, width) {
    const middle = (place) => {
      const { element: row } = this.visible[place];
      return row.offsetTop + row.offsetHeight / 2;
    };
    const start = middle(from) + 3;
    const end = middle(to) - 3;
    const thick = Math.max(1, Math.min(1.5 * WIDEST, (WIDEST * bytes) / LARGEST_TENSOR));
    const reach = Math.min(width - 8, 18 + 9 * Math.sqrt(Math.abs(to - from) - 1) + thick) * 1.3;
    const line = `M${width - 6} ${start}C${width - 6 - reach} ${start} ${width - 6 - reach} ${end} ${width - 6} ${end}`;
    const head = `M${width - 7} ${end - 3.5}L${width} ${end}L${width - 7} ${end + 3.5}Z`;
    const dearest = held.reduce((a, b) => (b.cost > a.cost ? b : a));
    const counted = held.length > 1 ? `${held.length} tensors` : `${dearest.tensor}`;
    const memory = bytes ? formats.bytes(bytes) : dearest.memory.replaceAll("_", " ");
    const link = drawn(
      "a", { href: `#b${dearest.id}`, tabindex: "-1", class: `arc ${dearest.kind}${bytes ? "" : " uncounted"}`, "data-from": from, "data-to": to },
      drawn("title", {}), drawn("path", { class: "line", d: line, "stroke-width": thick.toFixed(1) }),
      drawn("path", { class: "head", d: head }),
    );
    link.firstChild.textContent = `${counted}, ${memory}: ${dearest.kind.replaceAll("_", " ")}`;
    return link;
  }

  light(event) {
    const row = event?.target.closest("tr");
    const place = row ? this.visible.findIndex((one) => one.element === row) : -1;
    for (const link of this.picture.children) {
      const isOn = Number(link.dataset.from) === place || Number(link.dataset.to) === place;
      link.classList.toggle("on", isOn);
    }
    this.picture.classList.toggle("some-on", place >= 0 && this.picture.querySelector(".on") !== null);
  }

  reveal(id) {
    const row = this.matching.find((one) => `k${one.id}` === id);
    if (!row) return null;
    if (this.isCollapsed) {
      opened(this.tree, row);
      this.render();
    }
    return document.getElementById(id);
  }
}

function open(tree, depth = 0) {
  return tree.flatMap((one) => {
    one.depth = depth;
    return one.children && one.isOpen ? [one, ...open(one.children, depth + 1)] : [one];
  });
}

function opened(tree, row) {
  for (const one of tree) {
    if (one.children && one.rows.includes(row)) {
      one.isOpen = true;
      opened(one.children, row);
    }
  }
}

function sum(rows, key) {
  const known = rows.map((row) => row[key]).filter(isKnown);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
}

function emitters(rows) {
  const names = new Set(rows.map((row) => row.emitter));
  return names.size <= 3 ? [...names].join(", ") : `${names.size} emitters`;
}
