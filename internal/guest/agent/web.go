// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/status"
)

// machineName returns the host name, or fallback if it is unknown.
func machineName(fallback string) string {
	if name, err := os.Hostname(); err == nil {
		return name
	}
	return fallback
}

// serveWeb serves the page on TCP if the configuration has an address for it.
func (a *Agent) serveWeb(ctx context.Context, g *errgroup.Group) error {
	if a.cfg.WebAddr == "" {
		return nil
	}
	l, err := a.sockets.Listen(ctx, "tcp", a.cfg.WebAddr)
	if err != nil {
		return fmt.Errorf("page: %w: choose another --web-addr", err)
	}
	g.Go(func() error { return a.server.ServeWeb(ctx, l) })
	return nil
}

// vitals returns the numbers for the page's charts.
func (a *Agent) vitals(mark uint64) status.Vitals {
	f := a.forward.Stats()
	v := status.Vitals{
		Time: time.Now().UTC(), TCP: f.OpenTCP, UDP: f.OpenUDP, ToGuest: f.ToGuest, ToHost: f.ToHost,
		Errors: f.Refused + f.Unreachable, Latencies: []float64{},
	}
	if a.hostlink != nil {
		ended := a.hostlink.Stats().Flows
		for _, result := range []string{
			hostlink.FlowLost, hostlink.FlowForbidden, hostlink.FlowLimit, hostlink.FlowMalformed, hostlink.FlowTimeout,
		} {
			v.Errors += ended[result]
		}
	}
	recent, next := a.propagation.Recent(mark)
	for _, d := range recent {
		v.Latencies = append(v.Latencies, d.Seconds())
	}
	v.Mark = next
	return v
}
