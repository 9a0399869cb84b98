// SPDX-License-Identifier: Apache-2.0

package gvproxy

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/peertest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

const often = 20 * time.Millisecond

// unasked checks that the peer was asked for nothing at a port.
func (f *forwarder) unasked(number int) {
	f.t.Helper()
	for _, c := range f.changes() {
		if strings.HasSuffix(c, fmt.Sprintf(":%d", number)) {
			f.t.Errorf("the peer was asked to %s", c)
		}
	}
}

// listed waits until the sink has listed the forwards twice from now on.
func (f *forwarder) listed() {
	f.t.Helper()
	for range 2 {
		f.mu.Lock()
		n := f.lists
		f.mu.Unlock()
		wait.Until(f.t, "the forwards are listed", func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.lists == n {
				return fmt.Errorf("%d times", n)
			}
			return nil
		})
	}
}

// Podman removes its entry while its socket and its rules are still there, and fails
// to add it again if its port is taken meanwhile.
func TestSlotOfAnotherProgramIsLeftAloneForAGrace(t *testing.T) {
	f := newForwarder(t)
	f.add("tcp", ":8080", "192.168.127.2:8080")
	rig := start(t, f, func(o *Options) { o.Audit, o.othersGrace = often, time.Hour })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"), peertest.Pub(t, "udp 0.0.0.0:8080", "127.0.0.1:8080"))
	for range 3 {
		rig.WantState("tcp 0.0.0.0:8080", port.Active)
		f.set(func() { delete(f.entries, "tcp/:8080") })
		rig.WantReason("tcp 0.0.0.0:8080", port.Pending, "another program removed its entry")
		f.listed()
		f.add("tcp", ":8080", "192.168.127.2:8080")
	}
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	rig.WantState("udp 0.0.0.0:8080", port.Active) // another slot
	for _, c := range f.changes() {
		if strings.Contains(c, "tcp/") {
			t.Errorf("the peer was asked to %s", c)
		}
	}
}

func TestSlotIsTakenAfterTheGrace(t *testing.T) {
	f := newForwarder(t)
	f.add("tcp", ":8080", "192.168.127.2:8080")
	rig := start(t, f, func(o *Options) { o.Audit, o.othersGrace = often, 5*often })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	f.set(func() { delete(f.entries, "tcp/:8080") })
	f.want("tcp/127.0.0.1:8080 to 192.168.127.2:8080")
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
}

// ofPodman returns the ways in which a port of Podman's is recognised.
func ofPodman(t *testing.T) map[string]port.Publication {
	t.Helper()
	ways := make(map[string]port.Publication)
	for i, o := range []port.OriginInfo{
		{Origin: port.Origin{Source: port.SourceNAT, ID: "1"}, Maker: port.MakerNetavark},
		{Origin: port.Origin{Source: port.SourceSocket, ID: "2"}, Program: "conmon"},
		{Origin: port.Origin{Source: port.SourceSocket, ID: "3"}, Program: "rootlessport"},
		{Origin: port.Origin{Source: port.SourceSocket, ID: "4"}, Program: "pasta.avx2"},
		{Origin: port.Origin{Source: port.SourceSocket, ID: "5"}, Program: "rootlessport-ch"},
	} {
		key := fmt.Sprintf("tcp 0.0.0.0:%d", 9000+i)
		p := peertest.Pub(t, key, fmt.Sprintf("127.0.0.1:%d", 9000+i))
		p.Origins = append([]port.OriginInfo{{Origin: port.Origin{Source: "docker", ID: "web"}}}, o)
		ways[key] = p
	}
	return ways
}

func marker(t *testing.T, kind string) func(*Options) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "podman-machine")
	if err := os.WriteFile(path, []byte(kind+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return func(o *Options) { o.markers = []string{path} }
}

func TestPortsOfPodmanAreNeverTaken(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, marker(t, "qemu"), func(o *Options) { o.Audit, o.retryMax = often, often })
	ways := ofPodman(t)
	for key, p := range ways {
		rig.Put(p)
		rig.WantReason(key, port.Pending, "Podman opens")
	}
	f.listed()
	for key, p := range ways { // it is late
		f.add("tcp", fmt.Sprintf(":%d", p.Port), fmt.Sprintf("192.168.127.2:%d", p.Port))
		rig.WantState(key, port.Active)
	}
	for key := range ways {
		rig.Remove(key)
	}
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080")) // of another program
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
	rig.Stop()
	f.want("tcp/:9000 to 192.168.127.2:9000", "tcp/:9001 to 192.168.127.2:9001", "tcp/:9002 to 192.168.127.2:9002", "tcp/:9003 to 192.168.127.2:9003", "tcp/:9004 to 192.168.127.2:9004")
	for n := range len(ways) {
		f.unasked(9000 + n)
	}
}

// heldBy returns a publication of a socket that a program holds since a time.
func heldBy(t *testing.T, number int, program string, since time.Time) port.Publication {
	t.Helper()
	p := peertest.Pub(t, fmt.Sprintf("tcp 0.0.0.0:%d", number), fmt.Sprintf("127.0.0.1:%d", number))
	p.Origins = []port.OriginInfo{{Origin: port.Origin{Source: port.SourceSocket, ID: "1"}, Program: program, Since: since}}
	return p
}

func TestProgramsThatAreNotOfPodmanAreTaken(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, marker(t, "qemu"), func(o *Options) { o.othersGrace = time.Minute })
	for i, program := range []string{"conmond", "passt-web", "pastafarian", "podman-web", "podmansh", "slirp4netns-x", ""} {
		p := heldBy(t, 9100+i, program, time.Now())
		rig.Put(p)
		rig.WantState(fmt.Sprintf("tcp 0.0.0.0:%d", 9100+i), port.Active)
	}
	rig.Put(heldBy(t, 9200, "podman", time.Now().Add(-time.Hour))) // its API
	rig.WantState("tcp 0.0.0.0:9200", port.Active)
}

// Podman opens the ports of a container before conmon holds them.
func TestPortOfPodmanItselfIsLeftAloneForAGrace(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, marker(t, "qemu"), func(o *Options) { o.Audit = often })
	rig.Put(heldBy(t, 9001, "web", time.Now()))
	rig.WantState("tcp 0.0.0.0:9001", port.Active) // the peer was found
	rig.Put(heldBy(t, 9000, "podman", time.Now()))
	rig.WantReason("tcp 0.0.0.0:9000", port.Pending, "podman opened this port")
	f.listed()
	f.unasked(9000)
	rig.Put(heldBy(t, 9000, "podman", time.Now().Add(often-othersGrace)))
	rig.WantState("tcp 0.0.0.0:9000", port.Active)
}

// Podman opens no ports by itself in other guests, nor in its machines of WSL.
func TestPortsOfPodmanAreTakenElsewhere(t *testing.T) {
	for name, edit := range map[string]func(*Options){
		"no machine": func(o *Options) { o.markers = []string{filepath.Join(t.TempDir(), "none")} }, "WSL": marker(t, "WSL"),
	} {
		t.Run(name, func(t *testing.T) {
			f := newForwarder(t)
			rig := start(t, f, edit)
			for key, p := range ofPodman(t) {
				rig.Put(p)
				rig.WantState(key, port.Active)
			}
		})
	}
}

// An entry that an earlier agent added for a port of Podman's is removed.
func TestEntryForPortOfPodmanIsGivenUp(t *testing.T) {
	f := newForwarder(t)
	memory := filepath.Join(t.TempDir(), "entries")
	remember := func(o *Options) { o.Memory = peer.Memory(memory) }
	ways := ofPodman(t)
	old := start(t, f, remember)
	old.Put(slices.Collect(maps.Values(ways))...)
	for key := range ways {
		old.WantState(key, port.Active)
	}
	kept, err := os.ReadFile(memory)
	if err != nil {
		t.Fatal(err)
	}
	entries := f.state()
	old.Stop()
	f.set(func() { // as if the agent had been killed
		for _, e := range entries {
			local, remote, _ := strings.Cut(e, " to ")
			protocol, local, _ := strings.Cut(local, "/")
			f.entries[protocol+"/"+local] = forward{local, remote, protocol}
		}
	})
	if err := os.WriteFile(memory, kept, 0o600); err != nil {
		t.Fatal(err)
	}
	rig := start(t, f, remember, marker(t, "applehv"))
	rig.Put(slices.Collect(maps.Values(ways))...)
	f.want()
	for key := range ways {
		rig.WantState(key, port.Pending)
	}
}

// The peer refuses an entry that it has. Unless an answer was lost, another program
// added it after the last list.
func TestExistingEntryIsNotOurs(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f)
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:80"))
	rig.WantState("tcp 0.0.0.0:80", port.Active) // the list was read
	f.add("tcp", "127.0.0.1:9999", "192.168.127.2:9999")
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:9999", "127.0.0.1:9999"))
	rig.WantState("tcp 0.0.0.0:9999", port.Active)
	rig.Remove("tcp 0.0.0.0:9999", "tcp 0.0.0.0:80")
	f.want("tcp/127.0.0.1:9999 to 192.168.127.2:9999")
	rig.Stop()
	f.want("tcp/127.0.0.1:9999 to 192.168.127.2:9999")
}

// A host program that holds the address may be the peer itself, for an entry that is
// newer than the last list.
func TestConflictListsTheForwardsAgain(t *testing.T) {
	f := newForwarder(t)
	rig := start(t, f, func(o *Options) { o.retryMax = time.Hour })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:80", "127.0.0.1:80"))
	rig.WantState("tcp 0.0.0.0:80", port.Active) // the list was read
	f.add("tcp", ":8080", "192.168.127.2:8080")
	f.set(func() { f.refuse["tcp/127.0.0.1:8080"] = "bind: address already in use" })
	rig.Put(peertest.Pub(t, "tcp 0.0.0.0:8080", "127.0.0.1:8080"))
	rig.WantState("tcp 0.0.0.0:8080", port.Active)
}
