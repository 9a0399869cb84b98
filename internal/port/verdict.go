// SPDX-License-Identifier: Apache-2.0

package port

// Verdict is the machine-readable answer of `fairlead explain`.
type Verdict string

// The verdicts.
const (
	VerdictActive      Verdict = "active"              // reachable on the host
	VerdictPartial     Verdict = "partial"             // reachable at some of the host addresses
	VerdictOneFamily   Verdict = "ipv6-only"           // reachable over IPv6 only
	VerdictUntested    Verdict = "not-tested"          // open on the host, the server was not dialled
	VerdictNoAnswer    Verdict = "no-answer"           // open on the host, the server does not answer
	VerdictNotServed   Verdict = "declared-not-served" // an engine declares it, but nothing serves it
	VerdictConflict    Verdict = "conflict"            // another program uses the host address
	VerdictHostDenied  Verdict = "denied-by-host"      // a rule of the host denies it
	VerdictDenied      Verdict = "denied-by-rule"      // a rule of the agent denies it
	VerdictWellKnown   Verdict = "well-known"          // denied by default: of a system service, or of an engine itself
	VerdictUnlistened  Verdict = "not-listening"       // TCP, bound but not listening
	VerdictInterface   Verdict = "interface-limited"   // a socket or a NAT rule of one interface
	VerdictSourceOnly  Verdict = "source-limited"      // a NAT rule for some clients only
	VerdictWithheld    Verdict = "withheld"            // not published for another reason
	VerdictNoHost      Verdict = "no-host"             // no host is connected
	VerdictGuestLost   Verdict = "guest-lost"          // open on the host, but its guest is not connected
	VerdictFailed      Verdict = "failed"              // a sink failed
	VerdictPending     Verdict = "pending"             // requested, no result yet
	VerdictOwn         Verdict = "own"                 // fairlead's own socket
	VerdictClient      Verdict = "udp-client"          // a UDP client's socket
	VerdictDisabled    Verdict = "source-disabled"     // it exists, but the source is disabled
	VerdictStarting    Verdict = "source-starting"     // a source is starting
	VerdictStale       Verdict = "source-stale"        // the source that would see it fails
	VerdictUnseen      Verdict = "not-yet-seen"        // it exists, but the source has not reported it
	VerdictNAT         Verdict = "nat-unsupported"     // a NAT rule with an unsupported expression
	VerdictNetNS       Verdict = "other-netns"         // it listens in another network namespace
	VerdictProtocol    Verdict = "other-protocol"      // it exists for the other protocol only
	VerdictHostPort    Verdict = "host-port"           // it is the host port of another guest port
	VerdictNothingHere Verdict = "nothing-listens"
)

// Reachable reports whether a client on the host reaches the port, as far as that was tested.
func (v Verdict) Reachable() bool {
	return v == VerdictActive || v == VerdictPartial || v == VerdictOneFamily || v == VerdictUntested
}
