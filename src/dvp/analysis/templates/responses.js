"use strict";
// Everything that a model wrote is set as text (textContent), never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { run: 0, step: 0, response: 0, colour: "log_ratio", token: null };

// --- numbers ---
const constantOrList = (value, place) => (Array.isArray(value) ? value[place] : value);
const inferLogProb = (response, place) => response.infer_log_prob[place];
const prunedLogProb = (response, place) => response.infer_log_prob[place] + response.log_ratio[place];
const logProb = (response, place) => (response.log_prob ? response.log_prob[place] : prunedLogProb(response, place));
const weight = (response, place) => constantOrList(response.weight, place);
const advantage = (response, place) => constantOrList(response.advantage, place);
const isOutside = (response, place) => response.outsideSet.has(place);
const isTools = (response, place) => response.toolSet.has(place);
const number = (value, digits = 3) => (value == null ? "–" : value === 0 ? "0" : Number(value.toPrecision(digits)).toString().replace("-", "−").replace("e−", "e-"));
const signed = (value) => (value > 0 ? "+" : "") + number(value);

function worstOf(response, count) {
  return response.log_ratio
    .map((value, place) => [Math.abs(value), place])
    .filter(([, place]) => !isOutside(response, place) && !isTools(response, place))
    .sort((a, b) => b[0] - a[0])
    .slice(0, count);
}

for (const run of data.runs) {
  for (const response of run.responses) {
    response.outsideSet = new Set(response.outside);
    response.toolSet = new Set(response.by_tool || []);
    response.worst = worstOf(response, 10);
    response.largest = response.worst.length ? response.worst[0][0] : 0;
  }
  run.steps = [...new Set(run.responses.map((response) => response.step))];
  let most = 0;
  for (const response of run.responses) for (const value of [response.advantage].flat()) most = Math.max(most, Math.abs(value ?? 0));
  run.advantageRange = most || 1;
}

// --- colours: from −1 to 1, or a class ---
const diverging = (value) => {
  const size = Math.min(1, Math.abs(value));
  return size ? `rgb(var(${value > 0 ? "--positive" : "--negative"}) / calc(var(--strength) * ${size.toFixed(3)}))` : "";
};
const sequential = (value) => (value > 0 ? `rgb(var(--rare) / calc(var(--strength) * ${Math.min(1, value).toFixed(3)}))` : "");
const LOWEST = 4; // of log10 p
// A few tokens have most of the mismatch: the square root keeps the others in sight.
const root = (value) => Math.sign(value) * Math.sqrt(Math.abs(value));
const colours = {
  log_ratio: {
    name: "log p − log q",
    of: (run, response, place) => (isOutside(response, place) ? "" : diverging(root(response.log_ratio[place] / run.range))),
    legend: (run) => [[-1, -0.25, 0, 0.25, 1].map((at) => [diverging(root(at)), (Math.abs(at) === 1 ? (at > 0 ? "≥ " : "≤ ") : "") + signed(at * run.range)]),
      "nats: trainer's log p minus engine's log q, of the policies that were sampled; orange: the trainer finds the token likelier"],
  },
  p: {
    name: "p",
    of: (run, response, place) => sequential(-logProb(response, place) / Math.LN10 / LOWEST),
    legend: () => [[0, 1, 2, 3, 4].map((at) => [sequential(at / LOWEST), at === 0 ? "1" : (at === LOWEST ? "≤ " : "") + 10 ** -at]),
      "p: the trainer's probability of the token, over the full vocabulary"],
  },
  safe: {
    name: "safe or pruned",
    of: (run, response, place) => (isOutside(response, place) ? diverging(1) : ""),
    legend: () => [[["", "in the safe vocabulary"], [diverging(1), "pruned"]], "by the trainer; a pruned token has weight 0"],
  },
  weight: {
    name: "weight",
    of: (run, response, place) => (weight(response, place) > 0 ? diverging(Math.log2(weight(response, place))) : ""),
    legend: () => [[[diverging(-1), "≤ ½"], ["", "1"], [diverging(1), "≥ 2"]], "importance weight (a ratio, no unit)"],
  },
  advantage: {
    name: "advantage",
    of: (run, response, place) => diverging(advantage(response, place) / run.advantageRange),
    legend: (run) => [[-1, -0.5, 0, 0.5, 1].map((at) => [diverging(at), signed(at * run.advantageRange)]), "advantage (in units of the reward)"],
  },
};

// --- what is shown ---
const run = () => data.runs[state.run];
const responses = () => run().responses.filter((response) => response.step === run().steps[state.step]);
const response = () => responses()[state.response];

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
const fill = (id, ...children) => $(id).replaceChildren(...children);
const options = (id, names, chosen) => {
  fill(id, ...names.map((name, index) => element("option", name, { value: index })));
  $(id).selectedIndex = chosen;
};
const rows = (id, pairs) => fill(id, ...pairs.map(([name, value]) => {
  const row = element("tr");
  row.append(element("th", name, { scope: "row" }), element("td", value));
  return row;
}));

function positionOf(response, place) {
  if (!response.ranges) return place;
  for (const [low, high] of response.ranges) {
    if (place < high - low) return low + place;
    place -= high - low;
  }
}
const textOf = (response, place) => data.tokens[response.tokens[place]][1];
const quoted = (text) => (text === "" ? "(rest of a character)" : JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"'));

function drawTimeline() {
  const largest = run().steps.map((step) => Math.max(...run().responses.filter((one) => one.step === step).map((one) => one.largest)));
  const most = Math.max(...largest, Number.MIN_VALUE);
  fill("timeline", ...run().steps.map((step, index) => {
    const collapse = step === run().collapsed_at;
    const metrics = Object.entries(run().metrics[step] || {}).map(([name, value]) => `${name} ${number(value)}`);
    const button = element("button", null, { type: "button", title: [`step ${step}`, ...metrics, `largest |log p − log q| ${number(largest[index])}`].join("\n") });
    const bar = element("i");
    bar.style.height = `${(2.4 * largest[index] / most).toFixed(2)}rem`;
    button.append(bar, element("span", collapse ? `${step} ✕` : step));
    if (collapse) { button.className = "collapse"; button.setAttribute("aria-label", `step ${step}, collapse`); }
    if (index === state.step) button.setAttribute("aria-current", "step");
    button.onclick = () => show({ step: index, response: 0, token: null });
    return button;
  }));
  const note = run().collapsed_at == null ? "no collapse" : `✕ collapse at step ${run().collapsed_at}`;
  $("timeline").append(element("span", `bars: largest |log p − log q| of the step's responses here; ${note}`, { class: "note" }));
}

function drawLegend() {
  const [swatches, text] = colours[state.colour].legend(run());
  const box = element("span", null, { class: "swatches" });
  for (const [background, label] of swatches) {
    const swatch = element("span", label);
    swatch.style.background = background;
    box.append(swatch);
  }
  fill("legend", box, element("span", text), element("span", "pruned", { class: "outside" }), element("span", "weight 0", { class: "rejected" }));
  if (run().responses.some((one) => one.toolSet.size)) $("legend").append(element("span", "a tool's answer", { class: "tool" }));
}

const RULES = { veto: "the veto: a token's ratio is too small", trust_region: "the trust region: a token's ratio is too far from 1", k3: "the K3 filter", bounds: "the bounds on its importance ratio" };

function drawResponse() {
  const shown = response();
  $("prompt").textContent = shown.prompt;
  $("heading").textContent = `Response ${shown.index} of step ${shown.step}`;
  const collapse = run().collapsed_at;
  const words = [];
  if (shown.step === collapse) words.push("The run collapsed at this step.");
  else if (collapse != null && shown.step < collapse && shown.step >= collapse - 20) words.push(`The run collapsed ${collapse - shown.step} steps later.`);
  if (shown.rejected) words.push(`Rejected as a whole by ${RULES[shown.rejected] || shown.rejected}: it has no weight in the update.`);
  $("banner").textContent = words.join(" ");
  const spans = shown.tokens.map((_, place) => {
    const text = textOf(shown, place);
    const span = element("span", text === "" ? "·" : text.replaceAll("\n", "↵\n"), { "data-place": place });
    if (isTools(shown, place)) {
      span.classList.add("tool");
      return span;
    }
    span.style.backgroundColor = colours[state.colour].of(run(), shown, place);
    if (isOutside(shown, place)) span.classList.add("outside");
    // Of a response that is rejected as a whole, the banner says so.
    if (weight(shown, place) === 0 && (!shown.rejected || state.colour === "weight")) span.classList.add("rejected");
    return span;
  });
  if (shown.ranges) {
    let start = 0;
    const parts = [];
    shown.ranges.forEach(([low, high], index) => {
      const before = index ? shown.ranges[index - 1][1] : 0;
      if (low > before) parts.push(element("span", `\n… ${low - before} tokens left out …\n`, { class: "mark" }));
      parts.push(...spans.slice(start, start + high - low));
      start += high - low;
    });
    fill("text", ...parts);
  } else fill("text", ...spans);
  rows("facts", [
    ["problem", shown.problem],
    ["reference answer", shown.answer],
    ["reward", number(shown.reward)],
    ["tokens", `${shown.own_length ?? shown.length}${shown.truncated ? ", cut off" : ""}`],
    ...(shown.own_length == null ? [] : [["tokens of a tool", shown.length - shown.own_length]]),
    ["rejected", shown.rejected ? RULES[shown.rejected] || shown.rejected : "no"],
    ["pruned tokens", shown.outside.length + (shown.ranges ? " here" : "")],
    ["why recorded", shown.chosen === "worst" ? "largest mismatch of the step" : "among the first of the step"],
  ]);
  fill("worst", ...shown.worst.map(([size, place]) => jump(`#${positionOf(shown, place)}`, size, shown, place, { token: place })));
  const all = run().responses.flatMap((one) => one.worst.map(([size, place]) => [size, place, one]));
  all.sort((a, b) => b[0] - a[0]);
  fill("worst-of-run", ...all.slice(0, 10).map(([size, place, one]) => {
    const step = run().steps.indexOf(one.step);
    const others = run().responses.filter((other) => other.step === one.step);
    return jump(`step ${one.step}`, size, one, place, { step, response: others.indexOf(one), token: place });
  }));
}

function jump(where, size, of, place, target) {
  const button = element("button", null, { type: "button" });
  button.append(`${signed(of.log_ratio[place])} `, element("code", quoted(textOf(of, place)).slice(0, 24)), ` ${where}`);
  button.onclick = () => show(target, true);
  const item = element("li");
  item.append(button);
  return item;
}

function drawToken(place) {
  if (place == null) return rows("token", [["", "point at a token, or choose one with ← and →"]]);
  const shown = response();
  const outside = isOutside(shown, place);
  const [id] = data.tokens[shown.tokens[place]];
  if (isTools(shown, place)) {
    return rows("token", [
      ["text", quoted(textOf(shown, place))],
      ["token id", id],
      ["position", `${positionOf(shown, place)} of ${shown.length}`],
      ["written by", "a tool: context, which is not trained on"],
    ]);
  }
  const probability = (logarithm) => `${number(Math.exp(logarithm))}   (log ${number(logarithm, 4)})`;
  rows("token", [
    ["text", quoted(textOf(shown, place))],
    ["token id", id],
    ["position", `${positionOf(shown, place)} of ${shown.length}`],
    ["q, engine", probability(inferLogProb(shown, place))],
    ["p, trainer", probability(logProb(shown, place))],
    ["p, pruned", outside ? "outside the safe vocabulary" : shown.log_prob ? probability(prunedLogProb(shown, place)) : "same as p"],
    ["log p − log q", outside ? `${signed(shown.log_ratio[place])}, by convention` : `${signed(shown.log_ratio[place])} nats`],
    ["p / q", outside ? "0" : number(Math.exp(shown.log_ratio[place]), 4)],
    ["vocabulary", outside ? "pruned" : "safe"],
    ["weight", number(weight(shown, place), 4)],
    ["advantage", number(advantage(shown, place), 4)],
  ]);
}

function select(place, scroll) {
  state.token = place;
  for (const span of $("text").querySelectorAll(".selected")) span.classList.remove("selected");
  if (place != null) {
    const span = $("text").querySelector(`[data-place="${place}"]`);
    span.classList.add("selected");
    if (scroll) span.scrollIntoView({ block: "nearest" });
  }
  drawToken(place);
}

function show(change, scroll = false) {
  Object.assign(state, change);
  state.step = Math.min(state.step, run().steps.length - 1);
  state.response = Math.min(state.response, responses().length - 1);
  options("run", data.runs.map((one) => one.label + (one.collapsed_at == null ? "" : ` ✕ ${one.collapsed_at}`)), state.run);
  options("step", run().steps.map((step) => step + (step === run().collapsed_at ? " ✕ collapse" : "")), state.step);
  options("response", responses().map((one) => `${one.index}: reward ${number(one.reward)}, ${one.own_length ?? one.length} tokens, largest ${number(one.largest)}`), state.response);
  options("colour", Object.values(colours).map((one) => one.name), Object.keys(colours).indexOf(state.colour));
  drawTimeline();
  drawLegend();
  drawResponse();
  select(state.token, scroll);
}

const around = (value, by, length) => (value + by + length) % length;
const moveRun = (by) => show({ run: around(state.run, by, data.runs.length), response: 0, token: null });
const names = Object.keys(colours);
const keys = {
  j: () => show({ response: around(state.response, 1, responses().length), token: null }),
  k: () => show({ response: around(state.response, -1, responses().length), token: null }),
  l: () => show({ step: around(state.step, 1, run().steps.length), token: null }),
  h: () => show({ step: around(state.step, -1, run().steps.length), token: null }),
  "]": () => moveRun(1),
  "[": () => moveRun(-1),
  c: () => show({ colour: names[around(names.indexOf(state.colour), 1, names.length)] }),
  w: () => {
    const places = response().worst.map(([, place]) => place);
    if (places.length) select(places[around(places.indexOf(state.token), 1, places.length)], true);
  },
  ArrowRight: () => select(state.token == null ? 0 : Math.min(state.token + 1, response().tokens.length - 1), true),
  ArrowLeft: () => select(state.token == null ? 0 : Math.max(state.token - 1, 0), true),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "SELECT" || !(event.key in keys)) return;
  event.preventDefault();
  keys[event.key]();
});
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("run").onchange = (event) => show({ run: event.target.selectedIndex, response: 0, token: null });
$("step").onchange = (event) => show({ step: event.target.selectedIndex, token: null });
$("response").onchange = (event) => show({ response: event.target.selectedIndex, token: null });
$("colour").onchange = (event) => show({ colour: names[event.target.selectedIndex] });
const placeAt = (event) => (event.target.dataset.place == null ? null : Number(event.target.dataset.place));
$("text").addEventListener("mouseover", (event) => { if (placeAt(event) != null) drawToken(placeAt(event)); });
$("text").addEventListener("mouseleave", () => drawToken(state.token));
$("text").addEventListener("click", (event) => select(placeAt(event), false));

// First: where engine and trainer differ most.
let first = null;
data.runs.forEach((one, index) => one.responses.forEach((candidate) => {
  if (!first || candidate.largest > first.candidate.largest) first = { index, candidate };
}));
if (first) {
  state.run = first.index;
  const step = run().steps.indexOf(first.candidate.step);
  const inStep = run().responses.filter((one) => one.step === first.candidate.step);
  const token = first.candidate.worst.length ? first.candidate.worst[0][1] : null;
  show({ step, response: inStep.indexOf(first.candidate), token });
} else $("legend").textContent = "No responses were recorded.";
