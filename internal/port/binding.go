// SPDX-License-Identifier: Apache-2.0

package port

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// OwnerKind is what kind of thing serves a port. Higher kinds win attribution.
type OwnerKind uint8

// Owner kinds in rising order of preference.
const (
	OwnerUnknown OwnerKind = iota
	OwnerProcess
	OwnerService
	OwnerContainer
)

var ownerKinds = [...]string{"unknown", "process", "service", "container"}

// String returns the kind's name in JSON and in rules.
func (k OwnerKind) String() string {
	if int(k) < len(ownerKinds) {
		return ownerKinds[k]
	}
	return ownerKinds[OwnerUnknown]
}

// AppendText implements encoding.TextAppender.
func (k OwnerKind) AppendText(b []byte) ([]byte, error) { return append(b, k.String()...), nil }

// MarshalText implements encoding.TextMarshaler.
func (k OwnerKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler; a name that is not known means unknown.
func (k *OwnerKind) UnmarshalText(b []byte) error {
	*k = OwnerUnknown
	if i := slices.Index(ownerKinds[:], string(b)); i >= 0 {
		*k = OwnerKind(i)
	}
	return nil
}

// Owner is who serves a port. Name, Namespace and Labels come from the guest:
// they are data to be quoted, never markup or terminal input.
type Owner struct {
	Kind OwnerKind `json:"kind"`

	// What does not fit on the link is left out: of Labels whole labels, of Name and
	// Namespace the end. They stand here to take no room.
	LabelsOmitted bool `json:"labelsOmitted,omitzero"`
	NameCut       bool `json:"nameCut,omitzero"`

	Name      string            `json:"name"`
	ID        string            `json:"id"` // container id, namespace/name of a Service, or pid
	Namespace string            `json:"namespace,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"` // shared and immutable

	// Cluster is the name of the Kubernetes cluster that a Service or a pod is in, where several
	// are followed; "" where one is, or where the engine that names the owner does not know.
	Cluster string `json:"cluster,omitempty"`

	// LabelsLeftOut are the keys of all labels that were left out, in order. If LabelsOmitted
	// is set and this is empty, it may be any: they are too many.
	// A pointer takes less room. See LeftOut.
	LabelsLeftOut *[]string `json:"labelsLeftOut,omitempty"` // shared and immutable

	// Held is set of a container that a user's own engine names. What that engine says is the
	// user's word, and counts only for ports that processes of this user hold: see AsProcess.
	Held *Held `json:"held,omitempty"` // shared and immutable
}

// Held is how a container of a user's own engine holds its port.
type Held struct {
	Engine  string `json:"engine"`  // "docker", "podman" or "containerd"
	User    string `json:"user"`    // the user's name, or number
	Process string `json:"process"` // the name of the process that has the socket
}

// AsProcess returns the process that holds the port of a container with Held. Rules take the
// container for it: whoever may start containers as a user chooses their names.
func (o *Owner) AsProcess() Owner { return Owner{Kind: OwnerProcess, Name: o.Held.Process} }

// LeftOut returns LabelsLeftOut. The caller must not change them.
func (o *Owner) LeftOut() []string {
	if o.LabelsLeftOut == nil {
		return nil
	}
	return *o.LabelsLeftOut
}

// MayHave reports whether a label that is not in Labels may have been left out.
func (o *Owner) MayHave(label string) bool {
	return o.LabelsOmitted && (len(o.LeftOut()) == 0 || slices.Contains(o.LeftOut(), label))
}

// Equal reports whether both are the same.
func (o Owner) Equal(p Owner) bool {
	return o.Same(p) && o.Cluster == p.Cluster && o.Name == p.Name && maps.Equal(o.Labels, p.Labels) && o.LabelsOmitted == p.LabelsOmitted && o.NameCut == p.NameCut &&
		slices.Equal(o.LeftOut(), p.LeftOut()) && o.Held.equal(p.Held)
}

func (h *Held) equal(i *Held) bool { return h == i || h != nil && i != nil && *h == *i }

// Same reports whether both name the same thing, whatever they call it.
func (o Owner) Same(p Owner) bool {
	return o.Kind == p.Kind && o.ID == p.ID && o.Namespace == p.Namespace && o.MayShareCluster(p)
}

// MayShareCluster reports whether both are not known to be in different clusters.
func (o Owner) MayShareCluster(p Owner) bool {
	return o.Cluster == p.Cluster || o.Cluster == "" || p.Cluster == ""
}

// OtherOwner is an owner that a publication may lead to besides its own. Of processes there is
// one for each name, without a pid.
type OtherOwner struct {
	Owner

	// Rival marks an owner for whom an engine claims the same port: it is not certain
	// which one serves it. Otherwise a NAT rule leads to it, or it has a socket at the same
	// address and port. Rivals stay in the guest.
	Rival bool `json:"-"`
}

func (o OtherOwner) equal(p OtherOwner) bool { return o.Rival == p.Rival && o.Owner.Equal(p.Owner) }

// Hints are what a source knows of the server behind a binding, by which the
// registry finds its owner. They are never shown, and mean nothing outside this machine.
type Hints struct {
	// Cgroup is the id (the inode) of the socket's cgroup2 directory, 0 if not known.
	Cgroup uint64

	// Paths are cgroups as /proc/PID/cgroup names them, most specific first: of
	// the socket, or else of the process that made it, if it is certain which one
	// that was. They are shared and immutable.
	Paths []string

	// Targets are where a NAT rule sends what arrives at the port.
	Targets []netip.AddrPort

	// User is the user who owns a socket, as the kernel says; 0 is root, or not known.
	User uint32
}

// Equal reports whether both are the same.
func (h Hints) Equal(i Hints) bool {
	return h.Cgroup == i.Cgroup && h.User == i.User && slices.Equal(h.Paths, i.Paths) && slices.Equal(h.Targets, i.Targets)
}

// Sources whose bindings have a meaning of their own.
const (
	SourceSocket = "socket" // sockets of the guest
	SourceNAT    = "nat"    // NAT rules

	SourcePublish = "publish" // ports that containers asked for
)

// Family returns the source of which name is one of several: "kube" of "kube:k3s".
func Family(name string) string {
	family, _, _ := strings.Cut(name, ":")
	return family
}

// Origin is the object that a binding comes from. ID is unique within its source
// for as long as the object lives.
type Origin struct {
	Source string // SourceSocket, SourceNAT, SourcePublish, "docker", "podman", "containerd", "kube", "kube:k3s"; see Family
	ID     string // socket cookie, rule handle, container id and port, ...
}

// Maker is the program that wrote a NAT rule, as far as the rule's table and chain tell.
type Maker uint8

// The programs whose rules are recognised.
const (
	MakerUnknown Maker = iota
	MakerDocker
	MakerSwarm // Docker, for services of its swarm
	MakerCNI   // the portmap plugin
	MakerKubeProxy
	MakerNetavark // Podman
)

// String returns for example "kube-proxy".
func (m Maker) String() string {
	return [...]string{"unknown", "docker", "swarm", "cni", "kube-proxy", "netavark"}[min(m, MakerNetavark)]
}

// Binding is what one source saw: one origin that makes one port reachable.
// A binding is a value; its slices and maps are never changed after it is given away.
type Binding struct {
	Key
	Origin Origin

	// Mapped marks the IPv4 half of a socket at ::, which has an origin of its own. The kernel
	// prefers a socket of IPv4 at the same port.
	Mapped bool

	// Inner marks a NAT rule for the guest's own programs alone, which connections
	// from outside the guest do not match.
	Inner bool

	// Paused says that an engine has paused the container.
	Paused bool

	// Searching is true while the source searches for the process behind a socket.
	Searching bool

	// Maker is the program that wrote the NAT rule, or by whose rules a declared port is open.
	Maker Maker

	// Withheld, if there is a reason, is why this binding alone is no reason to
	// publish: an explicit allow rule, or another binding of the same key, is needed.
	Withheld Reason

	// Target identifies where a NAT rule leads: bindings with one Target lead to the same
	// servers. 0 means that it is not known well enough to be the same as another.
	Target uint64

	// Dial lists where the guest itself reaches the port, best first. Empty
	// means that nothing is known to serve it.
	Dial []netip.AddrPort

	// Doubt, when not empty, says why a connection of the guest to Dial may reach
	// another server than the clients of the port do.
	Doubt string

	// Owner is who serves the port as far as the source knows. Hints may name a
	// better one.
	Owner Owner
	Hints Hints

	// Detail describes the origin: "pid 811 (nginx)", a rule's text.
	Detail Detail

	// Since is when the source first saw the origin.
	Since time.Time

	// Observed is the kernel's CLOCK_MONOTONIC in nanoseconds at the event that
	// brought this binding, 0 when it comes from a dump.
	Observed int64
}

// Change is what one event or one commit changed in a source's set, applied as
// one step: first Drop, then Put. Put replaces the binding of an equal origin.
type Change struct {
	Put  []Binding
	Drop []Origin
}

// OriginInfo is an origin as a publication shows it.
type OriginInfo struct {
	Origin
	Detail   Detail
	Withheld Reason
	Mapped   bool   // see Binding
	Inner    bool   // see Binding
	Paused   bool   // see Binding
	Maker    Maker  // see Binding
	Doubt    string // see Binding
	Program  string // the name of the process that owns a socket, "" if it is not known
	Since    time.Time
	Dial     []netip.AddrPort
}

// LabelPrefix begins the labels, and annotations, by which owners ask for something.
const LabelPrefix = "fairlead."

// Ruling is what rules answer about a port: their decision, the name that a label gives the owner,
// and what stays on the machine that has the rules.
type Ruling struct {
	Decision
	Alias         string        // see Named
	Warnings      []string      // labels without effect, and why; with text from the guest
	OnConflict    OnConflict    // what the host does where a port is in use
	ProxyProtocol ProxyProtocol // how the server is told who connects
	Exposed       *time.Time    // until when a rule opens more addresses than usual; nil if none does; immutable
}

// OnConflict is what a host does where the port that a publication gets is in use.
type OnConflict uint8

// What a host can do. Without a choice it waits.
const (
	OnConflictUnset OnConflict = iota
	OnConflictWait             // until the port is free
	OnConflictNext             // open the next port that is free
	OnConflictAny              // open some port that is free
)

// Moves reports whether another port is opened.
func (c OnConflict) Moves() bool { return c >= OnConflictNext }

// String returns "wait", "next", "any", or "" if unset.
func (c OnConflict) String() string {
	return [...]string{"", "wait", "next", "any"}[min(c, OnConflictAny)]
}

// ProxyProtocol is whether, and how, a server is told the address of the client before the
// client's bytes.
type ProxyProtocol uint8

// What a server can be told. Without a choice it is told nothing.
const (
	ProxyProtocolNone ProxyProtocol = iota
	ProxyProtocolV2                 // a header of the PROXY protocol, version 2
)

// String returns "v2", or "" for none.
func (p ProxyProtocol) String() string {
	return [...]string{"", "v2"}[min(p, ProxyProtocolV2)]
}

// Publication is one entry of the merged table: what the guest tells a host of the port, and what
// never leaves the guest. It is immutable. There is one for each port, so small fields are side by
// side, and what few ports have is behind a pointer.
type Publication struct {
	Fact

	// Contained is true if a socket is in the cgroup of a container.
	Contained bool
	// SinceAtLeast is true if the port was open before Since, for an unknown time.
	SinceAtLeast  bool
	ProxyProtocol ProxyProtocol    // see Ruling
	Warned        *[]string        // see Warnings; shared and immutable
	Origins       []OriginInfo     // in an order that does not depend on when they were seen; at least one
	Dial          []netip.AddrPort // candidates in order, without repetition
	Since         time.Time        // when its first origin was seen
	Observed      int64            // see Binding; of the latest event that changed this publication
}

// Apply sets what rules answer about the port.
func (p *Publication) Apply(r Ruling) {
	p.Decision, p.ProxyProtocol, p.Warned = r.Decision, r.ProxyProtocol, nil
	p.SetNamed(r.Alias, p.Demands())
	if warned := r.Warnings; len(warned) > 0 {
		p.Warned = &warned
	}
}

// Warnings are the labels without effect. The caller must not change them.
func (p *Publication) Warnings() []string {
	if p.Warned == nil {
		return nil
	}
	return *p.Warned
}

// Sources yields the sources of the origins, in order; one may come several times. A host, which
// has no origins, knows the first source, and whether users asked for the port.
func (p *Publication) Sources() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range p.Origins {
			if !yield(p.Origins[i].Source) {
				return
			}
		}
		if len(p.Origins) > 0 || p.Source != "" && !yield(p.Source) {
			return
		}
		if len(p.Demands()) > 0 && p.Source != SourceDemand {
			yield(SourceDemand)
		}
	}
}

// Equal reports whether both would be shown and served alike. Observed does not count.
func (p Publication) Equal(q Publication) bool {
	return p.Fact.Equal(q.Fact) && p.Contained == q.Contained && p.SinceAtLeast == q.SinceAtLeast &&
		p.ProxyProtocol == q.ProxyProtocol && slices.Equal(p.Warnings(), q.Warnings()) &&
		slices.EqualFunc(p.Origins, q.Origins, OriginInfo.equal) && slices.Equal(p.Dial, q.Dial) && p.Since.Equal(q.Since)
}

// Inner reports whether connections from outside the guest do not match it: all
// its origins are NAT rules for the guest's own programs.
func (p Publication) Inner() bool {
	return len(p.Origins) > 0 && !slices.ContainsFunc(p.Origins, func(o OriginInfo) bool { return !o.Inner })
}

func (o OriginInfo) equal(p OriginInfo) bool {
	return o.Origin == p.Origin && o.Detail.Equal(p.Detail) && o.Withheld == p.Withheld && o.Mapped == p.Mapped && o.Inner == p.Inner && o.Paused == p.Paused && o.Maker == p.Maker && o.Program == p.Program && o.Doubt == p.Doubt &&
		o.Since.Equal(p.Since) && slices.Equal(o.Dial, p.Dial)
}

// Lack is why a source has nothing to observe.
type Lack uint8

// What a source may lack.
const (
	LackNothing  Lack = iota
	LackEngine        // nothing of an engine is there
	LackSettings      // there are settings, and they must not be used
)
