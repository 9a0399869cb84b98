// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/test/bench/report"
)

// The measures of idle agents.
const (
	idleCPU   = "CPU of an idle agent"
	idleWake  = "context switches of an idle agent"
	idleAwake = "seconds of a minute in which an idle agent wakes up"
	idleRSS   = "memory of an idle agent (RSS)"

	pageWake = "context switches of an idle agent, by what of its status side is on"
	pageRSS  = "memory of an idle agent (RSS), by what of its status side is on"
)

// idleSizes are how many listeners and NAT rules a guest has.
var idleSizes = []int{0, 1000, 10_000}

func idlePart() Part {
	return Part{
		Section: report.Section{
			Name: "idle", Title: "What it costs while nothing happens",
			About: `Agents with their link connected in guests where nothing changes, with as many listeners
as NAT rules, all watched in the same two minutes, after they were left alone for a while: the Go runtime collects
garbage each two minutes where nothing else makes it. CPU is in percent of
one core. The event mode audits itself by dumps, the more seldom the longer they take: the first is a minute
after the start, before these minutes. To what it used in them is added what its audits of sockets take in the long run, by what
the agent says that they took. The audit of NAT rules, each five minutes or up to thirty, is not in these figures.
Each wake-up of an agent keeps a laptop's processor from sleeping.`,
			Figures: []report.Figure{
				{File: "idle-cpu", Title: "CPU of an idle agent", Measure: idleCPU, Kind: report.Bars, X: "listeners and NAT rules", Y: "% of a core", LogY: true},
				{File: "idle-wakeups", Title: "Context switches of an idle agent", Measure: idleWake, Kind: report.Bars, X: "listeners and NAT rules", Y: "per second", LogY: true},
			},
		},
		Run: idle,
	}
}

// idler is an agent that nobody asks anything.
type idler struct {
	*linked
	mode   string
	size   int
	page   bool // it belongs to the measures of the status side
	err    error
	dumps  dumped // when it was ready
	before usage
	last   int // context switches a second ago
	awake  int // seconds in which there were any
}

// The variants of the status side.
var pageFlags = []string{"--metrics-addr", "127.0.0.1:9464", "--web-addr", "127.0.0.1:7420"}

func idle(ctx context.Context, e *Env) error {
	var all []*idler
	defer func() {
		for _, i := range all {
			if i.linked != nil {
				i.close()
			}
		}
	}()
	for _, n := range idleSizes[:e.Of(3, 3, 1)] {
		for _, m := range modes {
			e.Progress("starting %s with %d listeners and NAT rules", m.name, n)
			i := &idler{mode: m.name, size: n}
			all = append(all, i)
			if i.linked, i.err = newIdler(ctx, e, m, n); i.err == nil {
				i.dumps, i.err = i.dumped(ctx)
			}
		}
	}
	for _, v := range []struct {
		name  string
		flags []string
		use   bool
	}{{"neither", nil, false}, {"metrics and page", pageFlags, false}, {"both, used before", pageFlags, true}} {
		i := &idler{mode: v.name, page: true}
		all = append(all, i)
		if i.linked, i.err = newLinked(ctx, e, modes[0], v.flags...); i.err == nil && v.use {
			i.err = i.use(ctx)
		}
	}
	rest, watch := e.For(75*time.Second, 10*time.Second, time.Second), e.For(2*time.Minute, 20*time.Second, time.Second)
	e.Progress("leaving %d agents alone for %v, then watching them for %v", len(all), rest, watch)
	if err := pause(ctx, rest); err != nil {
		return err
	}
	for _, i := range all {
		if i.err == nil {
			i.before, i.err = i.used()
			i.last = i.before.switches
		}
	}
	for range int(watch / time.Second) {
		if err := pause(ctx, time.Second); err != nil {
			return err
		}
		for _, i := range all {
			i.look()
		}
	}
	for _, i := range all {
		i.record(ctx, e)
	}
	return nil
}

// newIdler starts a guest with n listeners and n NAT rules.
func newIdler(ctx context.Context, e *Env, m mode, n int) (*linked, error) {
	l, err := newLinked(ctx, e, m)
	if err != nil || n == 0 {
		return l, err
	}
	self, err := os.Executable()
	if err == nil {
		// A process of its own: one may not have as many open files as all sizes need.
		err = l.start(l.space, self, "-hold", strconv.Itoa(n))
	}
	var t *natTable
	if err == nil {
		t, err = fillNAT(l.space, n)
	}
	if err == nil {
		err = t.conn.CloseLasting()
		// A rule opens a port at the wildcard, a listener its own: both stand.
		_, settled := l.peer.settled(ctx, 2*n)
		err = errors.Join(err, settled)
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// hold is the whole of a process that has listeners until it is ended.
func hold(ctx context.Context, n int) error {
	fds, _, err := fill(nil, n, firstPort)
	if err != nil {
		return err
	}
	<-ctx.Done()
	fds.close()
	return nil
}

// look notes whether the agent has woken up in the last second.
func (i *idler) look() {
	if i.err != nil {
		return
	}
	var u usage
	if u, i.err = i.used(); u.switches != i.last {
		i.last = u.switches
		i.awake++
	}
}

func (i *idler) record(ctx context.Context, e *Env) {
	cell := func(measure, unit string) report.Cell {
		c := report.Cell{Measure: measure, Mode: i.mode, Unit: unit}
		if !i.page {
			c.Size, c.SizeUnit = float64(i.size), "listeners and rules"
		}
		return c
	}
	cpu, wake, rss, awake := cell(idleCPU, "%"), cell(idleWake, "per second"), cell(idleRSS, "B"), cell(idleAwake, "per minute")
	if i.page {
		wake.Measure, rss.Measure = pageWake, pageRSS
	}
	var now usage
	if i.err == nil {
		now, i.err = i.used()
	}
	if i.err == nil {
		i.err = i.check(ctx)
	}
	var since dumped
	if i.err == nil {
		since, i.err = i.dumped(ctx)
	}
	if i.err != nil {
		e.Fail(wake, i.err)
		e.Fail(rss, i.err)
		if !i.page {
			e.Fail(cpu, i.err)
			e.Fail(awake, i.err)
		}
		return
	}
	cpu.By, wake.By, rss.By, awake.By = i.by, i.by, i.by, i.by
	if !i.page {
		share := now.core(i.before)
		if i.mode == modeBPF {
			share += since.audits(i.dumps)
		}
		e.Value(cpu, share)
		e.Value(awake, float64(i.awake)*60/now.at.Sub(i.before.at).Seconds())
	}
	e.Value(wake, float64(now.switches-i.before.switches)/now.at.Sub(i.before.at).Seconds())
	rss.Extra = map[string]float64{"of it anonymous, MB": float64(now.own) / 1e6}
	e.Value(rss, float64(now.rss))
}

// dumped is what an agent has done to read all sockets.
type dumped struct {
	times float64
	took  time.Duration
}

func (l *linked) dumped(ctx context.Context) (dumped, error) {
	m, err := l.metrics(ctx)
	return dumped{
		m[`fairlead_observer_dumps_total{result="ok"}`],
		time.Duration(m["fairlead_observer_dump_seconds_total"] * float64(time.Second)),
	}, err
}

// audits is the share of a core that audits take in the long run, in percent, by
// those since before: the agent makes them as seldom as observer.Options.Audit
// says.
func (d dumped) audits(before dumped) float64 {
	n := d.times - before.times
	if n == 0 {
		return 0
	}
	one := time.Duration(float64(d.took-before.took) / n)
	return 100 * one.Seconds() / max(time.Minute, min(30_000*one, 10*time.Minute)).Seconds()
}

// use scrapes the metrics and follows the events of the page for a while, twice.
func (i *idler) use(ctx context.Context) error {
	url, err := status.NewClient(i.control).WebURL(ctx)
	if err != nil {
		return err
	}
	base, token, _ := strings.Cut(url, "/#token=")
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			return i.space.Dial(network, addr)
		},
	}}
	for _, u := range []string{"http://127.0.0.1:9464/metrics", base + "/", base + "/v1/events", base + "/v1/events"} {
		if err := read(ctx, c, u, token); err != nil {
			return err
		}
	}
	return nil
}

// read takes what comes within two seconds of the answer, which ends a stream.
func read(ctx context.Context, c *http.Client, url, token string) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
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
	defer time.AfterFunc(2*time.Second, cancel).Stop()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}
