// Draws every chart of a page from the JSON in #data: one axis switch for all of them, colours from the style sheet.
"use strict";

(function () {
  const page = JSON.parse(document.getElementById("data").textContent);
  const AXES = {
    step: { label: "step", of: (run, steps) => steps },
    tokens: { label: "tokens", of: (run, steps) => (run.tokens_per_step ? steps.map((s) => s * run.tokens_per_step) : null) },
    hours: { label: "hours of training", of: (run, steps, seconds) => (seconds ? seconds.map((s) => (s === null ? null : s / 3600)) : null) },
    flops: {
      label: "training FLOPs",
      of: (run, steps) =>
        run.tokens_per_step && run.flops_per_token ? steps.map((s) => s * run.tokens_per_step * run.flops_per_token) : null,
    },
  };
  // The first stretch of a run falls so steeply that it would flatten the rest; double-click shows everything.
  const SKIP = 0.05;
  const state = { axis: "step", drawn: 0, log: { x: false, y: false }, smoothing: 0 };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColor = (i) => color("--run-" + (i % 6));
  const faint = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

  function xOf(run, part) {
    return part && part.step ? AXES[state.axis].of(run, part.step, part.seconds) : null;
  }

  function axisWorks(name) {
    return page.runs.every((run) => {
      const part = run.evals.step.length ? run.evals : run.steps;
      const xs = AXES[name].of(run, part.step, part.seconds);
      return xs !== null && xs.some((x) => x !== null);
    });
  }

  function layout(title, extra) {
    const text = color("--soft");
    const axis = { gridcolor: color("--grid"), zeroline: false, linecolor: color("--line"), tickcolor: color("--line"), automargin: true };
    return Object.assign(
      {
        margin: { l: 52, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
        hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") } },
        xaxis: Object.assign({ title: { text: AXES[state.axis].label, standoff: 6 } }, axis),
        yaxis: Object.assign({ title: { text: title, standoff: 6 } }, axis),
        showlegend: false, hovermode: "x unified", dragmode: "zoom", uirevision: state.axis + state.log.x + state.log.y, datarevision: ++state.drawn,
      },
      extra || {}
    );
  }

  function draw(id, traces, title, extra) {
    const box = document.getElementById(id);
    if (!box) return;
    const shown = traces.filter((trace) => trace.x && trace.x.length);
    box.closest(".card").hidden = shown.length === 0;
    if (!shown.length) return;
    // A small chart has no room for a tool bar: double-click shows everything again.
    const isTall = box.classList.contains("tall");
    const options = { displaylogo: false, responsive: true, displayModeBar: isTall ? "hover" : false };
    if (isTall) options.modeBarButtonsToRemove = ["lasso2d", "select2d", "autoScale2d"];
    Plotly.react(box, shown, layout(title, extra), options);
  }

  function yRange(traces) {
    let low = Infinity, high = -Infinity;
    for (const t of traces) {
      if (!t.x) continue;
      let last = 0;
      for (const x of t.x) if (x !== null && x > last) last = x;
      t.x.forEach((x, i) => {
        const y = t.y[i];
        if (x === null || y === null || y === undefined || (x < SKIP * last && t.x.length > 8)) return;
        if (y < low) low = y;
        if (y > high) high = y;
      });
    }
    if (!(high > low)) return undefined;
    if (state.log.y) [low, high] = [Math.log10(Math.max(low, 1e-6)), Math.log10(high)];
    const pad = 0.05 * (high - low);
    return [low - pad, high + pad];
  }

  // An average that forgets: each step counts `weight` times the next one; its beginning is not drawn towards zero.
  function smoothed(values, weight) {
    let sum = 0, total = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return null;
      sum = weight * sum + value;
      total = weight * total + 1;
      return sum / total;
    });
  }

  function label(run) {
    return page.runs.length > 1 ? run.letter + " " : "";
  }

  function drawLoss() {
    const traces = [];
    const isBits = page.unit === "bits per byte";
    page.runs.forEach((run, i) => {
      // Losses are logged in nats per token; a run whose bytes per token are unknown has no curve in bits per byte.
      const scale = isBits ? run.bits_per_byte_per_nat : 1;
      const scaled = (values) => (scale ? (values || []).map((v) => (v === null ? null : v * scale)) : []);
      traces.push({
        x: xOf(run, run.steps), y: scaled(run.steps.loss), name: label(run) + "train, each step", mode: "lines", connectgaps: false,
        line: { color: faint(runColor(i), state.smoothing ? 0.14 : 0.32), width: 1 }, hoverinfo: "skip",
      });
      if (state.smoothing)
        traces.push({
          x: xOf(run, run.steps), y: smoothed(scaled(run.steps.loss), state.smoothing), name: label(run) + "train, smoothed", mode: "lines",
          line: { color: faint(runColor(i), 0.7), width: 1.4 }, hovertemplate: "%{y:.4f}",
        });
      if (run.evals.train_loss)
        traces.push({
          x: xOf(run, run.evals), y: scaled(run.evals.train_loss), name: label(run) + "train", mode: "lines",
          line: { color: runColor(i), width: 1.2, dash: "dot" }, hovertemplate: "%{y:.4f}",
        });
      const knowsBits = isBits && (run.evals.val_bpb || []).some((v) => v !== null);
      traces.push({
        x: xOf(run, run.evals), y: knowsBits ? run.evals.val_bpb : scaled(run.evals.val_loss), name: label(run) + "validation", mode: "lines+markers",
        line: { color: runColor(i), width: 2.2 }, marker: { size: 5 }, hovertemplate: "%{y:.4f}",
      });
    });
    const usable = traces.map((t) => (t.y && t.y.length ? t : Object.assign({}, t, { x: null })));
    const range = yRange(usable);
    const title = isBits ? "bits per byte" : "loss, nats per token";
    const plain = layout(title);
    // Room above the curves for the tool bar, which appears where the pointer is.
    const extra = { margin: Object.assign({}, plain.margin, { t: 34 }), yaxis: plain.yaxis, xaxis: plain.xaxis };
    if (range) extra.yaxis.range = range;
    if (state.log.y) extra.yaxis.type = "log";
    if (state.log.x) extra.xaxis.type = "log";
    draw("loss", usable, title, extra);
  }

  function drawGap() {
    const key = { step: "step", tokens: "tokens", hours: "seconds", flops: "flops" }[state.axis];
    const duel = page.gaps && page.gaps[key];
    const box = document.getElementById("gap");
    if (!box) return;
    box.closest(".card").hidden = !duel;
    if (!duel) return;
    const scale = state.axis === "hours" ? 3600 : 1;
    const xs = duel.points.map((p) => p.at / scale);
    const ys = duel.points.map((p) => p.difference);
    const inside = ys.filter((y, i) => xs[i] >= SKIP * 4 * xs[xs.length - 1] || xs.length < 8);
    const reach = Math.max(3 * duel.noise, ...inside.map(Math.abs)) * 1.15;
    // Noise is larger early on, where the losses still fall fast: an outline there and back.
    const band = {
      x: xs.concat(xs.slice().reverse()), y: duel.points.map((p) => p.noise).concat(duel.points.map((p) => -p.noise).reverse()),
      fill: "toself", fillcolor: color("--band"), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
    };
    const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: color("--soft"), width: 1 } };
    draw(
      "gap",
      [band, { x: xs, y: ys, name: "B - A", mode: "lines+markers", line: { color: runColor(1), width: 2 }, marker: { size: 4 }, hovertemplate: "%{y:+.4f}" }],
      "B minus A", { shapes: [zero], yaxis: Object.assign(layout("").yaxis, { range: [-reach, reach], title: { text: "B minus A" } }) }
    );
  }

  function perRun(id, title, values, extra) {
    const traces = page.runs.map((run, i) => {
      const ys = values(run);
      return {
        x: ys ? xOf(run, run.steps) : null, y: ys, name: page.runs.length > 1 ? run.letter : title, mode: ys && ys.length < 60 ? "lines+markers" : "lines",
        line: { color: runColor(i), width: 1.5 }, marker: { size: 4 }, connectgaps: true,
      };
    });
    draw(id, traces, title, extra);
  }

  const each = (ys, f) => (ys ? ys.map((y) => (y === null || y <= 0 ? null : f(y))) : null);

  function drawAll() {
    drawLoss();
    drawGap();
    perRun("speed", "tokens/s", (run) => (run.tokens_per_step ? each(run.steps.ms, (ms) => (run.tokens_per_step / ms) * 1000) : null), {
      yaxis: Object.assign(layout("tokens/s").yaxis, { rangemode: "tozero" }),
    });
    perRun("mfu", "MFU, % of the card's own peak", (run) =>
      run.flops_per_step && run.peak_tflops ? each(run.steps.ms, (ms) => (100 * run.flops_per_step) / ms / run.processes / 1e9 / run.peak_tflops) : null,
      { yaxis: Object.assign(layout("MFU, %").yaxis, { rangemode: "tozero" }) });
    perRun("memory", "memory, GiB", (run) => run.steps.memory_gib || null, { yaxis: Object.assign(layout("memory, GiB").yaxis, { rangemode: "tozero" }) });
    perRun("lr", "learning rate", (run) => run.steps.lr || null, {
      yaxis: Object.assign(layout("learning rate").yaxis, { rangemode: "tozero", exponentformat: "e" }),
    });
    perRun("norm", "gradient norm", (run) => run.steps.grad_norm || null);
    // A card that turned out empty gave its place to its neighbour, which was already drawn.
    document.querySelectorAll(".chart").forEach((box) => {
      if (box.data && box.layout.width !== box.clientWidth && box.clientWidth) Plotly.Plots.resize(box);
    });
  }

  function choose(axis) {
    state.axis = axis;
    document.querySelectorAll("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === axis)));
    drawAll();
  }

  document.querySelectorAll("[data-axis]").forEach((button) => {
    button.disabled = !axisWorks(button.dataset.axis);
    button.addEventListener("click", () => choose(button.dataset.axis));
  });
  document.querySelectorAll("[data-log]").forEach((button) =>
    button.addEventListener("click", () => {
      state.log[button.dataset.log] = !state.log[button.dataset.log];
      button.setAttribute("aria-pressed", String(state.log[button.dataset.log]));
      drawLoss();
    })
  );
  const smoothing = document.getElementById("smoothing");
  if (smoothing)
    smoothing.addEventListener("input", () => {
      state.smoothing = Number(smoothing.value);
      drawLoss();
    });
  const theme = document.getElementById("theme");
  if (theme)
    theme.addEventListener("click", () => {
      const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
      document.documentElement.dataset.theme = dark ? "light" : "dark";
      drawAll();
    });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  choose("step");
  window.gptfit = { page: page, redraw: drawAll };
})();
