// SPDX-License-Identifier: Apache-2.0
// The event stream, read by fetch because EventSource cannot send a header.

// The token comes in the fragment of the URL, which browsers do not send, and is kept
// for this tab and port only.
const slot = 'fairlead-token';

export function takeToken(text) {
  const found = /(?:^|[#&])token=([\w-]+)/.exec(text) ?? /^\s*([\w-]{20,})\s*$/.exec(text);
  if (!found) return false;
  try {
    sessionStorage.setItem(slot, found[1]);
  } catch {
    memory = found[1];
  }
  return true;
}

let memory = '';

// hasToken reports whether a token was given, right or wrong.
export function hasToken() { return token() !== ''; }

function token() {
  try {
    return sessionStorage.getItem(slot) ?? memory;
  } catch {
    return memory;
  }
}

// ask is fetch with the token. Without a signal it fails if the answer is not there in time.
export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  return fetch(path, { signal: AbortSignal.timeout(patience), ...options, headers, cache: 'no-store', credentials: 'omit' });
}

const patience = 30_000; // milliseconds, more than any answer takes

export class Refused extends Error {}

// events yields {event, data} until the stream ends. After silence milliseconds without
// data it is dead.
export async function* events(path, { signal, silence }) {
  const dead = new AbortController();
  const any = AbortSignal.any([signal, dead.signal]);
  let timer = setTimeout(() => dead.abort(), silence);
  try {
    const response = await ask(path, { signal: any });
    if (response.status === 401) throw new Refused('token');
    if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
    let rest = '';
    for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
      clearTimeout(timer);
      timer = setTimeout(() => dead.abort(), silence);
      const blocks = (rest + text).split('\n\n');
      rest = blocks.pop();
      for (const block of blocks) {
        let event = 'message';
        let data = '';
        for (const line of block.split('\n')) {
          if (line.startsWith('event: ')) event = line.slice(7);
          else if (line.startsWith('data: ')) data += line.slice(6);
        }
        yield { event, data: JSON.parse(data) };
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
