// SPDX-License-Identifier: Apache-2.0

package vtunnel

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"strconv"

	"github.com/fairlead/fairlead/internal/guest/sink/peer"
)

// maxBindings is how many bindings one message to wsl-proxy carries. The privileged
// service gets one: it runs netsh for each, up to a tenth of a second, and ignores the
// rest of a message when one fails.
const maxBindings = 64

// message is what both peers read, one in each connection.
type message struct {
	Remove bool `json:"remove"`
	// Ports is keyed "PORT/PROTOCOL". wsl-proxy reads the protocol there and the port in
	// the binding; the privileged service takes every binding for TCP.
	Ports map[string][]binding `json:"ports"`
	// ConnectAddrs is where the peer connects to, at the host's port: the first
	// address of the binding's family. wsl-proxy has an address of its own, and is
	// sent null.
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

// encode makes the message that names the targets, maxBindings at most.
func encode(remove bool, targets []peer.Target, connect []connectAddr) []byte {
	m := message{Remove: remove, Ports: make(map[string][]binding), ConnectAddrs: connect}
	for _, t := range targets {
		k := t.Slot.String()
		m.Ports[k] = append(m.Ports[k], binding{t.Host.String(), strconv.Itoa(int(t.Port))})
	}
	var b bytes.Buffer
	_ = json.NewEncoder(&b).Encode(m) // of strings alone: it cannot fail
	return b.Bytes()
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
