// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package run

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// desk is the terminal of a client, and who sits at it.
type desk struct {
	t       testing.TB
	master  *os.File // what is typed, and shown
	slave   *os.File // the client's
	changed chan os.Signal
	before  unix.Termios
	ended   chan struct{}
	exit    Exit
	err     error
	screen  io.WriteCloser // what the client writes to

	mu    sync.Mutex
	shown []byte
}

// sit returns a terminal of 24 rows and 80 columns.
func sit(t testing.TB) *desk {
	t.Helper()
	master, slave, err := openPair()
	if err != nil {
		t.Fatal(err)
	}
	screen, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", slave.Fd()), os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	d := &desk{t: t, master: master, slave: slave, changed: make(chan os.Signal, 1), ended: make(chan struct{}), screen: screen}
	d.resize(24, 80)
	d.before = d.modes()
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		for buf := make([]byte, 4096); ; {
			n, err := master.Read(buf)
			d.mu.Lock()
			d.shown = append(d.shown, buf[:n]...)
			d.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_, _, _ = slave.Close(), screen.Close(), master.Close()
		wait.For(t, "the end of the terminal", shown)
	})
	return d
}

func (d *desk) resize(rows, columns uint16) {
	d.t.Helper()
	if err := peer.Control(d.slave, func(fd int) error { return resize(fd, Size{rows, columns}) }); err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) modes() (m unix.Termios) {
	d.t.Helper()
	err := peer.Control(d.slave, func(fd int) error {
		got, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			m = *got
		}
		return err
	})
	if err != nil {
		d.t.Fatal(err)
	}
	return m
}

// run runs a role at the terminal.
func (d *desk) run(r *rig, q Request) (server <-chan struct{}) {
	d.t.Helper()
	d.t.Setenv("TERM", "vt100")
	conn, done := r.connect(context.Background(), web)
	d.client(conn, q, nil)
	return done
}

func (d *desk) client(conn *net.UnixConn, q Request, signals <-chan os.Signal) {
	go func() {
		defer close(d.ended)
		d.exit, d.err = do(conn, q, Streams{
			Stdin: d.slave, Stdout: d.screen, Stderr: d.screen, Signals: signals, Screen: &Screen{File: d.slave, Changed: d.changed},
		})
		_ = conn.Close()
	}()
	d.t.Cleanup(func() {
		_ = conn.Close()
		_, _ = d.master.Close(), d.slave.Close()
		wait.For(d.t, "the client", d.ended)
	})
}

func (d *desk) types(text string) {
	d.t.Helper()
	if _, err := d.master.WriteString(text); err != nil {
		d.t.Fatal(err)
	}
}

// sees waits until the terminal has shown the text, and forgets all to its end.
func (d *desk) sees(text string) {
	d.t.Helper()
	wait.Until(d.t, fmt.Sprintf("the terminal shows %q", text), func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		_, after, ok := bytes.Cut(d.shown, []byte(text))
		if !ok {
			return fmt.Errorf("it shows %q", d.shown)
		}
		d.shown = after
		return nil
	})
}

// leaves waits for the end of the client, whose terminal is as before.
func (d *desk) leaves() (Exit, error) {
	d.t.Helper()
	wait.For(d.t, "the client", d.ended)
	if now := d.modes(); now != d.before {
		d.t.Errorf("the client left its terminal in %+v, it was in %+v", now, d.before)
	}
	return d.exit, d.err
}

// The program has a terminal of its own: it belongs to its user, is its controlling terminal,
// has the client's size and type, and follows its size.
func TestTerminal(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	d.run(r, role("terminal"))
	d.sees("24x80 vt100 owner=65534 mode=600 mine=true session=true all=true\r\n")
	d.resize(50, 132)
	d.changed <- syscall.SIGWINCH
	d.sees("window changed 50x132\r\n")
	d.resize(0, 65535)
	d.changed <- syscall.SIGWINCH
	d.sees("window changed 0x65535\r\n")
	d.types("\x03")
	d.sees("^Cinterrupt\r\n")
	d.types("\x1c")
	d.sees("quit\r\n")
	if exit, err := d.leaves(); err != nil || exit != (Exit{Code: 9}) {
		t.Error(exit, err)
	}
	wait.Until(t, "the line of the log", func() error { // the client may know the end first
		if !strings.Contains(r.log.String(), "tty=true") {
			return errors.New(r.log.String())
		}
		return nil
	})
}

// Lines are edited and echoed by the program's terminal, and ^D ends its input.
func TestTerminalLines(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	d.run(r, role("terminalcat"))
	d.sees("ready\r\n")
	d.types("helpo\x7f\x7flo\r")
	d.sees("helpo\b \b\b \blo\r\nhello\r\n")
	d.types("\x04")
	if exit, err := d.leaves(); err != nil || exit != (Exit{}) {
		t.Error(exit, err)
	}
}

// A megabyte passes in both directions, also where the program ends at once after its last byte.
func TestTerminalCarriesAll(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	in := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(in)
	d.run(r, role("terminalsum"))
	d.sees("ready\n") // the program's terminal is in raw mode
	go func() { _, _ = d.master.Write(in) }()
	d.sees(fmt.Sprintf("%x", sha256.Sum256(in)))
	if exit, err := d.leaves(); err != nil || exit != (Exit{}) {
		t.Fatal(exit, err)
	}
	d.mu.Lock()
	d.shown = nil
	d.mu.Unlock()
	conn, _ := r.connect(context.Background(), web)
	var out bytes.Buffer
	q := role("both")
	exit, err := do(conn, q, Streams{Stdin: d.slave, Stdout: slowly{&out, time.Millisecond}, Screen: &Screen{File: d.slave}})
	if want := bytes.Repeat([]byte("0123456789abcdef"), 640<<10); err != nil || exit.Code != 0 || !bytes.Equal(out.Bytes(), want) {
		t.Errorf("%+v, %v: %d bytes, want %d", exit, err, out.Len(), len(want))
	}
}

// A program that closes its terminal goes on, and can open it again.
func TestTerminalClosed(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	d.run(r, role("reopen"))
	d.sees("again\r\n")
	d.types("x\r")
	if exit, err := d.leaves(); err != nil || exit != (Exit{Code: 4}) {
		t.Error(exit, err)
	}
}

// Whatever ends the session, nothing is left of the job, and the client's terminal is as before.
func TestTerminalEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(d *desk, r *rig, signals chan<- os.Signal)
		exit Exit
		want string
	}{
		{"the program is killed", func(_ *desk, _ *rig, signals chan<- os.Signal) { signals <- syscall.SIGTERM }, Exit{Code: -1, Signal: syscall.SIGTERM}, ""},
		{"the helper is killed", func(_ *desk, r *rig, _ chan<- os.Signal) { r.killHelper() }, Exit{}, "the helper has gone"},
		{"the agent stops", func(_ *desk, r *rig, _ chan<- os.Signal) { r.stop() }, Exit{}, "the helper has gone"},
		{"the client cannot write", func(d *desk, _ *rig, _ chan<- os.Signal) { _ = d.screen.Close() }, Exit{}, "file already closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			d := sit(t)
			signals := make(chan os.Signal, 1)
			conn, done := r.connect(context.Background(), web)
			d.client(conn, role("terminaltick"), signals)
			d.sees("tick\r\n")
			if d.modes() == d.before {
				t.Error("the client's terminal is not in raw mode")
			}
			populated(t, r.server.starter.process.Pid)
			c.end(d, r, signals)
			exit, err := d.leaves()
			if exit != c.exit || (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%+v, %v; want %+v, %s", exit, err, c.exit, c.want)
			}
			wait.For(t, "the server of the client", done)
			r.noneLeft()
		})
	}
}

// A client whose terminal has gone ends the program, which must not take it for the end of
// its input.
func TestTerminalHangsUp(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	path := filepath.Join(public(t), "whole")
	done := d.run(r, role("commit", path))
	d.sees("ready\r\n")
	_ = d.master.Close()
	wait.For(t, "the client", d.ended)
	if d.err == nil || !strings.Contains(d.err.Error(), "the terminal has hung up") {
		t.Error(d.exit, d.err)
	}
	wait.For(t, "the server of the client", done)
	r.noneLeft()
	if _, err := os.Stat(path); err == nil {
		t.Error("the program saw the end of its input")
	}
}

// A client's terminal is not touched where the program is not run.
func TestTerminalRefused(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct{ name, want string }{
		{"args", `policy: the entry does not allow container "web" this for "args": a terminal (its entry needs tty: true)`},
		{"bad0", "SHA-256"},
	} {
		d := sit(t)
		d.run(r, Request{Name: c.name, Args: role("sleep").Args})
		if _, err := d.leaves(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	for _, c := range []struct{ tty, reason, want string }{
		{`{"rows":65536,"columns":1}`, "request", "rows"},
		{`{"rows":-1,"columns":1}`, "request", "rows"},
		{`{"type":"../x"}`, "policy", `a terminal of the type "../x"`},
		{`{"type":"x\u0000"}`, "policy", "a terminal of the type"},
		{`true`, "request", "tty"},
	} {
		conn, _ := r.connect(context.Background(), web)
		var hello, answer reply
		if _, err := peer.Receive(conn, &hello); err != nil {
			t.Fatal(err)
		}
		request := fmt.Sprintf(`{"nonce":%q,"run":{"name":"cat","args":["job","cat"],"tty":%s}}`, hello.Nonce, c.tty)
		if _, err := conn.Write([]byte(request)); err != nil {
			t.Fatal(err)
		}
		if _, err := peer.Receive(conn, &answer); err != nil || answer.Error == nil || string(answer.Error.Reason) != c.reason || !strings.Contains(answer.Error.Message, c.want) {
			t.Errorf("%s: %+v, %v; want %s: … %s", c.tty, answer.Error, err, c.reason, c.want)
		}
	}
	r.noneLeft()
}

// Sizes that come before the program has begun, or faster than it looks, are no harm: the
// last one holds.
func TestTerminalSizes(t *testing.T) {
	r := newRig(t)
	conn, _ := r.connect(context.Background(), web)
	q := role("terminal")
	q.TTY = &Terminal{}
	f := frames{conn: conn}
	var hello reply
	if _, err := peer.Receive(conn, &hello); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(peer.Send(conn, first{Nonce: hello.Nonce, Run: q}), f.sendJSON(frameSize, Size{1, 2})); err != nil {
		t.Fatal(err)
	}
	for i := range 10000 {
		if err := f.sendJSON(frameSize, Size{uint16(i % 2), 65535}); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.sendJSON(frameSize, Size{50, 132}); err != nil {
		t.Fatal(err)
	}
	for shown, buf := "", newBuffer(); !strings.Contains(shown, "50x132"); {
		k, b, err := f.receive(buf, peer.NewControl())
		if err != nil || k != frameReply && k != frameStdout {
			t.Fatalf("%c %q, %v, after %q", k, b, err, shown)
		}
		shown += string(b)
	}
}

// What a client must not send ends its job, with a terminal and without.
func TestTerminalMisuse(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		tty     *Terminal
		k       kind
		content string
	}{
		{nil, frameSize, `{"rows":1,"columns":1}`},
		{&Terminal{}, frameStdinEnd, ""},
		{&Terminal{}, frameSize, ""},
		{&Terminal{}, frameSize, `{"rows":65536}`},
		{&Terminal{}, frameSize, `{"rows":1}{"rows":2}`},
		{&Terminal{}, frameSize, `[1,2]`},
	} {
		conn, done := r.connect(context.Background(), web)
		q := role("sleep")
		q.TTY = c.tty
		begin(t, conn, q)
		if err := (&frames{conn: conn}).send(c.k, []byte(c.content)); err != nil {
			t.Error(err)
		}
		wait.For(t, fmt.Sprintf("the end of the session after %c %q", c.k, c.content), done)
	}
	r.noneLeft()
}

// More input than a terminal takes waits, and delays neither a signal nor the end.
func TestTerminalFull(t *testing.T) {
	r := newRig(t)
	d := sit(t)
	signals := make(chan os.Signal, 1)
	conn, done := r.connect(context.Background(), web)
	d.client(conn, role("terminaldeaf"), signals)
	d.sees("ready\n")
	full := make(chan struct{})
	go func() {
		defer close(full)
		_, _ = d.master.Write(make([]byte, 1<<20))
	}()
	t.Cleanup(func() {
		_ = d.master.Close()
		wait.For(t, "the end of what is typed", full)
	})
	waits(t, "(*session).feed(", "(*File).Write(")
	signals <- syscall.SIGTERM
	if exit, err := d.leaves(); err != nil || exit != (Exit{Code: -1, Signal: syscall.SIGTERM}) {
		t.Error(exit, err)
	}
	wait.For(t, "the server of the client", done)
	r.noneLeft()
}

// waits waits until a goroutine waits for a descriptor in all of these functions.
func waits(t testing.TB, in ...string) {
	t.Helper()
	stacks := make([]byte, 1<<20)
	wait.Until(t, fmt.Sprintf("a goroutine waits in %q", in), func() error {
		for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			calls, ok := 0, strings.Contains(g, " [IO wait")
			for _, f := range in {
				calls += min(strings.Count(g, f), 1)
			}
			if ok && calls == len(in) {
				return nil
			}
		}
		return errors.New("none does")
	})
}

// A client that does not read stops the program at its terminal, and ends it when it goes.
func TestTerminalNotRead(t *testing.T) {
	r := newRig(t)
	conn, done := r.connect(context.Background(), web)
	q := role("both")
	q.TTY = &Terminal{}
	begin(t, conn, q)
	g := populated(t, r.server.starter.process.Pid)
	f := frames{conn: conn}
	for range window / maxFrame {
		if err := f.send(frameStdin, make([]byte, maxFrame)); err != nil {
			t.Fatal(err)
		}
	}
	waits(t, "(*session).copy(", "(*frames).send(")
	if !cgroup.Populated(g) {
		t.Error("the program did not wait for its client")
	}
	_ = conn.Close()
	wait.For(t, "the session to end", done)
	r.noneLeft()
}
