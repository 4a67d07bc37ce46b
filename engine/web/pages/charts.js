"use strict";
// Small charts in SVG, and numbers with units.

const COLORS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)"];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

function withUnit(value, units, digits = 3) {
  if (!known(value)) return "-";
  if (value === 0) return `0 ${units.find(([each]) => each === 1)[1]}`;
  let [factor, unit] = units[units.length - 1];
  for (const [each, name] of units) if (Math.abs(value) >= each) { [factor, unit] = [each, name]; break; }
  return `${Number((value / factor).toPrecision(digits))} ${unit}`;
}

const bytes = (value) => withUnit(value, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
const speed = (value) => withUnit(value, [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]]);
const seconds = (value) => withUnit(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]);
const perSecond = (value) => (known(value) ? `${Number(value.toPrecision(3)).toLocaleString("en")} /s` : "-");
const percent = (value) => (known(value) ? `${Math.round(100 * value)} %` : "-");
const plain = (value) => (known(value) ? Number(value.toPrecision(4)).toLocaleString("en") : "-");

// Draw lines. `series`: [{name, values}], with null where there is no value; `format` makes the text of a value.
function lines(target, title, x, series, format, options = {}) {
  const [width, height, left, bottom] = [520, 210, 58, 24];
  const all = series.flatMap((each) => each.values).filter(known);
  const top = options.top ?? Math.max(1e-12, ...all) * 1.05;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  svg.append(drawn("title", {}, title));
  const [low, high] = [x[0] ?? 0, x[x.length - 1] ?? 1];
  const across = (value) => left + (width - left - 8) * (high > low ? (value - low) / (high - low) : 0.5);
  const up = (value) => 8 + (height - bottom - 8) * (1 - Math.min(value, top) / top);
  for (const part of [0, 0.5, 1]) {
    svg.append(drawn("line", { class: "axis", x1: left, x2: width - 8, y1: up(part * top), y2: up(part * top) }));
    svg.append(drawn("text", { x: left - 5, y: up(part * top) + 4, "text-anchor": "end" }, format(part * top)));
  }
  for (const [at, anchor] of [[low, "start"], [high, "end"]])
    svg.append(drawn("text", { x: across(at), y: height - 6, "text-anchor": anchor }, options.label?.(at) ?? plain(at)));
  if (known(options.limit) && options.limit <= top)
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: up(options.limit), y2: up(options.limit), stroke: "var(--bad)", "stroke-dasharray": "4 4" }));
  if (known(options.mark))
    svg.append(drawn("line", { x1: across(options.mark), x2: across(options.mark), y1: 8, y2: height - bottom, stroke: "var(--quiet)", "stroke-dasharray": "2 3" }));
  series.forEach((each, number) => {
    let path = "";
    each.values.forEach((value, at) => {
      if (known(value)) path += `${path && known(each.values[at - 1]) ? "L" : "M"}${across(x[at]).toFixed(1)} ${up(value).toFixed(1)}`;
    });
    svg.append(drawn("path", { d: path || "M0 0", fill: "none", stroke: COLORS[number % COLORS.length], "stroke-width": 2 }));
  });
  const legend = element("div", { class: "legend" });
  series.forEach((each, number) => {
    legend.append(element("span", {}, element("b", { style: `background:${COLORS[number % COLORS.length]}` }), each.name));
  });
  target.replaceChildren(element("h2", {}, title), svg, legend);
}

// Draw one horizontal bar for each row, of parts in the order of `names`.
function stacked(target, title, rows, names, format) {
  const [width, left, step] = [520, 130, 26];
  const height = rows.length * step + 8;
  const total = (row) => names.reduce((sum, name) => sum + (known(row.parts[name]) ? row.parts[name] : 0), 0);
  const most = Math.max(1e-12, ...rows.map(total));
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  svg.append(drawn("title", {}, title));
  rows.forEach((row, number) => {
    let from = left;
    svg.append(drawn("text", { x: left - 6, y: number * step + 18, "text-anchor": "end" }, row.name));
    names.forEach((name, at) => {
      const value = known(row.parts[name]) ? row.parts[name] : 0;
      const wide = ((width - left - 70) * value) / most;
      const rect = drawn("rect", { x: from, y: number * step + 5, width: Math.max(0, wide), height: step - 9, fill: COLORS[at % COLORS.length] });
      rect.append(drawn("title", {}, `${name}: ${format(value)}`));
      svg.append(rect);
      from += wide;
    });
    const missing = names.some((name) => !known(row.parts[name]));
    svg.append(drawn("text", { x: from + 6, y: number * step + 18 }, missing ? "overloaded" : format(total(row))));
  });
  const legend = element("div", { class: "legend" });
  names.forEach((name, at) => legend.append(element("span", {}, element("b", { style: `background:${COLORS[at % COLORS.length]}` }), name)));
  target.replaceChildren(element("h2", {}, title), svg, legend);
}
