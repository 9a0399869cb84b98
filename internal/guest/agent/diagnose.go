// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/guest/gather"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/explain"
)

// diagnosed is what package gather reads of this agent.
func (a *Agent) diagnosed() gather.Agent {
	g := gather.Agent{
		Registry: a.registry, Rules: a.rules.Load, Sockets: a.sockets, Observer: a.observer,
		RulesFile: cmp.Or(a.cfg.RulesFile, a.cfg.File(), config.DefaultAgentFile),
		Forwards:  a.forwards,
		Unread:    a.unread, Container: a.container, Refused: a.refused,
	}
	if a.publish != nil {
		g.Dial = a.publish.Dial
	}
	if a.reconciler != nil {
		g.Outcomes = a.reconciler.Outcomes()
	}
	return g
}

// refused returns the last host that was refused, if none is connected.
func (a *Agent) refused() *explain.Refusal {
	if a.hostlink == nil {
		return nil
	}
	if _, connected := a.hostlink.Peer(); connected {
		return nil
	}
	return a.links.lastRefused()
}

// peers describes the host for the status: the one that is connected, or why there is none.
func (a *Agent) peers() []status.Peer {
	if a.hostlink == nil {
		return nil
	}
	if p, ok := a.hostlink.Peer(); ok {
		s := status.Peer{State: status.PeerConnected, Name: p.Name, Version: p.Version, Endpoint: p.Address}
		if r := a.hostlink.Stats().Rivals; len(r) > 0 {
			s.Error = strings.Join(r, " and ")
			s.Next = "an agent serves one host at a time, so stop the host peer on one of them"
		}
		return []status.Peer{s}
	}
	if r := a.links.lastRefused(); r != nil {
		return []status.Peer{{State: status.PeerRefused, Endpoint: r.Peer, Error: r.Reason, Code: r.Code, Next: r.Next(), Since: r.At}}
	}
	why := "no host has connected yet"
	if a.hostlink.Stats().Sessions > 0 {
		why = "no host is connected any more"
	}
	return []status.Peer{{State: status.PeerAway, Endpoint: strings.Join(a.endpoints(), ", "), Error: why}}
}

// endpoints lists where the agent and the host meet.
func (a *Agent) endpoints() (list []string) {
	for _, e := range a.cfg.Link {
		list = append(list, e.String())
	}
	return list
}

// unread returns the NAT rules that are not understood, and how many there are.
func (a *Agent) unread() (list []explain.Unread, all int) {
	for _, s := range a.sources {
		s, ok := s.(interface{ NotUnderstood() ([]nat.Problem, int) })
		if !ok {
			continue
		}
		problems, n := s.NotUnderstood()
		for _, p := range problems {
			list = append(list, explain.Unread{Where: p.Where, Rule: p.Rule, Reason: p.Reason})
		}
		all += n
	}
	return list, all
}

// unreadOnWire returns the NAT rules that are not understood as the host is sent them.
func (a *Agent) unreadOnWire() []wire.Unread {
	rules, _ := a.unread()
	rules = rules[:min(len(rules), wire.MaxUnread)]
	out := make([]wire.Unread, 0, len(rules))
	for _, r := range rules {
		out = append(out, wire.NewUnread(r.Where, r.Rule, r.Reason))
	}
	return out
}

// container returns the container whose cgroup has that path, if an engine knows it.
func (a *Agent) container(path string) (port.Owner, bool) {
	for _, s := range a.sources {
		if s, ok := s.(interface{ Facts() registry.Facts }); ok {
			if o, ok := s.Facts().ByCgroupPath(path); ok {
				return o, true
			}
		}
	}
	return port.Owner{}, false
}

// Examine implements status.Examiner.
func (a *Agent) Examine() doctor.Agent {
	d := gather.Examine(a.diagnosed())
	d.Observer, d.ConfigFile, d.Own = a.cfg.Observer, a.cfg.File(), a.sockets.Cookies()
	d.Waiting, d.Settings = a.waiting(), a.settings()
	for _, h := range a.hooked() {
		d.Hooks = append(d.Hooks, gather.Hooks(h.Hooks())...)
	}
	d.StartCapabilities = a.started
	d.ListsOnly = slices.Contains(a.cfg.Sinks, config.Sink{Name: config.NoSink})
	if a.inventory != nil {
		s := a.inventory.writer.State()
		d.Inventory = &doctor.Inventory{Node: s.Node, Error: s.Error, Written: s.Written, Omitted: s.Omitted}
		if v, ok := a.verdict(); ok {
			d.Inventory.Policy = &doctor.Policy{File: v.File, Violations: len(v.Violations), Judged: v.Error == nil, Says: v.String()}
		}
	}
	if why := a.unconfined.Load(); why != nil {
		d.Unconfined = *why
	}
	if a.hostlink != nil {
		l := a.hostlink.Stats()
		d.Link = &doctor.Link{Connected: l.Connected, Sessions: l.Sessions, Rivals: l.Rivals, Endpoints: a.endpoints(), Refused: a.refused()}
		for _, e := range a.cfg.Link {
			if _, err := os.Stat(e.Path); e.Network == link.NetworkUnix && errors.Is(err, fs.ErrNotExist) {
				d.Link.Removed = append(d.Link.Removed, e.Path)
			}
		}
	}
	return d
}

// Look runs the sources of an agent until each has reported a complete set, or
// until timeout, and returns what they found. Nothing is published.
func Look(ctx context.Context, cfg config.Agent, timeout time.Duration) (doctor.Agent, error) {
	a := &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler), sockets: new(own.Sockets), started: uint64(privilege.Effective())}
	if err := a.wireSources(); err != nil {
		return doctor.Agent{}, fmt.Errorf("look without an agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	failed := map[string]error{}
	for _, s := range a.sources {
		feed := a.registry.Feed(s.Name())
		wg.Go(func() {
			if err := s.Run(ctx, feed); ctx.Err() == nil {
				mu.Lock()
				failed[s.Name()] = err
				mu.Unlock()
			}
		})
	}
	select {
	case <-a.registry.Ready():
	case <-ctx.Done():
	}
	d := a.Examine()
	cancel()
	wg.Wait()
	d.Running, d.PID = false, 0
	for i := range d.Sources {
		if err := failed[d.Sources[i].Name]; err != nil {
			d.Sources[i].State, d.Sources[i].Error = "stale", err.Error()
		}
	}
	return d, nil
}
