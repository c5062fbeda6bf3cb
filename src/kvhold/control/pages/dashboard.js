"use strict";
// Shows what the API says. Every text is set as text, never as markup.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899",
  "#84cc16", "#6366f1", "#f97316", "#14b8a6", "#a855f7"];
const METRICS = ["kvhold_hit_tokens", "kvhold_missed_tokens", "kvhold_lookup_tokens",
  "kvhold_arena_used_bytes", "kvhold_arena_bytes", "kvhold_tier_available"];
const EVERY_MS = 10000;
const HELD_EVERY_MS = 60000;
const SVG = "http://www.w3.org/2000/svg";
let since = 21600;
let by = "tenant";
let call = "get";
let opened = "";
let openedReason = "";
let heldAt = 0;
let shows = 0;
let isTenant = false;

const at = (id) => document.getElementById(id);

function make(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

async function ask(path) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: "Bearer " + token } : {};
  const answer = await fetch(path, { headers });
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.detail), { reason: content.reason });
  return content;
}

function bytes(number) {
  if (number === null || number === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return (unit ? number.toFixed(1) : number.toFixed(0)) + " " + units[unit];
}

function count(number) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) return (number / size).toFixed(1) + " " + letter;
  }
  return number.toFixed(0);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return (1000 * seconds).toFixed(1) + " ms";
  if (seconds < 120) return seconds.toFixed(1) + " s";
  if (seconds < 7200) return (seconds / 60).toFixed(0) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
  return (seconds / 86400).toFixed(1) + " d";
}

// --- charts

function byLabel(history, metric) {
  const found = {};
  for (const [name, values] of Object.entries(history.series)) {
    if (name === metric) found[""] = values;
    else if (name.startsWith(metric + "{")) found[name.slice(metric.length + 1, -1).split("=")[1]] = values;
  }
  return found;
}

const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

function chart(place, times, lines, { stacked = false, most = 0, format = count } = {}) {
  const names = Object.keys(lines);
  place.replaceChildren();
  if (!names.length) { place.append(make("p", "nothing yet", { class: "hint" })); return; }
  const [width, height, left, bottom, above] = [place.clientWidth || 600, 180, 60, 18, 8];
  const tops = times.map((_, i) => stacked
    ? names.reduce((total, name) => total + (lines[name][i] || 0), 0)
    : Math.max(...names.map((name) => lines[name][i] || 0)));
  const top = most || Math.max(...tops) || 1;
  const x = (i) => left + (width - left) * (times.length < 2 ? 0 : i / (times.length - 1));
  const y = (value) => above + (height - bottom - above) * (1 - value / top);
  const svg = document.createElementNS(SVG, "svg");
  const add = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", names.join(", ") || "values");
  for (const part of [0, 0.5, 1]) {
    add("line", { x1: left, x2: width, y1: y(part * top), y2: y(part * top), stroke: "var(--line)" });
    add("text", { x: left - 6, y: y(part * top) + 4, "text-anchor": "end", "font-size": 11, fill: "var(--soft)" }, format(part * top));
  }
  const label = (i) => {
    const time = new Date(1000 * times[i]);
    return since > 86400 ? time.toLocaleDateString() : time.toTimeString().slice(0, 5);
  };
  for (const [i, anchor] of [[0, "start"], [times.length - 1, "end"]]) {
    add("text", { x: x(i), y: height - 3, "text-anchor": anchor, "font-size": 11, fill: "var(--soft)" }, label(i));
  }
  const below = times.map(() => 0);
  names.forEach((name, number) => {
    const colour = COLOURS[number % COLOURS.length];
    const values = lines[name];
    if (stacked) {
      const upper = values.map((value, i) => below[i] + (value || 0));
      const points = upper.map((value, i) => `${x(i)},${y(value)}`)
        .concat(below.map((value, i) => `${x(i)},${y(value)}`).reverse());
      add("polygon", { points: points.join(" "), fill: colour, "fill-opacity": 0.75 });
      upper.forEach((value, i) => { below[i] = value; });
      return;
    }
    let run = [];
    const draw = () => {
      if (run.length === 1) add("circle", { cx: run[0][0], cy: run[0][1], r: 2, fill: colour });
      else if (run.length) add("polyline", { points: run.map((point) => point.join(",")).join(" "), fill: "none", stroke: colour, "stroke-width": 2 });
      run = [];
    };
    values.forEach((value, i) => { if (value === null) draw(); else run.push([x(i), y(value)]); });
    draw();
  });
  place.append(svg);
  if (names.length > 1 || names[0]) {
    const made = make("div", undefined, { class: "legend" });
    legend(made, names);
    place.append(made);
  }
}

function largest(lines, most) {
  const sorted = Object.entries(lines).sort((a, b) => sum(b[1]) - sum(a[1]));
  return Object.fromEntries(sorted.slice(0, most));
}

// --- tables

function table(place, heads, rows, empty) {
  place.replaceChildren();
  if (!rows.length) { place.append(make("p", empty, { class: "hint" })); return; }
  const made = make("table");
  const head = make("tr");
  heads.forEach((text) => head.append(make("th", text)));
  made.append(head);
  for (const cells of rows) {
    const row = make("tr");
    for (const cell of cells) {
      if (cell instanceof Node) { const td = make("td"); td.append(cell); row.append(td); continue; }
      const isNumber = typeof cell === "object";
      row.append(make("td", isNumber ? cell.text : cell, isNumber ? { class: cell.kind || "number" } : {}));
    }
    made.append(row);
  }
  const scroll = make("div", undefined, { class: "scroll" });
  scroll.append(made);
  place.append(scroll);
  return made;
}

const number = (text) => ({ text });
const state = (isGood, text) => ({ text, kind: isGood ? "good" : "bad" });

// of the parts' colours, in their order
function bar(parts) {
  const total = sum(parts) || 1;
  const made = make("div", undefined, { class: "bar" });
  parts.forEach((part, i) => {
    const piece = make("div");
    piece.style.width = `${100 * part / total}%`;
    piece.style.background = COLOURS[i % COLOURS.length];
    made.append(piece);
  });
  return made;
}

function legend(place, names) {
  place.replaceChildren(...names.map((name, number) => {
    const item = make("span");
    const mark = make("i");
    mark.style.background = COLOURS[number % COLOURS.length];
    item.append(mark, document.createTextNode(name));
    return item;
  }));
}

function showHeld(held) {
  const names = [...held.ages_s.map((end) => "under " + duration(end)), "older"];
  legend(at("ages"), held.rows.length ? names : []);
  table(at("held"), ["tenant", "place", "bytes", "by age", "oldest"], held.rows.slice(0, 200).map((row) => [
    row.tenant || "(none)", row.place, number(bytes(sum(row.by_age))), bar(row.by_age),
    names[row.by_age.findLastIndex((part) => part > 0)] || "–"]), "nothing is held");
}

function showPrompts(prompts) {
  table(at("prompts"), ["prompt", "tenant", "tokens", "in memory", "hits", "tokens found", "computing saved", "pinned"],
    prompts.map((one) => [one.session ? "session " + one.session : one.prompt.slice(0, 16), one.tenant || "(none)",
      number(count(one.num_tokens)), number(`${bytes(one.held_bytes)} of ${bytes(one.nbytes)}`), number(count(one.hits)),
      number(count(one.hit_tokens)), number(one.saved_s === null ? "unknown" : duration(one.saved_s)),
      one.pinned ? "yes" : "no"]), "nothing was found yet");
}

const percent = (part) => (100 * part).toFixed(0) + " %";

function showShares(shares) {
  const rows = shares.shares.map((row) => [(row.tenant && by === "session" ? row.tenant + ": " : "") + (row.name || "(none)"), row]);
  if (shares.others) rows.push(["others", shares.others]);
  const busy = rows.filter(([, row]) => sum(row.asked) > 0);
  const ratios = (row) => row.asked.map((asked, i) => (asked ? Math.min(1, row.hit[i] / asked) : null));
  chart(at("shares"), shares.at_s, Object.fromEntries(busy.map(([name, row]) => [name, ratios(row)])), { most: 1, format: percent });
  table(at("callers"), [by === "client" ? "engine" : by, "tokens looked up", "found", "of its tokens"], busy.map(([name, row]) => [
    name, number(count(sum(row.asked))), number(count(sum(row.hit))), number(share(sum(row.hit), sum(row.asked)))]), "nothing yet");
}

function share(part, whole) {
  return whole ? (100 * part / whole).toFixed(0) + " %" : "–";
}

// what the state tells about a reason, in lines
function evidence(reason, status, namespaces) {
  const newest = [...namespaces.namespaces].sort((a, b) => b.at_s - a.at_s);
  const peers = (status.tiers || []).flatMap((tier) => (tier.followed_peers ? tier.followed_peers.peers : []));
  const holders = () => byBytes(namespaces.tenants).slice(0, 5).map(([tenant, used]) =>
    `${tenant ? "tenant " + tenant : "without a tenant"} holds ${bytes(used)}, ${share(used, status.used_bytes)} of the used memory`);
  if (reason === "evicted" || reason === "no_room" || reason === "declined") {
    return [`${bytes(status.used_bytes)} of ${bytes(status.arena_bytes)} are used`, ...holders()];
  }
  if (reason === "never_stored" || reason === "incomplete") {
    return newest.slice(0, 5).map((one) =>
      `${one.digest.slice(0, 16)} (${one.title}) is here since ${new Date(1000 * one.at_s).toLocaleString()}, and has ${bytes(one.bytes)}`)
      .concat("a change of the model, its settings or versions makes a new namespace, which begins empty: kvhold names A B shows the difference");
  }
  if (reason === "tier_down" || reason === "deadline" || reason === "bad_frame") {
    return (status.tiers || []).map((tier) =>
      `tier ${tier.name} is ${tier.available ? "in use" : "not used"}${tier.last_fault ? ": " + tier.last_fault : ""}`);
  }
  if (reason.startsWith("peer_")) return peers.map((peer) => `${peer.address} is ${peer.state}: ${peer.last_fault || "no fault"}`);
  if (reason === "expired") return ["the time to live is rules.ttl_s of the engine, or kvhold.ttl_s of the request"];
  return [];
}

const byBytes = (sizes) => Object.entries(sizes).sort((a, b) => b[1] - a[1]);

function showReasons(missed, meanings, status, namespaces) {
  const total = Object.values(missed).reduce((all, values) => all + sum(values), 0);
  const rows = Object.entries(missed).map(([reason, values]) => [reason, sum(values)])
    .filter(([, tokens]) => tokens > 0).sort((a, b) => b[1] - a[1])
    .map(([reason, tokens]) => {
      const row = meanings.find((one) => one.reason === reason) || { meaning: "", action: "" };
      return [reason, number(count(tokens)), number((100 * tokens / total).toFixed(1) + " %"), row.meaning, row.action];
    });
  const made = table(at("reasons"), ["reason", "tokens", "share", "meaning", "what to do"], rows, "no token was missed in this time");
  if (!made) return;
  [...made.rows].slice(1).forEach((row, i) => {
    const reason = rows[i][0];
    row.dataset.reason = reason;
    canBeOpened(row, () => {
      openedReason = openedReason === reason ? "" : reason;
      showReasons(missed, meanings, status, namespaces);
    });
    if (reason !== openedReason) return;
    const cell = make("td", undefined, { colspan: 5 });
    cell.append(...evidence(reason, status, namespaces).map((line) => make("div", line)));
    const shown = make("tr", undefined, { class: "evidence" });
    shown.append(cell);
    row.after(shown);
  });
}

function canBeOpened(row, open) {
  row.tabIndex = 0;
  row.addEventListener("click", open);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
}

function showTiers(status, history, latencies) {
  const used = byLabel(history, "kvhold_tier_available");
  const known = (name) => (used[name] || []).filter((value) => value !== null);
  const taken = (name, operation) => {
    const row = latencies.latencies.find((one) => one.tier === name && one.operation === operation);
    return number(row ? `${duration(row.median_s)} / ${duration(row.p99_s)}` : "–");
  };
  const lines = latencies.latencies.filter((row) => row.operation === call)
    .flatMap((row) => [[`${row.tier}, median`, row.medians_s], [`${row.tier}, p99`, row.p99s_s]]);
  chart(at("latencies"), latencies.at_s, Object.fromEntries(lines), { format: duration });
  table(at("tiers"), ["tier", "state", "available", "probe", "get", "put", "codec", "used", "its index", "waiting clears", "last fault"],
    (status.tiers || []).map((tier) => [
      tier.name, state(tier.available, tier.available ? "in use" : "not used"),
      number(share(sum(known(tier.name)), known(tier.name).length)),
      taken(tier.name, "probe"), taken(tier.name, "get"), taken(tier.name, "put"), tier.codec || "",
      number(bytes(tier.used_bytes)), number(bytes(tier.index_bytes)), number(String(tier.pending_clears)),
      tier.last_fault]), "only memory: no tiers are configured");
}

function showPeers(status) {
  const peers = (status.tiers || []).flatMap((tier) => (tier.followed_peers ? tier.followed_peers.peers : []));
  table(at("peers"), ["peer", "state", "chunks", "loaded", "median load", "last fault"],
    peers.map((peer) => [
      peer.address, state(peer.state === "following", peer.cause ? `${peer.state}: ${peer.cause}` : peer.state),
      number(count(peer.chunks)), number(bytes(peer.loaded_bytes)), number(duration(peer.median_load_s)),
      peer.last_fault]), "no peers are followed");
}

function showRequests(decisions, meanings) {
  const why = (one) => one.why || (meanings.find((row) => row.reason === one.reason) || { meaning: "" }).meaning;
  const made = table(at("requests"), ["request", "time", "tokens", "found", "engine", "what became of it"],
    decisions.slice(0, 100).map((one) => [
      one.request || "–", number(new Date(1000 * one.at_s).toTimeString().slice(0, 8)), number(String(one.num_tokens)),
      number(one.hit_tokens === null ? "waits" : String(one.hit_tokens)), one.client, why(one)]),
    "none yet");
  if (!made) return;
  [...made.rows].slice(1).forEach((row, i) => {
    const decision = decisions[i];
    const id = decision.request + decision.at_s;
    canBeOpened(row, () => { opened = opened === id ? "" : id; showRequests(decisions, meanings); });
    if (id === opened) row.after(story(decision));
  });
}

// where its tokens were, and a waterfall of its times
function story(decision) {
  const row = make("tr", undefined, { class: "story" });
  const cell = make("td", undefined, { colspan: 6 });
  const found = Object.entries(decision.found);
  const rest = Math.max(0, decision.num_tokens - sum(found.map(([, tokens]) => tokens)));
  const names = make("div", undefined, { class: "legend" });
  legend(names, [...found, ["not found", rest]].map(([place, tokens]) => `${count(tokens)} tokens ${place === "not found" ? place : "found in " + place}`));
  cell.append(bar([...found.map(([, tokens]) => tokens), rest]), names);
  const load = decision.load_s || 0;
  const steps = [["waited", 0, decision.waited_s],
    ...decision.loaded.map((one) => ["from " + one.place, Math.max(0, decision.waited_s - one.seconds), one.seconds]),
    ["loaded", decision.waited_s, decision.load_s], ["computed", decision.waited_s + load, decision.compute_s]];
  cell.append(waterfall(steps));
  if (decision.missing) cell.append(make("div", `missing: ${decision.missing}`));
  if (decision.blend) cell.append(...blended(decision.blend).map((line) => make("div", line)));
  const facts = [["tenant", decision.tenant], ["session", decision.session], ["namespace", decision.namespace.slice(0, 16)],
    ["in the engine before", decision.computed_tokens ? count(decision.computed_tokens) + " tokens" : ""]];
  cell.append(make("div", facts.filter(([, text]) => text).map(([name, text]) => `${name}: ${text}`).join(", "), { class: "hint" }));
  for (const [name, one] of Object.entries(decision.alternatives)) {
    cell.append(make("div", `${name}: ${one.num_tokens} tokens, ${duration(one.wait_s + one.load_s + one.compute_s)}`, { class: "hint" }));
  }
  row.append(cell);
  return row;
}

function blended(blend) {
  const spans = blend.spans.map((span) => {
    const places = Object.entries(span.sources).map(([place, tokens]) => `${tokens} in ${place}`);
    const peers = span.loaded.map((one) => `from ${one.place}, ${duration(one.seconds)}`);
    const rest = [span.missing ? `missing: ${span.missing}` : "", span.is_alone ? "computed alone" : ""];
    return `span ${span.start}-${span.end}: ${[...places, ...peers, ...rest].filter(Boolean).join(", ")}`;
  });
  return [`${blend.result}${blend.note ? ": " + blend.note : ""}`,
    `${blend.exact_tokens} exact, ${blend.reused_tokens} reused, ${blend.recomputed_tokens} recomputed`, ...spans];
}

// steps: name, begin and length in seconds; null: not measured
function waterfall(steps) {
  const made = make("div", undefined, { class: "fall" });
  const total = Math.max(...steps.map(([, begin, length]) => begin + (length || 0))) || 1;
  steps.forEach(([name, begin, length], i) => {
    const track = make("div", undefined, { class: "track" });
    const piece = make("div");
    piece.style.marginLeft = `${100 * begin / total}%`;
    piece.style.width = `max(2px, ${100 * (length || 0) / total}%)`;
    piece.style.background = COLOURS[i % COLOURS.length];
    if (length !== null) track.append(piece);
    made.append(make("span", name), track, make("span", length === null ? "not measured" : duration(length)));
  });
  return made;
}

function showNumbers(status, ratio) {
  const values = [
    [ratio === null ? "–" : (100 * ratio).toFixed(1) + " %", "of tokens found"],
    [`${bytes(status.used_bytes)} of ${bytes(status.arena_bytes)}`, "memory used"],
    [count(status.chunks), "chunks"],
    [count(status.pinned_chunks), "pinned"],
    [String(status.clients.length), "clients"],
    [bytes(status.write_behind.bytes), "on their way to tiers"],
  ];
  at("numbers").replaceChildren(...values.map(([value, text]) => {
    const made = make("div");
    made.append(make("b", value), make("span", text));
    return made;
  }));
}

// --- all of it

// null: not for a tenant's token
async function askForAll(path) {
  if (isTenant) return null;
  try {
    return await ask(path);
  } catch (error) {
    if (error.reason !== "tenant") throw error;
    isTenant = true;
    return null;
  }
}

function showAll(status, history, latencies, clients, reasons, namespaces) {
  at("node").textContent = `node ${status.pid}, kvhold ${status.version}, up ${duration(status.uptime_s)}`;
  const hits = byLabel(history, "kvhold_hit_tokens");
  const missed = byLabel(history, "kvhold_missed_tokens");
  const looked = byLabel(history, "kvhold_lookup_tokens")[""] || [];
  const found = history.at_s.map((_, i) => sum(Object.values(hits).map((values) => values[i])));
  const ratios = history.at_s.map((_, i) => (looked[i] ? Math.min(1, found[i] / looked[i]) : null));
  chart(at("ratio"), history.at_s, looked.length ? { "": ratios } : {}, { most: 1, format: percent });
  chart(at("sources"), history.at_s, largest(hits, 12), { stacked: true });
  chart(at("missed"), history.at_s, largest(missed, 12), { stacked: true });
  const used = byLabel(history, "kvhold_arena_used_bytes")[""];
  chart(at("memory"), history.at_s, used ? { "": used } : {}, { most: status.arena_bytes, format: bytes });
  showNumbers(status, sum(looked) ? Math.min(1, sum(found) / sum(looked)) : null);
  showReasons(missed, reasons.reasons, status, namespaces);
  showTiers(status, history, latencies);
  showPeers(status);
  table(at("clients"), ["id", "name", "process", "heard", "hits", "leases", "writes", "memory", "state"],
    clients.clients.slice(0, 300).map((one) => [
      one.id, one.name, number(String(one.pid)), number(duration(one.silent_s)), number(String(one.hits)),
      number(String(one.leases)), number(String(one.reservations)), number(bytes(one.nbytes)),
      state(one.alive && !one.ended, one.alive ? (one.ended ? "ended" : "alive") : "dead")]), "none");
}

async function show() {
  shows += 1;
  const turn = shows;
  try {
    const askedHeld = Date.now() - heldAt > HELD_EVERY_MS;
    const find = encodeURIComponent(at("find").value);
    const [status, history, latencies, clients, shares, held, prompts, reasons, namespaces, pins, decisions] = await Promise.all([
      askForAll("v1/status"), askForAll(`v1/history?since_s=${since}&metrics=${METRICS.join(",")}`), askForAll(`v1/latencies?since_s=${since}`), askForAll("v1/clients"),
      ask(`v1/shares?by=${by}&since_s=${since}`), askedHeld && ask("v1/held"), ask("v1/prompts"), ask("v1/reasons"),
      ask("v1/namespaces"), ask("v1/pins"), ask(`v1/decisions?request=${find}`)]);
    if (turn !== shows) return; // a later one has begun
    at("problem").hidden = at("login").hidden = true;
    document.querySelectorAll("[data-all]").forEach((one) => { one.hidden = !status; });
    if (status) showAll(status, history, latencies, clients, reasons, namespaces);
    else at("node").textContent = "the tenant of the token";
    showShares(shares);
    showPrompts(prompts.prompts);
    if (askedHeld) { heldAt = Date.now(); showHeld(held); }
    table(at("tenants"), ["tenant", "memory", "of the used memory"], byBytes(namespaces.tenants).slice(0, 100).map(([tenant, used]) => [
      tenant || "(none)", number(bytes(used)), number(status ? share(used, status.used_bytes) : "–")]), "nothing is in memory");
    table(at("namespaces"), ["namespace", "model", "engine", "memory", "since"],
      namespaces.namespaces.sort((a, b) => b.bytes - a.bytes).slice(0, 100).map((one) => [
        one.digest.slice(0, 16), one.title, one.client, number(bytes(one.bytes)),
        new Date(1000 * one.at_s).toLocaleString()]), "no engine has registered one");
    table(at("pins"), ["number", "owner", "tokens", "memory", "left"],
      pins.pins.map((pin) => [number(String(pin.number)), pin.owner, number(String(pin.num_tokens)),
        number(bytes(pin.bytes)), number(duration(pin.left_s))]), "nothing is pinned");
    showRequests(decisions.decisions, reasons.reasons);
  } catch (error) {
    if (turn !== shows) return;
    at("problem").textContent = error.message;
    at("problem").hidden = false;
    at("login").hidden = error.reason !== "no_token";
  }
}

function onChoice(name, choose) {
  const buttons = document.querySelectorAll(`button[data-${name}]`);
  buttons.forEach((button) => button.addEventListener("click", () => {
    choose(button.dataset[name]);
    buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    show();
  }));
}

onChoice("since", (chosen) => { since = Number(chosen); });
onChoice("by", (chosen) => { by = chosen; });
onChoice("call", (chosen) => { call = chosen; });
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  isTenant = false;
  show();
});
at("find").addEventListener("input", show);
show();
setInterval(show, EVERY_MS);
