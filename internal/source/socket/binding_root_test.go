// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package socket

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/test/kit/netns"
)

// TestAddressesOfAnInterface asks the kernel about the addresses of a new interface.
func TestAddressesOfAnInterface(t *testing.T) {
	space, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = space.Close() }()
	for _, args := range []string{
		"link add own0 type veth peer name other0", "addr add 10.9.9.1/24 broadcast + dev own0",
		"addr add fd09::1/64 nodad dev own0", "link set other0 up", "link set own0 up",
	} {
		cmd := exec.Command("ip", strings.Fields(args)...)
		if err := space.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatalf("ip %s: %v", args, err)
		}
	}
	err = space.Do(func() error {
		own, err := net.InterfaceByName("own0")
		if err != nil {
			return err
		}
		for text, want := range map[string]struct{ assigned, broadcast bool }{
			"10.9.9.1": {assigned: true}, "fd09::1": {assigned: true}, "10.9.9.2": {}, "10.9.9.255": {broadcast: true},
		} {
			addr := netip.MustParseAddr(text)
			if got := isAssigned(uint32(own.Index), addr); got != want.assigned {
				t.Errorf("isAssigned(%s) = %v", text, got)
			}
			if got := addr.Is4() && isBroadcast(addr); got != want.broadcast {
				t.Errorf("isBroadcast(%s) = %v", text, got)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
