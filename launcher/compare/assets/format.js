"use strict";
// Figures as text: the same rules as the console and the Markdown table.

const GIB = 2 ** 30;

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

const FORMATS = {
  text: String,
  count: (value) => grouped(value),
  rate: (value) => grouped(value),
  seconds: (value) => (value >= 99.95 ? grouped(value) : value.toPrecision(3)) + " s",
  gib: (value) => (value / GIB).toFixed(value >= GIB / 10 || value === 0 ? 2 : 4) + " GiB",
  loss: (value) => (value >= 1e4 ? value.toExponential(2) : value.toFixed(value >= 10 ? 2 : 4)),
  gap: (value) => (value === 0 ? "0" : value.toExponential(1)),
  percent: (value) => (100 * value).toFixed(1) + "%",
};

function shown(value, kind) {
  return value === null || value === undefined ? "n/a" : FORMATS[kind](value);
}

// Text of a count with its noun: 1 run, 2 runs.
function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}
