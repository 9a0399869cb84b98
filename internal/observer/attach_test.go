// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
)

// fakeKernel attaches hooks unless it refuses one of them.
type fakeKernel struct {
	refuse   map[string]error // by a part of the hook's name
	attached []string
	closed   []string
}

func (f *fakeKernel) attach(hooks []string) (io.Closer, error) {
	for _, h := range hooks {
		for part, err := range f.refuse {
			if strings.Contains(h, part) {
				return nil, err
			}
		}
	}
	f.attached = append(f.attached, hooks...)
	return closer(func() error { f.closed = append(f.closed, hooks...); return nil }), nil
}

func chain(t *testing.T, name string) capability {
	t.Helper()
	for _, c := range capabilities(true) {
		if c.name == name {
			return c
		}
	}
	t.Fatalf("no capability %q", name)
	return capability{}
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
		{name: "the best", want: MethodFentry},
		{name: "the next", refuse: map[string]error{"listen_start": noFentry}, want: MethodKprobe, errs: []error{noFentry}},
		{
			name: "the one after", want: MethodTPBTF, errs: []error{noFentry, noKprobe},
			refuse: map[string]error{"listen_start": noFentry, "inet_hash": noKprobe},
		},
		{
			name: "none", want: MethodPoll, errs: []error{noTracepoint},
			refuse: map[string]error{"tcp_state": noTracepoint},
		},
		{name: "one allowed", allowed: []string{MethodTPBTF}, want: MethodTPBTF},
		{
			name: "one allowed that fails", allowed: []string{MethodFentry}, want: MethodPoll, errs: []error{noFentry},
			refuse: map[string]error{"listen_start": noFentry},
		},
		{name: "only polling allowed", allowed: []string{MethodPoll}, want: MethodPoll},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := &fakeKernel{refuse: c.refuse}
			got := attachChain(chain(t, TCPListen), k, nil, c.allowed)
			if got.Name != c.want || got.Capability != TCPListen {
				t.Fatalf("method %+v, want %s", got.Method, c.want)
			}
			for _, err := range c.errs {
				if !errors.Is(got.Err, err) {
					t.Errorf("error %v does not say %v", got.Err, err)
				}
			}
			if len(c.errs) == 0 && got.Err != nil {
				t.Errorf("error %v", got.Err)
			}
			if (got.hooks == nil) != (c.want == MethodPoll) {
				t.Errorf("hooks %v on %s", k.attached, c.want)
			}
			if c.want == MethodPoll && got.Lost == "" {
				t.Error("does not say what polling loses")
			}
		})
	}
}

func TestChainWithoutKernel(t *testing.T) {
	cause := errors.New("no bpf here")
	for _, c := range capabilities(false) {
		got := attachChain(c, nil, cause, nil)
		if got.hooks != nil || !errors.Is(got.Err, cause) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

// TestStopHooksFirst guards the order that makes a start without a race.
func TestStopHooksFirst(t *testing.T) {
	stops := []string{"tcp_state_stop", "tcp_destroy", "udp_unhash", "udp_release", "udp_unhash_kp"}
	for _, c := range capabilities(true) {
		if c.name != TCPListen && c.name != TCPBind && c.name != UDPBind {
			continue
		}
		for _, r := range c.methods {
			// tcp_state is both in one.
			if !r.last() && !slices.Contains(stops, r.hooks[0]) && r.hooks[0] != "tcp_state" {
				t.Errorf("%s on %s attaches %s first", c.name, r.name, r.hooks[0])
			}
		}
	}
}

// TestHooksExist finds the hooks of all methods in the objects.
func TestHooksExist(t *testing.T) {
	sock, err := loadSock()
	if err != nil {
		t.Fatal(err)
	}
	kprobes, err := loadKprobes()
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]string)
	for _, c := range capabilities(true) {
		for _, r := range c.methods {
			for _, h := range r.hooks {
				if sock.Programs[h] == nil && (kprobes == nil || kprobes.Programs[h] == nil) {
					t.Errorf("%s on %s: no program %s", c.name, r.name, h)
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
