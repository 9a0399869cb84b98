// SPDX-License-Identifier: Apache-2.0
// Two small charts over the last minutes. What they show is gathered here while
// the page is open; the server keeps no history.
import { svg, seconds, bytes } from './format.js';

const span = 5 * 60 * 1000; // ms

// series keeps points {t, ...} of the last span.
class Series {
  points = [];
  add(p) {
    this.points.push(p);
    const first = this.points.findIndex((q) => q.t >= p.t - span);
    if (first > 0) this.points.splice(0, first);
  }
}

function frame(figure) {
  const box = figure.querySelector('svg');
  const { width, height } = box.getBoundingClientRect();
  box.setAttribute('viewBox', `0 0 ${Math.max(1, width)} ${Math.max(1, height)}`);
  box.replaceChildren();
  return { box, width, height };
}

function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

// Latency shows each publication as a dot: time across, its latency upwards on
// a logarithmic scale.
export class Latency {
  #figure;
  #series = new Series();
  constructor(figure) { this.#figure = figure; }

  add(t, latencies) {
    for (const s of latencies) this.#series.add({ t, s });
  }

  draw(now) {
    const { box, width, height } = frame(this.#figure);
    const points = this.#series.points.filter((p) => p.t >= now - span);
    const [low, high] = [5e-5, Math.max(0.02, ...points.map((p) => p.s))];
    const y = (s) => height - 3 - (height - 8) * Math.log(Math.max(s, low) / low) / Math.log(high / low);
    for (const s of [1e-4, 1e-2, 1]) {
      if (s > high) break;
      box.append(svg('line', { class: 'grid', x1: 0, x2: width, y1: y(s), y2: y(s) }));
      const label = svg('text', { class: 'tick', x: 0, y: y(s) - 2 });
      label.textContent = seconds(s);
      box.append(label);
    }
    for (const p of points) {
      box.append(svg('circle', { class: 'dot', r: 2, cx: width - 3 - (width - 6) * (now - p.t) / span, cy: y(p.s) }));
    }
    const sorted = points.map((p) => p.s).sort((a, b) => a - b);
    this.#figure.querySelector('output').textContent = sorted.length === 0
      ? 'none yet'
      : `p50 ${seconds(quantile(sorted, 0.5))} · p99 ${seconds(quantile(sorted, 0.99))} · ${sorted.length} in 5 min`;
  }
}

// Flows shows bytes per second as an area and open flows as a line.
export class Flows {
  #figure;
  #series = new Series();
  #last = null;
  constructor(figure) { this.#figure = figure; }

  add(t, v) {
    const last = this.#last;
    this.#last = { t, v };
    if (last === null || t <= last.t || v.toHost < last.v.toHost || v.toGuest < last.v.toGuest) return;
    const dt = (t - last.t) / 1000;
    this.#series.add({
      t, open: v.tcp + v.udp, errors: v.errors,
      down: (v.toHost - last.v.toHost) / dt, up: (v.toGuest - last.v.toGuest) / dt,
    });
  }

  reset() { this.#last = null; }

  draw(now) {
    const { box, width, height } = frame(this.#figure);
    const points = this.#series.points.filter((p) => p.t >= now - span);
    const x = (t) => width - (width * (now - t)) / span;
    const most = Math.max(1000, ...points.map((p) => p.down + p.up));
    const flows = Math.max(4, ...points.map((p) => p.open));
    const y = (v, max) => height - 2 - (height - 8) * (v / max);
    box.append(svg('line', { class: 'grid', x1: 0, x2: width, y1: height - 2, y2: height - 2 }));
    if (points.length > 1) {
      const area = points.map((p) => `${x(p.t)},${y(p.down + p.up, most)}`).join(' ');
      box.append(svg('polygon', { class: 'area', points: `${x(points[0].t)},${height - 2} ${area} ${x(points.at(-1).t)},${height - 2}` }));
      box.append(svg('polyline', { class: 'line', points: points.map((p) => `${x(p.t)},${y(p.open, flows)}`).join(' ') }));
    }
    const p = points.at(-1);
    this.#figure.querySelector('output').textContent = p === undefined ? ''
      : `${p.open} open · ${bytes(p.down + p.up)}/s${p.errors > 0 ? ` · ${p.errors} failed` : ''}`;
  }
}
