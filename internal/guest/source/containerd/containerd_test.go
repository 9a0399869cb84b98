// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	namespacesapi "github.com/containerd/containerd/api/services/namespaces/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	apitypes "github.com/containerd/containerd/api/types"
	taskapi "github.com/containerd/containerd/api/types/task"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// fake is an engine as far as this source asks. Containers are by "namespace/id".
type fake struct {
	t      *testing.T
	socket string
	stop   func() // the server

	mu         sync.Mutex
	containers map[string]*containersapi.Container
	status     map[string]taskapi.Status
	streams    map[chan *apitypes.Envelope]bool
	hang       map[string]bool // methods that never answer
	// onList runs inside each list of tasks, once it has been read.
	onList func()
}

func newFake(t *testing.T) *fake {
	f := &fake{
		t: t, socket: filepath.Join(t.TempDir(), "c.sock"),
		containers: make(map[string]*containersapi.Container), status: make(map[string]taskapi.Status),
		streams: make(map[chan *apitypes.Envelope]bool), hang: make(map[string]bool),
	}
	f.start()
	t.Cleanup(func() { f.stop() })
	return f
}

func (f *fake) start() {
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	srv := grpc.NewServer()
	namespacesapi.RegisterNamespacesServer(srv, namespacesServer{f: f})
	containersapi.RegisterContainersServer(srv, containersServer{f: f})
	tasksapi.RegisterTasksServer(srv, tasksServer{f: f})
	eventsapi.RegisterEventsServer(srv, eventsServer{f: f})
	versionapi.RegisterVersionServer(srv, versionServer{f: f})
	f.stop = enginetest.Serve(func() error { return srv.Serve(l) }, srv.Stop)
}

// may blocks if the method is to hang.
func (f *fake) may(ctx context.Context, method string) error {
	f.mu.Lock()
	hang := f.hang[method]
	f.mu.Unlock()
	if !hang {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func namespaceOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(md.Get("containerd-namespace"), "+")
}

type versionServer struct {
	versionapi.UnimplementedVersionServer
	f *fake
}

func (s versionServer) Version(ctx context.Context, _ *emptypb.Empty) (*versionapi.VersionResponse, error) {
	return &versionapi.VersionResponse{Version: "2.4.2"}, s.f.may(ctx, "Version")
}

type namespacesServer struct {
	namespacesapi.UnimplementedNamespacesServer
	f *fake
}

func (s namespacesServer) List(_ context.Context, _ *namespacesapi.ListNamespacesRequest) (*namespacesapi.ListNamespacesResponse, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	seen := make(map[string]bool)
	r := &namespacesapi.ListNamespacesResponse{}
	for id := range s.f.containers {
		ns, _, _ := strings.Cut(id, "/")
		if !seen[ns] {
			seen[ns] = true
			r.Namespaces = append(r.Namespaces, &namespacesapi.Namespace{Name: ns})
		}
	}
	return r, nil
}

type containersServer struct {
	containersapi.UnimplementedContainersServer
	f *fake
}

func (s containersServer) ListStream(_ *containersapi.ListContainersRequest, out containersapi.Containers_ListStreamServer) error {
	s.f.mu.Lock()
	var all []*containersapi.Container
	for id, c := range s.f.containers {
		if strings.HasPrefix(id, namespaceOf(out.Context())+"/") {
			all = append(all, c)
		}
	}
	s.f.mu.Unlock()
	for _, c := range all {
		if err := out.Send(&containersapi.ListContainerMessage{Container: c}); err != nil {
			return err
		}
	}
	return nil
}

func (s containersServer) Get(ctx context.Context, r *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	c, ok := s.f.containers[namespaceOf(ctx)+"/"+r.GetID()]
	if !ok {
		return nil, status.Error(codes.NotFound, "not found")
	}
	return &containersapi.GetContainerResponse{Container: c}, nil
}

type tasksServer struct {
	tasksapi.UnimplementedTasksServer
	f *fake
}

func (s tasksServer) List(ctx context.Context, _ *tasksapi.ListTasksRequest) (*tasksapi.ListTasksResponse, error) {
	if err := s.f.may(ctx, "Tasks.List"); err != nil {
		return nil, err
	}
	r := &tasksapi.ListTasksResponse{}
	s.f.mu.Lock()
	for id, st := range s.f.status {
		if ns, name, _ := strings.Cut(id, "/"); ns == namespaceOf(ctx) {
			r.Tasks = append(r.Tasks, &taskapi.Process{ID: name, Status: st})
		}
	}
	on := s.f.onList
	s.f.mu.Unlock()
	if on != nil {
		on()
	}
	return r, nil
}

func (s tasksServer) Get(ctx context.Context, r *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	st, ok := s.f.status[namespaceOf(ctx)+"/"+r.GetContainerID()]
	if !ok {
		return nil, status.Error(codes.NotFound, "no task")
	}
	return &tasksapi.GetResponse{Process: &taskapi.Process{ContainerID: r.GetContainerID(), Status: st}}, nil
}

type eventsServer struct {
	eventsapi.UnimplementedEventsServer
	f *fake
}

func (s eventsServer) Subscribe(_ *eventsapi.SubscribeRequest, out eventsapi.Events_SubscribeServer) error {
	c := make(chan *apitypes.Envelope, 100)
	s.f.mu.Lock()
	s.f.streams[c] = true
	s.f.mu.Unlock()
	defer func() {
		s.f.mu.Lock()
		delete(s.f.streams, c)
		s.f.mu.Unlock()
	}()
	for {
		select {
		case e, ok := <-c:
			if !ok {
				return nil
			}
			if err := out.Send(e); err != nil {
				return err
			}
		case <-out.Context().Done():
			return nil
		}
	}
}

func (f *fake) send(namespace, topic string, m proto.Message) {
	f.t.Helper()
	a, err := anypb.New(m)
	if err != nil {
		f.t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.streams {
		c <- &apitypes.Envelope{Timestamp: timestamppb.Now(), Namespace: namespace, Topic: topic, Event: a}
	}
}

func (f *fake) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.streams {
		close(c)
		delete(f.streams, c)
	}
}

// put makes the engine have a running container with these labels.
func (f *fake) put(id string, labels map[string]string) *containersapi.Container {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, name, _ := strings.Cut(id, "/")
	c := &containersapi.Container{ID: name, Labels: labels}
	f.containers[id], f.status[id] = c, taskapi.Status_RUNNING
	return c
}

func (f *fake) nerdctl(id, name, ports string) {
	f.put(id, map[string]string{nerdctlName: name, nerdctlPorts: ports, nerdctlNetworks: `["bridge"]`})
}

// started waits for a stream of events to stand, and says that id started.
func (f *fake) started(id string) {
	f.t.Helper()
	f.subscribed()
	ns, name, _ := strings.Cut(id, "/")
	f.send(ns, taskStart, &eventtypes.TaskStart{ContainerID: name})
}

func (f *fake) subscribed() {
	f.t.Helper()
	enginetest.Eventually(f.t, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		return enginetest.ErrIf(len(f.streams) == 0)
	})
}

func (f *fake) exited(id, exec string) {
	ns, name, _ := strings.Cut(id, "/")
	if exec == "" {
		exec = name
		f.mu.Lock()
		f.status[id] = taskapi.Status_STOPPED
		f.mu.Unlock()
	}
	f.send(ns, taskExit, &eventtypes.TaskExit{ContainerID: name, ID: exec})
}

func source(t *testing.T, e *fake, o Options) *Source {
	t.Helper()
	if o.Sockets == nil {
		o.Sockets = []string{e.socket}
	}
	o.CNIResults = cmp.Or(o.CNIResults, filepath.Join(t.TempDir(), "none"))
	o.Logger = slog.New(slog.DiscardHandler)
	o.Retry.MinDelay = cmp.Or(o.Retry.MinDelay, 5*time.Millisecond)
	o.Retry.MaxDelay = cmp.Or(o.Retry.MaxDelay, 20*time.Millisecond)
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const ports80 = `[{"HostPort":80,"ContainerPort":8080,"Protocol":"tcp","HostIP":"127.0.0.1"},{"HostPort":53,"ContainerPort":53,"Protocol":"udp","HostIP":"0.0.0.0"}]`

var keys80 = []string{"tcp 127.0.0.1:80", "udp 0.0.0.0:53"}

// Every namespace is watched, or those that are configured; never Docker's own.
// The incumbent watches the default one.
func TestEveryNamespaceIsWatched(t *testing.T) {
	for _, c := range []struct {
		namespaces []string
		want       []string
	}{
		{nil, []string{"tcp 0.0.0.0:1", "tcp 0.0.0.0:2"}},
		{[]string{"other"}, []string{"tcp 0.0.0.0:2"}},
		{[]string{"moby", "default"}, []string{"tcp 0.0.0.0:1", "tcp 0.0.0.0:3"}},
	} {
		e := newFake(t)
		f := enginetest.Run(t, source(t, e, Options{Namespaces: c.namespaces}))
		enginetest.WantKeys(t, f)
		for i, ns := range []string{"default", "other", "moby"} {
			e.nerdctl(ns+"/x", "x", fmt.Sprintf(`[{"HostPort":%d,"ContainerPort":80,"Protocol":"tcp"}]`, i+1))
			e.started(ns + "/x")
		}
		enginetest.WantKeys(t, f, c.want...)
	}
}

// An exit while the list is read leaves nothing behind, as it does in the incumbent.
func TestExitDuringListIsNotLost(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "web", ports80)
	var once sync.Once
	e.onList = func() {
		once.Do(func() {
			e.subscribed()
			e.exited("default/x", "")
		})
	}
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f)
}

// The end of an exec is not the container's. It costs the incumbent's container
// its ports.
func TestExecExitIsIgnored(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "web", ports80)
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, keys80...)
	e.subscribed()
	e.exited("default/x", "exec-1")
	e.send("default", taskDelete, &eventtypes.TaskDelete{ContainerID: "x", ID: "exec-1"})
	e.nerdctl("default/y", "y", `[{"HostPort":9,"ContainerPort":9,"Protocol":"tcp"}]`)
	e.started("default/y") // behind it in the stream
	enginetest.WantKeys(t, f, append([]string{"tcp 0.0.0.0:9"}, keys80...)...)
	enginetest.WantNoneRemoved(t, f)
	e.exited("default/x", "")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:9")
}

// An update of a stopped container publishes nothing, as it does in the incumbent.
func TestUpdateOfStoppedContainerIsIgnored(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "web", ports80)
	e.status["default/x"] = taskapi.Status_STOPPED
	e.nerdctl("default/created", "c", ports80)
	e.status["default/created"] = taskapi.Status_CREATED
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f)
	e.subscribed()
	e.send("default", containerUpdate, &eventtypes.ContainerUpdate{ID: "x"})
	e.send("default", containerUpdate, &eventtypes.ContainerUpdate{ID: "created"})
	e.nerdctl("default/y", "y", `[{"HostPort":9,"ContainerPort":9,"Protocol":"tcp"}]`)
	e.started("default/y")
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:9")
}

// An engine whose shim is slow to answer does not know whether a container runs:
// until it does, no port is withdrawn and none appears.
func TestUnknownTaskStateKeepsPorts(t *testing.T) {
	e := newFake(t)
	is := func(id string, st taskapi.Status) { e.mu.Lock(); e.status[id] = st; e.mu.Unlock() }
	e.nerdctl("default/x", "web", ports80)
	e.nerdctl("default/stopped", "s", `[{"HostPort":7,"ContainerPort":7,"Protocol":"tcp"}]`)
	is("default/stopped", taskapi.Status_STOPPED)
	f := enginetest.Run(t, source(t, e, Options{Audit: 10 * time.Millisecond}))
	enginetest.WantKeys(t, f, keys80...)
	e.subscribed()
	is("default/x", taskapi.Status_UNKNOWN)
	is("default/stopped", taskapi.Status_UNKNOWN)
	e.send("default", containerUpdate, &eventtypes.ContainerUpdate{ID: "x"})
	e.send("default", containerUpdate, &eventtypes.ContainerUpdate{ID: "stopped"})
	e.nerdctl("default/y", "y", `[{"HostPort":9,"ContainerPort":9,"Protocol":"tcp"}]`)
	e.started("default/y") // behind them in the stream
	enginetest.WantKeys(t, f, append([]string{"tcp 0.0.0.0:9"}, keys80...)...)
	f.Lock()
	replaced := f.Replaced
	f.Unlock()
	enginetest.Eventually(t, func() error { // some lists later
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Replaced < replaced+3)
	})
	enginetest.WantKeys(t, f, append([]string{"tcp 0.0.0.0:9"}, keys80...)...)
	enginetest.WantNoneRemoved(t, f)
	is("default/x", taskapi.Status_STOPPED)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:9")
}

// Ports are in a label, or in newer versions in a file; without either there are
// none, which is no error as it is in the incumbent. Nor is any socket here the
// default one, where the incumbent looks whether the engine is ready.
func TestPortsOfEachNerdctlVersion(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "network-config.json"),
		[]byte(`{"portMappings":`+ports80+`,"other":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		labels map[string]string
		want   []string
	}{
		{"label", map[string]string{nerdctlName: "x", nerdctlPorts: ports80}, keys80},
		// The nerdctl of the engines' tests takes no IPv6 address; others do.
		{"address ::1", map[string]string{nerdctlName: "x",
			nerdctlPorts: `[{"HostPort":80,"ContainerPort":80,"Protocol":"tcp","HostIP":"::1"}]`}, []string{"tcp [::1]:80"}},
		{"file", map[string]string{nerdctlName: "x", nerdctlStateDir: dir}, keys80},
		{"no file", map[string]string{nerdctlName: "x", nerdctlStateDir: dir + "/none"}, nil},
		{"neither", map[string]string{nerdctlName: "x"}, nil},
		{"not nerdctl's", map[string]string{nerdctlPorts: ports80}, nil},
		{"null", map[string]string{nerdctlName: "x", nerdctlPorts: "null"}, nil},
		{"host network", map[string]string{nerdctlName: "x", nerdctlPorts: ports80, nerdctlNetworks: `["host"]`}, nil},
		{"another's network", map[string]string{nerdctlName: "x", nerdctlPorts: ports80, nerdctlNetworks: `["container:y"]`}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			e.put("default/x", c.labels)
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, c.want...)
			if f.Lock(); len(f.Warnings) > 0 {
				t.Errorf("warnings: %q", f.Warnings)
			}
			f.Unlock()
		})
	}
}

// What cannot be published is named, and harms nobody else.
func TestMalformed(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "network-config.json"), []byte(`{"portMappings":7}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		labels  map[string]string
		warning string
	}{
		{"no JSON", map[string]string{nerdctlPorts: `[{"HostPort":`}, "label nerdctl/ports"},
		{"another JSON", map[string]string{nerdctlPorts: `{"a":1}`}, "label nerdctl/ports"},
		{"port 0", map[string]string{nerdctlPorts: `[{"HostPort":0,"ContainerPort":1,"Protocol":"tcp"}]`}, "0 is no port"},
		{"port 70000", map[string]string{nerdctlPorts: `[{"HostPort":70000,"ContainerPort":1,"Protocol":"tcp"}]`}, "70000 is no port"},
		{"sctp", map[string]string{nerdctlPorts: `[{"HostPort":7,"ContainerPort":1,"Protocol":"sctp"}]`}, "sctp is not supported"},
		{"networks", map[string]string{nerdctlPorts: ports80, nerdctlNetworks: "bridge"}, "label nerdctl/networks"},
		{"file", map[string]string{nerdctlStateDir: dir}, "network-config.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			c.labels[nerdctlName] = "bad"
			e.put("default/bad", c.labels)
			e.nerdctl("default/x", "web", ports80)
			f := enginetest.Run(t, source(t, e, Options{}))
			enginetest.WantKeys(t, f, keys80...)
			enginetest.WantWarning(t, f, c.warning)
			enginetest.WantWarning(t, f, `"bad"`)
		})
	}
	t.Run("sandbox and spec", func(t *testing.T) {
		e := newFake(t)
		c := e.put("k8s.io/bad", nil)
		c.Extensions = map[string]*anypb.Any{sandboxMetadata: {Value: []byte("{")}}
		c.Spec = &anypb.Any{Value: []byte("[]")}
		e.nerdctl("default/x", "web", ports80)
		f := enginetest.Run(t, source(t, e, Options{}))
		enginetest.WantKeys(t, f, keys80...)
		enginetest.WantWarning(t, f, "sandbox metadata")
		enginetest.WantWarning(t, f, "spec")
	})
}

// The CRI keeps hostPorts and addresses in the metadata of a pod's sandbox.
func TestSandbox(t *testing.T) {
	e := newFake(t)
	c := e.put("k8s.io/"+strings.Repeat("a", 64), map[string]string{
		criPodName: "web-1", criPodNamespace: "shop", "app": "web", "io.cri-containerd.kind": "sandbox",
	})
	c.Extensions = map[string]*anypb.Any{sandboxMetadata: {Value: []byte(`{"Version":"v1","Metadata":{"IP":"10.4.0.5","AdditionalIPs":["fd00::5"],` +
		`"Config":{"port_mappings":[{"container_port":80,"host_port":8080},{"protocol":1,"container_port":53,"host_port":53,"host_ip":"127.0.0.1"},{"container_port":99}]}}}`)}}
	e.put("k8s.io/"+strings.Repeat("b", 64), map[string]string{criPodName: "web-1", criPodNamespace: "shop", criContainer: "app"})
	path, cgroups := "/kubepods/podx/"+strings.Repeat("b", 64), t.TempDir()
	if err := os.MkdirAll(filepath.Join(cgroups, path), 0o755); err != nil {
		t.Fatal(err)
	}
	s := source(t, e, Options{Host: engine.Host{Cgroup2: cgroups}})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, "tcp 0.0.0.0:8080", "tcp [::]:8080", "udp 127.0.0.1:53")
	f.Lock()
	defer f.Unlock()
	for _, b := range f.Set {
		if b.Owner.Name != "web-1" || b.Owner.Namespace != "shop" || b.Owner.Labels["app"] != "web" || len(b.Owner.Labels) != 4-1 {
			t.Errorf("owner is %+v", b.Owner)
		}
		if b.Port == 8080 && b.Address.Is4() && b.Dial[1] != netip.MustParseAddrPort("10.4.0.5:80") {
			t.Errorf("dialled at %v", b.Dial)
		}
	}
	if o, ok := s.Facts().ByAddress(netip.MustParseAddr("fd00::5")); !ok || o.Name != "web-1" {
		t.Errorf("the pod's address is %+v's, %v", o, ok)
	}
	if o, ok := s.Facts().ByCgroupPath(path); !ok || o.Name != "web-1/app" {
		t.Errorf("the container's cgroup is %+v's, %v", o, ok)
	}
}

// writeCNI writes results of containers by the names of their files, into a new directory.
func writeCNI(t *testing.T, results map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range results {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// Addresses of one container are read, and those of all in one pass.
func TestCNIAddresses(t *testing.T) {
	dir := writeCNI(t, map[string]string{
		"bridge-default-x-eth0":   `{"containerId":"default-x","result":{"ips":[{"address":"10.4.0.2/24"},{"address":"fd00::2/64"}]}}`,
		"aaa-default-x-eth1":      `{"containerId":"default-x","result":{"ips":[{"address":"10.5.0.2/24"}]}}`,
		"b-other-default-x-eth0":  `{"containerId":"other-default-x","result":{"ips":[{"address":"10.6.0.2/24"}]}}`,
		"bridge-default-xy-eth0":  `broken, and somebody else's`,
		"bridge-default-bad-eth0": `{`,
	})
	all := readCNI(dir, "")
	for id, want := range map[string]string{"default-x": "[10.5.0.2 10.4.0.2 fd00::2]", "other-default-x": "[10.6.0.2]", "default-none": "[]"} {
		if got, err := readCNI(dir, id).addresses(id); fmt.Sprint(got) != want || err != nil {
			t.Errorf("addresses of %s = %v, %v, want %s", id, got, err, want)
		}
		if got, err := all.addresses(id); fmt.Sprint(got) != want || err != nil {
			t.Errorf("of all, addresses of %s = %v, %v, want %s", id, got, err, want)
		}
	}
	for name, results := range map[string]cniResults{"alone": readCNI(dir, "default-bad"), "of all": all} {
		if _, err := results.addresses("default-bad"); err == nil {
			t.Errorf("%s: a broken result is no error", name)
		}
	}
	if got, err := readCNI(dir+"/none", "").addresses("default-x"); len(got) > 0 || err != nil {
		t.Errorf("addresses of no directory = %v, %v", got, err)
	}
}

// nerdctl leaves the NAT rule and the CNI result of a container that stops, maybe
// before the agent starts.
func TestStoppedContainerIsNamed(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "n1", "[]")
	e.nerdctl("default/y", "n2", "[]")
	e.nerdctl("default/z", "n3", "[]")
	e.mu.Lock()
	delete(e.status, "default/x")
	e.status["default/y"] = taskapi.Status_STOPPED
	e.status["default/z"] = taskapi.Status_UNKNOWN
	e.mu.Unlock()
	results := make(map[string]string)
	for id, addr := range map[string]string{"x": "10.4.0.2", "y": "10.4.0.3", "z": "10.4.0.4"} {
		results["bridge-default-"+id+"-eth0"] = `{"containerId":"default-` + id + `","result":{"ips":[{"address":"` + addr + `/24"}]}}`
	}
	dir := writeCNI(t, results)
	s := source(t, e, Options{CNIResults: dir})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f)
	enginetest.Eventually(t, func() error {
		for addr, name := range map[string]string{"10.4.0.2": "n1", "10.4.0.3": "n2"} {
			if o, ok := s.Facts().StoppedAt(netip.MustParseAddr(addr)); !ok || o.Name != name {
				return fmt.Errorf("%s was %+v's, %v, want %s", addr, o, ok, name)
			}
			if o, ok := s.Facts().ByAddress(netip.MustParseAddr(addr)); ok {
				return fmt.Errorf("%s is %+v's", addr, o)
			}
		}
		// It may run.
		if o, ok := s.Facts().ByAddress(netip.MustParseAddr("10.4.0.4")); !ok || o.Name != "n3" {
			return fmt.Errorf("10.4.0.4 is %+v's, %v, want n3", o, ok)
		}
		return nil
	})
	e.mu.Lock()
	e.status["default/x"] = taskapi.Status_RUNNING
	e.mu.Unlock()
	e.subscribed()
	e.started("default/x")
	enginetest.Eventually(t, func() error {
		if o, ok := s.Facts().ByAddress(netip.MustParseAddr("10.4.0.2")); !ok || o.Name != "n1" {
			return fmt.Errorf("10.4.0.2 is %+v's, %v, want n1", o, ok)
		}
		return nil
	})
	e.mu.Lock()
	delete(e.status, "default/x")
	e.mu.Unlock()
	e.exited("default/x", "")
	enginetest.Eventually(t, func() error {
		if o, ok := s.Facts().StoppedAt(netip.MustParseAddr("10.4.0.2")); !ok || o.Name != "n1" {
			return fmt.Errorf("10.4.0.2 was %+v's, %v, want n1", o, ok)
		}
		return nil
	})
}

func TestSlowAndBroken(t *testing.T) {
	t.Run("slow version", func(t *testing.T) {
		e := newFake(t)
		e.hang["Version"] = true
		f := enginetest.Run(t, source(t, e, Options{Timeout: 50 * time.Millisecond}))
		enginetest.WantStale(t, f, "version: no answer in time")
	})
	t.Run("slow list", func(t *testing.T) {
		e := newFake(t)
		e.nerdctl("default/x", "web", ports80)
		e.hang["Tasks.List"] = true
		f := enginetest.Run(t, source(t, e, Options{Timeout: 50 * time.Millisecond}))
		enginetest.WantStale(t, f, "namespace default: no answer in time")
	})
	t.Run("not a containerd", func(t *testing.T) {
		e := &fake{t: t, socket: filepath.Join(t.TempDir(), "x.sock")}
		l, err := net.Listen("unix", e.socket)
		if err != nil {
			t.Fatal(err)
		}
		srv := grpc.NewServer()
		defer enginetest.Serve(func() error { return srv.Serve(l) }, srv.Stop)()
		f := enginetest.Run(t, source(t, e, Options{}))
		enginetest.WantStale(t, f, "too old, or is no containerd")
	})
	t.Run("nobody", func(t *testing.T) {
		f := enginetest.Run(t, source(t, nil, Options{Sockets: []string{"/nowhere/a.sock", "/nowhere/b.sock"}}))
		enginetest.WantKeys(t, f) // no engine is no ports, which is not stale
		f.Lock()
		defer f.Unlock()
		if f.Err != nil || f.Lack != port.LackEngine || !strings.Contains(f.MethodName, "/nowhere/a.sock") || !strings.Contains(f.MethodName, "/nowhere/b.sock") {
			t.Errorf("stale %v, method %q", f.Err, f.MethodName)
		}
	})
}

// A stream that ends makes the source stale, not empty; it comes back by itself.
func TestStreamEnds(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "web", ports80)
	f := enginetest.Run(t, source(t, e, Options{}))
	enginetest.WantKeys(t, f, keys80...)
	e.subscribed()
	e.cut()
	enginetest.Eventually(t, func() error {
		f.Lock()
		defer f.Unlock()
		return enginetest.ErrIf(f.Replaced < 2 || f.Err != nil)
	})
	enginetest.WantKeys(t, f, keys80...)
	enginetest.WantNoneRemoved(t, f)
}

// A hundred restarts leave no goroutine and no connection behind.
func TestHundredRestarts(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/x", "web", ports80)
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MinDelay: time.Millisecond, MaxDelay: 2 * time.Millisecond}}))
	enginetest.WantKeys(t, f, keys80...)
	enginetest.Restarts(t, func() {
		sets := f.Sets()
		e.stop()
		e.start()
		enginetest.Eventually(t, func() error { return enginetest.ErrIf(f.Sets() <= sets) })
	})
	enginetest.WantNoneRemoved(t, f)
}

func TestOptions(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Sockets: []string{"run/x"}, Logger: log}, "absolute path"},
		{Options{Namespaces: []string{"a/b"}, Logger: log}, "namespace"},
		{Options{Audit: -1, Logger: log}, "audit"},
		{Options{}, "logger"},
	} {
		if _, err := New(c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("New(%+v) = %v, want %q", c.o, err, c.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(ports80, `["bridge"]`, `{"Metadata":{"IP":"10.4.0.5","Config":{"port_mappings":[{"host_port":1}]}}}`)
	f.Fuzz(func(t *testing.T, ports, networks, pod string) {
		f := &fetcher{o: Options{CNIResults: "/nowhere", Host: engine.Host{Proc: "/nowhere"}}}
		for _, c := range []*containersapi.Container{
			{ID: "x", Labels: map[string]string{nerdctlName: "x", nerdctlPorts: ports, nerdctlNetworks: networks}},
			{ID: "x", Extensions: map[string]*anypb.Any{sandboxMetadata: {Value: []byte(pod)}}, Spec: &anypb.Any{Value: []byte(ports)}},
		} {
			o := f.object("default", c, &taskapi.Process{Status: taskapi.Status_RUNNING}, cniResults{})
			for _, b := range o.Bindings {
				if b.Port == 0 || !b.Address.IsValid() || b.Address.Is4In6() {
					t.Fatalf("a binding that cannot be: %+v", b)
				}
			}
		}
	})
}

func FuzzEvent(f *testing.F) {
	for topic, m := range map[string]proto.Message{
		taskStart: &eventtypes.TaskStart{ContainerID: "web", Pid: 7}, taskExit: &eventtypes.TaskExit{ContainerID: "web", ID: "web"},
		taskDelete: &eventtypes.TaskDelete{ContainerID: "web", ID: "exec"}, containerUpdate: &eventtypes.ContainerUpdate{ID: "web"},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add("default", topic, b)
	}
	fetch := new(fetcher)
	f.Fuzz(func(t *testing.T, namespace, topic string, b []byte) {
		ev, ok := fetch.eventOf(&apitypes.Envelope{Namespace: namespace, Topic: topic, Event: &anypb.Any{Value: b}})
		if ok && (!strings.HasPrefix(ev.ID, namespace+"/") || len(ev.ID) == len(namespace)+1) {
			t.Errorf("event %+v in %q", ev, namespace)
		}
	})
}

func TestRefusedAddresses(t *testing.T) {
	enginetest.RefusedAddresses(t, hanging(t), engine.ErrAbsent, engine.ErrRefused, connectError(t))
}

func TestConnectionIsTraced(t *testing.T) {
	enginetest.ConnectionIsTraced(t, hanging(t), connectError(t))
}

// hanging returns the socket of an engine that does not answer.
func hanging(t *testing.T) string {
	e := newFake(t)
	e.hang["Version"] = true
	return e.socket
}

// connectError returns a function that returns why no engine at sockets answers.
func connectError(t *testing.T) func(ctx context.Context, paths ...string) error {
	return func(ctx context.Context, paths ...string) error {
		return source(t, nil, Options{Sockets: paths, Timeout: 50 * time.Millisecond}).session(ctx, nil, nil)
	}
}

// The source waits for the sockets that are configured, and takes no other for
// them. The incumbent waits for the default one, whatever is configured.
func TestOnlyConfiguredSocketIsUsed(t *testing.T) {
	decoy := newFake(t)
	decoy.nerdctl("default/decoy", "decoy", `[{"HostPort":1,"ContainerPort":80,"Protocol":"tcp"}]`)
	e := newFake(t)
	e.nerdctl("default/web", "web", ports80)
	e.stop() // not there yet
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MaxDelay: time.Minute}}))
	enginetest.WantKeys(t, f)
	e.start()
	enginetest.WantKeys(t, f, keys80...)
	e.stop()
	enginetest.WantStale(t, f, e.socket)
	enginetest.WantKeys(t, f, keys80...)
}

// Of several that are configured the first that answers is taken.
func TestFirstAnsweringSocketIsUsed(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/web", "web", ports80)
	f := enginetest.Run(t, source(t, e, Options{Sockets: []string{filepath.Join(t.TempDir(), "none.sock"), e.socket}}))
	enginetest.WantKeys(t, f, keys80...)
}

// One engine is followed; another one that listens is warned of, and nothing else.
func TestSecondEngineIsWarnedOf(t *testing.T) {
	first, second := newFake(t), newFake(t)
	second.nerdctl("default/x", "web", ports80)
	link := filepath.Join(t.TempDir(), "link.sock")
	if err := os.Symlink(first.socket, link); err != nil {
		t.Fatal(err)
	}
	f := enginetest.Run(t, source(t, nil, Options{
		Sockets: []string{first.socket, link, filepath.Join(t.TempDir(), "none.sock"), enginetest.Leftover(t), second.socket},
	}))
	enginetest.WantWarning(t, f, second.socket)
	f.Lock()
	defer f.Unlock()
	if len(f.Warnings) != 1 || len(f.Set) > 0 {
		t.Errorf("warnings %q, set %v; want one warning", f.Warnings, f.Set)
	}
}
