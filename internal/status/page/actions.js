// SPDX-License-Identifier: Apache-2.0
// What can be done with one port, in its detail. Its elements outlive updates of the row, so
// that what is typed or has the focus remains.
import { el, clean, ownerName, keyOf } from './format.js';
import { may, about, exact, of, ownerRequest, denied, send, pressed, target as nameOf, title, Said } from './changes.js';

const said = new Said();
const links = el('div', { class: 'buttons' });
const buttons = el('div', { class: 'buttons' });
const hint = el('p', { class: 'hint' });

const port = el('input', { type: 'number', min: 1, max: 65535, step: 1, required: true, inputMode: 'numeric' });
const forward = el('form', { class: 'act', 'data-act': 'forward' },
  el('label', {}, 'Another host port ', port), el('button', {}, 'Forward'));

const times = el('select', {}, ...[['15 minutes', 900], ['1 hour', 3600], ['2 hours', 7200], ['8 hours', 28800]].map(([text, value]) =>
  el('option', { value, selected: value === 3600 }, text)));
const expose = el('form', { class: 'act', 'data-act': 'expose' },
  el('label', {}, 'To other machines for ', times), el('button', {}, 'Expose'));

export const box = el('section', { class: 'actions', 'aria-label': 'Change', tabIndex: -1 },
  links, buttons, forward, expose, hint, said.done, said.failed);

let p = null;
let gone = false;
let running = 0;
let changed = () => {};

// onChange is called after a change was made.
export function onChange(f) { changed = f; }

async function run(request) {
  const asked = p;
  running++;
  box.ariaBusy = 'true';
  const result = await send(request);
  if (--running === 0) box.ariaBusy = null;
  changed();
  if (key(p) === key(asked)) said.tell(result);
}

const key = keyOf;

// target selects the port of the row, by name if it was asked for so.
const target = () => ({ ...exact(p) === 'demand' ? { demand: p.demands[0] } : { protocol: p.protocol, port: p.port }, ...of(p) });

forward.addEventListener('submit', (e) => { e.preventDefault(); run({ op: 'forward', ...target(), to: Number(port.value) }); });
expose.addEventListener('submit', (e) => { e.preventDefault(); run({ op: 'expose', ...target(), seconds: Number(times.value) }); });

// show shows what can be done with a row.
export function show(row, isGone) {
  if (p === null || key(p) !== key(row)) {
    said.clear();
    port.value = '';
  }
  p = row;
  gone = isGone;
  draw();
}

export function draw() {
  if (p === null) return;
  const url = gone ? null : urlOf(p);
  links.hidden = url === null;
  if (url !== null && links.firstChild?.href !== url) {
    links.replaceChildren(el('a', { class: 'button', href: url, target: '_blank', rel: 'noopener noreferrer' }, 'Open in browser'));
  }
  const can = may.change && !gone;
  const here = can ? about(p) : [];
  const is = (op, its = true) => here.find(({ undo }) => undo.op === op && (undo[exact(p)] !== undefined) === its);
  const own = can && !p.unpublished && !p.waits;
  const open = own && p.state !== 'denied';
  put([...own ? main(is) : [], ...here.filter((r) => p.waits || undone.has(r.undo.op) || r.undo[exact(p)] === undefined).map((r) => ({
    id: title(r.request), label: undoing(r), title: `Undoes what was added: ${clean(title(r.request))}`, request: r.undo,
  }))]);
  forward.hidden = !open || is('rm') !== undefined;
  expose.hidden = !open || !may.host || exact(p) !== 'port';
  hint.textContent = gone ? '' : why(here);
  hint.hidden = hint.textContent === '';
  box.hidden = links.hidden && hint.hidden && !can;
}

// undone are the requests that undo what has no button of its own.
const undone = new Set(['rm', 'hide']);

function main(is) {
  const list = [];
  const deny = is('allow');
  if (deny) list.push({ id: 'deny', label: 'Allow', request: deny.undo });
  else if (p.state !== 'denied') list.push({ id: 'deny', label: 'Deny', title: 'Close it until it is allowed again; its connections are reset', request: { op: 'deny', ...target() } });
  else if (exact(p) === 'port' && !is('allow', false)) list.push({ id: 'deny', label: 'Allow', request: { op: 'allow', ...target() } });
  const owner = ownerRequest(p);
  if (owner !== null && denied(owner) === undefined) {
    list.push({ id: 'owner', label: `Deny all of ${ownerName(p.owner)}`, request: { op: 'deny', ...owner } });
  }
  return list;
}

function undoing({ request }) {
  switch (request.op) {
    case 'expose': return 'End the exposure';
    case 'deny': return `Allow ${clean(request.owner ?? nameOf({ ...request, guest: undefined }))}`;
    case 'allow': return 'Undo allow';
    default: return request.to === undefined ? 'Undo the forward' : `Undo the forward to ${request.to}`;
  }
}

// why says what cannot be done here.
function why(here) {
  if (p.waits) return 'Nobody published this port: it is asked for by name, and opens when it is there. `fairlead forward ls` lists what is asked for.';
  if (!may.change) return may.why === '' ? '' : clean(may.why);
  if (p.unpublished) return 'The guest does not publish this port: change that in the guest, by `fairlead allow` or the page there.';
  if (!may.host && p.state === 'active' && here.length === 0) return 'Only a host opens ports to other machines, and to other host ports on a conflict: see its page.';
  return '';
}

let lost = null; // id of the button that had the focus when it went

// put makes the buttons those of a list. Those that remain are the same elements. The focus
// of one that goes waits for it, as a port passes through other states.
function put(list) {
  const had = new Map([...buttons.children].map((b) => [b.dataset.id, b]));
  const focused = buttons.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const next = list.map(({ id, label, title, request }) => {
    const b = had.get(id) ?? el('button', { type: 'button', 'data-id': id });
    if (b.textContent !== label) b.textContent = label;
    b.title = title ?? '';
    pressed(b, () => run(request));
    return b;
  });
  for (const b of had.values()) if (!next.includes(b)) b.remove();
  next.forEach((b, i) => { if (buttons.children[i] !== b) buttons.insertBefore(b, buttons.children[i] ?? null); });
  buttons.hidden = list.length === 0;
  if (focused !== null && !buttons.contains(document.activeElement)) {
    lost = focused;
    box.focus();
  }
  const back = next.find((b) => b.dataset.id === lost);
  if (back !== undefined) {
    if (document.activeElement === box) back.focus();
    lost = null;
  }
}

// urlOf returns where a browser opens a port: at the loopback if it is reachable there.
export function urlOf(q) {
  if (q.protocol !== 'tcp' || q.state !== 'active' || q.lost || q.hostAddresses.length === 0) return null;
  const near = (a) => (/^(127\.|0\.0\.0\.0:)/.test(a) ? 3 : /^\[::1?\]:/.test(a) ? 2 : a.startsWith('[') ? 0 : 1);
  return urlAt(q, q.hostAddresses.reduce((a, b) => (near(b) > near(a) ? b : a)));
}

export function urlAt(q, a) {
  const at = a.replace(/^0\.0\.0\.0:/, '127.0.0.1:').replace(/^\[::\]:/, '[::1]:');
  return `${q.port === 443 ? 'https' : 'http'}://${encodeURI(at)}/`;
}
