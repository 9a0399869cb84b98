// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// idleMemory is what an agent without Kubernetes may hold, in bytes.
const idleMemory = 20_000_000

// What only its start needed, or a reader of the metrics, an agent gives back.
func TestIdleAgentIsSmallAgainAfterItWasUsed(t *testing.T) {
	r := newRig(t, "--metrics-addr", "127.0.0.1:9111").start()
	small := func(when string) {
		t.Helper()
		r.eventually(when, func() error {
			if rss := r.agent.rss(t); rss > idleMemory {
				return fmt.Errorf("the agent holds %d bytes, want at most %d", rss, idleMemory)
			}
			return nil
		})
		t.Logf("%s the agent holds %.1f MB", when, float64(r.agent.rss(t))/1e6)
	}
	small("after the start")
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(_ context.Context, network, addr string) (net.Conn, error) { return r.guest.Dial(network, addr) },
	}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for range 3 {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:9111/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v", resp.Status, err)
		}
		_ = resp.Body.Close()
	}
	if _, err := r.list(); err != nil {
		t.Fatal(err)
	}
	small("after the metrics were read")
}
