// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package nat

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/nat/corpus"
)

func TestMain(m *testing.M) { leak.Main(m) }

// patience is a limit that only a failure reaches.
var patience = wait.Limit()

var netnsCount atomic.Int32

// world is a network namespace with a default route on eth0 and a bridge docker0.
type world struct {
	t    testing.TB
	name string
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, name: fmt.Sprintf("fl-nat-%d-%d", os.Getpid(), netnsCount.Add(1))}
	command(t, "", "ip", "netns", "add", w.name)
	t.Cleanup(func() { command(t, "", "ip", "netns", "del", w.name) })
	w.sh(`/usr/sbin/ip link set lo up
/usr/sbin/ip link add eth0 type veth peer name eth0p
/usr/sbin/ip link set eth0p up
/usr/sbin/ip addr add 192.0.2.2/24 dev eth0
/usr/sbin/ip addr add 2001:db8::2/64 dev eth0 nodad
/usr/sbin/ip link set eth0 up
/usr/sbin/ip link add docker0 type bridge
/usr/sbin/ip addr add 172.17.0.1/16 dev docker0
/usr/sbin/ip addr add fd00:17::1/64 dev docker0 nodad
/usr/sbin/ip link set docker0 up
/usr/sbin/ip route add default via 192.0.2.1
/usr/sbin/ip -6 route add default via 2001:db8::1`)
	// The kernel makes an IPv6 address local when it has seen the link's carrier, which can
	// take a second.
	wait.Until(t, "eth0 has its IPv6 address", func() error {
		if out := w.run("", "ip", "-6", "route", "get", "2001:db8::2"); !strings.HasPrefix(out, "local ") {
			return errors.New(out)
		}
		return nil
	})
	return w
}

func command(t testing.TB, stdin string, args ...string) string {
	t.Helper()
	out, err := try(stdin, args...)
	if err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
	return out
}

func try(stdin string, args ...string) (string, error) {
	c := exec.Command(args[0], args[1:]...)
	c.Stdin = strings.NewReader(stdin)
	out, err := c.CombinedOutput()
	return string(out), err
}

// run runs a command in the namespace.
func (w *world) run(stdin string, args ...string) string {
	w.t.Helper()
	return command(w.t, stdin, append([]string{"ip", "netns", "exec", w.name}, args...)...)
}

func (w *world) sh(script string) string {
	w.t.Helper()
	return w.run(script, "sh", "-eu", "-s")
}

func (w *world) path() string { return "/run/netns/" + w.name }

// feed keeps what a source publishes.
type feed struct {
	mu       sync.Mutex
	set      map[string]port.Binding
	complete bool
	stale    error
	drops    map[port.Key]int
	changes  int
	method   string
}

func newFeed() *feed { return &feed{set: map[string]port.Binding{}, drops: map[port.Key]int{}} }

func (f *feed) Replace(set []port.Binding) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := map[string]port.Binding{}
	for _, b := range set {
		next[b.Origin.ID] = b
	}
	f.step(next)
	f.complete, f.stale = true, nil
}

func (f *feed) Apply(c port.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := maps.Clone(f.set)
	for _, o := range c.Drop {
		delete(next, o.ID)
	}
	for _, b := range c.Put {
		next[b.Origin.ID] = b
	}
	f.step(next)
}

// step counts which keys went away.
func (f *feed) step(next map[string]port.Binding) {
	have := map[port.Key]bool{}
	for _, b := range next {
		have[b.Key] = true
	}
	for _, b := range f.set {
		if !have[b.Key] {
			f.drops[b.Key]++
		}
	}
	f.set = next
	f.changes++
}

func (f *feed) Stale(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stale = err
}

func (*feed) Warn([]string) {}

func (f *feed) Lacks(_ port.Lack, why string) { f.Method(why) }

func (f *feed) Method(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.method = name
}

func (f *feed) staleNow() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stale
}

func (f *feed) methodNow() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.method
}

// lines renders the set as corpus files state it.
func (f *feed) lines() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, b := range f.set {
		out = append(out, bindingLine(b))
	}
	slices.Sort(out)
	return out
}

func bindingLine(b port.Binding) string {
	table := strings.TrimSuffix(b.Origin.ID, " "+b.Key.String())
	s := b.Key.String() + " [" + table + "]"
	for _, d := range b.Dial {
		s += " " + d.String()
	}
	if !b.Withheld.IsZero() {
		s += " (" + b.Withheld.String() + ")"
	}
	return s
}

func (f *feed) ready() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.complete
}

// start runs a source in the namespace until the test ends.
func (w *world) start(opt nat.Options) (*nat.Source, *feed, func()) {
	w.t.Helper()
	f := newFeed()
	src, stop := w.startWith(opt, f)
	return src, f, stop
}

func (w *world) startWith(opt nat.Options, f registry.Feed) (*nat.Source, func()) {
	w.t.Helper()
	opt.NetNS = w.path()
	src, err := nat.New(opt)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- src.Run(ctx, f) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	w.t.Cleanup(stop)
	return src, stop
}

// eventually waits until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("not within %v: %s", patience, what)
}

func corpusCases(t testing.TB) []corpus.Case {
	t.Helper()
	cases, err := corpus.Cases()
	if err != nil || len(cases) == 0 {
		t.Fatalf("corpus: %v, %d cases", err, len(cases))
	}
	return cases
}

// load feeds a case to the tools that it names.
func (w *world) load(c corpus.Case) {
	w.t.Helper()
	for _, s := range c.Sections {
		w.run(s.Text, s.Command...)
	}
}

// answer is what the source publishes of a namespace, as corpus files state it.
func answer(src *nat.Source, f *feed) []string {
	lines := f.lines()
	rules, _ := src.NotUnderstood()
	for _, p := range rules {
		lines = append(lines, fmt.Sprintf("problem %s: %s: %s", p.Where, p.Rule, p.Reason))
	}
	return lines
}
