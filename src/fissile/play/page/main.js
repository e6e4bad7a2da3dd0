// The page: it asks for experiments, and draws what comes.

import { chart } from "./chart.js";
import { Controls } from "./controls.js";
import { csv, picture, png, save } from "./keep.js";
import { Lens } from "./lens.js";
import { chips, Networks, STAGES } from "./network.js";
import { live, still } from "./source.js";
import { armClass, build, called, draw, mean, shown, spread } from "./svg.js";

const $ = (id) => document.getElementById(id);
const MEASURES = {
  capacity: ["Feature capacity", 2], cosine: ["|cosine| of neurons", 3], collisions: ["Edge collisions", 3],
};
const SIDES = { fashionmnist: 28, digits: 8 };

const about = await (await fetch("about.json")).json();
let state = null, coming = null, lastAsked = 0, timer = 0, tellAt = () => "", preset = null;
const networks = new Networks(document, (text) => { $("readout").textContent = text; });
const lens = new Lens(document);
const controls = new Controls($("controls"), about, changed);
const notice = (text) => { $("notice").textContent = text; $("notice").hidden = !text; };
const ask = (about.still ? still : live)(hear, notice);

// --- asking

function changed() {
  clearTimeout(timer);
  preset = null;
  document.querySelector("main").classList.add("waiting");
  const left = lastAsked + 60 - performance.now();
  timer = setTimeout(begin, Math.max(0, left));
}

function begin() {
  lastAsked = performance.now();
  const settings = controls.differing();
  history.replaceState(null, "", `#${new URLSearchParams(settings)}`);
  showPresets();
  controls.problem.textContent = "";
  document.querySelector("main").classList.add("waiting");
  ask(settings, preset ?? about.presets[0]);
}

function take(one) {
  preset = one;
  controls.take(one.settings);
  begin();
}

function fromAddress() {
  const settings = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const known = new Set(about.controls.map((one) => one.name));
  for (const name of Object.keys(settings)) if (!known.has(name)) delete settings[name];
  controls.take(settings);
  preset = about.presets.find((one) => same(one.settings, settings)) ?? (about.still ? about.presets[0] : null);
  if (about.still) controls.take(preset.settings);
  begin();
}

const same = (one, other) => new URLSearchParams(Object.entries(one).sort()).toString() === new URLSearchParams(Object.entries(other).sort()).toString();

function showPresets() {
  const now = controls.differing();
  for (const button of $("presets").children) button.setAttribute("aria-current", same(button.settings, now));
  $("about").textContent = about.presets.find((one) => same(one.settings, now))?.about ?? "";
}

// --- hearing

function hear(event) {
  if (event.kind === "error") {
    document.querySelector("main").classList.remove("waiting");
    controls.problem.textContent = event.error;
    $("asked").textContent = event.error;
    return;
  }
  if (event.kind === "begin") {
    coming = started(event);
    return;
  }
  if (!coming) return;
  state = coming;
  document.querySelector("main").classList.remove("waiting");
  ({ epochs: grow, split: splitUp, done: finish })[event.kind]?.(event);
}

function started(event) {
  const all = { ...controls.defaults(), ...event.settings }, side = SIDES[all.task];
  return {
    arms: event.arms, trials: event.trials, warmUp: event.warm_up, epochs: event.epochs, theory: event.theory,
    side, size: Number(all.size), clauses: Number(all.clauses), neurons: Number(all.neurons), look: Math.min(Number(all.look), event.trials),
    seed: Number(all.seed), task: all.task, settings: all,
    series: event.arms.map((arm) => ({ arm, points: [] })), measures: {}, differences: {},
  };
}

function grow(event) {
  const done = event.from + Object.values(event.accuracy)[0][0].length;
  for (const { arm, points } of state.series) {
    const rows = event.accuracy[arm];
    if (!rows) continue;
    for (let step = 0; step < rows[0].length; step++) points.push([event.from + step + 1, rows.map((row) => percent(row[step]))]);
  }
  state.differences = event.differences;
  state.now = done;
  note(event.measures, done);
  showCurves();
  showTable();
  $("asked").textContent = `${summary()} · epoch ${done} of ${state.epochs}`;
}

function splitUp(event) {
  const warm = state.series[0].points.at(-1)[1];
  state.dropped = event.accuracy;
  for (const { arm, points } of state.series.slice(1)) {
    points.push([state.warmUp, warm], [state.warmUp, event.accuracy[arm].map(percent)]);
  }
  Object.assign(state, { nonzeros: event.nonzeros, covered: event.covered, network: event.network });
  state.inputs = event.network.dense.w1[0].length;
  state.outputs = event.network.dense.w2.length;
  note(event.measures, state.warmUp);
  showCurves();
  showNetworks();
  showTheory();
}

function finish(event) {
  Object.assign(state, { final: event.accuracy, differences: event.differences, weights: event.weights, mistakes: event.mistakes, python: event.python, seconds: event.seconds });
  for (const values of Object.values(state.measures)) for (const points of Object.values(values)) if (points.at(-1)?.[0] === state.epochs) points.pop();
  note(event.measures, state.epochs);
  showCurves();
  showTable();
  showNetworks();
  lens.show(state, shownArm());
  $("python").textContent = event.python;
  $("asked").textContent = `${summary()} · ${event.seconds === null ? "computed beforehand" : `trained in ${shown(event.seconds, 1)} s`}${event.diverged ? ` · ${event.diverged} networks diverged` : ""}`;
  $("headline").textContent = headline();
  document.body.dataset.done = String(Number(document.body.dataset.done ?? 0) + 1);
}

function note(measures, epoch) {
  for (const [name, values] of Object.entries(measures)) {
    const kept = (state.measures[name] ??= {});
    for (const arm of Object.keys(values)) (kept[arm] ??= []).push([epoch, values[arm]]);
  }
}

const percent = (value) => (value === null ? null : 100 * value);

// --- words and tables

function summary() {
  const of = state.side ? about.controls[0].choices[state.task] : `${state.clauses} clauses of ${state.size} literals`;
  const alpha = state.settings.alpha;
  return `${of} · ${state.neurons} neurons · α = ${alpha} · ${Number(state.settings.samples).toLocaleString("en")} samples · ${state.trials} trial${state.trials > 1 ? "s" : ""}`;
}

function headline() {
  const words = state.arms.slice(1).map((arm, place) => {
    const [gain, low, high] = state.differences[arm], many = arm.startsWith("overlapping"), s = many ? "" : "s";
    const name = many ? called(arm) : `the ${called(arm)}`, points = `${shown(Math.abs(gain), 1)}${place ? "" : " points"}`;
    if (low !== null && low > 0) return `${name} gain${s} ${points}`;
    if (high !== null && high < 0) return `${name} lose${s} ${points}`;
    return `${name} ${many ? "are" : "is"} level (${shown(gain, 1, true)})`;
  });
  const text = `${words.join(", ")}, with the same ${mean(state.nonzeros.dense).toLocaleString("en")} weights.`;
  return text[0].toUpperCase() + text.slice(1);
}

function showTable() {
  const table = $("results"), boolean = !state.side, body = build(null, "tbody");
  const columns = ["", "Accuracy, %", "At the split, %", "Gain, points [95 %]", "Non-zero weights", ...(boolean ? ["Capacity"] : []), "|cosine|", ...(boolean ? ["Collisions", "Codes"] : [])];
  const head = build(null, "thead", {}, build(null, "tr", {}, ...columns.map((text) => build(null, "th", { scope: "col", textContent: text }))));
  for (const { arm, points } of state.series) {
    const row = build(body, "tr", { className: armClass(arm) });
    build(row, "th", { scope: "row" }, build(null, "span", { className: "swatch" }), called(arm));
    const last = state.final?.[arm]?.map(percent) ?? points.at(-1)?.[1] ?? [];
    cell(row, last, 2).dataset.number = `accuracy ${arm}`;
    cell(row, state.dropped?.[arm].map(percent) ?? [], 1, false);
    const gain = state.differences[arm];
    const told = build(row, "td", { textContent: gain ? shown(gain[0], 2, true) : "" });
    if (gain && gain[1] !== null) told.append(build(null, "small", { textContent: ` [${shown(gain[1], 2, true)}, ${shown(gain[2], 2, true)}]` }));
    told.dataset.number = `gain ${arm}`;
    build(row, "td", { textContent: state.nonzeros ? Math.round(mean(state.nonzeros[arm])).toLocaleString("en") : "" }).dataset.number = `nonzeros ${arm}`;
    for (const [name, digits] of [...(boolean ? [["capacity", 2]] : []), ["cosine", 3], ...(boolean ? [["collisions", 3], ["codes", 1]] : [])]) {
      cell(row, state.measures[name]?.[arm]?.at(-1)?.[1] ?? [], digits, false).dataset.number = `${name} ${arm}`;
    }
  }
  table.replaceChildren(head, body);
}

function cell(row, values, digits, error = true) {
  const made = build(row, "td", { textContent: values.length ? shown(mean(values), digits) : "" });
  if (error && values.length > 1) made.append(build(null, "small", { textContent: ` ± ${shown(spread(values), digits)}` }));
  return made;
}

function showCurves() {
  tellAt = chart($("curves"), state.series, { epochs: state.epochs, splitAt: state.warmUp, unit: " %", trials: true });
  $("curves").setAttribute("aria-label", `Test accuracy by epoch: ${state.series.filter((one) => one.points.length).map(({ arm, points }) => `${called(arm)} ${shown(mean(points.at(-1)[1]), 1)} %`).join(", ")}`);
  const box = $("measures"), names = Object.keys(MEASURES).filter((name) => state.measures[name]);
  if (box.children.length !== names.length || [...box.children].some((one, place) => one.name !== names[place])) {
    box.replaceChildren();
    for (const name of names) {
      const figure = build(box, "figure", { name });
      build(figure, "figcaption", { textContent: MEASURES[name][0] });
      draw(figure, "svg", { class: "chart", role: "img" });
    }
  }
  names.forEach((name, place) => {
    const values = state.measures[name], series = state.series.map(({ arm }) => ({ arm, points: values[arm] ?? [] }));
    const svg = box.children[place].querySelector("svg");
    chart(svg, series, { epochs: state.epochs, splitAt: state.warmUp, names: false, digits: MEASURES[name][1] });
    svg.setAttribute("aria-label", `${MEASURES[name][0]}: ${series.filter((one) => one.points.length).map(({ arm, points }) => `${called(arm)} ${shown(mean(points.at(-1)[1]), MEASURES[name][1])}`).join(", ")}`);
  });
}

function showTheory() {
  const boolean = !state.side, table = $("theory");
  $("why").querySelector("h3").hidden = table.hidden = !boolean;
  if (!boolean) return;
  const arms = state.arms.slice(1), { theory, covered } = state;
  const rows = [
    ["Clauses that some child sees whole, %", percent(theory.clauses), "clauses", 100, 1],
    ["Trials in which every clause is seen whole, %", percent(theory.coverage), "trials", 100, 1],
    ["Clauses that collide in a child, of the dense network’s, %", percent(theory.collisions), "collisions", 100, 2],
  ];
  const head = build(null, "thead", {}, build(null, "tr", {}, ...["", "Theory, random split", ...arms.flatMap((arm) => [`${called(arm)}, dealt`, "after pruning"])].map((text) => build(null, "th", { scope: "col", textContent: text }))));
  const body = build(null, "tbody");
  for (const [text, value, key, times, digits] of rows) {
    build(body, "tr", {}, build(null, "th", { scope: "row", textContent: text }), build(null, "td", { textContent: shown(value, digits) }),
      ...arms.flatMap((arm) => ["dealt", "kept"].map((part) => build(null, "td", { textContent: shown(times * covered[arm][part][key], digits) }))));
  }
  build(body, "tr", {}, build(null, "th", { scope: "row", textContent: "Neurons needed to see every clause in 95 % of trials" }),
    build(null, "td", { textContent: theory.needed === null ? "none is enough" : theory.needed.toLocaleString("en") }), ...arms.flatMap(() => [build(null, "td"), build(null, "td")]));
  table.replaceChildren(head, body);
}

// --- networks

let arm = null;
const shownArm = () => (state.arms.includes(arm) ? arm : state.arms[1]);

function showNetworks() {
  arm = shownArm();
  chips($("arms"), "arm", state.arms.slice(1).map((one) => [one, called(one)]), arm, (one) => {
    arm = one;
    networks.show(state, arm);
    if (state.weights) lens.show(state, arm);
  });
  const stages = STAGES.slice(0, state.weights ? 5 : 4);
  networks.show(state, arm);
  chips($("stages"), "stage", stages.map((text, place) => [place, text]), networks.stage, (stage) => { networks.stop(); networks.wanted = stage; networks.go(stage); });
  if (state.weights && networks.stage === 3 && networks.wanted !== 3) choose(4);
}

function choose(stage) {
  networks.go(stage, false);
  const inputs = $("stages").querySelectorAll("input");
  if (inputs[stage]) inputs[stage].checked = true;
}

// --- wiring

for (const one of about.presets) {
  const button = build($("presets"), "button", { type: "button", textContent: one.title, settings: one.settings });
  button.addEventListener("click", () => take(one));
}
$("watch").addEventListener("click", () => state?.network && networks.watch((stage) => {
  const inputs = $("stages").querySelectorAll("input");
  if (inputs[stage]) inputs[stage].checked = true;
}));
$("curves").addEventListener("pointermove", (event) => { $("at").textContent = tellAt(event.clientX); });
$("curves").addEventListener("pointerleave", () => { $("at").textContent = ""; });
$("keep").addEventListener("click", async (event) => {
  const kind = event.target.dataset?.keep;
  if (!kind || !state?.final) return;
  const drawings = [$("curves"), $("weights"), ...(state.side ? [] : [$("gram")])];
  const text = kind === "svg" || kind === "png" ? picture(drawings, summary()) : "";
  if (kind === "svg") save(text, "fissile-play.svg");
  if (kind === "png") save(await png(text), "fissile-play.png");
  if (kind === "csv") save(csv(state), "fissile-play.csv");
  if (kind === "link" || kind === "python") {
    await navigator.clipboard.writeText(kind === "link" ? location.href : state.python);
    $("kept").textContent = "Copied.";
  }
});
addEventListener("hashchange", fromAddress);
let resized = 0;
new ResizeObserver(() => {
  clearTimeout(resized);
  resized = setTimeout(() => {
    if (!state) return;
    showCurves();
    if (state.network) networks.show(state, shownArm());
  }, 100);
}).observe(document.querySelector("main"));
$("settings").open = innerWidth > 960;
new IntersectionObserver(([seen], self) => {
  if (!seen.isIntersecting || !state?.weights) return;
  self.disconnect();
  $("watch").click();
}, { threshold: 0.6 }).observe($("weights"));
if (about.still) {
  $("settings").hidden = true;
  document.querySelector("header .quiet").textContent = "A still copy: experiments that were computed beforehand. To move everything yourself: pip install 'fissile[play]' and fissile play.";
}
fromAddress();
