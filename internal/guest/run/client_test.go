// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/fairlead/fairlead/internal/guest/peer"
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
	if err := s.sendReply(reply{Hello: peer.Hello{Version: peer.Version, Nonce: "n"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Receive(theirs, &q); err != nil {
		t.Fatal(err)
	}
	if err := s.sendReply(reply{Granted: true}); err != nil {
		t.Fatal(err)
	}
	if k, b, err := s.receive(newBuffer(), peer.NewControl()); !errors.Is(err, io.EOF) {
		_ = theirs.Close()
		t.Errorf("received %c %q, %v, want the end", k, b, err)
	}
	if err := <-done; !errors.Is(err, broken) {
		t.Errorf("do: %v, want %v", err, broken)
	}
}

// failing is an output that cannot be written to.
type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// The client tells an agent that has gone from its own input and output, which fail with the
// same errors.
func TestWhatHasGone(t *testing.T) {
	for _, c := range []struct {
		name string
		Streams
		want string
	}{
		{"the service", Streams{}, "the service has gone"},
		{"the reader of the output", Streams{Stdout: failing{syscall.EPIPE}}, syscall.EPIPE.Error()},
		{"the writer of the input", Streams{Stdin: iotest.ErrReader(syscall.ECONNRESET)}, "read the input: " + syscall.ECONNRESET.Error()},
	} {
		t.Run(c.name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unixpacket", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			agent := make(chan error, 1)
			atOnce := c.Stdin == nil && c.Stdout == nil
			go func() { agent <- playSession(l, atOnce) }()
			if c.Stdout == nil {
				c.Stdout = io.Discard
			}
			_, err = Do(t.Context(), socket, Request{Name: "cat"}, c.Streams)
			if err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
			if err := <-agent; err != nil {
				t.Error(err)
			}
		})
	}
}

// playSession plays an agent that runs a program, whose output it sends, and goes: at once or
// after the client.
func playSession(l net.Listener, atOnce bool) error {
	conn, err := l.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	s := session{frames: frames{conn: conn.(*net.UnixConn)}}
	if err := s.sendReply(reply{Hello: peer.Hello{Version: peer.Version, Nonce: "n"}}); err != nil {
		return err
	}
	var q first
	if _, err := peer.Receive(s.conn, &q); err != nil {
		return err
	}
	err = errors.Join(s.sendReply(reply{Granted: true}), s.send(frameStdout, []byte("x"))) // the client may go meanwhile
	for err == nil && !atOnce {
		_, _, err = s.receive(newBuffer(), peer.NewControl())
	}
	return nil
}
