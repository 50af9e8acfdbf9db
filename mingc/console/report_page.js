"use strict";
// Shared by all reports. The figures are JSON in the page, which is what a reader without scripts sees. Text enters the
// page as text only.
const source = document.getElementById("report");
const report = JSON.parse(source.textContent);
source.hidden = true;
const NUM_COLOURS = 8;
const SVG = ["svg", "g", "line", "rect", "circle", "polyline", "text", "title"];

function add(parent, tag, text, attributes) {
  const element = SVG.includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== null && text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function show(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (typeof value === "number") return String(Number(value.toPrecision(4)));
  if (Array.isArray(value)) return value.map(show).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([name, each]) => name + "=" + show(each)).join(" ");
  return value;
}

// `heads`: names of columns; `rows`: arrays of values; `caption` may be empty; `label` says what part of the page it is.
function table(parent, caption, heads, rows, label) {
  const region = { class: "scroll", role: "region", tabindex: 0, "aria-label": [label, caption].filter(Boolean).join(": ") };
  const own = add(add(parent, "div", null, region), "table", null, heads.length === 2 ? { class: "facts" } : {});
  if (caption) add(own, "caption", caption);
  const isNumber = (value) => typeof value === "number" || /^[-+−]?[\d.,]+( ± .*| \(.*| [–%/].*)?$/.test(value);
  const kinds = heads.map((_, column) => {
    const filled = rows.map((row) => row[column]).filter((value) => show(value) !== "");
    return column && filled.length && filled.every(isNumber) ? { class: "number" } : {};
  });
  const top = add(add(own, "thead"), "tr");
  heads.forEach((head, column) => add(top, "th", head, { scope: "col", ...kinds[column] }));
  const body = add(own, "tbody");
  const words = { worse: { class: "bad" }, better: { class: "good" } };
  for (const row of rows) {
    const line = add(body, "tr");
    row.forEach((value, column) => column
      ? add(line, "td", show(value), words[value] || kinds[column]) : add(line, "th", show(value), { scope: "row" }));
  }
}

const powersWithin = (low, high) => {
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    powers.push(...[1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
  const all = powers.filter((tick) => tick >= low && tick <= high);
  return all.length > 7 ? all.filter((tick) => /^1|^0\.0*1$/.test(String(tick))) : all;
};
const steps = (low, high) => {
  const raw = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= raw);
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high * 1.0001; index++) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
};

// An axis over `values` from pixel `from` to `to`; a linear one begins at 0.
function axis(values, isLog, from, to, ticks) {
  if (isLog) {
    const [low, high] = [Math.min(...values) / 1.3, Math.max(...values) * 1.3];
    const place = (value) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
    return { place, low, high, ticks: ticks && ticks.length < 9 ? ticks : powersWithin(low, high) };
  }
  const [low, high] = [Math.min(0, ...values), Math.max(...values) * 1.05 || 1];
  return { place: (value) => from + ((value - low) / (high - low)) * (to - from), low, high, ticks: steps(low, high) };
}

// Points {x, y, low, high, label} by series name. Roofs {slope, peak, name}: y = min(peak, slope x), over two log axes.
// `exact`: every x is a tick. Without `hasPoints`, only the lines are drawn.
function chart(parent, { name, xLabel, yLabel, series, roofs = [], isLogX = true, isLogY = true, exact = false, hasPoints = true }) {
  const [left, top, width, height] = [66, 8, 382, 236];
  const isDrawn = (point) => Number.isFinite(point.x) && Number.isFinite(point.y) && (!isLogX || point.x > 0) && (!isLogY || point.y > 0);
  const points = Object.values(series).flat().filter(isDrawn);
  if (!points.length) return;
  const xs = points.map((point) => point.x).concat(roofs.map((roof) => roof.peak / roof.slope));
  const ys = points.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y])
    .concat(roofs.map((roof) => roof.peak)).filter((y) => !isLogY || y > 0);
  const x = axis(xs, isLogX, left, left + width, exact ? [...new Set(xs)] : null);
  const y = axis(ys, isLogY, top + height, top);
  const figure = add(parent, "figure");
  add(figure, "figcaption", name);
  const svg = add(figure, "svg", null, { viewBox: "0 0 460 290", role: "img", "aria-label": name });
  for (const tick of x.ticks) {
    add(svg, "line", null, { class: "grid", x1: x.place(tick), x2: x.place(tick), y1: top, y2: top + height });
    add(svg, "text", show(tick), { x: x.place(tick), y: top + height + 16, "text-anchor": "middle" });
  }
  for (const tick of y.ticks) {
    add(svg, "line", null, { class: "grid", x1: left, x2: left + width, y1: y.place(tick), y2: y.place(tick) });
    add(svg, "text", show(tick), { x: left - 6, y: y.place(tick) + 4, "text-anchor": "end" });
  }
  add(svg, "text", xLabel, { x: left + width / 2, y: top + height + 36, "text-anchor": "middle" });
  if (yLabel) add(svg, "text", yLabel, { x: 14, y: top + height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${top + height / 2})` });
  const legend = add(figure, "ul", null, { class: "legend" });
  Object.entries(series).forEach(([label, own], index) => {
    const colour = "s" + (index % NUM_COLOURS);
    const drawn = own.filter(isDrawn).sort((a, b) => a.x - b.x);
    const group = add(svg, "g", null, { class: colour });
    if (!roofs.length) add(group, "polyline", null, { class: "line", points: drawn.map((p) => `${x.place(p.x)},${y.place(p.y)}`).join(" ") });
    for (const point of hasPoints ? drawn : []) {
      if (Number.isFinite(point.low) && (!isLogY || point.low > 0))
        add(group, "line", null, { class: "range", x1: x.place(point.x), x2: x.place(point.x), y1: y.place(point.low), y2: y.place(point.high) });
      add(add(group, "circle", null, { class: "point", cx: x.place(point.x), cy: y.place(point.y), r: 3.5 }), "title", point.label);
    }
    if (drawn.length && !(Object.keys(series).length === 1 && name.startsWith(label))) add(legend, "li", label, { class: colour });
  });
  for (const roof of roofs) {
    const first = Math.max(x.low, y.low / roof.slope);
    const corners = [[first, Math.min(roof.peak, roof.slope * first)], [roof.peak / roof.slope, roof.peak], [x.high, roof.peak]];
    add(svg, "polyline", null, { class: "roof", points: corners.map(([a, b]) => `${x.place(a)},${y.place(b)}`).join(" ") });
    add(legend, "li", roof.name);
  }
}
