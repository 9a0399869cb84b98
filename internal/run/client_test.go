// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"errors"
	"io"
	"net"
	"testing"
	"testing/iotest"

	"github.com/fairlead/fairlead/internal/publish/ask"
)

// An input that cannot be read to its end has no end: the program must not take what it
// got for all. The session ends, and the program is killed.
func TestBrokenInputIsNoEnd(t *testing.T) {
	theirs, f, err := pair()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	c, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		t.Fatal(err)
	}
	ours := c.(*net.UnixConn)
	defer ours.Close()
	broken := errors.New("input/output error")
	done := make(chan error, 1)
	go func() {
		_, err := do(ours, Request{Name: "cat"}, Streams{Stdin: iotest.ErrReader(broken), Stdout: io.Discard, Stderr: io.Discard})
		_ = ours.Close() // as Do
		done <- err
	}()
	var q first
	s := session{frames: frames{conn: theirs}}
	if err := s.sendReply(reply{Version: ask.Version, Nonce: "n"}); err != nil {
		t.Fatal(err)
	}
	if _, err := ask.Receive(theirs, &q); err != nil {
		t.Fatal(err)
	}
	if err := s.sendReply(reply{Granted: true}); err != nil {
		t.Fatal(err)
	}
	if k, b, err := s.receive(newBuffer(), ask.NewControl()); !errors.Is(err, io.EOF) {
		_ = theirs.Close()
		t.Errorf("received %c %q, %v, want the end", k, b, err)
	}
	if err := <-done; !errors.Is(err, broken) {
		t.Errorf("do: %v, want %v", err, broken)
	}
}
