// SPDX-License-Identifier: Apache-2.0
// The detail of one port: why it is, or is not, reachable.
import { el, clean, lines, age, inGuest, ownerName, hostAddresses, keyOf, guests } from './format.js';
import { ask } from './stream.js';
import * as names from './names.js';
import * as actions from './actions.js';

const box = document.getElementById('detail');
const title = el('h2');
const badge = el('span', { class: 'badge' });
const content = el('div');
box.append(
  el('header', {}, title, badge, el('button', { class: 'icon close', type: 'button', title: 'Close (Esc)', 'aria-label': 'Close', onclick: close }, '×')),
  actions.box, content);

let shown = null; // {key, p, gone, report}
let question = 0; // the latest query; answers to older ones are dropped
let later = 0;

// Features of the server.
export const can = { explain: false, names: false };

export function openKey() { return shown?.key ?? null; }

// show opens or updates the detail of p.
export function show(p, { now, gone = null, onClose }) {
  const key = keyOf(p);
  const same = shown?.key === key;
  const changed = !same || JSON.stringify(shown.p) !== JSON.stringify(p) || shown.gone !== gone;
  shown = { key, p, gone, onClose, now, report: same ? shown.report : null };
  if (!changed) return;
  draw();
  box.hidden = false;
  document.body.dataset.detail = 'open';
  clearTimeout(later);
  later = setTimeout(() => { explain(); if (can.names) names.show(); }, same ? 300 : 0);
}

export function close() {
  if (shown === null) return;
  const { onClose } = shown;
  clearTimeout(later);
  question++;
  shown = null;
  box.hidden = true;
  content.replaceChildren();
  delete document.body.dataset.detail;
  onClose?.();
}

// explain asks the server. Only method POST lets it connect to the port.
async function explain(method = 'GET') {
  if (shown === null || !can.explain) return;
  const { key, p } = shown;
  const mine = ++question;
  let report = null;
  try {
    const response = await ask(`/v1/explain?port=${p.port}/${p.protocol}`, { method });
    if (response.ok) report = await response.json();
  } catch {
    // Without an answer the table's data is shown.
  }
  if (mine !== question || shown?.key !== key || report === null) return;
  shown.report = report;
  draw();
}

function draw() {
  const { p, gone } = shown;
  const state = gone ? 'gone' : p.state;
  title.replaceChildren(`${p.port}`, el('span', { class: 'proto' }, p.protocol));
  badge.dataset.state = state;
  badge.textContent = state;
  actions.show(p, Boolean(gone));
  content.replaceChildren(
    why(),
    facts(),
    el('details', {}, el('summary', {}, 'As JSON'), el('pre', { tabIndex: 0 }, lines(JSON.stringify(p, null, 2)))),
  );
}

function why() {
  const { p, report, gone } = shown;
  const name = `${p.protocol} ${inGuest(p)}`;
  const chain = gone ? null : report?.publications?.find((c) => c.publication === name && (c.guest ?? '') === (p.guest ?? ''));
  const steps = chain?.steps ?? known(p);
  const summary = gone ? 'Closed: nothing in the guest serves or declares this port any more.' : p.waits ? `Waits: ${p.reason}` : chain?.summary;
  const next = chain?.next;
  const part = el('section', { class: 'why' }, el('h3', {}, 'Why'));
  if (summary) part.append(el('p', { class: 'summary' }, clean(summary)));
  if (next) part.append(el('p', { class: 'next' }, el('b', {}, 'Next: '), clean(next)));
  part.append(el('ol', { class: 'steps' }, ...steps.map((s) =>
    el('li', { 'data-mark': s.verdict },
      el('b', {}, clean(s.step)), ' ', el('span', {}, clean(s.text)),
      s.since ? el('time', { class: 'dim', dateTime: s.since }, ` for ${age(shown.now - Date.parse(s.since))}`) : null))));
  for (const n of report?.related ?? []) part.append(el('p', { class: 'near' }, el('b', {}, 'Related: '), clean(n.text)));
  for (const m of report?.missing ?? []) part.append(el('p', { class: 'near' }, el('b', {}, 'Not checked: '), clean(m)));
  if (report !== null && p.protocol === 'tcp' && !gone && p.state !== 'denied' && !p.waits && !p.unpublished && !p.lost) {
    part.append(el('button', { type: 'button', onclick: () => explain('POST') }, 'Test the connection'));
  }
  return part;
}

// known is the chain as far as the table's data shows it.
function known(p) {
  const steps = p.origins.map((o) => ({ step: 'seen', verdict: 'ok', text: `by ${o.source}${o.detail ? `: ${o.detail}` : ''}`, since: o.since }));
  if (p.rule) steps.push({ step: 'rule', verdict: p.state === 'denied' ? 'failing' : 'ok', text: p.rule });
  if (p.dialTarget) steps.push({ step: 'dial', verdict: 'ok', text: p.dialTarget });
  const verdict = { active: 'ok', pending: 'skipped' };
  for (const o of p.outcomes) {
    steps.push({ step: `sink ${o.sink}`, verdict: verdict[o.state] ?? 'failing', text: [o.state, o.hostAddress, o.reason].filter(Boolean).join(' · '), since: o.since });
  }
  return steps;
}

function facts() {
  const { p } = shown;
  const list = el('dl', { class: 'facts' });
  const fact = (name, ...value) => list.append(el('dt', {}, name), el('dd', {}, ...value));
  const at = hostAddresses(p);
  if (at.length > 0) fact('On the host', ...at.map((a) => el('div', {}, address(p, a), copyButton(a))));
  if (p.url) fact('Name', el('a', { href: p.url, target: '_blank', rel: 'noopener noreferrer' }, clean(p.url)));
  fact('In the guest', el('code', {}, inGuest(p)), p.both ? ' over IPv4 and IPv6' : null);
  if (p.guest) fact('Guest', clean(guests.get(p.guest) ?? p.guest));
  if (p.dialTarget) fact('Dialled', el('code', {}, p.dialTarget));
  fact('Owner', `${p.owner.kind} `, el('b', {}, ownerName(p.owner)), p.owner.id && p.owner.id !== p.owner.name ? el('code', { class: 'id' }, ` ${clean(p.owner.id)}`) : null);
  if (p.owner.cluster) fact('Cluster', clean(p.owner.cluster));
  const labels = Object.entries(p.owner.labels ?? {});
  for (const [k, v] of labels.slice(0, 64)) fact('Label', el('code', {}, `${clean(k)}=${clean(v.length > 1024 ? v.slice(0, 1024) + '…' : v)}`));
  if (labels.length > 64) fact('Labels', `and ${labels.length - 64} more`);
  if (p.owner.labelsOmitted) fact('Labels', 'others were left out by the guest: too many or too long');
  if (p.owner.nameCut) fact('Name', 'cut by the guest: too long');
  if (p.rule) fact('Rule', clean(p.rule));
  fact('Since', `${p.sinceAtLeast ? 'before ' : ''}${new Date(p.since).toLocaleString()}`);
  return list;
}

// address is a link if a browser may be able to open it.
export function address(p, a) {
  if (p.protocol !== 'tcp' || p.state !== 'active') return el('code', {}, clean(a));
  return el('a', { href: actions.urlAt(p, a), target: '_blank', rel: 'noopener noreferrer' }, clean(a));
}

function copyButton(a) {
  const b = el('button', { class: 'copy', type: 'button', 'aria-label': `Copy ${a}` }, 'copy');
  b.onclick = async () => {
    try {
      await navigator.clipboard.writeText(a);
      b.textContent = 'copied';
    } catch {
      b.textContent = 'not allowed';
    }
    setTimeout(() => { b.textContent = 'copy'; }, 1500);
  };
  return b;
}
