// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/test/kit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

func key(addr string) port.Key {
	a := netip.MustParseAddrPort(addr)
	return port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}
}

func hosts(list ...string) (out []netip.AddrPort) {
	for _, h := range list {
		out = append(out, netip.MustParseAddrPort(h))
	}
	return out
}

func TestAHostAddressGoesToTheBestOfThoseWhoAskForIt(t *testing.T) {
	slot := port.Slot{Protocol: port.TCP, Port: 80}
	for _, tt := range []struct {
		name  string
		asked map[string][]netip.AddrPort
		want  map[string]string
	}{
		{
			"loopback before wildcard before the rest",
			map[string][]netip.AddrPort{"10.0.0.1:80": hosts("127.0.0.1:80"), "0.0.0.0:80": hosts("127.0.0.1:80"), "127.0.0.1:80": hosts("127.0.0.1:80")},
			map[string]string{"127.0.0.1": "127.0.0.1:80"},
		},
		{
			"a wildcard of the host takes its family",
			map[string][]netip.AddrPort{"0.0.0.0:80": hosts("0.0.0.0:80"), "10.0.0.1:80": hosts("127.0.0.1:80"), "[::1]:80": hosts("[::1]:80")},
			map[string]string{"0.0.0.0": "0.0.0.0:80", "::1": "[::1]:80"},
		},
		{
			"but not what was given before it",
			map[string][]netip.AddrPort{"0.0.0.0:80": hosts("0.0.0.0:80"), "127.0.0.1:80": hosts("127.0.0.1:80")},
			map[string]string{"127.0.0.1": "127.0.0.1:80"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := NewShares()
			claims := 0
			for k, h := range tt.asked {
				s.Set(key(k), h)
				claims += len(h)
			}
			granted, lost := s.Share(slot)
			if len(granted) != len(tt.want) || len(granted)+len(lost) != claims {
				t.Errorf("granted %v, lost %v", granted, lost)
			}
			for h, k := range tt.want {
				if granted[netip.MustParseAddr(h)] != key(k) {
					t.Errorf("%s is given to %s, want %s", h, granted[netip.MustParseAddr(h)], k)
				}
			}
		})
	}
}

// Whatever comes and goes: nobody gets what nobody asked for, nothing that is
// asked for alone is withheld, and what changed is dirty.
func TestSharesUnderRandomChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	guests := []string{"0.0.0.0:80", "127.0.0.1:80", "10.0.0.1:80", "[::]:80", "[::1]:80"}
	addrs := []string{"127.0.0.1:80", "0.0.0.0:80", "[::1]:80", "[::]:80", "127.0.0.1:81"}
	s := NewShares()
	truth := make(map[port.Key][]netip.AddrPort)
	for range 2000 {
		k := key(guests[rng.IntN(len(guests))])
		var ask []netip.AddrPort
		for _, a := range addrs {
			if rng.IntN(3) == 0 {
				ask = append(ask, netip.MustParseAddrPort(a))
			}
		}
		clear(s.Dirty())
		before := truth[k]
		s.Set(k, ask)
		if delete(truth, k); len(ask) > 0 {
			truth[k] = ask
		}
		for _, h := range slices.Concat(before, ask) {
			if _, ok := s.Dirty()[port.Slot{Protocol: port.TCP, Port: h.Port()}]; !ok {
				t.Fatalf("%s of %s changed and is not dirty", h, k)
			}
		}
		for _, n := range []uint16{80, 81} {
			granted, lost := s.Share(port.Slot{Protocol: port.TCP, Port: n})
			claims := 0
			for k, list := range truth {
				for _, h := range list {
					if h.Port() != n {
						continue
					}
					claims++
					if by, ok := lost[Claim{k, h}]; !ok && granted[h.Addr()] != k {
						t.Fatalf("claim %s of %s is neither granted nor lost", h, k)
					} else if ok && by == k && granted[h.Addr()] == k {
						t.Fatalf("claim %s of %s is lost to itself", h, k)
					}
				}
			}
			if len(granted)+len(lost) != claims {
				t.Fatalf("%d granted and %d lost of %d claims", len(granted), len(lost), claims)
			}
		}
	}
}

func TestMemoryGivesBackWhatWasSaved(t *testing.T) {
	m := Memory(filepath.Join(t.TempDir(), "peer.json"))
	if e, err := m.Load(); err != nil || e != nil {
		t.Errorf("nothing saved: %v, %v", e, err)
	}
	want := []Entry{{port.UDP, netip.MustParseAddrPort("[::1]:53"), "192.168.127.2:53"}, {Protocol: port.TCP, Host: netip.MustParseAddrPort("127.0.0.1:80")}}
	if err := m.Save(want); err != nil {
		t.Fatal(err)
	}
	if e, err := m.Load(); err != nil || !slices.Equal(e, want) {
		t.Errorf("loaded %v, %v", e, err)
	}
	if info, err := os.Stat(string(m)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	for _, bad := range []string{"", "{", `[{"protocol":"sctp","host":"127.0.0.1:1"}]`, "[{}]"} {
		if err := os.WriteFile(string(m), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if e, err := m.Load(); err == nil && len(e) > 0 {
			t.Errorf("%q: %v", bad, e)
		}
	}
	if err := m.Save(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(string(m)); !os.IsNotExist(err) {
		t.Errorf("an empty memory leaves a file: %v", err)
	}
	if err := Memory("/nowhere/peer.json").Save(want); err == nil {
		t.Error("saved nowhere")
	}
	if err := Memory("").Save(want); err != nil {
		t.Error(err)
	}
}

func TestAPeerThatKeepsHangingUpIsLookedAtEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Pace
		begin := time.Now()
		for range 10 { // one that ends each connection at once
			p.Begin(true)
			p.End(t.Context())
		}
		if d := time.Since(begin); d < 30*time.Second || d > 60*time.Second {
			t.Errorf("10 looks took %v", d)
		}
		p.Begin(true)
		time.Sleep(MaxPause)
		begin = time.Now()
		p.End(t.Context())
		if d := time.Since(begin); d > 0 {
			t.Errorf("after a long connection it is looked at after %v", d)
		}
		p.Begin(false)
		p.Begin(true)
		begin = time.Now()
		p.End(t.Context())
		if d := time.Since(begin); d > 0 {
			t.Errorf("after the peer was gone it is looked at after %v", d)
		}
	})
}
