// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

// of is a publication of an owner.
func of(owner string, protocol port.Protocol, number uint16) port.Fact {
	p := pub(key(protocol, any4, number))
	p.Owner = port.Owner{Kind: port.OwnerContainer, ID: owner, Name: owner}
	return p
}

// Of more ports than the limit each owner has the same share for each protocol, in whatever
// order they came and went.
func TestOwnersShareTheLimit(t *testing.T) {
	const limit = 10
	var all []port.Fact
	for i := range uint16(30) {
		all = append(all, of("media", port.UDP, 20000+i), of("media", port.TCP, 20000+i), of("user", port.TCP, 30000+i))
	}
	for _, c := range []struct {
		name string
		more []port.Fact
		want string
	}{
		{"three want more than there is", nil, "tcp 20000 20001 20002 20003 30000 30001 30002 udp 20000 20001 20002"},
		{"one wants less", []port.Fact{of("web", port.TCP, 443), of("web", port.TCP, 80)},
			"tcp 80 443 20000 20001 20002 30000 30001 udp 20000 20001 20002"},
		{"eleven have one each", func() (list []port.Fact) {
			for i := range uint16(8) {
				list = append(list, of(fmt.Sprint("web", i), port.TCP, 8080+i))
			}
			return list
		}(), "tcp 8080 8081 8082 8083 8084 8085 8086 8087 20000 udp 20000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for seed := range uint64(20) {
					r := rand.New(rand.NewPCG(seed, 0))
					pubs := slices.Concat(all, c.more)
					r.Shuffle(len(pubs), func(i, j int) { pubs[i], pubs[j] = pubs[j], pubs[i] })
					network, log := newMemory(), new(bytes.Buffer)
					h := idle(t, Options{Network: network, Holders: nobody{}, MaxListeners: limit, Logger: slog.New(slog.NewTextHandler(log, nil))}, "vm")
					g := h.guests[0]
					generation := uint64(0)
					apply := func(removed []port.Key, put ...port.Fact) {
						t.Helper()
						generation++
						step := change(generation, put...)
						step.Removed, step.Whole = removed, generation == 1
						if err := g.applyWanted(t.Context(), step); err != nil {
							t.Fatal(err)
						}
					}
					apply(nil)
					for rest := pubs; len(rest) > 0; {
						n := 1 + r.IntN(len(rest))
						apply(nil, rest[:n]...)
						rest = rest[n:]
						if some := pubs[r.IntN(len(pubs)-len(rest))]; r.IntN(2) == 0 { // goes and comes back
							apply([]port.Key{some.Key})
							apply(nil, some)
						}
					}
					if got := admitted(h); got != c.want {
						t.Fatalf("seed %d: within the limit are %s; want %s", seed, got, c.want)
					}
					closed := g.state.pubs[key(port.UDP, any4, 20029)].outcomes()[0]
					if closed.State != port.Failed || closed.Reason != port.Because(port.TooManyListeners, "10") || !strings.Contains(closed.Reason.String(), "--max-listeners") {
						t.Errorf("beyond the limit: %+v", closed)
					}
					if n := strings.Count(log.String(), "--max-listeners"); n != 1 {
						t.Errorf("%d warnings:\n%s", n, log)
					}
					// What is left has room.
					var gone []port.Key
					for _, p := range all[4:] {
						gone = append(gone, p.Key)
					}
					apply(gone)
					if n := len(strings.Fields(admitted(h))) - 2; n != min(len(g.state.pubs), limit) {
						t.Errorf("%d of %d ports are within the limit", n, len(g.state.pubs))
					}
				}
			})
		})
	}
}

// admitted lists the ports of each protocol that are within the limit.
func admitted(h *Host) string {
	var text []string
	for _, protocol := range []port.Protocol{port.TCP, port.UDP} {
		var numbers []int
		for k, p := range h.guests[0].state.pubs {
			if k.Protocol == protocol && p.claims[0].admitted {
				numbers = append(numbers, int(k.Port))
			}
		}
		slices.Sort(numbers)
		text = append(text, protocol.String(), strings.Trim(fmt.Sprint(numbers), "[]"))
	}
	return strings.Join(text, " ")
}

// A guest that changes much has its ports ranked less often, and what came meanwhile in the end.
func TestSharesAreMadeAfterARest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgent(t, "vm")
		a.begins(snapshot(1, of("media", port.TCP, 80), of("media", port.TCP, 81), of("media", port.TCP, 82)))
		network := newMemory()
		h, stop := start(t, Options{Network: network, MaxListeners: 2}, a)
		a.settled(1)
		func() {
			l := h.guests[0].lock()
			defer l.unlock()
			l.rested = time.Now().Add(time.Minute)
		}()
		a.say(put(1, of("web", port.TCP, 443)))
		a.settled(2)
		if network.isOpen(at(lo4, 443)) {
			t.Error("ranked before the end of its rest")
		}
		time.Sleep(2 * time.Minute)
		a.wants(key(port.TCP, any4, 443), port.Active)
		a.wants(key(port.TCP, any4, 81), port.Failed)
		stop()
	})
}
