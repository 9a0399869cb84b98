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
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/publish/ask"
	"github.com/fairlead/fairlead/internal/run/policy"
)

// Server runs programs for the clients that the publish socket identified.
type Server struct {
	opt    Options
	rights atomic.Pointer[rights]
	jobs   atomic.Int32
	// starter is nil before Start and if that failed, for which failed is the reason.
	starter *starter
	failed  error
}

// rights are what clients may have run now.
type rights struct{ here, host policy.Policy }

// Options configure a Server. All are required.
type Options struct {
	Policy policy.Policy // at first, and the helper's for good; see SetPolicy
	Jobs   int           // at the same time, of all containers together
	Helper []string      // command line of a process that calls Help
	ToHost ToHost        // programs of the host; without a policy none is asked for
	Logger *slog.Logger
}

// New returns a server, which runs nothing before Start.
func New(o Options) *Server {
	s := &Server{opt: o}
	s.SetPolicy(o.Policy, o.ToHost.Policy)
	return s
}

// SetPolicy has requests decided by here, and those for programs of the host by host, from
// now on. The programs of here are those of Options.Policy.
func (s *Server) SetPolicy(here, host policy.Policy) { s.rights.Store(&rights{here, host}) }

// Start starts the helper, with the capabilities that the process has now. If it fails,
// all requests are refused with the error. It comes before Serve and Run.
func (s *Server) Start() error {
	if len(s.opt.Policy) == 0 && len(s.opt.ToHost.Policy) > 0 {
		s.failed = errors.New("run.allow has no entry")
		return nil // all run on the host
	}
	s.starter, s.failed = startHelper(s.opt)
	return s.failed
}

// Serve waits until ctx ends, and ends the helper and all programs.
func (s *Server) Serve(ctx context.Context) error {
	if s.starter == nil {
		<-ctx.Done()
		return nil
	}
	return s.starter.wait(ctx)
}

// Names reports whether the client may have any program run.
func (s *Server) Names(of ask.Client) bool {
	r := s.rights.Load()
	if of.Guest {
		return r.here.NamesUser(of.UID) || r.host.NamesUser(of.UID)
	}
	return r.here.Names(of.Container) || r.host.Names(of.Container)
}

// Run runs the program that a client asks for until it has ended, the client has gone, or
// ctx ends. The error is nil or a reason for the client.
func (s *Server) Run(ctx context.Context, conn *net.UnixConn, of ask.Client, request json.RawMessage) error {
	var q Request
	if err := json.Unmarshal(request, &q); err != nil {
		return ask.Refuse(ask.ReasonRequest, "run: %v", err)
	}
	if err := s.allowed(of, q); err != nil {
		return err
	}
	if !q.Host && s.starter == nil {
		return ask.Refuse(ask.ReasonProgram, "programs cannot be run: %v", s.failed)
	}
	defer s.jobs.Add(-1)
	if s.jobs.Add(1) > int32(s.opt.Jobs) {
		return ask.Refuse(ask.ReasonLimit, "%d programs run already", s.opt.Jobs)
	}
	log := s.opt.Logger.With("name", q.Name, "args", q.Args)
	if of.Guest {
		log = log.With("uid", of.UID, "pid", of.PID)
	} else {
		log = log.With("container", of.Container.Name, "id", of.Container.ID, "pid", of.PID)
	}
	if q.Host {
		return s.runOnHost(ctx, conn, of, q, log)
	}
	return s.runHere(ctx, conn, of, q, log)
}

// runHere runs a program of the guest.
func (s *Server) runHere(ctx context.Context, conn *net.UnixConn, of ask.Client, q Request, log *slog.Logger) error {
	j, err := s.starter.start(q)
	if err != nil {
		log.Warn("run", "result", "not started", "err", err)
		return ask.Refuse(ask.ReasonProgram, "%v", err)
	}
	begun := time.Now()
	c := session{frames: frames{conn: conn, sender: of.PID}, job: j, wake: make(chan struct{}, 1)}
	exit, gone, err := c.serve(ctx, conn)
	log = log.With("job", j.pid, "tty", j.tty, "seconds", time.Since(begun).Seconds(), "clientGone", gone)
	if err != nil {
		log.Warn("run", "result", "unknown", "err", err)
		return ask.Refuse(ask.ReasonProgram, "%v", err)
	}
	log.Info("run", "result", exit.String())
	return nil
}

// Allowed returns why the client may not have the program of its request run, nil if it may.
func (s *Server) Allowed(of ask.Client, request json.RawMessage) error {
	var q Request
	if err := json.Unmarshal(request, &q); err != nil {
		return ask.Refuse(ask.ReasonRequest, "run: %v", err)
	}
	return s.allowed(of, q)
}

func (s *Server) allowed(of ask.Client, q Request) error {
	r := s.rights.Load()
	has := func(e *policy.Entry) bool {
		return e != nil && (of.Guest && e.HasUser(of.UID) || !of.Guest && e.Matches(of.Container))
	}
	if q.Host {
		if !has(r.host.Find(q.Name)) {
			return ask.Refuse(ask.ReasonPolicy, "no entry of run.host lets %s ask the host for %q", of, q.Name)
		}
		return nil
	}
	e := r.here.Find(q.Name)
	if !has(e) {
		return ask.Refuse(ask.ReasonPolicy, "no entry of run.allow lets %s run %q", of, q.Name)
	}
	if err := q.allowedBy(e); err != nil {
		return ask.Refuse(ask.ReasonPolicy, "run.allow does not allow %s this for %q: %v", of, q.Name, err)
	}
	return nil
}

// signals are those that a client may send to its program.
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
	_ = conn.SetDeadline(time.Time{}) // that of the request, which may have passed meanwhile
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
	buf, oob := newBuffer(), ask.NewControl()
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
	cerr := ask.Control(pipe, func(fd int) error {
		n, err = unix.Read(fd, buf)
		return nil
	})
	if cerr != nil || err != nil || n <= 0 {
		return 0, io.EOF
	}
	return n, nil
}
