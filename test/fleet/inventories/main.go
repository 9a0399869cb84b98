// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command inventories measures what the inventories of a fleet cost: it runs many agents'
// writers against a real API server with etcd, through a first start, churn, a restart of
// all at once, and the loss of the server. It needs root for a network namespace.
package main

import (
	"context"
	"debug/buildinfo"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status/inventory"
	kit "github.com/fairlead/fairlead/test/kit/program"
)

type options struct {
	agents  int
	program string
}

const (
	ports    = 60               // of each node
	interval = 10 * time.Second // cluster.interval of each agent
	change   = 30 * time.Second // how often a port of each node changes
	lasts    = time.Minute      // how long ports change
	away     = 30 * time.Second // how long the API server is away
)

func main() {
	var o options
	flag.IntVar(&o.agents, "agents", 500, "how many agents")
	flag.StringVar(&o.program, "apiserver", "", "the kube-apiserver to run")
	var report string
	flag.StringVar(&report, "report", "", "the document whose figures to replace")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var b strings.Builder
	err := kit.EnterRoot()
	if err == nil {
		err = run(ctx, o, io.MultiWriter(os.Stdout, &b))
	}
	if err == nil && report != "" {
		err = write(report, b.String())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "inventories:", err)
		os.Exit(1)
	}
}

// figures is where a document has them.
var figures = regexp.MustCompile(`(?s)(<!-- figures of fleet -->\n).*(<!-- end of figures -->)`)

// write replaces the figures in a document.
func write(file, text string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if !figures.Match(b) {
		return fmt.Errorf("%s has no place for figures", file)
	}
	b = figures.ReplaceAll(b, []byte("${1}"+strings.ReplaceAll(text, "$", "$$")+"${2}"))
	return os.WriteFile(file, b, 0o644) //nolint:gosec // a document
}

func run(ctx context.Context, o options, out io.Writer) error {
	before, err := load1()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "fl-fleet-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s, err := startServer(ctx, dir, o.program)
	if s != nil {
		defer s.close()
	}
	if err != nil {
		return err
	}
	f := &fleet{options: o, server: s}
	if err := f.prepare(ctx); err != nil {
		return err
	}
	program, err := described(ctx, o.program)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(out, "%d agents, %d ports each, one changes every %v, interval %v; %s; %d cores, load %s before the start\n\n",
		o.agents, ports, change, interval, program, runtime.NumCPU(), before)
	_, _ = fmt.Fprintln(out, "| phase | until all objects are right | requests | writes | a second | p50 | p90 | p99 | API server, cores | CPU a write | memory | etcd a write |")
	_, _ = fmt.Fprintln(out, "|---|---|---|---|---|---|---|---|---|---|---|---|")
	for _, phase := range []struct {
		name string
		do   func(ctx context.Context) error
	}{
		{"all start for the first time", func(context.Context) error { f.start(ctx); return nil }},
		{"ports change", f.churn},
		{"all start again, nothing changed", func(context.Context) error { f.stop(); f.start(ctx); return nil }},
		{"all start again, each port changed", func(context.Context) error { f.stop(); f.changeAll(); f.start(ctx); return nil }},
		{fmt.Sprintf("API server away for %v", away), f.lose},
	} {
		line, err := f.measure(ctx, phase.do)
		if err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
		_, _ = fmt.Fprintf(out, "| %s %s\n", phase.name, line)
	}
	f.stop()
	return nil
}

// described says which API server a program is, and how it was built.
func described(ctx context.Context, program string) (string, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return "", fmt.Errorf("-apiserver: %w", err)
	}
	how := "with"
	for _, s := range info.Settings {
		if s.Key == "-gcflags" && strings.Contains(s.Value, "-N") {
			how = "without"
		}
	}
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	return fmt.Sprintf("%s %s, built %s optimisation", filepath.Base(program), strings.TrimSpace(string(out)), how), err
}

// load1 is how many processes of this machine were running or ready, on average of a minute.
func load1() (string, error) {
	b, err := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(b), " ")
	return first, err
}

// fleet is the agents.
type fleet struct {
	options
	server *server
	agents []*agent

	mu        sync.Mutex
	latencies []time.Duration // of requests
	writes    atomic.Int64    // requests that were writes and succeeded

	stop func()
}

// agent is the writer of one node. Its ports are numbered from first.
type agent struct {
	name    string
	writer  *inventory.Writer
	changed schedule.Signal
	first   atomic.Int64
	fleet   *fleet
}

func (f *fleet) prepare(ctx context.Context) error {
	if err := f.server.CreateCRD(ctx, "deploy/kubernetes/crd.yaml"); err != nil {
		return err
	}
	if err := f.server.AllowInventory(ctx, "nobody", "get", "create", "update", "list"); err != nil {
		return err
	}
	for i := range f.options.agents {
		a := &agent{name: fmt.Sprintf("node-%d", i), fleet: f, changed: schedule.NewSignal()}
		f.agents = append(f.agents, a)
		if err := f.server.CreateNode(ctx, a.name, a.name); err != nil {
			return err
		}
	}
	return until(ctx, time.Second, func() error { _, err := f.objects(ctx); return err })
}

// config is that of a user who has the rights of an agent, and whom the server limits.
func (f *fleet) config() (*rest.Config, string, error) {
	return &rest.Config{
		Host: "https://127.0.0.1:6443", BearerToken: "nobody", TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		Dial: func(_ context.Context, network, addr string) (net.Conn, error) {
			return f.server.space.Dial(network, addr)
		},
		WrapTransport: func(next http.RoundTripper) http.RoundTripper { return measured{f, next} },
	}, "the simulation", nil
}

// measured counts requests.
type measured struct {
	fleet *fleet
	next  http.RoundTripper
}

func (m measured) RoundTrip(r *http.Request) (*http.Response, error) {
	began := time.Now()
	resp, err := m.next.RoundTrip(r)
	m.fleet.mu.Lock()
	m.fleet.latencies = append(m.fleet.latencies, time.Since(began))
	m.fleet.mu.Unlock()
	if err == nil && r.Method != http.MethodGet && resp.StatusCode < 300 {
		m.fleet.writes.Add(1)
	}
	return resp, err
}

// report is what an agent reports: ports with owners of different names, as pods have.
func (a *agent) report(context.Context) inventory.Report {
	r := inventory.Report{Agent: "simulated", Conditions: []inventory.Condition{{Type: inventory.ConditionReady, True: true, Reason: "SourcesLive"}}}
	first := int(a.first.Load())
	for i := range ports {
		n := first + i
		p := inventory.Port{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(1024 + n%60_000)},
			State: port.Pending, Since: time.Unix(1_800_000_000+int64(n), 0).UTC(), Sources: []string{"socket"},
			Owner: inventory.Owner{Kind: port.OwnerContainer, Namespace: "default", Name: fmt.Sprintf("deployment-%d-7d9f6c5b4-%s", i, a.name), ID: fmt.Sprintf("%012x", n*7919)},
		}
		if i%3 == 0 {
			p.Address = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		r.Ports = append(r.Ports, p)
	}
	return r
}

// start starts all agents.
func (f *fleet) start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	conf, origin, err := f.config()
	for _, a := range f.agents {
		a.writer = inventory.NewWriter(inventory.Options{
			Node: a.name, Interval: interval, Machine: a.name, Namespace: "1", Report: a.report, Changed: a.changed,
			Config: func() (*rest.Config, string, error) { return conf, origin, err },
			Lock:   func(context.Context, string) (func(), error) { return func() {}, nil },
			Logger: slog.New(slog.DiscardHandler),
		})
		wg.Go(func() { _ = a.writer.Run(ctx) })
	}
	f.stop = func() { cancel(); wg.Wait() }
}

// churn changes one port of each node after the other, each of them once in change.
func (f *fleet) churn(ctx context.Context) error {
	pause := change / time.Duration(len(f.agents))
	for began, i := time.Now(), 0; time.Since(began) < lasts; i++ {
		a := f.agents[i%len(f.agents)]
		a.first.Add(1)
		a.changed.Notify()
		if err := schedule.Sleep(ctx, pause); err != nil {
			return err
		}
	}
	return nil
}

// changeAll changes all ports of all nodes.
func (f *fleet) changeAll() {
	for _, a := range f.agents {
		a.first.Add(int64(ports))
	}
}

// lose kills the server, changes all ports, and starts it again after a time.
func (f *fleet) lose(ctx context.Context) error {
	end(f.server.api)
	f.changeAll()
	for _, a := range f.agents {
		a.changed.Notify()
	}
	if err := schedule.Sleep(ctx, away); err != nil {
		return err
	}
	return f.server.startAPI(ctx)
}

// measure runs a phase until all objects are right, and returns its figures.
func (f *fleet) measure(ctx context.Context, do func(context.Context) error) (string, error) {
	f.mu.Lock()
	f.latencies = nil
	f.mu.Unlock()
	f.writes.Store(0)
	before, err := f.server.load()
	if err != nil {
		return "", err
	}
	pid := f.server.api.PID()
	began := time.Now()
	if err := do(ctx); err != nil {
		return "", err
	}
	done := time.Now()
	if err := until(ctx, time.Second, func() error { return f.right(ctx) }); err != nil {
		return "", err
	}
	settled := time.Since(done).Round(100 * time.Millisecond)
	elapsed := time.Since(began)
	after, err := f.server.load()
	if err != nil {
		return "", err
	}
	if f.server.api.PID() != pid { // a new process
		before.api.CPU = 0
	}
	return f.line(before, after, settled, elapsed), nil
}

func (f *fleet) line(before, after load, settled, elapsed time.Duration) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.Sort(f.latencies)
	q := func(p float64) string {
		if len(f.latencies) == 0 {
			return "-"
		}
		return f.latencies[min(len(f.latencies)-1, int(p*float64(len(f.latencies))))].Round(time.Millisecond).String()
	}
	writes, cpu := float64(f.writes.Load()), after.api.CPU-before.api.CPU
	perWrite := func(v float64, format string) string {
		if writes == 0 {
			return "-"
		}
		return fmt.Sprintf(format, v/writes)
	}
	return fmt.Sprintf("| %v | %d | %.0f | %.1f | %s | %s | %s | %.2f | %s | %d MB | %s |", settled, len(f.latencies), writes, writes/elapsed.Seconds(),
		q(.5), q(.9), q(.99), cpu.Seconds()/elapsed.Seconds(), perWrite(float64(cpu.Milliseconds()), "%.0f ms"), after.api.RSS/1_000_000,
		perWrite((after.written-before.written)/1000, "%.1f kB"))
}

// objects reads all objects, as an administrator whom the server does not limit.
func (f *fleet) objects(ctx context.Context) ([]inventory.NodeInventory, error) {
	conf, _, _ := f.config()
	conf.BearerToken, conf.WrapTransport = "token", nil
	c, err := inventory.NewClient(conf)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	list, _, err := c.List(ctx, "")
	return list, err
}

// right returns why not all objects are as their agents report.
func (f *fleet) right(ctx context.Context) error {
	list, err := f.objects(ctx)
	if err != nil {
		return err
	}
	have := make(map[string]inventory.NodeInventory)
	for _, o := range list {
		have[o.Name] = o
	}
	wrong := 0
	var first error
	for _, a := range f.agents {
		if err := a.right(ctx, have[a.name]); err != nil {
			wrong++
			if first == nil {
				first = fmt.Errorf("%s: %w", a.name, err)
			}
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d objects are wrong: %w", wrong, first)
	}
	return nil
}

func (a *agent) right(ctx context.Context, o inventory.NodeInventory) error {
	if s := a.writer.State(); !s.Current {
		return fmt.Errorf("not yet: %s", s.Error)
	}
	want := a.report(ctx).Ports
	have, err := o.Status.Decode()
	if err != nil {
		return err
	}
	if len(have) != len(want) {
		return fmt.Errorf("%d ports, want %d: %s", len(have), len(want), a.writer.State().Error)
	}
	slices.SortFunc(want, func(p, q inventory.Port) int { return p.Compare(q.Key) })
	for i := range want {
		if have[i].Key != want[i].Key || !have[i].Since.Equal(want[i].Since) || have[i].Owner != want[i].Owner {
			return fmt.Errorf("port %d is %+v, want %+v", i, have[i], want[i])
		}
	}
	return nil
}
