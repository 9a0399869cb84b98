// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"encoding/json"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/publish/ask"
	"github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/yamltree"
)

func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"name":"backup","args":["--all"],"env":["LANG=C"]}`))
	f.Add([]byte(`{"name":"backup","args":["--all\u0000"],"env":["PATH=/x"]}`))
	f.Add([]byte(`{"name":"other"}`))
	n, err := yamltree.Parse("policy", []byte("- name: backup\n  match: {name: web}\n  users: [\"7\"]\n  path: /bin/true\n  user: nobody\n  args: [--all]\n  env: [LANG]\n"+
		"  sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n"))
	if err != nil {
		f.Fatal(err)
	}
	allow, err := policy.Parse(n)
	if err != nil {
		f.Fatal(err)
	}
	s := New(Options{Policy: allow})
	web := ask.Client{Container: port.Owner{Kind: port.OwnerContainer, Name: "web"}}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q Request
		if json.Unmarshal(b, &q) != nil {
			return
		}
		if s.allowed(ask.Client{Guest: true, UID: 8}, q) == nil {
			t.Errorf("another user gets %q", q)
		}
		if s.allowed(web, q) != nil {
			return
		}
		for _, a := range q.Args {
			if a != "--all" {
				t.Errorf("gets %q", q)
			}
		}
		for _, e := range q.Env {
			if !strings.HasPrefix(e, "LANG=") {
				t.Errorf("gets %q", q)
			}
		}
	})
}

// FuzzFrames sends a client's frames, each with a byte for its length before it.
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x06ihello\x05sTERM\x01e\x02ix"))
	f.Add([]byte("\x05sKILL"))
	f.Add([]byte("\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
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
		c := session{frames: frames{conn: near}, job: &job{conn: helper}, wake: make(chan struct{}, 1)}
		c.receiveAll()
		if len(c.stdin) > min(sent, window) {
			t.Errorf("%d bytes of %d", len(c.stdin), sent)
		}
	})
}
