// Under the lens: one sample, and which neurons of both networks fire on it.

import { armClass, build, called, draw, shown } from "./svg.js";

const ON = 3.25, OFF = 0.25;  // the middle of what a sample's literal may be

export class Lens {
  constructor(root) {
    this.about = root.querySelector("#lens-about");
    this.literals = root.querySelector("#literals");
    this.mistakes = root.querySelector("#mistakes");
    this.fires = root.querySelector("#fires");
  }

  /** Look at the networks of a finished experiment. */
  show(state, arm) {
    const other = !this.state || this.state.inputs !== state.inputs || this.state.side !== state.side;
    this.state = state;
    this.arm = arm;
    if (other || !this.x) {
      const first = state.mistakes.samples[0];
      this.x = state.side ? first?.x ?? Array(state.inputs).fill(0) : [...Array(state.inputs).keys()].map((j) => (j < state.size ? ON : OFF));
      this.label = state.side ? first?.y : null;
    }
    const { counts, of } = state.mistakes;
    this.about.textContent = `Trial ${state.look} gets wrong, of ${of.toLocaleString("en")} test samples: ${Object.entries(counts).map(([name, count]) => `${called(name)} ${count}`).join(", ")}. ` +
      (state.side ? "Choose a sample." : "Click literals on and off, type an assignment, or choose a sample.");
    this.buildLiterals();
    this.buildSamples();
    this.paint();
  }

  buildLiterals() {
    const { state, literals } = this;
    literals.replaceChildren();
    if (state.side) return;  // the sample is drawn instead
    this.buttons = [];
    const groups = build(literals, "div", { className: "clauses" });
    this.groups = [];
    for (let c = 0; c < state.inputs / state.size; c++) {
      const group = build(groups, "span", { className: "clause", role: "group" });
      group.setAttribute("aria-label", `Clause ${c + 1}`);
      this.groups.push(group);
      for (let l = 0; l < state.size; l++) {
        const j = c * state.size + l, button = build(group, "button", { type: "button" });
        button.addEventListener("click", () => {
          this.x = this.x.with ? this.x.with(j, this.bit(j) ? OFF : ON) : this.x.map((one, at) => (at === j ? (this.bit(j) ? OFF : ON) : one));
          this.paint();
        });
        this.buttons.push(button);
      }
    }
    const typed = build(literals, "label", { className: "typed" }, "Assignment");
    this.typed = build(typed, "input", { type: "text", spellcheck: false, maxLength: state.inputs * 2, inputMode: "numeric" });
    this.typed.addEventListener("input", () => {
      const bits = this.typed.value.replace(/[^01]/g, "").slice(0, state.inputs);
      this.x = [...Array(state.inputs).keys()].map((j) => (bits[j] === "1" ? ON : OFF));
      this.paint(false);
    });
  }

  buildSamples() {
    const { state, mistakes } = this;
    mistakes.replaceChildren();
    const kinds = new Map();
    for (const sample of state.mistakes.samples) {
      const wrong = ["dense", this.arm].filter((name) => sample.wrong.includes(name));
      if (!wrong.length) continue;
      const key = wrong.length > 1 ? "Both networks are wrong" : `Only the ${called(wrong[0])}${wrong[0] === "dense" ? " network" : ""} is wrong`;
      kinds.set(key, [...(kinds.get(key) ?? []), sample]);
    }
    for (const [key, samples] of kinds) {
      const line = build(mistakes, "div", { className: "samples" }, build(null, "span", { textContent: `${key}:` }));
      samples.forEach((sample, place) => {
        const name = state.mistakes.classes[sample.y], text = state.side ? "" : `${place + 1}, ${name}`;
        const button = build(line, "button", { type: "button", textContent: text });
        button.setAttribute("aria-label", `${key}, sample ${place + 1}, ${name}`);
        if (state.side) picture(button, sample.x, state.side);
        button.addEventListener("click", () => {
          this.x = sample.x;
          this.label = sample.y;
          this.paint();
        });
      });
    }
  }

  bit(j) { return this.x[j] > 1.5; }

  paint(typed = true) {
    const { state, x } = this;
    let truth = this.label;
    if (state.side) {
      this.literals.replaceChildren();
      picture(build(this.literals, "p", { className: "sample" }), x, state.side);
    }
    if (!state.side) {
      this.buttons.forEach((button, j) => {
        const on = this.bit(j);
        button.textContent = on ? "1" : "0";
        button.setAttribute("aria-pressed", on);
        button.setAttribute("aria-label", `Literal ${(j % state.size) + 1} of clause ${Math.floor(j / state.size) + 1}`);
      });
      const whole = this.groups.map((group, c) => {
        const all = [...Array(state.size).keys()].every((l) => this.bit(c * state.size + l));
        group.classList.toggle("true", all);
        return all;
      });
      truth = whole.some(Boolean) ? 1 : 0;
      if (typed) this.typed.value = x.map((_, j) => (this.bit(j) ? "1" : "0")).join("").replace(new RegExp(`.{${state.size}}(?!$)`, "g"), "$& ");
    }
    this.fires.replaceChildren();
    for (const arm of ["dense", this.arm]) this.network(arm, state.weights[arm], truth);
  }

  network(arm, net, truth) {
    const { state, x } = this, box = build(this.fires, "figure", { className: armClass(arm) });
    const fired = net.w1.map((row, i) => Math.max(0, row.reduce((sum, w, j) => sum + w * x[j], net.b1[i])));
    const logits = net.w2.map((row, c) => row.reduce((sum, w, i) => sum + w * fired[i], net.b2[c]));
    const guess = state.side ? logits.indexOf(Math.max(...logits)) : Number(logits[0] > 0);
    const said = state.mistakes.classes[guess];
    const count = fired.filter(Boolean).length;
    const right = guess === truth, name = called(arm);
    const line = build(box, "figcaption", { className: "verdict" });
    build(line, "b", { textContent: `${name}: ` });
    line.append(`${count} of ${fired.length} neurons fire, it says ${said}${truth === null || truth === undefined ? "" : right ? ", which is right ✓" : ", which is wrong ✗"}`);
    const out = state.side ? net.w2[guess] : net.w2[0];
    const parts = fired.map((one, i) => one * out[i]), most = Math.max(...parts.map(Math.abs), 1e-6);
    const step = Math.max(5, Math.min(26, Math.floor((box.clientWidth || 320) / fired.length))), svg = draw(box, "svg", { role: "img", width: step * fired.length, height: 132 });
    svg.setAttribute("aria-label", `${name}: what each neuron adds to the answer: ${parts.map((part, i) => `${i + 1}: ${shown(part, 1)}`).join(", ")}`);
    draw(svg, "path", { class: "axis", d: `M0 60H${step * fired.length}` });
    parts.forEach((part, i) => {
      const high = (54 * Math.abs(part)) / most;
      const bar = draw(svg, "rect", { class: part < 0 ? "cool" : "warm", x: i * step + 1, y: part < 0 ? 60 : 60 - high, width: step - 2, height: Math.max(high, 0.5) });
      bar.style.setProperty("--k", 85);
      draw(bar, "title", {}, `neuron ${i + 1}: fires ${shown(fired[i], 2)}, adds ${shown(part, 2)}`);
      const dot = draw(svg, "circle", { cx: (i + 0.5) * step, cy: 124, r: Math.min(5, step / 2 - 1), class: fired[i] ? "warm" : "missing" });
      if (fired[i]) dot.style.setProperty("--k", 100);
    });
    build(box, "p", { className: "quiet", textContent: state.side ? `Bars: what each neuron adds to “${said}”. Dots: neurons that fire.` : `Bars: what each neuron adds to “true”; with the bias ${shown(net.b2[0], 1)} they come to ${shown(logits[0], 1)}. Dots: neurons that fire.` });
  }
}

function picture(root, x, side) {
  const svg = draw(root, "svg", { viewBox: `0 0 ${side} ${side}`, "aria-hidden": "true" }), paths = new Map();
  x.forEach((value, j) => {
    const k = Math.round(value * 6);
    paths.set(k, `${paths.get(k) ?? ""}M${j % side} ${Math.floor(j / side)}h1v1h-1z`);
  });
  for (const [k, d] of paths) draw(svg, "path", { class: "warm", d }).style.setProperty("--k", (100 * k) / 6);
}
