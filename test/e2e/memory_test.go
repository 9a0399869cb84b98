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

// idleMemory limits the anonymous memory of an idle agent without Kubernetes, in
// bytes. Pages of files are not limited: the kernel reclaims them when it needs to.
const idleMemory = 12_000_000

// The agent releases memory that only its start or a scrape of the metrics needed.
func TestIdleAgentReleasesMemory(t *testing.T) {
	r := newRig(t, "--metrics-addr", "127.0.0.1:9111").start()
	small := func(when string) {
		t.Helper()
		r.eventually(when, func() error {
			if got := used(t, r.agent).Anon; got > idleMemory {
				return fmt.Errorf("the agent uses %d bytes, want at most %d", got, idleMemory)
			}
			return nil
		})
		t.Logf("%s: %.1f MB anonymous, %.1f MB of files", when,
			float64(used(t, r.agent).Anon)/1e6, float64(used(t, r.agent).File)/1e6)
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
