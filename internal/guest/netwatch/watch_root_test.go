// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package netwatch

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/output"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// patience is a limit that only a failure reaches.
var patience = wait.Limit()

type world struct {
	t     *testing.T
	space *netns.Space
	path  string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	s, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return &world{t, s, fmt.Sprintf("/proc/self/fd/%d", s.FD())}
}

// ip runs commands of ip in the namespace.
func (w *world) ip(commands ...string) {
	w.t.Helper()
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := w.space.Start(cmd); err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		w.t.Fatalf("ip: %v: %s", err, &out)
	}
}

func (w *world) watch(opt Options) *Watcher {
	opt.NetNS = w.path
	x := New(opt)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { x.Run(ctx) })
	w.t.Cleanup(func() { cancel(); running.Wait() })
	return x
}

// until waits for a snapshot that is as it should be.
func until(t *testing.T, x *Watcher, what string, ok func(s *Snapshot) bool) {
	t.Helper()
	late := time.After(patience)
	for {
		s, err := x.Snapshot()
		if err == nil && ok(&s) {
			return
		}
		select {
		case <-x.Changed():
		case <-late:
			t.Fatalf("%s: not within %s: %+v, %v", what, patience, s, err)
		}
	}
}

func (s *Snapshot) text() []string {
	var out []string
	name := func(i int) string { l, _ := s.Link(i); return l.Name }
	for _, l := range s.Links {
		out = append(out, "link "+l.Name, fmt.Sprintf("bridge %s %t", l.Name, l.Bridge))
	}
	for _, a := range s.Addresses {
		out = append(out, "address "+a.Prefix.String()+" "+name(a.Link))
	}
	for _, r := range s.Defaults {
		out = append(out, "default "+r.Dst.String()+" "+name(r.Link))
	}
	for _, r := range s.Others {
		out = append(out, "other "+r.Dst.String()+" "+name(r.Link))
	}
	for _, r := range s.Local {
		out = append(out, "local "+r.Dst.String()+" "+name(r.Link))
	}
	return out
}

func TestChangesAreFollowed(t *testing.T) {
	w := newWorld(t)
	w.ip("link add eth0 type veth peer name eth0p", "link set eth0p up", "link set eth0 up", "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad",
		"addr add 10.0.0.1 peer 10.0.0.2/32 dev eth0", "route add default via 192.0.2.1", "route add default via 2001:db8::1")
	x := w.watch(Options{})
	has := func(lines ...string) func(*Snapshot) bool {
		return func(s *Snapshot) bool {
			all := s.text()
			return !slices.ContainsFunc(lines, func(l string) bool {
				if gone, ok := strings.CutPrefix(l, "no "); ok {
					return slices.Contains(all, gone)
				}
				return !slices.Contains(all, l)
			})
		}
	}
	until(t, x, "what exists", has("link lo", "link eth0", "address 127.0.0.1/8 lo", "address 192.0.2.2/24 eth0", "address 2001:db8::2/64 eth0",
		"address 10.0.0.1/32 eth0", "default 0.0.0.0/0 eth0", "default ::/0 eth0", "local 127.0.0.0/8 lo", "local 192.0.2.2/32 eth0"))
	for _, step := range []struct{ command, want string }{
		{"link add br0 type bridge", "bridge br0 true"},
		{"route add 128.0.0.0/1 via 192.0.2.1", "default 128.0.0.0/1 eth0"},
		{"route add default via 192.0.2.1 table 1000", "other 0.0.0.0/0 eth0"},
		{"route add default via 2001:db8::1 table 100", "other ::/0 eth0"},
		{"route del default via 192.0.2.1 table 1000", "no other 0.0.0.0/0 eth0"},
		{"link add eth1 type veth peer name eth1p", "link eth1"},
		{"link set eth1 up", "link eth1"},
		{"addr add 198.51.100.2/24 dev eth1", "local 198.51.100.2/32 eth1"},
		{"route replace default via 198.51.100.1", "default 0.0.0.0/0 eth1"},
		{"route add local 203.0.113.0/24 dev lo", "local 203.0.113.0/24 lo"},
		{"addr del 192.0.2.2/24 dev eth0", "no local 192.0.2.2/32 eth0"},
		{"link set eth1 down", "no default 0.0.0.0/0 eth1"},
		{"link set eth1 name wan", "link wan"},
		{"link del wan", "no link wan"},
		{"link set eth0 down", "no default ::/0 eth0"},
	} {
		w.ip(step.command)
		until(t, x, step.command, has(step.want))
	}
	got, _ := x.Snapshot()
	if want, err := List(w.path, All); err != nil || !got.equal(&want) {
		t.Errorf("followed %v, listed %v, %v", got.text(), want.text(), err)
	}
}

func TestOnlyThePartsAskedFor(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		parts Part
		want  [4]bool
	}{{Links, [4]bool{true}}, {Addresses, [4]bool{1: true}}, {Routes, [4]bool{3: true}}, {All, [4]bool{true, true, false, true}}} {
		s, err := List(w.path, c.parts)
		if got := [4]bool{len(s.Links) > 0, len(s.Addresses) > 0, len(s.Defaults) > 0, len(s.Local) > 0}; err != nil || got != c.want {
			t.Errorf("parts %b: %+v, %v", c.parts, s, err)
		}
	}
}

// After notifications were lost the snapshot is what a listing gives.
// TestAddressThatPassesIsReported: what was decided while it was there must be decided
// again.
func TestAddressThatPassesIsReported(t *testing.T) {
	w := newWorld(t)
	x := w.watch(Options{Parts: Addresses, Passing: true})
	until(t, x, "the first listing", func(*Snapshot) bool { return true })
	for len(x.Changed()) > 0 {
		<-x.Changed()
	}
	w.ip("addr add 192.0.2.9/32 dev lo", "addr del 192.0.2.9/32 dev lo")
	wait.For(t, "a change", x.Changed())
}

func TestLossIsFollowedByAListing(t *testing.T) {
	w := newWorld(t)
	log := new(output.Buffer)
	x := w.watch(Options{Parts: Links | Routes, Log: slog.New(slog.NewTextHandler(log, nil)), buffer: 1})
	until(t, x, "the first listing", func(s *Snapshot) bool { return len(s.Links) > 0 })
	late := time.Now().Add(patience)
	for n := 0; !strings.Contains(log.String(), "lost"); n++ {
		if time.Now().After(late) {
			t.Fatal("no notification is ever lost")
		}
		var add, remove []string
		for i := range 250 {
			add = append(add, fmt.Sprintf("route add local 203.0.113.%d dev lo", i+1))
			remove = append(remove, fmt.Sprintf("route del local 203.0.113.%d dev lo", i+1))
		}
		w.ip(add...)
		w.ip(remove...)
	}
	w.ip("route add local 198.51.100.1 dev lo")
	last := netip.MustParsePrefix("198.51.100.1/32")
	until(t, x, "a change after the loss", func(s *Snapshot) bool {
		return slices.ContainsFunc(s.Local, func(r Route) bool { return r.Dst == last })
	})
	want, err := List(w.path, Links|Routes)
	if err != nil {
		t.Fatal(err)
	}
	until(t, x, "the state after the loss", func(s *Snapshot) bool { return s.equal(&want) })
}

func TestMissingNamespaceIsReported(t *testing.T) {
	w := &world{t: t, path: "/nowhere"}
	x := w.watch(Options{})
	<-x.Changed()
	if _, err := x.Snapshot(); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("error %v", err)
	}
}
