// Tables that can be sorted and filtered. A record knows its values and makes its row when asked.

// Longer tables show their first few rows, as the page does that has no script.
const MOST_ROWS = 100;
const FEW_ROWS = 40;
const STEP = 1500;
const collator = new Intl.Collator("en", { numeric: true });

function compared(a, b) {
  const known = [a, b].map((value) => isKnown(value) && value !== "");
  if (!known[0] || !known[1]) return known[1] - known[0];  // what is not known comes last
  return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
}

function sortedBy(records, key, direction) {
  const down = direction === "descending" ? -1 : 1;
  const isEmpty = (record) => !isKnown(record.value(key)) || record.value(key) === "";
  const order = (a, b) => (isEmpty(a) || isEmpty(b) ? 1 : down) * compared(a.value(key), b.value(key));
  return [...records].sort(order);
}

class Table {
  constructor(table, records) {
    const isAside = ["changes", "scopes", "sheet"].some((name) => table.classList.contains(name));
    const shown = isAside || records.length > MOST_ROWS ? FEW_ROWS : MOST_ROWS;
    Object.assign(this, { table, records, shown, key: null, direction: null });
    this.more = element("button", { type: "button", class: "plain more", hidden: "" });
    this.more.addEventListener("click", () => { this.shown += STEP; this.render(); });
    table.parentElement.after(this.more);
    for (const head of table.tHead.rows[0].cells) this.headed(head);
  }

  headed(head) {
    const key = head.dataset.key ?? String(head.cellIndex);
    if (head.ariaSort) Object.assign(this, { key, direction: head.ariaSort });
    const button = element("button", { type: "button" }, ...head.childNodes);
    button.addEventListener("click", () => this.sort(key, head));
    head.replaceChildren(button);
  }

  sort(key, head) {
    const first = head.classList.contains("number") ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    this.direction = this.key === key && this.direction === first ? other : first;
    this.key = key;
    for (const one of this.table.tHead.rows[0].cells) one.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", this.direction);
    this.render();
  }

  render() {
    this.found = this.records.filter((record) => record.matches(filter));
    if (this.key !== null) this.found = sortedBy(this.found, this.key, this.direction);
    const rows = this.found.slice(0, this.shown).map((record) => record.element());
    this.table.tBodies[0].replaceChildren(...rows);
    const left = this.found.length - rows.length;
    this.more.hidden = left <= 0;
    const next = Math.min(left, STEP);
    this.more.textContent = `Show ${formats.count(next)} more` + (left > next ? ` of ${formats.count(left)}` : "");
  }

  // On paper there is no button to ask for more.
  printed() {
    this.shown = Math.max(this.shown, MOST_ROWS);
    this.render();
  }

  reveal(id) {
    const place = this.found.findIndex((record) => record.id === id);
    if (place < 0) return null;
    if (place >= this.shown) {
      this.shown = place + FEW_ROWS;
      this.render();
    }
    return document.getElementById(id);
  }
}

// Of a large table: rows of the block of JSON. Those that the page has already are taken over.
function dataRecord(prefix, columns, row) {
  let made = document.getElementById(prefix + row.id);
  return {
    id: prefix + row.id,
    value: (key) => row[key],
    matches: (wanted) => matchesRow(row, wanted),
    element: () => (made ??= tableRow(prefix, columns, row)),
  };
}

// Of a small table: the rows that the page has.
function pageRecord(row) {
  const values = [...row.cells].map(({ dataset, textContent }) => {
    const value = dataset.value ?? textContent.trim().replaceAll(",", "");
    return value === "" || Number.isNaN(Number(value)) ? dataset.value ?? textContent.trim() : Number(value);
  });
  const like = {
    program: row.dataset.program === undefined ? null : Number(row.dataset.program),
    scopes: row.dataset.scopes?.split("\n"),
    text: row.dataset.program === undefined ? row.textContent.toLowerCase() : null,
  };
  return {
    id: row.id,
    value: (key) => values[Number(key)],
    matches: (wanted) => matchesRow(like, wanted),
    element: () => row,
  };
}
