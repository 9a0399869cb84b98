// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

const (
	// MaxRunRequest bounds a RunRequest, in bytes.
	MaxRunRequest = 16 << 10
	// MaxRunFrame bounds the content of a frame after it, in bytes.
	MaxRunFrame = 32 << 10
)

// RunRequest is the first frame of a stream that the agent opens, to a host whose Hello has
// Runs: it asks for a program of the host. After it both sides send frames of a run.
type RunRequest struct {
	Name string       `json:"name"` // of an entry of the host's list
	Args List[string] `json:"args,omitempty"`
	Env  List[string] `json:"env,omitempty"` // "KEY=VALUE"
	// From is for whom the agent asks, in its words. It is only shown.
	From string `json:"from,omitempty"`
}

// ReadRunRequest reads and checks the request at the start of a stream.
func ReadRunRequest(r io.Reader) (RunRequest, error) {
	var q RunRequest
	body, err := readFrame(r, MaxRunRequest)
	if err == nil {
		err = decode(body, &q)
	}
	if err == nil {
		err = checkText("name", q.Name, MaxName)
	}
	if err == nil {
		err = checkText("from", q.From, MaxReason)
	}
	if err != nil {
		return RunRequest{}, fmt.Errorf("run request: %w", err)
	}
	q.From = oneLine(q.From)
	return q, nil
}

// WriteRunRequest writes q in a single Write. From is truncated to MaxReason.
func WriteRunRequest(w io.Writer, q RunRequest) error {
	q.From = truncate(q.From, MaxReason)
	return writeFrame(w, &q, MaxRunRequest)
}

// ReadRunFrame reads the next frame of a run: its kind, and at most MaxRunFrame bytes.
func ReadRunFrame(r io.Reader) (kind byte, content []byte, err error) {
	body, err := readFrame(r, 1+MaxRunFrame)
	switch {
	case err != nil:
		return 0, nil, err
	case len(body) == 0:
		return 0, nil, malformed("run: an empty frame")
	}
	return body[0], body[1:], nil
}

// WriteRunFrame writes a frame of a run in a single Write.
func WriteRunFrame(w io.Writer, kind byte, content []byte) error {
	if len(content) > MaxRunFrame {
		return fmt.Errorf("frame of %d bytes: %w (limit %d)", len(content), ErrTooLarge, MaxRunFrame)
	}
	frame := make([]byte, frameHeader+1, frameHeader+1+len(content))
	binary.BigEndian.PutUint32(frame, uint32(1+len(content)))
	frame[frameHeader] = kind
	_, err := w.Write(append(frame, content...))
	return err
}
