// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// daemon is an engine's process. It may be run again after its end.
type daemon struct {
	*program.Process
	t    testing.TB
	name string
	args []string
	env  []string
	in   *netns.Space // nil for the guest
	log  string
}

// start runs a daemon until the test ends, with its output in a file that is
// shown if the test fails.
func start(t testing.TB, name string, args ...string) *daemon {
	t.Helper()
	return (&daemon{t: t, args: append([]string{name}, args...)}).start()
}

// start is like the function start, with an environment or a namespace besides.
func (d *daemon) start() *daemon {
	t := d.t
	t.Helper()
	d.name = filepath.Base(d.args[0])
	d.log = filepath.Join(t.TempDir(), d.name+".log")
	d.run(t)
	t.Cleanup(func() {
		d.Stop(syscall.SIGTERM)
		if t.Failed() {
			b, _ := os.ReadFile(d.log)
			t.Logf("end of the log of %s:\n%s", d.name, tail(b, 8000))
		}
	})
	return d
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func (d *daemon) run(t testing.TB) {
	t.Helper()
	c := program.Command{Cmd: exec.Command(d.args[0], d.args[1:]...), Log: d.log, Patience: time.Minute}
	c.Cmd.Env = append(os.Environ(), d.env...)
	if d.in != nil {
		c.In = d.in
	}
	p, err := program.Launch(c)
	if err != nil {
		t.Fatal(err)
	}
	d.Process = p
}

// ready waits until a daemon that was just started answers. An engine exits if its
// parts do not answer each other in time: it is started again.
func (d *daemon) ready(t testing.TB, answers func() error) {
	t.Helper()
	wait.Within(t, 3*limit(), d.name+" answers", func() error { // an API server does much before it answers
		if d.Ended() {
			t.Logf("%s gave up while it started", d.name)
			time.Sleep(time.Second)
			d.run(t)
		}
		return answers()
	})
}

// run runs a command and returns its output; it fails the test if that fails.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := try(name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func try(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit())
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = limit() // what it left behind may hold its output
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, tail(stderr.Bytes(), 2000))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// limit is how long is waited for what is certain to come, and for a command: engines
// take their time.
func limit() time.Duration { return 3 * wait.Limit() }

// eventually waits until cond returns nil: neither an engine nor a source reports a
// change at once, so what follows from an operation is waited for.
func eventually(t testing.TB, cond func() error) {
	t.Helper()
	wait.Within(t, limit(), "the state that is wanted", cond)
}

// recorder is a feed in front of a registry that records every appearance, removal and
// warning.
type recorder struct {
	registry.Feed
	mu       sync.Mutex
	set      map[string]port.Binding // by origin id
	log      []string                // "+key" and "-key" in order, without what changed in place
	warnings []string
	stale    error
	replaced int
	lost     int // how often it went stale
	atLoss   int // how much stood when it last did
}

func (r *recorder) Replace(set []port.Binding) {
	r.mu.Lock()
	next := make(map[string]port.Binding)
	for _, b := range set {
		next[b.Origin.ID] = b
	}
	r.change(next)
	r.stale = nil
	r.replaced++
	r.mu.Unlock()
	r.Feed.Replace(set)
}

func (r *recorder) Apply(c port.Change) {
	r.mu.Lock()
	next := make(map[string]port.Binding)
	for id, b := range r.set {
		next[id] = b
	}
	for _, o := range c.Drop {
		delete(next, o.ID)
	}
	for _, b := range c.Put {
		next[b.Origin.ID] = b
	}
	r.change(next)
	r.mu.Unlock()
	r.Feed.Apply(c)
}

func (r *recorder) change(next map[string]port.Binding) {
	for id, b := range r.set {
		if _, ok := next[id]; !ok {
			r.log = append(r.log, "-"+b.Key.String())
		}
	}
	for id, b := range next {
		if _, ok := r.set[id]; !ok {
			r.log = append(r.log, "+"+b.Key.String())
		}
	}
	r.set = next
}

func (r *recorder) Stale(err error) {
	r.mu.Lock()
	if r.stale == nil {
		r.lost++
		r.atLoss = len(r.set)
	}
	r.stale = err
	r.mu.Unlock()
	r.Feed.Stale(err)
}

func (r *recorder) Warn(texts []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.warnings = texts
}

// keys returns the current set, sorted, as "tcp 0.0.0.0:80 web".
func (r *recorder) keys() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]string, 0, len(r.set))
	for _, b := range r.set {
		out = append(out, b.Key.String()+" "+b.Owner.Name)
	}
	slices.Sort(out)
	return out
}

func (r *recorder) mark() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.log)
}

func (r *recorder) since(mark int) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.log[mark:])
}

func (r *recorder) bindings() []port.Binding {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]port.Binding, 0, len(r.set))
	for _, b := range r.set {
		out = append(out, b)
	}
	slices.SortFunc(out, func(a, b port.Binding) int { return a.Key.Compare(b.Key) })
	return out
}

// live returns why the source is not live, if it is not.
func (r *recorder) live() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.replaced == 0 && r.stale == nil {
		return errors.New("nothing was said yet")
	}
	return r.stale
}

// dead returns an error while the source is live.
func (r *recorder) dead() error {
	if r.live() == nil {
		return errors.New("it is live")
	}
	return nil
}

// losses returns how often the source went stale, and the size of the set when it did.
func (r *recorder) losses() (times, stood int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost, r.atLoss
}

// back waits until the source has gone stale once more than before and is live again.
func (r *recorder) back(t testing.TB, before int) {
	t.Helper()
	eventually(t, func() error {
		if n, _ := r.losses(); n == before {
			return errors.New("the loss of the engine is not seen")
		}
		return r.live()
	})
}

// warned waits until there is a warning with this text or, for "", none at all.
func (r *recorder) warned(t testing.TB, text string) {
	t.Helper()
	eventually(t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		ok := len(r.warnings) == 0
		if text != "" {
			ok = slices.ContainsFunc(r.warnings, func(s string) bool { return strings.Contains(s, text) })
		}
		if !ok {
			return fmt.Errorf("warnings are %q, want %q", r.warnings, text)
		}
		return nil
	})
}

// allow lets everything through.
type allow struct{}

func (allow) Decide(port.Publication) port.Ruling {
	return port.Ruling{Decision: port.Decision{Allow: true}}
}

// source is one of the three sources of declared ports.
type source interface {
	Name() string
	Run(ctx context.Context, feed registry.Feed) error
}

// follow runs a source until the test ends, or stop is called.
func follow(t testing.TB, s source) (r *recorder, stop func()) {
	t.Helper()
	reg := registry.New(registry.Options{Rules: allow{}, Logger: logger(t)})
	r = &recorder{Feed: reg.Feed(s.Name())}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx, r); err != context.Canceled {
			t.Errorf("Run = %v, want context.Canceled", err)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return r, stop
}

func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", bytes.TrimSpace(b))
	return len(b), nil
}

// want waits until the current set is exactly these keys.
func want(t testing.TB, r *recorder, keys ...string) {
	t.Helper()
	agree(t, r, func() ([]string, error) { return keys, nil })
}

// agree waits until the current set is that of the engine, which is asked each time: a
// container that was just killed may still be listed.
func agree(t testing.TB, r *recorder, says func() ([]string, error)) {
	t.Helper()
	eventually(t, func() error {
		keys, err := says()
		if err != nil {
			return err
		}
		keys = slices.Sorted(slices.Values(keys))
		if got := r.keys(); !slices.Equal(got, keys) {
			return fmt.Errorf("the set is\n%q, want\n%q (stale: %v)", got, keys, r.live())
		}
		return nil
	})
}

// killed kills the first process of a container behind the back of its engine and
// returns its pid. ask asks the engine for the pid, which may be of a process that is
// ending: it is asked again while a descriptor holds the process.
func killed(t testing.TB, ask func() (int, error)) (pid int) {
	t.Helper()
	eventually(t, func() error {
		var err error
		if pid, err = ask(); err != nil {
			return err
		}
		if pid <= 0 {
			return fmt.Errorf("pid %d: it does not run", pid)
		}
		p, err := os.FindProcess(pid)
		if err != nil {
			return err
		}
		defer func() { _ = p.Release() }()
		if again, err := ask(); err != nil || again != pid {
			return fmt.Errorf("pid %d, and then %d (%v)", pid, again, err)
		}
		return p.Kill() // an error if it ended meanwhile: another stands in its place then
	})
	return pid
}

// replaced waits until a container has a process that is not this one, which it returns.
func replaced(t testing.TB, old int, ask func() (int, error)) (pid int) {
	t.Helper()
	eventually(t, func() (err error) {
		if pid, err = ask(); err == nil && (pid <= 0 || pid == old) {
			err = fmt.Errorf("pid is %d, was %d", pid, old)
		}
		return err
	})
	return pid
}

// flat waits until there are at most a few more goroutines than before.
func flat(t testing.TB, before int) {
	t.Helper()
	eventually(t, func() error {
		if n := runtime.NumGoroutine(); n > before+4 {
			return fmt.Errorf("%d goroutines, had %d", n, before)
		}
		return nil
	})
}

// reach dials the candidates of a binding in order, as the agent does, and
// returns what the first one that answers says to a line.
func reach(b port.Binding) (string, error) {
	var errs []string
	for _, a := range b.Dial {
		c, err := net.DialTimeout(b.Protocol.String(), a.String(), 2*time.Second)
		if err == nil {
			var got string
			if got, err = ask(c); err == nil {
				return got, nil
			}
		}
		errs = append(errs, fmt.Sprintf("%s: %v", a, err))
	}
	return "", fmt.Errorf("nothing answers for %s: %s", b.Key, strings.Join(errs, "; "))
}

// ask sends a line, closes the connection and returns the answer.
func ask(c net.Conn) (string, error) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return "", err
	}
	if c.LocalAddr().Network() == "udp" {
		b := make([]byte, 1500)
		n, err := c.Read(b)
		return string(b[:n]), err
	}
	b, err := io.ReadAll(c)
	if err == nil && len(b) == 0 {
		err = io.ErrUnexpectedEOF
	}
	return string(b), err
}

// imageArchive makes an archive as `docker save` writes it, named bb:latest.
func imageArchive(t testing.TB) string {
	t.Helper()
	tar, err := enclave.ImageArchive(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return tar
}

// pauses pauses a container and goes on: its port, the first, stays and says so.
func pauses(t *testing.T, r *recorder, do func(verb string), ports ...string) {
	t.Helper()
	want(t, r, ports...)
	key := ports[0][:strings.LastIndexByte(ports[0], ' ')]
	mark := r.mark()
	for _, verb := range []string{"pause", "unpause"} {
		do(verb)
		eventually(t, func() error {
			if b := find(r, key); strings.Contains(b.Detail.String(), "paused") != (verb == "pause") {
				return fmt.Errorf("after %s: detail %q", verb, b.Detail)
			}
			return nil
		})
	}
	if log := r.since(mark); len(log) > 0 {
		t.Errorf("pause and unpause moved %q", log)
	}
}
