// SPDX-License-Identifier: Apache-2.0
import { el, clean, states, guests } from './format.js';
import { events, hasToken, takeToken, Refused } from './stream.js';
import { Latency, Flows } from './charts.js';
import { Table } from './table.js';
import * as detail from './detail.js';
import * as actions from './actions.js';
import * as added from './added.js';
import * as changes from './changes.js';
import * as names from './names.js';

const $ = (id) => document.getElementById(id);
const search = $('search');
const latency = new Latency($('latency'));
const flows = new Flows($('flows'));

// Ages use the server's clock.
let ahead = 0;
const now = () => Date.now() + ahead;

const table = new Table($('ports'), { more: $('more'), empty: $('empty'), onChange: changed, onOpen: open, headOf });

// Drawing: at most once per frame.
let due = false;
function changed(cleared = false) {
  if (cleared) search.value = '';
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; draw(); });
}

function draw() {
  const rows = table.draw(now());
  const counts = table.counts();
  drawFilters(counts);
  added.draw([...table.rows.values()].filter((r) => !r.gone).map((r) => r.p));
  actions.draw();
  const shown = rows.filter((r) => !r.gone).length;
  $('count').textContent = shown === counts.all ? `${counts.all} ${counts.all === 1 ? 'port' : 'ports'}` : `${shown} of ${counts.all}`;
  document.title = `${counts.all} · fairlead`;
  const key = detail.openKey();
  const row = key === null ? undefined : table.rows.get(key);
  if (row !== undefined) showDetail(row);
}

function drawFilters(counts) {
  const chip = (kind, value, label = value) => {
    const n = counts[kind][value] ?? 0;
    const name = `${kind}:${value}`;
    const off = table.hiddenBy.has(name);
    return { name, n, off, value, kind, label };
  };
  const chips = [...states.map((s) => chip('state', s)), ...['tcp', 'udp'].map((p) => chip('protocol', p))];
  const kinds = owners.filter((k) => counts.owner[k] > 0 || table.hiddenBy.has(`owner:${k}`));
  if (kinds.length > 1) chips.push(...kinds.map((k) => chip('owner', k, k === 'unknown' ? 'no owner' : k)));
  if (guests.size > 1) chips.push(...[...guests].map(([guest, title]) => chip('guest', guest, clean(title))));
  if (counts.published.no > 0 || document.body.dataset.role === 'host') chips.push(chip('published', 'no', 'not published'));
  const box = $('filters');
  const names = chips.map((c) => `${c.name} ${c.label}`).join('\n');
  if (box.dataset.names !== names) {
    box.dataset.names = names;
    box.replaceChildren(...chips.map((c) => el('button', {
      type: 'button', class: 'chip', 'data-filter': c.name, 'data-state': c.kind === 'state' ? c.value : null,
      title: 'Click to hide or show; double-click to show only these',
      onclick: () => toggle(c.name), ondblclick: () => only(c.kind, c.value),
    }, el('span', {}, c.label), el('b', {}))));
  }
  chips.forEach((c, i) => {
    const b = box.children[i];
    b.ariaPressed = String(!c.off);
    b.lastChild.textContent = String(c.n);
    b.dataset.none = c.n === 0 ? 'yes' : 'no';
  });
}

const owners = ['container', 'service', 'process', 'unknown'];

// headOf makes the button of a group: deny or allow all ports of its owner.
function headOf(button, p) {
  const target = changes.may.change && !p.unpublished && !p.waits ? changes.ownerRequest(p) : null;
  const denial = target === null ? undefined : changes.denied(target);
  button.hidden = target === null;
  button.textContent = denial ? 'Allow' : 'Deny';
  button.title = target === null ? '' : `All ports of owners that are called ${target.owner}`;
  changes.pressed(button, () => added.run(denial?.undo ?? { op: 'deny', ...target }));
}

actions.onChange(changed);
added.onChange(changed);

const group = $('group');
group.onclick = () => {
  table.grouped = !table.grouped;
  group.ariaPressed = String(table.grouped);
  changed();
};

function toggle(name) {
  if (!table.hiddenBy.delete(name)) table.hiddenBy.add(name);
  changed();
}

// only shows these alone of their kind. What is not published has a chip in place of its state.
function only(kind, value) {
  const values = { state: states, protocol: ['tcp', 'udp'], guest: [...guests.keys()], owner: owners, published: ['no'] };
  const kinds = kind === 'state' || kind === 'published' ? ['state', 'published'] : [kind];
  for (const name of kinds.flatMap((k) => values[k].map((v) => `${k}:${v}`))) {
    if (name === `${kind}:${value}`) table.hiddenBy.delete(name);
    else table.hiddenBy.add(name);
  }
  changed();
}

// Detail.
function open(key, focus = true) {
  const row = table.rows.get(key);
  if (row === undefined) return;
  table.selected = key;
  showDetail(row);
  if (focus) $('detail').focus();
  changed();
}

function showDetail(row) {
  detail.show(row.p, { now: now(), gone: row.gone || null, onClose: () => table.focus(table.selected) });
}

// Keys.
document.addEventListener('keydown', (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector('dialog[open]')) return;
  const typing = e.target === search;
  if (!typing && e.target.matches('input, select') && e.key !== 'Escape') return; // a field of an action
  if (typing && !['Escape', 'ArrowDown', 'Enter'].includes(e.key)) return;
  const act = keys[e.key];
  if (act === undefined || (e.key === 'Enter' && e.target.closest('button, a, summary'))) return;
  if (act(typing) !== false) e.preventDefault();
});

function move(by) {
  const key = table.move(by);
  if (key === null) return;
  if (detail.openKey() !== null) open(key, false);
  draw();
  table.focus(key);
}

const keys = {
  '/': () => { search.focus(); search.select(); },
  'j': () => move(1),
  'ArrowDown': () => move(1),
  'k': () => move(-1),
  'ArrowUp': () => move(-1),
  'Home': () => move(-Infinity),
  'End': () => move(Infinity),
  'Enter': () => {
    const key = table.select();
    if (key !== null) open(key);
  },
  'Escape': (typing) => {
    if (detail.openKey() !== null) detail.close();
    else if (search.value !== '' || table.filtered()) table.clear();
    else if (typing) search.blur();
  },
  't': () => nextTheme(),
  '?': () => $('help').showModal(),
};

search.addEventListener('input', () => { table.query = search.value; changed(); });
$('help-open').onclick = () => $('help').showModal();

// Theme: as the system, light, dark.
function nextTheme() {
  const order = ['', 'light', 'dark'];
  const root = document.documentElement;
  const theme = order[(order.indexOf(root.dataset.theme ?? '') + 1) % order.length];
  if (theme === '') delete root.dataset.theme;
  else root.dataset.theme = theme;
  try {
    localStorage.setItem('fairlead-theme', theme);
  } catch {
    // Storage is not available: the choice is not remembered.
  }
  sayTheme();
}

function sayTheme() {
  $('theme').textContent = `Theme: ${document.documentElement.dataset.theme ?? 'system'}`;
}
$('theme').onclick = nextTheme;
sayTheme();

// drawPeers shows the guests of a host, with their warnings, or the host of an agent.
let peers = [];
let warnings = new Map(); // of a host's guests
function drawPeers() {
  const host = document.body.dataset.role === 'host';
  const words = { connected: 'connected', refused: 'refused', away: 'not connected' };
  $('peers').replaceChildren(...peers.map((p) => {
    const warned = warnings.get(p.guest) ?? [];
    const state = p.state === 'connected' && !host ? clean(p.name) : words[p.state] + (p.error ? `: ${clean(p.error)}` : '');
    const count = warned.length === 0 ? '' : `, ${warned.length} ${warned.length === 1 ? 'warning' : 'warnings'}`;
    return el('li', {
      class: 'source', 'data-state': p.state === 'connected' ? 'live' : 'stale',
      title: [p.endpoint, p.version, p.error, p.next, ...warned].filter(Boolean).map(clean).join('\n'),
    }, el('b', {}, host ? clean(p.title || p.name || p.endpoint) : 'host'), el('span', { class: 'dim' }, state + count));
  }));
}

// Events of the server.
const handlers = {
  hello(hello) {
    const { role, name, version, explains } = hello;
    document.body.dataset.role = role;
    changes.begin(hello);
    Object.assign(detail.can, { explain: explains, names: hello.names });
    if (hello.names) names.show();
    $('machine').textContent = clean(name);
    $('version').textContent = `${role} ${clean(version)}`;
    flows.reset();
  },
  peers(list) {
    if (document.body.dataset.role === 'host') table.name(list);
    peers = list;
    drawPeers();
  },
  forwards(list) {
    changes.take(list);
    changed();
  },
  sources(list) {
    if (document.body.dataset.role === 'host') { // these are the guests
      warnings = new Map(list.map((s) => [s.name, s.warnings]));
      drawPeers();
      return;
    }
    $('sources').replaceChildren(...list.map((s) => {
      // A method is "tp_btf (tcp-listen), cgroup (udp-bind)" or "no engine yet: why".
      const how = s.method.replace(/:.*| \([^)]*\)/gs, '');
      const state = s.state === 'live' && how.startsWith('no ') ? 'absent' : s.state;
      return el('li', {
        class: 'source', 'data-state': state, title: [s.state, s.method, s.error, ...(s.warnings ?? [])].filter(Boolean).map(clean).join('\n'),
      }, el('b', {}, clean(s.name)), el('span', { class: 'dim' }, clean(s.state === 'live' ? how || 'live' : s.state)));
    }));
  },
  rows(delta) { table.take(delta, now()); },
  vitals(v) {
    const t = Date.parse(v.time);
    ahead = t - Date.now();
    latency.add(t, v.latencies);
    flows.add(t, v);
    latency.draw(t);
    flows.draw(t);
    changed();
  },
};

// The stream: only while the page is visible, and again after it broke.
const silence = 15000;
let reader = null;

async function follow() {
  if (reader !== null || document.hidden) return;
  reader = new AbortController();
  const { signal } = reader;
  for (let pause = 250; !signal.aborted; pause = Math.min(pause * 2, 5000)) {
    try {
      for await (const { event, data } of events('/v1/events', { signal, silence })) {
        pause = 250;
        connection('live');
        handlers[event]?.(data);
      }
    } catch (e) {
      if (e instanceof Refused) {
        connection('locked');
        reader = null;
        $('login').querySelector('h2').textContent = hasToken() ? 'Wrong token' : 'Token needed';
        $('wrong').hidden = !hasToken();
        if (!$('login').open) $('login').showModal();
        return;
      }
    }
    if (signal.aborted) return;
    connection('lost');
    await new Promise((done) => { setTimeout(done, pause); });
  }
}

const words = { connecting: 'connecting', live: 'live', lost: 'connection lost, retrying', locked: 'token needed', away: 'paused' };

function connection(state) {
  const c = $('connection');
  if (c.dataset.state === state) return;
  c.dataset.state = state;
  c.textContent = words[state];
  document.body.dataset.connection = state;
}

function leave() {
  reader?.abort();
  reader = null;
  connection('away');
}

document.addEventListener('visibilitychange', () => { if (document.hidden) leave(); else follow(); });
addEventListener('resize', () => { if (table.grouped) changed(); latency.draw(now()); flows.draw(now()); });

function fromHash() {
  if (!takeToken(location.hash)) return false;
  history.replaceState(null, '', location.pathname); // remove it from the address bar and the history
  return true;
}
addEventListener('hashchange', () => { if (fromHash()) { $('login').close(); follow(); } });
$('login-form').addEventListener('submit', () => { if (takeToken($('token').value)) $('token').value = ''; });
$('login').addEventListener('close', () => follow());

fromHash();
draw();
follow();
