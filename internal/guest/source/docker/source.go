// SPDX-License-Identifier: Apache-2.0

// Package docker declares the ports that containers of an engine publish that serves
// Docker's API, as Docker and Podman do, and those of the services of a Docker swarm, and
// which cgroups and addresses are whose.
package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Options configures a Source.
type Options struct {
	// Kind is the program of the engine; Docker if empty.
	Kind Kind
	// SourceName is that of the kind if empty. Two engines need two names.
	SourceName string
	// Hosts are tried in order at each connect, and the first one that exists is
	// taken: "unix:///path", or "tcp://" on a loopback address. An engine
	// elsewhere is refused: its ports are not this guest's. Empty means the usual
	// ones of the kind: of Docker $DOCKER_HOST, or else the rootful socket, or else the
	// rootless one.
	Hosts []string
	// Others are sockets that other sources follow. A host that leads to one of them
	// counts as absent, as Podman's socket under the name of Docker's does.
	Others []string
	// Access opens the sockets of hosts; nil opens their paths.
	Access engine.Access
	// Wrap changes what is fetched from the engine. May be nil.
	Wrap func(engine.Engine) engine.Engine
	// MaxBody bounds one answer of the engine, in bytes, and a 16th of it one event. 64 MiB
	// if 0.
	MaxBody int64
	// Signs is notified when a container may have started. If it is not nil, the engine
	// is left alone while no container of it runs: one that systemd starts for each
	// connection ends then.
	Signs schedule.Signal
	// Asleep leaves it alone from the beginning, until the first sign.
	Asleep bool
	// Rest is how long it is followed without containers before it is left alone. 15 s if
	// 0: longer than the two lists take that a rule by owner asks for.
	Rest time.Duration
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
	// Files tells when a socket appears or changes; it may be shared, with sources that
	// follow no socket of a user. One of its own if nil.
	Files  *engine.Files
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
				return fmt.Errorf("%s host %q: want an absolute path behind unix://", o.Kind, h)
			}
		case "tcp":
			name, _, err := net.SplitHostPort(addr)
			if a, aerr := netip.ParseAddr(name); err != nil || name != "localhost" && (aerr != nil || !a.IsLoopback()) {
				return fmt.Errorf("%s host %q: want a loopback address and a port; "+
					"an engine on another machine publishes its ports there", o.Kind, h)
			}
		default:
			return fmt.Errorf("%s host %q: want unix:///path or tcp://127.0.0.1:port", o.Kind, h)
		}
	}
	if o.Timeout < 0 || o.Audit < 0 || o.Rest < 0 {
		return fmt.Errorf("%s timeout %v, audit %v, rest %v: want 0 (the default) or more", o.Kind, o.Timeout, o.Audit, o.Rest)
	}
	if o.Logger == nil {
		return errors.New("docker: a logger is required")
	}
	if o.Asleep && (o.Signs == nil || o.Access == nil) {
		return errors.New("docker: an engine that is left alone needs signs, and access to its socket")
	}
	return o.Retry.Validate()
}

// Kind is the program of an engine that serves Docker's API.
type Kind string

// The kinds of engines.
const (
	Docker Kind = "docker"
	Podman Kind = "podman"
)

// Source is one engine.
type Source struct {
	o     Options
	facts engine.Table
	users *engine.CgroupUsers
	swarm swarm
	slept bool // it was left alone from the beginning; of the goroutine that runs sessions
	// demanded says that somebody asks for containers by name, also for one that has no
	// port open.
	demanded atomic.Bool
}

// New checks the options and fills in defaults. It connects to nothing.
func New(o Options) (*Source, error) {
	o.Kind = cmp.Or(o.Kind, Docker)
	o.SourceName = cmp.Or(o.SourceName, string(o.Kind))
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	switch {
	case len(o.Hosts) > 0:
	case o.Kind == Podman:
		o.Hosts = podmanHosts(o.Getenv)
	default:
		o.Hosts = defaultHosts(o.Getenv)
		if o.CertPath == "" && o.Getenv("DOCKER_HOST") != "" {
			o.CertPath = o.Getenv("DOCKER_CERT_PATH")
		}
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.Files = o.Files.For(o.Logger, SocketsOf(o.Hosts)...)
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	if o.Audit == 0 {
		o.Audit = 5 * time.Minute
	}
	if o.Rest == 0 {
		o.Rest = 15 * time.Second
	}
	o.MaxBody = cmp.Or(o.MaxBody, maxBody)
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

// podmanHosts are root's socket, or for another user that one's own.
func podmanHosts(getenv func(string) string) []string {
	if dir := getenv("XDG_RUNTIME_DIR"); os.Geteuid() != 0 && filepath.IsAbs(dir) {
		return []string{"unix://" + filepath.Join(dir, PodmanSocket)}
	}
	return []string{"unix:///run/" + PodmanSocket}
}

// PodmanSocket is the path of Podman's socket below /run or a user's runtime directory.
const PodmanSocket = "podman/podman.sock"

// Name returns the name that the registry knows the source by.
func (s *Source) Name() string { return s.o.SourceName }

// Sockets returns the paths at which the engine is looked for.
func (s *Source) Sockets() []string { return SocketsOf(s.o.Hosts) }

// PodmanSockets returns the paths at which Podman is looked for, at these hosts or at the
// usual ones.
func PodmanSockets(hosts []string) []string {
	if len(hosts) == 0 {
		hosts = podmanHosts(os.Getenv)
	}
	return SocketsOf(hosts)
}

// SocketsOf returns the paths of those hosts that are sockets.
func SocketsOf(hosts []string) (paths []string) {
	for _, h := range hosts {
		if p, ok := strings.CutPrefix(h, "unix://"); ok {
			paths = append(paths, p)
		}
	}
	return paths
}

// Find returns the containers that a demand names.
func (s *Source) Find(d port.Demand) []engine.Found { return s.facts.Find(d) }

// Need says whether somebody asks for a container by its name: the engine is not left alone
// then.
func (s *Source) Need(is bool) {
	if s.demanded.Swap(is) != is && s.o.Signs != nil {
		s.o.Signs.Notify()
	}
}

// Watch returns a signal that is notified after each change of what Find returns.
func (s *Source) Watch() schedule.Signal { return s.facts.Watch() }

// Facts answers who owns a cgroup or an address. It stays valid for ever.
func (s *Source) Facts() registry.Facts { return &s.facts }

// Run follows the engine until ctx ends, and returns ctx's cause then.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	ctx, cancel := context.WithCancel(ctx)
	wake := schedule.NewSignal()
	stopped := s.o.Files.Watch(ctx, wake, s.Sockets()...)
	defer func() { cancel(); <-stopped }()
	set := engine.NewSet(s.o.Logger, feed, &s.facts, s.o.Host)
	s.users.Refresh()
	known, saved := set.Remember(ctx, s.o.Memory)
	defer func() { cancel(); saved() }()
	return engine.Supervisor{
		Retry: s.o.Retry, Logger: s.o.Logger, Feed: feed, Facts: &s.facts, Wake: wake, Signs: s.o.Signs,
		Withdraw: set.Withdraw, Prune: set.Prune, Known: known,
	}.Run(ctx, func(ctx context.Context, up func()) error { return s.session(ctx, set, up) })
}

// connect returns a connection to the first host that answers.
func (s *Source) connect(ctx context.Context) (*conn, string, error) {
	var tried engine.Attempts
	for _, h := range s.o.Hosts {
		if err := s.others(h); err != nil {
			tried.Add(err, false)
			continue
		}
		c, err := s.dial(ctx, h)
		if err == nil {
			return c, h, nil
		}
		tried.Add(fmt.Errorf("engine at %s: %w", h, err), !strings.HasPrefix(h, "unix://"))
	}
	return nil, "", tried.Err()
}

// others returns an error if a host is a socket that another source follows.
func (s *Source) others(host string) error {
	path, ok := strings.CutPrefix(host, "unix://")
	if !ok {
		return nil
	}
	is, err := os.Stat(path)
	if err != nil {
		return nil //nolint:nilerr // connecting says what is wrong
	}
	for _, other := range s.o.Others {
		if o, err := os.Stat(other); err == nil && os.SameFile(is, o) {
			return otherError{path, other}
		}
	}
	return nil
}

// asleep ends the method of an engine that is left alone.
const asleep = ", asleep until a container runs"

// otherError says that a path leads to the socket of another source, so that there is none
// for this one.
type otherError struct{ path, other string }

func (e otherError) Error() string {
	return e.path + " is " + e.other + ", which another source follows"
}
func (e otherError) Is(target error) bool { return target == fs.ErrNotExist }

func (s *Source) session(ctx context.Context, set *engine.Set, up func()) error {
	if s.o.Asleep && !s.slept && s.o.Access.Check() == nil {
		s.slept = true
		set.Feed.Method(string(s.o.Kind) + asleep)
		set.Feed.Replace(nil)
		up()
		return engine.ErrRest
	}
	s.users.Refresh()
	c, host, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer c.close()
	if err := s.follow(ctx, c, host, set, up); ctx.Err() == nil && !errors.Is(err, engine.ErrRest) {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("the engine ended the stream of events: %w", err)
		}
		return fmt.Errorf("engine at %s: %w", host, err)
	}
	if ctx.Err() == nil {
		return engine.ErrRest
	}
	return ctx.Err()
}

func (s *Source) follow(ctx context.Context, c *conn, host string, set *engine.Set, up func()) error {
	info, err := c.info(ctx)
	if err != nil {
		return err
	}
	kind := c.kind(ctx)
	if s.o.Kind == Podman && kind == Docker {
		return errors.New("this is Docker, not Podman: name its socket in docker.hosts")
	}
	var user uint32
	if path, ok := strings.CutPrefix(host, "unix://"); ok && info.rootless() {
		user = engine.SocketUser(path)
	}
	// The engine confirms a subscription just before it is in place; events since
	// now are replayed, which closes that gap.
	stream, wait, err := c.subscribe(ctx, time.Now(), kind == Docker)
	if err != nil {
		return err
	}
	defer wait()
	method := fmt.Sprintf("%s %s, API %s, %s", cmp.Or(kind, s.o.Kind), info.ServerVersion, c.ClientVersion(), host)
	set.Feed.Method(method)
	if s.o.Signs != nil {
		stream.Rest, stream.Signs, stream.Awake = s.o.Rest, s.o.Signs, s.demanded.Load
	}
	var e engine.Engine = fetcher{c, s.o.Host, info.rootless(), user, &s.swarm, cmp.Or(kind, s.o.Kind) == Podman}
	if s.o.Wrap != nil {
		e = s.o.Wrap(e)
	}
	err = set.Follow(ctx, e, stream, s.o.Audit, up)
	if errors.Is(err, engine.ErrRest) {
		set.Feed.Method(method + asleep)
	}
	return err
}
