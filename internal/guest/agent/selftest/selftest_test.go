// SPDX-License-Identifier: Apache-2.0

//go:build linux

package selftest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

// watched returns a recorder of an observer that uses a method for all.
func watched(method string) *sockets {
	r := newSockets(func(cookie uint64) bool { return cookie < 10 })
	r.Methods([]kernel.Method{{Capability: observer.TCPListen, Name: method}, {Capability: observer.UDPBind, Name: method}})
	r.Replace(nil)
	return r
}

func event(cookie uint64, gone bool, observed int64) []observer.Event {
	return []observer.Event{{Gone: gone, Socket: observer.Socket{Cookie: cookie, Listening: true, Observed: observed}}}
}

// A socket that only a dump has counts as no event, unless it is polled.
func TestDumpIsNoEvent(t *testing.T) {
	for _, tt := range []struct {
		method   string
		observed int64
		want     error
	}{
		{kernel.MethodFentry, 7, nil}, {kernel.MethodFentry, 0, errDumped}, {observer.MethodPoll, 0, nil},
	} {
		r := watched(tt.method)
		for _, cookie := range []uint64{1, 11} { // the second one is not ours
			r.Apply(event(cookie, false, tt.observed))
			r.Apply(event(cookie, true, tt.observed))
		}
		for _, look := range []func(port.Protocol, uint64) (string, time.Time, error){r.opened, r.closed} {
			for _, p := range []port.Protocol{port.TCP, port.UDP} {
				if method, at, err := look(p, 1); method != tt.method || at.IsZero() || !errors.Is(err, tt.want) {
					t.Errorf("%+v: %s at %v, %v", tt, method, at, err)
				}
				if _, at, err := look(p, 11); !at.IsZero() || err != nil {
					t.Errorf("the socket of somebody else: %v, %v", at, err)
				}
			}
		}
	}
}

// A loss of events has all sockets dumped.
func TestReplaceIsNoEvent(t *testing.T) {
	r := watched(kernel.MethodFentry)
	r.Replace([]observer.Socket{{Cookie: 1, Listening: true, Observed: 7}})
	if _, at, err := r.opened(port.TCP, 1); at.IsZero() || !errors.Is(err, errDumped) {
		t.Errorf("opened %v, %v", at, err)
	}
	r.Replace(nil)
	if _, at, err := r.closed(port.TCP, 1); at.IsZero() || !errors.Is(err, errDumped) {
		t.Errorf("closed %v, %v", at, err)
	}
}

func TestRuleIsFoundInAnySet(t *testing.T) {
	rule := port.Binding{Key: port.Key{Port: rulePort}, Origin: port.Origin{Source: "nat", ID: "1"}}
	other := port.Binding{Key: port.Key{Port: 80}, Origin: port.Origin{Source: "nat", ID: "2"}}
	for name, report := range map[string]func(r *rules, put bool){
		"apply": func(r *rules, put bool) {
			if put {
				r.Apply(port.Change{Put: []port.Binding{other, rule}})
			} else {
				r.Apply(port.Change{Drop: []port.Origin{other.Origin, rule.Origin}})
			}
		},
		"replace": func(r *rules, put bool) {
			if put {
				r.Replace([]port.Binding{other, rule})
			} else {
				r.Replace([]port.Binding{other})
			}
		},
	} {
		r := newRules()
		r.Method("nfnetlink, legacy poll 2s")
		r.Replace([]port.Binding{other})
		if _, at, _ := r.added(); !at.IsZero() {
			t.Errorf("%s: another rule was taken for ours", name)
		}
		report(r, true)
		if method, at, err := r.added(); method != "nfnetlink" || at.IsZero() || err != nil {
			t.Errorf("%s: added %s at %v, %v", name, method, at, err)
		}
		if _, at, _ := r.removed(); !at.IsZero() {
			t.Errorf("%s: removed early", name)
		}
		report(r, false)
		if _, at, _ := r.removed(); at.IsZero() {
			t.Errorf("%s: not removed", name)
		}
	}
}

// A step that fails has its reason and a remedy, and the test ends in time.
func TestFailedSteps(t *testing.T) {
	never := func() (string, time.Time, error) { return "fentry", time.Time{}, nil }
	done := func() error { return nil }
	for _, tt := range []struct {
		name    string
		do      func() error
		seen    func() (string, time.Time, error)
		err     string
		remedy  string
		timeout time.Duration
	}{
		{"refused", func() error { return errors.New("no chain") }, never, "no chain", refusedRemedy, time.Hour},
		{"missing", done, never, "no event within 20s", missingRemedy, time.Hour},
		{"dumped", done, func() (string, time.Time, error) { return "fentry", time.Now(), errDumped }, errDumped.Error(), missingRemedy, time.Hour},
		{"ended", done, never, context.DeadlineExceeded.Error(), missingRemedy, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), tt.timeout)
				defer cancel()
				x := new(test)
				if x.step(ctx, "a step", tt.do, tt.seen, nil) {
					t.Error("succeeded")
				}
				if s := x.result.Steps; len(s) != 1 || s[0].Name != "a step" || s[0].Error != tt.err || s[0].Remedy != tt.remedy {
					t.Errorf("%+v", s)
				}
			})
		})
	}
}

// What is tested may break, or never begin.
func TestWithin(t *testing.T) {
	broken := errors.New("broken")
	blocks := func(ctx context.Context) error { <-ctx.Done(); return nil }
	open := make(chan struct{})
	close(open)
	for _, tt := range []struct {
		name  string
		run   func(context.Context) error
		ready <-chan struct{}
		want  string
	}{
		{"works", blocks, open, ""},
		{"breaks", func(context.Context) error { return broken }, nil, "broken"},
		{"never begins", blocks, nil, "nothing was read within 1m0s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := false
			err := within(t.Context(), tt.run, tt.ready, func(context.Context) { began = true })
			if began != (tt.want == "") || (err == nil) != began || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s: began %v, %v", tt.name, began, err)
			}
		})
	}
}

// A socket that cannot be opened is a failed step.
func TestSocketThatCannotBeOpened(t *testing.T) {
	space, err := kernel.OpenNamespace()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
		test := &test{space: space}
		// An address that nobody has (RFC 5737).
		test.socket(t.Context(), watched(kernel.MethodFentry), protocol, test.opener(t.Context(), protocol, "192.0.2.1:0"))
		if s := test.result.Steps; len(s) != 1 || s[0].Error == "" || s[0].Remedy != refusedRemedy {
			t.Errorf("%v: %+v", protocol, s)
		}
	}
}

// What is waited for does not come any more when the observer has ended.
func TestObserverThatEndsEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ready := make(chan struct{})
		broken := errors.New("the ring buffer broke")
		run := func(context.Context) error {
			close(ready)
			time.Sleep(time.Second)
			return broken
		}
		began := time.Now()
		err := within(t.Context(), run, ready, func(ctx context.Context) {
			_, _, _ = await(ctx, func() (string, time.Time, error) { return "", time.Time{}, nil }, nil)
		})
		if took := time.Since(began); !errors.Is(err, broken) || took > 2*time.Second {
			t.Errorf("%v after %v, want %v after a second", err, took, broken)
		}
	})
}

func TestMain(m *testing.M) { leak.Main(m) }
