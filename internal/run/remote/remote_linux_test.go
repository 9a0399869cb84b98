// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/run/exec"
	"github.com/fairlead/fairlead/internal/run/policy"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/internal/wire"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == exec.GuardCommand {
		if err := exec.Guard(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	leak.Main(m)
}

// log keeps what a server logs.
type log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// rig is a host that runs programs for the agent of guest "dev".
type rig struct {
	t           *testing.T
	agent, host link.Session
	log         *log
	server      *Server
}

func entry(t *testing.T, name, path string, args ...string) policy.Entry {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	e := policy.Entry{Name: name, Guests: []string{"dev"}, Path: path, SHA256: fmt.Sprintf("%x", sha256.Sum256(b)), Directory: "/", Env: []string{"LANG"}}
	for _, a := range args {
		e.Args = append(e.Args, regexp.MustCompile(`\A(?:`+a+`)\z`))
	}
	return e
}

func newRig(t *testing.T, edit func(o *Options)) *rig {
	t.Helper()
	r := &rig{t: t, log: new(log)}
	other := entry(t, "other", "/bin/true")
	other.Guests = []string{"ci"}
	changed := entry(t, "changed", "/bin/true")
	changed.SHA256 = strings.Repeat("0", 64)
	gone := entry(t, "gone", "/bin/true")
	gone.Path = "/nonexistent/true"
	o := Options{
		Jobs: 2, Logger: slog.New(slog.NewTextHandler(r.log, nil)),
		Policy: policy.Policy{
			entry(t, "sh", "/bin/sh", "-c", "[^\x01]*|(?s:multi.*)"), entry(t, "cat", "/bin/cat"), entry(t, "sleep", "/bin/sleep", "[0-9]+"), other, changed, gone,
		},
	}
	if edit != nil {
		edit(&o)
	}
	r.server = New(o)
	a, h := net.Pipe()
	lo := func(role link.Role) link.Options {
		token, err := link.NewToken(strings.Repeat("0123456789", 4))
		if err != nil {
			t.Fatal(err)
		}
		return link.Options{Role: role, Identity: string(role), Token: token, Logger: slog.New(slog.DiscardHandler)}
	}
	done := make(chan error, 1)
	go func() {
		var err error
		r.agent, err = link.Server(context.Background(), a, lo(link.RoleAgent))
		done <- err
	}()
	ho := lo(link.RoleHost)
	ho.Runs = r.server.Streams()
	var err error
	r.host, err = link.Client(context.Background(), h, ho)
	if err = errors.Join(err, <-done); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	served.Go(func() { r.server.Serve(ctx, "dev", r.host) })
	t.Cleanup(func() {
		cancel()
		_, _ = r.agent.Close(), r.host.Close()
		served.Wait()
		r.server.Wait()
	})
	return r
}

// begin asks for a program.
func (r *rig) begin(name string, args ...string) link.Stream {
	r.t.Helper()
	st, err := r.agent.Open(context.Background())
	if err == nil {
		err = wire.WriteRunRequest(st, wire.RunRequest{Name: name, Args: args, From: `container "web"`})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return st
}

// result is all that a host sent.
type result struct {
	granted  bool
	refused  *Refusal
	out, err []byte
	taken    int
	ended    *Ended
}

// next reads one frame into the result.
func (r *result) next(st io.Reader) error {
	kind, content, err := wire.ReadRunFrame(st)
	if err != nil {
		return err
	}
	switch kind {
	case Answer:
		var p Reply
		err = json.Unmarshal(append([]byte{kind}, content...), &p)
		r.granted, r.refused = r.granted || p.Granted, p.Error
	case Stdout:
		r.out = append(r.out, content...)
	case Stderr:
		r.err = append(r.err, content...)
	case Taken:
		var n int
		err = json.Unmarshal(content, &n)
		r.taken += n
	case Exit:
		err = json.Unmarshal(content, &r.ended)
	}
	return err
}

func (r *rig) finish(st link.Stream) (res result) {
	r.t.Helper()
	for {
		if err := res.next(st); err != nil {
			if !errors.Is(err, io.EOF) {
				r.t.Errorf("the stream ended with %v", err)
			}
			return res
		}
	}
}

func (r *rig) send(st io.Writer, kind byte, content string) {
	r.t.Helper()
	if err := wire.WriteRunFrame(st, kind, []byte(content)); err != nil {
		r.t.Error(err)
	}
}

func TestRuns(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Jobs = 1 }) // each has left when its end is reported
	for _, c := range []struct {
		script, in, out string
		code, signal    int
	}{
		{"exit 0", "", "", 0, 0},
		{"cat; exit 7", "hello\n", "hello\n", 7, 0},
		{"kill -9 $$", "", "", -1, 9},
		{"kill -USR1 $$", "", "", -1, 10},
		{"multi\nline=1\necho $line", "", "1\n", 0, 0},
	} {
		st := r.begin("sh", "-c", c.script)
		if c.in != "" {
			r.send(st, Stdin, c.in)
		}
		r.send(st, StdinEnd, "")
		res := r.finish(st)
		if res.ended == nil || res.ended.Code != c.code || res.ended.Signal != c.signal || (c.out != "" && string(res.out) != c.out) {
			t.Errorf("%q: %+v %v %s", c.script, res.ended, res.refused, res.err)
		}
		_ = st.Close()
	}
	wait.Until(t, "each run is a line", func() error {
		if n := strings.Count(r.log.String(), `msg="run for a guest" guest=dev name=sh`); n != 5 {
			return fmt.Errorf("%d lines in %s", n, r.log)
		}
		return nil
	})
	for _, want := range []string{`from="container \"web\""`, `result="exit 7"`, "result=SIGKILL"} {
		if !strings.Contains(r.log.String(), want) {
			t.Errorf("no %s in %s", want, r.log)
		}
	}
}

func TestRefused(t *testing.T) {
	r := newRig(t, nil)
	for _, c := range []struct {
		name   string
		args   []string
		reason string
		want   string
	}{
		{"nothing", nil, "policy", `no entry of the host's run.allow lets guest "dev" run "nothing"`},
		{"other", nil, "policy", `lets guest "dev" run "other"`},
		{"sleep", []string{"1", "2"}, "policy", "2 arguments, want 1"},
		{"sleep", []string{"1\n"}, "policy", "does not match"},
		{"sh", []string{"-c", "a\x00"}, "policy", "does not match"},
		{"changed", nil, "program", "SHA-256"},
		{"gone", nil, "program", "the host cannot start it; its log says why"},
	} {
		st := r.begin(c.name, c.args...)
		res := r.finish(st)
		if res.granted || res.ended != nil || res.refused == nil || res.refused.Reason != c.reason || !strings.Contains(res.refused.Message, c.want) {
			t.Errorf("%s %q: %+v", c.name, c.args, res.refused)
		}
		if res.refused != nil && strings.Contains(res.refused.Message, "/") {
			t.Errorf("%s: a path of the host is told: %q", c.name, res.refused.Message)
		}
		_ = st.Close()
	}
}

func TestLimits(t *testing.T) {
	r := newRig(t, nil)
	var open []link.Stream
	for range 2 {
		st := r.begin("sleep", "98764")
		var res result
		if err := res.next(st); err != nil || !res.granted {
			t.Fatalf("%+v, %v", res, err)
		}
		open = append(open, st)
	}
	third := r.begin("sleep", "98764")
	if res := r.finish(third); res.refused == nil || res.refused.Reason != "limit" {
		t.Errorf("one job too many: %+v", res)
	}
	_ = third.Close()
	_ = open[0].Reset() // its client has gone
	wait.Until(t, "a job may begin again", func() error {
		st := r.begin("sleep", "0")
		res := r.finish(st)
		_ = st.Close()
		if res.ended == nil || res.ended.Code != 0 {
			return fmt.Errorf("%+v", res.refused)
		}
		return nil
	})
	var last result
	for range 2 * requestBurst {
		st := r.begin("nothing")
		last = r.finish(st)
		_ = st.Close()
		if last.refused != nil && last.refused.Reason == "limit" {
			return
		}
	}
	t.Errorf("no limit of requests: %+v", last.refused)
}

// A client that does not read stops its program and nothing else.
func TestClientDoesNotRead(t *testing.T) {
	r := newRig(t, nil)
	st := r.begin("sh", "-c", "head -c 5242880 /dev/zero & head -c 5242880 /dev/zero >&2; wait")
	for range 5 {
		other := r.begin("cat")
		r.send(other, Stdin, "hello")
		r.send(other, StdinEnd, "")
		if res := r.finish(other); string(res.out) != "hello" || res.taken != 5 {
			t.Errorf("%+v", res)
		}
		_ = other.Close()
	}
	res := r.finish(st)
	if len(res.out) != 5<<20 || len(res.err) != 5<<20 || res.ended == nil || res.ended.Code != 0 {
		t.Errorf("%d and %d bytes, %+v", len(res.out), len(res.err), res.ended)
	}
}

// What an agent must not send ends its run, and no other.
func TestMisbehavingAgent(t *testing.T) {
	r := newRig(t, nil)
	for what, send := range map[string]func(st link.Stream){
		"an unknown kind":     func(st link.Stream) { r.send(st, '?', "") },
		"a kind of the host":  func(st link.Stream) { r.send(st, Exit, `{"code":0}`) },
		"input after its end": func(st link.Stream) { r.send(st, StdinEnd, ""); r.send(st, Stdin, "x") },
		"no frame":            func(st link.Stream) { _, _ = st.Write([]byte{0xff, 0xff, 0xff, 0xff}) },
		"too much input": func(st link.Stream) {
			for range 6 { // the pipe and the window take four
				_ = wire.WriteRunFrame(st, Stdin, make([]byte, wire.MaxRunFrame)) // the last may be reset
			}
		},
		"its end": func(st link.Stream) { _ = st.Reset() },
	} {
		t.Run(what, func(t *testing.T) {
			st := r.begin("sleep", "98763")
			var res result
			if err := res.next(st); err != nil || !res.granted {
				t.Fatalf("%+v, %v", res, err)
			}
			send(st)
			for res.next(st) == nil {
			}
			if res.ended != nil && res.ended.Signal != 9 {
				t.Errorf("%+v", res.ended)
			}
			wait.Until(t, "the job has gone", func() error {
				r.server.mu.Lock()
				defer r.server.mu.Unlock()
				if n := r.server.guests["dev"].jobs; n != 0 {
					return fmt.Errorf("%d jobs", n)
				}
				return nil
			})
		})
	}
	st, err := r.agent.Open(context.Background())
	if err == nil {
		_, err = st.Write([]byte("\x00\x00\x00\x01x"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.Read(make([]byte, 1)); !errors.Is(err, link.ErrReset) {
		t.Errorf("a malformed request: %v", err)
	}
}

// The end of a session kills what runs.
func TestLostSession(t *testing.T) {
	r := newRig(t, nil)
	st := r.begin("sleep", "98762")
	var res result
	if err := res.next(st); err != nil || !res.granted {
		t.Fatalf("%+v, %v", res, err)
	}
	_ = r.agent.Close()
	r.server.Wait()
	if !strings.Contains(r.log.String(), "result=SIGKILL") {
		t.Error(r.log)
	}
}

func TestRefusalsOfEachGuestAreLogged(t *testing.T) {
	var l log
	s := New(Options{Logger: slog.New(slog.NewTextHandler(&l, nil))})
	for _, name := range []string{"a", "b"} {
		s.logRefused(name, wire.RunRequest{}, &Refusal{"policy", "no"})
	}
	for _, want := range []string{"guest=a", "guest=b"} {
		if !strings.Contains(l.String(), want) {
			t.Errorf("%s is not in the log: %s", want, l.String())
		}
	}
}

// stuck is a program that is killed and does not go.
type stuck struct{ gone chan struct{} }

func (stuck) Signal(string) error        { return nil }
func (stuck) Kill()                      {}
func (stuck) Wait() (int, string, error) { return 0, "", errors.New("it does not end") }
func (s stuck) Gone()                    { <-s.gone }
func (stuck) Close()                     {}

// What does not go although it was killed counts as a job as long as it lives.
func TestStuckProgramCounts(t *testing.T) {
	s := stuck{make(chan struct{})}
	r := newRig(t, func(o *Options) {
		o.Jobs, o.start = 1, func(exec.Program) (*exec.Job, error) {
			_, in := io.Pipe()
			return &exec.Job{Stdin: in, Stdout: strings.NewReader(""), Stderr: strings.NewReader(""), Process: s}, nil
		}
	})
	ask := func() result {
		st := r.begin("cat")
		defer func() { _ = st.Close() }()
		return r.finish(st)
	}
	if res := ask(); !res.granted || res.ended != nil || res.refused == nil || res.refused.Reason != "program" {
		t.Errorf("%+v, %+v", res, res.refused)
	}
	if res := ask(); res.refused == nil || res.refused.Reason != "limit" {
		t.Errorf("a second one beside it: %+v, %+v", res, res.refused)
	}
	close(s.gone)
	wait.Until(t, "the next may begin", func() error {
		if res := ask(); !res.granted {
			return fmt.Errorf("%+v", res.refused)
		}
		return nil
	})
}

// All guests together have a limit, too: each program has a copy of its file in memory.
func TestLimitOfAllGuests(t *testing.T) {
	s := New(Options{Jobs: 1, Logger: slog.New(slog.DiscardHandler), Policy: policy.Policy{{Name: "cat", Guests: []string{"*"}}}})
	var leaves []func()
	for i := range maxJobs {
		leave, err := s.enter(fmt.Sprint(i), wire.RunRequest{Name: "cat"})
		if err != nil {
			t.Fatal(i, err)
		}
		leaves = append(leaves, leave)
	}
	if _, err := s.enter("last", wire.RunRequest{Name: "cat"}); err == nil || !strings.Contains(err.Error(), "64 programs") {
		t.Errorf("one more: %v", err)
	}
	leaves[0]()
	if _, err := s.enter("last", wire.RunRequest{Name: "cat"}); err != nil {
		t.Error(err)
	}
}
