// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package demo shows fairlead on one machine: a private network namespace is the
// guest, with an agent and two small servers in it; the host peer runs outside. The
// demo removes everything at its end.
package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
)

// ServerCommand is the hidden command that Run starts for each server in the guest.
const ServerCommand = "demo-server"

// ErrNotRoot is returned if the caller is not root.
var ErrNotRoot = errors.New("the demo makes a network namespace and loads BPF programs, which needs root: run it with sudo")

// Options configures a demo.
type Options struct {
	Self     string // path of the fairlead binary
	Observer string // auto, bpf or poll
	Out, Err io.Writer
}

// Run shows the demo until ctx ends.
func Run(ctx context.Context, o Options) (err error) {
	if os.Geteuid() != 0 {
		return ErrNotRoot
	}
	dir, err := os.MkdirTemp("", "fairlead-demo-")
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ns, err := newGuest()
	if err != nil {
		return fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, ns.Close()) }()

	// Children die with this process. They are stopped in reverse order, before the namespace is removed.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c := children{o: o, ns: ns, dead: func(err error) { cancel(err) }}
	defer c.stop()
	link := "unix://" + filepath.Join(dir, "link", "link.sock")
	control := filepath.Join(dir, "agent.sock") // short: the intro shows it
	web, echo, err := freePorts()
	if err != nil {
		return err
	}
	steps := []struct {
		inGuest bool
		args    []string
	}{
		{true, []string{"agent", "--link", link, "--control", control, "--forwards-file", "", "--observer", o.Observer, "--log-level", "warn"}},
		{false, []string{"host", "--connect", link, "--control", filepath.Join(dir, "host", "host.sock"), "--forwards-file", "", "--log-level", "warn"}},
		{true, []string{ServerCommand, "http", fmt.Sprintf("0.0.0.0:%d", web)}},
		{true, []string{ServerCommand, "udp-echo", fmt.Sprintf("127.0.0.1:%d", echo)}},
	}
	for _, s := range steps {
		if err := c.start(s.inGuest, s.args...); err != nil {
			return err
		}
	}
	client := status.NewClient(control)
	if err := waitReady(ctx, client); err != nil {
		return err
	}
	v := view{o: o, ns: ns, web: web, echo: echo, control: control, client: client}
	v.columns, v.rows = terminal(o.Out)
	err = v.follow(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// freePorts returns ports that are free on the host, so that they do not conflict.
func freePorts() (web, echo uint16, err error) {
	for p := uint16(8080); p < 8180; p++ {
		l, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			continue
		}
		_ = l.Close()
		if web == 0 {
			web = p
			continue
		}
		u, err := net.ListenPacket("udp4", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			continue
		}
		_ = u.Close()
		return web, p, nil
	}
	return 0, 0, errors.New("demo: no free port between 8080 and 8179 on this machine")
}

func waitReady(ctx context.Context, c *status.Client) error {
	var last error
	for range 2400 { // two minutes; the end of a child cancels ctx
		l, err := c.List(ctx)
		if err == nil && l.Ready() && len(l.Publications) >= 2 {
			return nil
		}
		last = err
		if schedule.Sleep(ctx, 50*time.Millisecond) != nil {
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("demo: the agent did not become ready: %w", last)
}

// children are the processes of the demo.
type children struct {
	o    Options
	ns   *guest
	dead func(error)

	procs   []*exec.Cmd
	wg      sync.WaitGroup
	closing sync.Once
	ended   chan struct{}
}

func (c *children) start(inGuest bool, args ...string) error {
	if c.ended == nil {
		c.ended = make(chan struct{})
	}
	cmd := exec.Command(c.o.Self, args...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = c.o.Err, io.MultiWriter(&limited{&log}, prefixed{c.o.Err, args[0]})
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	// The death signal is sent when the thread that started the child ends.
	run := onLastingThread
	if inGuest {
		run = c.ns.Do
	}
	if err := run(cmd.Start); err != nil {
		return fmt.Errorf("demo: start %s: %w", args[0], err)
	}
	c.procs = append(c.procs, cmd)
	c.wg.Go(func() {
		err := cmd.Wait()
		select {
		case <-c.ended:
		default:
			if args[0] != ServerCommand {
				c.dead(fmt.Errorf("demo: %s ended: %w: %s", args[0], err, strings.TrimSpace(log.String())))
			}
		}
	})
	return nil
}

func (c *children) stop() {
	c.closing.Do(func() {
		if c.ended != nil {
			close(c.ended)
		}
	})
	for i := len(c.procs) - 1; i >= 0; i-- {
		_ = c.procs[i].Process.Signal(syscall.SIGTERM)
	}
	done := make(chan struct{})
	go func() { c.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		for _, p := range c.procs {
			_ = p.Process.Kill()
		}
		<-done
	}
}

// limited keeps the first 4 KiB.
type limited struct{ b *bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	if room := 4<<10 - l.b.Len(); room > 0 {
		l.b.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

type prefixed struct {
	w    io.Writer
	name string
}

func (p prefixed) Write(b []byte) (int, error) {
	_, err := fmt.Fprintf(p.w, "[%s] %s", p.name, b)
	return len(b), err
}

// terminal returns the size of a terminal, 0 if w is none.
func terminal(w io.Writer) (columns, rows int) {
	f, ok := w.(*os.File)
	if !ok {
		return 0, 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	switch {
	case err != nil:
		return 0, 0
	case size.Col == 0 || size.Row == 0: // unknown
		return 80, 24
	}
	return int(size.Col), int(size.Row)
}

// view shows the agent's ports: a live table on a terminal, or else a line per event.
type view struct {
	o         Options
	ns        *guest
	web, echo uint16
	client    *status.Client
	control   string
	last      []string

	columns, rows int // of the terminal; 0 if there is none
}

func (v *view) intro() string {
	var b strings.Builder
	fmt.Fprintf(&b, "The guest is network namespace %s; this shell is the host.\n", v.ns.name)
	fmt.Fprintf(&b, "In another shell, as root:\n")
	fmt.Fprintf(&b, "  curl http://127.0.0.1:%d/\n", v.web)
	fmt.Fprintf(&b, "  %s python3 -m http.server 9000\n", v.ns.enter())
	fmt.Fprintf(&b, "  echo hello | nc -u -w1 127.0.0.1 %d\n", v.echo)
	fmt.Fprintf(&b, "  export %s=%s\n", config.ClientControl, v.control)
	self := shortest(v.o.Self)
	fmt.Fprintf(&b, "  %s ls\n  %[1]s explain %d\n  %[1]s web\n", self, v.web)
	fmt.Fprintf(&b, "Ctrl-C ends the demo and removes everything.\n\n")
	return b.String()
}

// shortest returns the path of a program as a person would type it here.
func shortest(path string) string {
	dir, err := os.Getwd()
	if err != nil {
		return path
	}
	if inside, err := filepath.Rel(dir, path); err == nil && filepath.IsLocal(inside) && strings.Contains(inside, "/") {
		return inside
	}
	return path
}

func (v *view) follow(ctx context.Context) error {
	if v.columns == 0 {
		_, _ = io.WriteString(v.o.Out, v.intro())
		if err := v.table(ctx); err != nil {
			return err
		}
	}
	return v.client.Watch(ctx, func(e status.Event) error {
		if v.columns > 0 {
			if e.Type == status.Present {
				return nil
			}
			v.note(e)
			return v.redraw(ctx)
		}
		if e.Type == status.Present {
			return nil
		}
		return status.WriteEvent(v.o.Out, e, status.Painter{})
	})
}

// gaps are those that align the columns of a watch, for which a terminal has no room.
var gaps = regexp.MustCompile(` {3,}`)

// note keeps the latest events, to show them below the table.
func (v *view) note(e status.Event) {
	var line strings.Builder
	_ = status.WriteEvent(&line, e, status.Painter{})
	if line.Len() == 0 {
		return
	}
	v.last = append(v.last, status.Shorten("  "+gaps.ReplaceAllString(strings.TrimSpace(line.String()), "  "), v.columns))
	if len(v.last) > 6 {
		v.last = v.last[1:]
	}
}

func (v *view) redraw(ctx context.Context) error {
	var b strings.Builder
	b.WriteString("\x1b[H\x1b[2J")
	b.WriteString(v.intro())
	o := *v
	o.o.Out = &b
	if err := o.table(ctx); err != nil {
		return err
	}
	if len(v.last) > 0 {
		// Above the table is what to type: it must not scroll away.
		free := v.rows - strings.Count(b.String(), "\n") - len("\n\n\n")
		if free > 0 {
			b.WriteString("\nlatest:\n" + strings.Join(v.last[max(0, len(v.last)-free):], "\n") + "\n")
		}
	}
	_, err := io.WriteString(v.o.Out, b.String())
	return err
}

func (v *view) table(ctx context.Context) error {
	l, err := v.client.List(ctx)
	if err != nil {
		return err
	}
	for _, s := range l.Sources {
		if s.Name == "socket" {
			_, _ = fmt.Fprintf(v.o.Out, "sockets observed by:\n  %s\n\n", s.Method)
		}
	}
	return status.WriteTable(v.o.Out, l, status.Style{Now: time.Now(), Width: v.columns})
}

// Serve runs one of the guest's servers until ctx ends.
func Serve(ctx context.Context, kind, addr string) error {
	switch kind {
	case "http":
		return serveHTTP(ctx, addr)
	case "udp-echo":
		return serveEcho(ctx, addr)
	}
	return fmt.Errorf("server %q: want http or udp-echo", kind)
}
