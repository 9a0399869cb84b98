// SPDX-License-Identifier: Apache-2.0

package hostpeer

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/host"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/wss"
)

// A guest that was refused is shown with the reason, until its state changes.
func TestGuestThatIsRefusedShowsWhy(t *testing.T) {
	h, err := host.New(host.Options{Guests: []host.Guest{{
		Name: "web1", Dials: true, Dial: func(ctx context.Context) (link.Session, error) { return nil, ctx.Err() },
	}}})
	if err != nil {
		t.Fatal(err)
	}
	since := h.Guests()[0].Since
	for at, want := range map[time.Time]bool{{}: false, since.Add(-time.Second): false, since.Add(time.Second): true} {
		p := provider{host: h, refused: func(guest string) wss.Refused {
			if guest != "web1" {
				t.Errorf("asked for %s", guest)
			}
			return wss.Refused{At: at, Peer: "192.0.2.1:7", Err: errors.New("tokens differ")}
		}}
		got := p.peers()[0].Error
		if !strings.HasPrefix(got, "not connected yet") || strings.Contains(got, "; refused 192.0.2.1:7 at ") != want || strings.HasSuffix(got, ": tokens differ") != want {
			t.Errorf("refused %v: %s", at.Sub(since), got)
		}
	}
}
