// The live page: it shows what the server looked at, and computes nothing but how it is drawn.
const $ = id => document.getElementById(id);
const SHOWN_POINTS = 1800, SPARK_POINTS = 60;

function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= limit) return (value / (unit === "k" ? 1e3 : limit)).toPrecision(3) + unit;
  return Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}
const bytes = value => value === null || value === undefined ? "–" : count(value) + "B";
const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(100 * value < 10 ? 1 : 0) + " %";
const clock = seconds => new Date(1e3 * seconds).toLocaleTimeString();

function element(name, text, more = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;  // never markup: names come from a user's files
  return Object.assign(made, more);
}
function cells(row, values) {
  while (row.cells.length > values.length) row.deleteCell(-1);
  values.forEach((value, at) => {
    const cell = row.cells[at] ?? row.insertCell();
    if (cell.textContent !== value) cell.textContent = value;
  });
}

// Lines. uPlot draws from columns: the time, and one or two series.
const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const columns = { at: [], step: [], steps_per_s: [], tokens_per_s: [], waited: [], views_bytes: [], read_bytes: [] };
const plots = [];
function plot(id, series, scale = value => value) {
  const axis = { stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") }, font: "12px system-ui" };
  const colours = [ink("--blue"), ink("--red")];
  const data = () => [columns.at, ...series.map(([name]) => columns[name].map(value => value === null ? null : scale(value)))];
  const made = new uPlot({
    width: $(id).clientWidth, height: 180, legend: { show: series.length > 1, live: false }, cursor: { drag: { x: true, y: false } },
    scales: { y: { range: (u, low, high) => [0, high > 0 ? 1.1 * high : 1] } },
    axes: [axis, { ...axis, size: 56, values: (u, ticks) => ticks.map(count) }],
    series: [{}, ...series.map(([, label], at) => ({ label, stroke: colours[at], width: 1.8, points: { show: false } }))],
  }, data(), $(id));
  plots.push({ id, made, data });
}
function openPlots() {
  for (const { id, made } of plots.splice(0)) { made.destroy(); $(id).replaceChildren(); }
  plot("plot-steps", [["steps_per_s", "steps/s"]]);
  plot("plot-waited", [["waited", "waiting"]]);
  plot("plot-tokens", [["tokens_per_s", "tokens/s"]]);
  plot("plot-bytes", [["views_bytes", "batches"], ["read_bytes", "rows read"]], value => value / 1e6);
}
let drawing = false;
function draw() {
  if (drawing || document.hidden) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; for (const one of plots) one.made.setData(one.data()); });
}
new ResizeObserver(() => { for (const { id, made } of plots) made.setSize({ width: $(id).clientWidth, height: 180 }); }).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { openPlots(); drawHeat(); });

// Sources: a table that keeps its rows; 306 of them are updated in place.
const HEADS = [["name", "source"], ["format", "format"], ["planned_share", "planned"], ["realised_share", "realised"],
  ["tokens_per_s", "tokens/s"], ["", ""], ["waited_share", "waited for"], ["samples", "samples"], ["epoch", "epoch"], ["workers", "workers"],
  ["buffer_bytes", "buffer"], ["bad", "bad"], ["skipped", "skipped"], ["state", "state"]];
let sources = [], sortBy = "planned_share", downwards = true, chosen = null;
const rowOf = new Map(), sparks = new Map();
for (const [key, title] of HEADS) {
  const head = element("th"), button = element("button", title);
  head.scope = "col";
  button.onclick = () => { downwards = sortBy === key ? !downwards : key !== "name"; sortBy = key; showSources(); };
  if (key) head.append(button);
  $("source-heads").append(head);
}
$("find").oninput = () => showSources();
const stateOf = one => one.removed ? "removed" : one.parked ? `parked since step ${one.parked.since}` : one.finished ? "ended" : "";
function showSources() {
  const part = $("find").value.toLowerCase();
  const shown = sources.filter(one => one.name.toLowerCase().includes(part));
  const value = one => sortBy === "state" ? stateOf(one) : one[sortBy] ?? -1;
  shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (downwards ? -1 : 1));
  const body = $("source-rows");
  shown.forEach((one, at) => {
    let row = rowOf.get(one.name);
    if (!row) {
      row = element("tr", undefined, { tabIndex: 0 });
      row.onclick = () => { chosen = chosen === one.name ? null : one.name; showDetail(); };
      row.onkeydown = event => { if (event.key === "Enter") row.onclick(); };
      rowOf.set(one.name, row);
    }
    const texts = [one.name, one.format, percent(one.planned_share), percent(one.realised_share), count(one.tokens_per_s), null,
      percent(one.waited_share), count(one.samples), count(one.epoch), count(one.workers), bytes(one.buffer_bytes), count(one.bad), count(one.skipped), stateOf(one)];
    texts.forEach((text, column) => {
      const cell = row.cells[column] ?? row.insertCell();
      if (text === null) { if (!cell.firstChild) cell.append(element("canvas", undefined, { width: 160, height: 36 })); return; }
      if (cell.textContent !== text) cell.textContent = text;
      cell.className = column < 2 ? "left" : column === 11 && one.bad ? "fault" : "";
    });
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
  });
  while (body.rows.length > shown.length) body.rows[body.rows.length - 1].remove();
  $("source-count").textContent = `${shown.length} of ${sources.length}`;
  drawSparks();
  showDetail();
}
function drawSparks() {
  const frame = $("source-rows").parentElement.parentElement.getBoundingClientRect();
  for (const [name, row] of rowOf) {
    const at = row.isConnected && row.getBoundingClientRect();
    if (!at || at.bottom < frame.top || at.top > frame.bottom) continue;  // only what can be seen
    const values = sparks.get(name) ?? [], pen = row.cells[5].firstChild.getContext("2d"), most = Math.max(...values, 1);
    pen.clearRect(0, 0, 160, 36);
    pen.strokeStyle = ink("--blue"); pen.lineWidth = 2; pen.beginPath();
    values.forEach((value, x) => pen[x ? "lineTo" : "moveTo"](160 * x / (SPARK_POINTS - 1), 34 - 32 * value / most));
    pen.stroke();
  }
}
function showDetail() {
  const one = sources.find(source => source.name === chosen), box = $("source-detail");
  box.hidden = !one;
  if (!one) return;
  const facts = [["samples", count(one.samples)], ["tokens", count(one.tokens)], ["waited for it", `${one.waited_s} s`],
    ["busy", `${one.busy_s} s, of it ${one.cpu_s} s of a processor`], ["wrong length", count(one.wrong_length)], ["decoded", one.decoded_in]];
  box.replaceChildren(element("h3", one.name), element("p", facts.map(([name, value]) => `${name}: ${value}`).join(" · ")),
    element("p", one.bad_ids.length ? `last bad samples: ${one.bad_ids.map(id => typeof id === "string" ? id : JSON.stringify(id)).join(", ")}` : "no bad samples"));
}

// Balance: one byte for each bucket and microbatch, drawn as pixels and scaled by the browser.
let balance = null;
function drawHeat() {
  const canvas = $("heat");
  if (!balance) return;
  const { buckets, microbatches, loads } = balance;
  canvas.width = microbatches; canvas.height = buckets;
  const pen = canvas.getContext("2d"), picture = pen.createImageData(microbatches, buckets);
  const blue = [0, 114, 178], orange = [213, 94, 0];
  for (let at = 0; at < buckets * microbatches; at++) {
    const load = parseInt(loads.substr(2 * at, 2), 16), apart = (load - 128) / 128;
    // Half of the mean more or less has the full colour; an empty microbatch has none.
    picture.data.set([...(apart > 0 ? orange : blue), load === 0 ? 0 : 30 + 225 * Math.min(1, 2 * Math.abs(apart))], 4 * at);
  }
  pen.putImageData(picture, 0, 0);
}
async function lookAtBalance() {
  const place = $("balance").getBoundingClientRect();
  if (document.hidden || place.bottom < 0 || place.top > innerHeight) return;
  const found = await get("balance");
  if (found.error) { $("balance-words").textContent = found.error; return; }
  balance = found;
  const sizes = found.cp_sizes ? `; sequences are shared by ${found.cp_sizes.join(", ")} ranks` : "";
  const ratio = found.max_over_mean === null ? "" : `; the fullest bucket has ${found.max_over_mean.toFixed(3)} of the mean`;
  $("balance-words").textContent = `Step ${found.step}, mesh ${found.mesh}: ${count(found.buckets)} ${found.axis} buckets, ` +
    `${found.microbatches} microbatches, ${count(found.mean)} tokens in one on average, ${count(found.most)} at most${ratio}${sizes}.`;
  drawHeat();
}
$("heat").onclick = event => {
  if (!balance) return;
  const frame = $("heat").getBoundingClientRect();
  $("ask-step").value = balance.step;
  $("ask-bucket").value = Math.min(balance.buckets - 1, Math.floor(balance.buckets * (event.clientY - frame.top) / frame.height));
  ask();
  $("samples").scrollIntoView();
};

// Samples of one bucket of a step.
async function get(path) {
  try { return await (await fetch(path)).json(); } catch (error) { return { error: `The page's server does not answer (${error.message}).` }; }
}
async function ask(event) {
  event?.preventDefault();
  const step = $("ask-step").value, found = await get(`samples?bucket=${$("ask-bucket").value || 0}${step === "" ? "" : `&step=${step}`}`);
  $("sample-words").textContent = found.error ?? `Step ${found.step}, bucket ${found.bucket} (ranks ${found.ranks.join(", ")}): ${found.samples.length} pieces.`;
  const body = $("sample-rows");
  body.replaceChildren(...(found.samples ?? []).map(one => {
    const row = element("tr");
    cells(row, [one.id, String(one.microbatch), one.source, String(one.epoch), String(one.from), count(one.tokens)]);
    row.cells[2].className = "left";
    return row;
  }));
}
$("ask").onsubmit = ask;

// What was looked at.
function show(seen) {
  $("about").textContent = `${seen.address} · overlord ${seen.version} · looked at ${clock(seen.at)}`;
  $("live").textContent = seen.lost ? "the service does not answer" : "live";
  $("live").className = seen.lost ? "lost" : "";
  if (seen.at > (columns.at.at(-1) ?? 0)) Object.keys(columns).forEach((name, at) => { columns[name].push(seen.point[at]); if (columns[name].length > SHOWN_POINTS) columns[name].shift(); });
  draw();
  if (seen.lost) { $("sentence").textContent = seen.lost; $("sentence").className = "failing"; return; }
  $("sentence").textContent = seen.sentence;
  $("sentence").className = seen.mood;
  document.title = `${seen.rates.step ?? "–"} · overlord`;
  const then = seen.next_mesh ? `, from step ${seen.next_mesh.step} on ${seen.next_mesh.mesh}` : "";
  $("facts").replaceChildren(...[`${seen.runtime} service`, `mesh ${seen.mesh}${then}`, `${seen.clients.count} ranks attached`,
    `store ${seen.store?.place ?? "none"}`].map(text => element("li", text)));
  const { rates, clients } = seen;
  const behind = clients.last === null || clients.first === clients.last ? "all ranks" : `the last rank is at ${clients.first}`;
  const tiles = [["step", count(rates.step), behind], ["steps/s", count(rates.steps_per_s), "over ten looks"],
    ["tokens/s", count(rates.tokens_per_s), "drawn"], ["waiting", percent(rates.waited), "of the time"],
    ["planned ahead", count(seen.next_step - 1 - (rates.step ?? -1)), "steps"], ["restarts", count(seen.restarts), "of the service"]];
  const frame = $("tiles");
  while (frame.children.length < tiles.length) { const box = element("div"); box.append(element("dt"), element("dd"), element("dd")); frame.append(box); }
  tiles.forEach((texts, at) => texts.forEach((text, part) => { frame.children[at].children[part].textContent = text; }));
  sources = seen.sources;
  for (const one of sources) {
    const values = sparks.get(one.name) ?? [];
    values.push(one.tokens_per_s ?? 0);
    if (values.length > SPARK_POINTS) values.shift();
    sparks.set(one.name, values);
  }
  if (!document.hidden) showSources();
  const rows = $("host-rows");
  while (rows.rows.length > seen.hosts.length) rows.deleteRow(-1);
  seen.hosts.forEach((one, at) => {
    const row = rows.rows[at] ?? rows.insertRow();
    cells(row, [one.role, one.host ?? "", String(one.pid), one.up ? "yes" : "no", String(one.generation), String(one.restarts)]);
    row.cells[1].className = "left"; row.cells[3].className = one.up ? "" : "fault";
  });
  const words = [...seen.faults.map(one => [one.at, `${clock(one.at)} the ${one.role} ${one.why}; ${one.took_s === undefined ? "being replaced" : `back after ${one.took_s.toFixed(2)} s`}`]),
    ...seen.scaling.map(one => [0, `step ${one.step}: ${one.source} ${one.before} → ${one.after} workers: ${one.why}`])];
  $("faults").replaceChildren(...words.reverse().map(([, text]) => element("li", text)));
  if (!words.length) $("faults").append(element("li", "No fault so far."));
}
function follow() {
  openPlots();
  const stream = new EventSource("events");
  stream.addEventListener("history", event => { const past = JSON.parse(event.data); for (const name in columns) columns[name] = [...past[name]]; });
  stream.addEventListener("now", event => show(JSON.parse(event.data)));
  stream.onerror = () => { $("live").textContent = "the page's server does not answer"; $("live").className = "lost"; };
  setInterval(lookAtBalance, 3000);
  lookAtBalance();
}
if (window.uPlot) follow(); else addEventListener("load", follow);
