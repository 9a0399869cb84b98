// SPDX-License-Identifier: Apache-2.0
// The table of ports: its rows, which of them are shown, and in which order.
import { el, clean, age, states, inGuest, keyOf, otherKey, bothOf, ownerName, hostAddresses, stateOf, guests } from './format.js';
import { address } from './detail.js';

const lingers = 4000; // ms that a closed port is still shown
const fresh = 2500; // ms that a new port is marked
const step = 300; // rows that are shown at once

// unpublished hides what guests of a host do not publish.
const unpublished = 'published:no';

export class Table {
  rows = new Map(); // key → {p, key, text, tr, drawn, born, gone}; of both families of a port the key of IPv4
  #ports = new Map(); // key → what the server has of each family
  query = '';
  hiddenBy = new Set([unpublished]); // "state:denied", "protocol:udp", "guest:vm"
  selected = null;

  #table; #body; #more; #empty; #limit = step; #incoming = null; #loaded = false;
  #sort = { by: 'port', down: false };
  grouped = false; // by owner
  #heads = new Map(); // rows that begin a group, by its key
  #changed;

  // headOf makes what stands beside the name of a group, of one of its rows.
  constructor(table, { more, empty, onChange, onOpen, headOf }) {
    this.headOf = headOf;
    this.#table = table;
    this.#body = table.tBodies[0];
    this.#more = more;
    this.#empty = empty;
    this.#changed = onChange;
    more.querySelector('button').onclick = () => { this.#limit += step; onChange(); };
    empty.querySelector('button').onclick = () => { this.clear(); };
    for (const th of table.tHead.querySelectorAll('[data-sort]')) {
      th.querySelector('button').onclick = () => this.#sortBy(th);
    }
    this.#body.onclick = (e) => {
      if (e.target.closest('a, button')) return;
      const tr = e.target.closest('tr');
      if (tr?.dataset.key !== undefined) onOpen(tr.dataset.key, false);
    };
  }

  // take applies an event of the server.
  take({ reset, more, put = [], removed = [] }, now) {
    if (reset) this.#incoming = new Set();
    const touched = [];
    const remove = (key) => { touched.push(this.#ports.get(key)); this.#ports.delete(key); };
    for (const p of put) {
      this.#ports.set(keyOf(p), p);
      touched.push(p);
      this.#incoming?.add(keyOf(p));
    }
    for (const r of removed) if (this.#ports.has(keyOf(r))) remove(keyOf(r));
    if (!more && this.#incoming !== null) {
      for (const key of [...this.#ports.keys()]) if (!this.#incoming.has(key)) remove(key);
      this.#incoming = null;
    }
    for (const p of touched) this.#update(p, now);
    if (!more) this.#loaded = true;
    this.#changed();
  }

  // update makes the row, or the rows, of a port, whose families are one row if they are of one
  // owner.
  #update(p, now) {
    const key = keyOf(p);
    const other = otherKey(p);
    const [a, b] = [this.#ports.get(key), this.#ports.get(other)];
    const both = a && b ? (p.address === '::' ? bothOf(b, a) : bothOf(a, b)) : null;
    if (both === null) {
      this.#set(key, a, now);
      if (b) this.#set(other, b, now);
      return;
    }
    const first = keyOf(both);
    this.#set(first, both, now);
    this.rows.delete(first === key ? other : key);
  }

  #set(key, p, now) {
    if (!p) {
      this.#gone(key, now);
      return;
    }
    const row = this.rows.get(key) ?? { key, born: this.#loaded ? now : 0 };
    if (row.gone) Object.assign(row, { gone: 0, born: now, drawn: null });
    row.p = p;
    row.drawn = null;
    row.text = searchable(p);
    this.rows.set(key, row);
  }

  // name takes the names of the guests. Rows are drawn again where one has changed.
  name(peers) {
    for (const { guest, title } of peers) {
      if (guests.get(guest) === title) continue;
      guests.set(guest, title);
      for (const row of this.rows.values()) {
        if (row.p.guest !== guest) continue;
        row.text = searchable(row.p);
        row.drawn = null;
      }
    }
    this.#changed();
  }

  #gone(key, now) {
    const row = this.rows.get(key);
    if (row === undefined || row.gone) return;
    row.gone = now;
    row.drawn = null;
    setTimeout(() => {
      if (row.gone === now) {
        this.rows.delete(key);
        this.#changed();
      }
    }, lingers);
  }

  clear() {
    this.query = '';
    this.hiddenBy = new Set([unpublished]);
    this.#changed(true);
  }

  // filtered reports whether clear would change something.
  filtered() { return this.query !== '' || this.hiddenBy.size !== 1 || !this.hiddenBy.has(unpublished); }

  #sortBy(th) {
    const by = th.dataset.sort;
    this.#sort = { by, down: this.#sort.by === by && !this.#sort.down };
    for (const other of this.#table.tHead.querySelectorAll('[aria-sort]')) other.removeAttribute('aria-sort');
    th.setAttribute('aria-sort', this.#sort.down ? 'descending' : 'ascending');
    this.#changed();
  }

  counts() {
    const counts = { state: {}, protocol: {}, guest: {}, owner: {}, published: { no: 0 }, all: 0 };
    for (const { p, gone } of this.rows.values()) {
      if (gone) continue;
      if (p.unpublished) {
        counts.published.no++;
        if (!this.hiddenBy.has(unpublished)) counts.all++;
        continue;
      }
      counts.all++;
      counts.owner[p.owner.kind] = (counts.owner[p.owner.kind] ?? 0) + 1;
      counts.guest[p.guest] = (counts.guest[p.guest] ?? 0) + 1;
      counts.state[p.state] = (counts.state[p.state] ?? 0) + 1;
      counts.protocol[p.protocol] = (counts.protocol[p.protocol] ?? 0) + 1;
    }
    return counts;
  }

  visible() {
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...this.rows.values()].filter(({ p, text }) =>
      !this.hiddenBy.has(p.unpublished ? unpublished : `state:${p.state}`) && !this.hiddenBy.has(`protocol:${p.protocol}`)
      && !this.hiddenBy.has(`guest:${p.guest}`) && !this.hiddenBy.has(`owner:${p.owner.kind}`)
      && words.every((w) => text.includes(w)));
    const { by, down } = this.#sort;
    const order = orders[by];
    rows.sort((a, b) => (this.grouped ? compareGroups(a.p, b.p) : 0) || (down ? -1 : 1) * order(a.p, b.p) || orders.port(a.p, b.p));
    return rows;
  }

  // draw updates the page. Rows that did not change are not touched.
  draw(now) {
    const rows = this.visible();
    const shown = rows.slice(0, this.#limit);
    const keep = new Set(shown);
    for (const row of this.rows.values()) if (row.tr && !keep.has(row)) { row.tr.remove(); row.tr = row.drawn = null; }
    for (const tr of [...this.#body.rows]) if (tr.dataset.group === undefined && this.rows.get(tr.dataset.key)?.tr !== tr) tr.remove();
    const sizes = new Map();
    if (this.grouped) for (const { p } of rows) sizes.set(groupOf(p), (sizes.get(groupOf(p)) ?? 0) + 1);
    for (const [key, tr] of this.#heads) if (!sizes.has(key)) { tr.remove(); this.#heads.delete(key); }
    const first = shown.some((r) => r.key === this.selected) ? this.selected : shown[0]?.key;
    let at = this.#body.firstElementChild;
    const place = (tr) => {
      if (tr === at) at = at.nextElementSibling;
      else this.#body.insertBefore(tr, at);
    };
    let group = null;
    for (const row of shown) {
      if (this.grouped && groupOf(row.p) !== group) {
        group = groupOf(row.p);
        place(this.#head(group, row.p, sizes.get(group)));
      }
      row.tr ??= el('tr', { 'data-key': row.key });
      if (row.drawn !== row.p) this.#fill(row);
      row.tr.tabIndex = row.key === first ? 0 : -1;
      row.tr.ariaCurrent = row.key === this.selected ? 'true' : null;
      row.tr.dataset.mark = row.gone ? 'gone' : now - row.born < fresh ? 'new' : '';
      const cell = row.tr.lastElementChild;
      const text = row.gone ? 'gone' : (row.p.sinceAtLeast ? '> ' : '') + age(now - Date.parse(row.p.since));
      if (cell.textContent !== text) cell.textContent = text;
      place(row.tr);
    }
    this.#more.hidden = rows.length <= shown.length;
    this.#more.querySelector('button').textContent = `Show ${Math.min(step, rows.length - shown.length)} more of ${rows.length - shown.length}`;
    this.#sayEmpty(rows.length);
    return rows;
  }

  // #head makes or updates the row that begins a group of n.
  #head(key, p, n) {
    let tr = this.#heads.get(key);
    if (tr === undefined) {
      tr = el('tr', { class: 'group', 'data-group': key }, el('th', { scope: 'rowgroup' },
        ['container', 'service'].includes(p.owner.kind) ? el('span', { class: 'kind' }, p.owner.kind) : null,
        el('b', {}, groupName(p)), el('span', { class: 'dim' }), el('button', { type: 'button' })));
      this.#heads.set(key, tr);
    }
    tr.firstChild.colSpan = [...this.#table.tHead.rows[0].cells].filter((th) => getComputedStyle(th).display !== 'none').length;
    const [size, button] = [...tr.firstChild.children].slice(-2);
    const guest = p.guest && guests.size > 1 ? ` ${clean(guests.get(p.guest) ?? p.guest)}` : '';
    size.textContent = `${guest} ${n} ${n === 1 ? 'port' : 'ports'}`;
    this.headOf(button, p);
    return tr;
  }

  #sayEmpty(n) {
    this.#table.hidden = this.#loaded && n === 0;
    this.#empty.hidden = !this.#loaded || n > 0;
    const filtered = [...this.rows.values()].some(({ p }) => !p.unpublished) || this.filtered();
    this.#empty.querySelector('p').textContent = filtered ? 'Nothing matches.'
      : 'No ports yet. A port appears here the moment it opens in the guest.';
    this.#empty.querySelector('button').hidden = !filtered;
  }

  #fill(row) {
    const { p, tr } = row;
    const state = row.gone ? 'gone' : stateOf(p);
    const at = hostAddresses(p);
    tr.replaceChildren(
      el('td', { class: 'port' }, el('b', {}, String(p.port)), el('span', { class: 'proto' }, p.protocol)),
      el('td', { class: 'state' }, el('span', { class: 'badge', 'data-state': state, title: clean(p.reason) }, state)),
      el('td', { class: `host${!row.gone && p.state === 'active' && p.exposedUntil ? ' exposed' : ''}` },
        at.length > 0 ? address(p, at[0]) : null,
        at.length > 1 ? el('span', { class: 'dim', title: at.slice(1).join(' ') }, ` +${at.length - 1}`) : null,
        p.reason !== '' ? el('span', { class: 'reason', title: clean(p.reason) }, clean(said(p.reason, at[0]))) : null),
      el('td', { class: 'owner', title: ownerName(p.owner) },
        p.owner.kind === 'unknown' ? el('span', { class: 'dim' }, '–') : el('span', { class: 'kind' }, p.owner.kind), ' ',
        ownerName(p.owner)),
      el('td', { class: 'guest' }, el('code', {}, inGuest(p)),
        p.guest ? el('span', { class: 'dim' }, ` ${clean(guests.get(p.guest) ?? p.guest)}`) : null),
      el('td', { class: 'sources' }, [...new Set(p.origins.map((o) => clean(o.source)))].join(', ')),
      el('td', { class: 'age num' }),
    );
    row.drawn = p;
  }

  // move selects the row that many further down, and returns its key.
  move(by) {
    const rows = this.visible().slice(0, this.#limit);
    if (rows.length === 0) return null;
    const at = rows.findIndex((r) => r.key === this.selected);
    const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
    this.selected = rows[next].key;
    return this.selected;
  }

  // select makes sure that a visible row is selected, and returns its key.
  select() {
    const rows = this.visible().slice(0, this.#limit);
    if (!rows.some((r) => r.key === this.selected)) this.selected = rows[0]?.key ?? null;
    return this.selected;
  }

  focus(key) {
    const tr = this.rows.get(key)?.tr;
    tr?.focus();
    tr?.scrollIntoView({ block: 'nearest' });
  }
}

// said removes the address at the beginning of a reason.
function said(reason, at) { return reason.startsWith(`${at} `) ? reason.slice(at.length + 1) : reason; }

// Containers and Services are groups of their own, all others one of their kind. Guests are
// apart.
const kinds = ['container', 'service', 'process', 'unknown'];
const own = ({ owner }) => ['container', 'service'].includes(owner.kind);
function groupOf(p) { return JSON.stringify([p.owner.kind, own(p) ? [p.owner.namespace, p.owner.name || p.owner.id] : '', p.guest]); }
function groupName(p) { return own(p) ? ownerName(p.owner) : p.owner.kind === 'process' ? 'Processes' : 'Owner not known'; }
function compareGroups(a, b) {
  return kinds.indexOf(a.owner.kind) - kinds.indexOf(b.owner.kind) || (own(a) ? text(ownerName(a.owner), ownerName(b.owner)) : 0)
    || text(a.guest ?? '', b.guest ?? '') || text(groupOf(a), groupOf(b));
}

const text = (a, b) => (a === b ? 0 : a === '' ? 1 : b === '' ? -1 : a.localeCompare(b));
const orders = {
  port: (a, b) => a.port - b.port || text(a.protocol, b.protocol) || text(a.address, b.address),
  state: (a, b) => states.indexOf(b.state) - states.indexOf(a.state),
  host: (a, b) => text(hostAddresses(a)[0] ?? '', hostAddresses(b)[0] ?? ''),
  owner: (a, b) => text(ownerName(a.owner), ownerName(b.owner)),
  guest: (a, b) => text(inGuest(a), inGuest(b)),
  age: (a, b) => Date.parse(b.since) - Date.parse(a.since),
};

function searchable(p) {
  return [
    p.port, p.protocol, inGuest(p), stateOf(p), p.reason, p.guest, guests.get(p.guest), p.rule,
    p.owner.kind, p.owner.name, p.owner.id, p.owner.namespace,
    ...Object.entries(p.owner.labels ?? {}).map(([k, v]) => `${k}=${v}`),
    ...p.hostAddresses, ...p.outcomes.map((o) => `${o.sink} ${o.hostAddress}`), ...p.origins.map((o) => `${o.source} ${o.detail}`),
  ].filter((v) => v !== undefined && v !== null && v !== '').join('\n').toLowerCase();
}
