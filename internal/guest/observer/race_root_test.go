// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package observer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/testkit/kernels"
	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// churn opens and closes sockets at random until it is stopped, and then knows
// which are open.
type churn struct {
	stop    atomic.Bool
	workers sync.WaitGroup
	mu      sync.Mutex
	open    map[int]string // by descriptor
}

// startChurn runs some workers in the room.
func startChurn(t *testing.T, r *room, workers int, seed uint64) *churn {
	t.Helper()
	c := &churn{open: make(map[int]string)}
	for w := range workers {
		c.workers.Go(func() {
			err := r.ns.Do(func() error { return c.work(w, rand.New(rand.NewPCG(seed, uint64(w)))) })
			if err != nil {
				t.Error(err)
			}
		})
	}
	return c
}

func (c *churn) work(worker int, rng *rand.Rand) error {
	const ports = 40
	have := make(map[int]int)
	name := make(map[int]string)
	for !c.stop.Load() {
		port := 20_000 + worker*ports + rng.IntN(ports)
		if fd, ok := have[port]; ok {
			if err := unix.Close(fd); err != nil {
				return err
			}
			delete(have, port)
			continue
		}
		kind, what := unix.SOCK_STREAM, "tcp"
		if port&1 == 1 {
			kind, what = unix.SOCK_DGRAM, "udp"
		}
		fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(fd, loopback4(port))
		}
		if err == nil && kind == unix.SOCK_STREAM {
			err = unix.Listen(fd, 1)
		}
		if errors.Is(err, unix.EADDRINUSE) { // a dump can keep a closed socket for a moment
			if err := unix.Close(fd); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		have[port], name[fd] = fd, fmt.Sprintf("%s 127.0.0.1:%d", what, port)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, fd := range have {
		c.open[fd] = name[fd]
	}
	return nil
}

// halt stops the workers and returns what is open.
func (c *churn) halt() []string {
	c.stop.Store(true)
	c.workers.Wait()
	var all []string
	for _, n := range c.open {
		all = append(all, n)
	}
	return all
}

func (c *churn) close() error {
	var errs []error
	for fd := range c.open {
		errs = append(errs, unix.Close(fd))
	}
	return errors.Join(errs...)
}

// TestStartUnderChurn starts during changes. When they stop, the known state is
// correct, and no dump had to repair it.
func TestStartUnderChurn(t *testing.T) {
	n := rounds.Of(t, "FAIRLEAD_STARTS", 25)
	for _, set := range methodSets(t) {
		t.Run(set, func(t *testing.T) {
			for round := range n {
				t.Run(fmt.Sprint(round), func(t *testing.T) {
					r := newRoom(t)
					c := startChurn(t, r, 3, uint64(round))
					w := observe(t, r, options(set))
					time.Sleep(2 * time.Millisecond) // let events and dump meet
					want := c.halt()
					w.wantSet(want...)
					s := w.observer.Stats()
					if s.Drift != 0 || s.Malformed != 0 || s.DumpFailures != 0 {
						t.Errorf("stats: %+v", s)
					}
					if err := c.close(); err != nil {
						t.Error(err)
					}
					w.wantSet()
				})
			}
		})
	}
}

// stall is a Handler that can be blocked.
type stall struct {
	*recorder
	held chan struct{}
}

func (s *stall) Apply(events []Event) {
	<-s.held
	s.recorder.Apply(events)
}

// TestRingOverflow blocks the handler until the ring is full: the loss must be
// noticed, counted and repaired.
func TestRingOverflow(t *testing.T) {
	r := newRoom(t)
	obs, err := New(Options{Mode: BPF, RingBytes: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	h := &stall{recorder: newRecorder(), held: make(chan struct{})}
	stop := run(t, r, obs, h)
	defer stop()
	h.await(t, func() string { return "no first Replace" }, func() bool { return h.replaces == 1 })

	var want []string
	var open []int
	r.do(func() {
		for i := range 2000 {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err := errors.Join(err, unix.Bind(fd, loopback4(10_000+i)), unix.Listen(fd, 1)); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				_ = unix.Close(fd)
				continue
			}
			open = append(open, fd)
			want = append(want, fmt.Sprintf("tcp 127.0.0.1:%d", 10_000+i))
		}
	})
	close(h.held)
	h.await(t, func() string { return fmt.Sprintf("%d of %d; %+v", len(h.set), len(want), obs.Stats()) }, func() bool {
		return h.replaces > 1 && slices.Equal(h.describe(), want)
	})
	if s := obs.Stats(); s.Drops == 0 || s.Resyncs == 0 || s.Drift != 0 {
		t.Errorf("stats: %+v, want drops and a resync, and no drift", s)
	}
	for _, fd := range open {
		_ = unix.Close(fd)
	}
	h.await(t, func() string { return fmt.Sprint(clip(h.describe())) }, func() bool { return len(h.set) == 0 })
}

// TestRunLeavesNothing counts descriptors and maps of memory around a run.
func TestRunLeavesNothing(t *testing.T) {
	r := newRoom(t)
	count := func() (fds, maps int) {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Fatal(err)
		}
		return len(names), strings.Count(string(b), "bpf-map")
	}
	once := func() {
		obs, err := New(Options{})
		if err != nil {
			t.Fatal(err)
		}
		rec := newRecorder()
		stop := run(t, r, obs, rec)
		rec.await(t, func() string { return "no Replace" }, func() bool { return rec.replaces > 0 })
		stop()
	}
	once() // the runtime opens some for itself
	fds, maps := count()
	for range 3 {
		once()
	}
	// What other tests made may go a moment later; what remains is a leak.
	f, m := count()
	for end := time.Now().Add(wait.Limit()); (f > fds || m > maps) && time.Now().Before(end); f, m = count() {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	if f > fds || m > maps {
		t.Errorf("%d descriptors and %d maps, before %d and %d", f, m, fds, maps)
	}
}

// TestSocketsBeforeTheStart: only the dump knows these. Their owners are found,
// with MPTCP too, and their ends are seen.
func TestSocketsBeforeTheStart(t *testing.T) {
	for _, set := range methodSets(t) {
		t.Run(set, func(t *testing.T) {
			w := &world{room: newRoom(t), t: t}
			socks := []sock{
				w.tcp4().bind(loopback4(8080)).listen(),
				w.socket(unix.AF_INET, unix.SOCK_STREAM, kernels.MPTCP()).bind(loopback4(8081)).listen(),
				w.udp4().bind(loopback4(5000)),
				w.udp6().bind(any6(50_000)),
			}
			client := w.udp4()
			client.must("sendto", unix.Sendto(client.fd, []byte("x"), 0, loopback4(9)))
			seen := observe(t, w.room, options(set))
			want := []string{"tcp 127.0.0.1:8080", "tcp 127.0.0.1:8081", "udp 127.0.0.1:5000"}
			if set != MethodPoll {
				// Only the iterator distinguishes it from a client.
				want = append(want, "udp [::]:50000")
			}
			seen.wantSet(want...)
			seen.await(t, func() string { return fmt.Sprintf("owners of %+v", seen.set) }, func() bool {
				for _, s := range seen.set {
					if s.PID != uint32(os.Getpid()) || s.Comm == "" || s.Inode == 0 {
						return false
					}
				}
				return true
			})
			for _, s := range socks {
				s.close()
			}
			client.close()
			seen.wantSet()
			if s := seen.observer.Stats(); s.Drift != 0 {
				t.Errorf("stats: %+v", s)
			}
		})
	}
}

func TestModeBPFNeedsEvents(t *testing.T) {
	r := newRoom(t)
	obs, err := New(Options{Mode: BPF, Methods: []string{MethodPoll}})
	if err != nil {
		t.Fatal(err)
	}
	err = r.ns.Do(func() error { return obs.Run(t.Context(), newRecorder()) })
	if !errors.Is(err, ErrNoEvents) {
		t.Errorf("Run: %v, want %v", err, ErrNoEvents)
	}
}

// ports is a Handler that answers each change of a port.
type ports struct {
	live func()
	last map[uint16]bool
	seen map[uint16]chan bool // whether it listens
}

func (p *ports) Methods([]kernel.Method) {}
func (p *ports) Stale(error)             {}

// Replace is called again if a machine that was suspended lost events.
func (p *ports) Replace(set []Socket) {
	p.live()
	listens := make(map[uint16]bool)
	for _, s := range set {
		listens[s.Port] = listens[s.Port] || s.Listening
	}
	for n := range p.seen {
		p.send(n, listens[n])
	}
}

func (p *ports) Apply(events []Event) {
	for _, e := range events {
		if n := e.Socket.Port; p.seen[n] != nil && (e.Gone || e.Socket.Listening) {
			p.send(n, !e.Gone)
		}
	}
}

func (p *ports) send(n uint16, listens bool) {
	if p.last[n] != listens {
		p.last[n] = listens
		p.seen[n] <- listens
	}
}

// TestNoWakeupIsLost makes events one at a time, each just when the reader may be
// about to sleep: none may need a later one to be seen.
func TestNoWakeupIsLost(t *testing.T) {
	n := rounds.Of(t, "FAIRLEAD_WAKEUPS", 4000)
	for _, c := range []struct {
		name    string
		workers int
		dumps   bool
	}{
		{"one", 1, false},
		{"two", 2, false},
		// A dump also reads the ring, while the reader waits.
		{"dumps", 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRoom(t)
			live := make(chan struct{})
			p := &ports{
				live: sync.OnceFunc(func() { close(live) }),
				last: make(map[uint16]bool), seen: make(map[uint16]chan bool),
			}
			for w := range c.workers {
				p.seen[uint16(8080+w)] = make(chan bool, 4)
			}
			// On this method a listener without bind makes a dump.
			defer start(t, r, Options{Methods: []string{kernel.MethodTPBTF}}, p)()
			<-live
			var all, others sync.WaitGroup
			var stop atomic.Bool
			if c.dumps {
				others.Go(func() {
					if err := r.ns.Do(func() error { return listenUnbound(&stop) }); err != nil {
						t.Error(err)
					}
				})
			}
			for w := range c.workers {
				all.Go(func() {
					err := r.ns.Do(func() error { return oneByOne(8080+w, n, p.seen[uint16(8080+w)]) })
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			stop.Store(true)
			others.Wait()
		})
	}
}

// listenUnbound makes listeners, each of which needs a dump to be understood.
func listenUnbound(stop *atomic.Bool) error {
	for !stop.Load() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err := errors.Join(err, unix.Listen(fd, 1)); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
		if err := unix.Close(fd); err != nil {
			return err
		}
	}
	return nil
}

func oneByOne(port, rounds int, seen <-chan bool) error {
	rng := rand.New(rand.NewPCG(uint64(port), 0))
	timeout := time.NewTimer(wait.Limit())
	expect := func(listening bool) error {
		timeout.Reset(wait.Limit())
		select {
		case got := <-seen:
			if got != listening {
				return fmt.Errorf("port %d: listening %v, want %v", port, got, listening)
			}
		case <-timeout.C:
			return fmt.Errorf("port %d: an event was not seen", port)
		}
		// The reader needs some ten microseconds to sleep again.
		for until := Now() + rng.Int64N(40_000); Now() < until; {
		}
		return nil
	}
	for range rounds {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		for err = unix.Bind(fd, loopback4(port)); errors.Is(err, unix.EADDRINUSE); err = unix.Bind(fd, loopback4(port)) {
			time.Sleep(time.Millisecond) // a dump can keep a closed socket for a moment
		}
		if err := errors.Join(err, unix.Listen(fd, 1), expect(true)); err != nil {
			return err
		}
		if err := errors.Join(unix.Close(fd), expect(false)); err != nil {
			return err
		}
	}
	return nil
}

// TestOverflowWhileOlderEventsWait loses the end of a socket, and the second
// listen of another, while the ring has older events of both.
func TestOverflowWhileOlderEventsWait(t *testing.T) {
	for _, set := range methodSets(t) {
		if set == MethodPoll {
			continue
		}
		t.Run(set, func(t *testing.T) {
			for round := range rounds.Of(t, "FAIRLEAD_OVERFLOWS", 4) {
				o := options(set)
				o.Audit, o.RingBytes = -1, 256<<10
				overflow(t, o, uint64(round))
			}
		})
	}
}

func overflow(t *testing.T, o Options, seed uint64) {
	r := newRoom(t)
	o.Logger = testLogger(t)
	obs, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	h := &stall{recorder: newRecorder(), held: make(chan struct{})}
	defer run(t, r, obs, h)()
	h.await(t, func() string { return "no first Replace" }, func() bool { return h.replaces == 1 })
	w := &world{room: r, recorder: h.recorder, t: t, observer: obs, boundDump: boundDumped(t)}

	k := newSocketChanges(w, seed)
	for range 10_000 {
		k.change()
	}
	close(h.held)
	w.wantSet(k.want()...)
	// The changes of the second dump are reported before it counts.
	wait.Until(t, "a resync after drops", func() error {
		if s := obs.Stats(); s.Drops == 0 || s.Resyncs == 0 {
			return fmt.Errorf("stats: %+v", s)
		}
		return nil
	})
	for range 100 {
		k.change()
	}
	w.wantSet(k.want()...)
	k.closeAll()
	w.wantSet()
	if s := obs.Stats(); s.Drift != 0 {
		t.Errorf("stats: %+v", s)
	}
}

// socketChanges makes random changes to sockets, of which each has its port.
type socketChanges struct {
	w     *world
	rng   *rand.Rand
	open  map[int]sock   // by port
	state map[int]string // by port, as describe has it; "" if it serves nothing
}

func newSocketChanges(w *world, seed uint64) *socketChanges {
	return &socketChanges{w, rand.New(rand.NewPCG(seed, 1)), make(map[int]sock), make(map[int]string)}
}

func (k *socketChanges) want() (all []string) {
	for _, state := range k.state {
		if state != "" {
			all = append(all, state)
		}
	}
	return all
}

func (k *socketChanges) closeAll() {
	for n := range k.open {
		k.remove(n)
	}
}

func (k *socketChanges) remove(n int) {
	k.open[n].close()
	delete(k.open, n)
	delete(k.state, n)
}

// change makes one change. Ports that are even are of TCP, the others of UDP.
func (k *socketChanges) change() {
	n := 20_000 + k.rng.IntN(30)
	s, open := k.open[n]
	tcp := n%2 == 0
	name := fmt.Sprintf("udp 127.0.0.1:%d", n)
	if tcp {
		name = fmt.Sprintf("tcp 127.0.0.1:%d", n)
	}
	switch {
	case !open && tcp && k.w.boundDump:
		k.open[n], k.state[n] = k.w.tcp4().bind(loopback4(n)), name+" bound"
	case !open && tcp: // a dump cannot find again what is only bound
		k.open[n], k.state[n] = k.w.tcp4().bind(loopback4(n)).listen(), name
	case !open:
		k.open[n], k.state[n] = k.w.udp4().bind(loopback4(n)), name
	case k.rng.IntN(3) == 0:
		k.remove(n)
	case !tcp:
		s.connect(loopback4(9))
		k.state[n] = ""
	case k.state[n] == name && !k.w.boundDump:
		k.remove(n)
	case k.state[n] == name:
		s.shutdown()
		k.state[n] = name + " bound"
	default:
		s.listen()
		k.state[n] = name
	}
}
