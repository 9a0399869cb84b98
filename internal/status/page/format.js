// SPDX-License-Identifier: Apache-2.0
// Formatting of values. Names come from guests: they only become text nodes.

export const states = ['active', 'pending', 'conflict', 'failed', 'denied'];

// el makes an element; children are elements or text.
export function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props)) {
    if (v === undefined || v === null || v === false) continue;
    if (k === 'class') e.className = v;
    else if (k.startsWith('data-') || k.startsWith('aria-') || k === 'role') e.setAttribute(k, v);
    else e[k] = v;
  }
  e.append(...children.filter((c) => c !== undefined && c !== null && c !== false));
  return e;
}

const ns = 'http://www.w3.org/2000/svg';

export function svg(tag, attrs = {}) {
  const e = document.createElementNS(ns, tag);
  for (const [k, v] of Object.entries(attrs)) e.setAttribute(k, v);
  return e;
}

// clean makes a hostile name visible: control characters and those that change the
// direction of writing are shown escaped.
export function clean(s) {
  return String(s ?? '').replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu, (c) =>
    `\\u{${c.codePointAt(0).toString(16)}}`);
}

// lines cleans a text that has line breaks of our own.
export function lines(s) { return s.split('\n').map(clean).join('\n'); }

export function age(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 48 * 3600) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

export function seconds(s) {
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${(s * 1e3).toPrecision(2)} ms`;
  return `${s.toPrecision(2)} s`;
}

export function bytes(n) {
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (n < 1000 || unit === 'GB') return `${n < 10 && unit !== 'B' ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
}

export function joined(address, port) {
  return address.includes(':') ? `[${address}]:${port}` : `${address}:${port}`;
}

// inGuest returns where a port is in the guest: the name in place of an address that is not
// known yet.
export function inGuest(p) { return p.waits ? clean(p.waits) : joined(p.both ? '*' : p.address, p.port); }

// guests are the names of a host's guests, by what the rows have.
export const guests = new Map();

// keyOf identifies a row as the stream does.
export function keyOf(p) {
  return `${p.guest ?? ''}|${p.protocol}|${p.address}|${p.port}${p.unpublished ? '|unpublished' : ''}${p.waits ? `|${p.waits}` : ''}`;
}

const wildcards = { '0.0.0.0': '::', '::': '0.0.0.0' };

// otherKey identifies the row of the other wildcard of a port; null if it has none.
export function otherKey(p) {
  return p.address in wildcards && !p.waits ? keyOf({ ...p, address: wildcards[p.address] }) : null;
}

// bothOf returns one row for both wildcards of one owner, with the better state; null if they are
// of two owners, or one alone is denied.
export function bothOf(four, six) {
  const owner = ({ owner: o }) => JSON.stringify([o.kind, o.id, o.name, o.namespace ?? '', o.cluster ?? '']);
  if (owner(four) !== owner(six) || four.lost !== six.lost || (four.state === 'denied') !== (six.state === 'denied')) return null;
  const best = states.indexOf(six.state) < states.indexOf(four.state) || (six.state === four.state && four.reason === '') ? six : four;
  const old = Date.parse(six.since) < Date.parse(four.since) ? six : four;
  return {
    ...four, both: true, state: best.state, reason: best.reason, since: old.since, sinceAtLeast: four.sinceAtLeast || six.sinceAtLeast,
    hostAddresses: [...four.hostAddresses, ...six.hostAddresses], outcomes: [...four.outcomes, ...six.outcomes], origins: [...four.origins, ...six.origins],
    exposedUntil: Date.parse(four.exposedUntil) > Date.parse(six.exposedUntil) ? four.exposedUntil : six.exposedUntil ?? four.exposedUntil,
  };
}

// stateOf is what is shown as the state of a row.
export function stateOf(p) { return p.lost && p.state === 'active' ? 'lost' : p.state; }

export function ownerName(owner) {
  if (owner.name === '' && owner.id === '') return '';
  const name = clean(owner.name || owner.id);
  return owner.namespace && owner.kind !== 'process' && !name.startsWith(`${clean(owner.namespace)}/`)
    ? `${clean(owner.namespace)}/${name}` : name;
}

// hostAddresses returns where a port is, or would be, reachable.
export function hostAddresses(p) {
  if (p.hostAddresses.length > 0) return p.hostAddresses;
  return [...new Set(p.outcomes.map((o) => o.hostAddress).filter((a) => a !== ''))];
}
