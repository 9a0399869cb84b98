// SPDX-License-Identifier: Apache-2.0

// Package users names the containers of users' own engines: of rootless Docker, Podman and
// containerd. What these say is their users' word. So they declare no port, and name only ports
// whose sockets belong to the user.
package users

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/containerd"
	"github.com/fairlead/fairlead/internal/guest/source/docker"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Name is the source's name.
const Name = "users"

// maxUsers bounds whose engines are followed at once.
const maxUsers = 32

// maxBody bounds one answer of a user's engine, in bytes.
const maxBody = 2 << 20

// maxObjects bounds the namespaces of a user's containerd, and the containers of all of them,
// also of those that have stopped.
const maxObjects = 1024

// containerdSocket is where nerdctl's containerd-rootless.sh lets containerd listen, in a user's
// runtime directory.
const containerdSocket = "containerd/containerd.sock"

// maxWarnings is how many warnings of one engine are shown.
const maxWarnings = 3

// pause is between two looks at users and states, which users can change at any rate.
const pause = time.Second

// Options configures a Source.
type Options struct {
	// Dir has the runtime directory of each user, by number. "/run/user" if empty.
	Dir string
	// Others are sockets that other sources follow.
	Others []string
	// Signs returns what is notified when a container of Podman may have started that belongs
	// to a user. Nil follows Podman all the time.
	Signs func(user uint32) schedule.Signal
	// Timeout bounds each request. 10 s if 0.
	Timeout time.Duration
	Retry   engine.Retry
	// Files tells when a user logs in; it may be shared. One of its own if nil. What users own
	// is watched by others: they could make it slow.
	Files  *engine.Files
	Logger *slog.Logger
}

// Source follows the engines of all users who are logged in.
type Source struct {
	o     Options
	table table
	euid  uint32 // of this process, which sees its own engines alone unless it is root

	mu    sync.Mutex
	views map[*view]struct{}
	full  bool // there are more users than are followed
}

// New fills in defaults. It connects to nothing.
func New(o Options) (*Source, error) {
	if o.Logger == nil {
		return nil, errors.New("users: a logger is required")
	}
	o.Dir = cmp.Or(o.Dir, "/run/user")
	if o.Files == nil {
		o.Files = engine.NewFiles(o.Logger.With("source", Name))
	}
	return &Source{o: o, euid: uint32(os.Geteuid()), views: make(map[*view]struct{})}, o.Retry.Validate()
}

// Name implements the agent's Source.
func (s *Source) Name() string { return Name }

// Sockets returns the directory that has the sockets.
func (s *Source) Sockets() []string { return []string{filepath.Join(s.o.Dir, "UID")} }

// Holders answers who holds the ports of users. It stays valid for ever.
func (s *Source) Holders() registry.Holders { return &s.table }

// Run follows the engines until ctx ends, and returns ctx's cause then.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	ctx, cancel := context.WithCancel(ctx)
	wake, said := schedule.NewSignal(), schedule.NewSignal()
	// A user's directory appears in it, which "." has watched.
	stopped := s.o.Files.Watch(ctx, wake, s.o.Dir+"/.")
	var wg sync.WaitGroup
	defer func() { cancel(); <-stopped; wg.Wait() }()
	following := make(map[uint32]context.CancelFunc)
	for {
		uids := s.users()
		for uid, end := range following {
			if !slices.Contains(uids, uid) {
				end() // and nobody waits for it: a user may have made it slow
				delete(following, uid)
			}
		}
		for _, uid := range uids {
			if following[uid] != nil {
				continue
			}
			uctx, end := context.WithCancel(ctx)
			following[uid] = end
			wg.Go(func() { s.follow(uctx, uid, said) })
		}
		s.report(feed)
		if err := schedule.Sleep(ctx, pause); err != nil {
			return context.Cause(ctx)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-wake:
		case <-said:
		}
	}
}

// users returns the users who have a runtime directory and whose engines can be reached, in
// order, and at most maxUsers. Root's own engines are those of other sources.
func (s *Source) users() (uids []uint32) {
	entries, err := os.ReadDir(s.o.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.o.Logger.Debug("cannot read who is logged in", "source", Name, "err", err)
	}
	for _, e := range entries {
		n, err := strconv.ParseUint(e.Name(), 10, 32)
		if err == nil && n != 0 && (s.euid == 0 || uint32(n) == s.euid) && e.Name() == strconv.FormatUint(n, 10) {
			uids = append(uids, uint32(n))
		}
	}
	slices.Sort(uids)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.full = len(uids) > maxUsers
	return uids[:min(len(uids), maxUsers)]
}

// follow follows the engines of one user until ctx ends.
func (s *Source) follow(ctx context.Context, uid uint32, said schedule.Signal) {
	dir := filepath.Join(s.o.Dir, strconv.FormatUint(uint64(uid), 10))
	name := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(name); err == nil {
		name = cut(u.Username)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for kind, src := range s.engines(dir, uid, name) {
		v := &view{table: &s.table, user: uid, held: port.Held{Engine: kind, User: name}, said: said.Notify}
		s.mu.Lock()
		s.views[v] = struct{}{}
		s.mu.Unlock()
		wg.Go(func() {
			_ = src.Run(ctx, v)
			v.end()
			s.mu.Lock()
			delete(s.views, v)
			s.mu.Unlock()
			said.Notify()
		})
	}
}

// follower is the source of one engine.
type follower interface {
	Run(ctx context.Context, feed registry.Feed) error
}

// engines returns those that a user may have, by their kinds.
func (s *Source) engines(dir string, uid uint32, name string) map[string]follower {
	all, logger := make(map[string]follower), s.o.Logger.With("source", Name, "user", name)
	add := func(kind string, src follower, err error) {
		if err != nil {
			logger.Error("cannot follow a user's engine", "engine", kind, "err", err)
			return
		}
		all[kind] = src
	}
	wrap := func(e engine.Engine) engine.Engine { return bounded{e} }
	for kind, rel := range map[docker.Kind]string{docker.Docker: "docker.sock", docker.Podman: docker.PodmanSocket} {
		o := docker.Options{
			Kind: kind, SourceName: Name, Hosts: []string{"unix://" + filepath.Join(dir, rel)}, Others: s.o.Others,
			Access: access{dir, rel, uid}, Wrap: wrap, MaxBody: maxBody, Timeout: s.o.Timeout, Retry: s.o.Retry, Logger: logger,
		}
		if kind == docker.Podman && s.o.Signs != nil {
			// Its first start makes directories in the home of a user who may never use it.
			o.Signs, o.Asleep = s.o.Signs(uid), true
		}
		src, err := docker.New(o)
		add(string(kind), src, err)
	}
	src, err := containerd.New(containerd.Options{
		SourceName: Name, Sockets: []string{filepath.Join(dir, containerdSocket)}, Access: access{dir, containerdSocket, uid}, Wrap: wrap,
		MaxMessage: maxBody, MaxObjects: maxObjects, Timeout: s.o.Timeout, Retry: s.o.Retry, Logger: logger,
	})
	add("containerd", src, err)
	return all
}

// report shows the state of all engines.
func (s *Source) report(feed registry.Feed) {
	s.mu.Lock()
	views, full := slices.Collect(maps.Keys(s.views)), s.full
	s.mu.Unlock()
	var methods, warnings, lost []string
	for _, v := range views {
		st, present := v.shown()
		if !present {
			continue
		}
		of := v.held.Engine + " of " + v.held.User
		methods = append(methods, cmp.Or(st.method, v.held.Engine)+" of "+v.held.User)
		if st.stale != "" {
			lost = append(lost, of+": "+st.stale)
		}
		for _, w := range st.warnings[:min(len(st.warnings), maxWarnings)] {
			warnings = append(warnings, of+": "+w)
		}
	}
	if full {
		warnings = append(warnings, fmt.Sprintf("more than %d users are logged in: the engines of the others are not followed", maxUsers))
	}
	slices.Sort(methods)
	slices.Sort(warnings)
	slices.Sort(lost)
	if len(lost) > 0 {
		feed.Stale(errors.New(strings.Join(lost, "; ")))
	} else {
		feed.Replace(nil)
	}
	feed.Method(cmp.Or(strings.Join(methods, ", "), "no user's engine"))
	feed.Warn(warnings)
}
