// The plan page: every change of the form is a question to the server, whose answer is drawn as it comes. No figure is made here.
"use strict";

(function () {
  const WAIT_MS = 150;
  const SIZES = JSON.parse(document.getElementById("sizes").textContent);
  const form = document.getElementById("form");
  const at = (id) => document.getElementById(id);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const initial = new FormData(form);
  let extra = {}; // keys of the config that have no field, set by a remedy
  let asking = null, timer = 0, last = null;

  at("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    if (last) drawCurve(last.curve, last.curve_unit);
  });

  function element(name, text, kind) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function asked() {
    const said = new URLSearchParams();
    // A field left as it was is not asked for, so that the command line's own value stands; but the tokens per step are
    // always said, so that a smaller micro-batch never shrinks the step.
    for (const [name, value] of new FormData(form))
      if (name !== "size" && (value !== initial.get(name) || name === "tokens_per_step")) said.set(name, value);
    for (const [name, value] of Object.entries(extra)) said.set(name, value);
    return said;
  }

  function set(name, value) {
    const field = form.elements[name];
    if (field) field.value = String(value);
    else extra[name] = value;
  }

  function readAddress() {
    for (const [name, value] of new URLSearchParams(location.search)) if (name !== "token") set(name, value);
  }

  async function ask() {
    const said = asked();
    history.replaceState(null, "", said.size ? "?" + said : location.pathname);
    if (asking) asking.abort();
    asking = new AbortController();
    try {
      const answer = await fetch("/api/plan?" + said, { signal: asking.signal });
      if (answer.ok) show(await answer.json());
      else complain("The server answered " + answer.status + ".");
    } catch (error) {
      if (error.name !== "AbortError") complain("No answer from gptfit; is it still running in its terminal?");
    }
  }

  function complain(line) {
    at("wrong").textContent = line;
    at("wrong").hidden = false;
  }

  function show(plan) {
    if (plan.error) return complain(plan.error);
    last = plan;
    at("wrong").hidden = true;
    at("headline").textContent = plan.headline;
    document.body.dataset.fits = plan.starts && plan.fits !== false ? "yes" : "no";
    at("command").textContent = plan.command;
    at("config").textContent = plan.config;
    at("numbers").replaceChildren(...plan.numbers.map(([figure, what, basis]) => {
      const box = element("div");
      box.append(element("strong", figure), element("span", what), element("span", basis, "soft"));
      return box;
    }));
    at("rows").replaceChildren(...plan.rows.map((cells) => {
      const row = element("tr");
      cells.forEach((text, i) => row.append(element("td", text, i === 1 ? "words" : "")));
      return row;
    }));
    drawMemory(plan);
    drawProblems(plan);
    drawExtra();
    drawCurve(plan.curve, plan.curve_unit);
  }

  function drawMemory(plan) {
    const bar = at("memory");
    bar.setAttribute("aria-label", plan.memory_words);
    at("memory-title").textContent = plan.memory_total ? "Memory: " + plan.memory_total : "Memory";
    if (!plan.memory) return [bar, at("parts")].forEach((box) => box.replaceChildren());
    const parts = Object.entries(plan.memory.parts).filter(([, size]) => size > 0.005);
    at("parts").replaceChildren(...parts.map(([name, size], i) => {
      const key = element("span", "", "memory-key");
      key.append(element("i", "", "key-" + (i % 6)), name + " " + size.toFixed(1));
      return key;
    }));
    const used = parts.reduce((sum, [, size]) => sum + size, 0), limit = plan.memory.usable_gib;
    const whole = 1.04 * Math.max(used, limit || 0);
    const pieces = parts.map(([name, size], i) => {
      const piece = element("span", "", "part key-" + (i % 6));
      piece.style.width = (100 * size) / whole + "%";
      piece.title = name + " " + size.toFixed(2) + " GiB";
      return piece;
    });
    if (limit) {
      const line = element("span", "", "limit");
      line.style.left = (100 * limit) / whole + "%";
      line.title = limit.toFixed(1) + " GiB usable on this card";
      pieces.push(line);
    }
    bar.replaceChildren(...pieces);
  }

  function drawProblems(plan) {
    const rows = plan.problems.map((problem) => {
      const row = element("p", "", "problem " + problem.level);
      row.append(element("strong", problem.level + ": "), problem.where + ": " + problem.message);
      if (problem.fix) row.append(element("br"), element("span", problem.fix, "soft"));
      const change = Object.entries(problem.change || {});
      if (change.length) {
        const button = element("button", "Apply " + change.map(([key, value]) => key + "=" + value).join(", "));
        button.type = "button";
        button.addEventListener("click", () => { change.forEach(([key, value]) => set(key, value)); ask(); });
        row.append(element("br"), button);
      }
      return row;
    });
    rows.push(...plan.notes.map((note) => element("p", note, "soft")));
    at("problems").hidden = rows.length === 0;
    at("problems").replaceChildren(...rows);
  }

  function drawExtra() {
    at("extra").replaceChildren(...Object.entries(extra).map(([key, value]) => {
      const chip = element("button", key + "=" + value + " ×");
      chip.type = "button";
      chip.setAttribute("aria-label", "remove " + key);
      chip.addEventListener("click", () => { delete extra[key]; ask(); });
      return chip;
    }));
  }

  function drawCurve(curve, unit) {
    const box = at("curve");
    box.closest(".card").hidden = curve.tokens.length === 0;
    if (!curve.tokens.length) return;
    const axis = { gridcolor: color("--grid"), zeroline: false, linecolor: color("--line"), automargin: true };
    const line = { x: curve.tokens, mode: "lines", hovertemplate: "%{y:.2f}<extra></extra>" };
    const traces = [
      Object.assign({}, line, { y: curve.high, line: { width: 0 }, hoverinfo: "skip", hovertemplate: null }),
      Object.assign({}, line, { y: curve.low, line: { width: 0 }, fill: "tonexty", fillcolor: color("--band"), hoverinfo: "skip", hovertemplate: null }),
      Object.assign({}, line, { y: curve.loss, line: { color: color("--run-0"), width: 2 } }),
    ];
    Plotly.react(box, traces, {
      margin: { l: 48, r: 12, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("--soft") },
      xaxis: Object.assign({ type: "log", title: { text: "tokens", standoff: 6 }, dtick: 1 }, axis),
      yaxis: Object.assign({ title: { text: unit, standoff: 6 } }, axis),
      showlegend: false, hovermode: "x unified",
    }, { displayModeBar: false, responsive: true });
  }

  form.addEventListener("input", (event) => {
    if (event.target.name === "size" && SIZES[event.target.value])
      ["n_layer", "n_head", "n_embd"].forEach((key, i) => set(key, SIZES[event.target.value][i]));
    else if (["n_layer", "n_head", "n_embd"].includes(event.target.name)) form.elements.size.value = "";
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  for (const button of document.querySelectorAll("[data-copy]"))
    button.addEventListener("click", async () => {
      const text = at(button.dataset.copy).textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch (error) {
        getSelection().selectAllChildren(at(button.dataset.copy)); // no clipboard here: selected, ready for Ctrl-C
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  readAddress();
  ask();
})();
