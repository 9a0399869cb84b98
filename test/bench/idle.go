// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/fairlead/fairlead/internal/status"
)

// idler is an agent that nobody asks anything.
type idler struct {
	name  string
	flags []string
	used  bool // a page was open before

	guest    *guest
	switches int // context switches of all threads while it was watched
	rss      int // KiB, at the end
	own      int // of it, what no file backs
}

// idle shows what the status side costs an agent that is not asked: none of it
// configured, all of it configured, and all of it after it was used. All are
// watched in the same seconds.
func idle(ctx context.Context, binary, dir string, idleFor time.Duration) error {
	all := []*idler{
		{name: "no metrics, no page"},
		{name: "metrics and page, unused", flags: []string{"--metrics-addr", "127.0.0.1:9464", "--web-addr", "127.0.0.1:7420"}},
		{name: "metrics and page, used before", flags: []string{"--metrics-addr", "127.0.0.1:9464", "--web-addr", "127.0.0.1:7420"}, used: true},
	}
	defer func() {
		for _, i := range all {
			if i.guest != nil {
				i.guest.close()
			}
		}
	}()
	for n, i := range all {
		g, err := newGuest(binary, filepath.Join(dir, fmt.Sprint("idle", n)), mode{flags: i.flags})
		if err != nil {
			return fmt.Errorf("%s: %w", i.name, err)
		}
		i.guest = g
		if _, err := g.ready(ctx); err != nil {
			return fmt.Errorf("%s: %w", i.name, err)
		}
		if !i.used {
			continue
		}
		if err := i.use(ctx); err != nil {
			return fmt.Errorf("%s: %w", i.name, err)
		}
	}
	fmt.Fprintf(os.Stderr, "watching idle agents for %v\n", 2*idleFor)
	if err := pause(ctx, idleFor); err != nil { // what the start left to do
		return err
	}
	before := make([]int, len(all))
	for n, i := range all {
		var err error
		if before[n], err = i.read(); err != nil {
			return err
		}
	}
	if err := pause(ctx, idleFor); err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(w, "\nidle agent, %v\nstatus side\tcontext switches\tRSS\tof it anonymous\t\n", idleFor)
	for n, i := range all {
		now, err := i.read()
		if err != nil {
			return err
		}
		i.switches = now - before[n]
		_, _ = fmt.Fprintf(w, "%s\t%d\t%.1f MB\t%.1f MB\t\n", i.name, i.switches, float64(i.rss)/1000, float64(i.own)/1000)
	}
	return w.Flush()
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// use scrapes the metrics and follows the events of the page for a while, twice.
func (i *idler) use(ctx context.Context) error {
	url, err := status.NewClient(i.guest.control).WebURL(ctx)
	if err != nil {
		return err
	}
	base, token, _ := strings.Cut(url, "/#token=")
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			return i.guest.space.Dial(network, addr)
		},
	}}
	for _, u := range []string{"http://127.0.0.1:9464/metrics", base + "/", base + "/v1/events", base + "/v1/events"} {
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := read(short, c, u, token)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// read takes what comes until ctx ends, which ends a stream.
func read(ctx context.Context, c *http.Client, url, token string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// read returns the context switches of all threads so far, and notes the memory.
func (i *idler) read() (switches int, err error) {
	pid := i.guest.procs[0].Process.Pid
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) == 0 {
		return 0, fmt.Errorf("no tasks of pid %d: %w", pid, err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // a thread that ended
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			v, _ := strconv.Atoi(f[1])
			switch f[0] {
			case "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:":
				switches += v
			case "VmRSS:":
				i.rss = v
			case "RssAnon:":
				i.own = v
			}
		}
	}
	return switches, nil
}
