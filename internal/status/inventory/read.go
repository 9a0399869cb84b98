// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/schedule"
	"github.com/fairlead/fairlead/internal/status"
)

// skew is how much later than now a node's clock may be without a word.
const skew = time.Minute

// rows returns the ports of an object as rows of a list.
func rows(n *NodeInventory) ([]status.Publication, error) {
	ports, err := n.Status.Decode()
	if err != nil {
		return nil, err
	}
	list := make([]status.Publication, 0, len(ports))
	for _, p := range ports {
		list = append(list, p.row(n.Name))
	}
	return list, nil
}

// row is the port as a row of a list.
func (p Port) row(node string) status.Publication {
	row := status.Describe(p.publication(), nil)
	row.State, row.Reason, row.Node = p.State, "", node
	return row
}

// publication is the port as rules see it.
func (p Port) publication() port.Publication {
	pub := port.Publication{
		Fact: port.Fact{
			Key:   p.Key,
			Owner: port.Owner{Kind: p.Owner.Kind, Name: p.Owner.Name, Namespace: p.Owner.Namespace, ID: p.Owner.ID},
		},
		Since: p.Since, Origins: make([]port.OriginInfo, 0, len(p.Sources)),
	}
	for _, s := range p.Sources {
		pub.Origins = append(pub.Origins, port.OriginInfo{Origin: port.Origin{Source: s}, Since: p.Since})
	}
	return pub
}

// sourceOf describes how far the list of a node can be relied on.
func sourceOf(n *NodeInventory, now time.Time) status.Source {
	s := status.Source{Name: n.Name, State: "live", Method: "agent " + n.Status.Agent}
	for _, c := range n.Status.Conditions {
		if c.Status == metav1.ConditionFalse {
			s.Warnings = append(s.Warnings, "is not "+c.Type+": "+c.Message)
		}
	}
	if n.Status.ListOmitted > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("has %d ports, of which the list omits %d", n.Status.Ports.Total, n.Status.ListOmitted))
	}
	switch age := now.Sub(n.Status.Holder.Renewed.Time); {
	case age > HeldFor:
		s.State = "stale"
		s.Error = fmt.Sprintf("last written %s ago: its agent does not run, cannot reach the API server, or the clocks differ", status.Age(age))
	case age < -skew:
		s.Warnings = append(s.Warnings, fmt.Sprintf("has a clock that is %s ahead of this one", status.Age(-age)))
	}
	return s
}

// ListOf makes one list of objects, sorted by node and port. An object that cannot be read
// is a stale source with the error.
func ListOf(objects []NodeInventory, now time.Time) status.List {
	l := status.List{Role: status.RoleCluster, Publications: []status.Publication{}, Sources: []status.Source{}, Peers: []status.Peer{}}
	slices.SortFunc(objects, func(a, b NodeInventory) int { return cmp.Compare(a.Name, b.Name) })
	for i := range objects {
		n := &objects[i]
		s := sourceOf(n, now)
		list, err := rows(n)
		if err != nil {
			s.State, s.Error = "stale", err.Error()
		}
		l.Publications, l.Sources = append(l.Publications, list...), append(l.Sources, s)
	}
	return l
}

// Watch reports the ports of all nodes, or of one, and then each change, until ctx ends or
// report fails. It returns an error if the first list fails; later it lists again. It calls
// warn, from the same goroutine, when the API server is lost, and when the object of a node
// cannot be read, whose ports then remain as they were.
func (c *Client) Watch(ctx context.Context, node string, report func(status.Event) error, warn func(error)) error {
	f := follower{report: report, warn: warn, nodes: make(map[string]*status.Resume), unreadable: make(map[string]bool)}
	lost := false
	retry := schedule.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second, Jitter: 0.5}
	for {
		began := time.Now()
		objects, version, err := c.List(ctx, node)
		if err != nil && !f.synced {
			return err
		}
		if err != nil && !lost && ctx.Err() == nil {
			warn(fmt.Errorf("the nodes cannot be followed; retrying: %w", err))
		}
		lost = err != nil
		if err == nil {
			if err := f.all(objects); err != nil {
				return err
			}
			if err := c.follow(ctx, node, version, &f); err != nil {
				return err
			}
			if time.Since(began) > time.Minute {
				retry.Reset()
			}
		}
		if err := schedule.Sleep(ctx, retry.Next()); err != nil {
			return err
		}
	}
}

// follow reports changes until the watch ends, which is no error.
func (c *Client) follow(ctx context.Context, node, version string, f *follower) error {
	w, err := c.watch(ctx, node, version)
	if err != nil {
		if apierrors.IsForbidden(err) {
			return explain("watch", Resource+"."+Group, err)
		}
		return nil
	}
	defer w.Stop()
	for e := range w.ResultChan() {
		n, ok := e.Object.(*NodeInventory)
		if !ok || e.Type == watch.Bookmark {
			if e.Type == watch.Error {
				return nil
			}
			continue
		}
		if err := f.one(n, e.Type == watch.Deleted); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// follower turns objects into events.
type follower struct {
	report     func(status.Event) error
	warn       func(error)
	nodes      map[string]*status.Resume
	unreadable map[string]bool // nodes whose objects cannot be read, which was reported
	synced     bool
}

// all takes a list, in which nodes that are missing have gone.
func (f *follower) all(objects []NodeInventory) error {
	slices.SortFunc(objects, func(a, b NodeInventory) int { return cmp.Compare(a.Name, b.Name) })
	there := make(map[string]bool)
	for i := range objects {
		there[objects[i].Name] = true
		if err := f.one(&objects[i], false); err != nil {
			return err
		}
	}
	for name := range f.nodes {
		if !there[name] {
			if err := f.one(&NodeInventory{ObjectMeta: metav1.ObjectMeta{Name: name}}, true); err != nil {
				return err
			}
		}
	}
	if f.synced {
		return nil
	}
	f.synced = true
	return f.report(status.Event{Time: time.Now().UTC(), Type: status.Synced})
}

// one reports how the ports of a node differ from what was reported.
func (f *follower) one(n *NodeInventory, gone bool) error {
	var list []status.Publication
	if !gone {
		var err error
		if list, err = rows(n); err != nil {
			if !f.unreadable[n.Name] {
				f.warn(fmt.Errorf("node %s: %w", n.Name, err))
			}
			f.unreadable[n.Name] = true
			return nil
		}
	}
	delete(f.unreadable, n.Name)
	r, known := f.nodes[n.Name]
	if !known {
		r = new(status.Resume)
		f.nodes[n.Name] = r
	}
	r.Lost()
	events := []status.Event{}
	now := time.Now().UTC()
	for i := range list {
		events = append(events, r.Events(status.Event{Time: now, Type: status.Present, Publication: &list[i]})...)
	}
	events = append(events, r.Events(status.Event{Time: now, Type: status.Synced})...)
	if gone {
		delete(f.nodes, n.Name)
	}
	for _, e := range events {
		if e.Type == status.Synced {
			continue
		}
		if e.Type == status.Present && f.synced {
			e.Type = status.Added // on a node that is new
		}
		if err := f.report(e); err != nil {
			return err
		}
	}
	return nil
}
