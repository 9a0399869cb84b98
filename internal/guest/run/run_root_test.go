// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package run

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/run/image"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// web is the only container.
var web = port.Owner{Kind: port.OwnerContainer, Name: "web", ID: "1"}

// rig is an agent's server in this process, with a helper.
type rig struct {
	t       testing.TB
	server  *Server
	program string // a copy of the test binary
	entries policy.Policy
	log     lines
	ended   chan error // the helper
	stop    func()
}

// program copies the test binary to where root can read it, and returns its sum.
func program(t testing.TB) (path, sum string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path, fmt.Sprintf("%x", sha256.Sum256(b))
}

// entry allows "web" one role of the test binary, with these patterns of arguments.
func entry(path, sum, role string, args ...string) policy.Entry {
	e := policy.Entry{
		Name: role, Match: rules.Match{Name: "web"}, Path: path, SHA256: sum, User: "nobody", Directory: "/usr", Env: []string{"LANG"},
		TTY: role != "args",
	}
	for _, a := range append([]string{jobArgument, role}, args...) {
		e.Args = append(e.Args, regexp.MustCompile(`\A(?:`+a+`)\z`))
	}
	return e
}

func newRig(t testing.TB) *rig {
	t.Helper()
	r := &rig{t: t}
	var sum string
	r.program, sum = program(t)
	for role := range jobs {
		if role != "patterns" && role != "commit" {
			r.entries = append(r.entries, entry(r.program, sum, role))
		}
	}
	r.entries = append(r.entries, entry(r.program, sum, "patterns", "a.*"), entry(r.program, sum, "commit", "/.*"))
	for i, change := range []func(*policy.Entry){
		func(e *policy.Entry) { e.SHA256 = strings.Repeat("0", 64) },
		func(e *policy.Entry) { e.User = "0" },
		func(e *policy.Entry) { e.User = "nobody-of-this-name" },
		func(e *policy.Entry) { e.Directory = "/nowhere" },
		func(e *policy.Entry) { e.Path = "/nowhere" },
		func(e *policy.Entry) { e.Path = "/dev/zero" },
		func(e *policy.Entry) { e.Path = script(t, &e.SHA256) },
	} {
		e := entry(r.program, sum, "sleep")
		e.Name = fmt.Sprintf("bad%d", i)
		change(&e)
		r.entries = append(r.entries, e)
	}
	r.start()
	return r
}

// start starts the server.
func (r *rig) start() {
	r.server = New(Options{
		Policy: r.entries, Jobs: 8,
		Logger: slog.New(slog.NewTextHandler(&r.log, nil)),
	})
	if err := r.server.Start(); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.ended = make(chan error, 1)
	go func() { r.ended <- r.server.starter.wait(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := wait.For(r.t, "the helper to end", r.ended); err != nil {
			r.t.Error(err)
		}
		r.noneLeft()
	})
	r.t.Cleanup(func() { r.stop() })
}

// killHelper kills the helper, by which the server ends.
func (r *rig) killHelper() {
	r.t.Helper()
	if err := r.server.starter.process.Kill(); err != nil {
		r.t.Fatal(err)
	}
	if err := wait.For(r.t, "the server's end", r.ended); err == nil || !strings.Contains(err.Error(), "the helper has ended") {
		r.t.Errorf("the server ended with %v", err)
	}
	r.noneLeft()
	r.stop = func() {}
}

// noneLeft waits until no job of the helper has a cgroup.
func (r *rig) noneLeft() { noneLeft(r.t, r.server.starter.process.Pid) }

// groupsOf returns the directories of a helper's jobs.
func groupsOf(t testing.TB, helper int) []string {
	t.Helper()
	own, err := ownGroup()
	if err != nil {
		t.Fatal(err)
	}
	all, err := filepath.Glob(filepath.Join(own, slice, strconv.Itoa(helper)+".*", "*", killFile))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func noneLeft(t testing.TB, helper int) {
	t.Helper()
	wait.Until(t, "no cgroup of a job is left", func() error {
		if left := groupsOf(t, helper); len(left) > 0 {
			return fmt.Errorf("%q are left", left)
		}
		return nil
	})
}

// populated waits until some job runs, and returns its cgroup.
func populated(t testing.TB, helper int) (dir string) {
	t.Helper()
	wait.Until(t, "a job runs", func() error {
		for _, file := range groupsOf(t, helper) {
			if dir = filepath.Dir(file); cgroup.Populated(dir) {
				return nil
			}
		}
		return errors.New("none does")
	})
	return dir
}

// script writes a script.
func script(t testing.TB, sum *string) string {
	b := []byte("#!/bin/sh\necho hello\n")
	*sum = fmt.Sprintf("%x", sha256.Sum256(b))
	path := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// serve does what Server.serve does, for a client that was identified.
func serve(ctx context.Context, s *Server, conn *net.UnixConn, of peer.Client) {
	defer peer.CloseClient(conn)
	_ = peer.Control(conn, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	stop := context.AfterFunc(ctx, func() { _ = conn.CloseRead() })
	defer stop()
	_ = peer.Send(conn, peer.Hello{Version: peer.Version, Nonce: "n"})
	var q first
	_, err := peer.Receive(conn, &q)
	_ = conn.SetDeadline(time.Now()) // that of the request has passed when a large program was copied
	switch {
	case errors.Is(err, peer.ErrMalformed):
		err = peer.Refuse(peer.ReasonRequest, "%v", err)
	case err == nil:
		if err = s.allowed(of, q.Run); err == nil {
			err = s.run(ctx, conn, of, q.Run)
		}
	}
	var r *peer.Refusal
	if errors.As(err, &r) {
		_ = conn.SetWriteDeadline(time.Time{})
		_ = peer.Send(conn, peer.Hello{Error: r})
	}
}

// connect returns a client's connection, which is served.
func (r *rig) connect(ctx context.Context, container port.Owner) (*net.UnixConn, <-chan struct{}) {
	r.t.Helper()
	return r.connectAs(ctx, peer.Client{Container: container, PID: int32(os.Getpid())})
}

// connectAs is connect for any client.
func (r *rig) connectAs(ctx context.Context, of peer.Client) (*net.UnixConn, <-chan struct{}) {
	r.t.Helper()
	conn, f, err := pair()
	if err != nil {
		r.t.Fatal(err)
	}
	theirs, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		r.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(ctx, r.server, theirs.(*net.UnixConn), of)
	}()
	r.t.Cleanup(func() {
		_ = conn.Close()
		wait.For(r.t, "the server of the client", done)
	})
	return conn, done
}

// run runs a role to its end.
func (r *rig) run(q Request, s Streams) (Exit, error) {
	r.t.Helper()
	conn, done := r.connect(context.Background(), web)
	exit, err := do(conn, q, s)
	_ = conn.Close()
	wait.For(r.t, "the server of the client", done)
	return exit, err
}

// role is a request for a role of the test binary.
func role(name string, args ...string) Request {
	return Request{Name: name, Args: append([]string{jobArgument, name}, args...)}
}

func TestRun(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		q    Request
		want Exit
		out  string
	}{
		{Request{Name: "args", Args: role("args").Args, Env: []string{"LANG=C"}}, Exit{Code: 7},
			`[] ["PATH=/usr/local/bin:/usr/bin:/bin" "HOME=/nonexistent" "USER=nobody" "LOGNAME=nobody" "LANG=C"]` + "\n"},
		{Request{Name: "patterns", Args: []string{jobArgument, "patterns", "a b;$(c)\t\"'"}}, Exit{Code: 0}, ""},
		{role("killed"), Exit{Code: -1, Signal: unix.SIGKILL}, ""},
		{role("who"), Exit{}, "65534 65534 65534 [65534] /usr\n" +
			"CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\n"},
	} {
		var out, errs bytes.Buffer
		exit, err := r.run(c.q, Streams{Stdout: &out, Stderr: &errs})
		if err != nil || exit != c.want || out.String() != c.out || errs.Len() > 0 {
			t.Errorf("%+v: %+v, %v\n%s%s", c.q, exit, err, out.String(), errs.String())
		}
	}
	if n := strings.Count(r.log.String(), "\n"); n != 4 || !strings.Contains(r.log.String(), fmt.Sprintf(`msg=run name=args args="[job args]" container=web id=1 pid=%d`, os.Getpid())) ||
		!strings.Contains(r.log.String(), `result="exit 7"`) || !strings.Contains(r.log.String(), "result=SIGKILL") {
		t.Errorf("log:\n%s", r.log.String())
	}
}

// A job has its three streams, and nothing of the agent or its helper.
func TestJobInheritsNothing(t *testing.T) {
	null, err := unix.Open(os.DevNull, unix.O_RDONLY, 0) // which the helper inherits
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	r := newRig(t)
	var out bytes.Buffer
	if exit, err := r.run(role("descriptors"), Streams{Stdout: &out, Stderr: io.Discard}); err != nil || exit.Code != 0 {
		t.Fatal(exit, err)
	}
	for line := range strings.Lines(out.String()) {
		fd, to, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case len(fd) == 1 && fd[0] <= '2' && strings.HasPrefix(to, "pipe:"):
		case strings.HasPrefix(to, "anon_inode:[event"), strings.HasPrefix(to, "/sys/fs/cgroup/"), to == "": // its own Go runtime's
		default:
			t.Errorf("it has descriptor %s, %s", fd, to)
		}
	}
}

// A job does not have the keys of whoever started the agent.
func TestJobHasNoKeys(t *testing.T) {
	runtime.LockOSThread() // whose keyring the helper inherits; it ends with the test
	_, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
	if err == nil {
		_, err = unix.AddKey("user", testKey, []byte("secret"), unix.KEY_SPEC_SESSION_KEYRING)
	}
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Logf("there are no keyrings here: %v", err)
		return
	} else if err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	var out bytes.Buffer
	if exit, err := r.run(role("keys"), Streams{Stdout: &out, Stderr: io.Discard}); err != nil || exit.Code != 0 {
		t.Errorf("%v, %v\n%s", exit, err, out.String())
	}
}

func TestRefused(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		of     port.Owner
		q      Request
		reason peer.Reason
		want   string
	}{
		{port.Owner{Kind: port.OwnerContainer, Name: "other"}, role("sleep"), peer.ReasonPolicy, `lets container "other" run "sleep"`},
		{web, role("nothing"), peer.ReasonPolicy, `run "nothing"`},
		{web, Request{}, peer.ReasonPolicy, `run ""`},
		{web, Request{Name: "sleep"}, peer.ReasonPolicy, "0 arguments, want 2"},
		{web, role("patterns", "b"), peer.ReasonPolicy, "argument 3"},
		{web, role("patterns", "ab\n"), peer.ReasonPolicy, "argument 3"},
		{web, role("patterns", "ab\x00"), peer.ReasonPolicy, "argument 3"},
		{web, Request{Name: "sleep", Args: role("sleep").Args, Env: []string{"LD_PRELOAD=/x"}}, peer.ReasonPolicy, "LD_PRELOAD"},
		{web, Request{Name: "bad0", Args: role("sleep").Args}, peer.ReasonProgram, "SHA-256"},
		{web, Request{Name: "bad1", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // is root
		{web, Request{Name: "bad2", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // unknown user
		{web, Request{Name: "bad3", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // no such file
		{web, Request{Name: "bad4", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // no such file
		{web, Request{Name: "bad5", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // no file that can be executed
		{web, Request{Name: "bad6", Args: role("sleep").Args}, peer.ReasonProgram, "cannot be started"}, // no program of this system
	} {
		conn, _ := r.connect(context.Background(), c.of)
		_, err := do(conn, c.q, Streams{Stdout: io.Discard, Stderr: io.Discard})
		var got *peer.Refusal
		if !errors.As(err, &got) || got.Reason != c.reason || !strings.Contains(got.Message, c.want) {
			t.Errorf("%+v: %v, want %s: … %s", c.q, err, c.reason, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "/") {
			t.Errorf("%+v: the client is told a path of the guest: %v", c.q, err)
		}
	}
	for _, why := range []string{"is root", "unknown user", "no such file", "/dev/zero is no file that can be executed", "is no program of this system"} {
		if !strings.Contains(r.log.String(), why) {
			t.Errorf("the log does not say that %s:\n%s", why, r.log.String())
		}
	}
	r.noneLeft()
}

// One bit of the file, at any place, is another program.
func TestChangedProgram(t *testing.T) {
	r := newRig(t)
	f, err := os.OpenFile(r.program, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, st.Size() / 2, st.Size() - 1} {
		var b [1]byte
		flip := func() {
			b[0] ^= 1
			if _, err := f.WriteAt(b[:], at); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := f.ReadAt(b[:], at); err != nil {
			t.Fatal(err)
		}
		flip()
		if _, err := r.run(role("args"), Streams{Stdout: io.Discard, Stderr: io.Discard}); err == nil || !strings.Contains(err.Error(), "SHA-256") {
			t.Errorf("byte %d: %v", at, err)
		}
		flip()
	}
	// The file may be changed after it was copied: it is the copy that runs.
	if exit, err := r.run(role("args"), Streams{Stdout: io.Discard, Stderr: io.Discard}); err != nil || exit.Code != 7 {
		t.Errorf("unchanged: %+v, %v", exit, err)
	}
}

// The copy cannot be changed, and what becomes of the file has no effect on it.
func TestSeal(t *testing.T) {
	path, sum := program(t)
	sealed, err := image.Seal(path, sum)
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	if err := os.WriteFile(path, []byte("swapped"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := sealed.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write: %v", err)
	}
	if err := sealed.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v", err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(sealed, 0, 1<<40)); err != nil || fmt.Sprintf("%x", h.Sum(nil)) != sum {
		t.Errorf("the copy changed (%v)", err)
	}
}

// slowly writes a little at a time, with pauses.
type slowly struct {
	io.Writer
	pause time.Duration
}

func (s slowly) Write(b []byte) (int, error) {
	time.Sleep(s.pause)
	return s.Writer.Write(b)
}

func TestStdinAndStdout(t *testing.T) {
	r := newRig(t)
	in := make([]byte, 8<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(in)
	h := sha256.New()
	exit, err := r.run(role("cat"), Streams{Stdin: bytes.NewReader(in), Stdout: slowly{h, time.Millisecond}, Stderr: os.Stderr})
	if want := sha256.Sum256(in); err != nil || exit.Code != 0 || !bytes.Equal(h.Sum(nil), want[:]) {
		t.Errorf("%+v, %v", exit, err)
	}
}

// Both outputs arrive whole, to their end, also where the client is slow.
func TestBothOutputs(t *testing.T) {
	r := newRig(t)
	var out, errs bytes.Buffer
	exit, err := r.run(role("both"), Streams{Stdout: slowly{&out, time.Millisecond}, Stderr: &errs})
	want := bytes.Repeat([]byte("0123456789abcdef"), 320<<10)
	if err != nil || exit.Code != 0 || !bytes.Equal(out.Bytes(), want) || !bytes.Equal(errs.Bytes(), want) {
		t.Errorf("%+v, %v: %d and %d bytes", exit, err, out.Len(), errs.Len())
	}
}

// A user of the guest could hold a lock of a directory that it can open, for ever.
func TestSliceIsPrivate(t *testing.T) {
	r := newRig(t)
	if st, err := os.Stat(r.server.starter.slice); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
}

// A client that does not read stops the job, and is no reason to keep it when it goes.
func TestClientDoesNotRead(t *testing.T) {
	r := newRig(t)
	conn, done := r.connect(context.Background(), web)
	begin(t, conn, role("both"))
	g := populated(t, r.server.starter.process.Pid)
	time.Sleep(100 * time.Millisecond)
	if !cgroup.Populated(g) {
		t.Error("the job did not wait for its client")
	}
	_ = conn.Close()
	wait.For(t, "the session to end", done)
	r.noneLeft()
}

// begin sends a request, and returns when it is granted.
func begin(t testing.TB, conn *net.UnixConn, q Request) {
	t.Helper()
	var hello, granted reply
	if _, err := peer.Receive(conn, &hello); err != nil {
		t.Fatal(err)
	}
	if err := peer.Send(conn, first{Nonce: hello.Nonce, Run: q}); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Receive(conn, &granted); err != nil || !granted.Granted {
		t.Fatal(granted, err)
	}
}

// A signal passes a stdin that the job does not read.
func TestSignals(t *testing.T) {
	r := newRig(t)
	signals := make(chan os.Signal)
	out, w := io.Pipe()
	go func() {
		buf := make([]byte, 64)
		for _, want := range []string{"ready\n", "user defined signal 1\n"} {
			if n, err := out.Read(buf); err != nil || string(buf[:n]) != want {
				t.Errorf("%q, %v", buf[:n], err)
			}
			if want == "ready\n" {
				signals <- syscall.SIGUSR1
			} else {
				signals <- syscall.SIGTERM
			}
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	exit, err := r.run(role("signals"), Streams{Stdin: bytes.NewReader(make([]byte, 1<<20)), Stdout: w, Stderr: os.Stderr, Signals: signals})
	_ = w.Close()
	if err != nil || exit != (Exit{Code: 3}) {
		t.Errorf("%+v, %v", exit, err)
	}
}

// What a job leaves behind is killed with it, and does not delay its end.
func TestChildrenEndWithTheJob(t *testing.T) {
	r := newRig(t)
	var out bytes.Buffer
	exit, err := r.run(role("fork"), Streams{Stdout: &out, Stderr: os.Stderr})
	if err != nil || exit.Code != 5 || out.String() != "started\n" {
		t.Errorf("%+v, %v, %q", exit, err, out.String())
	}
	r.noneLeft()
}

// A helper that does not end when the agent does is killed, and its programs are.
func TestHelperThatDoesNotEnd(t *testing.T) {
	r := newRig(t)
	conn, _ := r.connect(context.Background(), web)
	begin(t, conn, role("sleep"))
	if err := r.server.starter.process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r.stop()
}

// A program that cannot begin, as any process of its user can stop it before, delays no other,
// and is killed when the agent waits no longer.
func TestStoppedBeforeItBegins(t *testing.T) {
	t.Setenv("GOMAXPROCS", "1") // the helper's: nothing of it may wait for the program
	r := newRig(t)
	dirs, err := filepath.Glob(filepath.Join(r.server.starter.slice, strconv.Itoa(r.server.starter.process.Pid)+".*"))
	if err != nil || len(dirs) != 1 {
		t.Fatal(dirs, err)
	}
	freeze := func(dir, on string) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte(on), 0); err != nil {
			t.Fatal(err)
		}
	}
	freeze(dirs[0], "1") // what is made in it is stopped from the first instruction on
	j, theirs, err := newJob(false)
	if err != nil {
		t.Fatal(err)
	}
	err = j.send(r.server.starter.conn, role("sleep"), theirs)
	closeAll(theirs)
	if err != nil {
		t.Fatal(err)
	}
	stopped := populated(t, r.server.starter.process.Pid)
	freeze(stopped, "1")
	freeze(dirs[0], "0")
	if exit, err := r.run(role("args"), Streams{Stdout: io.Discard, Stderr: io.Discard}); err != nil || exit.Code != 7 {
		t.Errorf("another program: %v, %v", exit, err)
	}
	if !cgroup.Populated(stopped) {
		t.Error("the program is not stopped, which this test cannot explain")
	}
	j.close()
	r.noneLeft()
}

// What a client must not send ends its job.
func TestMisbehavingClients(t *testing.T) {
	r := newRig(t)
	for name, send := range map[string]func(f *frames) error{
		"unknown kind": func(f *frames) error { return f.send('?', nil) },
		"too long":     func(f *frames) error { return f.send(frameStdin, make([]byte, maxFrame+1)) },
		"more than the window": func(f *frames) error {
			for range 8 { // the pipe takes 64 KiB
				if err := f.send(frameStdin, make([]byte, maxFrame)); err != nil {
					return nil //nolint:nilerr // it was closed meanwhile
				}
			}
			return nil
		},
		"stdin after its end": func(f *frames) error {
			return errors.Join(f.send(frameStdinEnd, nil), f.send(frameStdin, []byte("x")))
		},
		"a signal of another kind": func(f *frames) error { return f.send(frameSignal, []byte("STOP")) },
		"a packet of nothing":      func(f *frames) error { _, err := f.conn.Write(nil); return err },
	} {
		conn, done := r.connect(context.Background(), web)
		begin(t, conn, role("sleep"))
		if err := send(&frames{conn: conn}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name == "a packet of nothing" {
			_ = conn.CloseWrite() // Go sends no empty packet
		}
		select {
		case <-done:
		case <-time.After(wait.Limit()):
			t.Errorf("%s: the job goes on", name)
		}
	}
	r.noneLeft()
}

// Another process that was given the connection cannot use it.
func TestOtherSender(t *testing.T) {
	r := newRig(t)
	conn, done := r.connectAs(context.Background(), peer.Client{Container: web, PID: 1})
	begin(t, conn, role("cat"))
	f := frames{conn: conn}
	if err := f.send(frameStdin, []byte("x")); err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the session to end", done)
	if k, b, err := f.receive(newBuffer(), peer.NewControl()); err == nil && k != frameExit {
		t.Errorf("the job got its input: %c %q", k, b)
	}
	r.noneLeft()
}

// A client that passes what close(2) waits for ends its own session alone, and at once.
func TestLingeringDescriptors(t *testing.T) {
	r := newRig(t)
	for range 3 {
		conn, done := r.connect(context.Background(), web)
		begin(t, conn, role("sleep"))
		fd := lingering(t)
		_, _, err := conn.WriteMsgUnix([]byte{byte(frameSignal)}, unix.UnixRights(fd), nil)
		_ = unix.Close(fd) // not the last one
		if err != nil {
			t.Fatal(err)
		}
		wait.For(t, "the session to end", done)
	}
	r.noneLeft()
}

// lingering returns a connection that blocks close(2) for an hour: its peer reads nothing,
// and the buffers are full. The peer resets it when the test ends.
func lingering(t *testing.T) (fd int) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: l.Addr().(*net.TCPAddr).Port}); err != nil {
		t.Fatal(err)
	}
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	t.Cleanup(func() { _ = c.Close() })
	for b := make([]byte, 1<<20); err == nil; {
		_, err = unix.SendmsgN(fd, b, nil, nil, unix.MSG_DONTWAIT)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}); err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestLimit(t *testing.T) {
	r := newRig(t)
	for range r.server.opt.Jobs {
		conn, _ := r.connect(context.Background(), web)
		begin(t, conn, role("sleep"))
	}
	if _, err := r.run(role("args"), Streams{Stdout: io.Discard, Stderr: io.Discard}); err == nil || !strings.Contains(err.Error(), "limit: 8 programs run already") {
		t.Errorf("one more: %v", err)
	}
}

// When the agent stops, its jobs do, and their clients hear of it.
func TestAgentStops(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(context.Background())
	conn, done := r.connect(ctx, web)
	begin(t, conn, role("forksleep"))
	populated(t, r.server.starter.process.Pid)
	cancel()
	wait.For(t, "the session to end", done)
	r.noneLeft()
	r.stop()
}

// If the helper is killed, its jobs are, and the server ends.
func TestHelperKilled(t *testing.T) {
	r := newRig(t)
	conn, done := r.connect(context.Background(), web)
	begin(t, conn, role("forksleep"))
	populated(t, r.server.starter.process.Pid)
	r.killHelper()
	wait.For(t, "the session to end", done)
}

// public is a directory for the files of programs.
func public(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "fairlead-run-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A program must not take the input of a client that has gone for a whole one.
func TestLostInputIsNoEnd(t *testing.T) {
	r := newRig(t)
	dir := public(t)
	q := role("commit", filepath.Join(dir, "whole"))
	if exit, err := r.run(q, Streams{Stdin: strings.NewReader("all"), Stdout: io.Discard, Stderr: os.Stderr}); err != nil || exit.Code != 0 {
		t.Fatal(exit, err)
	}
	for i := range 20 {
		conn, done := r.connect(context.Background(), web)
		path := filepath.Join(dir, strconv.Itoa(i))
		begin(t, conn, role("commit", path))
		f := frames{conn: conn}
		if k, b, err := f.receive(newBuffer(), peer.NewControl()); err != nil || k != frameStdout {
			t.Fatalf("%q, %q, %v", k, b, err)
		}
		if err := f.send(frameStdin, []byte("a part")); err != nil {
			t.Fatal(err)
		}
		_ = conn.Close()
		wait.For(t, "the session to end", done)
		if _, err := os.Stat(path); err == nil {
			t.Error("the program saw the end of its input")
		}
	}
}

// playAgent is an agent that runs one job, for a client that it is itself.
func playAgent(args string) error {
	f := strings.Fields(args)
	program, sum, file := f[0], f[1], f[2]
	s := New(Options{
		Policy: policy.Policy{entry(program, sum, "forksleep"), entry(program, sum, "commit", "/.*")}, Jobs: 2,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err := s.Start(); err != nil {
		return err
	}
	j, err := s.starter.start(role("forksleep"))
	if err != nil {
		return err
	}
	reader, err := s.starter.start(role("commit", file))
	if err != nil {
		return err
	}
	defer reader.close()
	if _, err := reader.stdout.Read(make([]byte, 16)); err != nil { // "ready"
		return err
	}
	if _, err := reader.stdin.WriteString("a part"); err != nil {
		return err
	}
	q := role("commit", file)
	q.TTY = &Terminal{}
	typist, err := s.starter.start(q)
	if err != nil {
		return err
	}
	defer typist.close()
	if _, err := typist.stdout.Read(make([]byte, 16)); err != nil {
		return err
	}
	fmt.Println(s.starter.process.Pid)
	_, err = j.wait() // until it is killed
	return err
}

// Nothing is left of a job when the agent is killed; if its helper is, too, then at the
// next start.
func TestAgentKilled(t *testing.T) {
	path, sum := program(t)
	file := filepath.Join(public(t), "whole")
	for _, both := range []bool{false, true} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), roleVariable+"=agent "+path+" "+sum+" "+file)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var helper int
		if _, err := fmt.Fscanln(out, &helper); err != nil {
			t.Fatal(err)
		}
		g := populated(t, helper)
		if both {
			if err := unix.Kill(helper, unix.SIGKILL); err != nil {
				t.Error(err)
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if both {
			if !cgroup.Populated(g) {
				t.Error("the job ended, which this test cannot explain")
			}
			// The next start passes over what a helper has that has not ended yet.
			wait.Until(t, "the helper's lock is free", func() error {
				lock, err := locked(filepath.Dir(g), unix.LOCK_EX|unix.LOCK_NB)
				if err != nil {
					return err
				}
				return lock.Close()
			})
			r := &rig{t: t}
			r.start()
			if _, err := os.Stat(filepath.Dir(g)); err == nil {
				t.Error("the helper's cgroup is left")
			}
		}
		noneLeft(t, helper)
		if _, err := os.Stat(file); err == nil && !both { // with both, nobody holds the input open
			t.Error("the program took the agent's end for that of its input")
		}
	}
}
