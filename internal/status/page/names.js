// SPDX-License-Identifier: Apache-2.0
// The names by which a host leads browsers to ports, where it serves any.
import { el, clean } from './format.js';
import { ask } from './stream.js';

const box = document.getElementById('names');

// read asks for the names, and returns them with the port of the listener that a browser of
// this machine reaches: null if there is none.
async function read() {
  let report;
  try {
    const response = await ask('/v1/names');
    if (!response.ok) return null;
    report = await response.json();
  } catch {
    return null; // without an answer none are shown
  }
  const http = report.listeners.filter((l) => l.protocol === 'http');
  const at = http.find((l) => l.open && /^(127\.0\.0\.1|\[::1\]|0\.0\.0\.0|\[::\]):/.test(l.address));
  draw(report, http, at);
  return at === undefined ? null : { report, port: at.address.slice(at.address.lastIndexOf(':') + 1) };
}

export const show = read;

function draw({ names, listeners }, http, at) {
  box.hidden = listeners.length === 0;
  const closed = listeners.filter((l) => !l.open).map((l) => `${l.protocol} names are not served at ${l.address}: ${clean(l.error) || 'not tried yet'}`);
  const list = at === undefined ? null : url('localhost', at.address.slice(at.address.lastIndexOf(':') + 1));
  box.replaceChildren(
    ...list === null ? [] : [el('b', {}, 'Names'), ' ', el('a', { href: list, target: '_blank', rel: 'noopener noreferrer' }, list), ' ',
      el('span', { class: 'dim' }, `${names.length} ${names.length === 1 ? 'owner has' : 'owners have'} one`)],
    ...closed.map((line) => el('span', { class: 'failed' }, line)));
}

function url(name, port) { return `http://${encodeURI(name)}${port === '80' ? '' : `:${port}`}/`; }

// nameOf returns the URL by which a port has a name, or null.
export async function nameOf({ protocol, port, owner, guest, state }) {
  const known = await read();
  if (known === null || protocol !== 'tcp' || state === 'denied') return null;
  const e = known.report.names.find((n) => n.guest === guest && n.kind === owner.kind && n.ownerName === owner.name
    && (n.namespace ?? '') === (owner.namespace ?? '') && n.ports.includes(port));
  if (e === undefined || e.names.length === 0) return null;
  return url(e.ports.length > 1 ? `${port}.${e.names[0]}` : e.names[0], known.port);
}
