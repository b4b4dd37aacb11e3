"use strict";
// Polls the service's figures once a second and shows them. A request ID is anybody's text: it is
// only ever set as text. Rows are kept by key, so that a click or the focus is never lost.

const POLL_MS = 1000;
const { html, milliseconds, depthCells } = Timeline;
const find = (id) => document.getElementById(id);
let token = sessionStorage.getItem("rlt-token") ?? "";
let chosen = null; // the number of a request; null follows the latest
let shown = null; // what the timeline shows, so that an ended request is drawn once
let before = null; // the last figures, for rates

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
  if (answer.status === 401) throw new NeedsToken();
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`the service answers ${answer.status}`);
  return answer.json();
}

class NeedsToken extends Error {}

function say(text, kind) {
  find("state").textContent = text;
  find("state").className = `state ${kind}`;
}

function sync(body, items, key, fill) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = items.map((item) => {
    const name = String(key(item));
    const row = old.get(name) ?? html("tr");
    row.dataset.key = name;
    fill(row, item);
    return row;
  });
  if (rows.length !== body.children.length || rows.some((row, at) => body.children[at] !== row)) {
    body.replaceChildren(...rows);
  }
}

function cells(row, contents, numbers) {
  contents.forEach((content, at) => {
    const cell = row.children[at] ?? row.appendChild(html("td"));
    cell.className = numbers.includes(at) ? "number" : "";
    if (content instanceof Node) cell.replaceChildren(content);
    else if (cell.textContent !== String(content)) cell.textContent = String(content);
  });
}

function requestCell(row, number, id) {
  const known = row.querySelector("button.link");
  if (known) return known.parentNode.firstChild;
  const button = html("button", "link", id || `(no ID, number ${number})`);
  button.type = "button";
  button.title = id;
  button.addEventListener("click", () => { chosen = number; shown = null; poll(); });
  return button;
}

function meter(parts, total, text) {
  const line = html("i");
  for (const [className, value] of parts) {
    const piece = html("b", className);
    piece.style.width = `${total > 0 ? (100 * Math.max(0, value)) / total : 0}%`;
    line.append(piece);
  }
  return html("div", "meter", line, text);
}

function showWorkers(figures) {
  const place = (worker) => `${worker.role === "prefill" ? 0 : 1} ${worker.name}`;
  const workers = figures.workers.toSorted((one, other) => place(one) < place(other) ? -1 : 1);
  sync(find("workers"), workers, (worker) => `${worker.name} ${worker.pid}`, (row, worker) => {
    const of = (name) => worker.values[name] ?? 0;
    const lost = of("blocks_quarantined"), cached = of("blocks_cached");
    const told = "blocks_free" in worker.values;
    const used = told ? worker.num_blocks - of("blocks_free") - lost : 0;
    const blocks = meter([["", used], ["cached", cached], ["lost", lost]], worker.num_blocks,
      `${used} of ${worker.num_blocks}` + (cached ? `, ${cached} cached` : "") + (lost ? `, ${lost} quarantined` : ""));
    const busy = (total, free) => told ? total - of(free) : 0;
    const slots = busy(worker.num_slots, "slots_free");
    const receiving = busy(worker.num_receive_slots, "receive_slots_free");
    const peers = figures.pairs.filter((pair) => pair.includes(worker.name))
      .map((pair) => pair.find((name) => name !== worker.name)).sort();
    row.dataset.worker = worker.name;
    cells(row, [
      worker.name, worker.draining ? html("span", "", `${worker.role} `, badge("draining")) : worker.role,
      worker.pid, blocks,
      meter([["", slots]], worker.num_slots, `${slots} of ${worker.num_slots}`),
      worker.num_receive_slots ? meter([["", receiving]], worker.num_receive_slots, `${receiving} of ${worker.num_receive_slots}`) : "",
      worker.live, peers.join(", ") || "nobody",
      worker.reachable ? `${worker.heard_ago_s.toFixed(1)} s ago` : "cut off",
    ], [6, 8]);
  });
}

function badge(text) {
  return html("span", `badge ${/^[a-z]+$/.test(text) ? text : ""}`, text);
}

function showLive(figures) {
  find("live-none").hidden = figures.requests.length > 0;
  const more = figures.num_requests - figures.requests.length;
  find("live-note").textContent = more > 0 ? `the ${figures.requests.length} oldest; ${more} more` : "";
  sync(find("live"), figures.requests, (request) => request.number, (row, request) => {
    row.dataset.request = request.request_id;
    row.classList.toggle("chosen", chosen === request.number);
    cells(row, [
      requestCell(row, request.number, request.request_id),
      request.attempts > 1 ? html("span", "", badge(request.stage), ` attempt ${request.attempts}`) : badge(request.stage),
      request.prefill, request.decode, request.prompt_tokens,
      meter([["", request.outputs]], request.max_tokens, `${request.outputs} of ${request.max_tokens}`),
      depthCells(request.exit_depths.slice(-12), figures.num_loops),
      request.mean_depth === null ? "" : request.mean_depth.toFixed(2), `${request.age_s.toFixed(1)} s`,
    ], [4, 7, 8]);
  });
}

function showEnded(figures) {
  find("ended-none").hidden = figures.ended.length > 0;
  sync(find("ended"), figures.ended, (request) => request.number, (row, request) => {
    row.dataset.request = request.request_id;
    row.classList.toggle("chosen", shown === request.number);
    const outcome = badge(request.outcome);
    if (request.code) outcome.append(`: ${request.code}`);
    cells(row, [
      requestCell(row, request.number, request.request_id), outcome, request.prompt_tokens,
      request.outputs, request.mean_depth === null ? "" : request.mean_depth.toFixed(2),
      request.first_token_s === null ? "" : milliseconds(request.first_token_s), milliseconds(request.seconds),
    ], [2, 3, 4, 5, 6]);
  });
}

function tile(name, value, bad) {
  return html("div", bad ? "bad" : "", html("dt", "", name), html("dd", "", value));
}

function showTiles(figures) {
  const of = (name) => figures.counters[name] ?? 0;
  const sum = (start) => Object.entries(figures.counters)
    .filter(([name]) => name.startsWith(start)).reduce((total, [, value]) => total + value, 0);
  const at = performance.now();
  const seconds = before ? (at - before.at) / 1000 : 0;
  const rate = seconds > 0 ? Math.max(0, (of("output_tokens") - before.tokens) / seconds) : 0;
  before = { at, tokens: of("output_tokens") };
  const failed = sum("failed.");
  find("tiles").replaceChildren(
    tile("queued", of("queue_length")), tile("live", of("live_requests")),
    tile("ready pairs", of("ready_pairs"), of("ready_pairs") === 0),
    tile("tokens/s", rate.toFixed(rate < 10 ? 1 : 0)),
    tile("tokens", of("output_tokens")), tile("ended well", of("ended.stop") + of("ended.length")),
    tile("cancelled", of("ended.cancelled")), tile("failed", failed, failed > 0),
    tile("refused", sum("rejected."), false), tile("retried", of("retries")),
    tile("replayed", of("replays")), tile("expelled", of("expelled")),
    tile("late", of("late_messages")),
  );
}

async function showTimeline(figures) {
  const latest = figures.ended.find((request) => request.outputs > 0) ?? figures.ended[0];
  const number = chosen ?? latest?.number;
  find("follow").hidden = chosen === null;
  if (number === undefined || number === shown) return;
  const story = await ask(`/status/requests/${number}`);
  if (story === null) {
    chosen = null;
    return;
  }
  find("chosen").textContent = story.request_id;
  Timeline.draw(find("timeline"), story, figures.num_loops);
  // The workers' last stamps come just after the end: draw once more, then leave it.
  const ended = figures.ended.some((request) => request.number === number);
  const whole = story.stamps.some(([event]) => event === "released");
  if (ended && whole) shown = number;
}

async function show() {
  const figures = await ask("/status.json");
  find("token-form").hidden = true;
  find("figures").hidden = false;
  find("model").textContent = figures.model ? `${figures.model}, ${figures.num_loops} loops` : "no worker yet";
  const ready = figures.counters.ready_pairs > 0;
  say(ready ? "ready" : "no pair can serve", ready ? "good" : "bad");
  showTiles(figures);
  showWorkers(figures);
  showLive(figures);
  await showTimeline(figures);
  showEnded(figures);
}

let timer = null;
let running = false;

async function poll() {
  if (running) return;
  running = true;
  clearTimeout(timer);
  try {
    if (!document.hidden) await show();
  } catch (error) {
    if (error instanceof NeedsToken) {
      say("token needed", "");
      find("figures").hidden = true;
      find("token-form").hidden = false;
    } else {
      say("no answer from the service", "bad");
      console.error(error);
    }
  } finally {
    running = false;
    timer = setTimeout(poll, POLL_MS);
  }
}

find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  sessionStorage.setItem("rlt-token", token);
  poll();
});
find("follow").addEventListener("click", () => { chosen = null; shown = null; poll(); });
document.addEventListener("visibilitychange", poll);
window.addEventListener("resize", () => { shown = null; });
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  token = given;
  sessionStorage.setItem("rlt-token", token);
  history.replaceState(null, "", location.pathname); // it does not stay in the address
  poll();
}
window.addEventListener("hashchange", takeToken);
takeToken();
poll();
