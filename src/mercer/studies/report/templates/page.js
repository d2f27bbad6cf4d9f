"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const options = { displayModeBar: false, scrollZoom: false, doubleClick: false };
  const draw = (holder) => {
    const { data, layout } = plots[holder.id.slice("plot-".length)];
    return Plotly.newPlot(holder, data, layout, options);
  };
  for (const legend of document.querySelectorAll(".legend")) {
    legend.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const show = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(show));
      const traces = button.dataset.traces.split(" ").map(Number);
      Plotly.restyle("plot-" + legend.dataset.plot, { visible: show }, traces);
    });
  }
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.data) Plotly.Plots.resize(target);
  });
  Promise.all(Array.from(document.querySelectorAll(".plot"), draw)).then((drawn) => {
    drawn.forEach((holder) => watcher.observe(holder));
    document.documentElement.dataset.plots = String(drawn.length);
  });
})();
