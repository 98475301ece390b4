"use strict";
// Brings the page to life: zoom, pointer, keyboard and what the tools switch on.

const byId = (id) => document.getElementById(id);
const chooser = byId("micro-batch"), tip = byId("tip");

for (const panel of model.panels) {
  panel.onPath = new Set(panel.path.map((place) => place.join(" ")));
  panel.ofMicroBatch = (microBatch) => threads(panel, microBatch);
}

// The computes of a micro-batch in the order of time, a list for each of its replicas.
function threads(panel, microBatch) {
  const lists = new Map();
  panel.ranks.forEach((rank, rankIndex) => {
    for (const index of rank.lanes[COMPUTE]) {
      if (rank.about[index].microBatch !== microBatch) continue;
      lists.set(rank.replica, [...(lists.get(rank.replica) ?? []), [rankIndex, index]]);
    }
  });
  const start = ([rank, index]) => panel.ranks[rank].start[index];
  return [...lists.values()].map((places) => places.sort((a, b) => start(a) - start(b)));
}

// The words of the tooltip.
function description({ row, index, moment }) {
  const { rank, panel } = row, lines = [];
  if (row.kind === "memory") {
    const place = Math.max(0, rank.memory[0].findLastIndex((each) => each <= moment));
    return [element("b", {}, size(rank.memory[1][place])), `${rank.detail}, at ${time(moment)}; most: ${size(panel.peak_bytes[row.index])}`];
  }
  if (index === null) return [];
  const about = rank.about[index], lane = model.lanes[rank.lane[index]], kind = model.words[rank.kind[index]];
  const length = rank.end[index] - rank.start[index];
  const what = rank.lane[index] === WAIT ? `wait for ${kind}` : rank.lane[index] === COMPUTE ? label(kind) : lane;
  const parts = [what];
  if (about.chunk !== null) parts.push(`chunk ${about.chunk}`);
  if (about.microBatch !== null) parts.push(`micro-batch ${about.microBatch}`);
  lines.push(element("b", {}, about.name), parts.join(", "));
  lines.push(`${time(length)}: from ${time(rank.start[index])} to ${time(rank.end[index])}`);
  lines.push(rank.detail);
  if (rank.bytes[index]) lines.push(`moves ${size(rank.bytes[index])}`);
  const cause = causeOf(rank, index);
  if (cause) lines.push(`began after ${nameFrom(panel, rank, cause)}`);
  if (rank.lane[index] === COMPUTE) lines.push(...waitsAhead(rank, index));
  if (panel.onPath.has(`${row.index} ${index}`)) lines.push("on the critical path");
  return lines;
}

function nameFrom(panel, rank, [from, which]) {
  const other = panel.ranks[from];
  return other === rank ? other.about[which].name : `${other.about[which].name} of ${other.label}`;
}

// What the rank waited for between a compute and the one before it, in words.
function waitsAhead(rank, index) {
  const computes = rank.lanes[COMPUTE], waits = rank.lanes[WAIT], place = firstAfter(rank, computes, rank.start[index]);
  const since = place ? rank.end[computes[place - 1]] : 0, spent = new Map();
  for (let position = firstAfter(rank, waits, since); position < waits.length && rank.start[waits[position]] < rank.start[index]; position++) {
    const wait = waits[position], kind = model.words[rank.kind[wait]];
    spent.set(kind, (spent.get(kind) ?? 0) + rank.end[wait] - rank.start[wait]);
  }
  return spent.size ? [`waited before: ${[...spent].map(([kind, seconds]) => `${time(seconds)} for ${label(kind)}`).join(", ")}`] : [];
}

function show(found, left, top) {
  state.shown = found && found.index !== null ? found : null;
  const lines = found ? description(found) : [];
  tip.hidden = !lines.length;
  tip.replaceChildren(...lines.map((line) => element("p", {}, line)));
  if (lines.length) {
    tip.style.left = `${Math.max(4, Math.min(left + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${top + 18 + tip.offsetHeight > window.innerHeight ? top - tip.offsetHeight - 10 : top + 18}px`;
  }
  redraw();
}

function follow(microBatch) {
  state.microBatch = microBatch;
  chooser.value = microBatch ?? "";
  redraw();
}

function choosePath(on) {
  state.path = byId("path").checked = on;
  redraw();
}

const zoom = d3.zoom().scaleExtent([1, 1e6]).clickDistance(4)
  // Two fingers on a touchpad send many small steps, a wheel few large ones.
  .wheelDelta((event) => Math.max(-0.6, Math.min(0.6, -event.deltaY * (event.deltaMode ? 0.3 : 0.01))))
  .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button && event.type !== "dblclick"))
  .on("zoom", (event) => {
    state.zoom = event.transform;
    redraw();
  });
const selection = d3.select(canvas).call(zoom);

function fit() {
  resize();
  // Its row was made anew, or is no longer there.
  const row = state.shown && rows.find((each) => each.rank === state.shown.row.rank && each.lanes.join() === state.shown.row.lanes.join());
  state.shown = row ? { ...state.shown, row } : null;
  zoom.extent([[LEFT, 0], [width - 12, 1]]).translateExtent([[LEFT, 0], [width - 12, 1]]);
  draw();
}

const zoomBy = (factor, around) => zoom.scaleBy(selection, factor, around);
const moveBy = (share) => zoom.translateBy(selection, (share * (width - LEFT)) / state.zoom.k, 0);
const showWhole = () => zoom.transform(selection, d3.zoomIdentity);

canvas.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
  if (event.ctrlKey || event.metaKey || !sideways) return;
  event.preventDefault();
  zoom.translateBy(selection, -sideways / state.zoom.k, 0);
}, { passive: false });
canvas.addEventListener("pointermove", (event) => {
  if (event.buttons) return;
  show(at(event.offsetX, event.offsetY), event.clientX, event.clientY);
});
canvas.addEventListener("pointerleave", () => show(null));
canvas.addEventListener("click", (event) => {
  const found = at(event.offsetX, event.offsetY);
  const microBatch = found && found.index !== null ? found.row.rank.about[found.index].microBatch : null;
  follow(microBatch === state.microBatch ? null : microBatch);
});

// Walks from action to action. The first step lands on the first action of the first rank that one sees.
function walk(along, across) {
  const computes = rows.filter((row) => row.kind === "compute");
  let { row, index } = state.shown ?? {};
  if (!row || !row.lanes.includes(COMPUTE)) row = computes[0], index = row.rank.lanes[COMPUTE][0];
  else if (across) {
    const moment = row.rank.start[index];
    row = computes[computes.indexOf(row) + across] ?? row;
    const indices = row.rank.lanes[COMPUTE];
    index = indices[Math.min(indices.length - 1, firstAfter(row.rank, indices, moment))];
  } else {
    const indices = row.rank.lanes[COMPUTE];
    index = indices[indices.indexOf(index) + along] ?? index;
  }
  if (index === undefined) return;
  bringIntoView(row, index);
  const box = canvas.getBoundingClientRect();
  const found = { row, index, moment: row.rank.start[index] };
  show(found, box.left + Math.max(LEFT, scale()(found.moment)), box.top + row.top + row.height - scroller.scrollTop);
  byId("announcement").textContent = description(found).map((line) => line.textContent ?? line).join(". ");
}

function bringIntoView(row, index) {
  const x = scale(), middle = x((row.rank.start[index] + row.rank.end[index]) / 2);
  if (middle < LEFT || middle > width - 12) zoom.translateTo(selection, wholeScale()((row.rank.start[index] + row.rank.end[index]) / 2), 0);
  const visible = parseFloat(canvas.style.height);
  if (row.top < scroller.scrollTop + AXIS) scroller.scrollTop = row.top - AXIS - TITLE;
  else if (row.top + row.height > scroller.scrollTop + visible) scroller.scrollTop = row.top + row.height - visible + GAP;
}

const KEYS = {
  "+": () => zoomBy(1.6),
  "=": () => zoomBy(1.6),
  "-": () => zoomBy(1 / 1.6),
  0: showWhole,
  ArrowLeft: (event) => (event.shiftKey ? moveBy(0.2) : walk(-1, 0)),
  ArrowRight: (event) => (event.shiftKey ? moveBy(-0.2) : walk(1, 0)),
  ArrowUp: () => walk(0, -1),
  ArrowDown: () => walk(0, 1),
  Enter: () => state.shown && follow(state.shown.row.rank.about[state.shown.index].microBatch),
  c: () => choosePath(!state.path),
  Escape: () => (follow(null), choosePath(false), show(null)),
};
canvas.addEventListener("keydown", (event) => {
  if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key](event);
});

chooser.append(...Array.from({ length: model.micro_batches }, (_, number) => element("option", { value: number }, String(number))));
chooser.addEventListener("change", () => follow(chooser.value === "" ? null : +chooser.value));
byId("path").addEventListener("change", (event) => choosePath(event.target.checked));
for (const name of ["lanes", "memory"]) {
  byId(name).addEventListener("change", (event) => {
    state[name] = event.target.checked;
    fit();
  });
}
byId("closer").addEventListener("click", () => zoomBy(1.6));
byId("wider").addEventListener("click", () => zoomBy(1 / 1.6));
byId("whole").addEventListener("click", showWhole);
scroller.addEventListener("scroll", redraw);
window.addEventListener("resize", fit);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (showSummary(), fit()));

const ranks = model.panels.reduce((sum, panel) => sum + panel.ranks.length, 0);
state.lanes = byId("lanes").checked = ranks <= 8;
state.memory = byId("memory").checked = most > 0 && ranks <= 16;
byId("memory-label").hidden = !most;
showSummary();
fit();
