// The live page: it shows what the server looked at, and computes nothing but how it is drawn.
const $ = id => document.getElementById(id);
const SHOWN_POINTS = 1800, SPARK_POINTS = 60, ROW = 34, SHOWN_ROWS = 20;
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933", "#882255", "#44aa99", "#7f7f7f", "#aa4466"];

function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= limit) return (value / (unit === "k" ? 1e3 : limit)).toPrecision(3) + unit;
  return Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}
const bytes = value => value === null || value === undefined ? "–" : count(value) + "B";
const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(100 * value < 10 ? 1 : 0) + " %";
const several = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const clock = seconds => new Date(1e3 * seconds).toLocaleTimeString();
let inks = {};
const ink = name => inks[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const seenNow = id => {
  const place = $(id).getBoundingClientRect();
  return !document.hidden && place.bottom >= 0 && place.top <= innerHeight;
};

function element(name, text, more = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;  // never markup: names come from a user's files
  return Object.assign(made, more);
}
function cells(row, values, classes = []) {
  values.forEach((value, at) => {
    const cell = row.cells[at] ?? row.insertCell(), kind = classes[at] ?? "";
    if (cell.className !== kind) cell.className = kind;
    if (value !== null && cell.textContent !== value) cell.textContent = value;
  });
}
// A table of any length, of which the document has only the rows that can be seen: `fill(row, one)` shows one of them.
function tableOf(id, fill) {
  const body = $(id), box = body.closest(".scroll"), above = element("tbody"), below = element("tbody");
  body.before(above); body.after(below);
  let all = [], drawing = false;
  const draw = () => {
    drawing = false;
    const first = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW) - 4, all.length - SHOWN_ROWS)), shown = all.slice(first, first + SHOWN_ROWS);
    for (const [part, rows] of [[above, first], [below, all.length - first - shown.length]]) {
      part.hidden = !rows;
      (part.rows[0] ?? part.insertRow()).style.height = `${ROW * rows}px`;
    }
    while (body.rows.length > shown.length) body.deleteRow(-1);
    shown.forEach((one, at) => fill(body.rows[at] ?? body.insertRow(), one));
  };
  box.addEventListener("scroll", () => { if (!drawing) { drawing = true; requestAnimationFrame(draw); } }, { passive: true });
  return rows => { all = rows; draw(); };
}
function spark(canvas, values) {
  const pen = canvas.getContext("2d"), { width, height } = canvas, most = Math.max(...values, 1e-9);
  pen.clearRect(0, 0, width, height);
  pen.strokeStyle = ink("--blue"); pen.lineWidth = 2; pen.beginPath();
  values.forEach((value, x) => pen[x ? "lineTo" : "moveTo"](width * x / (SPARK_POINTS - 1), height - 2 - (height - 4) * value / most));
  pen.stroke();
}
async function get(path, more = {}) {
  try { return await (await fetch(path, more)).json(); } catch (error) { return { error: `The page's server does not answer (${error.message}).` }; }
}

// Lines over the time. uPlot draws from columns: the time, and one or two series.
const columns = { at: [], step: [], steps_per_s: [], tokens_per_s: [], waited: [], views_bytes: [], held_bytes: [] };
const plots = [];
const EMPTY = {
  "plot-steps": "Waits for a trainer that takes steps", "plot-waited": "Waits for a trainer that takes steps",
  "plot-tokens": "Waits for the first steps to be drawn", "plot-bytes": "Waits for the service's first answer",
  "plot-reports": "Waits for a trainer to report something: client.report(step, {\"loss\": 2.1})",
  "plot-shares": "Waits for the first step to be planned",
  "plot-epochs": "Waits for a source to be read a second time",
  "plot-losses": "Waits for losses of these sources: client.report(step, {\"loss/NAME\": 2.1, \"heldout/NAME\": 2.4})",
  "plot-alpha": "Waits for LayerBalance: client.report(step, balance.metrics())",
};
// A chart without a point says what it waits for.
function tellEmpty(id, series) {
  const some = series.some(line => line.some(value => value !== null && value !== undefined));
  if (some) delete $(id).dataset.empty; else $(id).dataset.empty = EMPTY[id];
}
const two = number => String(number).padStart(2, "0");
// The browser's own clock, at every tick alike: a date beside some of them would lie over the next.
const timeTicks = (u, ticks, space, width, step) => ticks.map(tick => {
  const at = new Date(1e3 * tick);
  return `${two(at.getHours())}:${two(at.getMinutes())}${step < 60 ? `:${two(at.getSeconds())}` : ""}`;
});
const axis = () => ({ stroke: ink("--soft"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line") }, font: "12px system-ui" });
const fromZero = { range: (u, low, high) => [0, high > 0 ? 1.1 * high : 1] };
function plot(id, series, scale = value => value) {
  const colours = [ink("--blue"), ink("--red")];
  const data = () => [columns.at, ...series.map(([name]) => columns[name].map(value => value === null ? null : scale(value)))];
  const made = new uPlot({
    width: $(id).clientWidth, height: 180, legend: { show: series.length > 1, live: false }, cursor: { drag: { x: true, y: false } },
    scales: { y: fromZero },
    axes: [{ ...axis(), space: 70, values: timeTicks }, { ...axis(), size: 56, values: (u, ticks) => ticks.map(count) }],
    series: [{}, ...series.map(([, label], at) => ({ label, stroke: colours[at], width: 1.8, points: { show: false } }))],
  }, data(), $(id));
  plots.push({ id, made, data });
  tellEmpty(id, data().slice(1));
}
function openPlots() {
  for (const { id, made } of plots.splice(0)) { made.destroy(); $(id).replaceChildren(); }
  plot("plot-steps", [["steps_per_s", "steps/s"]]);
  plot("plot-waited", [["waited", "waiting"]], value => 100 * value);
  plot("plot-tokens", [["tokens_per_s", "tokens/s"]]);
  plot("plot-bytes", [["views_bytes", "batches"], ["held_bytes", "all that is held ahead"]], value => value / 1e6);
}
let drawing = false;
function draw() {
  if (drawing || document.hidden) return;
  drawing = true;
  requestAnimationFrame(() => { drawing = false; if (seenNow("now")) for (const { id, made, data } of plots) { const shown = data(); made.setData(shown); tellEmpty(id, shown.slice(1)); } });
}
new ResizeObserver(() => {
  for (const { id, made } of plots) made.setSize({ width: $(id).clientWidth, height: 180 });
  for (const one of steeringPlots) one.setSize({ width: one.root.parentElement.clientWidth, height: 200 });
  for (const plot of repetitionPlots) plot.setSize({ width: plot.root.parentElement.clientWidth, height: 160 });
}).observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { inks = {}; openPlots(); drawHeat(); steeringLook = ""; drawSteering(); });

// Sources.
const HEADS = [["name", "source"], ["format", "format"], ["planned_share", "planned"], ["realised_share", "realised"],
  ["tokens_per_s", "tokens/s"], ["", ""], ["waited_share", "service waited"], ["samples", "samples"], ["epochs", "epochs"], ["workers", "workers"],
  ["buffer_bytes", "buffer"], ["bad", "bad"], ["skipped", "skipped"], ["state", "state"]];
let sources = [], sortBy = "planned_share", downwards = true, chosen = null, sparks = {};
for (const [key, title] of HEADS) {
  const head = element("th"), button = element("button", title);
  head.scope = "col";
  button.onclick = () => { downwards = sortBy === key ? !downwards : key !== "name"; sortBy = key; showSources(); };
  if (key) head.append(button);
  $("source-heads").append(head);
}
$("find").oninput = () => showSources();
const stateOf = one => one.removed ? "removed" : one.parked ? `parked at ${one.parked.since}` : one.finished ? "ended" : "";
const passes = value => value.toFixed(value > 0 && value < 100 ? 1 : 0);
const epochs = one => passes(one.epochs) === passes(one.effective_epochs) ? passes(one.epochs) : `${passes(one.epochs)}, worth ${passes(one.effective_epochs)}`;
const sourceRows = tableOf("source-rows", (row, one) => {
  cells(row, [one.name, one.format, percent(one.planned_share), percent(one.realised_share), count(one.tokens_per_s), null,
    percent(one.waited_share), count(one.samples), epochs(one), count(one.workers), bytes(one.buffer_bytes), count(one.bad), count(one.skipped), stateOf(one)],
  ["left", "left", "", "", "", "", "", "", "", "", "", one.bad ? "fault" : ""]);
  const cell = row.cells[5];
  if (!cell.firstChild) cell.append(element("canvas", undefined, { width: 160, height: 36 }));
  spark(cell.firstChild, sparks[one.name] ?? []);
  row.tabIndex = 0;
  row.onclick = () => { chosen = chosen === one.name ? null : one.name; showDetail(); };
  row.onkeydown = event => { if (event.key === "Enter") row.onclick(); };
});
function showSources() {
  const part = $("find").value.toLowerCase();
  const shown = sources.filter(one => one.name.toLowerCase().includes(part));
  const value = one => sortBy === "state" ? stateOf(one) : one[sortBy] ?? -1;
  shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (downwards ? -1 : 1));
  sourceRows(shown);
  $("source-count").textContent = `${shown.length} of ${sources.length}`;
  showDetail();
}
function showDetail() {
  const one = sources.find(source => source.name === chosen), box = $("source-detail");
  box.hidden = !one;
  if (!one) return;
  const facts = [["samples", count(one.samples)], ["tokens", count(one.tokens)], ["service waited", `${one.waited_s} s`],
    ["busy", `${one.busy_s} s, of it ${one.cpu_s} s of a processor`], ["wrong length", count(one.wrong_length)], ["decoded", one.decoded_in]];
  box.replaceChildren(element("h3", one.name), element("p", facts.map(([name, value]) => `${name}: ${value}`).join(" · ")),
    element("p", one.bad_rows.length ? `last bad samples: ${one.bad_rows.map(id => typeof id === "string" ? id : JSON.stringify(id)).join(", ")}` : "no bad samples"));
}

// Balance: one byte for each bucket and microbatch, drawn as pixels and scaled by the browser.
const MOST_LINES = 640;
let balance = null;
const perLine = part => Math.ceil(part.buckets / MOST_LINES);  // buckets of a line of pixels: the one that stands out is drawn
const linesOf = part => Math.ceil(part.buckets / perLine(part));
function standsOut(part, line, microbatch) {
  const load = bucket => part.bytes[bucket * part.microbatches + microbatch], first = line * perLine(part);
  let found = first;
  for (let bucket = first + 1; bucket < Math.min(part.buckets, first + perLine(part)); bucket++)
    if (Math.abs(load(bucket) - 128) > Math.abs(load(found) - 128)) found = bucket;
  return found;
}
function drawHeat() {
  for (const name of balance ? ["before", "after"] : []) {
    const part = balance[name], canvas = $(`heat-${name}`), wide = part.microbatches, high = linesOf(part);
    canvas.width = wide; canvas.height = high;
    const pen = canvas.getContext("2d"), picture = pen.createImageData(wide, high), { data } = picture;
    for (let at = 0; at < wide * high; at++) {
      const load = part.bytes[standsOut(part, Math.floor(at / wide), at % wide) * wide + at % wide], [red, green, blue] = load > 128 ? [213, 94, 0] : [0, 114, 178];
      data[4 * at] = red; data[4 * at + 1] = green; data[4 * at + 2] = blue;
      data[4 * at + 3] = load === 0 ? 0 : 30 + 225 * Math.min(1, Math.abs(load - 128) / 64);  // half of the mean more or less has the full colour
    }
    pen.putImageData(picture, 0, 0);
  }
}
async function lookAtBalance() {
  if (!seenNow("balance")) return;
  const found = await get("balance");
  if (found.error) { $("balance-words").textContent = found.error; return; }
  balance = found;
  for (const part of [found.before, found.after]) part.bytes = Uint8Array.from(atob(part.loads), letter => letter.charCodeAt(0));
  const sizes = found.cp_sizes ? `; sequences are shared by ${found.cp_sizes.join(", ")} ranks` : "", { before, after } = found;
  $("balance-words").textContent = `Step ${found.step}, mesh ${found.mesh}: ${count(after.buckets)} ${found.axis} buckets, ` +
    `${after.microbatches} microbatches, ${count(found.mean)} tokens in one on average, ${count(found.most)} at most${sizes}.`;
  $("before-words").textContent = `As drawn, dealt in turn: ${before.in_lockstep.toFixed(2)} times an even step`;
  $("after-words").textContent = `As planned: ${after.in_lockstep.toFixed(2)} times an even step`;
  drawHeat();
}
$("heat-after").onclick = event => {
  if (!balance) return;
  const frame = $("heat-after").getBoundingClientRect(), part = balance.after;
  const share = (value, of, parts) => Math.max(0, Math.min(parts - 1, Math.floor(parts * value / of)));
  $("ask-step").value = balance.step;
  $("ask-bucket").value = standsOut(part, share(event.clientY - frame.top, frame.height, linesOf(part)), share(event.clientX - frame.left, frame.width, part.microbatches));
  ask();
  $("samples").scrollIntoView();
};

// Steering: what was reported, the shares of the mixture, changes and faults, on one axis of steps.
let steering = null, steeringPlots = [], steeringLook = "";
function drawMarks(u, groups) {
  const { ctx: pen, bbox } = u, { min, max } = u.scales.x;
  pen.save();
  pen.lineWidth = 1.5 * devicePixelRatio;
  for (const [marks, colour, dash] of groups) {
    pen.strokeStyle = ink(colour); pen.setLineDash(dash.map(part => part * devicePixelRatio));
    pen.beginPath();
    for (const x of new Set(marks.filter(one => one.step >= min && one.step <= max).map(one => Math.round(u.valToPos(one.step, "x", true))))) {
      pen.moveTo(x, bbox.top); pen.lineTo(x, bbox.top + bbox.height);
    }
    pen.stroke();
  }
  pen.restore();
}
function steeringData() {
  const reports = Object.values(steering.reports), shares = Object.values(steering.shares), newest = columns.step.at(-1) ?? null;
  const steps = [...new Set([...[...reports, ...shares].flatMap(([at]) => at), ...[...steering.changes, ...steering.faults].map(one => one.step), ...(newest === null ? [] : [newest])])].sort((a, b) => a - b);
  const at = new Map(steps.map((step, place) => [step, place]));
  const spread = ([when, values]) => { const line = new Array(steps.length).fill(null); when.forEach((step, place) => { line[at.get(step)] = values[place]; }); return line; };
  const held = line => { let last = null; return line.map(value => last = value ?? last); };  // a share holds until it changes
  return [[steps, ...reports.map(spread)], [steps, ...shares.map(line => held(spread(line)))]];
}
function drawSteering() {
  if (!steering) return;
  const data = steeringData();
  ["plot-reports", "plot-shares"].forEach((id, part) => tellEmpty(id, data[part].slice(1)));
  const names = [Object.keys(steering.reports), Object.keys(steering.shares)], look = JSON.stringify(names);
  if (look === steeringLook) { steeringPlots.forEach((one, part) => setTimeout(() => one.setData(data[part]), 50 * part)); return; }  // in frames of their own
  for (const one of steeringPlots) one.destroy();
  steeringLook = look;
  const last = label => label.split("/").at(-1), known = [...new Set(names.flat().map(last))].sort();  // a source has one colour in both
  steeringPlots = ["plot-reports", "plot-shares"].map((id, part) => new uPlot({
    width: $(id).clientWidth, height: 200, cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: part ? fromZero : {} },
    axes: [{ ...axis(), values: (u, ticks) => ticks.map(count) }, { ...axis(), size: 56, values: (u, ticks) => ticks.map(part ? percent : count) }],
    series: [{ label: "step", value: (u, value) => count(value) }, ...names[part].map(label => ({
      label, stroke: COLOURS[known.indexOf(last(label)) % COLOURS.length], width: 1.8, spanGaps: true, points: { show: false },
      value: (u, value) => part ? percent(value) : count(value), ...(part ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
    }))],
    hooks: { draw: [u => drawMarks(u, [[steering.changes, "--blue", [5, 4]], [steering.faults, "--red", []]])] },
  }, data[part], $(id)));
}
const MADE = { mixture: "the mixture was set", skip: "global batches passed over:", mesh: "the mesh became", add: "added", remove: "removed", park: "parked", return: "returned" };
async function lookAtSteering(event) {
  if (!event && !seenNow("steering")) return;
  const found = await get(`steering?group=${encodeURIComponent($("group").value)}`);
  if (found.error) { $("steering-words").textContent = found.error; return; }
  steering = found;
  const box = $("group"), more = found.left_out[0] + found.left_out[1];
  if ([...box.options].map(one => one.value).join() !== found.groups.join()) box.replaceChildren(...found.groups.map(name => element("option", name, { value: name })));
  box.value = found.group ?? "";
  box.hidden = !found.groups.length;
  $("steering-words").textContent = (found.groups.length ? "" : "Trainers have reported nothing so far (client.report). ") +
    `${several(found.changes.length, "live change")}, ${several(found.faults.length, "fault")}${more ? `; ${more} further lines are left out` : ""}.`;
  const listed = [...found.changes.map(one => [one.step, `step ${one.step}: ${MADE[one.kind]} ${one.of}`]), ...found.faults.map(one => [one.step, `step ${one.step}: the ${one.role} ${one.why}`])];
  $("marks").replaceChildren(...listed.sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, text]) => element("li", text)));
  drawSteering();
}
$("group").onchange = lookAtSteering;

// Repetition: passes over sources, their losses and the spread of alpha, on one axis of steps.
let repetition = null, repetitionPlots = [], repetitionLook = "";
const REPETITION = [["plot-epochs", "epochs"], ["plot-losses", "losses"], ["plot-alpha", "spread"]];
function drawRepetition() {
  const parts = REPETITION.map(([, key]) => Object.entries(repetition[key]));
  const steps = [...new Set([...parts.flat().flatMap(([, [at]]) => at), ...repetition.marks.map(mark => mark.step)])].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const spread = ([, [when, values]]) => { const line = new Array(steps.length).fill(null); when.forEach((step, at) => { line[place.get(step)] = values[at]; }); return line; };
  const data = parts.map(lines => [steps, ...lines.map(spread)]), look = JSON.stringify(parts.map(lines => lines.map(([name]) => name)));
  REPETITION.forEach(([id], part) => tellEmpty(id, data[part].slice(1)));
  if (look === repetitionLook) { repetitionPlots.forEach((plot, part) => plot.setData(data[part])); return; }
  for (const plot of repetitionPlots) plot.destroy();
  repetitionLook = look;
  const names = Object.keys(repetition.epochs), colour = label => COLOURS[Math.max(0, names.indexOf(label.split("/").at(-1))) % COLOURS.length];
  const passed = epochs => repetition.marks.filter(mark => mark.epochs === epochs);
  repetitionPlots = REPETITION.map(([id], part) => new uPlot({
    width: $(id).clientWidth, height: 160, cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: part ? {} : fromZero },
    axes: [{ ...axis(), values: (u, ticks) => ticks.map(count) }, { ...axis(), size: 56, values: (u, ticks) => ticks.map(count) }],
    series: [{ label: "step", value: (u, value) => count(value) }, ...parts[part].map(([label]) => ({
      label, stroke: colour(label), width: 1.8, spanGaps: true, points: { show: false }, value: (u, value) => count(value),
      dash: label.startsWith("heldout/") ? [6, 4] : [],
    }))],
    hooks: { draw: [u => drawMarks(u, [[passed(4), "--blue", [5, 4]], [passed(16), "--red", []]])] },
  }, data[part], $(id)));
}
async function lookAtRepetition() {
  if (!seenNow("repetition")) return;
  const found = await get("repetition");
  if (found.error) { $("repetition-words").textContent = found.error; return; }
  repetition = found;
  const names = Object.keys(found.epochs), newest = name => found.epochs[name][1].at(-1);
  $("repetition-words").textContent = !names.length ? "No source has been read a second time." :
    names.slice(0, 6).map(name => `${name}: ${passes(newest(name))} epochs, worth ${passes(found.worth[name])}`).join("; ") +
    (names.length + found.left_out > 6 ? `; ${count(names.length + found.left_out - 6)} further sources were read again.` : ".");
  $("repetition-warnings").replaceChildren(...found.warnings.map(text => element("li", text)));
  $("repetition-marks").replaceChildren(...found.marks.slice(-12).reverse().map(mark => element("li", `step ${mark.step}: ${mark.source} passes ${mark.epochs} epochs`)));
  $("repetition-plots").hidden = !names.length;
  if (names.length) drawRepetition();
}

// Changes: only with a token, which the address may bring.
const HINTS = { set_mixture: "Weights, as name=weight with commas between", park_source: "Name of the source", return_source: "Name of the source",
  skip_steps: "How many global batches", reshard: "The new mesh, such as dp=8,tp=2" };
const brought = new URLSearchParams(location.hash.slice(1)).get("token");
if (brought) { sessionStorage.setItem("token", brought); history.replaceState(null, "", location.pathname); }
$("change-token").value = sessionStorage.getItem("token") ?? "";
$("change-what").onchange = () => {
  const what = $("change-what").value;
  $("change-hint").textContent = HINTS[what];
  $("change-value").value = what !== "set_mixture" ? "" : sources.filter(one => !one.removed).map(one => `${one.name}=${Number(one.planned_share.toPrecision(4))}`).join(", ");
};
function changeValue(what, text) {
  if (what === "skip_steps") return Number(text);
  if (what !== "set_mixture") return text.trim();
  return Object.fromEntries(text.split(/[,\n]/).filter(part => part.trim()).map(part => {
    const at = part.lastIndexOf("="), weight = Number(part.slice(at + 1));
    if (at < 0 || part.slice(at + 1).trim() === "" || Number.isNaN(weight)) throw new Error(`"${part.trim()}" is not name=weight; nothing was changed.`);
    return [part.slice(0, at).trim(), weight];
  }));
}
$("change").onsubmit = async event => {
  event.preventDefault();
  const what = $("change-what").value, step = $("change-at").value, words = $("change-words");
  let found;
  try {
    const body = JSON.stringify({ change: what, value: changeValue(what, $("change-value").value), at_step: step === "" ? null : Number(step) });
    sessionStorage.setItem("token", $("change-token").value);
    found = await get("change", { method: "POST", body, headers: { "x-overlord-token": $("change-token").value } });
  } catch (error) { found = { error: error.message }; }
  words.className = found.error ? "refused" : "";
  words.textContent = found.error ?? `It holds from step ${found.step} on.`;
  if (!found.error) lookAtSteering(event);
};

// Samples of one bucket of a step.
const sampleRows = tableOf("sample-rows", (row, one) =>
  cells(row, [one.id, String(one.microbatch), one.source, String(one.epoch), String(one.from), count(one.tokens)], ["", "", "left"]));
async function ask(event) {
  event?.preventDefault();
  const step = $("ask-step").value, found = await get(`samples?bucket=${$("ask-bucket").value || 0}${step === "" ? "" : `&step=${step}`}`);
  $("sample-words").textContent = found.error ?? `Step ${found.step}, bucket ${found.bucket} (${found.ranks.length === 1 ? "rank" : "ranks"} ${found.ranks.join(", ")}): ${several(found.samples.length, "piece")}.`;
  sampleRows(found.samples ?? []);
}
$("ask").onsubmit = ask;

// What was looked at.
const hostRows = tableOf("host-rows", (row, one) =>
  cells(row, [one.role, one.host ?? "", String(one.pid), one.up ? "yes" : "no", String(one.generation), String(one.restarts)], ["", "left", "", one.up ? "" : "fault"]));
let hosts = [];
function showTables() {  // those that can be seen, and empty ones
  if (seenNow("sources") || !$("source-rows").rows.length) showSources();
  if (seenNow("hosts") || !$("host-rows").rows.length) hostRows(hosts);
}
addEventListener("scrollend", showTables);
function show(seen) {
  $("about").textContent = `${seen.address} · overlord ${seen.version} · looked at ${clock(seen.at)}`;
  $("live").textContent = seen.lost ? "the service does not answer" : "live";
  $("live").className = seen.lost ? "lost" : "";
  const fresh = seen.at > (columns.at.at(-1) ?? 0);
  if (fresh) Object.keys(columns).forEach((name, at) => { columns[name].push(seen.point[at]); if (columns[name].length > SHOWN_POINTS) columns[name].shift(); });
  draw();
  if (seen.lost) { $("sentence").textContent = seen.lost; $("sentence").className = "failing"; return; }
  $("sentence").textContent = seen.sentence;
  $("sentence").className = seen.mood;
  document.title = `${seen.rates.step ?? "–"} · overlord`;
  const then = seen.next_mesh ? `, from step ${seen.next_mesh.step} on ${seen.next_mesh.mesh}` : "";
  $("facts").replaceChildren(...[`${seen.runtime} service`, `mesh ${seen.mesh}${then}`, `${seen.clients.count} ranks attached`,
    `store ${seen.store?.place ?? "none"}`, ...(seen.remote ? [seen.remote] : [])].map(text => element("li", text)));
  const { rates, clients } = seen;
  const behind = clients.last === null || clients.first === clients.last ? "all ranks" : `the last rank is at ${clients.first}`;
  const tiles = [["step", count(rates.step), behind], ["steps/s", count(rates.steps_per_s), rates.seconds === null ? "not known yet" : `over ${Math.round(rates.seconds)} s`, "steps_per_s"],
    ["tokens/s", count(rates.tokens_per_s), "drawn", "tokens_per_s"], ["waiting", percent(rates.waited), "of the time", "waited"],
    ["planned ahead", count(Math.max(0, seen.next_step - 1 - (rates.step ?? -1))), "steps"], ["restarts", count(seen.restarts), "of the service"]];
  const frame = $("tiles");
  while (frame.children.length < tiles.length) { const box = element("div"); box.append(element("dt"), element("dd"), element("dd")); frame.append(box); }
  tiles.forEach(([title, value, detail, line], at) => {
    const box = frame.children[at];
    [title, value, detail].forEach((text, part) => { if (box.children[part].textContent !== text) box.children[part].textContent = text; });
    if (line && !box.children[3]) box.append(element("canvas", undefined, { width: 240, height: 44 }));
    if (line) spark(box.children[3], columns[line].slice(-SPARK_POINTS).map(one => one ?? 0));
  });
  sources = seen.sources.name.map((_, at) => Object.fromEntries(Object.entries(seen.sources).map(([key, values]) => [key, values[at]])));
  hosts = seen.hosts;
  if (fresh) for (const one of sources) {
    const values = sparks[one.name] ??= [];
    values.push(one.tokens_per_s ?? 0);
    if (values.length > SPARK_POINTS) values.shift();
  }
  showTables();
  if (seen.changes && $("change").hidden) { $("change").hidden = false; $("change-what").onchange(); }
  const words = [...seen.faults.map(one => [one.at, `${clock(one.at)} the ${one.role} ${one.why}; ${one.took_s === undefined ? "being replaced" : `back after ${one.took_s.toFixed(2)} s`}`]),
    ...seen.scaling.map(one => [0, `step ${one.step}: ${one.source} ${one.before} → ${one.after} workers: ${one.why}`])];
  $("faults").replaceChildren(...words.reverse().map(([, text]) => element("li", text)));
  if (!words.length) $("faults").append(element("li", "No fault so far."));
}
function follow() {
  openPlots();
  const stream = new EventSource("events");
  stream.addEventListener("history", event => {
    const past = JSON.parse(event.data);
    for (const name in columns) columns[name] = [...past[name]];
    sparks = past.sources;
  });
  stream.addEventListener("now", event => show(JSON.parse(event.data)));
  stream.onerror = () => { $("live").textContent = "the page's server does not answer"; $("live").className = "lost"; };
  for (const look of [lookAtBalance, lookAtSteering, lookAtRepetition]) {
    setInterval(() => look(), 3000);
    addEventListener("scrollend", () => { if (!balance || !steering || !repetition) look(); });
    look();
  }
}
if (window.uPlot) follow(); else addEventListener("load", follow);
