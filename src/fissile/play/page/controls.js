// The controls, built from what the server says of each setting.

import { armClass, build } from "./svg.js";

const LOGARITHMIC = new Set(["samples", "warm_up", "fine_tune"]);
/** Settings of formulas alone. */
const FORMULA = new Set(["clauses", "size", "negatives", "others"]);
const PICTURES = { samples: "10000", neurons: "6", alpha: "4", splits: "random,gram", trials: "3", warm_up: "10", fine_tune: "10" };

export class Controls {
  /** Build a control for each setting; `changed` is called when one is moved. */
  constructor(form, about, changed) {
    this.about = about;
    this.changed = changed;
    this.values = Object.fromEntries(about.controls.map((one) => [one.name, one.default]));
    this.parts = {};
    const groups = new Map();
    for (const one of about.controls) {
      if (!groups.has(one.group)) {
        const group = build(form, "fieldset");
        build(group, "legend", { textContent: one.group });
        groups.set(one.group, group);
      }
      this.parts[one.name] = this.control(groups.get(one.group), one);
    }
    this.readings(groups.get("What the paper leaves open"));
    form.addEventListener("submit", (event) => event.preventDefault());
    this.problem = build(form, "p", { className: "problem hint", role: "status" });
  }

  control(group, one) {
    const label = build(group, "label", { className: "control" }, build(null, "span", { textContent: one.label }));
    if (one.kind === "words") return this.checks(group, label, one);
    if (one.kind === "word") return this.choice(label, one);
    if (one.kind === "real") {
      const input = build(label, "input", { type: "number", min: one.least, max: one.most, step: "any", value: one.default });
      input.addEventListener("change", () => this.set({ [one.name]: input.value || "0" }));
      return { root: label, show: (value) => { input.value = value; } };
    }
    const output = build(label, "output", { textContent: one.default });
    const log = LOGARITHMIC.has(one.name), steps = 200;
    const input = build(label, "input", { type: "range", min: log ? 0 : one.least, max: log ? steps : one.most, step: 1 });
    const read = () => {
      if (!log) return input.value;
      const raw = one.least * (one.most / one.least) ** (input.value / steps), digits = 10 ** Math.max(0, Math.floor(Math.log10(raw)) - 1);
      return String(Math.min(one.most, Math.round(raw / digits) * digits));
    };
    const show = (value) => {
      output.textContent = Number(value).toLocaleString("en");
      input.setAttribute("aria-valuetext", output.textContent);
      input.value = log ? Math.round((steps * Math.log(value / one.least)) / Math.log(one.most / one.least)) : value;
    };
    input.name = one.name;
    input.addEventListener("input", () => {
      const value = read();
      output.textContent = Number(value).toLocaleString("en");
      input.setAttribute("aria-valuetext", output.textContent);
      this.set({ [one.name]: value }, false);
    });
    if (one.about) build(label, "span", { className: "hint", textContent: one.about });
    show(one.default);
    return { root: label, show, input };
  }

  choice(label, one) {
    const select = build(label, "select", { name: one.name });
    for (const [value, text] of Object.entries(one.choices)) {
      const missing = one.name === "task" ? this.about.missing[value] : "";
      build(select, "option", { value, textContent: one.name === "task" ? text : `${value}: ${text}`, disabled: Boolean(missing) });
      if (missing) build(label, "span", { className: "hint", textContent: `${text} is not installed: ${missing}` });
    }
    select.addEventListener("change", () => {
      const pictures = one.name === "task" && select.value !== "boolean";
      const others = pictures ? PICTURES : one.name === "task" ? { ...this.defaults() } : {};
      this.set({ ...others, ...(select.value === "digits" ? { samples: "1300", warm_up: "50", fine_tune: "50", trials: "10" } : {}), [one.name]: select.value });
    });
    return { root: label, show: (value) => { select.value = value; } };
  }

  checks(group, label, one) {
    label.remove();
    const root = build(group, "div", { className: "checks", role: "group" });
    root.setAttribute("aria-label", one.label);
    const boxes = Object.entries(one.choices).map(([value, text]) => {
      const box = build(null, "input", { type: "checkbox", value, name: one.name });
      build(root, "label", { className: armClass(value) }, box, build(null, "span", { className: "swatch" }), text);
      box.addEventListener("change", () => {
        const on = boxes.filter((each) => each.checked).map((each) => each.value);
        if (!on.length || on.length > one.most) { box.checked = !box.checked; return; }
        this.set({ [one.name]: on.join(",") });
      });
      return box;
    });
    return { root, show: (value) => boxes.forEach((box) => {
      box.checked = value.split(",").includes(box.value);
      box.disabled = box.value === "clause" && this.values.task !== "boolean";
    }) };
  }

  readings(group) {
    const label = build(null, "label", { className: "control" }, build(null, "span", { textContent: "Reading" }));
    group.children[0].after(label);
    const select = build(label, "select", { name: "reading" });
    for (const name of [...Object.keys(this.about.readings), "own"]) build(select, "option", { value: name, textContent: name, disabled: name === "own" });
    select.addEventListener("change", () => this.set(this.about.readings[select.value]));
    this.reading = select;
    this.readingRoot = label;
  }

  defaults() { return Object.fromEntries(this.about.controls.map((one) => [one.name, one.default])); }

  /** Change settings, and say so. */
  set(changes, show = true) {
    Object.assign(this.values, changes);
    if (show) this.show();
    else this.showReading();
    this.changed();
  }

  /** Take over settings that differ from the defaults, without saying so. */
  take(changes) {
    this.values = { ...this.defaults(), ...changes };
    this.show();
  }

  show() {
    const boolean = this.values.task === "boolean";
    this.parts.look.input.max = Math.max(1, this.values.trials);
    for (const [name, part] of Object.entries(this.parts)) {
      part.show(this.values[name]);
      part.root.hidden = FORMULA.has(name) && !boolean;
    }
    this.readingRoot.hidden = !boolean;
    this.showReading();
  }

  showReading() {
    const same = (wanted) => Object.entries(wanted).every(([name, value]) => this.values[name] === value);
    const names = Object.entries(this.about.readings).filter(([, wanted]) => same(wanted)).map(([name]) => name);
    this.reading.value = names[0] ?? "own";
    this.parts.look.input.max = Math.max(1, this.values.trials);
  }

  /** Return what differs from the defaults. */
  differing() {
    const all = this.defaults();
    return Object.fromEntries(Object.entries(this.values).filter(([name, value]) => value !== all[name]));
  }
}
