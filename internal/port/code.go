// SPDX-License-Identifier: Apache-2.0

package port

import (
	"strconv"
	"strings"
)

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

	codes // how many
)

type codeInfo struct {
	name  string // in JSON and on the link
	text  string // {0}, {1}, {2} are arguments
	reach Reach  // who reaches it all the same
}

var codeTable = [codes]codeInfo{
	Unstated: {name: ""},

	Unlistened:       {"unlistened", "bound, not listening", Nobody},
	MulticastAddress: {"multicast-address", "bound to a multicast address: no answer can come from there", Some},
	BroadcastAddress: {"broadcast-address", "bound to a broadcast address: no answer can come from there", Some},
	AddressNowhere:   {"address-nowhere", "bound to an address that no interface has", Nobody},
	InterfaceLacks:   {"interface-lacks-address", "bound to interface {0}, which does not have the address", Some},
	InterfaceBare:    {"interface-without-address", "bound to interface {0}, which has no address", Some},
	AddressElsewhere: {"address-elsewhere", "this machine does not have the address", Nobody},
	NoAddress:        {"no-address", "this machine has no address of this family that other machines reach", Nobody},
	LeavesOutReached: {"leaves-out-reached", "leaves out every address that other machines reach", Nobody},
	FromSources:      {"from-sources", "limited to source {0}", Some},
	FromList:         {"from-list", "limited to sources in {0}", Some},
	FromHere:         {"from-here", "limited to local sources", Nobody},
	WithoutUplink:    {"without-uplink", "excludes interface {0}, which carries the default route", Some},
	OnInterface:      {"on-interface", "limited to interface {0}", Some},
	ForTheGuest:      {"for-the-guest", "for programs of the guest alone, while others reach another address of it", Nobody},
	ManyRulesBefore:  {"many-rules-before", "too many rules come before it", Some},
	OverlappedRules:  {"overlapped-rules", "too many rules that overlap come before it", Some},
	EarlierMarks:     {"earlier-rule-marks", "an earlier rule tests the packet mark, which another table may set: {0}", Some},
	EarlierTable:     {"earlier-rule-of-another-table", "an earlier rule of another table takes some of its packets: {0}", Some},
	EarlierChanging:  {"earlier-rule-changes", "may be decided by an earlier rule for sources that come and go: {0}", Some},
	EarlierUnread:    {"earlier-rule-unread", "may be decided by an earlier rule that is not understood: {0}", Some},
	LeftBehind:       {"left-behind", "left behind by container {0}, stopped", Nobody},
	Reserved:         {"reserved", "only reserves the port for a container or Service: nobody serves there", Some},
	Hidden:           {"hidden", "hidden by {0}, which serves where the guest could reach it", Some},
}

func (c Code) info() codeInfo {
	if c < codes {
		return codeTable[c]
	}
	return codeInfo{}
}

// String returns the name of the code in JSON and on the link.
func (c Code) String() string { return c.info().name }

// places returns how many arguments the text has.
func (c Code) places() (n int) {
	for text := c.info().text; strings.Contains(text, "{"+strconv.Itoa(n)+"}"); n++ {
	}
	return n
}
