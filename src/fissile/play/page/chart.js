// Curves over epochs: a mean with its band for each arm, single trials, the split.

import { armClass, called, draw, known, mean, shown, spread, ticks } from "./svg.js";

/**
 * Draw curves into an SVG element and return what tells the values at an epoch.
 *
 * `series` is a list of {arm, points: [[epoch, [values by trial]], ...]}; the first point of an arm
 * after the split repeats the epoch of the split.
 */
export function chart(svg, series, { epochs, splitAt, unit = "", digits = 1, trials = false, names = true }) {
  svg.replaceChildren();
  const { width, height } = svg.getBoundingClientRect();
  if (!width || !series.some((one) => one.points.length)) return () => "";
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const label = names && width > 560;
  const box = { left: 44, right: width - (label ? 190 : 12), top: 12, bottom: height - 34 };
  const all = series.flatMap((one) => one.points.flatMap(([, values]) => extent(values, trials)));
  const [low, high] = padded(Math.min(...all), Math.max(...all));
  const x = (epoch) => box.left + ((box.right - box.left) * epoch) / epochs;
  const y = (value) => box.bottom - ((box.bottom - box.top) * (value - low)) / (high - low);

  for (const at of ticks(low, high, height > 200 ? 5 : 3)) {
    draw(svg, "path", { class: "grid", d: `M${box.left} ${y(at)}H${box.right}` });
    draw(svg, "text", { class: "faint", x: box.left - 7, y: y(at) + 4, "text-anchor": "end" }, shown(at, at % 1 ? 2 : 0));
  }
  for (const at of ticks(0, epochs, width > 420 ? 6 : 4).filter(Number.isInteger)) {
    draw(svg, "text", { class: "faint", x: x(at), y: box.bottom + 16, "text-anchor": "middle" }, at);
  }
  draw(svg, "path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` });
  draw(svg, "text", { class: "faint", x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "epochs");
  if (splitAt) {
    draw(svg, "path", { class: "axis", "stroke-dasharray": "2 4", d: `M${x(splitAt)} ${box.top}V${box.bottom}` });
    draw(svg, "text", { class: "faint", x: x(splitAt) - 5, y: box.top + 8, "text-anchor": "end" }, "split");
  }
  const ends = series.filter((one) => one.points.length).map((one) => one_arm(svg, one, x, y, trials));
  if (label) spreadOut(ends, box).forEach(({ arm, at, value }) => {
    draw(svg, "text", { class: `name ${armClass(arm)}`, x: box.right + 10, y: at + 4 }, `${called(arm)} ${shown(value, digits)}${unit}`);
  });
  return (clientX) => {
    const rect = svg.getBoundingClientRect();
    const epoch = Math.round(((clientX - rect.left - box.left) / (box.right - box.left)) * epochs);
    if (epoch < 0 || epoch > epochs) return "";
    const told = series.flatMap(({ arm, points }) => {
      const found = points.filter(([at]) => at === epoch).at(-1);
      return found ? [`${called(arm)} ${shown(mean(found[1]), digits)}${unit}`] : [];
    });
    return told.length ? `Epoch ${epoch}: ${told.join(", ")}.` : "";
  };
}

function one_arm(svg, { arm, points }, x, y, trials) {
  const group = draw(svg, "g", { class: armClass(arm) });
  const means = points.map(([at, values]) => [at, mean(values), spread(values)]);
  const drops = means.length > 1 && means[0][0] === means[1][0];
  const grown = drops ? means.slice(1) : means;  // without the step down at the split
  const upper = grown.map(([at, middle, half]) => `${x(at)} ${y(middle + half)}`);
  const lower = grown.map(([at, middle, half]) => `${x(at)} ${y(middle - half)}`).reverse();
  if (trials) for (let trial = 0; trial < points[0][1].length; trial++) {
    const line = points.slice(drops ? 1 : 0).filter(([, values]) => known([values[trial]]).length);
    draw(group, "path", { class: "trial", d: path(line.map(([at, values]) => `${x(at)} ${y(values[trial])}`)) });
  }
  draw(group, "path", { class: "band", d: `${path([...upper, ...lower])}Z` });
  if (drops) draw(group, "path", { class: "drop", d: path(means.slice(0, 2).map(([at, middle]) => `${x(at)} ${y(middle)}`)) });
  draw(group, "path", { class: "line", d: path(grown.map(([at, middle]) => `${x(at)} ${y(middle)}`)) });
  const [at, value] = means.at(-1);
  draw(group, "circle", { class: "dot", cx: x(at), cy: y(value), r: 4 });
  return { arm, value, at: y(value) };
}

const path = (points) => (points.length ? `M${points.join("L")}` : "");

function extent(values, trials) {
  const all = known(values), middle = mean(all), half = spread(all);
  if (!all.length) return [];
  return trials ? all : [middle - half, middle + half];
}

function padded(low, high) {
  const gap = Math.max((high - low) * 0.06, Math.abs(high) * 0.01, 1e-6);
  return [low - gap, high + gap];
}

/** Move labels apart that would lie on each other. */
function spreadOut(ends, box) {
  const sorted = ends.sort((a, b) => a.at - b.at);
  for (let i = 1; i < sorted.length; i++) sorted[i].at = Math.max(sorted[i].at, sorted[i - 1].at + 16);
  const over = Math.max(0, (sorted.at(-1)?.at ?? 0) - box.bottom);
  for (let i = sorted.length - 1, most = Infinity; i >= 0; i--) {
    sorted[i].at = Math.min(sorted[i].at - (i === sorted.length - 1 ? over : 0), most);
    most = sorted[i].at - 16;
  }
  return sorted;
}
