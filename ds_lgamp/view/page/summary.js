"use strict";
// The bars that answer where the time goes, the table of all numbers, and the legend.

const KINDS = model.kinds;
const longest = Math.max(...model.panels.map((panel) => panel.seconds));

function showSummary() {
  const summary = document.getElementById("summary");
  summary.replaceChildren(...model.panels.map(summaryOf));
  for (const words of summary.querySelectorAll("em")) words.hidden = words.offsetWidth + 8 > words.parentElement.clientWidth;
  document.getElementById("table").replaceChildren(tableOfKinds(), ...model.panels.map(tableOfRanks));
  document.getElementById("legend").replaceChildren(...legend());
}

const mean = (panel, kind) => panel.by_rank.reduce((sum, rank) => sum + rank[kind], 0) / panel.by_rank.length;
const isCompute = (kind) => KINDS.indexOf(kind) < model.computeKinds;

function summaryOf(panel) {
  const means = Object.fromEntries(KINDS.map((kind) => [kind, mean(panel, kind)]));
  const computes = KINDS.filter(isCompute).reduce((sum, kind) => sum + means[kind], 0);
  const waits = KINDS.filter((kind) => isWait(kind) && means[kind] > 0).sort((a, b) => means[b] - means[a]);
  const waited = waits.reduce((sum, kind) => sum + means[kind], 0);
  const share = (seconds) => element("b", {}, percent(seconds / panel.seconds));
  const sentence = element("p", {}, element("b", {}, panel.title), `: ${time(panel.seconds)}. The ranks compute `, share(computes), " of it");
  if (waits.length) sentence.append(", wait ", share(waited), `, most for ${NOUNS[waits[0]] ?? waits[0]} (${percent(means[waits[0]] / panel.seconds)})`);
  if (means.idle > 0) sentence.append(", and idle ", share(means.idle));
  sentence.append(". ", element("span", { class: "about" }, `Bubble: ${percent(panel.bubble)} of the compute time.`));
  return element("div", { class: "panel" }, sentence,
    element("span", { class: "name" }, "mean of ranks"), bar(means, panel),
    element("span", { class: "name" }, "critical path"), bar(panel.critical_path, panel, "small"));
}

const NOUNS = {
  gather: "gathers", reduce: "reductions", activation: "activations", gradient: "gradients", send: "sends", load: "loads", store: "stores",
};

function bar(seconds, panel, more = "") {
  const parts = Object.entries(seconds).filter(([, spent]) => spent > 0);
  const made = element("div", { class: `bar ${more}`, role: "img", "aria-label": parts.map(([kind, spent]) => `${label(kind)} ${time(spent)}`).join(", ") });
  for (const [kind, spent] of parts) {
    const words = element("em", {}, `${label(kind)} ${percent(spent / panel.seconds)}`);
    const part = element("span", { title: `${label(kind)}: ${time(spent)}, ${percent(spent / panel.seconds)}` }, words);
    part.style.flex = `0 0 ${(100 * spent) / longest}%`;
    part.style.background = isWait(kind) && !more ? hatched(colour(kind)) : colour(kind);
    part.style.color = isWait(kind) && !more ? style("--text") : ink(kind);
    if (isWait(kind) && !more) words.className = "on-hatch";
    made.append(part);
  }
  return made;
}

const isWait = (kind) => KINDS.includes(kind) && !isCompute(kind) && kind !== "idle";
const hatched = (colour) => `repeating-linear-gradient(135deg, ${colour} 0 2px, color-mix(in srgb, ${colour} 22%, ${style("--page")}) 2px 7px)`;

function tableOfKinds() {
  const table = element("table");
  const titles = element("tr", {}, element("th")), head = element("tr", {}, element("th"));
  for (const panel of model.panels) {
    titles.append(element("th", { colspan: 3 }, panel.title));
    head.append(element("th", {}, "mean of ranks"), element("th", {}, "share"), element("th", {}, "most, on rank"));
  }
  table.append(element("thead", {}, titles, head));
  for (const kind of KINDS.filter((kind) => model.panels.some((panel) => mean(panel, kind) > 0))) {
    const row = element("tr", {}, element("td", {}, swatch(kind), label(kind)));
    for (const panel of model.panels) {
      const times = panel.by_rank.map((rank) => rank[kind]), most = Math.max(...times), rank = times.findIndex((spent) => spent >= most * (1 - 1e-6));
      row.append(element("td", {}, time(mean(panel, kind))), element("td", {}, percent(mean(panel, kind) / panel.seconds)),
        element("td", {}, most > 0 ? `${time(most)} on ${rank}` : ""));
    }
    table.append(row);
  }
  const whole = element("tr", {}, element("td", {}, "whole step"));
  for (const panel of model.panels) whole.append(element("td", {}, time(panel.seconds)), element("td", {}, ""), element("td", {}, ""));
  table.append(whole);
  return table;
}

function swatch(kind) {
  const made = element("i");
  made.style.background = isWait(kind) ? hatched(colour(kind)) : colour(kind);
  return made;
}

function tableOfRanks(panel) {
  const kinds = KINDS.filter((kind) => mean(panel, kind) > 0);
  const remembers = panel.peak_bytes.some((bytes) => bytes > 0);
  const head = element("tr", {}, element("th", {}, "rank"), ...kinds.map((kind) => element("th", {}, label(kind))));
  if (remembers) head.append(element("th", {}, "peak memory"));
  const rows = panel.by_rank.map((times, rank) => {
    const row = element("tr", {}, element("td", {}, panel.ranks[rank].detail), ...kinds.map((kind) => element("td", {}, time(times[kind]))));
    if (remembers) row.append(element("td", {}, size(panel.peak_bytes[rank])));
    return row;
  });
  return element("details", {}, element("summary", {}, `Every rank: ${panel.title}`),
    element("div", { class: "scrolls" }, element("table", {}, element("thead", {}, head), ...rows)));
}

function legend() {
  const kinds = KINDS.filter((kind) => model.panels.some((panel) => mean(panel, kind) > 0));
  const items = kinds.map((kind) => [swatch(kind), isWait(kind) ? `waits for ${kind}` : label(kind)]);
  const beside = model.lanes.slice(2).filter((_, place) => model.panels.some((panel) => panel.ranks.some((rank) => rank.lanes[place + 2].length)));
  for (const lane of beside.filter((lane) => !kinds.includes(lane) || isWait(lane))) {
    const made = element("i");
    made.style.background = colour(lane);
    items.push([made, lane]);
  }
  const shades = element("i");
  shades.style.background = `linear-gradient(90deg, ${shade("forward", 0)}, ${shade("forward", 1)})`;
  items.push([shades, "first to last chunk of the rank"]);
  return items.map((parts) => element("li", {}, ...parts));
}
