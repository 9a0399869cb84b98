// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/client"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
)

// fetcher implements engine.Engine by one connection.
type fetcher struct {
	c    *conn
	host engine.Host
	// rootless engines keep their networks in a namespace of their own, and
	// another engine may use the same addresses here.
	rootless bool
	user     uint32 // as whom the engine runs
	swarm    *swarm
	podman   bool
}

var _ engine.Engine = fetcher{}

// List implements engine.Engine. The engine answers it without locking any
// container, but without their processes: a look follows. Podman's list does not tell whose
// the ports and addresses are that it has of a container, so each is looked at at once.
func (f fetcher) List(ctx context.Context) ([]engine.Object, error) {
	all, err := f.c.list(ctx, client.ContainerListOptions{})
	if err != nil {
		return nil, err
	}
	objects := make([]engine.Object, 0, len(all))
	for _, l := range all {
		if l.ID == "" {
			// It is not known whose ports are missing, so nothing may be withdrawn.
			return nil, fmt.Errorf("list containers: %w", l.err)
		}
		if f.podman {
			o, found, err := f.Look(ctx, l.ID)
			if err != nil {
				return nil, err
			}
			if found {
				objects = append(objects, o)
			}
			continue
		}
		o := f.summarised(l)
		o.Partial = true
		objects = append(objects, o)
	}
	objects = append(objects, f.swarm.list(ctx, f.c)...)
	if o, found := f.c.sandbox(ctx); found && !f.rootless {
		objects = append(objects, o)
	}
	return objects, nil
}

// Starting implements engine.Engine. A container that is starting is among those that do not run
// until it runs, and locked. They are chosen here: an engine refuses to filter by a state that it
// does not know, and Podman has other ones than Docker.
func (f fetcher) Starting(ctx context.Context) (ids []string, err error) {
	all, err := f.c.list(ctx, client.ContainerListOptions{All: true})
	for _, l := range all {
		switch {
		case l.ID == "":
			return nil, fmt.Errorf("list containers: %w", l.err)
		case l.State != "running" && l.State != "paused":
			ids = append(ids, l.ID)
		}
	}
	return ids, err
}

// Look implements engine.Engine. A container that is locked, or whose details
// are too large to read, is still in the list.
func (f fetcher) Look(ctx context.Context, id string) (engine.Object, bool, error) {
	switch {
	case strings.HasPrefix(id, servicePrefix):
		o, found := f.swarm.look(ctx, f.c, id)
		return o, found, nil
	case id == sandboxID:
		o, found := f.c.sandbox(ctx)
		return o, found && !f.rootless, nil
	}
	inspect := f.c.inspect
	if f.podman {
		inspect = f.c.inspectPodman
	}
	d, err := inspect(ctx, id)
	switch {
	case err == nil && d.State.Running && d.ID == id:
		return f.inspected(d), true, nil
	case err == nil && d.ID == id, cerrdefs.IsNotFound(err):
		return engine.Object{}, false, nil
	case err == nil:
		err = fmt.Errorf("inspect: asked for %s, got %q", id, d.ID)
	}
	all, lerr := f.c.list(ctx, client.ContainerListOptions{Filters: make(client.Filters).Add("id", id)})
	if lerr != nil {
		return engine.Object{}, false, errors.Join(err, lerr)
	}
	for _, l := range all {
		if l.ID != id {
			continue
		}
		name := nameOf(l.Names, id)
		if f.podman {
			return engine.Object{ID: id, Unsure: true, Warnings: []string{fmt.Sprintf("container %q: %v", name, err)}}, true, nil
		}
		o := f.summarised(l)
		o.Partial = true // the known fact may still be right
		o.Warnings = append(o.Warnings, fmt.Sprintf("container %q: %v; shown as the list has it", name, err))
		return o, true, nil
	}
	return engine.Object{}, false, nil
}

// summarised makes an object of an entry of the list.
func (f fetcher) summarised(l listed) engine.Object {
	name := nameOf(l.Names, l.ID)
	if l.err != nil {
		return engine.Object{ID: l.ID, Warnings: []string{fmt.Sprintf("container %q: %v", name, l.err)}}
	}
	ports := make([]engine.Published, 0, len(l.Ports))
	for _, p := range l.Ports {
		if p.PublicPort == 0 && p.IP == "" {
			continue // exposed, not published
		}
		ports = append(ports, engine.Published{Protocol: p.Type, HostIP: p.IP, HostPort: p.PublicPort, ContainerPort: p.PrivatePort})
	}
	o := f.object(l.ID, name, l.State == "paused", l.Labels, l.Network.Networks, ports)
	o.Fact = engine.Fact{Owner: owner(l.ID, name, l.Labels), ID: l.ID, User: f.user, Addresses: f.addresses(l.Network.Networks)}
	return o
}

// inspected makes an object of a running container, with its fact. One in the network of
// another one publishes nothing and has no address of its own: Podman reports those of the
// other one.
func (f fetcher) inspected(d details) engine.Object {
	if strings.HasPrefix(d.HostConfig.NetworkMode, "container:") {
		d.Network.Ports, d.Network.Networks = nil, nil
	}
	var ports []engine.Published
	var bad []string
	name := strings.TrimPrefix(d.Name, "/")
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			bad = append(bad, fmt.Sprintf("container %q: port %q is no port", name, s))
			return -1
		}
		return n
	}
	for spec, binds := range d.Network.Ports {
		private, proto, _ := strings.Cut(spec, "/")
		for _, b := range binds {
			p := engine.Published{Protocol: proto, HostIP: b.HostIP, HostPort: number(b.HostPort), ContainerPort: number(private)}
			if p.HostPort != -1 && p.ContainerPort != -1 {
				ports = append(ports, p)
			}
		}
	}
	o := f.object(d.ID, name, d.State.Paused, d.Config.Labels, d.Network.Networks, ports)
	o.Warnings = append(o.Warnings, bad...)
	o.Fact = engine.Fact{Owner: owner(d.ID, name, d.Config.Labels), ID: d.ID, User: f.user, Addresses: f.addresses(d.Network.Networks)}
	if path, cgroup, ok := f.host.Cgroup(d.State.Pid, f.user, d.ID); ok {
		o.Fact.Path, o.Fact.Cgroup = path, cgroup
	}
	return o
}

func (f fetcher) object(id, name string, paused bool, labels map[string]string, networks map[string]network, ports []engine.Published) engine.Object {
	c := engine.Container{ID: id, Owner: owner(id, name, labels), Addresses: f.addresses(networks), Paused: paused}
	o := engine.Object{ID: id}
	o.Bindings, o.Warnings = engine.Declare(c, ports)
	return o
}

func (f fetcher) addresses(networks map[string]network) []netip.Addr {
	if f.rootless {
		return nil
	}
	return addresses(networks)
}

// owner makes the owner of a container.
func owner(id, name string, labels map[string]string) port.Owner {
	return port.Owner{Kind: port.OwnerContainer, ID: id, Name: name, Labels: engine.Labels(labels)}
}

// nameOf picks the container's own name: a link shows as /other/alias.
func nameOf(names []string, id string) string {
	for _, n := range names {
		if n = strings.TrimPrefix(n, "/"); n != "" && !strings.Contains(n, "/") {
			return n
		}
	}
	return id[:min(12, len(id))]
}

// effect is what an event of a container means for its ports.
type effect uint8

const (
	none    effect = iota
	changed        // it has to be looked at
	gone           // it has none any more
)

// effects has the words of Docker and those of Podman before 4.4.
var effects = map[events.Action]effect{
	events.ActionStart: changed, events.ActionRestart: changed, events.ActionPause: changed, events.ActionUnPause: changed,
	events.ActionRename: changed, events.ActionUpdate: changed, "cleanup": changed, "restore": changed,
	events.ActionDie: gone, events.ActionDestroy: gone, "died": gone, "remove": gone,
}

// serviceEffects has those of services.
var serviceEffects = map[events.Action]effect{events.ActionCreate: changed, events.ActionUpdate: changed, events.ActionRemove: gone}

// subscribe returns the engine's events since a time. ctx's end ends the
// stream, and wait returns when nothing of it runs any more. filter has the engine leave
// out events of other kinds.
func (c *conn) subscribe(ctx context.Context, since time.Time, filter bool) (s engine.Stream, wait func(), err error) {
	filters := make(client.Filters).Add("type", string(events.ContainerEventType), string(events.NetworkEventType), string(events.ServiceEventType))
	if filter {
		// Without the events of health checks, which come all the time. Podman
		// compares a filter by action with its own words.
		for action := range effects {
			filters.Add("event", string(action))
		}
		for action := range serviceEffects {
			filters.Add("event", string(action))
		}
		filters.Add("event", string(events.ActionConnect), string(events.ActionDisconnect))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	slow := time.AfterFunc(c.timeout, func() { cancel(fmt.Errorf("no answer within %v", c.timeout)) })
	r := c.Events(ctx, client.EventsListOptions{
		Since:   fmt.Sprintf("%d.%09d", since.Unix(), since.Nanosecond()),
		Filters: filters,
	})
	if !slow.Stop() {
		for range r.Err {
			continue // the client's goroutine ends with this channel
		}
		return s, nil, fmt.Errorf("subscribe to events: %w", context.Cause(ctx))
	}
	out, failed, done := make(chan engine.Event), make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case m := <-r.Messages:
				for _, ev := range eventsOf(m) {
					select {
					case out <- ev:
					case <-ctx.Done():
					}
				}
			case err, ok := <-r.Err:
				if !ok {
					return
				}
				failed <- err
			}
		}
	}()
	return engine.Stream{Events: out, Failed: failed}, func() { cancel(nil); <-done }, nil
}

// eventsOf translates an event, to none if it changes no port.
func eventsOf(m events.Message) (list []engine.Event) {
	var at time.Time
	if m.TimeNano != 0 {
		at = time.Unix(0, m.TimeNano)
	}
	add := func(id string, e effect) {
		if e != none && id != "" {
			list = append(list, engine.Event{ID: id, Gone: e == gone, At: at})
		}
	}
	switch m.Type {
	case events.ContainerEventType:
		e := effects[m.Action]
		add(m.Actor.ID, e)
		// A node that leaves its swarm reports the end of its tasks, and nothing of services.
		if service := m.Actor.Attributes[labelService]; isServiceID(service) && e != none {
			add(servicePrefix+service, changed)
			add(sandboxID, changed)
		}
	case events.NetworkEventType:
		if m.Action == events.ActionConnect || m.Action == events.ActionDisconnect {
			add(m.Actor.Attributes["container"], changed)
		}
	case events.ServiceEventType:
		if e := serviceEffects[m.Action]; e != none && isServiceID(m.Actor.ID) {
			add(servicePrefix+m.Actor.ID, e)
			add(sandboxID, changed)
		}
	}
	return list
}
