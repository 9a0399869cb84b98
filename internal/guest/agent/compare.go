// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
)

const (
	comparePause = 250 * time.Millisecond
	// compareWait is how long an agent that starts may take until its rows are those of the
	// running one: it waits for owners, see package registry.
	compareWait = 20 * time.Second
	// compareTries is how many agents are started, one after the other: what not all of them say
	// has changed meanwhile.
	compareTries = 2
)

// Compare compares the rows of a running agent with those of an agent that starts now, beside it
// and with the same configuration. That one only observes: it has no sink, serves nothing,
// writes nothing but in a directory that is removed, and asks the running one for no change.
func Compare(ctx context.Context, cfg config.Agent, running *status.Client) doctor.Comparison {
	return compare(ctx, cfg, running, compareWait)
}

func compare(ctx context.Context, cfg config.Agent, running *status.Client, wait time.Duration) (c doctor.Comparison) {
	for try := range compareTries {
		lines, rows, err := compareOnce(ctx, cfg, running, wait)
		if err != nil {
			return doctor.Comparison{Error: err.Error()}
		}
		if try > 0 {
			lines = slices.DeleteFunc(lines, func(line string) bool { return !slices.Contains(c.Differences, line) })
		}
		if c.Rows, c.Differences = rows, lines; len(lines) == 0 {
			break
		}
	}
	return c
}

// compareOnce returns the differences that are left after that time.
func compareOnce(ctx context.Context, cfg config.Agent, running *status.Client, wait time.Duration) (lines []string, rows int, err error) {
	dir, err := os.MkdirTemp("", "fairlead-")
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cfg.Control, cfg.Sinks = filepath.Join(dir, "control.sock"), []config.Sink{{Name: config.NoSink}}
	cfg.MetricsAddr, cfg.WebAddr, cfg.Publish.Allow, cfg.Cluster = "", "", nil, config.Cluster{}
	fresh, err := New(cfg, slog.New(slog.DiscardHandler), new(loglevel.Levels))
	if err != nil {
		return nil, 0, err
	}
	examined, err := running.Examine(ctx)
	if err != nil {
		return nil, 0, err
	}
	fresh.sockets.Adopt(examined.Own)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	var failure error // of fresh, after ended is closed
	go func() {
		defer close(ended)
		failure = fresh.Run(ctx, func(ctx context.Context, _ func(config.Agent, error)) { <-ctx.Done() })
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for began := time.Now(); ; {
		if err := schedule.Sleep(ctx, comparePause); err != nil {
			return nil, 0, err
		}
		select {
		case <-ended:
			return nil, 0, fmt.Errorf("an agent that starts now ends: %w", failure)
		default:
		}
		here, err := running.List(ctx)
		if err != nil {
			return nil, 0, err
		}
		there := fresh.provider.List()
		err = cmp.Or(notLive("the running agent", here), notLive("an agent that starts now", there))
		if err == nil {
			lines = status.Differences(knowable(here, there), there)
		}
		if err == nil && len(lines) == 0 || time.Since(began) > wait {
			return lines, len(here.Publications), err
		}
	}
}

// notLive returns the first source that may not report what is, as an error.
func notLive(who string, l status.List) error {
	for _, s := range l.Sources {
		if s.State != string(registry.Live) && s.State != string(registry.Disabled) {
			return fmt.Errorf("source %s of %s is %s: %s", s.Name, who, s.State, s.Error)
		}
	}
	return nil
}

// knowable returns a list of a running agent without what one that starts now, which has the
// other list, cannot know: what containers publish at the socket of the running one; UDP
// servers of all addresses that left the choice of their number to the kernel, of which only the
// event of their bind tells that they are no clients (observer.UDPDump); and TCP sockets that are
// bound and do not listen, which kernels before 6.8 do not dump.
func knowable(running, fresh status.List) status.List {
	var low, high uint16
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(text), &low, &high)
	}
	running.Publications = slices.DeleteFunc(running.Publications, func(p status.Publication) bool {
		untold := p.Protocol == port.UDP && p.Address.IsUnspecified() && p.Port >= low && p.Port <= high || p.Decision.Reason.Code() == port.Unlistened
		return untold && !slices.ContainsFunc(fresh.Publications, func(q status.Publication) bool { return q.Key == p.Key }) ||
			slices.ContainsFunc(p.Origins, func(o status.Origin) bool { return o.Source == port.SourcePublish })
	})
	return running
}
