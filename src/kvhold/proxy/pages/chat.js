"use strict";
/* A chat by the proxy's own API. Texts are never markup. */

const byId = (id) => document.getElementById(id);
let turns = [], session = crypto.randomUUID?.() ?? String(Math.random()), key = "", running = null;

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

async function call(path, options) {
  const response = await fetch(path, { ...options, headers: headers() });
  byId("login").hidden = response.status !== 401;
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error?.message ?? `the proxy answered ${response.status}`);
}

function add(parent, name, text = "", kind = "") {
  const element = document.createElement(name);
  element.textContent = text;
  element.className = kind;
  parent.append(element);
  return element;
}

function bubble(role, text = "") {
  const article = add(byId("log"), "article", "", role);
  const thought = add(article, "p", "", "thought");
  const body = add(article, "p", text, "body");
  thought.hidden = true;
  article.scrollIntoView({ block: "end" });
  return { article, thought, body };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function question() {
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
    prompt_cache_key: session,
  };
  if (byId("most").value) body.max_tokens = Number(byId("most").value);
  if (byId("keep").checked) body.prompt_cache_options = { mode: "implicit", ttl: "30m" };
  return body;
}

function report(article, usage, firstMs) {
  const footer = add(article, "footer");
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached === undefined || cached === null) {
      parts.push(`${usage.prompt_tokens} prompt tokens, cache unknown (--enable-prompt-tokens-details)`);
    } else {
      const meter = add(footer, "meter");
      meter.max = Math.max(1, usage.prompt_tokens);
      meter.value = cached;
      parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
    }
  }
  if (firstMs !== null) parts.push(`first token after ${(firstMs / 1000).toFixed(2)} s`);
  if (usage) parts.push(`${usage.completion_tokens} tokens answered`);
  add(footer, "span", ` ${parts.join(" · ")}`);
  article.scrollIntoView({ block: "end" });
}

async function answer(chat) {
  const { article, thought, body } = bubble("assistant");
  const began = performance.now();
  let firstMs = null, usage = null;
  try {
    const options = { method: "POST", body: JSON.stringify(question()), signal: running.signal };
    for await (const event of events(await call("v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message ?? "the engine failed");
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta ?? {};
      const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
      if ((delta.content || reasoning) && firstMs === null) firstMs = performance.now() - began;
      thought.textContent += reasoning;
      thought.hidden = !thought.textContent;
      body.textContent += delta.content ?? "";
    }
  } finally {
    if (body.textContent) chat.push({ role: "assistant", content: body.textContent });
    if (firstMs === null && !usage) article.remove();
    else report(article, usage, firstMs);
  }
}

async function send() {
  const text = byId("text").value.trim();
  if (!text || running) return;
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  complain("");
  const { article } = bubble("user", text);
  const chat = turns; // "New chat" may replace it
  chat.push({ role: "user", content: text });
  byId("text").value = "";
  const asked = chat.length;
  try {
    await answer(chat);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
    if (chat.length === asked && chat === turns) { // without an answer the question goes back
      chat.pop();
      article.remove();
      byId("text").value = text;
    }
  }
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  byId("text").focus();
}

async function start() {
  complain("");
  try {
    const { data } = await (await call("v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  } catch (error) {
    complain(error.message);
  }
}

byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("login").addEventListener("submit", (event) => { event.preventDefault(); key = byId("key").value; start(); });
byId("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  session = crypto.randomUUID?.() ?? String(Math.random());
  byId("log").replaceChildren();
  complain("");
});
start();
