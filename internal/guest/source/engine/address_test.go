// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/guest/netwatch"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// declared is a port at an address, with what is dialled.
func declared(at string, dial ...string) port.Binding {
	a := netip.MustParseAddrPort(at)
	b := port.Binding{Key: port.Key{Protocol: port.TCP, Address: a.Addr(), Port: a.Port()}, Origin: port.Origin{ID: at}}
	for _, d := range dial {
		b.Dial = append(b.Dial, netip.MustParseAddrPort(d))
	}
	return b
}

// service is a port of a Service.
func service(b port.Binding) port.Binding {
	b.Owner.Kind = port.OwnerService
	return b
}

var foreign = port.Because(port.AddressElsewhere)

func TestForeignAddressesAreWithheld(t *testing.T) {
	own := []string{"192.168.1.5"}
	f := new(enginetest.Feed)
	o := NewOwnAddresses(f, slog.New(slog.DiscardHandler))
	o.kind = func(a netip.Addr) (netwatch.Kind, error) {
		switch {
		case a.String() == "203.0.113.1":
			return netwatch.Own, errors.New("no answer")
		case slices.Contains(own, a.String()):
			return netwatch.Own, nil
		}
		return netwatch.Elsewhere, nil
	}
	set := []port.Binding{
		declared("0.0.0.0:80", "127.0.0.1:80"),
		declared("127.0.0.2:80", "127.0.0.2:80"),
		declared("192.168.1.5:80", "192.168.1.5:80", "10.0.0.2:80"),
		declared("169.254.169.254:80", "169.254.169.254:80", "10.0.0.2:80"), // a cloud's metadata, or a container's HostIp
		declared("203.0.113.9:2222", "203.0.113.9:2222"),
		declared("203.0.113.1:80", "203.0.113.1:80"),
		declared("192.168.1.60:80", "10.96.0.7:80", "192.168.1.60:80", "10.0.0.2:80"),                   // a Service with a cluster address
		declared("192.168.1.61:80"),                                                                     // without endpoints
		service(declared("[2001:db8::9]:80", "[2001:db8::9]:80", "[fd00::2]:8080", "[2001:db8::9]:81")), // without a cluster address of IPv6
		service(declared("[2001:db8::a]:80", "[2001:db8::a]:80")),                                       // its endpoints are not known
	}
	want := func(key string, withheld port.Reason, dial string) {
		t.Helper()
		b := f.Find(key)
		text := ""
		for _, d := range b.Dial {
			text += " " + d.String()
		}
		if b.Withheld != withheld || text != dial {
			t.Errorf("%s: withheld %q, dials%s, want %q,%s", key, b.Withheld, text, withheld, dial)
		}
	}
	check := func() {
		t.Helper()
		want("tcp 0.0.0.0:80", port.Reason{}, " 127.0.0.1:80")
		want("tcp 127.0.0.2:80", port.Reason{}, " 127.0.0.2:80")
		want("tcp 192.168.1.5:80", port.Reason{}, " 192.168.1.5:80 10.0.0.2:80")
		want("tcp 169.254.169.254:80", foreign, " 169.254.169.254:80 10.0.0.2:80")
		want("tcp 203.0.113.9:2222", foreign, " 203.0.113.9:2222")
		want("tcp 203.0.113.1:80", foreign, " 203.0.113.1:80")
		want("tcp 192.168.1.60:80", port.Reason{}, " 10.96.0.7:80 10.0.0.2:80")
		want("tcp 192.168.1.61:80", port.Reason{}, "")
		want("tcp [2001:db8::9]:80", port.Reason{}, " [fd00::2]:8080")
		want("tcp [2001:db8::a]:80", foreign, " [2001:db8::a]:80")
	}
	o.Replace(set)
	check()
	o.Apply(port.Change{Put: set})
	check()

	// Addresses come and go.
	own = []string{"203.0.113.9"}
	o.recheck()
	want("tcp 203.0.113.9:2222", port.Reason{}, " 203.0.113.9:2222")
	want("tcp 192.168.1.5:80", foreign, " 192.168.1.5:80 10.0.0.2:80")
	o.Apply(port.Change{Drop: []port.Origin{{ID: "203.0.113.9:2222"}}})
	own = nil
	o.recheck()
	if f.Find("tcp 203.0.113.9:2222").Port != 0 {
		t.Error("a port that was removed is reported again")
	}
}

// A port is not withheld for good because the kernel once did not answer.
func TestFailedLookupIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := new(enginetest.Feed)
		o := NewOwnAddresses(f, slog.New(slog.DiscardHandler))
		lookups := 0
		o.kind = func(netip.Addr) (netwatch.Kind, error) {
			if lookups++; lookups <= 3 {
				return netwatch.Elsewhere, errors.New("no buffer space available")
			}
			return netwatch.Own, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { o.retry(ctx) })
		o.Replace([]port.Binding{declared("192.168.1.5:80", "192.168.1.5:80")})
		if got := f.Find("tcp 192.168.1.5:80").Withheld; got != foreign {
			t.Errorf("withheld %q before the kernel answers, want %q", got, foreign)
		}
		time.Sleep(time.Minute)
		if got := f.Find("tcp 192.168.1.5:80").Withheld; !got.IsZero() {
			t.Errorf("withheld %q after the kernel answered", got)
		}
		answered := lookups
		time.Sleep(time.Hour)
		if lookups != answered {
			t.Errorf("%d lookups after one was answered", lookups-answered)
		}
		cancel()
		wg.Wait()
	})
}

// Changes can have been missed when addresses cannot be watched.
func TestAddressesThatCannotBeWatchedAreRechecked(t *testing.T) {
	f := new(enginetest.Feed)
	o := NewOwnAddresses(f, slog.New(slog.DiscardHandler))
	o.watch.NetNS = "/nonexistent"
	var own atomic.Bool
	o.kind = func(netip.Addr) (netwatch.Kind, error) {
		if own.Swap(true) {
			return netwatch.Own, nil
		}
		return netwatch.Elsewhere, nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	o.Replace([]port.Binding{declared("192.168.1.5:80", "192.168.1.5:80")})
	wg.Go(func() { o.Run(ctx) })
	wait.Until(t, "the port is no longer withheld", func() error {
		if got := f.Find("tcp 192.168.1.5:80").Withheld; !got.IsZero() {
			return errors.New(got.String())
		}
		return nil
	})
}

// Whose address it is depends on routes, also without a change of links and addresses.
func TestRoutesAreWatched(t *testing.T) {
	o := NewOwnAddresses(new(enginetest.Feed), slog.New(slog.DiscardHandler))
	if got := o.watch.Parts; got != netwatch.All {
		t.Errorf("watches parts %b, want %b", got, netwatch.All)
	}
}
