// How quantities are written: as formats.py does.

const NOT_KNOWN = "–";
const oneDigit = new Intl.NumberFormat("en-US", {
  minimumFractionDigits: 1, maximumFractionDigits: 1, roundingMode: "halfEven",
});
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0, roundingMode: "halfEven" });
const isKnown = (value) => value !== null && value !== undefined;

const formats = {
  bytes(value) {
    if (!isKnown(value)) return NOT_KNOWN;
    if (value < 1024) return `${value} B`;
    if (value < 1024 ** 2) return `${oneDigit.format(value / 1024)} KiB`;
    return `${oneDigit.format(value / 1024 ** 2)} MiB`;
  },
  count: (value) => (isKnown(value) ? whole.format(value) : NOT_KNOWN),
  us: (value) => (isKnown(value) ? oneDigit.format(value) : NOT_KNOWN),
  share: (value) => (isKnown(value) ? `${whole.format(value * 100).replaceAll(",", "")} %` : NOT_KNOWN),
  flops(value) {
    if (!isKnown(value)) return NOT_KNOWN;
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (value >= unit) return `${oneDigit.format(value / unit)} ${name}`;
    }
    return whole.format(value);
  },
  text: (value) => (isKnown(value) ? String(value) : NOT_KNOWN),
};
