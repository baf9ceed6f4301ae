"use strict";
// Figures as text, for tiles, tables and tooltips; same rules as compare/report/columns.py.

const GIB = 2 ** 30;
const BYTE_UNITS = [[GIB, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

// Largest unit in which a size is at least 1: [bytes, name].
function unitOf(bytes) {
  return BYTE_UNITS.find(([unit]) => bytes >= unit) ?? BYTE_UNITS.at(-1);
}

// At least three digits.
function threeDigits(value) {
  return value >= 99.95 || value === 0 ? grouped(value) : value.toPrecision(3);
}

function bytesText(value) {
  const [unit, name] = unitOf(value);
  return `${threeDigits(value / unit)} ${name}`;
}

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

const FORMATS = {
  text: String,
  count: (value) => grouped(value),
  rate: threeDigits,
  seconds: (value) => `${threeDigits(value)} s`,
  bytes: bytesText,
  loss: (value) => (value >= 1e4 ? value.toExponential(2) : value.toFixed(value >= 10 ? 2 : 4)),
  gap: (value) => (value === 0 ? "0" : value.toExponential(1)),
  percent: (value) => (100 * value).toFixed(1) + "%",
};

function shown(value, kind) {
  return value === null || value === undefined ? "n/a" : FORMATS[kind](value);
}

// A count with its noun: 1 run, 2 runs.
function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? "" : "s"}`;
}
