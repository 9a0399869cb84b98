// SPDX-License-Identifier: Apache-2.0
// The names by which a host leads browsers to ports, where it serves any: where their list is,
// and what is not served. The URL of a port is in its row.
import { el, clean } from './format.js';
import { ask } from './stream.js';

const box = document.getElementById('names');

// show asks for the names and draws. Without an answer what is shown remains.
export async function show() {
  let report;
  try {
    const response = await ask('/v1/names');
    if (!response.ok) return;
    report = await response.json();
  } catch {
    return;
  }
  draw(report);
}

function draw({ names, listeners, url }) {
  box.hidden = listeners.length === 0;
  const closed = listeners.filter((l) => !l.open).map((l) => `${l.protocol} names are not served at ${l.address}: ${clean(l.error) || 'not tried yet'}`);
  box.replaceChildren(
    ...url === undefined ? [] : [el('b', {}, 'Names'), ' ', el('a', { href: url, target: '_blank', rel: 'noopener noreferrer' }, clean(url)), ' ',
      el('span', { class: 'dim' }, `${names.length} ${names.length === 1 ? 'owner has' : 'owners have'} one`)],
    ...closed.map((line) => el('span', { class: 'failed' }, line)));
}
