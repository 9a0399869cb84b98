// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/rounds"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// refill is a table of n rules, and one that stays, made anew in one commit.
func refill(n, generation int) string {
	var b strings.Builder
	b.WriteString("table ip big\ndelete table ip big\ntable ip big {\nchain svc {\n")
	for i := range n {
		fmt.Fprintf(&b, "tcp dport %d dnat to 10.1.%d.%d:80\n", 20000+i, i/250, i%250+1)
	}
	fmt.Fprintf(&b, "tcp dport %d dnat to 10.88.0.2:80\n", 10000+generation)
	b.WriteString("tcp dport 8081 dnat to 10.88.0.2:80\n}\n")
	b.WriteString("chain pre { type nat hook prerouting priority -100; jump svc; }\n")
	b.WriteString("chain out { type nat hook output priority -100; jump svc; }\n}\n")
	return b.String()
}

// A client that connects in a loop through one port is not affected when the 10,000
// rules around it are flushed and added again in one commit.
func TestRefillIsInvisibleToClients(t *testing.T) {
	const refills = 5
	rules := rounds.Of(t, "FAIRLEAD_REFILL", 10_000)
	r := newRig(t)
	c := container(t, r.guest)
	go echo.Serve(c.listen(t, "tcp4", "0.0.0.0:80"))
	load := func(generation int) {
		r.guest.feed(t, refill(rules, generation), "nft", "-f", "-")
	}
	load(0)
	r.hostFlags = []string{"--log-level", "warn", "--max-listeners", "16384"}
	r.start()
	const key = "tcp 0.0.0.0:8081"
	settled := func(generation int) {
		t.Helper()
		wait.Until(t, fmt.Sprintf("refill %d", generation), func() error {
			if s, p := r.state(fmt.Sprintf("tcp 0.0.0.0:%d", 10000+generation)); s != "active" {
				return fmt.Errorf("%q (%s)", s, p.Reason)
			}
			return nil
		})
	}
	settled(0)
	r.wantState(key, "active")
	_, before := r.state(key)

	stop := make(chan struct{})
	failed := make(chan error, 1)
	var connects atomic.Int64
	go func() {
		defer close(failed)
		for {
			select {
			case <-stop:
				return
			default:
			}
			conn, err := r.outside.Dial("tcp", "127.0.0.1:8081")
			if err == nil {
				err = roundTrip(conn, "hello")
				_ = conn.Close()
			}
			if err != nil {
				failed <- fmt.Errorf("connect %d: %w", connects.Load(), err)
				return
			}
			connects.Add(1)
			// A closed connection keeps its port for a minute, and there are 28,000.
			time.Sleep(3 * time.Millisecond)
		}
	}()
	for g := 1; g <= refills; g++ {
		load(g)
		settled(g)
	}
	close(stop)
	for err := range failed {
		t.Error(err)
	}
	s, after := r.state(key)
	if s != "active" || !after.Since.Equal(before.Since) || len(after.Outcomes) == 0 || !after.Outcomes[0].Since.Equal(before.Outcomes[0].Since) {
		t.Errorf("withdrawn in between: before %+v\nafter %+v", before, after)
	}
	t.Logf("%d connects during %d refills", connects.Load(), refills)
	if connects.Load() < refills {
		t.Errorf("only %d connects: it tests nothing", connects.Load())
	}
}
