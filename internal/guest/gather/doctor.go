// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/version"
)

// unreadShown is how many unsupported NAT rules are listed.
const unreadShown = 20

// Examine returns what the agent knows about its own health. The caller adds what
// its configuration says, and the link.
func Examine(a Agent) doctor.Agent {
	s := a.Observer.Stats()
	d := doctor.Agent{
		Running: true, Version: version.String(), PID: os.Getpid(), NetNS: netnsName(),
		InCluster: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
		Hooks:     Hooks(a.Observer.Methods()), Drops: s.Drops, Drift: s.Drift, DumpFailures: s.DumpFailures,
	}
	var labels []string
	for _, p := range a.Registry.Publications().View().All() {
		d.Publications++
		labels = append(labels, p.Warnings()...)
		if !p.Decision.Allow {
			if d.Unpublished == nil {
				d.Unpublished = make(map[string]int)
			}
			d.Unpublished[p.Decision.Reason.String()]++
		}
	}
	slices.Sort(labels)
	d.Labels = slices.Compact(labels)
	for _, src := range a.Registry.Sources().View().All() {
		d.Sources = append(d.Sources, doctor.Source{
			Name: src.Name, State: string(src.State), Method: oneLine(src.Method), Lack: src.Lack, Error: oneLine(src.Error),
			Since: src.Since, Warnings: src.Warnings,
		})
	}
	d.Unread, d.UnreadCount = a.Unread()
	d.Unread = d.Unread[:min(unreadShown, len(d.Unread))]
	return d
}

// Hooks describes how capabilities are observed.
func Hooks(methods []kernel.Method) (list []doctor.Hook) {
	for _, m := range methods {
		h := doctor.Hook{Capability: m.Capability, Method: m.Name, Lost: m.Lost, Failed: m.Failed}
		if m.Err != nil {
			h.Error = oneLine(m.Err.Error())
			h.Denied = errors.Is(m.Err, fs.ErrPermission)
			why := kernel.Why(m.Err)
			h.Absent, h.Verdict, h.Memlock, h.Hang = why.Absent, why.Verdict, why.Memlock, why.Hang
		}
		list = append(list, h)
	}
	return list
}

// oneLine puts joined errors on one line.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }
