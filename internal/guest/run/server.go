// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
	"github.com/fairlead/fairlead/internal/port"
)

// Server runs programs for the clients of a socket.
type Server struct {
	opt     Options
	allow   policy.Policy // of the start, without what cannot be limited
	policy  atomic.Pointer[policy.Policy]
	peers   *peer.Server
	starter *starter // nil before Start
	jobs    atomic.Int32
}

// Options configure a Server. All are required.
type Options struct {
	Socket string        // path
	Policy policy.Policy // at first, and the helper's for good; see SetPolicy
	Jobs   int           // at the same time, of all clients together
	Limits peer.Limits   // of each client
	// Container returns the container of a process by its cgroups. It fails closed.
	Container func(ctx context.Context, cgroups []string) (port.Owner, error)
	Logger    *slog.Logger
}

// The connections in a second, whoever makes them, and those at once: the agent is asked about
// each.
const (
	arrivalRate  = 100
	arrivalBurst = 20
)

// New returns a server, which runs nothing before Start.
func New(o Options) *Server {
	s := &Server{opt: o, allow: o.Policy}
	s.peers = peer.NewServer(peer.Options{
		Socket: o.Socket, Limits: o.Limits, Container: o.Container, Guests: true,
		Admit: s.admit, Serve: s.serve, Arrivals: rate.NewLimiter(arrivalRate, arrivalBurst), Logger: o.Logger,
	})
	s.policy.Store(&o.Policy)
	return s
}

// SetPolicy has requests decided by p from now on, but runs only programs that were listed
// at the start. It returns how many entries wait for a restart. Programs that their clients may not
// have run any more are killed within seconds.
func (s *Server) SetPolicy(p policy.Policy) (waiting int) {
	kept := s.allow.Kept(p)
	s.policy.Store(&kept)
	return len(p) - len(kept)
}

// Start starts the helper, with the capabilities that the process has now. It comes before Run.
// Entries with limits that cannot be had here are refused.
func (s *Server) Start() error {
	var controllers []string
	for i := range s.opt.Policy {
		for _, c := range s.opt.Policy[i].Controllers() {
			if !slices.Contains(controllers, c) {
				controllers = append(controllers, c)
			}
		}
	}
	slice, missing, err := prepareSlice(controllers)
	if err != nil {
		return err
	}
	s.allow = slices.DeleteFunc(slices.Clone(s.opt.Policy), func(e policy.Entry) bool {
		for _, c := range e.Controllers() {
			if err := missing[c]; err != nil {
				s.opt.Logger.Error("entry refused: its program cannot be limited", "name", e.Name, "err", err)
				return true
			}
		}
		return false
	})
	s.SetPolicy(s.allow)
	controllers = slices.DeleteFunc(controllers, func(c string) bool { return missing[c] != nil })
	s.starter, err = startHelper(setup{Policy: s.allow, Slice: slice, Controllers: controllers})
	return err
}

// Run serves until ctx ends, and ends the helper and all programs. That the helper ends before
// is an error.
func (s *Server) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.starter.wait(ctx) })
	g.Go(func() error {
		err := s.peers.Run(ctx, func() { s.opt.Logger.Info("serving", "socket", s.opt.Socket, "entries", len(s.allow)) },
			func(err error) { s.opt.Logger.Error("no socket", "socket", s.opt.Socket, "err", err) })
		if errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	})
	return g.Wait()
}

// admit returns why a client may have no program run at all.
func (s *Server) admit(of peer.Client) error {
	p := *s.policy.Load()
	if of.Guest && p.NamesUser(of.UID) || !of.Guest && p.Names(of.Container) {
		return nil
	}
	return peer.Refuse(peer.ReasonPolicy, "no entry matches %s", of)
}

// serve serves the request of one client, until its program has ended.
func (s *Server) serve(ctx context.Context, c *peer.Conn) error {
	var q first
	got, err := c.Request(ctx, &q, &q.Nonce)
	got.Close()
	if err != nil {
		return err
	}
	allowed := func(now peer.Client) error { return s.allowed(now, q.Run) }
	if err := allowed(c.Client); err != nil {
		return err
	}
	return c.While(ctx, allowed, func() error { return s.run(ctx, c.UnixConn, c.Client, q.Run) })
}

// run runs the program that a client asks for until it has ended, the client has gone, or
// ctx ends. The error is nil or a reason for the client, which names no path of the guest.
func (s *Server) run(ctx context.Context, conn *net.UnixConn, of peer.Client, q Request) error {
	defer s.jobs.Add(-1)
	if s.jobs.Add(1) > int32(s.opt.Jobs) {
		return peer.Refuse(peer.ReasonLimit, "%d programs run already", s.opt.Jobs)
	}
	log := s.opt.Logger.With("name", q.Name, "args", q.Args)
	if of.Guest {
		log = log.With("uid", of.UID, "pid", of.PID)
	} else {
		log = log.With("container", of.Container.Name, "id", of.Container.ID, "pid", of.PID)
	}
	j, err := s.starter.start(q)
	if err != nil {
		log.Warn("run", "result", "not started", "err", err)
		if failed, ok := errors.AsType[startError](err); ok && failed.other {
			return peer.Refuse(peer.ReasonProgram, "the SHA-256 of %q is another than its entry's", q.Name)
		}
		return peer.Refuse(peer.ReasonProgram, "%q cannot be started: the log of fairlead-run says why", q.Name)
	}
	begun := time.Now()
	c := session{frames: frames{conn: conn, sender: of.PID}, job: j, wake: make(chan struct{}, 1)}
	exit, gone, err := c.serve(ctx, conn)
	log = log.With("job", j.pid, "tty", j.tty, "seconds", time.Since(begun).Seconds(), "clientGone", gone)
	if err != nil {
		log.Warn("run", "result", "unknown", "err", err)
		return peer.Refuse(peer.ReasonProgram, "how %q ended is not known: %v", q.Name, err)
	}
	log.Info("run", "result", exit.String())
	return nil
}

// allowed returns why the client may not have its request served, nil if it may.
func (s *Server) allowed(of peer.Client, q Request) error {
	e := s.policy.Load().Find(q.Name)
	if e == nil || of.Guest && !e.HasUser(of.UID) || !of.Guest && !e.Matches(of.Container) {
		return peer.Refuse(peer.ReasonPolicy, "no entry lets %s run %q", of, q.Name)
	}
	if err := q.allowedBy(e); err != nil {
		return peer.Refuse(peer.ReasonPolicy, "the entry does not allow %s this for %q: %v", of, q.Name, err)
	}
	return nil
}

// signals are what a client may send to its program.
var signals = map[string]unix.Signal{
	"HUP": unix.SIGHUP, "INT": unix.SIGINT, "QUIT": unix.SIGQUIT, "TERM": unix.SIGTERM, "USR1": unix.SIGUSR1, "USR2": unix.SIGUSR2,
}

// session is a client and its job.
type session struct {
	frames
	job *job

	mu    sync.Mutex
	stdin []byte // received and not taken
	taken int    // by the goroutine that writes it, and not written
	ended bool   // no more will be received
	wake  chan struct{}
}

// serve carries everything between client and job until the job has ended.
func (c *session) serve(ctx context.Context, conn *net.UnixConn) (exit Exit, gone bool, err error) {
	defer c.job.close()
	_ = conn.SetDeadline(time.Time{}) // the request's may have passed meanwhile
	if err := c.sendReply(reply{Granted: true}); err != nil {
		c.job.kill()
	}
	stop := context.AfterFunc(ctx, c.job.kill)
	defer stop()
	var reader, outputs, feeder sync.WaitGroup
	var left atomic.Bool
	reader.Go(func() {
		c.receiveAll()
		left.Store(true)
		c.job.kill()
		_ = conn.SetWriteDeadline(time.Now()) // nobody reads any more
	})
	outputs.Go(func() { c.copy(frameStdout, c.job.stdout) })
	if !c.job.tty {
		outputs.Go(func() { c.copy(frameStderr, c.job.stderr) })
	}
	feeder.Go(c.feed)
	exit, err = c.job.wait()
	gone = left.Load() && ctx.Err() == nil
	_ = c.job.stdin.Close()
	// What another process than the job's holds open may never end.
	_ = c.job.stdout.SetReadDeadline(time.Now())
	_ = c.job.stderr.SetReadDeadline(time.Now()) // refused if there is none
	outputs.Wait()
	if err == nil {
		_ = c.sendJSON(frameExit, exit)
	}
	_ = conn.CloseRead() // what the client sends now is for nobody
	reader.Wait()
	c.end()
	feeder.Wait()
	if err != nil {
		_ = conn.SetWriteDeadline(time.Time{})
	}
	return exit, gone, err
}

func (c *session) sendReply(r reply) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return c.send(frameReply, b[1:]) // the kind is its first byte
}

// receiveAll reads what the client sends, until it has gone or sends what it must not.
func (c *session) receiveAll() {
	buf, oob := newBuffer(), peer.NewControl()
	for {
		k, content, err := c.receive(buf, oob)
		if err != nil {
			return
		}
		switch k {
		case frameStdin:
			if !c.put(content) {
				return
			}
		case frameStdinEnd:
			if c.job.tty {
				return
			}
			c.end()
		case frameSize:
			if !c.resize(content) {
				return
			}
		case frameSignal:
			s, ok := signals[string(content)]
			if !ok {
				return
			}
			c.job.signal(s)
		default:
			return
		}
	}
}

// resize sets the size of the job's terminal.
func (c *session) resize(b []byte) bool {
	var s Size
	if !c.job.tty || json.Unmarshal(b, &s) != nil {
		return false
	}
	c.job.resize(s)
	return true
}

// put keeps a part of stdin, unless there is more than the client may have sent.
func (c *session) put(b []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || len(c.stdin)+c.taken+len(b) > window {
		return false
	}
	c.stdin = append(c.stdin, b...)
	c.notify()
	return true
}

// end notes that no more of stdin comes.
func (c *session) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.notify()
}

func (c *session) notify() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// feed writes stdin to the job until the client has sent its end, or the job has ended.
// What a job does not want to read is dropped.
func (c *session) feed() {
	defer c.job.endInput()
	for range c.wake {
		b, ended := c.take()
		if len(b) > 0 {
			_, _ = c.job.stdin.Write(b)
			c.mu.Lock()
			c.taken = 0
			c.mu.Unlock()
			_ = c.sendJSON(frameTaken, len(b))
		}
		if ended {
			return
		}
	}
}

func (c *session) take() (b []byte, ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, c.stdin = c.stdin, nil
	c.taken = len(b)
	return b, c.ended
}

// copy sends what a job writes to a pipe until its end. After the pipe's deadline it
// sends only what is there.
func (c *session) copy(k kind, pipe *os.File) {
	buf := make([]byte, maxFrame)
	for {
		n, err := pipe.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			n, err = readNow(pipe, buf)
		}
		if n > 0 && c.send(k, buf[:n]) != nil || err != nil {
			return
		}
	}
}

// readNow reads what is there, else it returns io.EOF.
func readNow(pipe *os.File, buf []byte) (n int, err error) {
	cerr := peer.Control(pipe, func(fd int) error {
		n, err = unix.Read(fd, buf)
		return nil
	})
	if cerr != nil || err != nil || n <= 0 {
		return 0, io.EOF
	}
	return n, nil
}
