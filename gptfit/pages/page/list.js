// The list of runs: asks every two seconds, keeps the ticks, draws a sparkline per run.
"use strict";

(function () {
  const EVERY_MS = 2000;
  const body = document.getElementById("runs");
  const button = document.getElementById("compare");
  const ticked = new Set();

  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });

  function cell(row, text, label) {
    const td = document.createElement("td");
    if (text !== undefined) td.textContent = text;
    if (text && label) td.dataset.label = label; // shown where there is no room for headings
    row.appendChild(td);
    return td;
  }

  function line(text, kind) {
    const made = document.createElement("div");
    made.textContent = text;
    made.className = kind;
    return made;
  }

  function bar(share) {
    const outer = line("", "progress"), inner = line("", "");
    inner.style.width = Math.min(100, 100 * share) + "%";
    outer.appendChild(inner);
    return outer;
  }

  function spark(values) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 120 28");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    if (values.length > 1) {
      const low = Math.min(...values), high = Math.max(...values);
      const points = values.map((v, i) => (1 + (118 * i) / (values.length - 1)).toFixed(1) + "," + (25 - 22 * (high > low ? (v - low) / (high - low) : 0.5)).toFixed(1));
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      line.setAttribute("points", points.join(" "));
      line.setAttribute("fill", "none");
      line.setAttribute("stroke", "var(--accent)");
      line.setAttribute("stroke-width", "1.5");
      line.setAttribute("vector-effect", "non-scaling-stroke");
      svg.appendChild(line);
    }
    return svg;
  }

  function time(seconds) {
    if (seconds === null) return "";
    const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
    for (const [big, name, small, smallName] of units)
      if (seconds >= big) return Math.floor(seconds / big) + " " + name + " " + Math.floor((seconds % big) / small) + " " + smallName;
    return Math.round(seconds) + " s";
  }

  function show(runs) {
    const rows = runs.map((run) => {
      const row = document.createElement("tr");
      const tick = document.createElement("input");
      tick.type = "checkbox";
      tick.checked = ticked.has(run.id);
      tick.dataset.what = "tick " + run.id;
      tick.setAttribute("aria-label", "compare " + run.name);
      tick.addEventListener("change", () => {
        if (tick.checked) ticked.add(run.id);
        else ticked.delete(run.id);
        button.disabled = ticked.size < 2;
      });
      cell(row).appendChild(tick);
      const link = document.createElement("a");
      link.href = "/run?id=" + encodeURIComponent(run.id);
      link.textContent = run.name;
      link.title = run.id;
      link.dataset.what = "link " + run.id;
      const name = cell(row);
      name.appendChild(link);
      const speed = run.tokens_per_s === null ? "" : Math.round(run.tokens_per_s).toLocaleString("en") + " tokens/s";
      const mfu = run.mfu === null ? "" : "MFU " + (100 * run.mfu).toFixed(0) + " %";
      name.appendChild(line([run.card, speed, mfu].filter(Boolean).join(", "), "soft small"));
      const status = cell(row, run.status);
      if (run.status === "running") status.className = "live";
      for (const words of run.attention) status.appendChild(line(words, "attention"));
      const progress = cell(row, run.step.toLocaleString("en") + (run.max_iters ? " of " + run.max_iters.toLocaleString("en") : ""), "step");
      if (run.max_iters) progress.appendChild(bar(run.step / run.max_iters));
      cell(row, run.loss === null ? "" : run.loss.toFixed(3), "loss");
      // Three figures to be held against each other have one unit: nats, or bits per byte for a vocabulary of its own.
      const inBits = run.bits_per_byte !== null;
      const scale = inBits && run.val_loss ? run.bits_per_byte / run.val_loss : 1;
      const last = inBits ? run.bits_per_byte : run.val_loss;
      const measured = last === null ? "" : last.toFixed(4);
      const validation = cell(row, measured + (inBits ? " bits/byte" : ""), "validation");
      const heading = run.projected && run.status === "running" ? "→ " + (run.projected.value * scale).toFixed(2) : "";
      const plan = run.planned ? "plan " + (run.planned.value * scale).toFixed(2) : "";
      if (heading || plan) validation.appendChild(line([heading, plan].filter(Boolean).join(", "), "soft small"));
      if (inBits && run.val_loss !== null) validation.appendChild(line(run.val_loss.toFixed(4) + " nats/token", "soft small"));
      cell(row, run.status === "running" ? time(run.seconds_left) : "", "left");
      cell(row).appendChild(spark(run.spark));
      return row;
    });
    // New rows, every two seconds: who walks them with the keyboard stays where they were.
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.what : "";
    body.replaceChildren(...rows);
    if (focused) [...body.querySelectorAll("a, input")].find((one) => one.dataset.what === focused)?.focus();
    const found = runs.length + (runs.length === 1 ? " run" : " runs") + ". Tick two or more to compare.";
    document.getElementById("count").textContent = runs.length ? found : "No runs here yet; one that gptfit train begins appears by itself.";
  }

  async function ask() {
    try {
      const answer = await fetch("/api/runs");
      if (answer.ok) show(await answer.json());
    } catch (error) {
      document.getElementById("count").textContent = "No answer from gptfit watch; trying again.";
    }
    setTimeout(ask, EVERY_MS);
  }

  button.addEventListener("click", () => {
    location.href = "/compare?" + [...ticked].map((id) => "id=" + encodeURIComponent(id)).join("&");
  });
  ask();
})();
