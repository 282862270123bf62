// Draw each figure with a chart of online/pages/charts.py by Chart.js, also in the parts of a page that htmx loads.
const rounding = { maximumFractionDigits: 0, maximumSignificantDigits: 3, roundingPriority: "morePrecision" };
const digits = new Intl.NumberFormat("en", rounding);

function draw(figure) {
  const shown = JSON.parse(figure.dataset.chart);
  const [plot, canvas] = ["div", "canvas"].map((name) => document.createElement(name));
  Object.assign(canvas, { role: "img", ariaLabel: shown.label });
  plot.append(canvas);
  figure.querySelector(".plot")?.remove();
  figure.prepend(plot);
  const property = (name, style = "") => {
    plot.className = `plot ${style}`; // for its colours
    return getComputedStyle(plot).getPropertyValue(name).trim();
  };
  const colour = (style) => (Array.isArray(style) ? style.map(colour) : property("--own", style));
  const text = (value) => `${digits.format(shown.unit === "%" ? 100 * value : value)} ${shown.unit}`.trim();
  Chart.defaults.color = property("--pico-muted-color");
  Chart.defaults.borderColor = property("--pico-muted-border-color");

  const datasets = shown.series.flatMap((series) => {
    const own = colour(series.style);
    const common = { series: series.name, borderColor: own, spanGaps: true };
    const main = { ...common, label: series.name, data: series.values, source: series, backgroundColor: own };
    if (shown.bars) return [main];
    const marks = series.notes.length > 0;
    Object.assign(main, {
      order: marks ? 0 : 1, showLine: !marks, clip: 8,
      borderWidth: 2, pointRadius: marks ? 6 : shown.labels.length > 60 ? 1 : 3, pointHoverRadius: marks ? 8 : 5,
      backgroundColor: series.style === "bad" ? property("--pico-card-background-color") : own,
    });
    const ends = [0, 1].map((end) => ({
      ...common, data: series.band.map((band) => band && band[end]), order: 2, borderWidth: 0, pointRadius: 0,
      pointHoverRadius: 0, fill: end ? "-1" : false, backgroundColor: `${own}26`,
    }));
    return series.band.length ? [main, ...ends] : [main];
  });

  const label = ({ dataset, dataIndex: at, raw }) => {
    const band = dataset.source.band[at]?.map(text).join(" to ");
    const value = dataset.source.notes[at] || text(raw) + (band ? ` (${band})` : "");
    return `${dataset.label}: ${value}`.match(/\S.{0,43}(?=\s|$)|\S{1,44}/g);
  };
  const toggle = (_, item, { chart }) => {
    const visible = !chart.isDatasetVisible(item.datasetIndex);
    chart.data.datasets.forEach((each, at) => each.series === item.text && chart.setDatasetVisibility(at, visible));
    chart.update();
  };
  new Chart(canvas, {
    type: shown.bars ? "bar" : "line", data: { labels: shown.labels, datasets },
    options: {
      animation: false, maintainAspectRatio: false, interaction: { mode: "index", intersect: false },
      onClick: (_, [bar]) => bar && shown.links[bar.index] && location.assign(shown.links[bar.index]),
      onHover: (_, [bar]) => { canvas.style.cursor = bar && shown.links.length ? "pointer" : "default"; },
      scales: {
        x: { stacked: shown.bars, ticks: { maxRotation: 0, autoSkipPadding: 12 }, grid: { display: false },
             title: { display: true, text: shown.x } },
        y: { stacked: shown.bars, ticks: { maxTicksLimit: 6, callback: text }, beginAtZero: shown.from_zero,
             max: shown.unit === "%" ? 1 : undefined },
      },
      plugins: {
        legend: { display: shown.series.length > 1, position: "bottom", onClick: toggle, labels: {
          usePointStyle: true, boxHeight: 7, filter: (item) => item.text,
          sort: (one, other) => one.datasetIndex - other.datasetIndex } },
        tooltip: { usePointStyle: true, callbacks: { label }, filter: ({ dataset }) => dataset.label },
      },
    },
  });
}

function drawAll(part) {
  part.querySelectorAll("figure[data-chart]").forEach(draw);
  Object.values(Chart.instances).filter((chart) => !chart.canvas.isConnected).forEach((chart) => chart.destroy());
}

htmx.onLoad(drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.querySelector("details[open]")) event.detail.shouldSwap = false; // somebody reads a table
});
