// SPDX-License-Identifier: Apache-2.0

package loglevel

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
)

// Components returns the names of those that log: packages of fairlead, of which source and
// sink packages go by the source's or sink's own name. A line with the attribute source or
// sink belongs to that one, too.
func Components() []string {
	return []string{
		"agent", "auto", "containerd", "demand", "docker", "dropin", "engine", "forward", "forwards", "gvproxy", "host",
		"hostlink", "hostpeer", "inventory", "kube", "link", "listener", "loglevel", "nat", "netwatch", "observer", "own",
		"peer", "podman", "publish", "reconcile", "registry", "route", "run", "socket", "status", "users", "vtunnel",
	}
}

// Handler returns a handler that passes to next what the levels allow. Lines below info get
// the name of their component as an attribute. next must take lines of all levels.
func (v *Levels) Handler(next slog.Handler) slog.Handler { return handler{v: v, next: next} }

type handler struct {
	v     *Levels
	next  slog.Handler
	named []string // components that attributes name
}

// Enabled implements slog.Handler.
func (h handler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.v.current().least }

// Handle implements slog.Handler.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	e := h.v.current()
	if r.Level < h.levelOf(e, r) {
		return nil
	}
	if c := componentAt(r.PC); r.Level < slog.LevelInfo && c != "" {
		r = r.Clone()
		r.AddAttrs(slog.String("component", c))
	}
	return h.next.Handle(ctx, r)
}

// levelOf returns the least level of a line's components that have one of their own. It runs
// for each line below the level of the whole while a component has a lower one, so it must
// not allocate.
func (h handler) levelOf(e effective, r slog.Record) slog.Level {
	if len(e.of) == 0 {
		return e.whole
	}
	least, found := e.whole, false
	see := func(component string) {
		if l, ok := e.of[component]; ok && (!found || l < least) {
			least, found = l, true
		}
	}
	see(componentAt(r.PC))
	for _, n := range h.named {
		see(n)
	}
	r.Attrs(func(a slog.Attr) bool {
		if names(a) {
			see(a.Value.String())
		}
		return true
	})
	return least
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	named := slices.Clone(h.named)
	for _, a := range attrs {
		if names(a) {
			named = append(named, a.Value.String())
		}
	}
	return handler{h.v, h.next.WithAttrs(attrs), named}
}

// WithGroup implements slog.Handler.
func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.v, h.next.WithGroup(name), h.named}
}

// names reports whether an attribute names a component.
func names(a slog.Attr) bool { return a.Key == "source" || a.Key == "sink" }

// internalPath is where the packages of this program are.
const internalPath = "github.com/fairlead/fairlead/internal/"

// componentAt returns the component of the code at pc, empty if it is none.
func componentAt(pc uintptr) string {
	if pc == 0 {
		return ""
	}
	f := runtime.FuncForPC(pc - 1) // pc is where the call returns to, which may be in another function
	if f == nil {
		return ""
	}
	path, ok := strings.CutPrefix(f.Name(), internalPath)
	if !ok {
		return ""
	}
	path, _, _ = strings.Cut(path, ".") // the name of the function; no folder has a dot
	return componentOf(path)
}

// componentOf returns the component of a package below internal: the innermost folder that
// is one. It must not allocate.
func componentOf(path string) string {
	for path != "" {
		parent, name := "", path
		if i := strings.LastIndexByte(path, '/'); i >= 0 {
			parent, name = path[:i], path[i+1:]
		}
		if slices.Contains(Components(), name) {
			return name
		}
		path = parent
	}
	return ""
}
