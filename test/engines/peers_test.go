// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/netns"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/usage"
)

// peers are the real agent in this guest, and a real host peer in a namespace of
// its own, which reaches the guest by the link alone.
type peers struct {
	t           testing.TB
	agent, host *daemon
	outside     *netns.Space
	control     string // the agent's
	hostControl string
}

// startPeers starts both. flags are the agent's.
func startPeers(t testing.TB, flags ...string) *peers {
	t.Helper()
	return startPeersWith(t, nil, flags...)
}

// startPeersWith starts both with flags of each.
func startPeersWith(t testing.TB, hostFlags []string, flags ...string) *peers {
	t.Helper()
	dir := t.TempDir()
	outside, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = outside.Close() })
	p := &peers{t: t, outside: outside, control: filepath.Join(dir, "agent", "s"), hostControl: filepath.Join(dir, "host", "s")}
	link := "unix://" + filepath.Join(dir, "link", "s")
	p.agent = start(t, binary(), append([]string{"agent", "--link", link, "--control", p.control}, flags...)...)
	p.host = (&daemon{t: t, in: outside, args: append([]string{
		binary(), "host", "--connect", link, "--control", p.hostControl,
	}, hostFlags...)}).start()
	return p
}

// readyPeers starts both, and waits until the agent knows what all of its sources see.
func readyPeers(t testing.TB, flags ...string) (*peers, *status.Client) {
	t.Helper()
	p := startPeers(t, append(flags, "--log-level", "debug")...)
	eventually(t, func() error {
		l, err := p.list()
		if err == nil && !l.Ready() {
			err = fmt.Errorf("not ready: %+v", l.Sources)
		}
		return err
	})
	return p, status.NewClient(p.control)
}

// in is the same peers, for a subtest.
func (p *peers) in(t testing.TB) *peers {
	s := *p
	s.t = t
	return &s
}

// list is what `fairlead ls -o json` shows.
func (p *peers) list() (status.List, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return status.NewClient(p.control).List(ctx)
}

// active waits until the host has opened a publication, and returns it.
func (p *peers) active(key string) (found status.Publication) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.Publications, func(pub status.Publication) bool { return is(pub, key) })
		if i < 0 {
			return fmt.Errorf("%s is not among %d publications", key, len(l.Publications))
		}
		found = l.Publications[i]
		if len(found.HostAddresses) == 0 {
			return fmt.Errorf("%s is %s: %s", key, found.State, found.Reason)
		}
		return nil
	})
	return found
}

// ruled waits until there are NAT rules for a slot, "80/tcp", and everything of
// that slot has one owner.
func (p *peers) ruled(slot string, kind port.OwnerKind, namespace, name string) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		rules := 0
		for _, pub := range l.Publications {
			if pub.Key.Slot().String() != slot {
				continue
			}
			if o := pub.Owner; o.Kind != kind || o.Name != name || o.Namespace != namespace {
				return fmt.Errorf("%s is owned by %+v, want %s %s/%s (origins %+v)", pub.Key, o, kind, namespace, name, pub.Origins)
			}
			for _, o := range pub.Origins {
				if o.Source == "nat" {
					rules++
				}
			}
		}
		if rules == 0 {
			return fmt.Errorf("no NAT rule of %s is seen", slot)
		}
		return nil
	})
}

// is reports whether a publication has a key.
func is(pub status.Publication, key string) bool { return pub.Key.String() == key }

// listed waits until a publication is listed, in whatever state.
func (p *peers) listed(key string) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err == nil && !slices.ContainsFunc(l.Publications, func(pub status.Publication) bool { return is(pub, key) }) {
			err = fmt.Errorf("%s is not among %d publications", key, len(l.Publications))
		}
		return err
	})
}

// gone waits until a publication is no longer listed.
func (p *peers) gone(key string) {
	p.t.Helper()
	eventually(p.t, func() error {
		l, err := p.list()
		if err != nil {
			return err
		}
		if slices.ContainsFunc(l.Publications, func(pub status.Publication) bool { return is(pub, key) }) {
			return fmt.Errorf("%s is still there", key)
		}
		return nil
	})
}

// reach connects to the host address of a publication, as a user of the host does,
// until it answers with text.
func (p *peers) reach(key, text string) status.Publication {
	p.t.Helper()
	pub := p.active(key)
	for _, a := range pub.HostAddresses {
		eventually(p.t, func() error {
			c, err := p.outside.Dial(pub.Protocol.String(), a.String())
			if err != nil {
				return err
			}
			got, err := ask(c)
			if err == nil && !strings.Contains(got, text) {
				err = fmt.Errorf("it says %q", got)
			}
			if err != nil {
				err = fmt.Errorf("%s by the host's %s: %w", key, a, err)
			}
			return err
		})
	}
	return pub
}

// owned waits until a publication has its owner: a socket or a rule may be seen before
// the engine declares it.
func (p *peers) owned(key string, kind port.OwnerKind, name string) {
	p.t.Helper()
	eventually(p.t, func() error {
		if o := p.active(key).Owner; o.Kind != kind || o.Name != name {
			return fmt.Errorf("%s is owned by %+v, want %s %s", key, o, kind, name)
		}
		return nil
	})
}

// source returns the status of a source.
func (p *peers) source(name string) status.Source {
	p.t.Helper()
	var l status.List
	eventually(p.t, func() (err error) { l, err = p.list(); return err })
	i := slices.IndexFunc(l.Sources, func(s status.Source) bool { return s.Name == name })
	if i < 0 {
		p.t.Fatalf("no source %q among %+v", name, l.Sources)
	}
	return l.Sources[i]
}

// agentKubeMemory limits the agent's anonymous memory with Kubernetes, in bytes.
const agentKubeMemory = 32_000_000

// small waits until the agent's anonymous memory is at most agentKubeMemory. The
// agent releases memory at increasing intervals, up to minutes, while it is in use.
func (p *peers) small(when string) {
	p.t.Helper()
	var u usage.Usage
	asked := time.Now()
	wait.Within(p.t, 8*time.Minute, "the agent releases memory", func() error {
		if u = p.agent.usage(p.t); u.Anon <= agentKubeMemory {
			return nil
		}
		if time.Since(asked) > time.Minute { // it looks at what it holds when it was asked
			_, _ = p.list()
			asked = time.Now()
		}
		return fmt.Errorf("%s it holds %d bytes, want at most %d", when, u.Anon, agentKubeMemory)
	})
	p.t.Logf("%s the agent holds %.1f MB: %.1f of its own, %.1f of files; %.1f at most", when,
		float64(u.RSS)/1e6, float64(u.Anon)/1e6, float64(u.File)/1e6, float64(u.Peak)/1e6)
}

// usage returns what a daemon uses.
func (d *daemon) usage(t testing.TB) usage.Usage {
	t.Helper()
	u, err := usage.Of(d.PID())
	if err != nil {
		t.Fatal(err)
	}
	return u
}
