// SPDX-License-Identifier: Apache-2.0

package wire

// appendRequest appends q as JSON, as appendControl does.
func appendRequest(b []byte, q *FlowRequest) ([]byte, bool) {
	w := writer{b: b, ok: true}
	w.raw(`{"key":{`)
	w.key(&q.Key)
	w.raw(`},"peer":`)
	w.addrPort(q.Peer)
	w.raw("}")
	return w.b, w.ok
}

// parseRequest reads what appendRequest writes.
func parseRequest(body []byte) (q FlowRequest, ok bool) {
	r := reader{b: body}
	r.want(`{"key":{`)
	r.key(&q.Key)
	r.want(`},"peer":`)
	q.Peer = r.addrPort()
	r.want("}")
	if r.bad || len(r.b) > 0 {
		return FlowRequest{}, false
	}
	return q, true
}

// plainOK is the usual reply.
const plainOK = `{"status":"ok"}`
