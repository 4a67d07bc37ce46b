"use strict";
const byId = (id) => document.getElementById(id);
const HOUR = 360;
const LATE_S = 3; // without an event for this long, the page says so
let history = [];
let recent = []; // [seconds, bytes in, bytes out]
let heardMs = 0;

function facts(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) list.append(element("dt", {}, name), element("dd", {}, value));
  return list;
}

function tierBars(tiers) {
  const bars = [];
  for (const [name, tier] of Object.entries(tiers ?? {})) {
    const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
    const text = `${name}: ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`;
    const fill = element("i", { style: `width:${Math.min(100, 100 * share).toFixed(1)}%` });
    const bar = element("div", { class: `bar ${name}`, role: "meter", "aria-label": `${name} used`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) }, fill);
    bars.push(element("div", {}, text), bar);
  }
  return bars;
}

function card(title, state, isDead, ...children) {
  return element("article", { class: isDead ? "card dead" : "card", "data-name": title }, element("h3", {}, title, element("span", { class: "state" }, state)), ...children);
}

function nodeCard(frame) {
  const arrows = Object.entries(frame.tiers ?? {}).map(([name, tier]) => [`${name}: written ↓, read ↑`, `${speed(tier.in_bytes_per_s)}, ${speed(tier.out_bytes_per_s)}`]);
  const state = frame.error ? "not responding" : frame.tiers ? frame.state : "not running";
  return card(frame.name, state, !frame.tiers || Boolean(frame.error), ...tierBars(frame.tiers), facts([
    ["pages", plain(Object.values(frame.tiers ?? {}).reduce((sum, tier) => sum + (tier.pages ?? 0), 0))],
    ["programs", plain(frame.clients?.sessions_connected)], ["leases", plain(frame.clients?.leases)], ...arrows,
  ]));
}

function memberCard(member) {
  const rows = [];
  const add = (name, value) => { if (value !== undefined && value !== null && value !== "") rows.push([name, value]); };
  add("role", member.role); add("model", member.model); add("policy", member.policy); add("node", member.node);
  if (known(member.running)) add("running", plain(member.running));
  if (known(member.waiting)) add("waiting", plain(member.waiting));
  if (known(member.prefill_tokens_per_s)) add("prompts", perSecond(member.prefill_tokens_per_s).replace("/s", "tokens/s"));
  if (known(member.decode_tokens_per_s)) add("answers", perSecond(member.decode_tokens_per_s).replace("/s", "tokens/s"));
  if (known(member.routed_per_s)) add("routed", perSecond(member.routed_per_s));
  if (known(member.refused_per_s)) add("refused", perSecond(member.refused_per_s));
  const reused = member.reused_pages_per_s;
  if (reused && typeof reused === "object") for (const [tier, rate] of Object.entries(reused)) add(`reused, ${tier}`, perSecond(rate).replace("/s", "pages/s"));
  const isDead = Boolean(member.error) || !["serving", "ready"].includes(member.state ?? "serving");
  return card(`${member.member ?? ""} ${member.name}`.trim(), member.error ? "not responding" : member.state ?? "", isDead, ...tierBars(member.tiers), facts(rows));
}

function table(target, title, headers, rows) {
  if (!rows.length) { target.hidden = true; return; }
  target.hidden = false;
  const head = element("tr", {}, ...headers.map((each) => element("th", { scope: "col" }, each)));
  const body = rows.map((row) => element("tr", {}, ...row.map((each) => element("td", {}, each))));
  target.replaceChildren(element("h2", {}, title), element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

function show(frame) {
  byId("nothing").hidden = !frame.nothing;
  const members = frame.members ?? (frame.nothing ? [] : [frame]);
  byId("members-title").textContent = frame.members ? `Members of pool ${frame.pool}` : "Node";
  byId("members").replaceChildren(...members.map(frame.members ? memberCard : nodeCard));
  const operations = Object.entries(frame.operations ?? {}).map(([name, each]) => [name, perSecond(each.per_s), seconds(each.p50_s), seconds(each.p90_s), seconds(each.p99_s)]);
  table(byId("operations"), "Calls", ["call", "rate", "p50", "p90", "p99"], operations);
  const byTier = (counts, text) => Object.entries(counts ?? {}).map(([tier, count]) => `${tier} ${known(count) ? text(count) : "-"}`).join(", ");
  const tenants = (frame.tenants ?? []).map((each) => [each.tenant || "(none)", byTier(each.pages, plain), bytes(each.bytes), byTier(each.quota_bytes, bytes)]);
  table(byId("tenants"), "Tenants", ["tenant", "pages", "used", "quota"], tenants);
  showRecent(members.flatMap((each) => each.recent ?? []));
  const moved = Object.values(frame.tiers ?? {});
  if (moved.length) {
    const sum = (name) => moved.reduce((total, tier) => total + (tier[name] ?? 0), 0);
    recent = [...recent, [Date.now() / 1000, sum("in_bytes_per_s"), sum("out_bytes_per_s")]].slice(-120);
    lines(byId("rates"), "Bytes moved between tiers, last minutes", recent.map((each) => each[0]), [{ name: "in", values: recent.map((each) => each[1]) }, { name: "out", values: recent.map((each) => each[2]) }], speed, { label: clock });
  }
}

function percentile(values, share) {
  const sorted = values.filter(known).sort((one, other) => one - other);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

function showRecent(requests) {
  const newest = [...requests].sort((one, other) => one.ended_ago_s - other.ended_ago_s);
  const rows = newest.slice(0, 20).map((each) => {
    const route = each.route ?? {};
    const found = Object.entries(each.cached_tokens ?? {}).filter(([, count]) => count > 0).map(([tier, count]) => `${tier} ${plain(count)}`);
    const where = !route.computes ? "-" : route.computes === route.answers ? route.computes : `${route.computes} for ${route.answers}`;
    const why = route.computes ? `waits ${seconds(route.wait_s)}, loads ${seconds(route.move_s)}${route.donor ? ` from ${route.donor}` : ""}, computes ${seconds(route.prefill_s)}` : "-";
    return [seconds(each.ended_ago_s) + " ago", each.outcome ?? "", each.tenant ?? "", plain(each.prompt_tokens), found.join(", ") || "nothing", where, why, `${seconds(each.predicted_ttft_s || null)} / ${seconds(each.ttft_s || null)}`, plain(each.completion_tokens)];
  });
  const first = newest.map((each) => each.ttft_s || null);
  const later = newest.map((each) => (each.completion_tokens > 1 && each.ttft_s ? (each.took_s - each.ttft_s) / (each.completion_tokens - 1) : null));
  const summary = `Last requests: first token p50 ${seconds(percentile(first, 0.5))}, p90 ${seconds(percentile(first, 0.9))}; later tokens p50 ${seconds(percentile(later, 0.5))}, p90 ${seconds(percentile(later, 0.9))}`;
  table(byId("recent"), summary, ["ended", "outcome", "tenant", "prompt", "found, tokens", "engine", "predicted when routed", "first token, predicted / real", "answer"], rows);
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

function showHistory() {
  if (!history.length) return;
  const x = history.map((each) => each.at);
  const tiers = [...new Set(history.flatMap((each) => Object.keys(each.hits ?? {})))];
  const known_ = (each, tier) => each.hits?.[tier] ?? null;
  const isNode = "missed" in history[history.length - 1];
  const total = (each) => tiers.reduce((sum, tier) => sum + (known_(each, tier) ?? 0), 0) + (each.missed ?? 0);
  const series = tiers.map((tier) => ({ name: tier, values: history.map((each) => (isNode ? (total(each) > 0 ? known_(each, tier) / total(each) : null) : known_(each, tier))) }));
  lines(byId("hits"), isNode ? "Hit ratio by tier, last hour" : "Pages reused by tier, last hour", x, series, isNode ? percent : (value) => perSecond(value).replace("/s", "pages/s"), isNode ? { top: 1, label: clock } : { label: clock });
  if (!isNode) lines(byId("rates"), "Requests, last hour", x, [{ name: "routed", values: history.map((each) => each.routed ?? null) }, { name: "refused", values: history.map((each) => each.refused ?? null) }], perSecond, { label: clock });
}

const events = new EventSource("events");
events.onmessage = (message) => {
  const said = JSON.parse(message.data);
  heardMs = Date.now();
  if (said.history) history = said.history;
  else if (said.point && said.point.at !== history[history.length - 1]?.at) history = [...history, said.point].slice(-HOUR);
  show(said.frame);
  showHistory();
};
setInterval(() => {
  const ago = (Date.now() - heardMs) / 1000;
  byId("heard").textContent = !heardMs ? "connecting" : ago > LATE_S ? `no news for ${Math.round(ago)} s` : "live";
}, 500);
