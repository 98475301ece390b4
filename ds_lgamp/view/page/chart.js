"use strict";
// Draws the timelines of all ranks into the canvas, as far as one sees them, and finds what is under the pointer.

const LEFT = 132, AXIS = 24, TITLE = 26, GAP = 5;
const FONT = "system-ui, 'DejaVu Sans', sans-serif";
const canvas = document.getElementById("chart"), scroller = document.getElementById("scroller");
const context = canvas.getContext("2d");
const alive = model.panels.flatMap((panel) => panel.ranks.flatMap((rank) => rank.memory[1]));
const most = alive.reduce((a, b) => Math.max(a, b), 0), least = alive.reduce((a, b) => Math.min(a, b), most);
// What is always alive hides what comes and goes, so it is cut off if it is more than half.
const floor = least > most / 2 ? least : 0;

// What the user chose. `zoom` maps the scale of the whole step to what one sees.
const state = { zoom: d3.zoomIdentity, microBatch: null, path: false, lanes: false, memory: false, shown: null };
let rows = [], height = 0, width = 0, theme = {};

const wholeScale = () => d3.scaleLinear([0, longest], [LEFT, width - 12]);
const scale = () => state.zoom.rescaleX(wholeScale());

// Places the rows from top to bottom.
function layOut() {
  const count = model.panels.reduce((sum, panel) => sum + panel.ranks.length, 0);
  const tall = count > 40 ? 11 : count > 16 ? 15 : 22;
  rows = [];
  height = AXIS;
  const add = (row, tallness) => {
    rows.push({ ...row, top: height, height: tallness });
    height += tallness;
  };
  for (const panel of model.panels) {
    add({ kind: "title", panel }, TITLE);
    panel.ranks.forEach((rank, index) => {
      add({ kind: "compute", panel, rank, index, lanes: [COMPUTE, WAIT] }, tall);
      if (state.lanes) {
        rank.lanes.forEach((indices, lane) => {
          if (lane > WAIT && panel.ranks.some((each) => each.lanes[lane].length)) add({ kind: "lane", panel, rank, index, lanes: [lane] }, 12);
        });
      }
      if (state.memory && rank.memory[0].length) add({ kind: "memory", panel, rank, index, lanes: [] }, 26);
      height += tall < 15 && !state.lanes && !state.memory ? 1 : GAP;
    });
    height += 8;
  }
}

function resize() {
  layOut();
  document.getElementById("height").style.height = "0";
  width = scroller.clientWidth;
  const visible = Math.min(height, Math.round(window.innerHeight * 0.82));
  scroller.style.height = `${visible + 2}px`;
  const sharp = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * sharp);
  canvas.height = Math.round(visible * sharp);
  canvas.style.height = `${visible}px`;
  document.getElementById("height").style.height = `${height - visible}px`;
  context.setTransform(sharp, 0, 0, sharp, 0, 0);
  theme = Object.fromEntries(["page", "text", "faint", "track", "line", "path", "accent"].map((name) => [name, style(`--${name}`)]));
  theme.hatches = {};
  theme.pales = {};
}

let awaited = false;
function redraw() {
  if (awaited) return;
  awaited = true;
  requestAnimationFrame(() => {
    awaited = false;
    draw();
  });
}

function draw() {
  const x = scale(), offset = scroller.scrollTop, visible = parseFloat(canvas.style.height);
  context.fillStyle = theme.page;
  context.fillRect(0, 0, width, visible);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, visible - AXIS);
  context.clip();
  context.translate(0, -offset);
  const seen = rows.filter((row) => row.top + row.height > offset + AXIS && row.top < offset + visible);
  for (const row of seen) drawRow(row, x);
  for (const panel of model.panels) drawLinks(panel, x);
  context.fillStyle = theme.page;
  context.fillRect(0, offset, LEFT, visible);
  for (const row of seen) drawName(row);
  context.restore();
  drawAxis(x, visible);
  canvas.dataset.seen = x.domain().map((value) => value.toPrecision(6)).join(" ");
}

function drawRow(row, x) {
  if (row.kind === "title") return;
  const start = Math.max(x(0), LEFT), end = Math.min(x(row.panel.seconds), width);
  context.fillStyle = theme.track;
  context.globalAlpha = row.kind === "compute" ? 1 : 0.45;
  if (end > start) context.fillRect(start, row.top, end - start, row.height - 1);
  context.globalAlpha = 1;
  if (row.kind === "memory") drawMemory(row, x);
  for (const lane of row.lanes) drawIntervals(row, lane, x);
}

// Every pixel of a row gets one colour at most, and narrow neighbours of one colour are drawn at once, so that thousands
// of intervals cost little more than dozens.
function drawIntervals(row, lane, x) {
  const { rank } = row, indices = rank.lanes[lane], [from, to] = x.domain();
  let run = null, painted = LEFT;
  for (let position = firstReaching(rank.reach[lane], from); position < indices.length; position++) {
    const index = indices[position], end = x(rank.end[index]);
    if (rank.start[index] > to) break;
    if (end < painted) continue;
    const left = Math.max(painted, Math.round(x(rank.start[index])));
    const right = Math.min(width, Math.max(Math.round(end), left + 1)), narrow = right - left <= 3;
    const colour = fill(row, lane, index, right - left), faint = isFaint(row, index);
    if (run && narrow && run.narrow && run.right === left && run.colour === colour && run.faint === faint) run.right = right;
    else {
      paint(row, run);
      run = { lane, index, left, right, narrow, colour, faint };
    }
    painted = right;
  }
  paint(row, run);
}

function paint(row, run) {
  if (!run) return;
  const wide = run.right - run.left;
  context.globalAlpha = run.faint ? 0.22 : 1;
  context.fillStyle = run.colour;
  context.fillRect(run.left, row.top, run.narrow ? wide : wide - 1, row.height - 1);
  if (run.lane === COMPUTE && row.height > 14 && !run.narrow && wide > 9) drawWords(row, run.index, run.left, wide);
  context.globalAlpha = 1;
}

function fill(row, lane, index, wide) {
  if (lane > WAIT) return colour(model.lanes[lane]);
  const kind = model.words[row.rank.kind[index]];
  if (lane === WAIT) return wide > 4 ? hatch(kind) : pale(kind);
  return row.panel.shades[kind]?.[row.rank.about[index].chunk] ?? colour(kind);
}

function drawWords(row, index, left, wide) {
  const about = row.rank.about[index], kind = model.words[row.rank.kind[index]];
  const words = [about.name, about.microBatch === null ? label(kind) : String(about.microBatch)].find((text) => text.length * 7 + 4 < wide);
  if (!words) return;
  context.fillStyle = ink(kind, row.panel.place[about.chunk]);
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.fillText(words, left + wide / 2, row.top + row.height / 2 + 3.5);
}

// The place of the first interval that does not start before a time.
const firstAfter = (rank, indices, moment) => firstPlace(indices.length, (place) => rank.start[indices[place]] >= moment);

// The place of the first interval that is not over at a time.
const firstReaching = (reach, moment) => firstPlace(reach.length, (place) => reach[place] > moment);

// The first of ``count`` places at which ``holds`` holds, as it does at all later ones.
function firstPlace(count, holds) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// What does not belong to the micro-batch or the critical path that the user follows.
function isFaint(row, index) {
  if (state.microBatch !== null) return row.rank.about[index].microBatch !== state.microBatch;
  return state.path && !row.panel.onPath.has(`${row.index} ${index}`);
}

function hatch(kind) {
  if (!(kind in theme.hatches)) {
    const tile = new OffscreenCanvas(12, 12), pen = tile.getContext("2d");
    pen.fillStyle = pale(kind, 0.22);
    pen.fillRect(0, 0, 12, 12);
    pen.strokeStyle = colour(kind);
    pen.lineWidth = 1.4;
    for (const start of [-6, 0, 6, 12]) {
      pen.beginPath();
      pen.moveTo(start - 1, 13);
      pen.lineTo(start + 13, -1);
      pen.stroke();
    }
    theme.hatches[kind] = context.createPattern(tile, "repeat");
  }
  return theme.hatches[kind];
}

// The colour as it looks from far away, where one cannot see the lines of a hatch.
function pale(kind, share = 0.45) {
  return (theme.pales[`${kind} ${share}`] ??= `color-mix(in srgb, ${colour(kind)} ${100 * share}%, ${theme.page})`);
}

function drawMemory(row, x) {
  const [times, bytes] = row.rank.memory, base = row.top + row.height - 1, y = (alive) => base - ((row.height - 4) * (alive - floor)) / (most - floor || 1) - 1;
  context.save();
  context.beginPath();
  context.rect(LEFT, row.top, width - LEFT, row.height);
  context.clip();
  context.beginPath();
  context.moveTo(x(times[0]), base);
  times.forEach((moment, index) => {
    if (index) context.lineTo(x(moment), y(bytes[index - 1]));
    context.lineTo(x(moment), y(bytes[index]));
  });
  context.lineTo(x(times.at(-1)), base);
  context.fillStyle = theme.faint;
  context.globalAlpha = 0.35;
  context.fill();
  context.restore();
}

// The least and the most that a rank remembers.
function remembered(rank) {
  const bytes = rank.memory[1], [low, high] = [bytes.reduce((a, b) => Math.min(a, b)), bytes.reduce((a, b) => Math.max(a, b))].map(size);
  return low === high ? high : `${low.split(" ")[1] === high.split(" ")[1] ? low.split(" ")[0] : low} to ${high}`;
}

// Lines from interval to interval: the critical path, the micro-batch, what the chosen interval followed.
function drawLinks(panel, x) {
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, height);
  context.clip();
  if (state.path && state.microBatch === null) drawThread(panel, panel.path, x, theme.path, 2);
  if (state.microBatch !== null) for (const places of panel.ofMicroBatch(state.microBatch)) drawThread(panel, places, x, theme.path, 1.25);
  const shown = state.shown;
  if (shown && shown.row.panel === panel) {
    const { row, index } = shown, cause = causeOf(row.rank, index);
    context.strokeStyle = theme.accent;
    context.lineWidth = 2;
    const left = x(row.rank.start[index]);
    context.strokeRect(left, row.top - 0.5, Math.max(2, x(row.rank.end[index]) - left), row.height);
    if (cause) drawThread(panel, [cause, [row.index, index]], x, theme.accent, 2);
  }
  context.restore();
}

function drawThread(panel, places, x, colour, thick) {
  context.strokeStyle = colour;
  context.lineWidth = thick;
  context.beginPath();
  for (const [rankIndex, index] of places) {
    const rank = panel.ranks[rankIndex], row = rowOf(panel, rankIndex, rank.lane[index]);
    if (!row) continue;
    const y = row.top + row.height - 3;
    context.lineTo(x(rank.start[index]), y);
    context.lineTo(x(rank.end[index]), y);
  }
  context.stroke();
}

function rowOf(panel, rankIndex, lane) {
  return rows.find((row) => row.panel === panel && row.index === rankIndex && row.lanes?.includes(lane));
}

function drawName(row) {
  const middle = row.top + row.height / 2;
  context.textAlign = "left";
  context.fillStyle = row.kind === "compute" || row.kind === "title" ? theme.text : theme.faint;
  const bold = row.kind === "title" ? "bold 14" : row.height > 14 && row.kind === "compute" ? "13" : "10.5";
  context.font = `${bold}px ${FONT}`;
  const compact = row.kind === "compute" && row.height < 14 && row.index % 4;
  if (!compact) context.fillText(nameOf(row), row.kind === "title" || row.kind === "compute" ? 10 : 26, middle + 4);
}

function nameOf(row) {
  if (row.kind === "title") return row.panel.title;
  if (row.kind === "compute") return row.rank.label;
  return row.kind === "memory" ? remembered(row.rank) : model.lanes[row.lanes[0]];
}

function drawAxis(x, visible) {
  context.fillStyle = theme.page;
  context.fillRect(0, 0, width, AXIS);
  context.fillStyle = theme.faint;
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  for (const tick of x.ticks(Math.max(3, Math.round((width - LEFT) / 110)))) {
    const left = Math.round(x(tick)) + 0.5;
    if (left < LEFT) continue;
    context.fillText(time(tick), Math.min(left, width - 24), 14);
    context.beginPath();
    context.moveTo(left, AXIS - 5);
    context.lineTo(left, AXIS);
    context.stroke();
    context.globalAlpha = 0.5;
    context.beginPath();
    context.moveTo(left, AXIS);
    context.lineTo(left, visible);
    context.globalCompositeOperation = "destination-over";
    context.stroke();
    context.globalCompositeOperation = "source-over";
    context.globalAlpha = 1;
  }
}

const causeOf = (rank, index) => (rank.cause[2 * index] < 0 ? null : [rank.cause[2 * index], rank.cause[2 * index + 1]]);

// The row and the interval at a point of the canvas.
function at(left, top) {
  if (left < LEFT || top < AXIS) return null;
  const y = top + scroller.scrollTop, row = rows.find((each) => y >= each.top && y < each.top + each.height);
  if (!row?.rank) return null;
  const moment = scale().invert(left);
  for (const lane of row.lanes) {
    const indices = row.rank.lanes[lane], reach = row.rank.reach[lane];
    for (let position = firstAfter(row.rank, indices, moment) - 1; position >= 0 && reach[position] > moment; position--) {
      if (moment < row.rank.end[indices[position]]) return { row, index: indices[position], moment };
    }
  }
  return { row, index: null, moment };
}
