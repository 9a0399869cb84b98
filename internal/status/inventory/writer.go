// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/port/schedule"
)

// Options configures a Writer.
type Options struct {
	Node     string        // name of the Node
	Interval time.Duration // least time between two writes of changes; a renewal has them earlier
	// Machine is the boot id, Namespace the inode of the network namespace; see Holder.
	Machine, Namespace string
	// Config returns how to reach the API server now, and where that is written. The pointer is
	// the same while neither the server nor the credentials have changed. It is asked before each
	// report and each write: what is reported must not go to the server of another cluster.
	Config func() (conf *rest.Config, origin string, err error)
	// Lock lets one agent of the network namespace write; see LockNode. The error is an
	// [ErrHeld] while another one does.
	Lock func(ctx context.Context, node string) (release func(), err error)
	// Report returns the content. It is called from one goroutine.
	Report func(ctx context.Context) Report
	// Changed returns when the content may have changed.
	Changed <-chan struct{}
	Logger  *slog.Logger
}

// ErrHeld is in the error while another agent writes the node's object.
var ErrHeld = errors.New("another agent writes the inventory of this node")

// settle is how long the first change waits for those that come with it.
const settle = 200 * time.Millisecond

// renewSpread is by how much a renewal may come earlier, so that those of many nodes do not
// come at once.
const renewSpread = RenewEvery / 10

// Writer keeps the object of one node as its agent reports it.
type Writer struct {
	o     Options
	limit int // bytes of the list; less than maxBytes if the API server refused more

	client  *Client
	conf    *rest.Config   // of client
	release func()         // of the lock; nil if it is not held
	current *NodeInventory // as the server has it; nil if that is not known
	owner   types.UID      // of the Node, as it was read last
	readAt  time.Time      // when the Node is read again at the earliest
	renewAt time.Time      // when the object is written at the latest
	kept    *kept          // since when ports are open, as an earlier agent knew it

	// The holder of the object that is not this one, and since when it has not changed.
	other      Holder
	otherSince time.Time

	mu    sync.Mutex
	state State
	node  Labels
}

// Labels are those of the node, as they were read last.
type Labels struct {
	Known  bool // they were read at least once
	Labels map[string]string
	Err    error // why the last attempt to read them failed; nil before the first
}

// State is what became of the last write.
type State struct {
	Node    string    `json:"node"`
	Current bool      `json:"current" metric:"inventory_current" help:"1 if the node's object in the Kubernetes API was as it should be at the last look, 0 if it cannot be written."`
	Error   string    `json:"error,omitempty"` // why the object is not as it should be
	Held    bool      `json:"held,omitempty"`  // because another agent writes it
	Written time.Time `json:"written,omitzero"`
	Writes  uint64    `json:"writes" metric:"inventory_writes_total" label:"result=ok" help:"Writes of the node's object in the Kubernetes API."`
	Fails   uint64    `json:"failures" metric:"inventory_writes_total" label:"result=failed"`
	Omitted int       `json:"omitted,omitempty" metric:"inventory_omitted_ports" help:"Current ports that the list in the node's object has no room for."`
}

// NewWriter makes a writer. It connects to nothing.
func NewWriter(o Options) *Writer {
	return &Writer{o: o, limit: maxBytes, state: State{Node: o.Node}}
}

// State returns what became of the last write.
func (w *Writer) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// Labels returns the labels of the node.
func (w *Writer) Labels() Labels {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.node
}

// Run writes the object until ctx ends, whose cause it returns then.
func (w *Writer) Run(ctx context.Context) error {
	defer w.close()
	// All agents of a cluster may start at once.
	if err := schedule.Sleep(ctx, rand.N(w.o.Interval)); err != nil {
		return context.Cause(ctx)
	}
	retry := schedule.Backoff{Min: time.Second, Max: time.Minute, Jitter: 0.5}
	failing := ""
	for {
		wrote, err := w.step(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			if kind := kindOf(err); kind != failing { // an API server that is away is logged once
				w.o.Logger.Warn("cannot write the inventory of this node", "node", w.o.Node, "err", err)
				failing = kind
			}
			w.forget()
			_ = schedule.Sleep(ctx, retry.Next())
			continue
		}
		if failing != "" {
			w.o.Logger.Info("inventory of this node is written again", "node", w.o.Node)
			failing = ""
		}
		retry.Reset()
		if wrote { // a renewal does not wait for an interval that is longer
			_ = schedule.Sleep(ctx, min(w.o.Interval+rand.N(w.o.Interval/5+1), time.Until(w.renewAt)))
		}
		w.await(ctx)
	}
}

// await waits for a change and those that come with it, or until the object must be renewed.
func (w *Writer) await(ctx context.Context) {
	_ = schedule.Wait(ctx, w.renewAt, w.o.Changed)
	_ = schedule.Sleep(ctx, settle)
}

// step writes the object if it is not as it should be.
func (w *Writer) step(ctx context.Context) (wrote bool, err error) {
	defer func() { w.note(wrote, err) }()
	for {
		if err := w.connect(ctx); err != nil {
			return false, err
		}
		report := w.o.Report(ctx)
		w.kept.apply(report.Ports)
		status, err := build(report, w.limit)
		if err != nil {
			return false, err
		}
		if w.isCurrent(status) {
			return false, nil
		}
		if w.moved() {
			continue
		}
		next := w.next(status)
		stored, err := w.client.put(ctx, next)
		if tooLarge(err) && w.limit > minBytes {
			w.limit /= 2
			continue
		}
		if err != nil {
			return false, w.explainPut(ctx, next, err)
		}
		if stored.Status.Hash != status.Hash || len(stored.Status.List) != len(status.List) {
			return false, fmt.Errorf("%w: it drops fields of %s.%s: apply the crd.yaml of this fairlead", ErrNoCRD, Resource, Group)
		}
		w.current, w.renewAt = stored, time.Now().Add(RenewEvery-rand.N(renewSpread))
		return true, nil
	}
}

// minBytes is the least bound of a list that is tried.
const minBytes = 4 << 10

// isCurrent reports whether the server has that content, written by this holder not long ago.
func (w *Writer) isCurrent(s Status) bool {
	have := w.current.Status
	return have.Hash == s.Hash && have.Holder.same(w.holder()) && owned(w.current, w.owner) && time.Now().Before(w.renewAt)
}

// owned reports whether an object belongs to the Node with that UID, and to nobody else.
func owned(n *NodeInventory, by types.UID) bool {
	r := n.OwnerReferences
	return len(r) == 1 && r[0].Kind == "Node" && r[0].UID == by
}

func (w *Writer) holder() Holder { return Holder{Machine: w.o.Machine, Namespace: w.o.Namespace} }

// next is the object with that content.
func (w *Writer) next(s Status) *NodeInventory {
	n, now := *w.current, metav1.Now().Rfc3339Copy()
	s.Holder, s.Updated = w.holder(), now
	s.Holder.Renewed = now
	if n.Status.Hash == s.Hash {
		s.Updated = n.Status.Updated
	}
	for i := range s.Conditions {
		s.Conditions[i].LastTransitionTime = now
		for _, c := range n.Status.Conditions {
			if c.Type == s.Conditions[i].Type && c.Status == s.Conditions[i].Status {
				s.Conditions[i].LastTransitionTime = c.LastTransitionTime
			}
		}
	}
	n.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: w.o.Node, UID: w.owner}}
	n.Status, n.ManagedFields = s, nil // the server keeps these
	return &n
}

// connect takes the lock, connects and reads what the server has, unless that is done. It
// reads the Node again as often as the object is renewed: it may have been made anew.
func (w *Writer) connect(ctx context.Context) error {
	if w.moved() {
		w.forget()
		w.renewAt = time.Time{} // what this server has may be as old as may be
	}
	if w.current != nil && time.Now().Before(w.readAt) {
		return nil
	}
	n, err := w.readNode(ctx)
	w.noteNode(n, err)
	if err != nil || w.current != nil {
		return err
	}
	return w.read(ctx, n.Status.NodeInfo.BootID)
}

// moved reports whether the client is not of the server and credentials that are configured now.
func (w *Writer) moved() bool {
	if w.client == nil {
		return false
	}
	conf, _, err := w.o.Config()
	return err != nil || conf != w.conf
}

// open takes the lock and makes a client.
func (w *Writer) open(ctx context.Context) error {
	if w.release == nil {
		release, err := w.o.Lock(ctx, w.o.Node)
		if err != nil {
			return err
		}
		w.release = release
	}
	if w.client != nil {
		return nil
	}
	conf, origin, err := w.o.Config()
	if err != nil {
		return err
	}
	if w.client, err = NewClient(conf); err != nil {
		return fmt.Errorf("%s: %w", origin, err)
	}
	w.conf = conf
	return nil
}

// readNode finds out who owns the object, and whether this machine is that node.
func (w *Writer) readNode(ctx context.Context) (*node, error) {
	if err := w.open(ctx); err != nil {
		return nil, err
	}
	n, err := w.client.node(ctx, w.o.Node)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%w: set cluster.nodeName to the name of this machine's Node", err)
	}
	if err != nil {
		return nil, explain("get", "nodes", err)
	}
	if boot := n.Status.NodeInfo.BootID; boot != "" && boot != w.o.Machine {
		return nil, fmt.Errorf("%w: boot id %s is what the kubelet of node %q reports, and this machine has %s: set cluster.nodeName, or wait for the kubelet",
			ErrHeld, boot, w.o.Node, w.o.Machine)
	}
	w.owner, w.readAt = n.UID, time.Now().Add(RenewEvery-renewSpread)
	return n, nil
}

// noteNode keeps the labels of the Node, or why they are not known.
func (w *Writer) noteNode(n *node, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.node.Err = err; err == nil {
		w.node.Known, w.node.Labels = true, n.Labels
	}
}

// read finds out what the server has, and whether this agent may replace it.
func (w *Writer) read(ctx context.Context, boot string) error {
	have, err := w.client.Get(ctx, w.o.Node)
	if apierrors.IsNotFound(err) {
		have, err = new(NodeInventory), nil // or there is no such resource, as creating the object shows
		have.Name = w.o.Node
	}
	if err != nil {
		return w.client.explain(ctx, "get", err)
	}
	if err := w.mayTake(have, boot); err != nil {
		return err
	}
	w.current = have
	if w.kept == nil {
		w.kept = w.keep(have.Status)
	}
	return nil
}

// keep reads what an earlier agent of this holder wrote, which need not be written again.
func (w *Writer) keep(have Status) *kept {
	k := new(kept)
	if !have.Holder.same(w.holder()) {
		return k
	}
	if age := time.Since(have.Holder.Renewed.Time); age >= 0 {
		w.renewAt = time.Now().Add(RenewEvery - age)
	}
	ports, err := have.Decode()
	if err != nil {
		w.o.Logger.Warn("cannot read what an earlier agent wrote; ports are open since this one started", "node", w.o.Node, "err", err)
	}
	k.earlier = ports
	return k
}

// mayTake returns nil if the object belongs to nobody, to this holder, to one of an
// earlier boot of the node, or to one that has not renewed it for long. That is measured
// from when this agent first saw it, as clocks differ.
func (w *Writer) mayTake(have *NodeInventory, boot string) error {
	h := have.Status.Holder
	gone := boot == w.o.Machine && h.Machine != boot
	if h.Machine == "" || h.same(w.holder()) || gone {
		return nil
	}
	if !h.same(w.other) || !h.Renewed.Equal(&w.other.Renewed) {
		w.other, w.otherSince = h, time.Now()
	}
	if time.Since(w.otherSince) > HeldFor {
		return nil
	}
	return fmt.Errorf("%w: the one with boot id %s in network namespace %s last did at %s: stop one of the two; this one takes over %s after the last write of the other",
		ErrHeld, h.Machine, h.Namespace, h.Renewed.UTC().Format(time.RFC3339), HeldFor)
}

func (w *Writer) explainPut(ctx context.Context, n *NodeInventory, err error) error {
	verb := "update"
	if n.ResourceVersion == "" {
		verb = "create"
	}
	return w.client.explain(ctx, verb, err)
}

// tooLarge reports whether the API server, or its etcd, refused an object for its size.
func tooLarge(err error) bool {
	return apierrors.IsRequestEntityTooLargeError(err) || err != nil && strings.Contains(err.Error(), "request is too large")
}

// forget ends the session: the next step reads all anew. The lock is kept.
func (w *Writer) forget() {
	w.current = nil
	if w.client != nil {
		w.client.Close()
		w.client = nil
	}
}

func (w *Writer) close() {
	w.forget()
	if w.release != nil {
		w.release()
	}
}

func (w *Writer) note(wrote bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state.Error, w.state.Held, w.state.Current = "", errors.Is(err, ErrHeld), err == nil
	switch {
	case err != nil:
		w.state.Error = err.Error()
		w.state.Fails++
	case wrote:
		w.state.Written = time.Now()
		w.state.Writes++
		w.state.Omitted = w.current.Status.ListOmitted
	}
}

// kindOf classifies failures, so that each kind is logged once.
func kindOf(err error) string {
	switch status := apierrors.APIStatus(nil); {
	case errors.Is(err, ErrHeld):
		return "held"
	case errors.Is(err, ErrForbidden):
		return err.Error() // each verb
	case errors.Is(err, ErrNoCRD):
		return "crd"
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return "conflict"
	case errors.As(err, &status) && status.Status().Code < 500 && status.Status().Code != 429:
		return string(status.Status().Reason)
	}
	return "away"
}
