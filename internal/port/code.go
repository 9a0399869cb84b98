// SPDX-License-Identifier: Apache-2.0

package port

import "strings"

// Code says why a row has its state. What is decided by a reason is decided by its code; the
// table below gives each its text.
type Code uint8

// The codes.
const (
	Unstated Code = iota

	// Why a binding alone is no reason to publish.
	Unlistened       // a TCP socket that is bound and does not listen
	MulticastAddress // of a socket
	BroadcastAddress // of a socket
	AddressNowhere   // no interface has the address of a socket
	InterfaceLacks   // the interface of a socket does not have its address
	InterfaceBare    // the interface of a socket has no address
	InterfaceDown    // the interface of a socket is down
	AddressStands    // the address of a socket stands for containers that publish on request
	AddressElsewhere // an engine declares a port at an address of another machine
	NoAddress        // this machine has no address of the family
	LeavesOutReached // a NAT rule leaves out what other machines reach
	FromSources      // a NAT rule or a Service is for some sources
	FromList         // a NAT rule is for sources in a set
	FromHere         // a NAT rule is for local sources
	WithoutUplink    // a NAT rule leaves out the interface of the default route
	OnInterface      // a NAT rule is for one interface
	ForTheGuest      // a NAT rule is for programs of the guest
	ManyRulesBefore  // too many NAT rules come first
	OverlappedRules  // too many NAT rules that overlap come first
	EarlierMarks     // an earlier NAT rule marks packets
	EarlierTable     // an earlier NAT rule of another table takes some of its packets
	EarlierChanging  // an earlier NAT rule for sources that come and go may take the packets
	EarlierUnread    // an earlier NAT rule that is not understood may take the packets
	LeftBehind       // the NAT rule of a container that has stopped
	Reserved         // a socket that only keeps others from the port of a container or Service
	Hidden           // another server has all addresses that the guest could dial

	// Why rules decide against a publication, or do not decide yet.
	WellKnownUDP   // a UDP port of the guest's own network
	EnginesOwn     // a port by which an engine talks to itself
	DeniedByRule   // a rule, or a label, denies it
	DeniedOther    // a rule denies another owner who serves it
	DeniedOtherCut // the same, perhaps: the guest left out by what the rule tells owners apart
	DeniedCut      // a rule may deny it: the guest left out by what it tells owners apart
	DeniedHostPort // a rule denies the host port that a label asks for
	NoHostPort     // the host port that a rule gives is none
	NoHostAddress  // a rule of the host names no address
	NothingAsked   // the guest asks for no host address
	OwnerAwaited   // it depends on an owner who is not known yet
	OwnerContested // it depends on who of several owners serves it

	// Why a port that is asked for by name is not there.
	NoDirectory      // no source knows names
	TooManyDemands   // more names than are looked up
	NoService        // no Service has the name
	NoContainer      // no container has the name
	NoContainerOf    // no container of a project or namespace has the name
	ServiceAmbiguous // Services of several clusters have the name
	NameAmbiguous    // several containers have the name
	NoOwnAddress     // the container has no address of its own
	ServiceLacksPort // the Service does not have the port
	ServiceIdle      // no endpoint of the Service is ready
	ServiceUnread    // nothing of the Service can be dialled, as far as it can be read
	LookedFor        // nobody has looked yet

	// Who has a host address.
	HeldBy          // another publication, or what else of this program
	HeldByRival     // a publication of another guest
	HeldElsewhere   // what a guest is told of HeldByRival
	InUse           // another program
	InUseBy         // another program, which is known
	InUseByRelay    // WSL's own relay
	InUseSocket     // another socket of the guest
	HeldByOwnSocket // a socket of the publication, in one family alone
	HeldForItself   // a socket that only keeps others from the port of the publication
	PeerForwards    // the peer, for another program
	PeerInUse       // another program, where a peer would listen
	PeerPortTaken   // another publication, at a peer with one listener for each port
	NoneFree        // and no other port was found for it

	// Why a port cannot be opened.
	SystemFailed     // an error
	RangeReserved    // the operating system reserves the port
	NotPermitted     // a host may not listen there
	NeedsPrivilege   // a placeholder may not listen there
	NotOfHost        // the host does not have the address
	TooManyListeners // a limit of the host
	Unsendable       // it does not fit on the link
	UDPDisabled      // the listener sink does not serve UDP
	NotRelayed       // WSL's relay does not show the address
	PeerPicksNone    // a peer cannot choose a port
	PeerReserved     // the host does not let a peer listen there
	PeerPrivileged   // the same, of a port below 1024
	PeerLacks        // the host of a peer does not have the address
	PeerRefuses      // a peer refuses it for another reason
	PeerLacksUDP     // a peer forwards TCP alone
	PeerOneWay       // a peer forwards datagrams one way
	PeerFamily       // a peer reaches the guest by the other family alone
	GuestServes      // the guest serves an address that a peer cannot connect to
	GuestServesAt    // the same, and where the peer connects to
	GuestPort        // a peer connects to the same port alone
	InnerRule        // only programs of the guest meet the NAT rule
	NeedsBridge      // a bridge to the loopback is not asked for
	NoBridge         // a bridge cannot be opened

	// What a port waits for.
	NoHost       // the link has no session
	Unanswered   // the host has not answered
	Unstatement  // the host answered without an outcome
	NotConnected // a peer was not asked yet
	NoPeer       // no peer answers
	PeerDown     // a peer does not answer
	PeerUnproved // no gvproxy is proved
	PeerMoves    // gvproxy is at another address now
	PeerFailed   // an error of a peer
	Unserved     // nothing serves a declared port
	NotServedYet // nothing serves what a rule allows
	GuestLacks   // the guest publishes nothing of the name
	Released     // a program wants the port
	Settling     // a server of its own may take the port
	PodmanBegins // Podman has opened the port
	PodmanOpens  // Podman is to open the port
	EntryGone    // another program may want the port again

	// What is to be known of a port, or a rule, that is as it should be.
	Moved         // it has another host port
	ByLabel       // labels of the owner decided
	OpenUntil     // other machines reach it for a time
	ClosesNothing // a rule that denies denies nothing now

	codes // how many
)

type codeInfo struct {
	name    string // in JSON and on the link
	text    string // {0}, {1} and {2} are arguments, {rule} is the rule
	kind    Kind
	reach   Reach   // of what is withheld: who reaches it all the same
	verdict Verdict // the kind's if empty
	advice  string  // the kind's if empty
}

// Kind is what a reason does.
type Kind uint8

// The kinds of reasons.
const (
	Denies    Kind = iota + 1 // the port is closed, as somebody said
	Withholds                 // nobody closes the port, but nothing is a reason to publish it either
	Waits                     // for what may come
	Conflicts                 // somebody else has the host address
	Fails                     // the port cannot be opened
	Notes                     // nothing
)

var kinds = [...]struct {
	verdict Verdict
	advice  string
}{
	0:         {"", "ask again in a moment"}, // no reason yet
	Denies:    {VerdictDenied, "{change}"},
	Withholds: {VerdictWithheld, "{allow}"},
	Waits:     {VerdictPending, "ask again in a moment"},
	Conflicts: {VerdictConflict, "stop the program that uses {address} on the host (fairlead takes the port over within seconds), or {relocate}"},
	Fails:     {VerdictFailed, "correct that: fairlead retries by itself; if it keeps failing, run `fairlead doctor`"},
	Notes:     {},
}

const (
	adviseListen    = "have the server listen on an address of the guest, or on all; a rule does not help"
	adviseInterface = "give the interface an address that the server listens on, or start the server without binding it to an interface; a rule does not help"
	adviseHeld      = "stop what has it, or {relocate}"
)

var codeTable = [codes]codeInfo{
	Unlistened:       {name: "unlistened", text: "bound, not listening", kind: Withholds, reach: Nobody, verdict: VerdictUnlistened, advice: "wait until the program calls listen(), or find out why it does not; a rule for the port publishes it anyway"},
	MulticastAddress: {name: "multicast-address", text: "bound to a multicast address: no answer can come from there", kind: Withholds, reach: Some, advice: adviseListen},
	BroadcastAddress: {name: "broadcast-address", text: "bound to a broadcast address: no answer can come from there", kind: Withholds, reach: Some, advice: adviseListen},
	AddressNowhere:   {name: "address-nowhere", text: "bound to an address that no interface has", kind: Withholds, reach: Nobody, advice: adviseListen},
	InterfaceLacks:   {name: "interface-lacks-address", text: "bound to interface {0}, which does not have the address", kind: Withholds, reach: Some, verdict: VerdictInterface, advice: adviseInterface},
	InterfaceBare:    {name: "interface-without-address", text: "bound to interface {0}, which has no address", kind: Withholds, reach: Some, verdict: VerdictInterface, advice: adviseInterface},
	InterfaceDown:    {name: "interface-down", text: "bound to interface {0}, which is down", kind: Withholds, reach: Nobody, verdict: VerdictInterface, advice: "bring the interface up, or start the server without binding it to an interface; a rule does not help"},
	AddressStands:    {name: "address-stands", text: "at an address that stands for containers which publish on request: no server of the guest is dialled there", kind: Withholds, reach: Nobody, advice: "have the server listen on another address of the loopback; a rule does not help"},
	AddressElsewhere: {name: "address-elsewhere", text: "this machine does not have the address", kind: Withholds, reach: Nobody},
	NoAddress:        {name: "no-address", text: "this machine has no address of this family that other machines reach", kind: Withholds, reach: Nobody},
	LeavesOutReached: {name: "leaves-out-reached", text: "leaves out every address that other machines reach", kind: Withholds, reach: Nobody},
	FromSources:      {name: "from-sources", text: "limited to source {0}", kind: Withholds, reach: Some, verdict: VerdictSourceOnly},
	FromList:         {name: "from-list", text: "limited to sources in {0}", kind: Withholds, reach: Some, verdict: VerdictSourceOnly},
	FromHere:         {name: "from-here", text: "limited to local sources", kind: Withholds, reach: Nobody, verdict: VerdictSourceOnly},
	WithoutUplink:    {name: "without-uplink", text: "excludes interface {0}, by which other machines come in", kind: Withholds, reach: Some, verdict: VerdictInterface},
	OnInterface:      {name: "on-interface", text: "limited to interface {0}", kind: Withholds, reach: Some, verdict: VerdictInterface},
	ForTheGuest:      {name: "for-the-guest", text: "for programs of the guest alone, while others reach another address of it", kind: Withholds, reach: Nobody},
	ManyRulesBefore:  {name: "many-rules-before", text: "too many rules come before it", kind: Withholds, reach: Some},
	OverlappedRules:  {name: "overlapped-rules", text: "too many rules that overlap come before it", kind: Withholds, reach: Some},
	EarlierMarks:     {name: "earlier-rule-marks", text: "an earlier rule tests the packet mark, which another table may set: {0}", kind: Withholds, reach: Some},
	EarlierTable:     {name: "earlier-rule-of-another-table", text: "an earlier rule of another table takes some of its packets: {0}", kind: Withholds, reach: Some},
	EarlierChanging:  {name: "earlier-rule-changes", text: "may be decided by an earlier rule for sources that come and go: {0}", kind: Withholds, reach: Some},
	EarlierUnread:    {name: "earlier-rule-unread", text: "may be decided by an earlier rule that is not understood: {0}", kind: Withholds, reach: Some},
	LeftBehind:       {name: "left-behind", text: "left behind by container {0}, stopped", kind: Withholds, reach: Nobody},
	Reserved:         {name: "reserved", text: "only reserves the port for a container or Service: nobody serves there", kind: Withholds, reach: Some},
	Hidden:           {name: "hidden", text: "hidden by {0}, which serves where the guest could reach it", kind: Withholds, reach: Some},

	WellKnownUDP:   {name: "well-known-udp", text: "a service of the guest's own network; an allow rule that names the port publishes it", kind: Denies, verdict: VerdictWellKnown, advice: "{allow}"},
	EnginesOwn:     {name: "engines-own", text: "a port of an engine itself; an allow rule that names the port publishes it", kind: Denies, verdict: VerdictWellKnown, advice: "{allow}"},
	DeniedByRule:   {name: "denied", text: "denied by {rule}", kind: Denies},
	DeniedOther:    {name: "other-denied", text: "denied by {rule}: {0} serves it, too", kind: Denies},
	DeniedOtherCut: {name: "other-cut", text: "denied by {rule}: {0} serves it, too, and {1} were left out by the guest, because they are too many or too long", kind: Denies},
	DeniedCut:      {name: "owner-cut", text: "denied by {rule}, which may match: {0} were left out by the guest, because they are too many or too long", kind: Denies},
	DeniedHostPort: {name: "host-port-denied", text: "denied by {rule}, which is about the host port {0} that a label asks for", kind: Denies},
	NoHostPort:     {name: "no-host-port", text: "{rule}: host port {0} is not within 1 to 65535", kind: Denies},
	NoHostAddress:  {name: "no-host-address", text: "{rule} names no host address", kind: Denies},
	NothingAsked:   {name: "nothing-asked", text: "the guest asks for no host address", kind: Denies, verdict: VerdictHostDenied},
	UDPDisabled:    {name: "udp-disabled", text: "UDP is not enabled (listener.udp); WSL's relay carries none", kind: Denies, advice: "set listener.udp (--listener-udp) of the agent, for peers other than WSL's relay"},

	OwnerAwaited:     {name: "owner-awaited", text: "owner not known yet", kind: Waits, advice: "ask again in a moment; a port stays so while an engine is starting or stale (`fairlead ls` shows the sources)"},
	OwnerContested:   {name: "owner-contested", text: "owner not certain: claimed for {0}", kind: Waits, advice: "stop one of them, or change {rule}"},
	NoDirectory:      {name: "no-directory", text: "no source knows containers or Services: enable docker, containerd or kube (--source)", kind: Waits},
	TooManyDemands:   {name: "too-many-names", text: "more than {0} ports are asked for by name", kind: Waits},
	NoService:        {name: "no-service", text: "there is no Service {0}/{1}", kind: Waits},
	NoContainer:      {name: "no-container", text: "no running container has the name {0}", kind: Waits},
	NoContainerOf:    {name: "no-container-of", text: "no running container is {0} of the project or namespace {1}", kind: Waits},
	ServiceAmbiguous: {name: "service-ambiguous", text: "{0} is in {1} clusters: {2}; name a pod of it instead", kind: Waits},
	NameAmbiguous:    {name: "name-ambiguous", text: "{0} names {1} containers: name one of {2}", kind: Waits},
	NoOwnAddress:     {name: "no-own-address", text: "container {0} has no address of its own that this guest reaches: if it is in the guest's network, forward its port as one of the guest: `fairlead forward add {1}`; if it is in that of a pod or of another container, name that; else publish the port", kind: Waits},
	ServiceLacksPort: {name: "service-lacks-port", text: "Service {0} has no port {1}{2}", kind: Waits},
	ServiceIdle:      {name: "service-idle", text: "nothing serves Service {0}: port {1} has no ready endpoints", kind: Waits},
	ServiceUnread:    {name: "service-unread", text: "Service {0} has no cluster IP, and its endpoints cannot be read", kind: Waits},
	LookedFor:        {name: "looked-for", text: "it is being looked for", kind: Waits},

	HeldBy:          {name: "held", text: "{0} is held by {1}", kind: Conflicts, advice: adviseHeld},
	HeldByRival:     {name: "held-by-rival", text: "{0} is held by {1}", kind: Conflicts, advice: adviseHeld},
	HeldElsewhere:   {name: "held-elsewhere", text: "{0} is held by a port of another guest", kind: Conflicts, advice: adviseHeld},
	InUse:           {name: "in-use", text: "{0} is in use by another process", kind: Conflicts},
	InUseBy:         {name: "in-use-by", text: "{0} is in use by {1} (pid {2})", kind: Conflicts},
	InUseByRelay:    {name: "in-use-by-relay", text: "{0} is in use by {1} (pid {2})", kind: Conflicts},
	InUseSocket:     {name: "in-use-by-socket", text: "{0} is in use by another socket", kind: Conflicts},
	HeldByOwnSocket: {name: "held-by-own-socket", text: "its own socket at [::]:{0} holds IPv4 too, which WSL's relay shows at ::1 only", kind: Conflicts},
	HeldForItself:   {name: "held-for-itself", text: "{0} is held by {1}, while a NAT rule serves the port", kind: Conflicts, advice: "{relocate}, or take the host peer (`--sink hostlink`); Podman 6.1 shows the port to WSL with `force_port_listen = true` in containers.conf"},
	PeerForwards:    {name: "peer-forwards", text: "the peer forwards it to {0} already", kind: Conflicts},
	PeerInUse:       {name: "peer-in-use", text: "another program of the host holds {0}", kind: Conflicts},
	NoneFree:        {name: "none-free", text: "onConflict: {0} found none of up to {1} other ports free; any tries 20000 to 32767", kind: Conflicts},
	PeerPortTaken:   {name: "peer-port-taken", text: "wsl-proxy has one listener for each port, and {0} has it", kind: Conflicts},

	SystemFailed:     {name: "system", text: "{0}", kind: Fails},
	RangeReserved:    {name: "range-reserved", text: "{0} reserves ports {1}: remap {2} by a rule (hostPort), or free the range", kind: Fails},
	NotPermitted:     {name: "not-permitted", text: "listen on {0}: {1}", kind: Fails},
	NeedsPrivilege:   {name: "needs-privilege", text: "listen on {0}: permission denied: grant CAP_NET_BIND_SERVICE, or run {1}", kind: Fails},
	NotOfHost:        {name: "not-of-host", text: "{0} is not an address of this host", kind: Fails},
	TooManyListeners: {name: "too-many-listeners", text: "limit of {0} listeners for this guest reached (--max-listeners), which its owners share", kind: Fails, advice: "raise limits.listeners (--max-listeners) of `fairlead host`, or deny ports that nobody needs"},
	Unsendable:       {name: "unsendable", text: "cannot be sent to the host: {0}", kind: Fails},
	NotRelayed:       {name: "not-relayed", text: "only 127.0.0.1, 0.0.0.0, ::1 and :: can be opened in the guest", kind: Fails},
	PeerPicksNone:    {name: "peer-picks-none", text: "the peer cannot choose a free port: a rule must name one", kind: Fails},
	PeerReserved:     {name: "peer-reserved", text: "the host does not let the peer listen on {0}: the host may have reserved it", kind: Fails},
	PeerPrivileged:   {name: "peer-privileged", text: "the host does not let the peer listen on {0}: ports below 1024 may need an administrator: a rule can give it another host port", kind: Fails},
	PeerLacks:        {name: "peer-lacks-address", text: "{0} is no address of the host", kind: Fails},
	PeerRefuses:      {name: "peer-refuses", text: "the peer {0}", kind: Fails},
	PeerLacksUDP:     {name: "peer-lacks-udp", text: "vtunnel's peer forwards TCP alone, as netsh does", kind: Fails},
	PeerOneWay:       {name: "peer-one-way", text: "wsl-proxy carries datagrams to the guest and no answers back", kind: Fails},
	PeerFamily:       {name: "peer-family", text: "the peer connects to {0}, which has no {1} address", kind: Fails},
	GuestServes:      {name: "guest-serves", text: "the guest serves {0} alone, which the peer cannot connect to", kind: Fails},
	GuestServesAt:    {name: "guest-serves-at", text: "the guest serves {0} alone, and the peer connects to {1}", kind: Fails},
	GuestPort:        {name: "guest-port", text: "the guest serves port {0}, and the peer connects to {1}", kind: Fails},
	InnerRule:        {name: "inner-rule", text: "only programs of the guest meet its NAT rule", kind: Fails},
	NeedsBridge:      {name: "needs-bridge", text: "--bridge-loopback opens it to the peer", kind: Fails},
	NoBridge:         {name: "no-bridge", text: "no bridge can be opened at {0}: {1}", kind: Fails},

	NoHost:       {name: "no-host", text: "no host connected", kind: Waits, verdict: VerdictNoHost, advice: "start `fairlead host` on the host, or read its log"},
	Unanswered:   {name: "unanswered", text: "the host has not answered yet", kind: Waits},
	Unstatement:  {name: "no-outcome", text: "the host acknowledged it without an outcome", kind: Waits},
	NotConnected: {name: "not-connected", text: "not yet connected", kind: Waits},
	NoPeer:       {name: "no-peer", text: "no peer: {0}", kind: Waits},
	PeerDown:     {name: "peer-down", text: "{0} cannot be reached: {1}", kind: Waits},
	PeerUnproved: {name: "peer-unproved", text: "{0}", kind: Waits},
	PeerMoves:    {name: "peer-moves", text: "the gvproxy moved to {0}", kind: Waits},
	PeerFailed:   {name: "peer-failed", text: "{0}", kind: Waits},
	Unserved:     {name: "unserved", text: "nothing is known to serve it", kind: Waits},
	NotServedYet: {name: "not-served-yet", text: "nothing serves it yet", kind: Waits},
	GuestLacks:   {name: "guest-lacks", text: "the guest publishes nothing as {0}: run `{1}` in the guest", kind: Waits},
	Released:     {name: "released", text: "released for {0}, which wants the port", kind: Waits},
	Settling:     {name: "settling", text: "opens unless a server of its own does within {0}", kind: Waits},
	PodmanBegins: {name: "podman-begins", text: "podman opened this port a moment ago, perhaps for a container that starts", kind: Waits},
	PodmanOpens:  {name: "podman-opens", text: "Podman opens the ports of its containers itself, and has no entry for this one", kind: Waits},
	EntryGone:    {name: "entry-gone", text: "another program removed its entry for port {0} a moment ago and may add it again", kind: Waits},

	ByLabel:       {name: "by-label", text: "{rule}", kind: Notes},
	Moved:         {name: "moved", text: "instead of host port {0}, which was in use", kind: Notes},
	OpenUntil:     {name: "open-until", text: "open to other machines until {0}", kind: Notes},
	ClosesNothing: {name: "closes-nothing", text: "closes nothing now", kind: Notes},
}

func (c Code) info() codeInfo {
	if c < codes {
		return codeTable[c]
	}
	return codeInfo{}
}

// String returns the name of the code in JSON and on the link.
func (c Code) String() string { return c.info().name }

// AppendText implements encoding.TextAppender.
func (c Code) AppendText(b []byte) ([]byte, error) { return append(b, c.String()...), nil }

// MarshalText implements encoding.TextMarshaler.
func (c Code) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler; a name that is not known is Unstated.
func (c *Code) UnmarshalText(b []byte) error {
	*c, _ = ParseCode(string(b))
	return nil
}

var codesByName = func() map[string]Code {
	m := make(map[string]Code, codes)
	for c := Unstated + 1; c < codes; c++ {
		m[c.String()] = c
	}
	return m
}()

// ParseCode returns the code with a name, and whether there is one.
func ParseCode(name string) (Code, bool) {
	c, ok := codesByName[name]
	return c, ok
}

// Kind returns what reasons with the code do, 0 of Unstated.
func (c Code) Kind() Kind { return c.info().kind }

// NamesRule reports whether the text names a rule.
func (c Code) NamesRule() bool { return strings.Contains(c.info().text, rulePlace) }

const rulePlace = "{rule}"

var argPlaces = [MaxArgs]string{"{0}", "{1}", "{2}"}

// Places returns how many arguments the text has.
func (c Code) Places() (n int) {
	for n < MaxArgs && strings.Contains(c.info().text, argPlaces[n]) {
		n++
	}
	return n
}
