// Keep it: the picture as SVG and PNG, the numbers as CSV.

import { draw } from "./svg.js";

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-family"];

/** Return the drawings of a page as one SVG text that needs no style sheet. */
export function picture(drawings, title) {
  const sheet = draw(null, "svg", { xmlns: "http://www.w3.org/2000/svg" });
  const gap = 24, boxes = drawings.map((svg) => svg.getBoundingClientRect());
  const width = Math.ceil(Math.max(...boxes.map((box) => box.width)) + 2 * gap);
  let top = 56;
  draw(sheet, "rect", { width: "100%", height: "100%", fill: plain(getComputedStyle(document.body).backgroundColor) });
  draw(sheet, "text", { x: gap, y: 34, "font-size": 15, "font-weight": 600, "font-family": "system-ui, sans-serif", fill: plain(getComputedStyle(document.body).color) }, title);
  drawings.forEach((svg, place) => {
    const copy = svg.cloneNode(true);
    inline(svg, copy);
    for (const [name, value] of Object.entries({ x: gap, y: top, width: boxes[place].width, height: boxes[place].height })) copy.setAttribute(name, value);
    sheet.append(copy);
    top += boxes[place].height + gap;
  });
  sheet.setAttribute("viewBox", `0 0 ${width} ${Math.ceil(top)}`);
  sheet.setAttribute("width", width);
  sheet.setAttribute("height", Math.ceil(top));
  return new XMLSerializer().serializeToString(sheet);
}

function inline(from, to) {
  const style = getComputedStyle(from);
  for (const name of DRAWN) {
    const value = style.getPropertyValue(name);
    if (value) to.setAttribute(name, name === "fill" || name === "stroke" ? plain(value) : value);
  }
  if (style.transform !== "none" && !from.getAttribute("transform")) to.setAttribute("transform", style.transform);
  for (const name of ["class", "style", "tabindex"]) to.removeAttribute(name);
  [...from.children].forEach((child, place) => inline(child, to.children[place]));
}

/** Return a colour as every program reads it; a mixed one is written as color(srgb ...). */
function plain(colour) {
  const mixed = colour.match(/^color\(srgb ([\d.e+-]+) ([\d.e+-]+) ([\d.e+-]+)/);
  return mixed ? `rgb(${mixed.slice(1, 4).map((one) => Math.round(255 * one)).join(", ")})` : colour;
}

/** Return an SVG text as a PNG, twice as fine. */
export async function png(text) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.drawImage(image, 0, 0);
  URL.revokeObjectURL(image.src);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

/** Return the accuracies of all trials and epochs as CSV: a row each, the warm-up as dense. */
export function csv(state) {
  const lines = ["arm,trial,seed,epoch,accuracy"];
  for (const { arm, points } of state.series) {
    points.forEach(([epoch, values], place) => {
      if (arm !== "dense" && place === 0) return;  // the dense network's, from which it came
      const at = arm !== "dense" && place === 1 ? `${epoch} split` : epoch;
      values.forEach((value, trial) => lines.push([arm, trial + 1, state.seed + trial, at, value === null ? "" : +(value / 100).toFixed(6)].join(",")));
    });
  }
  for (const [arm, values] of Object.entries(state.final ?? {})) values.forEach((value, trial) => lines.push([arm, trial + 1, state.seed + trial, "reported", value ?? ""].join(",")));
  return `${lines.join("\n")}\n`;
}

export function save(content, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([content])), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
