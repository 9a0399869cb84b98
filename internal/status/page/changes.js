// SPDX-License-Identifier: Apache-2.0
// What can be changed from the page: the requests of the command line, with its words.
import { el, clean, guests } from './format.js';
import { ask } from './stream.js';

// What this page may do, and the reason if it may change nothing.
export const may = { change: false, why: '', host: false };

// The requests that were made at run time, each with its effect.
export let requests = [];
let generation = -1;

// begin forgets what an earlier run of the server said.
export function begin({ role, changes, why }) {
  Object.assign(may, { change: changes === true, why: why ?? '', host: role === 'host' });
  generation = -1;
}

// take keeps a list of the server unless a newer one came before it.
export function take(list) {
  if (list.generation < generation) return;
  generation = list.generation;
  requests = list.requests;
}

// send asks for a change when earlier ones have been answered. It returns {lines} that say
// what was done, or {error}.
export function send(request) {
  last = last.then(() => post(request));
  return last;
}

let last = Promise.resolve();

async function post(request) {
  let response;
  let change;
  try {
    response = await ask('/v1/forwards', {
      method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(request),
    });
    if (!response.ok) return { error: clean((await response.text()).trim()) || `refused with status ${response.status}` };
    change = await response.json();
  } catch {
    return { error: 'no answer: the connection was lost, and the change may have been made' };
  }
  take(change);
  return { lines: said(request, change) };
}

const targets = ['protocol', 'port', 'demand', 'owner', 'all', 'guest'];

// selects reports whether two requests select the same.
const selects = (a, b) => targets.every((k) => a[k] === b[k]);

// of what was added, made finds the effect.
const made = (change, q) => change.requests.find(({ request }) => request.op === q.op && selects(request, q));

// target names what a request selects, as the command line does.
export function target({ protocol, port, demand, owner, guest }) {
  const what = demand ?? (port !== undefined ? `${port}/${protocol}` : owner !== undefined ? `owner ${owner}` : 'all');
  return guest === undefined ? what : `${what} of guest ${guest}`;
}

// title names a request.
export const title = (q) => `${q.op} ${target(q)}`;

function said(request, change) {
  if (request.op === 'expose') return exposed(request, change);
  const lines = change.removed.map((q) => `Removed: ${clean(title(q))}`);
  for (const q of change.added) {
    const r = made(change, q);
    lines.push(`Added: ${clean(title(q))}${r === undefined ? '' : inParentheses(r)}`);
  }
  if (lines.length === 0) lines.push('Nothing to change.');
  if (change.closed) lines.push(`Still closed: ${clean(change.closed)}`);
  return lines;
}

// inParentheses says of a request that was added its state, unless that is as asked for, and its
// note.
function inParentheses({ request, state, reason, note }) {
  const list = [];
  if (request.op === 'deny') list.push(reason);
  else if (request.op !== 'expose' && state !== '' && state !== 'active') {
    list.push(reason.startsWith(`${state} `) ? reason : `${state}: ${reason || 'it is being opened'}`); // "denied by rule 1"
  }
  const text = [...list, note].filter(Boolean).map(clean).join('; ');
  return text && ` (${text})`;
}

function exposed({ port, protocol }, change) {
  const r = made(change, change.added[0]);
  if (r === undefined) return ['It was undone again meanwhile: try again.'];
  const [open, always, until] = [change.open ?? [], change.always ?? [], when(r.until)];
  const lines = [];
  if (always.length > 0) {
    lines.push(`${port}/${protocol} is open to other machines without an end, by the configuration or because the agent asks for it: ${always.join(', ')}`);
  }
  if (open.length > 0) lines.push(`${port}/${protocol} is open to other machines until ${when(change.until)}: ${open.join(', ')}`);
  else if (always.length === 0) {
    const why = [r.reason || 'a rule of the configuration, or bind, keeps it on the loopback', r.note].filter(Boolean).map(clean).join('; ');
    lines.push(`${port}/${protocol} is not open to other machines: ${why}. If that changes, it is, until ${until}.`);
  }
  if (open.length + always.length > 0) {
    if (r.note) lines.push(clean(r.note));
    lines.push('A firewall of the host may still refuse others.');
  }
  return lines;
}

// when is a time in words, with its day if that is not today.
export function when(time) {
  const t = new Date(time);
  return t.toDateString() === new Date().toDateString() ? t.toLocaleTimeString() : t.toLocaleString();
}

// of limits a request to a row's guest where there are several.
export function of(p) { return may.host && guests.size > 1 ? { guest: p.guest } : {}; }

// about returns the requests that name a row, and the one that decides it.
export function about(p) {
  return requests.filter(({ request, undo }) => names(undo, p) || decides(title(request), p));
}

// exact is the field of a request that names a row alone: what was asked for by name shares
// its port with others.
export function exact(p) { return p.demands?.length > 0 ? 'demand' : 'port'; }

function names(undo, p) {
  if (undo.guest && undo.guest !== p.guest) return false;
  if (undo.demand !== undefined) return p.demands?.includes(undo.demand) === true;
  return undo.port === p.port && undo.protocol === p.protocol && (exact(p) === 'port' || undo.op === 'hide');
}

function decides(name, p) { return p.rule?.endsWith(` (${name})`) || p.reason.endsWith(` (${name})`); }

// ownerRequest selects the ports of a row's owner, or is null where a request cannot name
// this owner alone: its name is a pattern there.
export function ownerRequest(p) {
  const { kind, name } = p.owner;
  if (!['container', 'service'].includes(kind) || name === '' || /[*?]/.test(name) || name !== clean(name)) return null;
  return { owner: name, ...of(p) };
}

// pressed has a button make a change. The second click of a double click is none.
export function pressed(button, act) { button.onclick = (e) => { if (e.detail < 2) act(); }; }

// denied finds the request that denies just what another one selects.
export function denied(target) {
  return requests.find(({ request }) => request.op === 'deny' && selects(request, target));
}

// Said is where the result of a change is told.
export class Said {
  // Two elements, as what is announced at once must not be what is announced in turn.
  done = el('p', { class: 'said', role: 'status' });
  failed = el('p', { class: 'failed', role: 'alert' });

  clear() { this.done.replaceChildren(); this.failed.replaceChildren(); }

  tell({ lines, error }) {
    this.clear();
    if (error !== undefined) this.failed.append(error);
    else this.done.append(...lines.map((l) => el('span', {}, l)));
  }
}
