// The rows of the page, from its block of JSON.

const data = JSON.parse(document.getElementById("data").textContent);

function inflated({ numbers, texts, rows }, empty) {
  const text = (value) => (Array.isArray(value) ? value.map((v) => data.texts[v]) : data.texts[value]);
  return rows.map((values) => {
    const row = { ...empty };
    numbers.forEach((name, place) => { row[name] = values[place]; });
    texts.forEach((name, place) => {
      const value = values[numbers.length + place];
      row[name] = value === null ? null : text(value);
    });
    return row;
  });
}

const nothing = Object.fromEntries(
  ["source", "direction", "grid", "limiter", "change", "time_us", "predicted_us"].map((k) => [k, null]),
);
// What can be worked out is not in the block.
const kernels = inflated(data.kernels, { ...nothing, scopes: [] });
const boundaries = inflated(data.boundaries, { ...nothing, scopes: [], memory: "device" });

data.programs.forEach((program, number) => {
  program.kernels = kernels.filter((row) => row.program === number);
  program.boundaries = boundaries.filter((row) => row.program === number);
  program.kernels.forEach((row, place) => {
    row.id = `${number}-${place}`;
    row.number = place + 1;
    row.bytes = row.read + row.written;
    for (const key of ["time", "predicted"]) {
      const one = row[`${key}_us`];
      row[key === "time" ? "time_total_us" : "predicted_total_us"] = isKnown(one) ? one * row.count : null;
    }
  });
  program.boundaries.forEach((row, place) => {
    row.id = `${number}-${place}`;
    row.cost = row.written + row.read;
  });
});

const shortSource = (source) => (source ? source.slice(source.lastIndexOf("/") + 1) : "");

function haystack(row) {
  return [
    row.name, row.emitter, row.tensor, row.producer, row.kind, row.why, row.source, row.limiter,
    ...(row.consumers ?? []), ...row.scopes,
  ].filter(Boolean).join("\n").toLowerCase();
}
for (const row of [...kernels, ...boundaries]) row.text = haystack(row);
