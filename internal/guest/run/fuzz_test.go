// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/port"
)

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"name":"backup","args":["--all"],"env":["LANG=C"]}`))
	f.Add([]byte(`{"name":"backup","args":["--all\u0000"],"env":["PATH=/x"]}`))
	f.Add([]byte(`{"name":"other"}`))
	f.Add([]byte(`{"name":"backup","args":["--all"],"tty":{"rows":24,"columns":80,"type":"xterm"}}`))
	c, err := parse("run.yaml", []byte("allow:\n- name: backup\n  match: {name: web}\n  users: [\"7\"]\n  path: /bin/true\n  user: nobody\n  args: [--all]\n  env: [LANG]\n"+
		"  sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n"))
	if err != nil {
		f.Fatal(err)
	}
	s := New(Options{Policy: c.Allow, Logger: slog.New(slog.DiscardHandler)})
	web := peer.Client{Container: port.Owner{Kind: port.OwnerContainer, Name: "web"}}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q Request
		if json.Unmarshal(b, &q) != nil {
			return
		}
		if s.allowed(peer.Client{Guest: true, UID: 8}, q) == nil {
			t.Errorf("another user gets %+v", q)
		}
		if s.allowed(web, q) != nil {
			return
		}
		if q.TTY != nil {
			t.Errorf("gets a terminal: %+v", q)
		}
		for _, a := range q.Args {
			if a != "--all" {
				t.Errorf("gets %+v", q)
			}
		}
		for _, e := range q.Env {
			if !strings.HasPrefix(e, "LANG=") {
				t.Errorf("gets %+v", q)
			}
		}
	})
}

// FuzzFrames sends a client's frames, each with a byte for its length before it.
func FuzzFrames(f *testing.F) {
	f.Add(false, []byte("\x06ihello\x05sTERM\x01e\x02ix"))
	f.Add(false, []byte("\x05sKILL"))
	f.Add(false, []byte("\x00"))
	f.Add(true, []byte("\x18w{\"rows\":1,\"columns\":2}\x01e"))
	f.Fuzz(func(t *testing.T, tty bool, b []byte) {
		near, theirs, err := pair()
		if err != nil {
			t.Fatal(err)
		}
		helper, far, err := pair()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _, _, _ = near.Close(), helper.Close(), far.Close() }()
		var sent int
		for i := 0; len(b) > 0 && i < 100; i++ { // as many as the socket holds
			n := min(int(b[0]), len(b)-1)
			if n > 0 && unix.Send(int(theirs.Fd()), b[1:n+1], unix.MSG_DONTWAIT) != nil {
				break
			}
			b, sent = b[n+1:], sent+n
		}
		_ = theirs.Close()
		c := session{frames: frames{conn: near}, job: &job{conn: helper, tty: tty}, wake: make(chan struct{}, 1)}
		c.receiveAll()
		if len(c.stdin) > min(sent, window) {
			t.Errorf("%d bytes of %d", len(c.stdin), sent)
		}
	})
}

// FuzzSize has a client send a size, which its program's terminal then has if it is one.
func FuzzSize(f *testing.F) {
	f.Add([]byte(`{"rows":24,"columns":80}`))
	f.Add([]byte(`{"rows":0,"columns":65535}`))
	f.Add([]byte(`{"rows":65536}`))
	f.Add([]byte(`{"rows":1}{}`))
	master, slave, err := openPair()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _, _ = master.Close(), slave.Close() })
	c := session{job: &job{stdin: master, tty: true}}
	f.Fuzz(func(t *testing.T, b []byte) {
		before, err := unix.IoctlGetWinsize(int(slave.Fd()), unix.TIOCGWINSZ)
		if err != nil {
			t.Fatal(err)
		}
		want, took := *before, c.resize(b)
		if took && !json.Valid(b) {
			t.Errorf("took %q", b)
		}
		var s Size
		if took && json.Unmarshal(b, &s) == nil {
			want = unix.Winsize{Row: s.Rows, Col: s.Columns}
		}
		if got, err := unix.IoctlGetWinsize(int(slave.Fd()), unix.TIOCGWINSZ); err != nil || *got != want {
			t.Errorf("%q: %+v, %v, want %+v", b, got, err, want)
		}
	})
}
