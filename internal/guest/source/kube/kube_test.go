// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/leak"
	"github.com/fairlead/fairlead/internal/testkit/ports"
)

func TestMain(m *testing.M) {
	// client-go starts one goroutine for its own metrics of certificates when it is linked.
	leak.Main(m)
}

// fake is an API server as far as this source asks.
type fake struct {
	t          *testing.T
	addr       string
	scheme     string
	kubeconfig string
	stop       func() // the server

	mu       sync.Mutex
	version  int
	log      []logged // what happened, for watches that begin later
	services map[string]*corev1.Service
	slices   map[string]*discoveryv1.EndpointSlice
	watches  map[*watchStream]bool
	lists    int
	deny     map[string]int  // resource to HTTP status
	hang     map[string]bool // "list services", "watch endpointslices"
}

// logged is an event that made a version.
type logged struct {
	version        int
	resource, text string
}

type watchStream struct {
	resource string
	c        chan string // closed to end the stream
}

func newFake(t *testing.T) *fake {
	f := &fake{
		t: t, version: 1, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"),
		addr:     fmt.Sprintf("127.0.0.1:%d", ports.Free(t)), // it is stopped and started there
		services: make(map[string]*corev1.Service), slices: make(map[string]*discoveryv1.EndpointSlice),
		watches: make(map[*watchStream]bool), deny: make(map[string]int), hang: make(map[string]bool),
	}
	if err := os.Chmod(filepath.Dir(f.kubeconfig), 0o700); err != nil { // whatever the umask
		t.Fatal(err)
	}
	f.start()
	f.write(f.kubeconfig, "")
	t.Cleanup(func() { f.stop() })
	return f
}

func (f *fake) start() {
	l, err := net.Listen("tcp4", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	srv := &http.Server{Handler: f}
	f.stop = enginetest.Serve(func() error { return srv.Serve(l) }, func() { _ = srv.Close() })
}

func (f *fake) write(path, user string) {
	f.t.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: \"%s://%s\"}}]\n"+
		"users: [{name: u, user: {%s}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n", cmp.Or(f.scheme, "http"), f.addr, user)
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	verb := "list"
	if r.URL.Query().Get("watch") != "" {
		verb = "watch"
	}
	f.mu.Lock()
	deny, hang := f.deny[resource], f.hang[verb+" "+resource]
	f.mu.Unlock()
	if hang {
		<-r.Context().Done()
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("sendInitialEvents") != "" {
		deny = http.StatusUnprocessableEntity // as a server that does not know it
	}
	if deny != 0 {
		w.WriteHeader(deny)
		reason := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 401: metav1.StatusReasonUnauthorized, 422: metav1.StatusReasonInvalid}[deny]
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(deny), Reason: reason,
			Message: resource + " is denied",
		})
		return
	}
	if verb == "watch" {
		f.watch(w, r, resource)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists++
	meta := metav1.ListMeta{ResourceVersion: strconv.Itoa(f.version)}
	if resource == "services" {
		l := corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"}, ListMeta: meta}
		for _, s := range f.services {
			l.Items = append(l.Items, *s)
		}
		_ = json.NewEncoder(w).Encode(l)
		return
	}
	l := discoveryv1.EndpointSliceList{TypeMeta: metav1.TypeMeta{Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"}, ListMeta: meta}
	for _, s := range f.slices {
		l.Items = append(l.Items, *s)
	}
	_ = json.NewEncoder(w).Encode(l)
}

func (f *fake) watch(w http.ResponseWriter, r *http.Request, resource string) {
	f.mu.Lock()
	s := &watchStream{resource: resource, c: make(chan string, 3000+len(f.log))}
	// A watch begins where its list ended, whatever happened meanwhile.
	if from, err := strconv.Atoi(r.URL.Query().Get("resourceVersion")); err == nil {
		for _, l := range f.log {
			if l.resource == resource && l.version > from {
				s.c <- l.text
			}
		}
	}
	f.watches[s] = true
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.watches, s)
		f.mu.Unlock()
	}()
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
	for {
		select {
		case text, ok := <-s.c:
			if !ok {
				return
			}
			_, _ = fmt.Fprint(w, text)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// send writes to every watch of a resource.
func (f *fake) send(resource, text string) {
	for s := range f.watches {
		if s.resource == resource {
			s.c <- text
		}
	}
}

// encode is an event as a watch carries it.
func (f *fake) encode(kind string, object any) string {
	b, err := json.Marshal(map[string]any{"type": kind, "object": object})
	if err != nil {
		f.t.Fatal(err)
	}
	return string(b) + "\n"
}

// event is what made the version that there is now.
func (f *fake) event(resource, kind string, object any) {
	text := f.encode(kind, object)
	f.log = append(f.log, logged{f.version, resource, text})
	f.send(resource, text)
}

// put adds or changes an object.
func (f *fake) put(object any) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	kind := "MODIFIED"
	switch o := object.(type) {
	case *corev1.Service:
		id := o.Namespace + "/" + o.Name
		if f.services[id] == nil {
			kind = "ADDED"
		}
		o.TypeMeta, o.ResourceVersion = metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}, strconv.Itoa(f.version)
		f.services[id] = o
		f.event("services", kind, o)
	case *discoveryv1.EndpointSlice:
		id := o.Namespace + "/" + o.Name
		if f.slices[id] == nil {
			kind = "ADDED"
		}
		o.TypeMeta = metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}
		o.ResourceVersion = strconv.Itoa(f.version)
		f.slices[id] = o
		f.event("endpointslices", kind, o)
	}
}

func (f *fake) remove(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	if s := f.services[id]; s != nil {
		s.ResourceVersion = strconv.Itoa(f.version)
		delete(f.services, id)
		f.event("services", "DELETED", s)
	}
	if s := f.slices[id]; s != nil {
		s.ResourceVersion = strconv.Itoa(f.version)
		delete(f.slices, id)
		f.event("endpointslices", "DELETED", s)
	}
}

// cut ends every watch, after some last text.
func (f *fake) cut(last string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for s := range f.watches {
		if last != "" {
			s.c <- last
		}
		close(s.c)
		delete(f.watches, s)
	}
}

// watched waits until both resources are watched.
func (f *fake) watched() {
	f.t.Helper()
	enginetest.Eventually(f.t, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		seen := make(map[string]bool)
		for s := range f.watches {
			seen[s.resource] = true
		}
		return enginetest.ErrIf(len(seen) < 2)
	})
}

func svc(name string, kind corev1.ServiceType, ports ...corev1.ServicePort) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.ServiceSpec{
			Type: kind, Ports: ports, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		},
	}
}

// received returns a Service as the agent decodes it.
func received(s *corev1.Service) *object.Service {
	o := new(object.Service)
	transfer(s, o)
	return o
}

func receivedSlice(s *discoveryv1.EndpointSlice) *object.EndpointSlice {
	o := new(object.EndpointSlice)
	transfer(s, o)
	return o
}

func transfer(from interface{ Marshal() ([]byte, error) }, to interface{ Unmarshal(b []byte) error }) {
	b, err := from.Marshal()
	if err != nil {
		panic(err)
	}
	if err := to.Unmarshal(b); err != nil {
		panic(err)
	}
}

func tcp(number, node int32) corev1.ServicePort {
	return corev1.ServicePort{Name: "t", Protocol: corev1.ProtocolTCP, Port: number, NodePort: node}
}

func udp(number, node int32) corev1.ServicePort {
	return corev1.ServicePort{Name: "u", Protocol: corev1.ProtocolUDP, Port: number, NodePort: node}
}

func slice(service, address string) *discoveryv1.EndpointSlice {
	name, proto, number := "t", corev1.ProtocolTCP, int32(8080)
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: service + "-x", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{address}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: service + "-pod"},
		}},
		Ports: []discoveryv1.EndpointPort{{Name: &name, Protocol: &proto, Port: &number}},
	}
}

func source(t *testing.T, e *fake, o Options) *Source {
	t.Helper()
	if o.Kubeconfigs == nil {
		o.Kubeconfigs = []string{e.kubeconfig}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Retry.MinDelay = cmp.Or(o.Retry.MinDelay, 5*time.Millisecond)
	o.Retry.MaxDelay = cmp.Or(o.Retry.MaxDelay, 20*time.Millisecond)
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// 53/TCP and 53/UDP are two ports, and Services that were there before are listed.
// The incumbent keeps one of the two, and misses what was there.
func TestTCPAndUDPAreTwoPorts(t *testing.T) {
	e := newFake(t)
	e.put(svc("dns", corev1.ServiceTypeNodePort, tcp(53, 30053), udp(53, 30053)))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30053", "udp 0.0.0.0:30053")
	e.watched()
	e.put(svc("dns", corev1.ServiceTypeNodePort, udp(53, 30053)))
	enginetest.WantKeys(t, f, "udp 0.0.0.0:30053")
	e.remove("default/dns")
	enginetest.WantKeys(t, f)
}

// A list that says what is known, and events that change no port, say nothing.
// The incumbent tells every port anew at each resync.
func TestRepeatedObjectsAreNoChange(t *testing.T) {
	e := newFake(t)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	e.put(slice("web", "10.1.0.2"))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	e.watched()
	f.Lock()
	applied, moved := f.Applied, len(f.Moved)
	f.Unlock()
	for i := range 10 {
		s := svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080))
		s.Annotations = map[string]string{"touched": strconv.Itoa(i)}
		e.put(s)
		e.put(slice("web", "10.1.0.2"))
	}
	e.cut("") // it watches again
	e.watched()
	gone := metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: 410, Reason: metav1.StatusReasonExpired}
	e.mu.Lock()
	lists := e.lists
	e.mu.Unlock()
	e.cut(e.encode("ERROR", gone))
	enginetest.Eventually(t, func() error { // and it lists again
		e.mu.Lock()
		defer e.mu.Unlock()
		return enginetest.ErrIf(e.lists < lists+2)
	})
	e.watched()
	e.put(svc("more", corev1.ServiceTypeNodePort, tcp(80, 30081)))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081")
	f.Lock()
	defer f.Unlock()
	if f.Applied != applied+1 || len(f.Moved) != moved+1 || f.Replaced != 1 || f.Err != nil {
		t.Errorf("%d changes, moved %q, %d sets, stale %v; want one change and one set", f.Applied-applied, f.Moved, f.Replaced, f.Err)
	}
}

// Tries that fail leave nothing behind. Each one leaks an informer in the incumbent.
func TestFailedTriesLeakNothing(t *testing.T) {
	e := newFake(t)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	e.stop()
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MinDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond}}))
	enginetest.WantStale(t, f, "connection refused")
	goroutines := runtime.NumGoroutine()
	for _, status := range []int{403, 401, 500} {
		e.mu.Lock()
		e.deny["services"] = status
		e.mu.Unlock()
		e.start()
		enginetest.WantStale(t, f, "services")
		time.Sleep(50 * time.Millisecond) // many tries
		e.stop()
		enginetest.WantStale(t, f, "connection refused")
	}
	enginetest.Eventually(t, func() error {
		if n := runtime.NumGoroutine(); n > goroutines+8 {
			return fmt.Errorf("%d goroutines, had %d", n, goroutines)
		}
		return nil
	})
	e.mu.Lock()
	e.deny["services"] = 0
	e.mu.Unlock()
	e.start()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
}

// Waiting for a kubeconfig ends with the context, at once. The incumbent hangs on SIGTERM.
func TestWaitForKubeconfigEndsWithContext(t *testing.T) {
	s := source(t, nil, Options{Kubeconfigs: []string{"/nowhere/kubeconfig"}, Retry: engine.Retry{MinDelay: time.Hour, MaxDelay: time.Hour}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	f := new(enginetest.Feed)
	go func() { done <- s.Run(ctx, f) }()
	enginetest.WantKeys(t, f)
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("still waiting")
	}
}

// A load balancer is open on its addresses and its node port, and external IPs
// are too. The incumbent publishes the first of these alone.
func TestOpenPortsByServiceType(t *testing.T) {
	type tc struct {
		name string
		s    *corev1.Service
		want []string
	}
	lb := svc("lb", corev1.ServiceTypeLoadBalancer, tcp(80, 30080))
	lb.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.168.1.5"}, {Hostname: "lb.example"}, {IP: "fd00::5"}}
	ext := svc("ext", corev1.ServiceTypeClusterIP, tcp(80, 0), udp(53, 0))
	ext.Spec.ExternalIPs = []string{"192.168.1.6", "192.168.1.6"}
	dual := svc("dual", corev1.ServiceTypeNodePort, tcp(80, 30080))
	dual.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
	dual.Spec.ClusterIPs = []string{"fd00::7", "10.96.0.7"}
	old := svc("old", corev1.ServiceTypeNodePort, tcp(80, 30080))
	old.Spec.ClusterIP, old.Spec.ClusterIPs, old.Spec.IPFamilies = "fd00::7", nil, nil
	noNode := svc("noNode", corev1.ServiceTypeLoadBalancer, tcp(80, 0))
	noNode.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.168.1.5"}}
	name := svc("name", corev1.ServiceTypeExternalName, tcp(80, 0))
	name.Spec.ExternalName = "elsewhere"
	plain := svc("plain", corev1.ServiceTypeNodePort, corev1.ServicePort{Port: 80, NodePort: 30080})
	for _, c := range []tc{
		{"load balancer", lb, []string{"tcp 0.0.0.0:30080", "tcp 192.168.1.5:80", "tcp [fd00::5]:80"}},
		{"load balancer without node port", noNode, []string{"tcp 192.168.1.5:80"}},
		{"external IPs", ext, []string{"tcp 192.168.1.6:80", "udp 192.168.1.6:53"}},
		{"both families", dual, []string{"tcp 0.0.0.0:30080", "tcp [::]:30080"}},
		{"family of its address", old, []string{"tcp [::]:30080"}},
		{"cluster only", svc("c", corev1.ServiceTypeClusterIP, tcp(80, 0)), nil},
		{"name", name, nil},
		{"protocol left out", plain, []string{"tcp 0.0.0.0:30080"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bs, warnings := compact(received(c.s)).declare("", nil, false)
			var got []string
			for _, b := range bs {
				got = append(got, b.Key.String())
				if b.Owner.Kind != port.OwnerService || b.Owner.ID != "default/"+c.s.Name || b.Owner.Labels["app"] != c.s.Name {
					t.Errorf("owner is %+v", b.Owner)
				}
				if len(b.Dial) == 0 {
					t.Errorf("%s is not dialled, though endpoints are not known", b.Key)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, c.want) || len(warnings) > 0 {
				t.Errorf("declared %q (warnings %q), want %q", got, warnings, c.want)
			}
		})
	}
}

// Annotations that ask for something count as labels, and before them.
func TestAnnotations(t *testing.T) {
	s := svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080))
	s.Labels["fairlead.expose"] = "yes"
	s.Annotations = map[string]string{"fairlead.expose": "no", "fairlead.host-port": "30080=8080", "example.com/other": "x"}
	bs, _ := compact(received(s)).declare("", nil, false)
	want := map[string]string{"app": "web", "fairlead.expose": "no", "fairlead.host-port": "30080=8080"}
	if len(bs) != 1 || !maps.Equal(bs[0].Owner.Labels, want) {
		t.Errorf("%+v", bs)
	}
}

func TestBadServices(t *testing.T) {
	big := svc("big", corev1.ServiceTypeNodePort, tcp(70000, 30080), tcp(80, 30081))
	sctp := svc("sctp", corev1.ServiceTypeNodePort, corev1.ServicePort{Protocol: corev1.ProtocolSCTP, Port: 80, NodePort: 30080})
	addr := svc("addr", corev1.ServiceTypeNodePort, tcp(80, 30081))
	addr.Spec.ExternalIPs = []string{"nowhere"}
	for _, c := range []struct {
		s       *corev1.Service
		want    int
		warning string
	}{{big, 1, "want 1 to 65535"}, {sctp, 0, "80/sctp is not supported"}, {addr, 1, `"nowhere" is no address`}} {
		bs, w := compact(received(c.s)).declare("", nil, false)
		if len(bs) != c.want || len(w) != 1 || !strings.Contains(w[0], c.warning) || !strings.Contains(w[0], "default/"+c.s.Name) {
			t.Errorf("%s: declared %v with warnings %q", c.s.Name, bs, w)
		}
	}
}

// A load balancer that is limited to some clients is not opened to all.
func TestSourceRanges(t *testing.T) {
	s := svc("lb", corev1.ServiceTypeLoadBalancer, tcp(80, 30080))
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.168.1.5"}}
	s.Spec.LoadBalancerSourceRanges = []string{" 10.0.0.0/8 "}
	bs, _ := compact(received(s)).declare("", nil, false)
	for _, b := range bs {
		limited := b.Port == 80
		if (b.Withheld == port.Because(port.FromSources, "10.0.0.0/8")) != limited {
			t.Errorf("%s: withheld %q", b.Key, b.Withheld)
		}
		if limited && (len(b.Dial) != 1 || b.Dial[0] != netip.MustParseAddrPort("192.168.1.5:80")) {
			t.Errorf("%s is dialled at %v, around the limit", b.Key, b.Dial)
		}
	}
	s.Spec.LoadBalancerSourceRanges = []string{"0.0.0.0/0"}
	bs, _ = compact(received(s)).declare("", nil, false)
	for _, b := range bs {
		if !b.Withheld.IsZero() {
			t.Errorf("%s: withheld %q though open to all", b.Key, b.Withheld)
		}
	}
}

// A server could name them to have a cloud's metadata, or the guest itself, dialled, or to have
// the ports of the guest's own servers.
func TestAddressesThatNoServiceHasAreRefused(t *testing.T) {
	never := []string{
		"169.254.169.254", "127.0.0.1", "127.8.8.8", "224.0.0.1", "239.1.1.1", "0.0.0.0",
		"::1", "::", "fe80::1", "fe80::1%eth0", "ff02::1", "ff05::2", "::ffff:127.0.0.1",
	}
	s := svc("web", corev1.ServiceTypeLoadBalancer, tcp(80, 30080))
	s.Spec.ClusterIP, s.Spec.ClusterIPs = never[0], append(slices.Clone(never), "10.96.0.9")
	s.Spec.ExternalIPs = append(slices.Clone(never), "192.168.1.6")
	for _, ip := range append(slices.Clone(never), "192.168.1.5") {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip})
	}
	e := compactSlice(receivedSlice(slice("web", "169.254.169.254")))
	bs, warnings := compact(received(s)).declare("", []endpoints{e, compactSlice(receivedSlice(slice("web", "10.1.0.2")))}, true)
	var got []string
	for _, b := range bs {
		got = append(got, fmt.Sprint(b.Key, b.Dial))
	}
	if want := []string{
		"tcp 192.168.1.6:80 [10.96.0.9:80 192.168.1.6:80 10.1.0.2:8080]", "tcp 192.168.1.5:80 [10.96.0.9:80 192.168.1.5:80 10.1.0.2:8080]",
		"tcp 0.0.0.0:30080 [10.96.0.9:80 127.0.0.1:30080 10.1.0.2:8080]",
	}; !slices.Equal(got, want) {
		t.Errorf("declared %q, want %q", got, want)
	}
	if len(warnings) != 3*len(never) || !strings.Contains(warnings[0], `"169.254.169.254" is no address of a Service`) {
		t.Errorf("%d warnings: %q", len(warnings), warnings)
	}
}

// Endpoints decide whether, and where, a port is dialled.
func TestEndpoints(t *testing.T) {
	e := newFake(t)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	s := source(t, e, Options{})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	e.watched()
	check := func(dial, detail string) {
		t.Helper()
		enginetest.Eventually(t, func() error {
			b := f.Find("tcp 0.0.0.0:30080")
			if got := fmt.Sprint(b.Dial); got != dial || strings.Contains(b.Detail.String(), "nothing serves this") != (detail != "") {
				return fmt.Errorf("dialled at %s, detail %q; want %s", got, b.Detail, dial)
			}
			return nil
		})
	}
	check("[]", "nothing")
	e.put(slice("web", "10.1.0.2"))
	check("[10.96.0.7:80 127.0.0.1:30080 10.1.0.2:8080]", "")
	enginetest.Eventually(t, func() error {
		if o, ok := s.Facts().ByAddress(netip.MustParseAddr("10.1.0.2")); !ok || o.Name != "web-pod" || o.Kind != port.OwnerContainer {
			return fmt.Errorf("10.1.0.2 is %+v's, %v", o, ok)
		}
		return nil
	})
	no := false
	unready := slice("web", "10.1.0.2")
	unready.Endpoints[0].Conditions.Ready = &no
	e.put(unready)
	check("[]", "nothing")
	e.put(slice("web", "127.0.0.1")) // a pod in the network of its node
	check("[10.96.0.7:80 127.0.0.1:30080 127.0.0.1:8080]", "")
	if o, ok := s.Facts().ByAddress(netip.MustParseAddr("127.0.0.1")); ok {
		t.Errorf("this machine's address is %+v's", o)
	}
	enginetest.Eventually(t, func() error {
		if _, ok := s.Facts().ByAddress(netip.MustParseAddr("10.1.0.2")); ok {
			return errors.New("an address that was given up is still a pod's")
		}
		return nil
	})
	e.remove("default/web-x")
	check("[]", "nothing")
	other := "other"
	wrong := slice("web", "10.1.0.2")
	wrong.Ports[0].Name = &other
	e.put(wrong)
	check("[]", "nothing")
}

// Endpoints that may not be read are a warning, and hide no port.
func TestEndpointsDenied(t *testing.T) {
	e := newFake(t)
	e.deny["endpointslices"] = 403
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		if len(f.Warnings) != 1 || !strings.Contains(f.Warnings[0], "endpointslices is denied") || f.Err != nil {
			return fmt.Errorf("warnings %q, stale %v", f.Warnings, f.Err)
		}
		return nil
	})
}

// What the server says wrongly as a whole is named, and nothing is taken back.
func TestUnusableServer(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(e *fake)
		text string
	}{
		{"denied", func(e *fake) { e.deny["services"] = 403 }, "services is denied"},
		{"unauthorized", func(e *fake) { e.deny["services"] = 401 }, "services is denied"},
		{"slow list", func(e *fake) { e.hang["list services"] = true }, "no answer within 100ms"},
		{"slow watch", func(e *fake) { e.hang["watch services"] = true }, "watch: no answer within 100ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			c.make(e)
			f := enginetest.Run(t, source(t, e, Options{Timeout: 100 * time.Millisecond}))
			enginetest.WantStale(t, f, c.text)
			enginetest.WantStale(t, f, "kubeconfig "+e.kubeconfig)
		})
	}
}

// A watch that ends, or ends in the middle of an event, loses nothing.
func TestTruncatedWatchStream(t *testing.T) {
	for _, last := range []string{"", `{"type":"DELETED","obj`, "not json\n", `{"type":"DELETED","object":{"kind":"Service","apiVersion":"v1","spec":{"ports":[{"port":"x"}]}}}` + "\n"} {
		t.Run("after "+last, func(t *testing.T) {
			e := newFake(t)
			e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
			e.watched()
			e.cut(last)
			// What happens while nobody watches is in the next list, or the next watch's start.
			e.watched()
			e.put(svc("more", corev1.ServiceTypeNodePort, tcp(80, 30081)))
			enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081")
			f.Lock()
			defer f.Unlock()
			if len(f.Moved) != 2 {
				t.Errorf("moved %q, want two appearances", f.Moved)
			}
		})
	}
}

// The ports of a server that stays away are withdrawn after the grace period.
func TestGrace(t *testing.T) {
	e := newFake(t)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	e.put(slice("web", "10.1.0.2"))
	s := source(t, e, Options{Retry: engine.Retry{Grace: 200 * time.Millisecond}})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	e.stop()
	enginetest.WantKeys(t, f)
	enginetest.WantStale(t, f, "declared ports withdrawn after 200ms")
	if _, ok := s.Facts().ByAddress(netip.MustParseAddr("10.1.0.2")); ok {
		t.Error("a fact outlived the grace period")
	}
	e.start()
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
}

// Others reach the server that the source uses, by the same pointer while nothing changes, and no
// server as long as the Services of another one are reported.
func TestAccessFollowsTheSource(t *testing.T) {
	e, other := serves(newFake(t), "web"), serves(newFake(t), "db", "more")
	s := source(t, e, Options{})
	wants := func(what, host, text string) (conf *rest.Config) {
		t.Helper()
		enginetest.Eventually(t, func() (err error) {
			conf, _, err = s.Access()
			switch {
			case text != "" && (err == nil || !strings.Contains(err.Error(), text)):
				return fmt.Errorf("%s: error %v, want %q", what, err, text)
			case text == "" && (err != nil || !strings.HasSuffix(conf.Host, host)):
				return fmt.Errorf("%s: %v, %v, want %s", what, conf, err, host)
			}
			return nil
		})
		return conf
	}
	alone := wants("before it runs", e.addr, "")
	if again := wants("before it runs, again", e.addr, ""); again != alone {
		t.Error("the pointer is another one without a change")
	}
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	if running := wants("running", e.addr, ""); running != alone {
		t.Error("the pointer is another one once the source runs")
	}
	e.write(e.kubeconfig, `token: "2"`)
	enginetest.Eventually(t, func() error { return enginetest.ErrIf(wants("other credentials", e.addr, "") == alone) })
	other.mu.Lock()
	other.hang["list services"] = true
	other.mu.Unlock()
	other.write(e.kubeconfig, "")
	wants("another server, not listed", "", "not listed yet")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
	other.mu.Lock()
	other.hang["list services"] = false
	other.mu.Unlock()
	other.stop() // ends the request that hangs
	other.start()
	wants("another server", other.addr, "")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081")
	if err := os.WriteFile(e.kubeconfig, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	wants("a file that is being written", other.addr, "")
}

// A server that does not answer is tried at once when something listens on its port.
func TestListenerOnTheServersPortEndsTheWait(t *testing.T) {
	e := newFake(t)
	e.put(svc("web", corev1.ServiceTypeNodePort, tcp(80, 30080)))
	e.stop()
	listens := make(chan struct{})
	f := enginetest.Run(t, source(t, e, Options{
		Retry: engine.Retry{MinDelay: time.Hour, MaxDelay: 2 * time.Hour},
		Listens: func(ctx context.Context, port uint16) error {
			if at := fmt.Sprint("127.0.0.1:", port); at != e.addr {
				t.Errorf("waits for %s, want %s", at, e.addr)
			}
			select {
			case <-listens:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		},
	}))
	enginetest.WantStale(t, f, "connection refused")
	e.start()
	listens <- struct{}{}
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:30080")
}

// A hundred restarts leave no goroutine and no connection behind, and move nothing.
func TestHundredRestarts(t *testing.T) {
	e := newFake(t)
	for i := range 20 {
		e.put(svc(fmt.Sprint("web", i), corev1.ServiceTypeNodePort, tcp(80, int32(30080+i))))
		e.put(slice(fmt.Sprint("web", i), fmt.Sprint("10.1.0.", i)))
	}
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MinDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond}}))
	i := 0
	enginetest.Restarts(t, func() {
		e.watched()
		e.stop()
		enginetest.Eventually(t, func() error {
			e.mu.Lock()
			defer e.mu.Unlock()
			return enginetest.ErrIf(len(e.watches) > 0)
		})
		if i++; i%2 == 0 {
			enginetest.WantStale(t, f, "connection refused")
		}
		e.start()
	})
	f.Lock()
	defer f.Unlock()
	if len(f.Moved) != 20 {
		t.Errorf("moved %q, want twenty appearances", f.Moved)
	}
}

// An expired client certificate is named before it is tried.
func TestExpiredCertificate(t *testing.T) {
	cert, key := enginetest.ExpiredCertificate(t)
	e := newFake(t)
	e.scheme = "https" // else the certificate is of no account
	e.write(e.kubeconfig, "client-certificate-data: "+base64.StdEncoding.EncodeToString(cert)+", client-key-data: "+base64.StdEncoding.EncodeToString(key))
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantStale(t, f, `the client certificate of "me" expired on`)
}

func TestOptions(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Kubeconfigs: []string{"x"}, Logger: log}, "absolute path"},
		{Options{Namespaces: []string{""}, Logger: log}, "namespace"},
		{Options{Selector: "a in (", Logger: log}, "selector"},
		{Options{Timeout: -1, Logger: log}, "timeout"},
		{Options{}, "logger"},
	} {
		if _, err := New(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("New(%+v) = %v, want %q", c.o, err, c.want)
		}
	}
	env := map[string]string{"KUBECONFIG": "/a:/b"}
	s, err := New(Options{Logger: log, Getenv: func(k string) string { return env[k] }})
	if err != nil || !slices.Equal(s.o.Kubeconfigs, []string{"/a", "/b"}) || s.inCluster {
		t.Errorf("New = %+v, %v", s, err)
	}
	env = map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
	if s, err = New(Options{Logger: log, Getenv: func(k string) string { return env[k] }}); err != nil || !s.inCluster {
		t.Errorf("New = %+v, %v; want the service account", s, err)
	}
}

// Whoever asks for an owner may hold locks: nothing is read then. An error while the addresses are
// read makes no pod's address one of this machine.
func TestAddressesOfThisMachineAreReadBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own, pod := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.42.0.5")
		read, failure := 0, error(nil)
		f := facts{addrs: func() ([]net.Addr, error) {
			read++
			return []net.Addr{&net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(24, 32)}}, failure
		}}
		f.Put("a", engine.Fact{Owner: port.Owner{Name: "web"}, Addresses: []netip.Addr{own, pod}})
		if _, ok := f.ByAddress(pod); ok {
			t.Error("an address that may be this machine's is a pod's")
		}
		f.readLocal()
		for want := 1; want <= 2; want++ {
			f.readLocal()
			for range 100 {
				_, isOwn := f.ByAddress(own)
				if _, isPod := f.ByAddress(pod); isOwn || !isPod || read != want {
					t.Fatalf("the machine's own address: %v, the pod's: %v; read %d times, want %d", isOwn, isPod, read, want)
				}
			}
			failure = errors.New("netlink: no buffer space")
			time.Sleep(2 * localFor)
		}
	})
}

// Nobody listens at the server's address: that is told from a server that fails.
func TestRefusedServer(t *testing.T) {
	e := newFake(t)
	s := source(t, e, Options{Timeout: 50 * time.Millisecond})
	st := newState(s.o.Logger, &enginetest.Feed{}, &s.facts)
	e.hang["list services"], e.hang["list endpointslices"] = true, true
	if err := s.session(t.Context(), st, func() {}); errors.Is(err, engine.ErrRefused) {
		t.Errorf("a server that hangs: %v, want another error", err)
	}
	e.stop()
	if err := s.session(t.Context(), st, func() {}); !errors.Is(err, engine.ErrRefused) {
		t.Errorf("nobody listens: %v, want ErrRefused", err)
	}
}

// A server that was listed and refuses now is not forgotten: nothing else knows of the
// Services whose rules are left.
func TestRefusingListedServerIsKept(t *testing.T) {
	e := newFake(t)
	o := Options{Memory: engine.Memory(filepath.Join(t.TempDir(), "kube-owners.json"))}
	s := source(t, e, o)
	st := newState(s.o.Logger, &enginetest.Feed{}, &s.facts)
	listed, done := make(chan struct{}), make(chan error, 1)
	up := sync.OnceFunc(func() { close(listed) })
	go func() { done <- s.session(t.Context(), st, up) }()
	<-listed
	e.stop()
	if err := <-done; err == nil {
		t.Error("a session ended without an error")
	}
	restarted := source(t, e, o)
	restarted.remember()
	for name, s := range map[string]*Source{"the same agent": s, "a restarted agent": restarted} {
		err := s.session(t.Context(), newState(s.o.Logger, &enginetest.Feed{}, &s.facts), up)
		if !errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, engine.ErrRefused) {
			t.Errorf("%s: %v, want a refusal that is not ErrRefused", name, err)
		}
	}
}

// A kubeconfig that others can change does not hide a good one that comes later.
func TestRefusedKubeconfigIsPassedOver(t *testing.T) {
	e := newFake(t)
	refused := filepath.Join(filepath.Dir(e.kubeconfig), "refused")
	e.write(refused, "")
	if err := os.Chmod(refused, 0o666); err != nil {
		t.Fatal(err)
	}
	conf, err := source(t, e, Options{Kubeconfigs: []string{refused, e.kubeconfig}}).load()
	if want := "kubeconfig " + e.kubeconfig; err != nil || conf.origin != want {
		t.Errorf("loaded %q, %v, want %s", conf.origin, err, want)
	}
}

// A kubeconfig that is refused is no reason to expect a server for ever, unless one was
// listed. The error names the command that mends it.
func TestRefusedKubeconfigIsForgotten(t *testing.T) {
	e := newFake(t)
	for name, spoil := range map[string]struct{ path, field string }{
		"the kubeconfig":       {e.kubeconfig, ""},
		"a file that it names": {filepath.Join(filepath.Dir(e.kubeconfig), "token"), "tokenFile: "},
	} {
		t.Run(name, func(t *testing.T) {
			user := ""
			if spoil.field != "" {
				user = spoil.field + spoil.path
			}
			e.write(e.kubeconfig, user)
			if spoil.path != e.kubeconfig {
				if err := os.WriteFile(spoil.path, []byte("secret"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Chmod(spoil.path, 0o666); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = os.Chmod(spoil.path, 0o600) }()
			s := source(t, e, Options{Kubeconfigs: []string{"/nowhere/kubeconfig", e.kubeconfig}})
			session := func() error {
				return s.session(t.Context(), newState(s.o.Logger, &enginetest.Feed{}, &s.facts), func() {})
			}
			err := session()
			if !errors.Is(err, engine.ErrRefused) || errors.Is(err, engine.ErrAbsent) {
				t.Errorf("%v, want ErrRefused alone", err)
			}
			if want := "chmod go-w " + spoil.path; !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%v does not name %q", err, want)
			}
			s.listed.Store(true)
			if err := session(); err == nil || errors.Is(err, engine.ErrRefused) {
				t.Errorf("a server was listed: %v, want an error that is not ErrRefused", err)
			}
		})
	}
}

func TestConnectionIsTraced(t *testing.T) {
	e := newFake(t)
	e.hang["list services"], e.hang["list endpointslices"] = true, true
	s := source(t, e, Options{Timeout: 50 * time.Millisecond})
	enginetest.ConnectionIsTraced(t, e.kubeconfig, func(ctx context.Context, _ ...string) error {
		return s.session(ctx, newState(s.o.Logger, &enginetest.Feed{}, &s.facts), func() {})
	})
}
