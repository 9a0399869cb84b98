// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
)

// forgotten is an engine with a real registry, whose rules deny "secret*", and cgroups
// below a directory.
type forgotten struct {
	host  Host
	r     *registry.Registry
	facts Table
	set   *Set
	rules []port.Binding
}

func newForgotten(t *testing.T) *forgotten {
	t.Helper()
	w := &forgotten{host: Host{Cgroup2: t.TempDir()}}
	w.r = newRegistry(t, &w.facts, "secret*")
	w.set = NewSet(slog.New(slog.DiscardHandler), w.r.Feed("docker"), &w.facts, w.host)
	return w
}

// populated writes whether a cgroup has processes.
func (w *forgotten) populated(t *testing.T, path string, n int) {
	t.Helper()
	dir := filepath.Join(w.host.Cgroup2, path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.events"), fmt.Appendf(nil, "populated %d\nfrozen 0\n", n), 0o600); err != nil {
		t.Fatal(err)
	}
}

// container adds a container to which a NAT rule leads from a port, of the same number
// as its address.
func (w *forgotten) container(n int, name, id, path string) {
	addr := netip.AddrFrom4([4]byte{172, 17, 0, byte(n)})
	f := Fact{
		Owner: port.Owner{Kind: port.OwnerContainer, ID: id, Name: name}, ID: id, Path: path, User: uint32(os.Getuid()),
		Addresses: []netip.Addr{addr},
	}
	if path != "" {
		f.Cgroup, _ = w.host.inode(path)
	}
	w.facts.Put(name, f)
	w.rules = append(w.rules, port.Binding{
		Key:    port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(n)},
		Origin: port.Origin{ID: name}, Hints: port.Hints{Targets: []netip.AddrPort{netip.AddrPortFrom(addr, 80)}},
	})
}

// run follows an engine that is lost at once and leaves no trace, for a time.
func (w *forgotten) run(t *testing.T, d time.Duration) {
	t.Helper()
	first := true
	_ = supervise(t, d, Supervisor{Feed: w.set.Feed, Withdraw: w.set.Withdraw, Prune: w.set.Prune}, func(_ context.Context, up func()) error {
		if first {
			first = false
			w.set.Feed.Replace(nil)
			up()
			return errGone
		}
		return ErrAbsent
	})
}

func (w *forgotten) publication(n uint16) port.Publication {
	p, _ := w.r.Publications().View().Get(port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n})
	return p
}

// An engine that leaves no trace is forgotten, but not the containers that still run: a
// port that a rule denies by its owner stays denied.
func TestForgottenEngineStillNamesRunningContainers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newForgotten(t)
		id3 := strings.Repeat("3", 64)
		w.populated(t, "/docker/"+id1, 1)
		w.populated(t, "/system.slice/docker-"+id2+".scope", 1)
		w.populated(t, "/docker/"+id3, 0)
		w.container(1, "secret-path", id1, "/docker/"+id1)
		w.container(2, "secret-id", id2, "")
		w.container(3, "ended", id3, "/docker/"+id3)
		w.container(4, "removed", strings.Repeat("4", 64), "/docker/"+strings.Repeat("4", 64))
		w.r.Feed("nat").Replace(w.rules)
		w.run(t, time.Hour)
		for _, s := range w.r.Sources().View().All() {
			if s.State != registry.Live {
				t.Fatalf("source %s is %s: the engine is not forgotten", s.Name, s.State)
			}
		}
		for n, want := range map[uint16]string{1: "secret-path", 2: "secret-id", 3: "", 4: ""} {
			p := w.publication(n)
			if p.Owner.Name != want {
				t.Errorf("port %d: owner %q, want %q", n, p.Owner.Name, want)
			}
			if denied := want != ""; denied && (p.Decision.Allow || p.Decision.Pending()) {
				t.Errorf("port %d of %s: decision %+v, want a denial", n, want, p.Decision)
			}
		}
	})
}

// A container that ends while its engine is away is forgotten later.
func TestContainerEndedWithoutEngineForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newForgotten(t)
		w.populated(t, "/docker/"+id1, 1)
		w.container(1, "web", id1, "/docker/"+id1)
		w.r.Feed("nat").Replace(w.rules)
		before := ""
		ends := time.AfterFunc(30*time.Minute, func() {
			before = w.publication(1).Owner.Name
			w.populated(t, "/docker/"+id1, 0)
		})
		defer ends.Stop()
		w.run(t, time.Hour)
		if before != "web" {
			t.Errorf("owner %q while the container ran, want web", before)
		}
		if p := w.publication(1); p.Owner.Name != "" {
			t.Errorf("owner %q after the container ended", p.Owner.Name)
		}
	})
}
