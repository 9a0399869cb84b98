// SPDX-License-Identifier: Apache-2.0

// Package containerd declares the ports that containers of nerdctl and pods of
// the CRI publish, in every namespace of a containerd, and which cgroups
// and addresses are whose.
//
// It speaks the protocol of containerd's API module directly: the client of the
// daemon's own module would bring image handling and half as much memory again.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// maxMessage bounds one message of the engine: one container with its spec, or
// the list of all tasks of a namespace.
const maxMessage = 16 << 20

// Access opens what a user can exchange at any time.
type Access interface {
	engine.Access
	// ReadFile reads a small regular file. An absent one is an [fs.ErrNotExist].
	ReadFile(path string) ([]byte, error)
}

// trusted opens the path of a socket.
type trusted struct{ engine.Path }

// ReadFile implements Access.
func (trusted) ReadFile(path string) ([]byte, error) { return readFile(path) }

// Options configures a Source.
type Options struct {
	// SourceName is "containerd" if empty. Two engines need two names.
	SourceName string
	// Sockets are tried in order at each connect, and the first one that answers
	// is taken. Empty means containerd's own default and k3s's.
	Sockets []string
	// Namespaces to look at; empty means all but "moby", which is Docker's and
	// which Docker describes better.
	Namespaces []string
	// CNIResults is where CNI keeps what it gave to whom; "/var/lib/cni/results" if empty. It is
	// not read with Access.
	CNIResults string
	// Access opens the socket of an engine that is not trusted, and nerdctl's files on its
	// containers; nil opens their paths.
	Access Access
	// Wrap changes what is fetched from the engine. May be nil.
	Wrap func(engine.Engine) engine.Engine
	// MaxMessage bounds one message of the engine, in bytes. 16 MiB if 0.
	MaxMessage int
	// MaxObjects bounds the namespaces and, of all of them, the containers of a list; no bound
	// if 0.
	MaxObjects int
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
}

func (o Options) validate() error {
	for _, s := range o.Sockets {
		if !filepath.IsAbs(s) {
			return fmt.Errorf("containerd socket %q: want an absolute path", s)
		}
	}
	for _, n := range o.Namespaces {
		if n == "" || strings.ContainsAny(n, "/ \t\n") {
			return fmt.Errorf("containerd namespace %q: want a name, such as \"default\" or \"k8s.io\"", n)
		}
	}
	if o.Timeout < 0 || o.Audit < 0 || o.MaxMessage < 0 || o.MaxObjects < 0 {
		return fmt.Errorf("containerd timeout %v, audit %v, message %d, objects %d: want 0 (the default) or more", o.Timeout, o.Audit, o.MaxMessage, o.MaxObjects)
	}
	if o.Logger == nil {
		return errors.New("containerd: a logger is required")
	}
	return o.Retry.Validate()
}

// Source is one containerd.
type Source struct {
	o     Options
	facts engine.Table
	users *engine.CgroupUsers
}

// New checks the options and fills in defaults. It connects to nothing.
func New(o Options) (*Source, error) {
	if o.SourceName == "" {
		o.SourceName = "containerd"
	}
	if len(o.Sockets) == 0 {
		o.Sockets = []string{"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock"}
	}
	if o.CNIResults == "" {
		o.CNIResults = "/var/lib/cni/results"
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.Files = o.Files.For(o.Logger, o.Sockets...)
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	if o.Audit == 0 {
		o.Audit = 5 * time.Minute
	}
	if o.MaxMessage == 0 {
		o.MaxMessage = maxMessage
	}
	o.Retry = o.Retry.WithDefaults()
	users := engine.NewCgroupUsers(o.Host)
	return &Source{o: o, users: users, facts: engine.Table{CgroupUser: users.Of}}, nil
}

// Name returns the name that the registry knows the source by.
func (s *Source) Name() string { return s.o.SourceName }

// Sockets returns the paths at which containerd is looked for.
func (s *Source) Sockets() []string { return s.o.Sockets }

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
	stopped := s.o.Files.Watch(ctx, wake, s.o.Sockets...)
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

// session follows the first engine that answers.
func (s *Source) session(ctx context.Context, set *engine.Set, up func()) error {
	s.users.Refresh()
	var tried engine.Attempts
	for _, path := range s.o.Sockets {
		f, version, err := s.dial(ctx, path)
		if err == nil {
			set.Feed.Method(fmt.Sprintf("containerd %s, %s", version, path))
			err = s.follow(ctx, f, set, func() {
				set.Warnings.Set("sockets", unread(ctx, path, s.o.Sockets))
				up()
			})
			_ = f.conn.Close()
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if errors.Is(err, io.EOF) {
				err = fmt.Errorf("the engine ended the stream of events: %w", err)
			}
			return fmt.Errorf("engine at %s: %w", path, err)
		}
		tried.Add(fmt.Errorf("engine at %s: %w", path, err), false)
	}
	return tried.Err()
}

// unread returns a warning for each other socket at which another engine listens: one
// engine is followed, so the ports of that one's containers have no owner.
func unread(ctx context.Context, followed string, sockets []string) (warnings []string) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	this, err := os.Stat(followed)
	if err != nil {
		return nil
	}
	for _, path := range sockets {
		if other, err := os.Stat(path); err != nil || os.SameFile(this, other) {
			continue
		}
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
		if err != nil {
			continue
		}
		_ = c.Close()
		warnings = append(warnings, fmt.Sprintf("the engine at %s is not read, as the one at %s is: its containers have no names "+
			"for rules; see containerd.sockets", path, followed))
	}
	return warnings
}

// dial connects to one socket and asks for the version. The caller closes the connection.
// An error by which nobody listens there is an [engine.ErrRefused].
func (s *Source) dial(ctx context.Context, path string) (*fetcher, string, error) {
	var access Access = trusted{engine.Path(path)}
	if s.o.Access != nil {
		access = s.o.Access
	}
	if err := access.Check(); err != nil {
		return nil, "", err // the client's own error would speak of name resolution
	}
	dialer := engine.NewDialer(ctx)
	cc, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return access.Dial(ctx, dialer.DialContext)
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(s.o.MaxMessage)),
		grpc.WithMaxHeaderListSize(64<<10),
	)
	if err != nil {
		return nil, "", err
	}
	f := newFetcher(cc, s.o, access)
	f.user = engine.SocketUser(path)
	version, err := f.version(ctx)
	if err != nil {
		_ = cc.Close()
		if dialer.Refused() {
			err = engine.Refused(err)
		}
		return nil, "", err
	}
	return f, version, nil
}

func (s *Source) follow(ctx context.Context, f *fetcher, set *engine.Set, up func()) error {
	stream, wait, err := f.subscribe(ctx)
	if err != nil {
		return err
	}
	defer wait()
	var e engine.Engine = f
	if s.o.Wrap != nil {
		e = s.o.Wrap(f)
	}
	return set.Follow(ctx, e, stream, s.o.Audit, up)
}

// wanted reports whether a namespace is watched.
func (o Options) wanted(namespace string) bool {
	if len(o.Namespaces) == 0 {
		return namespace != "moby"
	}
	return slices.Contains(o.Namespaces, namespace)
}

// native replaces gRPC's error texts by plain ones.
func native(err error) error {
	st, ok := status.FromError(err)
	if err == nil || !ok || errors.Is(err, io.EOF) {
		return err
	}
	switch st.Code() {
	case codes.DeadlineExceeded:
		return fmt.Errorf("no answer in time: %w", context.DeadlineExceeded)
	case codes.Unavailable:
		return fmt.Errorf("not reachable: %s", st.Message())
	case codes.Unimplemented:
		return fmt.Errorf("this engine is too old, or is no containerd: %s", st.Message())
	}
	return fmt.Errorf("%s: %s", strings.ToLower(st.Code().String()), st.Message())
}
