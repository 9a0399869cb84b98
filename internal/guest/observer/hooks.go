// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"encoding/binary"
	"fmt"

	"github.com/fairlead/fairlead/internal/guest/cgroup"
	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// hooks are the programs and maps of the observer in the kernel. It is the
// eventSource of an engine.
type hooks struct {
	*kernel.Ring
	object *kernel.Object
}

// openHooks makes the maps for the network namespace with inode netns. Nothing is
// attached yet.
func openHooks(types *kernel.Types, ringBytes int, netns uint32) (*kernel.Object, error) {
	pidns, err := kernel.PIDNamespace()
	if err != nil {
		return nil, err
	}
	return kernel.Open(types, kernel.Config{
		Files: []kernel.File{bpf.LoadSock, bpf.LoadSockKprobes},
		Constants: map[string]any{
			bpf.SockVarNetworkNamespace: netns, bpf.SockVarPidNamespace: pidns, bpf.SockVarCgroupV1: cgroup.HasV1("/proc"),
		},
		Maps:     []string{bpf.SockMapEvents, bpf.SockMapTracked, bpf.SockMapControls, bpf.SockMapLosses, bpf.SockMapOwners},
		Sizes:    map[string]uint32{bpf.SockMapEvents: uint32(ringBytes)},
		Optional: []string{"tcp_inet6_hash"}, // since Linux 6.18 both families use inet_hash
	})
}

func (h *hooks) takeLost() bool {
	// A plain read first: the store would take the cache line from the programs.
	lost := &h.Control().Lost
	return lost.Load() != 0 && lost.Swap(0) != 0
}

func (h *hooks) drops() (all, skipped uint64) {
	skipped = h.object.Misses()
	return h.losses() + skipped, skipped
}

// losses returns how many events found the ring full.
func (h *hooks) losses() (n uint64) {
	var perCPU []uint64
	if err := h.object.Map(bpf.SockMapLosses).Lookup(uint32(0), &perCPU); err != nil {
		return 0
	}
	for _, v := range perCPU {
		n += v
	}
	return n
}

func (h *hooks) open(open bool) {
	v := uint32(0)
	if open {
		v = 1
	}
	h.Control().Open.Store(v)
}

func (h *hooks) track(cookie uint64) error {
	return h.object.Map(bpf.SockMapTracked).Put(cookie, uint8(1))
}

func (h *hooks) untrack(cookie uint64) {
	_ = h.object.Map(bpf.SockMapTracked).Delete(cookie)
}

func (h *hooks) trackable() int { return int(h.object.Map(bpf.SockMapTracked).MaxEntries()) }

// explicitUDP returns the cookies of the UDP sockets in netns that were bound to
// an address or a port.
func explicitUDP(o *kernel.Object, netns *kernel.Namespace) (map[uint64]struct{}, error) {
	cookies := make(map[uint64]struct{})
	err := netns.Do(func() error {
		b, err := o.Iterate(bpf.SockProgUdpExplicit)
		for ; err == nil && len(b) >= 8; b = b[8:] {
			cookies[binary.NativeEndian.Uint64(b)] = struct{}{}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("iterate udp sockets: %w", err)
	}
	return cookies, nil
}
