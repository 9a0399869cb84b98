// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

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
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
)

// fetcher implements engine.Engine by one connection. The id of an object is
// "namespace/container".
type fetcher struct {
	o          Options
	files      Access
	user       uint32 // as whom the engine runs
	conn       *grpc.ClientConn
	namespaces namespacesapi.NamespacesClient
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
}

var _ engine.Engine = (*fetcher)(nil)

func newFetcher(cc *grpc.ClientConn, o Options, files Access) *fetcher {
	return &fetcher{
		o: o, files: files, conn: cc,
		namespaces: namespacesapi.NewNamespacesClient(cc),
		containers: containersapi.NewContainersClient(cc),
		tasks:      tasksapi.NewTasksClient(cc),
		events:     eventsapi.NewEventsClient(cc),
	}
}

// in returns a context for one request in a namespace.
func (f *fetcher) in(ctx context.Context, namespace string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, f.o.Timeout)
	if namespace != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
	}
	return ctx, cancel
}

func (f *fetcher) version(ctx context.Context) (string, error) {
	ctx, cancel := f.in(ctx, "")
	defer cancel()
	r, err := versionapi.NewVersionClient(f.conn).Version(ctx, &emptypb.Empty{})
	if err != nil {
		return "", fmt.Errorf("version: %w", native(err))
	}
	return r.GetVersion(), nil
}

// Starting implements engine.Engine. The list has what may be starting.
func (*fetcher) Starting(context.Context) ([]string, error) { return nil, nil }

// List implements engine.Engine.
func (f *fetcher) List(ctx context.Context) ([]engine.Object, error) {
	nctx, cancel := f.in(ctx, "")
	defer cancel()
	r, err := f.namespaces.List(nctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", native(err))
	}
	var all []engine.Object
	left := f.o.MaxObjects
	if n := len(r.GetNamespaces()); left > 0 && n > left {
		return nil, fmt.Errorf("%d namespaces: at most %d are read", n, left)
	}
	cni := f.cni("")
	for _, n := range r.GetNamespaces() {
		if !f.o.wanted(n.GetName()) {
			continue
		}
		objects, err := f.listIn(ctx, n.GetName(), cni, &left)
		if err != nil {
			return nil, fmt.Errorf("namespace %s: %w", n.GetName(), native(err))
		}
		all = append(all, objects...)
	}
	return all, nil
}

// listIn returns the containers of one namespace that run, may run, or have stopped
// and left addresses. Containers come one by one: each carries its whole spec. left counts
// down how many may come, where that is bounded.
func (f *fetcher) listIn(ctx context.Context, namespace string, cni cniResults, left *int) ([]engine.Object, error) {
	ctx, cancel := f.in(ctx, namespace)
	defer cancel()
	r, err := f.tasks.List(ctx, &tasksapi.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	tasks := make(map[string]*taskapi.Process)
	for _, t := range r.GetTasks() {
		// Where the list comes from the shims, the id is in the one field or the other.
		tasks[cmp.Or(t.GetContainerID(), t.GetID())] = t
	}
	stream, err := f.containers.ListStream(ctx, &containersapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	var objects []engine.Object
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list containers: %w", err)
		}
		if *left--; *left < 0 && f.o.MaxObjects > 0 {
			return nil, fmt.Errorf("more than %d containers", f.o.MaxObjects)
		}
		if o, ok := f.objectOf(namespace, m.GetContainer(), tasks[m.GetContainer().GetID()], cni); ok {
			objects = append(objects, o)
		}
	}
}

// objectOf makes an object of a container and its task, nil if it has none. ok is
// false if it declares nothing and left nothing.
func (f *fetcher) objectOf(namespace string, c *containersapi.Container, t *taskapi.Process, cni cniResults) (o engine.Object, ok bool) {
	switch state := t.GetStatus(); {
	case t != nil && runs(state):
		return f.object(namespace, c, t, cni), true
	case t != nil && state == taskapi.Status_UNKNOWN:
		return f.unsure(namespace, c, t, cni), true
	}
	return f.stopped(namespace, c, cni)
}

// Look implements engine.Engine.
func (f *fetcher) Look(ctx context.Context, id string) (engine.Object, bool, error) {
	namespace, id, _ := strings.Cut(id, "/")
	ctx, cancel := f.in(ctx, namespace)
	defer cancel()
	// The task is asked first: a container without one is stopped, whatever
	// its labels say.
	t, err := f.tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: id})
	if err != nil && status.Code(err) != codes.NotFound {
		return engine.Object{}, false, fmt.Errorf("task %s/%s: %w", namespace, id, native(err))
	}
	c, err := f.containers.Get(ctx, &containersapi.GetContainerRequest{ID: id})
	if status.Code(err) == codes.NotFound {
		return engine.Object{}, false, nil
	}
	if err != nil {
		return engine.Object{}, false, fmt.Errorf("container %s/%s: %w", namespace, id, native(err))
	}
	o, ok := f.objectOf(namespace, c.GetContainer(), t.GetProcess(), f.cni(namespace+"-"+id))
	return o, ok, nil
}

// cni returns the results of one container, or of all if it is "": none of an engine that is
// not trusted, whose containers may have any id.
func (f *fetcher) cni(container string) cniResults {
	if f.o.Access != nil {
		return cniResults{}
	}
	return readCNI(f.o.CNIResults, container)
}

// runs reports whether a task in this state holds its ports.
func runs(s taskapi.Status) bool {
	switch s {
	case taskapi.Status_RUNNING, taskapi.Status_PAUSED, taskapi.Status_PAUSING:
		return true
	}
	return false
}

// The topics that change who publishes what. A container that was only created
// publishes nothing, so that topic is left out; an exec ends with /tasks/exit too.
const (
	taskStart       = "/tasks/start"
	taskExit        = "/tasks/exit"
	taskDelete      = "/tasks/delete"
	taskPaused      = "/tasks/paused"
	taskResumed     = "/tasks/resumed"
	containerUpdate = "/containers/update"
	containerDelete = "/containers/delete"
)

var watchedTopics = [...]string{
	taskStart, taskExit, taskDelete, taskPaused, taskResumed, containerUpdate, containerDelete,
}

// subscribe returns the events of all namespaces. wait ends the stream, and
// returns when nothing of it runs any more.
func (f *fetcher) subscribe(ctx context.Context) (engine.Stream, func(), error) {
	ctx, cancel := context.WithCancel(ctx)
	filters := make([]string, 0, len(watchedTopics))
	for _, t := range watchedTopics {
		filters = append(filters, `topic=="`+t+`"`)
	}
	sub, err := f.events.Subscribe(ctx, &eventsapi.SubscribeRequest{Filters: filters})
	if err != nil {
		cancel()
		return engine.Stream{}, nil, fmt.Errorf("subscribe to events: %w", native(err))
	}
	out, failed, done := make(chan engine.Event), make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		for {
			env, err := sub.Recv()
			if err != nil {
				failed <- native(err)
				return
			}
			ev, ok := f.eventOf(env)
			if !ok {
				continue
			}
			select {
			case out <- ev:
			case <-ctx.Done():
			}
		}
	}()
	return engine.Stream{Events: out, Failed: failed, Unconfirmed: true, Stopped: true}, func() { cancel(); <-done }, nil
}

// eventOf translates an event; ok is false if it changes no port.
func (f *fetcher) eventOf(env *apitypes.Envelope) (engine.Event, bool) {
	if !f.o.wanted(env.GetNamespace()) {
		return engine.Event{}, false
	}
	var (
		id   string
		gone bool
	)
	switch env.GetTopic() {
	case taskStart:
		var m eventtypes.TaskStart
		if decode(env, &m) {
			id = m.GetContainerID()
		}
	case taskExit:
		var m eventtypes.TaskExit
		// The end of an exec has the exec's id.
		if decode(env, &m) && (m.GetID() == "" || m.GetID() == m.GetContainerID()) {
			id, gone = m.GetContainerID(), true
		}
	case taskDelete:
		var m eventtypes.TaskDelete
		if decode(env, &m) && (m.GetID() == "" || m.GetID() == m.GetContainerID()) {
			id, gone = m.GetContainerID(), true
		}
	case taskPaused:
		var m eventtypes.TaskPaused
		if decode(env, &m) {
			id = m.GetContainerID()
		}
	case taskResumed:
		var m eventtypes.TaskResumed
		if decode(env, &m) {
			id = m.GetContainerID()
		}
	case containerUpdate:
		var m eventtypes.ContainerUpdate
		if decode(env, &m) {
			id = m.GetID()
		}
	case containerDelete:
		var m eventtypes.ContainerDelete
		if decode(env, &m) {
			id, gone = m.GetID(), true
		}
	}
	if id == "" {
		return engine.Event{}, false
	}
	ev := engine.Event{ID: env.GetNamespace() + "/" + id, Gone: gone}
	if ts := env.GetTimestamp(); ts.IsValid() {
		ev.At = ts.AsTime()
	}
	return ev, true
}

// decode reads the event whatever its type is called: the topic decides.
func decode(env *apitypes.Envelope, m proto.Message) bool {
	return proto.Unmarshal(env.GetEvent().GetValue(), m) == nil
}
