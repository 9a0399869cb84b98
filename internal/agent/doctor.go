// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/doctor"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/observer"
	"github.com/fairlead/fairlead/internal/own"
	"github.com/fairlead/fairlead/internal/version"
)

// attachReport keeps what the observer said of its hooks.
type attachReport struct {
	*observer.Observer
	mu      sync.Mutex
	methods []observer.Method
}

// Run implements socket.Observer.
func (r *attachReport) Run(ctx context.Context, h observer.Handler) error {
	return r.Observer.Run(ctx, methodsHandler{h, r})
}

type methodsHandler struct {
	observer.Handler
	report *attachReport
}

func (h methodsHandler) Methods(methods []observer.Method) {
	h.report.mu.Lock()
	h.report.methods = slices.Clone(methods)
	h.report.mu.Unlock()
	h.Handler.Methods(methods)
}

func (r *attachReport) hooks() []doctor.Hook {
	r.mu.Lock()
	defer r.mu.Unlock()
	return describeHooks(r.methods)
}

// hooked is a sink with hooks of its own.
type hooked interface{ hooks() []observer.Method }

// sinkHooks are those of the sinks.
func (a *Agent) sinkHooks() (list []doctor.Hook) {
	for _, s := range a.sinks {
		if h, ok := s.(hooked); ok {
			list = append(list, describeHooks(h.hooks())...)
		}
	}
	return list
}

func describeHooks(methods []observer.Method) (list []doctor.Hook) {
	for _, g := range methods {
		h := doctor.Hook{Capability: g.Capability, Method: g.Name, Lost: g.Lost}
		if g.Err != nil {
			h.Error = oneLine(g.Err.Error())
		}
		list = append(list, h)
	}
	return list
}

// oneLine puts joined errors on one line.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }

// unreadShown bounds the rules that are listed.
const unreadShown = 20

// Examine implements status.Examiner.
func (a *Agent) Examine() doctor.Agent {
	s := a.observer.Stats()
	d := doctor.Agent{
		Running: true, Version: version.String(), PID: os.Getpid(), NetNS: netnsName(), Observer: a.cfg.Observer,
		ConfigFile: a.cfg.File(), TokenFile: a.cfg.LinkToken,
		Hooks: append(a.observer.hooks(), a.sinkHooks()...), Drops: s.Drops, Drift: s.Drift, DumpFailures: s.DumpFailures,
		Publications: a.registry.Publications().View().Len(),
	}
	for _, src := range a.registry.Sources().View().All() {
		d.Sources = append(d.Sources, doctor.Source{
			Name: src.Name, State: string(src.State), Method: oneLine(src.Method), Error: oneLine(src.Error), Since: src.Since, Warnings: src.Warnings,
		})
	}
	problems, all := a.notUnderstood()
	d.UnreadCount = all
	for _, p := range problems[:min(unreadShown, len(problems))] {
		d.Unread = append(d.Unread, explain.Unread{Where: p.Where, Rule: p.Rule, Reason: p.Reason})
	}
	if a.hostlink != nil {
		l := a.hostlink.Stats()
		d.Link = &doctor.Link{Connected: l.Connected, Sessions: l.Sessions}
		for _, e := range a.cfg.Link {
			d.Link.Endpoints = append(d.Link.Endpoints, e.String())
		}
	}
	return d
}

// Look starts the sources of an agent until all have said a complete set, or
// for the time given, and says what they found. Nothing is published.
func Look(ctx context.Context, cfg config.Agent, patience time.Duration) (doctor.Agent, error) {
	a := &Agent{cfg: cfg, log: slog.New(slog.DiscardHandler), sockets: new(own.Sockets)}
	if err := a.wireSources(); err != nil {
		return doctor.Agent{}, fmt.Errorf("look without an agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
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

// Dump tries whether the kernel dumps sockets: a look at one port asks for both
// protocols in both families.
func Dump(ctx context.Context) error {
	_, err := observer.Look(ctx, 1)
	return err
}
