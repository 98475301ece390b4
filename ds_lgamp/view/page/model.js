"use strict";
// What the page shows: panels with ranks, and for each rank its intervals by lane. Colours and words for all of it.

const model = JSON.parse(document.getElementById("data").textContent);
const COMPUTE = 0, WAIT = 1; // Places in model.lanes.
const LABELS = { step: "update", between: "in between" };
const HUES = { forward: [212, 75], backward: [29, 88] };
const LIGHTEST = 74, DARKEST = 42;
const label = (kind) => LABELS[kind] ?? kind;

for (const panel of model.panels) {
  panel.place = placesOnRanks(panel.placement);
  panel.shades = Object.fromEntries(["forward", "backward"].map((kind) => [kind, panel.place.map((place) => shade(kind, place))]));
  for (const rank of panel.ranks) {
    rank.lanes = model.lanes.map(() => []);
    rank.lane.forEach((lane, index) => rank.lanes[lane].push(index));
    for (const indices of rank.lanes) indices.sort((a, b) => rank.start[a] - rank.start[b]);
    rank.about = rank.name.map((name) => parsed(model.names[name]));
  }
}

// Which of its rank's chunks each chunk is, from 0 to 1.
function placesOnRanks(placement) {
  const chunks = new Map();
  placement.forEach((rank, chunk) => chunks.set(rank, [...(chunks.get(rank) ?? []), chunk]));
  return placement.map((rank, chunk) => {
    const own = chunks.get(rank);
    return own.length > 1 ? own.indexOf(chunk) / (own.length - 1) : 0.5;
  });
}

function parsed(name) {
  const match = /^[A-Z_]+?(\d+)(?:\.(\d+))?$/.exec(name);
  return { name, chunk: match ? +match[1] : null, microBatch: match?.[2] === undefined ? null : +match[2] };
}

const COLOURS = {
  step: "#2f9e62",
  gather: "#8e63ce",
  reduce: "#c2528b",
  "between nodes": "#7d6b9e",
  send: "#12a0a0",
  activation: "#12a0a0",
  gradient: "#12a0a0",
  load: "#95922c",
  store: "#8a6d4b",
  "host update": "#2f9e62",
  data: "#b0893b",
};

// The colour of a kind or lane as a whole.
function colour(kind) {
  if (kind in HUES) return shade(kind, 0.55);
  return COLOURS[kind] ?? style("--track");
}

function shade(kind, place) {
  const [hue, saturation] = HUES[kind];
  return `hsl(${hue} ${saturation}% ${LIGHTEST + (DARKEST - LIGHTEST) * place}%)`;
}

// What can be read on that colour.
const ink = (kind, place = 0.55) => (kind in HUES ? (place > 0.6 ? "#fff" : "#10151b") : kind in COLOURS ? "#fff" : style("--text"));

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function digits(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(+value.toPrecision(4));
}

function time(value) {
  if (!model.unit) return digits(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1) return `${digits(value)} s`;
  return size >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

function size(bytes) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= factor) return `${digits(bytes / factor)} ${unit}`;
  return `${bytes} bytes`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
