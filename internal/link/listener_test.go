// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/testkit/output"
)

func unixEndpoint(t testing.TB) Endpoint {
	t.Helper()
	return Endpoint{Network: NetworkUnix, Path: filepath.Join(t.TempDir(), "d", "link.sock")}
}

func listen(t testing.TB, e Endpoint, o Options) *Listener {
	t.Helper()
	l, err := Listen(ctx10(t), e, o)
	if err != nil {
		t.Fatal(err)
	}
	closed(t, l)
	return l
}

func TestListenAndDial(t *testing.T) {
	for name, tok := range map[string]Token{"by user": {}, "by token": token(t, secret)} {
		t.Run(name, func(t *testing.T) {
			ao, ho := opts(t, RoleAgent), opts(t, RoleHost)
			ao.Token, ho.Token = tok, tok
			e := unixEndpoint(t)
			l := listen(t, e, ao)
			l.start()
			for path, mode := range map[string]fs.FileMode{e.Path: fs.ModeSocket | 0o600, filepath.Dir(e.Path): fs.ModeDir | 0o700} {
				if fi, err := os.Lstat(path); err != nil || fi.Mode() != mode {
					t.Errorf("%s has mode %v, %v", path, fi.Mode(), err)
				}
			}
			for range 3 { // sessions do not exclude each other here
				host, err := Dial(ctx10(t), e, ho)
				if err != nil {
					t.Fatal(err)
				}
				closed(t, host)
				agent, err := l.Accept(ctx10(t))
				if err != nil {
					t.Fatal(err)
				}
				closed(t, agent)
				told(t, host, agent)
				if a := agent.Peer().Address; !strings.Contains(a, e.Path) {
					t.Errorf("peer's address %q", a)
				}
			}
			if n := l.Refused(); len(n) != 0 {
				t.Errorf("refused %v", n)
			}
		})
	}
}

func TestListenerClose(t *testing.T) {
	for name, started := range map[string]bool{"started": true, "not started": false} {
		t.Run(name, func(t *testing.T) {
			e := unixEndpoint(t)
			l := listen(t, e, opts(t, RoleAgent))
			accepted := make(chan error, 1)
			if started {
				go func() { _, err := l.Accept(context.Background()); accepted <- err }()
				c, err := net.Dial("unix", e.Path) // a handshake in hand
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = c.Close() }()
				if _, err := c.Write([]byte("F")); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}
			if !started {
				_, err := l.Accept(context.Background())
				accepted <- err
			}
			if err := <-accepted; !errors.Is(err, net.ErrClosed) {
				t.Errorf("accept: %v", err)
			}
			if _, err := os.Lstat(e.Path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("socket left behind: %v", err)
			}
		})
	}
}

func TestAcceptEndsWithContext(t *testing.T) {
	l := listen(t, unixEndpoint(t), opts(t, RoleAgent))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Silent peers, more than there is room for, block no other.
func TestSilentPeersBlockNoOther(t *testing.T) {
	ao := opts(t, RoleAgent)
	ao.HandshakeTimeout, ao.maxUnproved = time.Hour, 16
	e := unixEndpoint(t)
	l := listen(t, e, ao)
	accepted := make(chan Session)
	go func() {
		for {
			s, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			accepted <- s
		}
	}()
	for range 40 {
		c, err := net.Dial("unix", e.Path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
	host, err := Dial(ctx10(t), e, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, host)
	closed(t, <-accepted)
	l.mu.Lock()
	n := len(l.unproved) + len(l.attempts)
	l.mu.Unlock()
	if n > 16 {
		t.Errorf("%d handshakes in hand", n)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if n := l.Refused()[RefusedBusy]; n < 40-16 {
		t.Errorf("%d were closed", n)
	}
}

// A session that nobody accepts is closed for a newer one, and its peer notices.
func TestSessionsNotAccepted(t *testing.T) {
	ao := opts(t, RoleAgent)
	ao.MaxHandshakes = 1
	e := unixEndpoint(t)
	l := listen(t, e, ao)
	l.start()
	first, err := Dial(ctx10(t), e, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, first)
	second, err := Dial(ctx10(t), e, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, second)
	<-first.Done()
	agent, err := l.Accept(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	closed(t, agent)
	told(t, second, agent)
}

func TestRefusalLogIsRateLimited(t *testing.T) {
	var log output.Buffer
	ao := opts(t, RoleAgent)
	ao.Logger = slog.New(slog.NewTextHandler(&log, nil))
	e := unixEndpoint(t)
	l := listen(t, e, ao)
	l.start()
	const n = 50
	for range n {
		ho := opts(t, RoleHost)
		ho.Token = token(t, "another"+secret)
		_, err := Dial(ctx10(t), e, ho)
		if r := refusal(t, err); r.Code != RefusedProof || !r.Remote {
			t.Fatal(r)
		}
		c, err := net.Dial("unix", e.Path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r := l.Refused(); r[RefusedProof] != n || r[RefusedMagic] != n {
		t.Errorf("counted %v", r)
	}
	out := log.String()
	if lines := strings.Count(out, `msg="peer refused"`); lines != 2 {
		t.Errorf("%d lines for 2 reasons:\n%s", lines, out)
	}
	if strings.Contains(out, secret[:8]) {
		t.Errorf("the log shows the token:\n%s", out)
	}
	// The next one after the pause reports how many were not logged.
	l.note("x", refuse(RefusedProof, "once more"), time.Now().Add(refusalLogPause))
	if !strings.Contains(log.String(), "unlogged=49") {
		t.Error(log.String())
	}
}

func TestPeerUID(t *testing.T) {
	me := uint32(os.Geteuid())
	for _, tt := range []struct {
		uid   uint32
		allow []uint32
		ok    bool
	}{{0, nil, true}, {me, nil, true}, {me + 1, nil, false}, {me + 1, []uint32{7, me + 1}, true}, {me + 2, []uint32{me + 1}, false}} {
		err := admitUID(tt.uid, Options{AllowUIDs: tt.allow})
		if (err == nil) != tt.ok {
			t.Errorf("uid %d, allowed %v: %v", tt.uid, tt.allow, err)
		}
		if err != nil && refusal(t, err).Code != RefusedUID {
			t.Error(err)
		}
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	e := unixEndpoint(t)
	if err := os.Mkdir(filepath.Dir(e.Path), 0o700); err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: e.Path})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	l := listen(t, e, opts(t, RoleAgent))
	l.start()
	host, err := Dial(ctx10(t), e, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	_ = host.Close()
}

func TestUnsafeSocketPaths(t *testing.T) {
	dir := t.TempDir()
	for name, tt := range map[string]struct {
		prepare func(path string) error
		says    string
	}{
		"live socket": {func(p string) error {
			live, err := net.Listen("unix", p)
			if err == nil {
				t.Cleanup(func() { _ = live.Close() })
			}
			return err
		}, "served by another process"},
		"regular file":       {func(p string) error { return os.WriteFile(p, nil, 0o600) }, "not a socket"},
		"directory":          {func(p string) error { return os.Mkdir(p, 0o700) }, "not a socket"},
		"symbolic link":      {func(p string) error { return os.Symlink("/nowhere", p) }, "not a socket"},
		"writable directory": {func(p string) error { return os.Chmod(filepath.Dir(p), 0o770) }, "chmod 700"},
		"world-writable":     {func(p string) error { return os.Chmod(filepath.Dir(p), 0o777|fs.ModeSticky) }, "chmod 700"},
		"directory is a file": {func(p string) error {
			return errors.Join(os.Remove(filepath.Dir(p)), os.WriteFile(filepath.Dir(p), nil, 0o600))
		}, "not a directory"},
		"directory is a link":  {func(p string) error { return relink(t, filepath.Dir(p)) }, "chmod 700"},
		"socket that vanishes": {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			e := Endpoint{Network: NetworkUnix, Path: filepath.Join(dir, strings.ReplaceAll(name, " ", "-"), "s")}
			if err := os.Mkdir(filepath.Dir(e.Path), 0o700); err != nil {
				t.Fatal(err)
			}
			if tt.prepare == nil {
				l := listen(t, e, opts(t, RoleAgent))
				if err := os.Remove(e.Path); err != nil {
					t.Fatal(err)
				}
				other, err := net.Listen("unix", e.Path)
				if err != nil {
					t.Fatal(err)
				}
				closed(t, other)
				_ = l.Close()
				if _, err := os.Lstat(e.Path); err != nil {
					t.Errorf("another's socket was removed: %v", err)
				}
				return
			}
			if err := tt.prepare(e.Path); err != nil {
				t.Fatal(err)
			}
			l, err := Listen(ctx10(t), e, opts(t, RoleAgent))
			if err == nil {
				_ = l.Close()
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), filepath.Dir(e.Path)) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q", err)
			}
		})
	}
}

// relink makes dir a link to a directory that others may write to.
func relink(t *testing.T, dir string) error {
	to := t.TempDir()
	return errors.Join(os.Chmod(to, 0o777), os.Remove(dir), os.Symlink(to, dir))
}

// Of many that start at once over a dead socket, one has it.
func TestConcurrentListen(t *testing.T) {
	e := unixEndpoint(t)
	if err := os.Mkdir(filepath.Dir(e.Path), 0o700); err != nil {
		t.Fatal(err)
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: e.Path})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	var won atomic.Int32
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if l, err := Listen(ctx10(t), e, opts(t, RoleAgent)); err == nil {
				won.Add(1)
				closed(t, l)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d listeners", won.Load())
	}
}

// scripted is a listener whose Accept returns what a test sends to it.
type scripted struct {
	next chan any // net.Conn or error
	once sync.Once
	end  chan struct{}
}

func newScripted() *scripted { return &scripted{next: make(chan any), end: make(chan struct{})} }

func (s *scripted) Accept() (net.Conn, error) {
	select {
	case v := <-s.next:
		if err, ok := v.(error); ok {
			return nil, err
		}
		return v.(net.Conn), nil
	case <-s.end:
		return nil, net.ErrClosed
	}
}

func (s *scripted) Close() error   { s.once.Do(func() { close(s.end) }); return nil }
func (s *scripted) Addr() net.Addr { return &net.UnixAddr{} }

func scriptedListener(t *testing.T) (*Listener, *scripted) {
	t.Helper()
	o, err := opts(t, RoleAgent).complete()
	if err != nil {
		t.Fatal(err)
	}
	sc := newScripted()
	l := newListener(Endpoint{}, o, o.Logger, sc)
	closed(t, l)
	return l, sc
}

func TestAcceptErrors(t *testing.T) {
	l, sc := scriptedListener(t)
	l.start()
	sc.next <- &net.OpError{Op: "accept", Err: os.NewSyscallError("accept", syscall.EMFILE)}
	sc.next <- &net.OpError{Op: "accept", Err: os.NewSyscallError("accept", syscall.ECONNABORTED)}
	permanent := errors.New("the socket is broken")
	sc.next <- permanent
	for range 2 {
		if _, err := l.Accept(ctx10(t)); !errors.Is(err, permanent) {
			t.Error(err)
		}
	}
}

// A peer that accepts and then closes is dialled after growing pauses.
func TestRedialerBacksOffFromShortSessions(t *testing.T) {
	e := unixEndpoint(t)
	l, err := Listen(ctx10(t), e, opts(t, RoleAgent))
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewRedialer(e, opts(t, RoleHost))
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	for range 4 {
		accepted := make(chan Session, 1)
		go func() {
			s, _ := l.Accept(ctx10(t))
			accepted <- s
		}()
		s, err := r.Accept(ctx10(t))
		if err != nil {
			t.Fatal(err)
		}
		_ = (<-accepted).Close()
		<-s.Done()
		_ = s.Close()
	}
	_ = l.Close()
	if d, want := time.Since(begin), (200+400+800)*9/10*time.Millisecond; d < want {
		t.Errorf("4 sessions within %s, want at least %s", d, want)
	}
}

// A session that was closed for another peer, by either side, is not made again soon: the
// two would replace each other again and again.
func TestRedialerPausesAfterReplacement(t *testing.T) {
	for _, c := range []struct {
		end  CloseError
		long bool
	}{
		{CloseError{Reason: ReasonReplaced}, true},
		{CloseError{Reason: ReasonReplaced, Remote: true}, true},
		{CloseError{Reason: ReasonShutdown}, false},
		{CloseError{Reason: ReasonShutdown, Remote: true}, false},
	} {
		r := NewRedialerOf(nil, schedule.Backoff{Min: time.Millisecond, Max: time.Hour}, slog.New(slog.DiscardHandler))
		if r.failed(&c.end); (r.wait == time.Hour) != c.long {
			t.Errorf("%v: waits %s", &c.end, r.wait)
		}
	}
}

func TestRedialer(t *testing.T) {
	e := unixEndpoint(t)
	ho := opts(t, RoleHost)
	var log output.Buffer
	ho.Logger = slog.New(slog.NewTextHandler(&log, nil))
	r, err := NewRedialer(e, ho)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan Session)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		for {
			s, err := r.Accept(ctx)
			if err != nil {
				ended <- err
				return
			}
			got <- s
		}
	}()
	for range 2 { // the agent comes late, goes and comes again
		l, err := Listen(ctx10(t), e, opts(t, RoleAgent))
		if err != nil {
			t.Fatal(err)
		}
		agent, err := l.Accept(ctx10(t))
		if err != nil {
			t.Fatal(err)
		}
		host := <-got
		told(t, host, agent)
		select {
		case <-got:
			t.Error("a second session beside a live one")
		default:
		}
		if err := errors.Join(l.Close(), agent.Close()); err != nil {
			t.Error(err)
		}
		<-host.Done()
		_ = host.Close()
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	// For each time that it is away a line, and one for a socket that is not listened on yet.
	if n := strings.Count(log.String(), "link down"); n > 6 {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}

// Where few descriptors are allowed, silent connections use a part of them only.
func TestUnprovedLimit(t *testing.T) {
	for descriptors, want := range map[uint64]int{0: 1024, 2: 1, 64: 16, 1024: 256, 4096: 1024, 1 << 20: 1024, 1<<64 - 1: 1024} {
		if got := unprovedLimit(descriptors); got != want {
			t.Errorf("%d descriptors: %d, want %d", descriptors, got, want)
		}
	}
}
