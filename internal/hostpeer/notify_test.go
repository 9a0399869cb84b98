// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/notify"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
)

// Only what opens or is in conflict after its guest connected is told, once, and not what is over.
func TestTeller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var shown []string
		n := notify.New(func(_ context.Context, title, text string) error {
			mu.Lock()
			defer mu.Unlock()
			shown = append(shown, title+"|"+strings.ReplaceAll(text, "\n", "|"))
			return nil
		}, func(err error) { t.Error(err) })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go n.Run(ctx)
		connected := time.Now()
		guests := []host.GuestStatus{{Name: "vm", Connected: true, Since: connected}, {Name: "away", Since: connected}}
		tell := newTeller(n, func() []host.GuestStatus { return guests })
		row := func(n uint16, state port.State, change ...func(*status.Publication)) status.Publication {
			p := status.Publication{
				Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: n, State: state, Guest: "vm", GuestName: "dev",
				Since: connected.Add(time.Second), Owner: status.Owner{Name: "web"}, Reason: "127.0.0.1:80 is in use by nginx",
				HostAddresses: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), n)},
			}
			for _, c := range change {
				c(&p)
			}
			return p
		}
		unpublished := func(p *status.Publication) { p.Unpublished = true }
		early := func(p *status.Publication) { p.Since = connected }
		away := func(p *status.Publication) { p.Guest, p.GuestName = "away", "" }
		removed := func(n uint16) status.Removed { return status.Removed{Key: row(n, 0).Key(), Guest: "vm"} }
		for _, c := range []struct {
			when  string
			delta status.Delta
			want  []string
		}{
			{"before a guest connects", status.Delta{}, nil},
			{"what it has then", status.Delta{Put: []status.Publication{row(80, port.Active, early), row(81, port.Conflict, early),
				row(85, port.Pending, early), row(86, port.Denied, early), row(87, port.Active, away)}}, nil},
			{"is opened", status.Delta{Put: []status.Publication{row(85, port.Active, early)}}, nil},
			{"is allowed", status.Delta{Put: []status.Publication{row(86, port.Active, early)}}, []string{"fairlead: a port opened|86/tcp of web (dev) at 127.0.0.1:86"}},
			{"is pending again", status.Delta{Put: []status.Publication{row(85, port.Pending, early)}}, nil},
			{"and again opened", status.Delta{Put: []status.Publication{row(85, port.Active, early)}}, []string{"fairlead: a port opened|85/tcp of web (dev) at 127.0.0.1:85"}},
			{"the same", status.Delta{Put: []status.Publication{row(80, port.Active), row(82, port.Pending), row(83, port.Denied), row(84, port.Active, unpublished)}}, nil},
			{"one opens", status.Delta{Put: []status.Publication{row(82, port.Active)}}, []string{"fairlead: a port opened|82/tcp of web (dev) at 127.0.0.1:82"}},
			{"conflict", status.Delta{Put: []status.Publication{row(80, port.Conflict)}}, []string{"fairlead: a port is in use|80/tcp of web (dev): 127.0.0.1:80 is in use by nginx"}},
			{"over", status.Delta{Removed: []status.Removed{removed(81), removed(82)}}, nil},
			{"both", status.Delta{Put: []status.Publication{row(81, port.Conflict), row(82, port.Active)}},
				[]string{"fairlead: a port opened, a port is in use|81/tcp of web (dev): 127.0.0.1:80 is in use by nginx|82/tcp of web (dev) at 127.0.0.1:82"}},
			{"pending between", status.Delta{Put: []status.Publication{row(82, port.Pending)}}, nil},
			{"again", status.Delta{Put: []status.Publication{row(82, port.Active)}}, []string{"fairlead: a port opened|82/tcp of web (dev) at 127.0.0.1:82"}},
		} {
			mu.Lock()
			shown = nil
			mu.Unlock()
			if err := tell.take(c.delta); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			mu.Lock()
			if !slices.Equal(shown, c.want) {
				t.Errorf("%s: %q is shown, want %q", c.when, shown, c.want)
			}
			mu.Unlock()
		}
	})
}
