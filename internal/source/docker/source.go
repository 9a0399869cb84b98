// SPDX-License-Identifier: Apache-2.0

// Package docker declares the ports that containers of a Docker engine and services of its
// swarm publish, and which cgroups and addresses are whose.
package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/registry"
	"github.com/fairlead/fairlead/internal/schedule"
	"github.com/fairlead/fairlead/internal/source/engine"
)

// Options configures a Source.
type Options struct {
	// SourceName is "docker" if empty. Two engines need two names.
	SourceName string
	// Hosts are tried in order at each connect, and the first one that exists is
	// taken: "unix:///path", or "tcp://" on a loopback address. An engine
	// elsewhere is refused: its ports are not this guest's. Empty means
	// $DOCKER_HOST, or else the rootful socket, or else the rootless one.
	Hosts []string
	// CertPath holds ca.pem, cert.pem and key.pem for a tcp host; "" means no TLS.
	CertPath string
	// Timeout bounds each request but the stream of events. 10 s if 0.
	Timeout time.Duration
	// Audit is the time between two lists while nothing is wrong. 5 min if 0.
	Audit time.Duration
	Retry engine.Retry
	Host  engine.Host
	// Memory keeps what rules by owner need for an agent that starts while the engine
	// is away.
	Memory engine.Memory
	Logger *slog.Logger
	// Getenv is os.Getenv if nil.
	Getenv func(string) string
}

func (o Options) validate() error {
	for _, h := range o.Hosts {
		scheme, addr, _ := strings.Cut(h, "://")
		switch scheme {
		case "unix":
			if !filepath.IsAbs(addr) {
				return fmt.Errorf("docker host %q: want an absolute path behind unix://", h)
			}
		case "tcp":
			name, _, err := net.SplitHostPort(addr)
			if a, aerr := netip.ParseAddr(name); err != nil || name != "localhost" && (aerr != nil || !a.IsLoopback()) {
				return fmt.Errorf("docker host %q: want a loopback address and a port; "+
					"an engine on another machine publishes its ports there", h)
			}
		default:
			return fmt.Errorf("docker host %q: want unix:///path or tcp://127.0.0.1:port", h)
		}
	}
	if o.Timeout < 0 || o.Audit < 0 {
		return fmt.Errorf("docker timeout %v, audit %v: want 0 (the default) or more", o.Timeout, o.Audit)
	}
	if o.Logger == nil {
		return errors.New("docker: a logger is required")
	}
	return o.Retry.Validate()
}

// Source is one Docker engine.
type Source struct {
	o     Options
	facts engine.Table
	users *engine.CgroupUsers
	swarm swarm
}

// New checks the options and fills in defaults. It connects to nothing.
func New(o Options) (*Source, error) {
	if o.SourceName == "" {
		o.SourceName = "docker"
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if len(o.Hosts) == 0 {
		o.Hosts = defaultHosts(o.Getenv)
		if o.CertPath == "" && o.Getenv("DOCKER_HOST") != "" {
			o.CertPath = o.Getenv("DOCKER_CERT_PATH")
		}
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	if o.Audit == 0 {
		o.Audit = 5 * time.Minute
	}
	o.Retry = o.Retry.WithDefaults()
	users := engine.NewCgroupUsers(o.Host)
	return &Source{o: o, users: users, facts: engine.Table{CgroupUser: users.Of}}, nil
}

func defaultHosts(getenv func(string) string) []string {
	if h := getenv("DOCKER_HOST"); h != "" {
		return []string{h}
	}
	hosts := []string{"unix:///var/run/docker.sock"}
	if dir := getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		hosts = append(hosts, "unix://"+filepath.Join(dir, "docker.sock"))
	}
	return hosts
}

// Name returns the name that the registry knows the source by.
func (s *Source) Name() string { return s.o.SourceName }

// Sockets returns the paths at which the engine is looked for.
func (s *Source) Sockets() (paths []string) {
	for _, h := range s.o.Hosts {
		if p, ok := strings.CutPrefix(h, "unix://"); ok {
			paths = append(paths, p)
		}
	}
	return paths
}

// Find returns the containers that a demand names.
func (s *Source) Find(d port.Demand) []engine.Found { return s.facts.Find(d) }

// Watch returns a signal that is notified after each change of what Find returns.
func (s *Source) Watch() schedule.Signal { return s.facts.Watch() }

// Facts answers who owns a cgroup or an address. It stays valid for ever.
func (s *Source) Facts() registry.Facts { return &s.facts }

// Run follows the engine until ctx ends, and returns ctx's cause then.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	ctx, cancel := context.WithCancel(ctx)
	wake := schedule.NewSignal()
	stopped := engine.Watch(ctx, s.o.Logger, wake, s.Sockets()...)
	defer func() { cancel(); <-stopped }()
	set := engine.NewSet(s.o.Logger, feed, &s.facts, s.o.Host)
	s.users.Refresh()
	known, saved := set.Remember(ctx, s.o.Memory)
	defer func() { cancel(); saved() }()
	return engine.Supervisor{
		Retry: s.o.Retry, Logger: s.o.Logger, Feed: feed, Facts: &s.facts, Wake: wake,
		Withdraw: set.Withdraw, Prune: set.Prune, Known: known,
	}.Run(ctx, func(ctx context.Context, up func()) error { return s.session(ctx, set, up) })
}

// connect returns a connection to the first host that answers.
func (s *Source) connect(ctx context.Context) (*conn, string, error) {
	var tried engine.Attempts
	for _, h := range s.o.Hosts {
		c, err := dial(ctx, h, s.o.CertPath, s.o.Timeout)
		if err == nil {
			return c, h, nil
		}
		tried.Add(fmt.Errorf("engine at %s: %w", h, err), !strings.HasPrefix(h, "unix://"))
	}
	return nil, "", tried.Err()
}

func (s *Source) session(ctx context.Context, set *engine.Set, up func()) error {
	s.users.Refresh()
	c, host, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer c.close()
	if err := s.follow(ctx, c, host, set, up); ctx.Err() == nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("the engine ended the stream of events: %w", err)
		}
		return fmt.Errorf("engine at %s: %w", host, err)
	}
	return ctx.Err()
}

func (s *Source) follow(ctx context.Context, c *conn, host string, set *engine.Set, up func()) error {
	info, err := c.info(ctx)
	if err != nil {
		return err
	}
	var user uint32
	if path, ok := strings.CutPrefix(host, "unix://"); ok && info.rootless() {
		user = engine.SocketUser(path)
	}
	// The engine confirms a subscription just before it is in place; events since
	// now are replayed, which closes that gap.
	stream, wait, err := c.subscribe(ctx, time.Now())
	if err != nil {
		return err
	}
	defer wait()
	set.Feed.Method(fmt.Sprintf("docker %s, API %s, %s", info.ServerVersion, c.ClientVersion(), host))
	return set.Follow(ctx, fetcher{c, s.o.Host, info.rootless(), user, &s.swarm}, stream, s.o.Audit, up)
}
