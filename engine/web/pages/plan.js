"use strict";
const byId = (id) => document.getElementById(id);
const STEPS = 200; // of a slider
const LOGARITHMIC = 100; // a wide range whose ends differ by more than this factor has a logarithmic slider
let choices = null;
let values = {};
let waiting = false;
let again = false;

function scale(name) {
  const [, least, greatest] = choices.numbers[name];
  const low = Math.max(least, greatest / 1e5);
  const isWhole = Number.isInteger(choices.numbers[name][0]) && !["rate", "spread", "ttft"].includes(name);
  const round = (value) => (isWhole ? Math.round(value) : Number(value.toPrecision(3)));
  if (greatest > 10 && greatest / low > LOGARITHMIC) {
    const start = least === 0 ? 1 : 0; // the first step is zero
    const ratio = Math.log(greatest / low);
    return {
      value: (at) => (at < start ? 0 : round(low * Math.exp((ratio * (at - start)) / (STEPS - start)))),
      at: (value) => (value < low ? 0 : Math.round(start + ((STEPS - start) * Math.log(value / low)) / ratio)),
    };
  }
  return { value: (at) => round(least + ((greatest - least) * at) / STEPS), at: (value) => Math.round((STEPS * (value - least)) / (greatest - least)) };
}

function buildForm() {
  const form = byId("form");
  for (const [name, options] of Object.entries(choices.texts)) {
    const select = element("select", { name });
    for (const option of options) select.append(element("option", { value: option }, option));
    select.value = values[name];
    select.addEventListener("change", () => { values[name] = select.value; ask(); });
    form.append(element("label", {}, choices.meaning[name], select));
  }
  for (const name of Object.keys(choices.numbers)) {
    const steps = scale(name);
    const input = element("input", { type: "range", min: 0, max: STEPS, name, value: steps.at(Number(values[name])) });
    const output = element("strong", {}, plain(Number(values[name])));
    input.setAttribute("aria-valuetext", plain(Number(values[name])));
    input.addEventListener("input", () => {
      values[name] = steps.value(Number(input.value));
      output.textContent = plain(values[name]);
      input.setAttribute("aria-valuetext", output.textContent);
      ask();
    });
    form.append(element("label", {}, element("span", {}, `${choices.meaning[name]}: `, output), input));
  }
}

async function ask() {
  if (waiting) { again = true; return; }
  waiting = true;
  const query = new URLSearchParams(values).toString();
  window.history.replaceState(null, "", `/plan?${query}`);
  try {
    const answer = await fetch(`api/plan?${query}`);
    const said = await answer.json();
    if (said.error) { byId("sentence").textContent = said.error; byId("sentence").classList.add("error"); }
    else { byId("sentence").classList.remove("error"); show(said); }
  } catch (error) {
    byId("sentence").textContent = `The server does not answer: ${error.message}`;
  }
  waiting = false;
  if (again) { again = false; ask(); }
}

function show(said) {
  byId("sentence").textContent = `Recommended: ${said.recommended}. ${said.because}`;
  byId("command").dataset.command = said.command;
  const designs = said.designs;
  const [limitTtft, limitTpot] = [Number(values.ttft), Number(values.tpot)];
  const curve = (at) => designs.map((each) => ({ name: each.name, values: each.curve.map((point) => point[at]) }));
  const mark = Number(values.rate);
  const label = (at) => `${plain(at)} requests/s`;
  lines(byId("ttft"), "Time to the first token, 90th percentile, by rate", said.rates, curve(0), seconds, { limit: limitTtft, top: 1.6 * limitTtft, mark, label });
  lines(byId("tpot"), "Time of a later token, mean, by rate", said.rates, curve(1), seconds, { limit: limitTpot, top: 1.6 * limitTpot, mark, label });
  stacked(byId("parts"), `Where the time goes at ${plain(mark)} requests/s`, designs, ["wait", "load", "compute", "hand-off", "decode"], seconds);
  const even = said.break_even_tokens;
  const list = element("dl");
  for (const [name, value] of [
    ["engines", `${plain(said.engines)} of ${plain(said.gpus_of_engine)} GPUs`], ["KV per token", bytes(said.kv_bytes_per_token)],
    ["one prompt, computed", seconds(said.prompt_s)], [`one prompt, moved over ${values.fabric}`, seconds(said.links[values.fabric].move_s)],
    ["loading pays from", even === null ? "never" : `${plain(even)} tokens`],
  ]) list.append(element("dt", {}, name), element("dd", {}, value));
  byId("facts").replaceChildren(element("h2", {}, "One request"), list);
  const headers = ["design", "prefill : decode", "goodput", "TTFT mean", "TTFT p90", "TPOT", "longest gap", "reused", "busy", "used up first"];
  const rows = designs.map((each) => element("tr", each.name === said.recommended ? { class: "best" } : {}, ...[
    each.name, each.prefill ? `${each.prefill} : ${said.engines - each.prefill}` : "-", perSecond(each.goodput), seconds(each.ttft_mean), seconds(each.ttft_p90),
    seconds(each.tpot), seconds(each.gap_max), percent(each.hit_ratio), percent(each.busy), each.limit || "-",
  ].map((text) => element("td", {}, text))));
  const head = element("tr", {}, ...headers.map((each) => element("th", { scope: "col" }, each)));
  byId("designs").replaceChildren(element("h2", {}, `Designs on equal GPUs, at ${plain(mark)} requests/s`), element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

byId("command").addEventListener("click", async () => {
  await navigator.clipboard.writeText(byId("command").dataset.command ?? "");
  byId("command").textContent = "Copied";
  setTimeout(() => { byId("command").textContent = "Copy the command that prints these numbers"; }, 1500);
});

(async () => {
  choices = await (await fetch("api/choices")).json();
  values = { ...choices.defaults };
  for (const [name, [value]] of Object.entries(choices.numbers)) values[name] = value;
  for (const [name, value] of new URLSearchParams(window.location.search)) if (name in values) values[name] = value;
  buildForm();
  ask();
})();
