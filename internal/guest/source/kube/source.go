// SPDX-License-Identifier: Apache-2.0

// Package kube declares the ports that Kubernetes Services open on this node:
// node ports, the ports of load balancers on their addresses, and external IPs.
//
// It keeps no copy of the cluster: reflectors of client-go hand each object to a
// store that keeps what a port needs and lets the rest go. Neither the generated
// clientset nor k8s.io/api is linked: they cost 10 MB of memory, and 4 MB of the program.
package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Options configures a Source.
type Options struct {
	// SourceName is "kube" if empty. Two clusters need two names.
	SourceName string
	// Kubeconfigs are tried in order at each connect, and the first one that
	// exists and may be used is taken; it may appear and change later. [NewAll] follows the
	// others, too. Empty means the service account where this runs in a
	// cluster, or else $KUBECONFIG, or else [Kubeconfigs].
	Kubeconfigs []string
	// Context of the kubeconfig; "" is its current one.
	Context string
	// Namespaces to look at; empty means all.
	Namespaces []string
	// Selector limits the Services by their labels, in Kubernetes' own syntax.
	Selector string
	// Timeout bounds each page of a list, and the start of each watch. 30 s if 0.
	Timeout time.Duration
	Retry   engine.Retry
	// Memory keeps that a server was listed, for an agent that starts while it is away.
	Memory engine.Memory
	// Listens returns nil when something begins to listen on a TCP port of this
	// machine, which may be the server that does not answer. May be nil.
	Listens func(ctx context.Context, port uint16) error
	// Files tells when a kubeconfig appears or changes; it may be shared, with sources
	// that read no file of a user. One of its own if nil.
	Files  *engine.Files
	Logger *slog.Logger
	// Getenv is os.Getenv if nil.
	Getenv func(string) string
}

func (o Options) validate() error {
	for _, p := range o.Kubeconfigs {
		if !filepath.IsAbs(p) {
			return fmt.Errorf("kubeconfig %q: want an absolute path", p)
		}
	}
	for _, n := range o.Namespaces {
		if n == "" {
			return errors.New("kube namespace \"\": want a name; no names at all mean all namespaces")
		}
	}
	if _, err := labels.Parse(o.Selector); err != nil {
		return fmt.Errorf("kube selector %q: %w", o.Selector, err)
	}
	if o.Timeout < 0 {
		return fmt.Errorf("kube timeout %v: want 0 (the default) or more", o.Timeout)
	}
	if o.Logger == nil {
		return errors.New("kube: a logger is required")
	}
	return o.Retry.Validate()
}

// Source is one cluster.
type Source struct {
	o         Options
	inCluster bool
	facts     facts
	state     atomic.Pointer[state] // nil before Run
	wake      schedule.Signal       // the server may be back, or is another one
	server    uint16                // the port of the last session's server, 0 if not known; of Run's goroutine
	listed    atomic.Bool           // a server was listed once
	clusters  *clusters             // nil if this is the only source
	news      schedule.Signal       // what others follow has changed; nil then
	files     schedule.Signal       // a kubeconfig appeared or changed; nil then

	mu       sync.Mutex
	using    config // as it was read last
	unusable error  // why it is not used; nil if it is
	declared string // the server whose Services are reported; "" if there are none
}

// Kubeconfigs whose names do not tell what wrote them.
const (
	kubeadmConfig = "/etc/kubernetes/admin.conf"
	k0sConfig     = "/var/lib/k0s/pki/admin.conf"
)

// Kubeconfigs are those that k3s, kubeadm, RKE2 and k0s write on a node. That of MicroK8s is not
// among them: a group may write to it, so that it would be refused.
func Kubeconfigs() []string {
	return []string{"/etc/rancher/k3s/k3s.yaml", kubeadmConfig, "/etc/rancher/rke2/rke2.yaml", k0sConfig}
}

// New checks the options and fills in defaults. It connects to nothing.
func New(o Options) (*Source, error) {
	if o.SourceName == "" {
		o.SourceName = "kube"
	}
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	s := &Source{wake: schedule.NewSignal(), facts: facts{addrs: net.InterfaceAddrs}}
	if len(o.Kubeconfigs) == 0 {
		s.inCluster = o.Getenv("KUBERNETES_SERVICE_HOST") != ""
		if env := o.Getenv("KUBECONFIG"); env != "" {
			o.Kubeconfigs = filepath.SplitList(env)
		} else {
			o.Kubeconfigs = Kubeconfigs()
		}
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.Kubeconfigs = unique(o.Kubeconfigs)
	o.Files = o.Files.For(o.Logger, o.Kubeconfigs...)
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Second
	}
	if len(o.Namespaces) == 0 {
		o.Namespaces = []string{metav1.NamespaceAll}
	}
	o.Retry = o.Retry.WithDefaults()
	s.o = o
	return s, nil
}

// unique returns the paths without those that come again.
func unique(paths []string) (out []string) {
	for _, p := range paths {
		if p = filepath.Clean(p); !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// Name returns the name that the registry knows the source by.
func (s *Source) Name() string { return s.o.SourceName }

// Access returns how other clients reach the server of this source now, and where that is
// written. The files that it names were read under the same rules. The pointer is the same while
// neither the server nor the credentials have changed. A source that runs returns what it uses
// itself, and an error while it still reports the Services of another server.
func (s *Source) Access() (conf *rest.Config, origin string, err error) {
	if s.state.Load() == nil {
		s.use(s.load())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.using
	switch {
	case s.unusable != nil:
		return nil, c.origin, s.unusable
	case c.rest == nil:
		return nil, c.origin, errors.New("the kubeconfig is not read yet")
	case s.declared != "" && s.declared != c.server():
		return nil, c.origin, fmt.Errorf("%s: its Services are not listed yet, and those of the server before are still known", c.origin)
	}
	return c.rest, c.origin, nil
}

// use notes what was read.
func (s *Source) use(c config, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unusable = err; err == nil && s.using.is(c) {
		return
	}
	s.using = c
}

// declares notes whose Services are reported.
func (s *Source) declares(server string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.declared = server
}

// Facts answers which pod has an address. It stays valid for ever. A pod in the
// network of its node has no address of its own, and is left out.
func (s *Source) Facts() registry.Facts { return &s.facts }

// facts leaves out the addresses of this machine.
type facts struct {
	engine.Table

	addrs func() ([]net.Addr, error)              // of this machine
	local atomic.Pointer[map[netip.Addr]struct{}] // nil until they have been read

	mu   sync.Mutex
	asOf time.Time
}

// Confirm implements [registry.Confirmer]. A server is watched, not asked for lists, which
// may be long.
func (f *facts) Confirm(listed func()) bool { return f.Absent() && f.Table.Confirm(listed) }

// localFor is how long the addresses of this machine are taken to stay.
const localFor = 5 * time.Second

// ByAddress implements registry.Facts. It asks the kernel nothing, as the registry
// waits for the answer.
func (f *facts) ByAddress(a netip.Addr) (port.Owner, bool) {
	local := f.local.Load()
	if local == nil {
		return port.Owner{}, false
	}
	if _, is := (*local)[a.Unmap()]; is {
		return port.Owner{}, false
	}
	return f.Table.ByAddress(a)
}

// readLocal reads the addresses of this machine, if the last time is long ago. It is
// called before facts are added.
func (f *facts) readLocal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.local.Load() != nil && time.Since(f.asOf) < localFor {
		return
	}
	all, err := f.addrs()
	if err != nil {
		return // what was read before is probably true; without it, no pod is named
	}
	local := make(map[netip.Addr]struct{}, len(all))
	for _, l := range all {
		if p, err := netip.ParsePrefix(l.String()); err == nil {
			local[p.Addr().Unmap()] = struct{}{}
		}
	}
	f.asOf = time.Now()
	f.local.Store(&local)
}

// Run follows the cluster until ctx ends, and returns ctx's cause then.
func (s *Source) Run(ctx context.Context, feed registry.Feed) error {
	ctx, cancel := context.WithCancel(ctx)
	st := newState(s.o.Logger, feed, &s.facts)
	st.listed = func() string {
		s.clusters.show(s)
		return s.clusters.name(s)
	}
	s.state.Store(st)
	var watching sync.WaitGroup
	defer func() { cancel(); watching.Wait() }()
	if s.clusters != nil {
		watching.Go(func() { s.watch(ctx, st) })
	}
	if !s.Optional() { // the others are told by this one
		changed := s.wake
		if s.clusters != nil {
			changed = schedule.NewSignal()
			watching.Go(func() { s.clusters.tell(ctx, changed) })
		}
		stopped := s.o.Files.Watch(ctx, changed, s.o.Kubeconfigs...)
		defer func() { cancel(); <-stopped }()
	}
	s.remember()
	if s.clusters.await(ctx, s) != nil {
		return context.Cause(ctx)
	}
	withdraw := func() {
		st.withdraw()
		s.declares("")
		s.clusters.hide(s)
	}
	return engine.Supervisor{
		Retry: s.o.Retry, Logger: s.o.Logger, Feed: feed, Facts: &s.facts.Table, Wake: s.wake, Withdraw: withdraw, Await: s.awaitServer,
	}.Run(ctx, func(ctx context.Context, up func()) error { return s.session(ctx, st, up) })
}

// awaitServer returns nil when something listens on the port of the last server.
func (s *Source) awaitServer(ctx context.Context) error {
	if s.o.Listens == nil || s.server == 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	return s.o.Listens(ctx, s.server)
}

// session follows one server by one configuration until either fails or changes.
func (s *Source) session(ctx context.Context, st *state, up func()) error {
	s.server = 0
	conf, err := s.load()
	s.use(conf, err)
	s.clusters.chosen(s)
	if err != nil {
		if errors.Is(err, engine.ErrAbsent) {
			s.clusters.release(s)
		}
		return err
	}
	s.server = conf.port()
	hc, err := rest.HTTPClientFor(conf.rest)
	if err != nil {
		return fmt.Errorf("%s: %w", conf.origin, err)
	}
	// Each session has connections of its own, and leaves none.
	defer hc.CloseIdleConnections()
	core, err := clientFor(conf.rest, hc, object.CoreV1, "/api")
	if err != nil {
		return fmt.Errorf("%s: %w", conf.origin, err)
	}
	discovery, err := clientFor(conf.rest, hc, object.DiscoveryV1, "/apis")
	if err != nil {
		return fmt.Errorf("%s: %w", conf.origin, err)
	}
	st.feed.Method(fmt.Sprintf("watch of %s, %s", conf.rest.Host, conf.origin))

	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	// Reflectors log what is returned here as well.
	ctx = klog.NewContext(ctx, klog.Logger{})
	st.begin(2*len(s.o.Namespaces), func() {
		s.setListed()
		s.declares(conf.server())
		up()
	})
	for _, ns := range s.o.Namespaces {
		wg.Go(func() {
			cancel(s.reflect(ctx, reflection{
				client: core, resource: "services", namespace: ns, selector: s.o.Selector,
				kind: &object.Service{}, lean: leanServices, store: &serviceStore{state: st, namespace: ns},
			}))
		})
		wg.Go(func() {
			store := &sliceStore{state: st, namespace: ns}
			err := s.reflect(ctx, reflection{
				client: discovery, resource: "endpointslices", namespace: ns,
				kind: &object.EndpointSlice{}, lean: leanSlices, store: store,
			})
			if ctx.Err() == nil && (apierrors.IsForbidden(err) || apierrors.IsNotFound(err)) {
				// Ports can be declared without knowing who serves them.
				store.unknown(err)
				return
			}
			cancel(err)
		})
	}
	for {
		select {
		case <-ctx.Done():
			return s.ended(ctx, conf)
		case <-s.wake:
			next, err := s.load()
			if err != nil {
				s.o.Logger.Warn("the kubeconfig changed and cannot be used; the old one stays", "err", err)
				continue
			}
			if !next.is(conf) {
				s.o.Logger.Info("the kubeconfig changed", "origin", next.origin)
				return engine.ErrAgain
			}
		}
	}
}

// ended returns why a session's ctx ended. Where nobody listens at the server's address
// and no server was ever listed, that is an [engine.ErrRefused]. One that was listed is
// not forgotten while there is a kubeconfig: rules of its Services may be left, and
// nothing else names these.
func (s *Source) ended(ctx context.Context, conf config) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, context.Canceled) {
		return ctx.Err()
	}
	err := fmt.Errorf("%s: %w", conf.origin, cause)
	if errors.Is(cause, syscall.ECONNREFUSED) && !s.listed.Load() {
		return engine.Refused(err)
	}
	return err
}

// remember reads whether an earlier agent has listed a server.
func (s *Source) remember() {
	saved, err := s.o.Memory.Load()
	if err != nil {
		s.o.Logger.Warn("unknown whether an earlier agent knew a server", "err", err)
	}
	s.listed.Store(saved.Listed)
}

// setListed notes that a server was listed. The pods are not kept: nothing but the
// server knows whether they still run.
func (s *Source) setListed() {
	if s.listed.Swap(true) {
		return
	}
	if err := s.o.Memory.Save(engine.Saved{Listed: true}); err != nil {
		s.o.Logger.Warn("cannot save that a server was listed; rules by owner fail open if the agent starts again while it is away",
			"err", err)
	}
}

// reflection is one resource in one namespace, and where it goes.
type reflection struct {
	client              *rest.RESTClient
	resource, namespace string
	selector            string
	kind                runtime.Object
	lean                func(list listFunc) (runtime.Object, error)
	store               cache.ReflectorStore
}

// listWatch lists, and then watches. A list as a stream of events has a reflector
// that sleeps through the loss of the server.
type listWatch struct{ *cache.ListWatch }

// IsWatchListSemanticsUnSupported is what the reflector asks for.
func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

// reflect lists and watches until ctx ends or the server cannot be used. A watch
// that the server ends, or that fell too far behind, is no failure.
func (s *Source) reflect(ctx context.Context, r reflection) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	get := func(o *metav1.ListOptions) *rest.Request {
		if r.selector != "" {
			o.LabelSelector = r.selector
		}
		return r.client.Get().NamespaceIfScoped(r.namespace, r.namespace != "").Resource(r.resource).
			VersionedParams(o, metav1.ParameterCodec).
			MaxRetries(0) // the session is what is tried again
	}
	lw := listWatch{&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			return r.lean(func(o metav1.ListOptions) (runtime.Object, error) {
				ctx, stop := context.WithTimeout(ctx, s.o.Timeout)
				defer stop()
				list, err := get(&o).Do(ctx).Get()
				if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
					err = fmt.Errorf("no answer within %v", s.o.Timeout)
				}
				return list, err
			})
		},
		WatchFuncWithContext: func(wctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			slow := time.AfterFunc(s.o.Timeout, func() { cancel(fmt.Errorf("watch: no answer within %v", s.o.Timeout)) })
			w, err := get(&o).Watch(wctx)
			slow.Stop()
			// A reflector waits for a server that is away without a word. An
			// refusal is for it to judge: it lists then.
			if status := apierrors.APIStatus(nil); err != nil && !errors.As(err, &status) {
				cancel(fmt.Errorf("watch: %w", err))
			}
			return w, err
		},
	}}
	reflector := cache.NewReflectorWithOptions(lw, r.kind, r.store, cache.ReflectorOptions{Logger: new(klog.Logger), Name: r.resource})
	pause := schedule.Backoff{Min: 10 * time.Millisecond, Max: time.Second}
	for {
		began := time.Now()
		err := reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", r.resource, err)
		}
		// The watch fell behind, or was closed: list again, but never in a loop
		// without pauses.
		if time.Since(began) > time.Minute {
			pause.Reset()
		}
		if schedule.Sleep(ctx, pause.Next()) != nil {
			return context.Cause(ctx)
		}
	}
}
