// SPDX-License-Identifier: Apache-2.0
// The requests that were made at run time, as `fairlead forward ls` lists them.
import { el, clean } from './format.js';
import { may, requests, denied, send, pressed, title, when, Said } from './changes.js';

const panel = document.getElementById('added');
const list = panel.querySelector('ul');
const all = document.getElementById('deny-all');
const said = new Said();
panel.append(said.done, said.failed);

let changed = () => {};

// onChange is called after a change was made.
export function onChange(f) { changed = f; }

// run makes a change and tells its result in the panel.
export async function run(request) {
  said.tell(await send(request));
  changed();
}

pressed(all, () => {
  run(denied({ all: true })?.undo ?? { op: 'deny', all: true });
});

// draw shows the requests, beside the ports that they name.
export function draw(ports) {
  all.hidden = !may.change;
  all.textContent = denied({ all: true }) ? 'Allow all' : 'Deny all';
  const focused = list.contains(document.activeElement);
  const had = new Map([...list.children].map((li) => [li.dataset.rule, li]));
  const next = requests.map((r) => {
    const id = title(r.request);
    const li = had.get(id) ?? el('li', { 'data-rule': id }, el('code', {}, clean(id)), el('span', { class: 'dim' }), el('button', { type: 'button' }, 'Undo'));
    const [, note, button] = li.children;
    li.dataset.action = r.request.op;
    note.textContent = about(r, ports);
    button.hidden = !may.change;
    button.ariaLabel = `Undo ${clean(id)}`;
    button.title = r.undo.op === 'rm' ? 'Undoes all that was added for this port' : '';
    pressed(button, () => run(r.undo));
    return li;
  });
  for (const li of had.values()) if (!next.includes(li)) li.remove();
  next.forEach((li, i) => { if (list.children[i] !== li) list.insertBefore(li, list.children[i] ?? null); });
  if (focused && !list.contains(document.activeElement)) panel.focus();
  panel.hidden = requests.length === 0 && said.done.textContent === '' && said.failed.textContent === '';
  panel.querySelector('h2').hidden = requests.length === 0;
}

function about({ request, until }, ports) {
  const notes = [];
  if (request.to !== undefined) notes.push(`to host port ${request.to}`);
  if (until) notes.push(`open to other machines until ${when(until)}`);
  if (request.op !== 'deny') notes.push(...absent(request, ports));
  return notes.join('; ');
}

// absent returns why there is no port that a request names; nothing if there is one.
function absent({ port, protocol, demand, guest }, ports) {
  const all = ports.filter((p) => !guest || /[*?]/.test(guest) || guest === p.guest);
  if (all.some((p) => !p.waits && (demand === undefined ? p.port === port && p.protocol === protocol : p.demands?.includes(demand)))) return [];
  const waits = all.find((p) => demand !== undefined && p.waits === demand);
  if (waits) return [clean(waits.reason)];
  return [demand !== undefined && may.host ? 'the guest publishes nothing by this name: add the forward there' : 'nothing serves it yet'];
}
