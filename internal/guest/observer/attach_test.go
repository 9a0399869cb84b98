// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// allFeatures is what a new kernel has.
var allFeatures = features{boundDump: true, mptcpBind: true}

// fakeKernel attaches hooks unless it refuses one of them.
type fakeKernel struct {
	refuse   map[string]error // by a part of the hook's name
	attached []string
}

func (f *fakeKernel) attach(hooks []string) error {
	for _, h := range hooks {
		for part, err := range f.refuse {
			if strings.Contains(h, part) {
				return err
			}
		}
	}
	f.attached = append(f.attached, hooks...)
	return nil
}

func chain(t *testing.T, name string) kernel.Capability {
	t.Helper()
	for _, c := range capabilities(allFeatures) {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no capability %q", name)
	return kernel.Capability{}
}

func TestChain(t *testing.T) {
	noFentry, noKprobe, noTracepoint := errors.New("no fentry"), errors.New("no kprobe"), errors.New("no tracepoint")
	for _, c := range []struct {
		name    string
		refuse  map[string]error
		allowed []string
		want    string
		errs    []error
	}{
		{name: "the best", want: kernel.MethodFentry},
		{name: "the next", refuse: map[string]error{"listen_start": noFentry}, want: kernel.MethodKprobe, errs: []error{noFentry}},
		{
			name: "the one after", want: kernel.MethodTPBTF, errs: []error{noFentry, noKprobe},
			refuse: map[string]error{"listen_start": noFentry, "inet_hash": noKprobe},
		},
		{
			name: "none", want: MethodPoll, errs: []error{noTracepoint},
			refuse: map[string]error{"tcp_state": noTracepoint},
		},
		{name: "one allowed", allowed: []string{kernel.MethodTPBTF}, want: kernel.MethodTPBTF},
		{
			name: "one allowed that fails", allowed: []string{kernel.MethodFentry}, want: MethodPoll, errs: []error{noFentry},
			refuse: map[string]error{"listen_start": noFentry},
		},
		{name: "only polling allowed", allowed: []string{MethodPoll}, want: MethodPoll},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := &fakeKernel{refuse: c.refuse}
			got, err := chain(t, TCPListen).Attach(k.attach, nil, c.allowed)
			if err != nil || got.Name != c.want || got.Capability != TCPListen {
				t.Fatalf("method %+v, %v, want %s", got, err, c.want)
			}
			for _, err := range c.errs {
				if !errors.Is(got.Err, err) {
					t.Errorf("error %v does not wrap %v", got.Err, err)
				}
			}
			if len(c.errs) == 0 && got.Err != nil {
				t.Errorf("error %v", got.Err)
			}
			if (len(k.attached) == 0) != (c.want == MethodPoll) {
				t.Errorf("hooks %v on %s", k.attached, c.want)
			}
			if c.want == MethodPoll && got.Lost == "" {
				t.Error("does not name what polling loses")
			}
		})
	}
}

// A method loses nothing of what the kernel does not have.
func TestLossNamesMPTCPOnlyWhereItExists(t *testing.T) {
	for _, mptcp := range []bool{false, true} {
		named := false
		for _, c := range capabilities(features{boundDump: true, mptcpBind: mptcp}) {
			for _, r := range c.Choices {
				named = named || strings.Contains(r.Lost, "MPTCP")
			}
		}
		if named != mptcp {
			t.Errorf("with another bind of MPTCP %v: a loss of it is named: %v", mptcp, named)
		}
	}
}

func TestChainWithoutKernel(t *testing.T) {
	cause := errors.New("no bpf here")
	for _, c := range capabilities(features{}) {
		got, err := c.Attach(nil, cause, nil)
		if err != nil || !errors.Is(got.Err, cause) {
			t.Errorf("%s: %+v, %v", c.Name, got, err)
		}
	}
}

// TestStopHooksFirst: this order is what makes the start free of races.
func TestStopHooksFirst(t *testing.T) {
	stops := []string{"tcp_state_stop", "tcp_destroy", "udp_unhash", "udp_release", "udp_unhash_kp"}
	for _, c := range capabilities(allFeatures) {
		if c.Name != TCPListen && c.Name != TCPBind && c.Name != UDPBind {
			continue
		}
		for _, r := range c.Choices {
			// tcp_state is both in one.
			if len(r.Hooks) > 0 && !slices.Contains(stops, r.Hooks[0]) && r.Hooks[0] != "tcp_state" {
				t.Errorf("%s on %s attaches %s first", c.Name, r.Name, r.Hooks[0])
			}
		}
	}
}

// TestHooksExist finds the hooks of all methods in the objects.
func TestHooksExist(t *testing.T) {
	sock, err := bpf.LoadSock()
	if err != nil {
		t.Fatal(err)
	}
	kprobes, err := bpf.LoadSockKprobes()
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]string)
	for _, c := range capabilities(allFeatures) {
		for _, r := range c.Choices {
			for _, h := range r.Hooks {
				if sock.Programs[h] == nil && kprobes.Programs[h] == nil {
					t.Errorf("%s on %s: no program %s", c.Name, r.Name, h)
				}
				// The kernel shows the first 15 characters.
				short := h[:min(len(h), 15)]
				if other := names[short]; other != "" && other != h {
					t.Errorf("%s and %s look alike", other, h)
				}
				names[short] = h
			}
		}
	}
	for name := range sock.Programs {
		if names[name[:min(len(name), 15)]] != name {
			t.Errorf("program %s is in no method", name)
		}
	}
}

func TestOptions(t *testing.T) {
	if _, err := New(Options{}); err != nil {
		t.Errorf("the zero value: %v", err)
	}
	for name, o := range map[string]Options{
		"mode":     {Mode: 9},
		"interval": {Interval: 1},
		"audit":    {Audit: 1},
		"ring":     {RingBytes: 3 << 20},
		"ring low": {RingBytes: 4096},
		"method":   {Methods: []string{"magic"}},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%s: %+v is taken", name, o)
		}
	}
	for _, m := range []Mode{Auto, BPF, Poll} {
		if got, err := ParseMode(m.String()); err != nil || got != m {
			t.Errorf("ParseMode(%q) = %v, %v", m, got, err)
		}
	}
	if _, err := ParseMode("maybe"); err == nil {
		t.Error("ParseMode takes anything")
	}
}
