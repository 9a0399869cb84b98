// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/sink/peer"
)

// maxBindings is how many bindings one message carries.
const maxBindings = 64

// message is what both peers read, one in each connection.
type message struct {
	Remove bool `json:"remove"`
	// Ports is keyed "PORT/PROTOCOL". The peers heed the protocol alone.
	Ports map[string][]binding `json:"ports"`
	// ConnectAddrs is where the peer connects to, at the host's port: the first
	// address of the binding's family. wsl-proxy has its own idea, and is told null.
	ConnectAddrs []connectAddr `json:"connectAddrs"`
}

type binding struct {
	HostIP   string `json:"HostIp"`
	HostPort string `json:"HostPort"`
}

// connectAddr is an address as net.Interface.Addrs gives it.
type connectAddr struct {
	Network string `json:"network"` // "ip+net"
	Addr    string `json:"addr"`    // with its prefix length
}

// target is one host address that the peer serves, or is to serve.
type target struct {
	slot port.Slot // protocol and host port
	host netip.Addr
}

func compareTargets(a, b target) int {
	return cmp.Or(peer.CompareSlots(a.slot, b.slot), a.host.Compare(b.host))
}

// encode makes the messages that name all targets, in order, each with the keys
// of the targets that it carries.
func encode(remove bool, targets []target, connect []connectAddr) (messages [][]byte, carried [][]target) {
	slices.SortFunc(targets, compareTargets)
	for part := range slices.Chunk(targets, maxBindings) {
		m := message{Remove: remove, Ports: make(map[string][]binding), ConnectAddrs: connect}
		for _, t := range part {
			k := t.slot.String()
			m.Ports[k] = append(m.Ports[k], binding{t.host.String(), strconv.Itoa(int(t.slot.Port))})
		}
		var b bytes.Buffer
		_ = json.NewEncoder(&b).Encode(m) // of strings alone: it cannot fail
		messages, carried = append(messages, b.Bytes()), append(carried, part)
	}
	return messages, carried
}

// connectAddrs are the addresses of the interface that the peer connects to.
func connectAddrs(nets []*net.IPNet) []connectAddr {
	list := make([]connectAddr, 0, len(nets))
	for _, n := range nets {
		list = append(list, connectAddr{n.Network(), n.String()})
	}
	return list
}

// first returns the address that a peer connects to for a binding of a family,
// with its prefix; false if there is none that works.
func first(nets []*net.IPNet, is4 bool) (netip.Prefix, bool) {
	for _, n := range nets {
		if a, ok := netip.AddrFromSlice(n.IP); ok && a.Unmap().Is4() == is4 {
			a = a.Unmap()
			bits, _ := n.Mask.Size()
			return netip.PrefixFrom(a, bits), is4 || !a.IsLinkLocalUnicast() // it is sent without a zone
		}
	}
	return netip.Prefix{}, false
}

// byHost is what one slot has, by host address.
type byHost[T any] map[netip.Addr]T

func sorted[T any](m byHost[T]) []netip.Addr {
	return slices.SortedFunc(maps.Keys(m), netip.Addr.Compare)
}
