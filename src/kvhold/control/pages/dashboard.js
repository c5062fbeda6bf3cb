"use strict";
// Shows what the API says. Every text is set as text, never as markup.

const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899",
  "#84cc16", "#6366f1", "#f97316", "#14b8a6", "#a855f7"];
const METRICS = ["kvhold_hit_tokens", "kvhold_missed_tokens", "kvhold_lookup_tokens",
  "kvhold_arena_used_bytes", "kvhold_arena_bytes"];
const EVERY_MS = 10000;
const SVG = "http://www.w3.org/2000/svg";
let since = 21600;
let opened = "";
let openedReason = "";

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
    const legend = make("div", undefined, { class: "legend" });
    names.forEach((name, number) => {
      const item = make("span");
      const mark = make("i");
      mark.style.background = COLOURS[number % COLOURS.length];
      item.append(mark, document.createTextNode(name));
      legend.append(item);
    });
    place.append(legend);
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

function showTiers(status) {
  table(at("tiers"), ["tier", "state", "codec", "used", "its index", "waiting clears", "last fault"],
    (status.tiers || []).map((tier) => [
      tier.name, state(tier.available, tier.available ? "in use" : "not used"), tier.codec || "",
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

function showRequests(decisions) {
  const made = table(at("requests"), ["request", "time", "tokens", "found", "decision"],
    decisions.slice(0, 100).map((one) => [
      one.request, number(new Date(1000 * one.at_s).toTimeString().slice(0, 8)), number(String(one.num_tokens)),
      number(one.hit_tokens === null ? "waits" : String(one.hit_tokens)), one.why]),
    "none: engines plan with rules.plan = true");
  if (!made) return;
  [...made.rows].slice(1).forEach((row, i) => {
    const decision = decisions[i];
    const id = decision.request + decision.at_s;
    canBeOpened(row, () => { opened = opened === id ? "" : id; showRequests(decisions); });
    if (id === opened) row.after(detail(decision));
  });
}

function detail(decision) {
  const row = make("tr");
  const cell = make("td", undefined, { colspan: 5 });
  const parts = [["waited", decision.waited_s], ["loaded", decision.load_s || 0], ["computed", decision.compute_s || 0]];
  const total = parts.reduce((all, [, seconds]) => all + seconds, 0) || 1;
  const bar = make("div", undefined, { class: "bar" });
  parts.forEach(([, seconds], i) => {
    const piece = make("div");
    piece.style.width = `${100 * seconds / total}%`;
    piece.style.background = COLOURS[i];
    bar.append(piece);
  });
  const found = Object.entries(decision.found).map(([place, tokens]) => `${tokens} in ${place}`).join(", ") || "none";
  cell.append(bar, make("div", parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ")),
    make("div", `found: ${found}`));
  if (decision.missing) cell.append(make("div", `missing: ${decision.missing}`));
  for (const [name, one] of Object.entries(decision.alternatives)) {
    cell.append(make("div", `${name}: ${one.num_tokens} tokens, ${duration(one.wait_s + one.load_s + one.compute_s)}`, { class: "hint" }));
  }
  row.append(cell);
  return row;
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

async function show() {
  try {
    const find = encodeURIComponent(at("find").value);
    const [status, history, reasons, namespaces, clients, pins, decisions] = await Promise.all([
      ask("v1/status"), ask(`v1/history?since_s=${since}&metrics=${METRICS.join(",")}`), ask("v1/reasons"),
      ask("v1/namespaces"), ask("v1/clients"), ask("v1/pins"), ask(`v1/decisions?request=${find}`)]);
    at("problem").hidden = at("login").hidden = true;
    at("node").textContent = `node ${status.pid}, kvhold ${status.version}, up ${duration(status.uptime_s)}`;
    const hits = byLabel(history, "kvhold_hit_tokens");
    const missed = byLabel(history, "kvhold_missed_tokens");
    const looked = byLabel(history, "kvhold_lookup_tokens")[""] || [];
    const found = history.at_s.map((_, i) => sum(Object.values(hits).map((values) => values[i])));
    const ratios = history.at_s.map((_, i) => (looked[i] ? Math.min(1, found[i] / looked[i]) : null));
    chart(at("ratio"), history.at_s, looked.length ? { "": ratios } : {}, { most: 1, format: (part) => (100 * part).toFixed(0) + " %" });
    chart(at("sources"), history.at_s, largest(hits, 12), { stacked: true });
    chart(at("missed"), history.at_s, largest(missed, 12), { stacked: true });
    const used = byLabel(history, "kvhold_arena_used_bytes")[""];
    chart(at("memory"), history.at_s, used ? { "": used } : {}, { most: status.arena_bytes, format: bytes });
    showNumbers(status, sum(looked) ? Math.min(1, sum(found) / sum(looked)) : null);
    showReasons(missed, reasons.reasons, status, namespaces);
    showTiers(status);
    showPeers(status);
    table(at("tenants"), ["tenant", "memory", "of the used memory"], byBytes(namespaces.tenants).slice(0, 100).map(([tenant, used]) => [
      tenant || "(none)", number(bytes(used)), number(share(used, status.used_bytes))]), "nothing is in memory");
    table(at("namespaces"), ["namespace", "model", "engine", "memory", "since"],
      namespaces.namespaces.sort((a, b) => b.bytes - a.bytes).slice(0, 100).map((one) => [
        one.digest.slice(0, 16), one.title, one.client, number(bytes(one.bytes)),
        new Date(1000 * one.at_s).toLocaleString()]), "no engine has registered one");
    table(at("clients"), ["id", "name", "process", "heard", "hits", "leases", "writes", "memory", "state"],
      clients.clients.slice(0, 300).map((one) => [
        one.id, one.name, number(String(one.pid)), number(duration(one.silent_s)), number(String(one.hits)),
        number(String(one.leases)), number(String(one.reservations)), number(bytes(one.nbytes)),
        state(one.alive && !one.ended, one.alive ? (one.ended ? "ended" : "alive") : "dead")]), "none");
    table(at("pins"), ["number", "owner", "tokens", "memory", "left"],
      pins.pins.map((pin) => [number(String(pin.number)), pin.owner, number(String(pin.num_tokens)),
        number(bytes(pin.bytes)), number(duration(pin.left_s))]), "nothing is pinned");
    showRequests(decisions.decisions);
  } catch (error) {
    at("problem").textContent = error.message;
    at("problem").hidden = false;
    at("login").hidden = error.reason !== "no_token";
  }
}

document.querySelectorAll("button[data-since]").forEach((button) => {
  button.addEventListener("click", () => {
    since = Number(button.dataset.since);
    document.querySelectorAll("button[data-since]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    show();
  });
});
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  show();
});
at("find").addEventListener("input", show);
show();
setInterval(show, EVERY_MS);
