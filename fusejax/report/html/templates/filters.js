// What is shown: one program or all, one scope, what has a text in it.

const filter = { program: "", scope: "", text: "" };
const form = document.getElementById("filters");

const isFiltered = () => Boolean(filter.program || filter.scope || filter.text);

// What a row does not tell, it is not filtered by.
function matchesRow(row, { program, scope, text }) {
  if (program !== "" && isKnown(row.program) && row.program !== Number(program)) return false;
  if (scope && row.scopes && !row.scopes.some((path) => `/${path}/`.includes(`/${scope}/`))) return false;
  return text === "" || !row.text || row.text.includes(text);
}

function readFilter() {
  const values = new FormData(form);
  filter.program = values.get("program") ?? "";
  filter.scope = values.get("scope") ?? "";
  filter.text = (values.get("text") ?? "").trim().toLowerCase();
}

function setFilter(values) {
  for (const name of ["program", "scope", "text"]) {
    if (form.elements[name]) form.elements[name].value = values[name] ?? "";
  }
  readFilter();
}
