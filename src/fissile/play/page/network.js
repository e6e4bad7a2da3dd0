// The networks: weights of the dense one and of the split one, the split as stages, Gram matrices.

import { build, called, draw, shown } from "./svg.js";

export const STAGES = ["one neuron", "copied", "dealt", "pruned back", "fine-tuned"];
const TOLD = [
  "After the warm-up: both networks are still the same.",
  "Every neuron is copied, and so is its weight out: for a moment each input counts once for every child.",
  "Each input is dealt to one child; the others lose it (×). Children of one neuron share no input.",
  "The smallest weights go, until there are as many as before.",
  "Both networks train on. Frames mark codes: a positive weight for every literal of a clause, a negative bias, a positive weight out.",
];
const BINS = 9;

/** Draws one trial's networks, and tells what is under the pointer or the cursor. */
export class Networks {
  constructor(root, tell) {
    this.svg = root.querySelector("#weights");
    this.gram = root.querySelector("#gram");
    this.about = root.querySelector("#networks-about");
    this.tell = tell;
    this.stage = STAGES.length - 1;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.unmark());
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Show a network: its settings, the trial's weights before and after, and the arm. */
  show(state, arm) {
    this.state = state;
    this.arm = arm;
    this.part = state.network.arms[arm];
    this.cursor = null;
    this.layout();
    this.paint();
    this.go(state.weights ? this.stage : Math.min(this.stage, 3), false);
  }

  /** Go to a stage of the split. */
  go(stage, moving = true) {
    this.stage = stage;
    this.svg.classList.toggle("still", !moving);
    this.svg.setAttribute("class", `stage-${stage}${moving ? "" : " still"}`);
    this.about.textContent = this.told(stage);
    this.drawGram();
    this.describe();
  }

  told(stage) {
    if (stage === 2 && !this.part.dealt) return "The control: every child draws its inputs anew, so children may share some (×: none of its own).";
    return stage === 4 && this.state.side ? "Both networks train on." : TOLD[stage];
  }

  /** Play the split from its beginning; without motion where that is asked for. */
  async watch(chosen) {
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const last = this.state.weights ? 4 : 3;
    const mine = (this.playing = Symbol("playing"));
    for (let stage = 0; stage <= last; stage++) {
      if (this.playing !== mine) return;
      this.go(stage, !still && stage > 0);
      chosen(stage);
      await new Promise((done) => setTimeout(done, stage ? 1500 : 700));
    }
  }

  stop() { this.playing = null; }

  layout() {
    const { side, inputs, outputs, neurons } = this.state;
    const alpha = this.part.alpha, room = Math.max(640, this.svg.parentElement.clientWidth);
    const shape = (this.shape = { alpha, inputs, outputs, neurons, side });
    if (side) {
      const cell = Math.max(1, Math.min(6, Math.floor((room - 90) / (alpha + 1) / side - 1)));
      const tile = cell * side, line = tile + 16;
      Object.assign(shape, { w: cell, h: cell, across: tile, down: tile, top: 24, ends: 0 });
      shape.parent = (i) => [4, shape.top + i * line];
      shape.child = (i, k) => [tile + 70 + k * (tile + 10), shape.top + i * line];
      this.size = [tile + 80 + alpha * (tile + 10), shape.top + neurons * line];
    } else {
      const gap = 96, ends = 34, width = (room - gap - 2 * ends - 30) / 2;
      const w = Math.min(20, Math.max(2.2, width / inputs));
      const h = Math.max(7, Math.min(18, 400 / (alpha * neurons)));
      const block = alpha * h + Math.max(5, h * 0.5);
      Object.assign(shape, { w, h, across: w * inputs, down: h, top: 34, ends });
      const second = w * inputs + ends + gap;
      shape.parent = (i) => [22, shape.top + i * block + ((alpha - 1) * h) / 2];
      shape.child = (i, k) => [22 + second, shape.top + i * block + k * h];
      this.size = [22 + second + w * inputs + ends + 6, shape.top + neurons * block + 4];
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.size[0]} ${this.size[1]}`);
    Object.assign(this.svg.style, { width: `${this.size[0]}px`, height: `${this.size[1]}px` });
  }

  at(input) {
    const { side, w, h } = this.shape;
    return side ? [(input % side) * w, Math.floor(input / side) * h] : [input * w, 0];
  }

  paint() {
    const { svg, shape, part, state } = this, { alpha, neurons, inputs } = shape;
    const before = state.network.dense, after = state.weights?.dense, tuned = state.weights?.[this.arm];
    const scale = most([before.w1, ...(after ? [after.w1, tuned.w1] : [])].flat(2));
    const outScale = most([before.w2, ...(after ? [after.w2, tuned.w2] : [])].flat(2));
    svg.replaceChildren();
    this.heads();
    for (let i = 0; i < neurons; i++) {
      const [px, py] = shape.parent(i);
      const row = draw(svg, "g", { transform: `translate(${px} ${py})` });
      this.label(svg, px, py, i + 1);
      this.cells(draw(row, "g", { class: "before" }), before.w1[i], scale);
      this.outs(draw(row, "g", { class: "before" }), before, i, outScale);
      if (after) {
        const own = draw(row, "g", { class: "after" });
        this.cells(own, after.w1[i], scale);
        this.outs(own, after, i, outScale);
        this.codes(own, after, i);
      }
      for (let k = 0; k < alpha; k++) {
        const [cx, cy] = shape.child(i, k), child = i * alpha + k;
        if (!state.side) draw(svg, "path", { class: "branch", d: `M${px + shape.across + shape.ends + 6} ${py + shape.h / 2}C${cx - 48} ${py + shape.h / 2} ${cx - 52} ${cy + shape.h / 2} ${cx - 8} ${cy + shape.h / 2}` });
        const place = draw(svg, "g", { transform: `translate(${cx} ${cy})` });
        const home = state.side ? [shape.child(i, 0)[0] - cx, 0] : [0, py - cy];
        const moved = draw(place, "g", { class: "row" });
        moved.style.setProperty("--dx", `${home[0]}px`);
        moved.style.setProperty("--dy", `${home[1]}px`);
        const mine = (j) => (part.dealt ? part.dealt[i][j] === k : part.kept[child][j] === "1");
        const kept = (j) => part.kept[child][j] === "1";
        const weights = before.w1[i];
        this.cells(draw(moved, "g", { class: "lost" }), weights, scale, (j) => !mine(j));
        this.cells(draw(moved, "g", { class: "cut" }), weights, scale, (j) => mine(j) && !kept(j));
        this.cells(draw(moved, "g", { class: "own" }), weights, scale, kept);
        this.crosses(draw(moved, "g", { class: "gone" }), (j) => !mine(j));
        this.crosses(draw(moved, "g", { class: "gone cuts" }), (j) => mine(j) && !kept(j));
        const lostOut = part.kept2[0][child] === "0" && !state.side;
        this.outs(draw(moved, "g", { class: lostOut ? "cut" : "own" }), before, i, outScale);
        if (tuned) {
          const own = draw(moved, "g", { class: "tuned" });
          this.cells(own, tuned.w1[child], scale, kept);
          this.outs(own, tuned, child, outScale);
          this.codes(own, tuned, child);
        }
        if (!state.side) this.dividers(moved);
      }
      if (!state.side) this.dividers(row);
    }
    for (let i = 0; i < neurons; i++) {  // on top, for the pointer
      this.hit(shape.parent(i), { side: "dense", i });
      for (let k = 0; k < alpha; k++) this.hit(shape.child(i, k), { side: "split", i, k });
    }
    this.marks = draw(svg, "g");
  }

  heads() {
    const { svg, shape, state } = this, [px] = shape.parent(0), [cx] = shape.child(0, 0);
    draw(svg, "text", { x: px, y: 12, "font-weight": 600 }, state.side ? "parents" : `dense: ${shape.neurons} neurons`);
    draw(svg, "text", { x: cx, y: 12, "font-weight": 600 }, state.side ? `children, ${called(this.arm)}` : `${called(this.arm)}: ${shape.neurons * shape.alpha} neurons`);
    if (state.side) return;
    const width = shape.w * state.size;
    for (const left of [px, cx]) {
      for (let c = 0; c < shape.inputs / state.size; c++) {
        const step = width < 14 ? 4 : 1;
        if (c % step === 0) draw(svg, "text", { class: "faint", x: left + (c + 0.5) * width, y: shape.top - 6, "text-anchor": "middle" }, c + 1);
        draw(svg, "rect", { class: "hit", x: left + c * width, y: shape.top - 18, width, height: 16 }).which = { clause: c };
      }
      draw(svg, "text", { class: "faint", x: left + shape.across + 8, y: shape.top - 6 }, "b");
      draw(svg, "text", { class: "faint", x: left + shape.across + 19, y: shape.top - 6 }, "out");
    }
  }

  label(svg, x, y, text) {
    if (this.state.side) return;
    draw(svg, "text", { class: "faint", x: x - 6, y: y + this.shape.h / 2 + 4, "text-anchor": "end" }, text);
    draw(svg, "rect", { class: "hit", x: x - 22, y, width: 20, height: this.shape.h }).which = { neuron: text - 1 };
  }

  /** Draw weights as cells, those of about one size as one path. */
  cells(group, weights, scale, which = () => true) {
    const paths = new Map(), { w, h } = this.shape;
    weights.forEach((weight, j) => {
      if (!which(j)) return;
      const bin = Math.max(-BINS, Math.min(BINS, Math.round((weight / scale) * BINS)));
      const [x, y] = this.at(j);
      paths.set(bin, `${paths.get(bin) ?? ""}M${round(x)} ${y}h${round(w)}v${h}h${-round(w)}z`);
    });
    for (const [bin, d] of paths) tint(draw(group, "path", { d }), bin);
  }

  outs(group, net, row, scale) {
    const { shape } = this;
    if (this.state.side) return;
    const both = [[net.b1[row], 6], [net.w2[0][row], 20]];
    both.forEach(([value, x], place) => {
      if (place && value === 0) return this.cross(group, shape.across + x, 0, 9, shape.h);
      const bin = Math.max(-BINS, Math.min(BINS, Math.round((value / (place ? scale : 1)) * BINS)));
      tint(draw(group, "path", { d: `M${shape.across + x} 0h9v${shape.h}h-9z` }), bin);
    });
  }

  crosses(group, which) {
    const { inputs, w, h } = this.shape, r = Math.min(w, h) * 0.2;
    if (this.state.side) return;
    let d = "";
    for (let j = 0; j < inputs; j++) if (which(j)) d += crossed(j * w + w / 2, h / 2, r);
    if (d) draw(group, "path", { class: "missing", d });
  }

  cross(group, x, y, w, h) {
    draw(group, "path", { class: "missing", d: crossed(x + w / 2, y + h / 2, Math.min(w, h) * 0.25) });
  }

  dividers(group) {
    const { inputs, w, h } = this.shape, size = this.state.size;
    let d = "";
    for (let c = 1; c < inputs / size; c++) d += `M${round(c * size * w)} 0v${h}`;
    draw(group, "path", { class: "divide", d });
    draw(group, "path", { class: "divide", "stroke-width": 1, d: `M0 ${h}H${this.shape.across + 30}` });
  }

  /** Frame the clauses whose code a neuron holds, as fissile.measure.codes does. */
  codes(group, net, row) {
    if (this.state.side || net.b1[row] >= 0 || net.w2[0][row] <= 0) return;
    const { w, h, inputs } = this.shape, size = this.state.size;
    for (let c = 0; c < inputs / size; c++) {
      if (net.w1[row].slice(c * size, (c + 1) * size).every((one) => one > 0)) {
        draw(group, "rect", { class: "code", x: c * size * w + 1.5, y: 1.5, width: size * w - 3, height: h - 3, rx: 2 });
      }
    }
  }

  hit([x, y], which) {
    const made = draw(this.svg, "rect", { class: "hit", x, y, width: this.shape.across, height: this.shape.down });
    made.which = which;
  }

  // --- what is under the pointer

  point(event) {
    const which = event.target.which;
    if (!which) return this.unmark();
    if ("clause" in which) return this.markClause(which.clause);
    if ("neuron" in which) return this.markNeuron(which.neuron);
    const box = event.target.getBoundingClientRect(), { w, h, side } = this.shape;
    const column = Math.floor((event.clientX - box.left) / w), line = Math.floor((event.clientY - box.top) / h);
    const input = side ? line * side + column : column;
    if (input >= 0 && input < this.shape.inputs) this.mark({ ...which, j: input });
  }

  key(event) {
    const { alpha, neurons, inputs, side } = this.shape;
    const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [side || 0, 1], ArrowUp: [-(side || 0), -1] };
    if (event.key === "Escape") return this.unmark();
    if (!(event.key in steps)) return;
    event.preventDefault();
    if (!this.cursor) return this.mark({ side: "dense", i: 0, j: 0 });
    const [across, down] = steps[event.key];
    let { side: panel, i, k = 0, j } = this.cursor;
    j += across;
    if (j < 0 && panel === "split") { panel = "dense"; j = inputs - 1; }
    else if (j >= inputs && panel === "dense") { panel = "split"; j = 0; }
    j = Math.max(0, Math.min(inputs - 1, j));
    if (panel === "split" && !side) {
      const row = Math.max(0, Math.min(alpha * neurons - 1, i * alpha + k + down));
      i = Math.floor(row / alpha); k = row % alpha;
    } else if (!side) i = Math.max(0, Math.min(neurons - 1, i + down));
    this.mark({ side: panel, i, k, j });
  }

  unmark() {
    this.cursor = null;
    this.marks?.replaceChildren();
    this.tell("");
  }

  /** Mark a weight, its parent and its children, and say where it went. */
  mark(cursor) {
    const { shape, part, state } = this, { i, k = 0, j, side } = cursor;
    this.cursor = cursor;
    this.marks.replaceChildren();
    const frame = ([x, y], kin) => {
      const [dx, dy] = this.at(j);
      draw(this.marks, "rect", { class: `mark${kin ? " kin" : ""}`, x: x + dx - 1, y: y + dy - 1, width: shape.w + 2, height: shape.h + 2, rx: 1 });
    };
    frame(shape.parent(i), side !== "dense");
    for (let c = 0; c < shape.alpha; c++) frame(shape.child(i, c), side === "dense" || c !== k);
    const holders = [...Array(shape.alpha).keys()].filter((c) => part.kept[i * shape.alpha + c][j] === "1");
    const owner = part.dealt ? part.dealt[i][j] : null;
    const input = state.side ? `pixel ${j % state.side + 1}, ${Math.floor(j / state.side) + 1}` : `literal ${j % state.size + 1} of clause ${Math.floor(j / state.size) + 1}`;
    const value = state.network.dense.w1[i][j];
    const words = [`Neuron ${i + 1}, ${input}: ${shown(value, 3)} at the split.`];
    if (holders.length) words.push(`It went to child ${holders.map((c) => c + 1).join(" and ")} of ${shape.alpha}${state.weights ? `, where it is now ${holders.map((c) => shown(state.weights[this.arm].w1[i * shape.alpha + c][j], 3)).join(" and ")}` : ""}.`);
    else words.push(owner === null ? "No child drew it." : `It was dealt to child ${owner + 1} and pruned.`);
    if (state.weights) words.push(`In the dense network it is now ${shown(state.weights.dense.w1[i][j], 3)}.`);
    if (!state.side) {
      const clause = Math.floor(j / state.size);
      words.push(`Clause ${clause + 1}, literal by literal: child ${this.holders(i, clause).join(", ")}.`);
    }
    this.tell(words.join(" "));
  }

  /** Return which children of a neuron hold literals of a clause: "2, 2, ×, 1". */
  holders(i, clause) {
    const { alpha } = this.shape, size = this.state.size;
    return [...Array(size).keys()].map((l) => [...Array(alpha).keys()]
      .filter((c) => this.part.kept[i * alpha + c][clause * size + l] === "1").map((c) => c + 1).join("+") || "×");
  }

  box([x, y], from, width) {
    draw(this.marks, "rect", { class: "mark", x: x + from - 1, y: y - 1, width: width + 2, height: this.shape.h + 2, rx: 2 });
  }

  /** Mark a clause in every neuron, and say where its literals went. */
  markClause(clause) {
    const { shape, state } = this, width = shape.w * state.size;
    this.unmark();
    const went = [...Array(shape.neurons).keys()].map((i) => {
      this.box(shape.parent(i), clause * width, width);
      const found = this.holders(i, clause);
      for (let c = 0; c < shape.alpha; c++) if (found.some((one) => one.split("+").includes(String(c + 1)))) this.box(shape.child(i, c), clause * width, width);
      return found;
    });
    const whole = went.filter((found) => new Set(found).size === 1 && found[0] !== "×").length;
    this.tell(`Clause ${clause + 1} stays whole in ${whole} of ${shape.neurons} neurons. Its literals went to child: ${went.map((found, i) => `neuron ${i + 1}: ${found.join(", ")}`).join("; ")}.`);
  }

  /** Mark a neuron and its children, and say what each child holds. */
  markNeuron(i) {
    const { shape, part } = this;
    this.unmark();
    this.box(shape.parent(i), 0, shape.across + shape.ends - 4);
    const counts = [...Array(shape.alpha).keys()].map((c) => {
      this.box(shape.child(i, c), 0, shape.across + shape.ends - 4);
      return part.kept[i * shape.alpha + c].replaceAll("0", "").length;
    });
    this.tell(`Neuron ${i + 1} has ${shape.inputs} weights; its children have ${counts.join(" and ")}.`);
  }

  // --- Gram matrices, and words for who does not see

  drawGram() {
    const { state, gram, stage } = this;
    gram.parentElement.hidden = Boolean(state.side);
    if (state.side) return;
    const after = stage === 4;
    const dense = after ? state.weights.dense.w1 : state.network.dense.w1;
    const wide = after ? state.weights[this.arm].w1 : this.wide(stage);
    const d = state.inputs, cell = Math.max(1, Math.floor(Math.min(270, this.svg.parentElement.clientWidth / 2 - 24) / d * 4) / 4);
    const both = [dense, wide].map(product), scale = most(both[0].flat()), gap = cell * d + 32;
    gram.replaceChildren();
    gram.setAttribute("viewBox", `0 0 ${gap + cell * d + 2} ${cell * d + 24}`);
    Object.assign(gram.style, { width: `${gap + cell * d + 2}px`, height: `${cell * d + 24}px` });
    gram.setAttribute("aria-label", `Gram matrices of W1, dense and ${called(this.arm)}: how much each two inputs share neurons`);
    both.forEach((matrix, side) => {
      draw(gram, "text", { x: side * gap, y: 12 }, `W1ᵀW1, ${side ? called(this.arm) : "dense"}`);
      const group = draw(gram, "g", { transform: `translate(${side * gap} 22)` }), paths = new Map();
      matrix.forEach((row, r) => row.forEach((value, c) => {
        const bin = Math.max(-BINS, Math.min(BINS, Math.round((value / scale) * BINS)));
        paths.set(bin, `${paths.get(bin) ?? ""}M${c * cell} ${r * cell}h${cell}v${cell}h${-cell}z`);
      }));
      for (const [bin, path] of paths) tint(draw(group, "path", { d: path }), bin);
      let lines = "";
      for (let c = state.size; c < d; c += state.size) lines += `M${c * cell} 0v${d * cell}M0 ${c * cell}h${d * cell}`;
      draw(group, "path", { class: "divide", "stroke-width": 1, d: lines });
    });
  }

  /** Return the children's weights at a stage before training goes on. */
  wide(stage) {
    const { part, state, shape } = this;
    if (stage === 0) return state.network.dense.w1;
    return state.network.dense.w1.flatMap((row, i) => [...Array(shape.alpha).keys()].map((k) => row.map((weight, j) => {
      const there = stage === 1 || (stage === 2 && part.dealt ? part.dealt[i][j] === k : part.kept[i * shape.alpha + k][j] === "1");
      return there ? weight : 0;
    })));
  }

  describe() {
    const kept = this.part.kept.reduce((sum, row) => sum + [...row].filter((bit) => bit === "1").length, 0);
    this.svg.setAttribute("aria-label", `Weights of the first layer. Dense: ${this.shape.neurons} neurons with ${this.shape.neurons * this.shape.inputs} weights. ${called(this.arm)}: ${this.shape.neurons * this.shape.alpha} neurons with ${kept} weights. Stage: ${STAGES[this.stage]}. Arrow keys move from weight to weight.`);
  }
}

/** Build one round button for each choice; exactly one is on. */
export function chips(root, name, choices, chosen, change) {
  root.replaceChildren();
  for (const [value, text] of choices) {
    const input = build(null, "input", { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => change(value));
    build(root, "label", {}, input, text);
  }
}

const round = (value) => Math.round(value * 100) / 100;
const crossed = (x, y, r) => `M${round(x - r)} ${round(y - r)}l${round(2 * r)} ${round(2 * r)}m0 ${-round(2 * r)}l${-round(2 * r)} ${round(2 * r)}`;
const product = (rows) => rows[0].map((_, a) => rows[0].map((_, b) => rows.reduce((sum, row) => sum + row[a] * row[b], 0)));

/** Return a size that few values exceed, so that one large weight leaves colour to the others. */
function most(values) {
  const sizes = values.map(Math.abs).filter(Boolean).sort((a, b) => a - b);
  return sizes[Math.floor(sizes.length * 0.98)] || 1;
}

function tint(path, bin) {
  path.setAttribute("class", bin < 0 ? "cool" : "warm");
  path.style.setProperty("--k", Math.round((Math.abs(bin) / BINS) * 100));
}
