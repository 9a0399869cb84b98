// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/fairlead/fairlead/internal/port"
)

func seed(f *testing.F) {
	f.Helper()
	for _, c := range frames() {
		b, err := EncodeFrame(&c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, h := range handshakes() {
		frame, _, err := EncodeHandshake(h)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame)
	}
	f.Add(frameOf(`{"key":{"protocol":"tcp","address":"::","port":1},"peer":"1.1.1.1:1"}`))
	f.Add(frameOf(`{"status":"ok"}`))
	f.Add([]byte{0, 3, 1, 2, 3})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff})
}

// expected reports whether a decoder may return err.
func expected(err error) bool {
	for _, e := range []error{ErrMalformed, ErrTooLarge, io.EOF, io.ErrUnexpectedEOF} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// What was accepted is accepted again after a round trip, and stays the same.
func FuzzReadControl(f *testing.F) {
	seed(f)
	f.Add(frameOf(`{"generation":01}`))
	f.Add(frameOf(`{"table":"unpublished","put":[{"protocol":"tcp","address":"fe80::1%e","port":1,"decision":{"reason":[{"code":"owner-awaited"}]}}],"removed":null,"omitted":9007199254740993}`))
	f.Add(frameOf(`{"table":"unpublished","put":[{"protocol":"tcp","address":"172.17.0.2","port":80,"source":"demand","demands":["web:80/tcp","svc/a/b:53/udp"]}]}`))
	f.Add(frameOf(`{"table":"wanted","base":1,"generation":2,"removed":[{"protocol":"TCP","address":"::1","port":65535}]} `))
	f.Fuzz(func(t *testing.T, b []byte) {
		body, err := ReadControl(bytes.NewReader(b))
		var c Frame
		if err == nil {
			c, err = DecodeFrame(body)
		}
		if err != nil {
			if !expected(err) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		again(t, c.Put, published)
		again(t, c.Put, port.Answer.Check)
		again(t, c.Put, unpublished)
		again(t, c.Put, Unread.Check)
		again(t, c.Removed, port.Key.Check)
		if _, err := EncodeFrame(&c); err != nil && !errors.Is(err, ErrTooLarge) { // JSON escapes U+2028, which is longer
			t.Fatal(err)
		}
	})
}

// again reads rows, which are the same after a round trip if they are accepted.
func again[T any](t *testing.T, list []byte, check func(T) error) {
	t.Helper()
	rows, err := DecodeRows(list, check)
	if err != nil {
		if !expected(err) {
			t.Fatalf("unexpected kind of error: %v", err)
		}
		return
	}
	if len(rows) == 0 {
		return
	}
	one := raw(rows...)
	rows, err = DecodeRows(one, check)
	if err != nil {
		t.Fatalf("not accepted again: %v", err)
	}
	if two := raw(rows...); !bytes.Equal(one, two) {
		t.Fatalf("changed on the way:\n%q\n%q", one, two)
	}
}

func FuzzReadHandshake(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		h, _, err := ReadHandshake(bytes.NewReader(b))
		if err != nil {
			if !expected(err) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		if err := h.check(); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzReadRequest(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := ReadRequest(bytes.NewReader(b))
		if err != nil {
			if !expected(err) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		var w bytes.Buffer
		if err := WriteRequest(&w, q); err != nil {
			t.Fatal(err)
		}
		q.Peer, q.At = unzoned(q.Peer), unzoned(q.At)
		if again, err := ReadRequest(&w); err != nil || again != q {
			t.Fatalf("%+v became %+v, %v", q, again, err)
		}
	})
}

func FuzzReadReply(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ReadReply(bytes.NewReader(b))
		if err != nil {
			if !expected(err) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		var w bytes.Buffer
		if err := WriteReply(&w, p); err != nil {
			t.Fatal(err)
		}
		if again, err := ReadReply(&w); err != nil || again != p {
			t.Fatalf("%+v became %+v, %v", p, again, err)
		}
	})
}

func FuzzReadDatagram(f *testing.F) {
	seed(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		buf := make([]byte, 512)
		r := bytes.NewReader(b)
		for {
			n, err := ReadDatagram(r, buf)
			if err != nil {
				if !expected(err) && !errors.Is(err, io.ErrShortBuffer) {
					t.Fatalf("unexpected kind of error: %v", err)
				}
				return
			}
			if n > len(buf) {
				t.Fatalf("%d bytes in %d", n, len(buf))
			}
		}
	})
}

func FuzzOpening(f *testing.F) {
	o := Opening{Session: [SessionIDSize]byte{1, 2}, Number: 7, MAC: [MACSize]byte{3}}
	f.Add(o.Append(nil))
	f.Add([]byte(FlowMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := ParseOpening(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		if got := o.Append(nil); !bytes.Equal(got, b) {
			t.Fatalf("%x became %x", b, got)
		}
	})
}
