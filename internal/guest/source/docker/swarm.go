// SPDX-License-Identifier: Apache-2.0

package docker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
)

// swarmTimeout bounds a request that the whole swarm answers: one without a leader does not,
// and the containers of this node must not wait for it.
const swarmTimeout = 2 * time.Second

const (
	// servicePrefix begins the id of a service among the objects of an engine; what follows
	// is its id in the swarm.
	servicePrefix = "service/"
	// sandboxID is the id, in the network below, of the namespace that spreads what arrives
	// at the published ports of services over their tasks. It is also its object's id.
	sandboxID      = "ingress-sbox"
	sandboxNetwork = "docker_gwbridge"
)

// Labels of Swarm.
const (
	labelStack   = "com.docker.stack.namespace"  // of a service: the stack that it belongs to
	labelService = "com.docker.swarm.service.id" // of a task's container
)

// errNoServices says that this node knows no services: it is no manager of a swarm.
var errNoServices = errors.New("not a manager of a swarm")

// swarmService is what matters of a service.
type swarmService struct {
	ID   string
	Spec struct {
		Name   string
		Labels map[string]string
		Mode   struct {
			Replicated *struct{ Replicas *uint64 }
		}
	}
	Endpoint struct {
		Ports []swarmPort
	}
}

type swarmPort struct {
	Protocol      string
	TargetPort    int64
	PublishedPort int64
	PublishMode   string
}

// isServiceID reports whether s can be the id of a service. Anybody who starts a container may
// give it a label that says another.
func isServiceID(s string) bool {
	return s != "" && len(s) <= 64 && !strings.ContainsFunc(s, func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') })
}

// idle reports whether the service is to have no task.
func (s swarmService) idle() bool {
	r := s.Spec.Mode.Replicated
	return r != nil && r.Replicas != nil && *r.Replicas == 0
}

func (s swarmService) owner() port.Owner {
	o := port.Owner{Kind: port.OwnerService, ID: s.ID, Name: s.Spec.Name, Labels: engine.Labels(s.Spec.Labels)}
	if stack := s.Spec.Labels[labelStack]; stack != "" {
		o.Namespace = stack
		o.Name = cmp.Or(strings.TrimPrefix(o.Name, stack+"_"), o.Name)
	}
	o.Name = cmp.Or(o.Name, s.ID)
	return o
}

// object declares the ports of a service that each node opens. Ports in host mode are those
// of the tasks' containers. The IPv6 wildcard is dialled by IPv4: the engine accepts
// connections there, and serves none.
func (s swarmService) object() engine.Object {
	c := engine.Container{ID: servicePrefix + s.ID, Owner: s.owner()}
	var ports []engine.Published
	for _, p := range s.Endpoint.Ports {
		if p.PublishMode != "" && p.PublishMode != "ingress" {
			continue
		}
		ports = append(ports, engine.Published{Protocol: p.Protocol, HostPort: p.PublishedPort, ContainerPort: p.TargetPort})
	}
	declared, warnings := engine.Declare(c, ports)
	o := engine.Object{ID: c.ID, Warnings: warnings}
	detail := "Swarm service " + cmp.Or(s.Spec.Name, s.ID) + ", ingress"
	if s.idle() {
		detail += ": nothing serves this, it is scaled to 0"
	}
	for _, b := range declared {
		b.Detail, b.Maker = port.NewDetail(detail), port.MakerSwarm
		b.Dial = nil
		if !s.idle() {
			b.Dial = []netip.AddrPort{netip.AddrPortFrom(port.Loopback(b.Address), b.Port)}
		}
		v6 := b
		v6.Address = netip.IPv6Unspecified()
		v6.Origin.ID += ", IPv6"
		o.Bindings = append(o.Bindings, b, v6)
	}
	return o
}

// services returns all services of the swarm. It is [errNoServices] where this node is not
// one of its managers. Another error says that it is not known which there are.
func (c *conn) services(ctx context.Context) (objects []engine.Object, err error) {
	ctx, cancel := limitSwarm(ctx)
	defer cancel()
	body, err := c.get(ctx, "/services", func(ctx context.Context) error {
		_, err := c.ServiceList(ctx, client.ServiceListOptions{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list services: %w", c.noServices(ctx, err))
	}
	return decodeServices(body)
}

func limitSwarm(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, swarmTimeout, fmt.Errorf("no answer within %v", swarmTimeout))
}

// decodeServices reads a list of services. An entry that cannot be read is an object with a
// warning, unless it is not known which service it is.
func decodeServices(body []byte) (objects []engine.Object, err error) {
	var raw []json.RawMessage
	if err := json.Unmarshal(body, &raw); err != nil {
		return nil, fmt.Errorf("list services: %w", err)
	}
	for _, r := range raw {
		o, err := decodeService(r)
		if err != nil {
			return nil, fmt.Errorf("list services: %w", err)
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// decodeService makes an object of a service. What cannot be read is named in its warnings.
func decodeService(body []byte) (engine.Object, error) {
	var s swarmService
	err := json.Unmarshal(body, &s)
	if err == nil && isServiceID(s.ID) {
		return s.object(), nil
	}
	var only struct{ ID string }
	if json.Unmarshal(body, &only) != nil || !isServiceID(only.ID) {
		return engine.Object{}, errors.Join(err, fmt.Errorf("%q is no id of a service", only.ID))
	}
	return engine.Object{ID: servicePrefix + only.ID, Warnings: []string{fmt.Sprintf("service %q: %v", only.ID, err)}}, nil
}

// service returns one service. found is false if there is none, or if this node is not to
// know of it. An error says that it is not known whether there is.
func (c *conn) service(ctx context.Context, id string) (o engine.Object, found bool, err error) {
	ctx, cancel := limitSwarm(ctx)
	defer cancel()
	body, err := c.get(ctx, "/services/"+id, func(ctx context.Context) error {
		_, err := c.ServiceInspect(ctx, id, client.ServiceInspectOptions{})
		return err
	})
	if err == nil {
		if o, err = decodeService(body); err == nil && o.ID != servicePrefix+id {
			err = fmt.Errorf("asked for %s, got %q", id, strings.TrimPrefix(o.ID, servicePrefix))
		}
		return o, err == nil, err
	}
	if err = c.noServices(ctx, err); cerrdefs.IsNotFound(err) || errors.Is(err, errNoServices) {
		return engine.Object{}, false, nil
	}
	return engine.Object{}, false, fmt.Errorf("inspect service: %w", err)
}

// noServices returns [errNoServices] if that is why a request for services failed, else err.
func (c *conn) noServices(ctx context.Context, err error) error {
	if forbidden(err) {
		return errNoServices
	}
	if !cerrdefs.IsUnavailable(err) && !cerrdefs.IsNotFound(err) {
		return err
	}
	info, ierr := c.info(ctx)
	switch {
	case ierr != nil:
		return errors.Join(err, ierr)
	case info.manager():
		return err
	}
	return errNoServices
}

// forbidden reports whether whoever answers for the engine keeps something from us.
func forbidden(err error) bool {
	return cerrdefs.IsPermissionDenied(err) || cerrdefs.IsUnauthorized(err)
}

// manager reports whether the engine is, or may be, a manager of a swarm: while its swarm is
// locked it does not tell.
func (i engineInfo) manager() bool {
	switch i.Swarm.LocalNodeState {
	case "", "inactive":
		return false
	case "active", "pending":
		return i.Swarm.ControlAvailable
	}
	return true
}

// sandbox returns the object by which NAT rules that lead to the ingress network have a name.
func (c *conn) sandbox(ctx context.Context) (o engine.Object, found bool) {
	ctx, cancel := limitSwarm(ctx)
	defer cancel()
	body, err := c.get(ctx, "/networks/"+sandboxNetwork, func(ctx context.Context) error {
		_, err := c.NetworkInspect(ctx, sandboxNetwork, client.NetworkInspectOptions{})
		return err
	})
	if cerrdefs.IsNotFound(err) || forbidden(err) {
		return o, false
	}
	var n struct {
		Containers map[string]struct{ IPv4Address string }
	}
	if err == nil {
		err = json.Unmarshal(body, &n)
	}
	if err != nil {
		return engine.Object{ID: sandboxID, Unsure: true}, true
	}
	p, err := netip.ParsePrefix(n.Containers[sandboxID].IPv4Address)
	if err != nil {
		return o, false // it is not connected
	}
	return engine.Object{ID: sandboxID, Fact: engine.Fact{
		Owner:     port.Owner{Kind: port.OwnerContainer, ID: sandboxID, Name: sandboxID},
		Addresses: []netip.Addr{p.Addr()},
	}}, true
}

// swarm remembers which services there were: while the swarm does not tell, they stay.
type swarm struct {
	mu    sync.Mutex
	known map[string]bool // ids of objects
}

// list returns the objects of the swarm at this node, which may be none.
func (s *swarm) list(ctx context.Context, c *conn) []engine.Object {
	objects, err := c.services(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil, errors.Is(err, errNoServices):
		s.known = make(map[string]bool, len(objects))
		for _, o := range objects {
			s.known[o.ID] = true
		}
	default:
		for id := range s.known {
			objects = append(objects, engine.Object{ID: id, Unsure: true})
		}
		slices.SortFunc(objects, func(a, b engine.Object) int { return strings.Compare(a.ID, b.ID) })
	}
	return objects
}

// look returns the service with the object's id.
func (s *swarm) look(ctx context.Context, c *conn, object string) (o engine.Object, found bool) {
	o, found, err := c.service(ctx, strings.TrimPrefix(object, servicePrefix))
	if err != nil {
		return engine.Object{ID: object, Unsure: true}, true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !found {
		delete(s.known, object)
		return o, false
	}
	if s.known == nil {
		s.known = make(map[string]bool)
	}
	s.known[object] = true
	return o, true
}
