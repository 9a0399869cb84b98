// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// byKey returns the rows as JSON, by what identifies them.
func byKey(list []status.Publication) map[string]string {
	rows := make(map[string]string)
	for _, p := range list {
		b, _ := json.Marshal(p) // of what was JSON
		rows[fmt.Sprintf("%s|%s|%t", p.Guest, p.Key, p.Unpublished)] = string(b)
	}
	return rows
}

// watched returns what a watch has told so far: the rows as they are after all of its events.
func watched(out string) (list []status.Publication) {
	rows := make(map[string]status.Publication)
	key := func(p status.Publication) string { return slices.Collect(maps.Keys(byKey([]status.Publication{p})))[0] }
	for line := range strings.Lines(out) {
		var e status.Event
		if json.Unmarshal([]byte(line), &e) != nil || e.Publication == nil {
			continue
		}
		if e.Type == status.Gone {
			delete(rows, key(*e.Publication))
			continue
		}
		rows[key(*e.Publication)] = *e.Publication
	}
	return slices.Collect(maps.Values(rows))
}

// On a host a watch tells of each port all that a list has of it, also what changes together
// with another port, or with the names that the host serves.
func TestWatchAgreesWithLs(t *testing.T) {
	denied := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(denied, []byte("rules:\n  - {name: no-debug, match: {ports: 9229}, action: deny}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	other := dockerContainer("b", "other", "172.30.0.2", "", `"5000/tcp":[{"HostIp":"0.0.0.0","HostPort":"5000"}],"9229/tcp":[{"HostIp":"0.0.0.0","HostPort":"9229"}]`)
	r := newRig(t, "--source", "docker", "--docker-host", enginetest.Docker(t, fmt.Sprintf(named, "{}"), other), "--rules-file", denied)
	r.hostFlags = append(r.hostFlags, "--names", "127.0.0.1:8000", "--bind", "asked")
	r.outside.sh(t, "ip addr add 192.0.2.10/32 dev lo") // where other machines are
	taken := r.outside.listen(t, "tcp4", "127.0.0.1:8000")
	r.outside.listen(t, "tcp4", "127.0.0.1:5000")
	r.start()
	w := r.outside.start(t, "watch", "-a", "-o", "json", "--control", r.hostCtl)
	agree := func(what string, has func(list []status.Publication) bool) {
		t.Helper()
		r.eventually(what, func() error {
			out, stderr, _ := fairlead(t, "ls", "-a", "-o", "json", "--control", r.hostCtl)
			if stderr != "" {
				return fmt.Errorf("ls: %s", stderr)
			}
			list := decode[status.List](t, out).Publications
			if !has(list) {
				return fmt.Errorf("not yet: %s", out)
			}
			if d := cmp.Diff(byKey(list), byKey(watched(w.Output()))); d != "" {
				return fmt.Errorf("ls (-) and watch (+) differ:\n%s", d)
			}
			return nil
		})
	}
	url := func(list []status.Publication, n uint16) string {
		i := slices.IndexFunc(list, func(p status.Publication) bool { return p.Port == n && !p.Unpublished })
		if i < 0 {
			return "none"
		}
		return list[i].URL
	}
	change := func(args ...string) {
		t.Helper()
		if out, stderr, code := fairlead(t, append(args, "--control", r.hostCtl)...); code != 0 {
			t.Fatalf("%q: exit %d: %s%s", args, code, out, stderr)
		}
	}
	agree("before names are served", func(list []status.Publication) bool {
		return len(list) >= 4 && url(list, 80) == "" && slices.ContainsFunc(list, func(p status.Publication) bool { return len(p.Names) > 0 }) &&
			slices.ContainsFunc(list, func(p status.Publication) bool { return p.Port == 9229 && p.Unpublished && p.State == port.Denied })
	})
	_ = taken.Close()
	agree("with their URLs", func(list []status.Publication) bool { return url(list, 80) == "http://80.web.localhost:8000" })
	change("deny", "443")
	agree("after another port of the owner was denied", func(list []status.Publication) bool {
		return url(list, 80) == "http://web.localhost:8000" && url(list, 443) == ""
	})
	change("expose", "80", "--for", "1h")
	agree("exposed for a time", func(list []status.Publication) bool {
		return slices.ContainsFunc(list, func(p status.Publication) bool { return !p.ExposedUntil.IsZero() })
	})
	change("forward", "add", "5000", "--on-conflict", "any")
	agree("moved to a free port", func(list []status.Publication) bool {
		return slices.ContainsFunc(list, func(p status.Publication) bool { return p.Port == 5000 && p.State == port.Active })
	})
	r.agent.Kill()
	agree("lost", func(list []status.Publication) bool {
		return slices.ContainsFunc(list, func(p status.Publication) bool { return p.Lost })
	})
}
