// Follows one run: asks for what was written since the last answer, appends it, redraws.
"use strict";

(function () {
  const follow = window.gptfit.page.follow;
  const run = window.gptfit.page.runs[0];
  const EVERY_MS = 800;
  const IDLE_MS = 5000; // a run that is over may be resumed
  const RELOAD_MS = 4000;
  const REFRESH_MS = 10000; // the large figures, between evals
  const MOST_POINTS = 20000;
  const live = document.getElementById("live");
  let offset = follow.offset;
  let refreshed = Date.now();

  // A resumed run repeats steps: what came after the point it went back to is dropped.
  function append(into, added) {
    if (!added.step || !added.step.length) return false;
    let keep = into.step.length;
    while (keep > 0 && into.step[keep - 1] >= added.step[0]) keep--;
    for (const key of Object.keys(into)) into[key].length = keep;
    for (const key of new Set([...Object.keys(into), ...Object.keys(added)])) {
      if (!into[key]) into[key] = new Array(keep).fill(null);
      const more = added[key] || new Array(added.step.length).fill(null);
      for (const value of more) into[key].push(value);
    }
    if (into.step.length > MOST_POINTS) {
      const half = into.step.length >> 1;
      for (const key of Object.keys(into)) into[key] = into[key].filter((_, i) => i >= half || i % 2 === 0);
    }
    return true;
  }

  function showSamples(samples) {
    if (!samples.length) return;
    const box = document.getElementById("samples");
    document.getElementById("samples-section").hidden = false;
    for (const sample of samples) {
      const where = document.createElement("p");
      where.className = "sample-step";
      where.textContent = "step " + sample.step;
      const text = document.createElement("pre");
      text.className = "sample";
      const prompt = document.createElement("strong");
      prompt.textContent = sample.prompt;
      text.append(prompt, sample.text);
      const first = box.querySelector(".sample-step");
      if (first && first.textContent === where.textContent) {
        // Under the heading that is there, after the other prompts of the same step.
        let last = first;
        while (last.nextElementSibling && last.nextElementSibling.className === "sample") last = last.nextElementSibling;
        last.after(text);
      } else box.prepend(where, text);
    }
  }

  function showState(status) {
    const step = run.steps.step.length ? run.steps.step[run.steps.step.length - 1] : 0;
    const loss = run.steps.loss && run.steps.loss.length ? run.steps.loss[run.steps.loss.length - 1] : null;
    const words = "step " + step.toLocaleString("en") + (loss === null ? "" : ", loss " + loss.toFixed(4));
    live.textContent = status + ": " + words;
    live.className = status === "running" ? "live" : "soft small";
    live.dataset.step = String(step);
  }

  // The words on the page follow the evals: the server writes them, escaped, as it wrote this page.
  async function refreshWords() {
    refreshed = Date.now();
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["headline", "figures", "facts", "why"]) {
      const section = fresh.getElementById(id);
      const old = document.getElementById(id);
      if (section && old) old.replaceWith(document.importNode(section, true));
    }
  }

  async function ask() {
    let wait = EVERY_MS;
    try {
      const answer = await fetch("/api/news?id=" + encodeURIComponent(follow.id) + "&from=" + offset);
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      // The log of another program is read whole each time, so not too often.
      if (found.reset) return setTimeout(() => location.reload(), RELOAD_MS);
      const moved = found.offset > offset;
      offset = found.offset;
      const grew = append(run.steps, found.steps);
      const evaluated = append(run.evals, found.evals);
      if (grew || evaluated) window.gptfit.redraw();
      showSamples(found.samples);
      showState(found.status);
      if (evaluated || found.ended || (grew && Date.now() - refreshed > REFRESH_MS)) refreshWords();
      if (found.more && moved) wait = 0;
      else if (found.status !== "running") wait = IDLE_MS;
    } catch (error) {
      live.textContent = "no answer from gptfit watch; trying again";
      wait = 3000;
    }
    setTimeout(ask, wait);
  }

  showState(follow.status);
  ask();
})();
