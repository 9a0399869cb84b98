// SPDX-License-Identifier: Apache-2.0

// Package agent wires the guest agent: sources, registry, reconciler, sinks and
// status. No other package imports all of them.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/config/loglevel"
	"github.com/fairlead/fairlead/internal/config/memory"
	"github.com/fairlead/fairlead/internal/config/privilege"
	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/guest/gather"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/observer"
	"github.com/fairlead/fairlead/internal/guest/peer"
	"github.com/fairlead/fairlead/internal/guest/publish"
	"github.com/fairlead/fairlead/internal/guest/reconcile"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/sink/auto"
	"github.com/fairlead/fairlead/internal/guest/sink/hostlink"
	"github.com/fairlead/fairlead/internal/guest/source/containerd"
	"github.com/fairlead/fairlead/internal/guest/source/demand"
	"github.com/fairlead/fairlead/internal/guest/source/docker"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/guest/source/nat"
	"github.com/fairlead/fairlead/internal/guest/source/socket"
	"github.com/fairlead/fairlead/internal/guest/source/users"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/forward"
	"github.com/fairlead/fairlead/internal/link/own"
	"github.com/fairlead/fairlead/internal/link/trace"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/metrics"
	"github.com/fairlead/fairlead/internal/status/version"
)

// Source reports which ports exist. Run blocks until ctx ends; any other error ends
// the agent.
type Source interface {
	Name() string
	Run(ctx context.Context, feed registry.Feed) error
}

// named is a source that knows owners.
type named interface {
	Source
	Facts() registry.Facts
}

// Agent is the guest agent.
type Agent struct {
	cfg config.Agent
	log *slog.Logger

	sockets    *own.Sockets
	observer   *observer.Observer
	files      *engine.Files // of engines and clusters
	types      kernel.Types  // kept until the start is over
	sources    []Source
	demand     *demand.Source
	registry   *registry.Registry
	publish    *publish.Server // nil if no container may ask for anything
	forward    *forward.Server
	trace      *trace.Hub
	links      *links
	hostlink   *hostlink.Sink
	sinks      []reconcile.Sink
	auto       *auto.Auto // nil if the sinks are configured
	reconciler *reconcile.Reconciler
	provider   provider
	kube       *kube.Source // of the first cluster; nil without
	inventory  *inventoried // nil unless it is written
	rules      atomic.Pointer[rules.Set]
	forwards   *forwards.Store
	accepted   atomic.Pointer[config.Agent] // the last configuration, of which only reloaded is in effect
	server     *status.Server
	tried      schedule.Signal // hooks were attached, or could not be
	problems   schedule.Signal // the NAT rules that are not understood may have changed

	propagation *metrics.Propagation

	confined     bool                   // capabilities were dropped, and more will be
	capabilities privilege.Set          // what remains then
	unconfined   atomic.Pointer[string] // why capabilities are kept, nil if they are not
	started      uint64                 // the capabilities before any was dropped
}

// New wires an agent. It reads the link's token, or creates it at the first start.
// It starts nothing.
func New(cfg config.Agent, log *slog.Logger, level *loglevel.Levels) (*Agent, error) {
	if cfg.Observer == observer.BPF.String() && os.Geteuid() != 0 {
		return nil, errors.New("--observer bpf loads BPF programs, which needs root: run it as root, or with --observer poll")
	}
	a := &Agent{
		cfg: cfg, log: log, sockets: new(own.Sockets), trace: new(trace.Hub),
		problems: schedule.NewSignal(), tried: schedule.NewSignal(), files: engine.NewFiles(log), started: uint64(privilege.Effective()),
		propagation: metrics.NewPropagation(),
	}
	if err := a.wireSources(); err != nil {
		return nil, err
	}
	if err := a.wireDemand(); err != nil {
		return nil, err
	}
	a.wirePublish()
	if err := a.wireSinks(); err != nil {
		return nil, err
	}
	a.rules.Store(cfg.Rules)
	a.demand.Ask(cfg.Rules.Demands())
	a.forwards = forwards.NewStore(cfg.ForwardsFile, cfg.Rules, false, log, a.applyRules)
	a.accepted.Store(&a.cfg)
	a.provider = provider{a.registry, a.reconciler.Outcomes(), a.demand.Waiting()}
	if err := a.wireInventory(); err != nil {
		return nil, err
	}
	var page status.PageTokens
	if cfg.WebAddr != "" {
		page = status.LoadPageTokens(log, cfg.LinkToken)
	}
	a.server = status.NewServer(status.Options{
		Tokens:   page,
		Provider: a.provider, Explainer: gather.NewExplainer(a.diagnosed()), Examiner: a, Ready: a.notReady, Level: level, Logger: log,
		Metrics: metrics.Handler(a.count), Role: "agent", Name: machineName("guest"), Vitals: a.vitals, Peers: a.peers, Rules: a.rules.Load, Forwards: a.forwards, Demands: a.demands, Settings: a.settings, ConfigFile: a.cfg.File(), Trace: a.trace, Container: a.registry.Container,
	})
	return a, nil
}

// auditInterval converts the interval to the observer's terms: 0 is its default, a
// negative value disables audits.
func auditInterval(cfg *config.Agent) time.Duration {
	switch {
	case !cfg.AuditGiven:
		return 0
	case cfg.AuditInterval == 0:
		return -1
	}
	return cfg.AuditInterval
}

func (a *Agent) wireSources() error {
	mode, err := observer.ParseMode(a.cfg.Observer)
	if err != nil {
		return err
	}
	o := a.observerOptions(mode)
	o.Logger, o.Attached = a.log, a.tried
	a.observer, err = observer.New(o)
	if err != nil {
		return fmt.Errorf("observer: %w", err)
	}
	a.registry = registry.New(registry.Options{Rules: a.cfg.Rules, Logger: a.log})
	for _, name := range a.cfg.Sources {
		if name == "kube" {
			if err := a.wireKube(); err != nil {
				return err
			}
			continue
		}
		s, err := a.newSource(name)
		if err != nil {
			return err
		}
		a.addSource(s)
	}
	return nil
}

func (a *Agent) addSource(s Source) {
	a.sources = append(a.sources, s)
	if f, ok := s.(named); ok {
		a.registry.AddFacts(f.Name(), f.Facts())
	}
	if h, ok := s.(interface{ Holders() registry.Holders }); ok {
		a.registry.SetHolders(h.Holders())
	}
}

// wireKube makes a source of each cluster.
func (a *Agent) wireKube() error {
	k := a.cfg.Kube
	all, err := kube.NewAll(kube.Options{
		Kubeconfigs: k.Kubeconfigs, Context: k.Context, Namespaces: k.Namespaces, Selector: k.Selector,
		Retry: a.engineRetry(), Listens: a.registry.AwaitTCP, Files: a.files, Logger: a.log,
	}, a.engineMemory)
	if err != nil {
		return err
	}
	a.kube = all[0]
	for _, s := range all {
		a.addSource(s)
	}
	return nil
}

// feed makes the feed of a source.
func (a *Agent) feed(s Source) registry.Feed {
	if o, ok := s.(interface{ Optional() bool }); ok && o.Optional() {
		return a.registry.OptionalFeed(s.Name())
	}
	return a.registry.Feed(s.Name())
}

// observerOptions are those of the configuration.
func (a *Agent) observerOptions(mode observer.Mode) observer.Options {
	return observer.Options{
		Mode: mode, Interval: a.cfg.PollInterval, Audit: auditInterval(&a.cfg), Methods: a.cfg.ObserverMethods,
		RingBytes: a.cfg.EventBuffer << 10, Types: &a.types,
	}
}

func (a *Agent) newSource(name string) (Source, error) {
	switch name {
	case socket.Name:
		o := socket.Options{Observer: a.observer, Own: a.sockets.Has, Logger: a.log}
		if len(a.cfg.Publish.Allow) > 0 {
			o.Stands = publish.Targets
		}
		return socket.New(o)
	case "nat":
		return a.newNATSource()
	case "docker":
		return docker.New(a.dockerOptions())
	case "podman":
		return docker.New(a.podmanOptions())
	case "containerd":
		return containerd.New(containerd.Options{
			Sockets: a.cfg.Containerd.Sockets, Namespaces: a.cfg.Containerd.Namespaces, Retry: a.engineRetry(), Memory: a.engineMemory(name), Files: a.files, Logger: a.log,
		})
	case users.Name:
		others := append(docker.SocketsOf(a.cfg.Docker.Hosts), docker.SocketsOf(a.cfg.Podman.Hosts)...)
		return users.New(users.Options{Others: others, Signs: a.registry.PodmanSigns, Retry: a.engineRetry(), Files: a.files, Logger: a.log})
	}
	return nil, fmt.Errorf("source %q: want one of %q", name, config.Sources())
}

// dockerOptions are those of the configuration. Podman's socket is left to its own source,
// unless it is configured as Docker's.
func (a *Agent) dockerOptions() docker.Options {
	o := docker.Options{Hosts: a.cfg.Docker.Hosts, Retry: a.engineRetry(), Memory: a.engineMemory("docker"), Files: a.files, Logger: a.log}
	if len(o.Hosts) == 0 && slices.Contains(a.cfg.Sources, string(docker.Podman)) {
		o.Others = docker.PodmanSockets(a.cfg.Podman.Hosts)
	}
	return o
}

// podmanOptions are those of the configuration.
func (a *Agent) podmanOptions() docker.Options {
	o := docker.Options{
		Kind: docker.Podman, Hosts: a.cfg.Podman.Hosts, Signs: a.registry.PodmanSigns(0),
		Retry: a.engineRetry(), Memory: a.engineMemory("podman"), Files: a.files, Logger: a.log,
	}
	if slices.ContainsFunc(docker.PodmanSockets(o.Hosts), privilege.OfUser) {
		o.Signs = a.registry.PodmanSigns(registry.AllUsers)
	}
	if slices.Contains(a.cfg.Sources, string(docker.Docker)) {
		o.Others = docker.SocketsOf(a.cfg.Docker.Hosts)
	}
	return o
}

// engineMemory is the file in which a source keeps what it knows of its engine.
func (a *Agent) engineMemory(source string) engine.Memory {
	return engine.Memory(a.stateFile(url.PathEscape(source) + "-owners.json"))
}

// engineRetry is how long the ports of an engine that disappeared are kept.
func (a *Agent) engineRetry() engine.Retry {
	if a.cfg.EngineGrace == 0 {
		return engine.Retry{Grace: -1} // for ever
	}
	return engine.Retry{Grace: a.cfg.EngineGrace}
}

func (a *Agent) newNATSource() (Source, error) {
	o := a.natOptions()
	o.Log, o.Problems, o.Attached = a.log, a.problems, a.tried
	if a.mayLoadBPF() {
		return nat.NewHooked(o)
	}
	return nat.New(o)
}

// natOptions are those of the configuration.
func (a *Agent) natOptions() nat.Options {
	// The kernel takes no number above 31 bits.
	buffer := min(4*a.cfg.EventBuffer, 1<<20) << 10
	return nat.Options{MaxPorts: a.cfg.NAT.MaxPorts, ReceiveBuffer: buffer, Types: &a.types}
}

// wirePublish makes the source of what containers publish, if any may.
func (a *Agent) wirePublish() {
	p := a.cfg.Publish
	if len(p.Allow) == 0 {
		return
	}
	a.publish = publish.New(publish.Options{
		Socket: p.Socket, Policy: p.Allow,
		Limits:    peer.Limits{Uses: p.Ports, Connections: p.Connections, Requests: p.Requests},
		Container: a.registry.Container,
		Carry: func(ctx context.Context, conn net.Conn, pub port.Publication) error {
			return a.forward.Carry(ctx, conn, pub) // made later
		},
		Logger: a.log,
	})
	a.sources = append(a.sources, a.publish)
}

func (a *Agent) wireSinks() error {
	var err error
	o := forward.ServerOptions{Logger: a.log, Own: a.sockets.Serves, Trace: a.trace}
	if a.publish != nil {
		o.Dial = a.publish.Dial
	}
	a.forward, err = forward.NewServer(o)
	if err != nil {
		return err
	}
	var follower reconcile.Follower
	for _, c := range a.chosenSinks() {
		if c.Name == "hostlink" {
			if err := a.wireHostlink(); err != nil {
				return err
			}
			follower = a.hostlink
			continue
		}
		sink, err := a.newSink(c)
		if err != nil {
			return err
		}
		a.sinks = append(a.sinks, sink)
	}
	a.reconciler = reconcile.New(a.registry.Publications(), a.sinks, reconcile.Options{
		HoldDown: a.cfg.HoldDown, Ready: a.registry.Ready(), Missing: a.registry.Incomplete, Reading: a.awaitKernel, Logger: a.log,
		Denied:   a.resetFlows,
		Synced:   a.propagated,
		Follower: follower,
	})
	return nil
}

// awaitKernel waits for the sources that read the kernel, not for engines, which may hang.
func (a *Agent) awaitKernel(ctx context.Context) {
	a.registry.AwaitStarted(ctx, socket.Name, port.SourceNAT)
}

// wireHostlink makes the sink for the configured links.
func (a *Agent) wireHostlink() error {
	if file := a.cfg.TokenFile(); file != "" {
		if _, err := link.LoadOrCreateToken(file); err != nil {
			return err
		}
	}
	o := link.Options{
		Role: link.RoleAgent, Identity: link.NewIdentity(), Name: machineName("guest"), Version: version.String(), Network: link.NetworkID(),
		AllowUIDs: a.cfg.AllowUIDs, AllowCIDs: a.cfg.AllowCIDs, Logger: a.log,
	}
	h := hostlink.Options{
		Lookup: func(k port.Key) (port.Publication, bool) { return a.reconciler.Wanted().View().Get(k) },
		Serve:  a.forward.Serve, ServeUDP: a.forward.ServeUDP,
		Logger: a.log,
	}
	a.reportUnpublished(&h)
	a.links = &links{endpoints: a.cfg.Link, trust: a.cfg.TLS, options: o, tokenFile: a.cfg.TokenFileOf, sessions: make(chan link.Session)}
	var err error
	a.hostlink, err = hostlink.New(a.links, h)
	return err
}

// reportUnpublished has the host sent what it does not open, if the configuration says so.
func (a *Agent) reportUnpublished(o *hostlink.Options) {
	if !a.cfg.ReportUnpublished {
		return
	}
	o.Unpublished, o.Unread, o.UnreadChanged = a.registry.Publications(), a.unreadOnWire, a.problems
}

// Run works until ctx ends. watch blocks until its context ends, and calls its
// argument with each new configuration, or with the error for which the old one is kept.
func (a *Agent) Run(ctx context.Context, watch func(ctx context.Context, onChange func(config.Agent, error))) error {
	control, err := status.ListenControl(a.cfg.Control)
	if err != nil {
		return err
	}
	defer func() { _ = control.Close() }()
	// Create all feeds before the first source runs: the registry is ready when each has reported.
	feeds := make([]registry.Feed, len(a.sources))
	var declared []*engine.OwnAddresses
	for i, s := range a.sources {
		feeds[i] = a.feed(s)
		if _, ok := s.(named); ok {
			own := engine.NewOwnAddresses(feeds[i], a.log.With("source", s.Name()))
			feeds[i], declared = own, append(declared, own)
		}
	}
	g, ctx := errgroup.WithContext(ctx)
	if a.cfg.MetricsAddr != "" {
		l, err := a.sockets.Listen(ctx, "tcp", a.cfg.MetricsAddr)
		if err != nil {
			return fmt.Errorf("metrics: %w: choose another --metrics-addr", err)
		}
		g.Go(func() error { return a.server.Serve(ctx, l, false) })
	}
	if err := a.serveWeb(ctx, g); err != nil {
		return err
	}
	if a.hostlink != nil {
		if err := a.links.open(ctx); err != nil {
			return err
		}
		g.Go(func() error { return a.links.run(ctx) })
	}
	a.logStart()
	g.Go(func() error { return a.server.Serve(ctx, control, true) })
	g.Go(func() error { return a.registry.Run(ctx) })
	g.Go(func() error { return a.reconciler.Run(ctx) })
	g.Go(func() error {
		memory.Keep(ctx, a.registry.Ready(), memory.Percent)
		return nil
	})
	g.Go(func() error { return newNotifier(a).run(ctx) })
	g.Go(func() error {
		a.limitAttached(ctx)
		return nil
	})
	g.Go(func() error {
		a.logReady(ctx)
		return nil
	})
	if a.inventory != nil {
		g.Go(func() error {
			a.runInventory(ctx)
			return nil
		})
	}
	a.runSinks(ctx, g)
	for _, own := range declared {
		g.Go(func() error {
			own.Run(ctx)
			return nil
		})
	}
	for i, s := range a.sources {
		feed := feeds[i]
		g.Go(func() error {
			if err := s.Run(ctx, feed); ctx.Err() == nil {
				return fmt.Errorf("source %s: %w", s.Name(), err)
			}
			return nil
		})
	}
	g.Go(func() error {
		watch(ctx, a.reload)
		return nil
	})
	if err := g.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// reloaded are the settings that can change while running, besides the rules and who may ask
// for what.
var reloaded = []string{"expose", "labels", "rulesFile"}

// settings are those in effect.
func (a *Agent) settings() []config.Setting {
	next := a.accepted.Load()
	if next == nil { // it does not run
		return nil
	}
	return config.Reloaded(a.cfg.Settings(), next.Settings(), reloaded...)
}

// waiting are the keys of the last configuration that need a restart.
func (a *Agent) waiting() []string {
	next := a.accepted.Load()
	if next == nil { // it does not run
		return nil
	}
	list := config.Waiting(a.cfg.Settings(), next.Settings(), reloaded...)
	if a.publish == nil && len(next.Publish.Allow) > 0 {
		list = append(list, "publish.allow")
	}
	return list
}

// reload applies what can change while running.
func (a *Agent) reload(cfg config.Agent, err error) {
	a.reloadPolicy() // which is not read with the rest
	if err != nil {
		a.log.Error("configuration refused; keeping the previous one", "err", err)
		return
	}
	a.forwards.Reload(cfg.Rules)
	if a.publish != nil {
		a.publish.SetPolicy(cfg.Publish.Allow)
	}
	a.accepted.Store(&cfg)
	a.log.Info("rules reloaded", "rules", cfg.Rules.Len())
	if keys := a.waiting(); len(keys) > 0 {
		a.log.Warn("settings changed that need a restart", "keys", strings.Join(keys, ","))
	}
}

// applyRules has the rules decide from now on. They decide of nothing that is asked for by name
// without the rule that asks for it.
func (a *Agent) applyRules(set *rules.Set) {
	asked := set.Demands()
	a.demand.Drop(asked) // without its rule it would be decided as any other port
	a.registry.SetRules(set)
	a.rules.Store(set)
	a.demand.Ask(asked)
}
