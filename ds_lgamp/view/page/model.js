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
    rank.reach = rank.lanes.map((indices) => latestEnds(rank, indices));
    rank.about = rank.name.map((name) => parsed(model.names[name]));
  }
}

// The latest end up to each place of a lane: a long interval may outlast intervals that begin after it.
function latestEnds(rank, indices) {
  let latest = -Infinity;
  return indices.map((index) => (latest = Math.max(latest, rank.end[index])));
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
  gather: "#885cc9",
  reduce: "#bd4c86",
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

const INKS = ["#fff", "#10151b"];

// What can be read on the colour of a kind, at its place among the rank's chunks.
function ink(kind, place = 0.55) {
  if (!(kind in HUES || kind in COLOURS)) return style("--text");
  const ground = luminance(kind in HUES ? shade(kind, place) : colour(kind));
  const contrast = (one) => Math.abs(Math.log((luminance(one) + 0.05) / (ground + 0.05)));
  return contrast(INKS[0]) > contrast(INKS[1]) ? INKS[0] : INKS[1];
}

// How bright a colour is, from 0 to 1, as WCAG 2 defines it.
const luminance = memoized((colour) => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d");
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  const [red, green, blue] = [...pen.getImageData(0, 0, 1, 1).data].map((value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
});

function memoized(call) {
  const known = new Map();
  return (key) => (known.has(key) ? known : known.set(key, call(key))).get(key);
}

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
