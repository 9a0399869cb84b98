// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/fairlead/fairlead/internal/port"
)

// ReadControl reads and checks the next control message. An error that is
// ErrMalformed leaves the stream in step; any other ends its use. Unknown
// fields are ignored, an unknown message is an error that names it. Deadlines
// are the caller's.
func ReadControl(r io.Reader) (Control, error) {
	body, err := readFrame(r, MaxControlFrame)
	if err != nil {
		return Control{}, err
	}
	return decodeControl(body)
}

func decodeControl(body []byte) (Control, error) {
	c, ok := parseControl(body)
	if !ok {
		var err error
		if c, err = unmarshalControl(body); err != nil {
			return Control{}, err
		}
	}
	if err := c.Check(); err != nil {
		return Control{}, err
	}
	return c, nil
}

// unmarshalControl reads every form that JSON allows a message.
func unmarshalControl(body []byte) (c Control, err error) {
	err = decodeUnion(body, func(name string) any {
		switch name {
		case "snapshot":
			return &c.Snapshot
		case "change":
			return &c.Change
		case "ack":
			return &c.Ack
		case "outcomes":
			return &c.Outcomes
		case "resync":
			return &c.Resync
		}
		return nil
	})
	return c, err
}

// WriteControl writes c as one frame in a single Write. What does not fit is
// ErrTooLarge and nothing is written; see Split.
func WriteControl(w io.Writer, c Control) error {
	frame, ok := appendControl(make([]byte, frameHeader, controlSize(&c)), &c)
	if !ok {
		return writeFrame(w, c, MaxControlFrame)
	}
	if err := seal(frame, MaxControlFrame); err != nil {
		return err
	}
	_, err := w.Write(frame)
	return err
}

// ReadRequest reads and checks the request at the start of a flow stream.
func ReadRequest(r io.Reader) (FlowRequest, error) {
	body, err := readFrame(r, MaxRequestFrame)
	if err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	q, ok := parseRequest(body)
	if !ok {
		if err := unmarshalPlain(body, &q); err != nil {
			return FlowRequest{}, fmt.Errorf("flow request: %w", err)
		}
	}
	if err := q.check(); err != nil {
		return FlowRequest{}, fmt.Errorf("flow request: %w", err)
	}
	return q, nil
}

// WriteRequest writes q in a single Write.
func WriteRequest(w io.Writer, q FlowRequest) error {
	q.Peer = unmapPort(q.Peer)
	const usual = 128
	frame, ok := appendRequest(make([]byte, frameHeader, usual), &q)
	if !ok {
		return writeFrame(w, q, MaxRequestFrame)
	}
	if err := seal(frame, MaxRequestFrame); err != nil {
		return err
	}
	_, err := w.Write(frame)
	return err
}

// ReadReply reads and checks the answer to a flow request.
func ReadReply(r io.Reader) (FlowReply, error) {
	body, err := readFrame(r, MaxRequestFrame)
	if err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	if string(body) == plainOK {
		return FlowReply{Status: FlowOK}, nil
	}
	var p FlowReply
	if err := unmarshalPlain(body, &p); err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	if err := p.check(); err != nil {
		return FlowReply{}, fmt.Errorf("flow reply: %w", err)
	}
	p.Reason = oneLine(p.Reason)
	return p, nil
}

// WriteReply writes p in a single Write. Its reason is cut to MaxReason.
func WriteReply(w io.Writer, p FlowReply) error {
	if p == (FlowReply{Status: FlowOK}) {
		frame := append(make([]byte, frameHeader), plainOK...)
		if err := seal(frame, MaxRequestFrame); err != nil {
			return err
		}
		_, err := w.Write(frame)
		return err
	}
	p.Reason = cut(p.Reason, MaxReason)
	return writeFrame(w, p, MaxRequestFrame)
}

func unmarshalPlain(body []byte, v any) error {
	if err := json.Unmarshal(body, v); err != nil {
		return malformed("%v", err)
	}
	return nil
}

// UnmarshalJSON implements json.Unmarshaler with bounded lists.
func (s *Snapshot) UnmarshalJSON(b []byte) error {
	type plain Snapshot
	v := struct {
		*plain
		Publications list[Publication] `json:"publications"`
	}{plain: (*plain)(s)}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	s.Publications = v.Publications
	return nil
}

// UnmarshalJSON implements json.Unmarshaler with bounded lists.
func (c *Change) UnmarshalJSON(b []byte) error {
	type plain Change
	v := struct {
		*plain
		Put     list[Publication] `json:"put"`
		Removed list[port.Key]    `json:"removed"`
	}{plain: (*plain)(c)}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	c.Put, c.Removed = v.Put, v.Removed
	return nil
}

// UnmarshalJSON implements json.Unmarshaler with bounded lists.
func (a *Ack) UnmarshalJSON(b []byte) error {
	type plain Ack
	v := struct {
		*plain
		Outcomes list[Outcome] `json:"outcomes"`
	}{plain: (*plain)(a)}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	a.Outcomes = v.Outcomes
	return nil
}

// UnmarshalJSON implements json.Unmarshaler with bounded lists.
func (o *Outcomes) UnmarshalJSON(b []byte) error {
	var v struct {
		Outcomes list[Outcome] `json:"outcomes"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	o.Outcomes = v.Outcomes
	return nil
}
