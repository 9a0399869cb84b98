// SPDX-License-Identifier: Apache-2.0

package containerd

import (
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

	"github.com/fairlead/fairlead/internal/source/engine"
)

// fetcher implements engine.Engine by one connection. The id of an object is
// "namespace/container".
type fetcher struct {
	o          Options
	user       uint32 // as whom the engine runs
	conn       *grpc.ClientConn
	namespaces namespacesapi.NamespacesClient
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
}

var _ engine.Engine = (*fetcher)(nil)

func newFetcher(cc *grpc.ClientConn, o Options) *fetcher {
	return &fetcher{
		o: o, conn: cc,
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

// List implements engine.Engine.
func (f *fetcher) List(ctx context.Context) ([]engine.Object, error) {
	nctx, cancel := f.in(ctx, "")
	defer cancel()
	r, err := f.namespaces.List(nctx, &namespacesapi.ListNamespacesRequest{})
	if err != nil {
		return nil, fmt.Errorf("list namespaces: %w", native(err))
	}
	var all []engine.Object
	for _, n := range r.GetNamespaces() {
		if !f.o.wanted(n.GetName()) {
			continue
		}
		objects, err := f.listIn(ctx, n.GetName())
		if err != nil {
			return nil, fmt.Errorf("namespace %s: %w", n.GetName(), native(err))
		}
		all = append(all, objects...)
	}
	return all, nil
}

// listIn returns the running containers of one namespace. Containers come one
// by one: each carries its whole spec.
func (f *fetcher) listIn(ctx context.Context, namespace string) ([]engine.Object, error) {
	ctx, cancel := f.in(ctx, namespace)
	defer cancel()
	r, err := f.tasks.List(ctx, &tasksapi.ListTasksRequest{})
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", err)
	}
	running := make(map[string]*taskapi.Process)
	var objects []engine.Object
	for _, t := range r.GetTasks() {
		// Where the list comes from the shims, the id is in the one field or the other.
		id := t.GetContainerID()
		if id == "" {
			id = t.GetID()
		}
		switch {
		case runs(t.GetStatus()):
			running[id] = t
		case t.GetStatus() == taskapi.Status_UNKNOWN:
			objects = append(objects, unsure(namespace, id))
		}
	}
	if len(running) == 0 {
		return objects, nil
	}
	stream, err := f.containers.ListStream(ctx, &containersapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list containers: %w", err)
		}
		if t, ok := running[m.GetContainer().GetID()]; ok {
			objects = append(objects, f.object(namespace, m.GetContainer(), t))
		}
	}
}

// Look implements engine.Engine.
func (f *fetcher) Look(ctx context.Context, id string) (engine.Object, bool, error) {
	namespace, id, _ := strings.Cut(id, "/")
	ctx, cancel := f.in(ctx, namespace)
	defer cancel()
	// The task is asked first: a container without one is stopped, whatever
	// its labels say.
	t, err := f.tasks.Get(ctx, &tasksapi.GetRequest{ContainerID: id})
	switch state := t.GetProcess().GetStatus(); {
	case status.Code(err) == codes.NotFound:
		return engine.Object{}, false, nil
	case err != nil:
		return engine.Object{}, false, fmt.Errorf("task %s/%s: %w", namespace, id, native(err))
	case state == taskapi.Status_UNKNOWN:
		return unsure(namespace, id), true, nil
	case !runs(state):
		return engine.Object{}, false, nil
	}
	c, err := f.containers.Get(ctx, &containersapi.GetContainerRequest{ID: id})
	if status.Code(err) == codes.NotFound {
		return engine.Object{}, false, nil
	}
	if err != nil {
		return engine.Object{}, false, fmt.Errorf("container %s/%s: %w", namespace, id, native(err))
	}
	return f.object(namespace, c.GetContainer(), t.GetProcess()), true, nil
}

// unsure is a container whose task's state is not known: that is what
// the engine answers if the task's shim is silent for two seconds, as on a machine
// under load.
func unsure(namespace, id string) engine.Object {
	return engine.Object{ID: namespace + "/" + id, Unsure: true}
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
	return engine.Stream{Events: out, Failed: failed, Unconfirmed: true}, func() { cancel(); <-done }, nil
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
