// SPDX-License-Identifier: Apache-2.0

package forwards

import (
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port"
)

// hostStore is the store of a host whose configuration leaves addresses to the agent.
type hostStore struct {
	*Store
	t   *testing.T
	mu  sync.Mutex
	set *rules.Set
}

func newHostStore(t *testing.T, path string) *hostStore {
	s := &hostStore{t: t, set: rules.Empty(rules.Asked())}
	s.Store = NewStore(path, s.set, true, slog.New(slog.DiscardHandler), func(set *rules.Set) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.set = set
	})
	return s
}

// want checks where port 8080 is opened, and whether the file has a rule for it.
func (s *hostStore) want(when, at string, inFile bool) {
	s.t.Helper()
	s.mu.Lock()
	d := s.set.Host("dev", port.Publication{Fact: port.Fact{Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 8080}}},
		[]netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")})
	s.mu.Unlock()
	text, _ := os.ReadFile(s.path)
	if len(d.Host) == 0 || d.Host[0].String() != at || at == narrow && len(d.Host) > 1 || strings.Contains(string(text), `"expose"`) != inFile {
		s.t.Errorf("%s: %v, want %s; file:\n%s", when, d.Host, at, text)
	}
}

func exposed(n uint16, d time.Duration) Request {
	return Request{Op: Expose, Protocol: port.TCP, Port: n, Seconds: int64(d / time.Second)}
}

const wide, narrow = "0.0.0.0:8080", "127.0.0.1:8080"

// What is exposed ends by itself, at the latest request's time.
func TestExposureEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forwards.json")
	synctest.Test(t, func(t *testing.T) {
		s := newHostStore(t, path)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		do := func(q Request) {
			t.Helper()
			if _, err := s.Do(q); err != nil {
				t.Error(err)
			}
		}
		after := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		do(exposed(8080, time.Hour))
		s.want("exposed", wide, true)
		after(30 * time.Minute)
		do(exposed(8080, time.Hour))
		after(time.Hour - time.Second)
		s.want("a second before the end", wide, true)
		after(2 * time.Second)
		s.want("at the end", narrow, false)
		do(exposed(8080, time.Minute))
		do(Request{Op: Hide, Protocol: port.TCP, Port: 8080})
		s.want("hidden", narrow, false)
		do(exposed(8080, time.Minute))
		do(tcp(Remove, 8080))
		s.want("removed", narrow, false)
		cancel()
		running.Wait()
	})
}

// A restarted host does not expose what has ended, and goes on with what has not.
func TestExposureEndsWhileStopped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forwards.json")
	synctest.Test(t, func(t *testing.T) {
		if _, err := newHostStore(t, path).Do(exposed(8080, time.Hour)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Minute)
		s := newHostStore(t, path)
		s.Reload(rules.Empty(rules.Asked()))
		s.want("before the end", wide, true)
		time.Sleep(30 * time.Minute)
		s = newHostStore(t, path)
		s.Reload(rules.Empty(rules.Asked()))
		s.want("after the end", narrow, true)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		synctest.Wait()
		s.want("after the start", narrow, false)
		cancel()
		running.Wait()
	})
}

// Rules end though their file cannot be changed.
func TestExposureEndsWithoutItsFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "forwards.json")
	synctest.Test(t, func(t *testing.T) {
		s := newHostStore(t, path)
		if _, err := s.Do(exposed(8080, time.Minute)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(`{"requests": [{"op": "expose"`), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		s.want("after the end", narrow, true)
		cancel()
		running.Wait()
	})
}

func TestExposureIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forwards.json")
	log := slog.New(slog.DiscardHandler)
	agent := NewStore(path, rules.Empty(rules.All()), false, log, func(*rules.Set) {})
	loopback := NewStore(path, rules.Empty(rules.Loopback()), true, log, func(*rules.Set) {})
	host := newHostStore(t, path).Store
	for _, c := range []struct {
		s    *Store
		q    Request
		want string
	}{
		{agent, exposed(8080, time.Hour), "run this on the host"},
		{loopback, exposed(8080, time.Hour), "wider than the configuration allows, which has bind: loopback"},
		{host, exposed(8080, 0), "want a time of 1s to 168h0m0s"},
		{host, exposed(8080, 200*time.Hour), "want a time of 1s to 168h0m0s"},
		{host, Request{Op: Deny, Protocol: port.TCP, Port: 1, Seconds: 1}, "only expose is for a time"},
		{host, Request{Op: Hide, Protocol: port.TCP, Port: 8080}, "8080/tcp is not exposed"},
		{host, Request{Op: Expose, All: true, Seconds: 1}, "want a port"},
	} {
		if _, err := c.s.Do(c.q); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.q, err, c.want)
		}
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a refused request wrote the file")
	}
	ofGuest := exposed(8080, time.Hour)
	ofGuest.Guest = "dev"
	if _, err := host.Do(ofGuest); err != nil {
		t.Fatal(err)
	}
	_, err := host.Do(Request{Op: Hide, Protocol: port.TCP, Port: 8080})
	if want := `8080/tcp is not exposed; in effect: "expose 8080/tcp of guest dev"`; err == nil || err.Error() != want {
		t.Errorf("%v, want %q", err, want)
	}
}

// A clock that is set back does not make an exposure longer, nor does a restart then.
func TestExposureEndsThoughTheClockIsSetBack(t *testing.T) {
	s := newHostStore(t, filepath.Join(t.TempDir(), "forwards.json"))
	var uptime time.Duration
	s.uptime = func() time.Duration { return uptime }
	now := time.Now()
	if _, err := s.Do(exposed(8080, time.Hour)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		uptime time.Duration
		now    time.Time
		at     string
	}{
		{time.Minute, now.Add(time.Minute), wide},
		{time.Hour - time.Minute, now.Add(-24 * time.Hour), wide},
		{time.Hour + time.Minute, now.Add(-23 * time.Hour), narrow},
	} {
		uptime = c.uptime
		s.expire(c.now)
		s.want(c.uptime.String()+" later", c.at, c.at == wide)
	}
}

// A rule whose end is too far away does not come into effect later, by itself or by another
// change.
func TestExposureTooFarAhead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forwards.json")
	synctest.Test(t, func(t *testing.T) {
		s := newHostStore(t, path)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		synctest.Wait()
		text := format([]Entry{{exposed(8080, time.Hour), time.Now().Add(rules.MaxExposure + 24*time.Hour).UTC().Truncate(time.Second)}})
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		s.Reload(rules.Empty(rules.Asked()))
		synctest.Wait()
		s.want("edited", narrow, false)
		time.Sleep(48 * time.Hour)
		if _, err := s.Do(tcp(Deny, 9090)); err != nil {
			t.Error(err)
		}
		s.want("two days later", narrow, false)
		cancel()
		running.Wait()
	})
}
