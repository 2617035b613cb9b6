// A conversation with one run: asks, shows the answer as it comes, stops when told to or when the page is left.
"use strict";

(function () {
  const runId = JSON.parse(document.getElementById("data").textContent).id;
  const at = (id) => document.getElementById(id);
  const messages = [];
  let asking = null;
  let conversation = 0;
  let about = ""; // what to know of the model, which is said once

  at("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });

  function bubble(role, text) {
    const made = document.createElement("p");
    made.className = role;
    made.textContent = text;
    at("talk").appendChild(made);
    made.scrollIntoView({ block: "nearest" });
    return made;
  }

  function busy(words) {
    at("state").textContent = words;
    at("send").disabled = asking !== null;
    at("stop").disabled = asking === null;
  }

  function take(line, shown) {
    if (line.ready) busy((about = [line.ready, ...(line.notes || [])].join(". ")));
    if (line.text) {
      shown.textContent += line.text;
      shown.scrollIntoView({ block: "nearest" });
    }
    if (line.error) throw new Error(line.error);
  }

  async function read(answer, shown) {
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value || new Uint8Array(), { stream: !done });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) if (line) take(JSON.parse(line), shown);
      if (done) return;
    }
  }

  async function ask(text) {
    const mine = conversation;
    messages.push({ role: "user", content: text });
    bubble("user", text);
    const shown = bubble("assistant", "");
    asking = new AbortController();
    busy("waiting for the model; the first answer loads it");
    let trouble = "";
    try {
      const answer = await fetch("/api/chat", {
        method: "POST", headers: { "Content-Type": "application/json" }, signal: asking.signal,
        body: JSON.stringify({ id: runId, messages: messages }),
      });
      if (!answer.ok) throw new Error((await answer.json()).error);
      await read(answer, shown);
    } catch (error) {
      trouble = error.name === "AbortError" ? "stopped" : error.message;
    }
    asking = null;
    busy((mine === conversation && trouble) || about);
    if (mine !== conversation) return; // another one was begun meanwhile
    if (shown.textContent.trim()) messages.push({ role: "assistant", content: shown.textContent });
    else {
      // Nothing was said: the question stays to be sent again.
      messages.pop();
      shown.previousElementSibling.remove();
      shown.remove();
      at("question").value = text;
      if (!trouble) busy("the model said nothing");
    }
    at("question").focus();
  }

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("question").value.trim();
    if (!text || asking) return;
    at("question").value = "";
    ask(text);
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit();
  });
  at("stop").addEventListener("click", () => asking && asking.abort());
  at("again").addEventListener("click", () => {
    if (asking) asking.abort();
    conversation++;
    messages.length = 0;
    at("talk").replaceChildren();
    busy(about);
    at("question").focus();
  });
  at("question").focus();
})();
