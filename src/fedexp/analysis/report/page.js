"use strict";

// Charts are a function of their section's state: a click changes the state and redraws them.

const FEW_POINTS = 25;
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");
const sections = JSON.parse(document.getElementById("data").textContent);

// Plotly interprets HTML in text; names come from users.
const escapeHtml = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function formatValue(value, chart) {
  if (chart.percent) return `${(100 * value).toFixed(2)}%`;
  const size = Math.abs(value);
  const isPlain = size === 0 || (size >= 1e-3 && size < 1e6);
  return isPlain ? String(Number(value.toPrecision(4))) : Number(value.toPrecision(3)).toExponential();
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function withOpacity(colour, opacity) {
  const channels = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${channels.join(",")},${opacity})`;
}

function hoverTexts(points, curve, name, chart) {
  return points.mean.map((mean, at) => {
    const spread = points.std[at] > 0 ? ` ± ${formatValue(points.std[at], chart)}` : "";
    const some = points.seeds[at] < curve.runs ? ` (${points.seeds[at]} of ${curve.runs} seeds)` : "";
    return `<b>${escapeHtml(name)}</b>  ${formatValue(mean, chart)}${spread}${some}`;
  });
}

function band(points, colour) {
  return {
    x: [...points.rounds, ...[...points.rounds].reverse()],
    y: [...points.high, ...[...points.low].reverse()],
    fill: "toself",
    fillcolor: withOpacity(colour, dark.matches ? 0.22 : 0.15),
    line: { width: 0 },
    hoverinfo: "skip",
    mode: "lines",
  };
}

// Pale where some seeds have ended early, strong where the mean is over all that were given as many rounds.
function lines(points, curve, key, colour, chart) {
  const complete = points.mean.map((mean, at) => (points.seeds[at] >= curve.seeds ? mean : null));
  const strong = {
    x: points.rounds,
    y: complete,
    mode: points.rounds.length <= FEW_POINTS ? "lines+markers" : "lines",
    marker: { size: 5, color: colour },
    line: { color: colour, width: 2.2, dash: key.dash },
  };
  const hover = {
    text: hoverTexts(points, curve, key.name, chart),
    hovertemplate: "%{text}<extra></extra>",
  };
  if (!complete.includes(null)) return [{ ...strong, ...hover }];
  const thin = { ...strong.line, width: 1.4 };
  const pale = { ...strong, ...hover, y: points.mean, opacity: 0.5, line: thin };
  return [pale, { ...strong, hoverinfo: "skip" }];
}

// A run that diverged may have left the axis: its cross stays at the edge.
function endMarkers(curve, key, colour, chart) {
  const diverged = (end) => end.status.startsWith("diverged");
  const [low, high] = chart.range ?? [-Infinity, Infinity];
  return {
    x: curve.ends.map((end) => end.round),
    y: curve.ends.map((end) => Math.min(Math.max(end.value, low), high)),
    mode: "markers",
    marker: {
      symbol: curve.ends.map((end) => (diverged(end) ? "x" : "circle-open")),
      size: 10,
      color: colour,
      line: { width: 2, color: colour },
    },
    text: curve.ends.map((end) => `${escapeHtml(key.name)}, seed ${end.seed}: ${escapeHtml(end.status)}`),
    hovertemplate: "%{text}<extra></extra>",
    cliponaxis: false,
  };
}

function traces(section, chart, state) {
  return chart.curves.flatMap((curve) => {
    const key = section.series[curve.series];
    const colour = dark.matches ? key.dark : key.light;
    const points = state.smooth ? curve.smooth : curve.raw;
    const drawn = [
      band(points, colour),
      ...lines(points, curve, key, colour, chart),
      endMarkers(curve, key, colour, chart),
    ];
    const visible = !state.hidden.has(curve.series);
    return drawn.map((trace) => ({ ...trace, type: "scatter", name: escapeHtml(key.name), visible }));
  });
}

function targetLines(chart) {
  const font = { size: 11, color: css("--quiet") };
  const lowest = chart.targets.length > 1 ? Math.min(...chart.targets) : null;
  return chart.targets.map((target) => ({
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: target,
    y1: target,
    line: { color: css("--quiet"), width: 1, dash: "dot" },
    label: {
      text: `target ${formatValue(target, chart)}`,
      textposition: "start",
      font,
      yanchor: target === lowest ? "top" : "bottom", // close targets do not cross their labels
    },
  }));
}

// Ticks at powers of ten only, if there are a few of them.
function ticks(chart, scale) {
  if (chart.percent) return { tickformat: ".0%" };
  if (scale === "linear") return { exponentformat: "e" };
  const values = chart.range ?? chart.curves.flatMap((curve) => curve.raw.mean).filter((value) => value > 0);
  const decades = Math.log10(Math.max(...values) / Math.min(...values));
  const dtick = decades > 1 && decades < 8 ? 1 : undefined;
  return { exponentformat: "power", tickfont: { size: 10 }, dtick };
}

// With a margin, and without runs that diverged, which would flatten all others.
function range(chart, scale) {
  if (chart.range === null || (scale === "log" && chart.range[0] <= 0)) return {};
  const [low, high] = scale === "log" ? chart.range.map(Math.log10) : chart.range;
  const margin = 0.05 * (high - low || Math.abs(high) || 1);
  return { range: [low - margin, high + margin] };
}

function layout(chart, scale) {
  const axis = {
    gridcolor: css("--grid"),
    linecolor: css("--line"),
    zeroline: false,
    ticks: "",
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--quiet") },
    margin: { l: 56, r: 14, t: 10, b: 44 },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: {
      bgcolor: css("--card"),
      bordercolor: css("--line"),
      font: { color: css("--ink"), size: 12 },
      namelength: -1,
    },
    dragmode: touch.matches ? false : "zoom", // a swipe on a chart scrolls the page
    shapes: targetLines(chart),
    xaxis: {
      ...axis,
      title: { text: "round", standoff: 8 },
      tickformat: ",d",
      dtick: Math.max(...chart.curves.flatMap((curve) => curve.raw.rounds)) < 10 ? 1 : undefined,
      unifiedhovertitle: { text: "<b>round %{x}</b>" },
      spikecolor: css("--quiet"),
      spikethickness: 1,
    },
    yaxis: { ...axis, type: scale, ...ticks(chart, scale), ...range(chart, scale) },
  };
}

const config = {
  responsive: true,
  displaylogo: false,
  displayModeBar: false,
  doubleClick: "reset",
  showTips: false,
};

function start(element, section) {
  const figures = [...element.querySelectorAll("figure")];
  const state = {
    hidden: new Set(),
    smooth: false,
    scales: section.charts.map((chart) => (chart.log ? "log" : "linear")),
  };

  function draw(at) {
    const chart = section.charts[at];
    for (const button of figures[at].querySelectorAll("[data-scale]")) {
      button.setAttribute("aria-pressed", button.dataset.scale === state.scales[at]);
    }
    const plot = figures[at].querySelector(".plot");
    Plotly.react(plot, traces(section, chart, state), layout(chart, state.scales[at]), config);
  }
  const drawAll = () => figures.forEach((_, at) => draw(at));

  for (const key of element.querySelectorAll(".key")) {
    key.addEventListener("click", () => {
      const series = Number(key.dataset.series);
      const shown = state.hidden.delete(series);
      if (!shown) state.hidden.add(series);
      key.setAttribute("aria-pressed", shown);
      drawAll();
    });
  }
  element.querySelector(".smooth").addEventListener("click", (event) => {
    state.smooth = !state.smooth;
    event.currentTarget.setAttribute("aria-pressed", state.smooth);
    drawAll();
  });
  figures.forEach((figure, at) => {
    for (const button of figure.querySelectorAll("[data-scale]")) {
      button.addEventListener("click", () => {
        state.scales[at] = button.dataset.scale;
        draw(at);
      });
    }
  });
  dark.addEventListener("change", drawAll);
  drawAll();
}

for (const element of document.querySelectorAll("[data-section]")) {
  start(element, sections[Number(element.dataset.section)]);
}
