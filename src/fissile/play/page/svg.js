// Small helpers for drawing and for building elements.

const NS = "http://www.w3.org/2000/svg";

/** Return an SVG element with attributes, put into a parent. */
export function draw(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  parent?.append(made);
  return made;
}

/** Return an HTML element with properties and children, put into a parent. */
export function build(parent, name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  parent?.append(made);
  return made;
}

export const split = (arm) => arm.replace(/-\d+$/, "");
export const armClass = (arm) => `arm-${split(arm).replace(":", "")}`;

const NAMES = {
  dense: "dense", clause: "clause split", random: "random split", gram: "Gram split",
  "n:m": "N:M split", overlapping: "overlapping inputs",
};

/** Return what an arm is called: "clause split". */
export const called = (arm) => NAMES[split(arm)];

export const known = (values) => values.filter((one) => one !== null && one !== undefined);
export const mean = (values) => known(values).reduce((sum, one) => sum + one, 0) / known(values).length;

/** Return the standard error of a mean; 0 where one value has none. */
export function spread(values) {
  const all = known(values), middle = mean(all);
  if (all.length < 2) return 0;
  return Math.sqrt(all.reduce((sum, one) => sum + (one - middle) ** 2, 0) / (all.length - 1) / all.length);
}

/** Return a number with digits, a true minus, and a dash where there is none. */
export function shown(value, digits = 1, sign = false) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return (sign && value >= 0 ? "+" : "") + value.toFixed(digits).replace("-", "−");
}

/** Return round steps that cover a range. */
export function ticks(low, high, about = 5) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(+at.toPrecision(12));
  return found;
}
